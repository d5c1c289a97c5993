"""What must not happen structurally: wrong imports, slow cold starts, pickle, long files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(p for top in ("gla", "kernels", "tools") for p in (ROOT / top).rglob("*.py"))
MAX_LINES = 400
MAX_KERNEL_LINES = 1500  # of all files together

# Imports point from a higher number to a lower one, or stay within a package.
TIERS = {
    "errors": 0,
    "process": 0,
    "storage": 1,
    "tables": 1,
    "state": 2,
    "ops": 3,
    "testing": 4,
    "layers": 4,
    "models": 5,
    "data": 5,
    "generate": 6,
    "serve": 7,
    "train": 7,
    "compare": 8,
    "cli": 9,
}
HEAVY = (
    "torch",
    "triton",
    "transformers",
    "datasets",
    "tensorboard",
    "numpy",
    "pydantic",
    "aiohttp",
)
NOT_BY_IMPORT_GLA = ("triton", "gla_kernels", "transformers", "datasets", "tensorboard")
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def imported_modules(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the full name of all that a module imports, wherever in its code it does so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(parents) if node.level else ""
            module = ".".join(filter(None, [base, node.module or ""]))
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _called_name(node).endswith("import_module"):
            yield from (_start_of_string(argument) for argument in node.args[:1])


def _called_name(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _start_of_string(node: ast.AST) -> str:
    """The literal start of a string or f-string: ``f"gla.train.{name}"`` is ``gla.train.``."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    return str(node.value) if isinstance(node, ast.Constant) else ""


def module_package(path: Path) -> str:
    root = ROOT / "kernels" if "gla_kernels" in path.parts else ROOT
    return ".".join(path.relative_to(root).parts[:-1])


def part_of(module: str) -> str | None:
    """The part of gla that a dotted name lies in; None for other packages and gla's own root."""
    head, _, rest = module.partition(".")
    part = rest.split(".")[0]
    return part if head == "gla" and part in TIERS else None


def wrong_imports(path: Path, tree: ast.AST) -> list[str]:
    """Describe each import of a file that points the wrong way."""
    package = module_package(path)
    own = part_of(f"{package}.{path.stem}")
    faults = []
    for module in imported_modules(tree, package):
        target = part_of(module)
        top = module.split(".")[0]
        if package.startswith("gla_kernels"):
            wrong = top == "gla"
        elif own is None:  # gla/__init__.py and gla/__main__.py, which only name parts lazily
            wrong = top in HEAVY or top == "gla_kernels"
        elif top == "triton":
            wrong = True
        elif top == "gla_kernels":
            wrong = own != "ops"
        elif module == "gla":
            wrong = own != "cli"  # everything can be reached through it
        else:
            wrong = target is not None and target != own and TIERS[target] >= TIERS[own]
        if wrong:
            faults.append(f"{path.relative_to(ROOT)} imports {module}")
    return faults


def test_every_part_of_the_package_has_a_tier() -> None:
    parts = {p.stem for p in (ROOT / "gla").iterdir() if p.suffix == ".py" or p.is_dir()}
    assert parts - {"__init__", "__main__", "__pycache__"} == set(TIERS) & parts


def test_imports_point_one_way() -> None:
    assert SOURCES
    faults = [
        fault
        for path in SOURCES
        if "tools" not in path.relative_to(ROOT).parts
        for fault in wrong_imports(path, ast.parse(path.read_text()))
    ]
    assert not faults, "\n".join(faults)


def test_the_kernels_are_imported_at_one_site_only() -> None:
    sites = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "gla").rglob("*.py")
        for module in imported_modules(ast.parse(path.read_text()), module_package(path))
        if module.split(".")[0] == "gla_kernels"
    ]
    assert len(set(sites)) <= 1, sites


@pytest.mark.parametrize(
    ("where", "code"),
    [
        ("gla/ops/x.py", "from gla.layers import gates"),
        ("gla/ops/x.py", "def f():\n    import gla.models.config"),
        ("gla/state.py", "from gla import ops"),
        ("gla/state.py", "from .ops import recurrent"),
        ("gla/data/x.py", "from ..models import config"),
        ("gla/data/x.py", "import importlib\nimportlib.import_module('gla.train.loop')"),
        ("gla/data/x.py", "import importlib\nimportlib.import_module(f'gla.train.{x}')"),
        ("gla/data/x.py", "import gla"),
        ("gla/layers/x.py", "import triton"),
        ("gla/layers/x.py", "from gla_kernels import launch"),
        ("kernels/gla_kernels/x.py", "from gla.errors import GlaError"),
        ("gla/__init__.py", "import torch"),
    ],
)
def test_a_wrong_import_is_found(where: str, code: str) -> None:
    assert len(wrong_imports(ROOT / where, ast.parse(code))) == 1


def test_kernels_is_no_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "kernels" / "gla_kernels" / "__init__.py").exists()


def test_files_are_short_enough_to_be_read_whole() -> None:
    lengths = {p.relative_to(ROOT).as_posix(): len(p.read_text().splitlines()) for p in SOURCES}
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_the_kernels_are_short_enough_to_be_read_in_an_hour() -> None:
    lines = (len(p.read_text().splitlines()) for p in (ROOT / "kernels").rglob("*.py"))
    assert sum(lines) <= MAX_KERNEL_LINES


def pickles(tree: ast.AST) -> list[str]:
    """Name everything in a module that reads or writes pickles, or a file that holds one."""
    faults = [m for m in imported_modules(tree, "") if m.split(".")[0] in PICKLES]
    faults += [m for m in imported_modules(tree, "") if m in ("torch.load", "torch.save")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save"):
            faults.append(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                faults.append("allow_pickle")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"\S*\.(pt|pth|pkl|pickle)", node.value):
                faults.append(node.value)
    return faults


def test_no_pickle() -> None:
    found = {p.relative_to(ROOT).as_posix(): pickles(ast.parse(p.read_text())) for p in SOURCES}
    assert {name: faults for name, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import save",
        "np.load(f, allow_pickle=True)",
        "path / 'model.pt'",
    ],
)
def test_a_pickle_is_found(code: str) -> None:
    assert pickles(ast.parse(code))


ERRORS = re.compile(r"(Config|Data|Checkpoint|State|Numerics|Distributed)Error|Refusal|_Fault")
# What ends a message in another place: a helper, or another error's text.
ELSEWHERE = ("fix", "nearest(", "_not_utf8(", "reason", "lines[0]", "line if ", "wanted", "--help")


def without_a_fix(tree: ast.AST) -> list[str]:
    """The errors to users that do not say what is to be done."""
    return [
        text
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ERRORS.fullmatch(_called_name(node)) and node.args
        for text in [ast.unparse(node)]
        if "got " in text and not any(word in text for word in ELSEWHERE)
    ]


def test_errors_say_what_is_to_be_done() -> None:
    trees = (ast.parse(p.read_text()) for p in (ROOT / "gla").rglob("*.py"))
    assert [text for tree in trees for text in without_a_fix(tree)] == []
    assert without_a_fix(ast.parse("raise ConfigError(f'x: got {x}, expected 1')"))


# A process in which importing any of the named packages fails.
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise AssertionError(f"imported {{name}}")
sys.meta_path.insert(0, Blocker())
"""


def run_python(code: str, blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    code = BLOCKER.format(blocked=blocked) + code
    paths = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'kernels')!r}]\n"
    return subprocess.run([sys.executable, "-c", paths + code], capture_output=True, text=True)


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["no-such-command"], []])
def test_help_and_version_import_nothing_heavy(argv: list[str]) -> None:
    code = f"from gla.cli.main import main\ncode = main({argv!r})\nprint('code', code)"
    done = run_python(code, blocked=HEAVY)
    assert done.stdout.splitlines()[-1:] == [f"code {0 if '--' in ''.join(argv) else 2}"], done


def test_help_takes_less_than_half_a_second() -> None:
    command = [sys.executable, "-m", "gla", "--help"]
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, cwd=ROOT)
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0
    assert min(seconds) < 0.5


def test_import_gla_is_cold() -> None:
    done = run_python("import gla, gla.cli.main", blocked=HEAVY)
    assert done.returncode == 0, done.stderr


def test_importing_all_public_names_needs_no_optional_package() -> None:
    code = "import gla\nfor name in gla.__all__: getattr(gla, name)\n"
    done = run_python(code, blocked=NOT_BY_IMPORT_GLA)
    assert done.returncode == 0, done.stderr


def test_importing_the_model_and_the_op_takes_less_than_a_second_beyond_torch() -> None:
    code = (
        "import time, torch\nstart = time.process_time()\nimport gla\n"
        "gla.gated_linear_attention, gla.LanguageModel, gla.LinearState\n"
        "print(time.process_time() - start)"
    )
    assert min(float(run_python(code).stdout) for _ in range(3)) < 1.0
