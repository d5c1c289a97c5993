"""A wheel built from the sources works away from them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import gla

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", reason="building a wheel needs setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("gla", "kernels", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", folder, source], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {n for n in names if not re.match(r"gla-[^/]*\.(dist-info|data)/", n)}
    expected = {p.relative_to(ROOT).as_posix() for p in (ROOT / "gla").rglob("*.py")}
    kernels = (ROOT / "kernels" / "gla_kernels").rglob("*.py")
    expected |= {p.relative_to(ROOT / "kernels").as_posix() for p in kernels}
    assert code == expected | {"gla/py.typed", "gla/serve/page.html"}


def test_the_wheel_holds_licence_recipes_and_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    shipped = {n.partition("/share/gla/recipes/")[2] for n in names if "/share/gla/recipes/" in n}
    recipes = ROOT / "recipes"
    assert shipped == {p.relative_to(recipes).as_posix() for p in recipes.rglob("*.toml")}
    assert any(n.endswith("licenses/LICENSE") for n in names)
    (metadata,) = (archive.read(n).decode() for n in names if n.endswith("dist-info/METADATA"))
    assert f"\nVersion: {gla.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    (triton,) = re.findall(r"Requires-Dist: (triton.*)", metadata)
    assert "linux" in triton and "x86_64" in triton and "aarch64" in triton


def test_an_installed_wheel_runs_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", site, wheel], check=True, capture_output=True)
    code = (
        "import gla, gla_kernels, sys\nfrom gla.cli import main, recipes\n"
        "print(gla.__file__)\nprint(*recipes.shipped().values(), sep='\\n')\n"
        "print(*recipes.shipped('recipes/suites').values(), sep='\\n')\n"
        "sys.exit(main.main(['--version']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    package, *recipes, version = done.stdout.splitlines()
    assert all(Path(p).is_relative_to(site) for p in (package, *recipes))
    assert {Path(p).name for p in recipes} == {p.name for p in (ROOT / "recipes").rglob("*.toml")}
    assert version == f"gla {gla.__version__}"


def test_the_exact_versions_satisfy_the_open_ranges() -> None:
    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    extras = [r for group in PROJECT["optional-dependencies"].values() for r in group]
    for text in PROJECT["dependencies"] + extras:
        wanted = Requirement(text)
        if wanted.name != "gla":
            name = wanted.name.lower().replace("_", "-")
            version = pinned.get(name) or pinned[name.replace("-", "_")]
            assert wanted.specifier.contains(version), text


def test_no_host_or_path_of_a_machine_in_the_constraints() -> None:
    text = (ROOT / "constraints.txt").read_text()
    assert not re.search(r"://|@ |\+cpu|--", text)
