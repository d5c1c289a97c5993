"""Suites: sizes, overrides, recipes of cells, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from gla.cli.recipes import find_suite, shipped
from gla.compare.plan import Entry, best_rate, chosen_cells, known_cells, number_of_cells, plan
from gla.compare.run import share
from gla.compare.suite import load_suite, merge, rates, recipe_of, sizes_of
from gla.errors import ConfigError

import torch  # isort: skip


def test_a_size_changes_table_by_table(suite_file: Path) -> None:
    assert sizes_of(suite_file) == ["long"]
    base, long = load_suite(suite_file), load_suite(suite_file, "long")
    assert base.train == {"steps": 6, "global_batch_size": 4, "precision": "fp32"}
    assert long.train == {**base.train, "steps": 200}
    assert load_suite(suite_file, "base") == base
    assert merge({"a": {"b": 1, "c": [1]}, "d": 2}, {"a": {"c": [2]}, "d": {"e": 1}}) == {
        "a": {"b": 1, "c": [2]},
        "d": {"e": 1},
    }


def test_overrides_reach_what_tasks_say(suite_file: Path) -> None:
    suite_file.write_text(suite_file.read_text() + "\n[tasks.recall.train]\nsteps = 9\n")
    assert recipe_of(load_suite(suite_file), "recall", "gla")[1]["train"]["steps"] == 9
    changed = load_suite(suite_file, None, [("train.steps", "11"), ("tasks.recall.pairs", "2")])
    options, recipe = recipe_of(changed, "recall", "gla")
    assert recipe["train"]["steps"] == 11 and options["pairs"] == 2


def test_overrides_reach_what_variants_say_and_end_sweeps(suite_file: Path) -> None:
    decay = "\n[variants.gla.optim]\nweight_decay = 0.2\n"
    suite_file.write_text(suite_file.read_text() + decay)
    swept = load_suite(suite_file, None, [("tasks.recall.lr", "[1e-4, 2e-4]")])
    assert rates(swept, "recall", "softmax") == [1e-4, 2e-4]
    overrides = [("optim.lr", "5e-3"), ("optim.weight_decay", "0.3")]
    changed = load_suite(suite_file, None, [("tasks.recall.lr", "[1e-4, 2e-4]"), *overrides])
    for variant in changed.variants:
        assert rates(changed, "recall", variant) == [5e-3]
        assert recipe_of(changed, "recall", variant)[1]["optim"]["weight_decay"] == 0.3


def test_rows_of_a_mixture_are_as_long_as_the_longest_part(suite_file: Path) -> None:
    mixture = ("tasks.recall.mixture", "[[32, 4, 40], [64, 8, 16]]")
    _, recipe = recipe_of(load_suite(suite_file, None, [mixture]), "recall", "gla")
    assert recipe["train"]["seq_len"] == 64


def test_recipes_of_all_variants_are_the_same_but_for_the_mixer(suite_file: Path) -> None:
    made = plan(load_suite(suite_file))
    first, second = (known_cells(made, {})[i].recipe for i in (0, 1))
    assert first["train"] == second["train"] and first["data"] == second["data"]
    assert first["model"]["layers"] == ["softmax"] * 2 and second["model"]["layers"] == ["mine"] * 2
    assert rates(made.suite, "recall", "gla") == [1e-3, 1e-2]
    assert rates(made.suite, "recall", "softmax") == [3e-3]


def result(entry: Entry, lr: float, accuracy: float | None, loss: float = 1.0) -> dict:
    metrics = {} if accuracy is None else {"accuracy": accuracy, "loss": loss}
    return {entry.cell(lr, 0).folder: {"metrics": metrics, "status": "done"}}


def test_the_best_rate_of_a_sweep(suite_file: Path) -> None:
    made = plan(load_suite(suite_file))
    entry = next(e for e in made.entries if e.variant == "gla")
    assert number_of_cells(made) == 5
    assert best_rate(entry, result(entry, 1e-3, 0.5)) is None
    assert chosen_cells(made, entry, result(entry, 1e-3, 0.5)) == []
    both = result(entry, 1e-3, 0.5) | result(entry, 1e-2, 0.7)
    assert best_rate(entry, both) == 1e-2
    assert [(c.lr, c.seed) for c in chosen_cells(made, entry, both)] == [(1e-2, 0), (1e-2, 1)]
    assert len(known_cells(made, {})) == 4 and len(known_cells(made, both)) == 5
    tie = result(entry, 1e-3, 0.7, loss=0.1) | result(entry, 1e-2, 0.7, loss=0.2)
    assert best_rate(entry, tie) == 1e-3
    diverged = result(entry, 1e-3, 0.1) | result(entry, 1e-2, None)
    assert best_rate(entry, diverged) == 1e-3


def test_a_cell_is_known_by_all_that_decides_its_result(suite_file: Path) -> None:
    def digests(*overrides: tuple[str, str]) -> set[str]:
        return {c.digest for c in known_cells(plan(load_suite(suite_file, None, overrides)), {})}

    before = digests()
    assert digests(("title", "Another")) == before
    assert before < digests(("seeds", "5"))
    assert not digests(("train.steps", "7")) & before
    assert not digests(("tasks.recall.test_examples", "7")) & before
    assert len(before) == 4 and len(digests(("variants.gla.lr", "[1e-3]")) & before) == 3


@pytest.mark.parametrize("sizes", ["sizes = 3", "sizes.gpu = 3"])
def test_sizes_are_tables(suite_file: Path, sizes: str) -> None:
    suite_file.write_text(f"{sizes}\n" + suite_file.read_text().partition("[sizes")[0])
    for read in (lambda: load_suite(suite_file, "gpu"), lambda: sizes_of(suite_file)):
        with pytest.raises(ConfigError, match=r"sizes: got .*, expected tables \[sizes\.NAME\]"):
            read()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('baseline = "softmax"', 'baseline = "softmx"', "baseline: got 'softmx'.*fix by writing"),
        (
            '["softmax"]',
            '["bar"]',
            r"got 'bar', .*; fix the name, or .* a table mixers\.bar beside layers",
        ),
        ("seeds = 2", "seed = 2", "seed: got an unknown key, expected.*'seeds'"),
        ('kind = "mqar"', 'kind = "mqr"', "kind: got 'mqr', expected.*'mqar'"),
        ("depth = 2", "depth = 0", r"model\.depth: got 0"),
        ('["softmax"]', '["softmax*2", "gla"]', r"model\.depth: got 2 for a pattern of 3 layers"),
        ("steps = 6", "stepps = 6", r"tasks\.recall, variants\.softmax: train\.stepps"),
        ("[variants.gla]", '[variants."a/b"]', "name: got 'a/b', expected letters"),
        (
            "depth = 2",
            'depth = 2\nlayers = ["gla"]',
            r"model\.layers: got \['gla'\], expected",
        ),
        ("depth = 2", "depth = 2\nmixers = {}", r"model\.mixers: got {}, expected none"),
        ("depth = 2", "depth = 2\nvocab_size = 16", r"model\.vocab_size: got 16, expected 32"),
        ("steps = 6", "steps = 6\nseq_len = 64", r"train\.seq_len: got 64, expected 32"),
        ("steps = 6", "steps = 6\ncarry_state = true", r"train\.carry_state: got one for a synth"),
        ("pairs = 4", 'pairs = 4\ndata.path = "x"', "data: got one for a synthetic task"),
        (
            "[train]",
            '[objective]\nkind = "masked"\n[train]',
            r"objective\.kind: got 'masked' for",
        ),
        (
            "pairs = 4",
            "pairs = 4\nlr = 1e-3",
            r"variants\.softmax: lr: got 0\.001, expected a list",
        ),
        (
            "pairs = 4",
            "pairs = 4\nlr = [0.0]",
            r"lr: got \[0\.0\], expected a list of diff",
        ),
        (
            "[1e-3, 1e-2]",
            "[1e-3, 1e-3]",
            r"lr: got \[0\.001, 0\.001\], expected a list of different",
        ),
    ],
)
def test_what_is_refused(suite_file: Path, old: str, new: str, message: str) -> None:
    text = suite_file.read_text()
    assert old in text
    suite_file.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match="(?s)" + message):
        plan(load_suite(suite_file))


def test_shares_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: 5)
    assert share(torch.device("cpu"), None) == (["cpu"] * 6, 1)
    assert share(torch.device("cpu"), 1) == (["cpu"], 5)
    assert share(torch.device("cpu"), 2) == (["cpu"] * 2, 3)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert share(torch.device("cuda"), None) == (["cuda:0", "cuda:1"], 3)
    assert share(torch.device("cuda"), 3)[0] == ["cuda:0", "cuda:1", "cuda:0"]
    assert share(torch.device("cuda:1"), None) == (["cuda:1"], 5)
    with pytest.raises(ConfigError, match="jobs: got 0"):
        share(torch.device("cpu"), 0)


@pytest.mark.parametrize("name", sorted(shipped("recipes/suites")))
def test_suites_that_ship_are_right_in_every_size(name: str) -> None:
    path = find_suite(name)
    assert "gpu" in sizes_of(path)
    for size in ("base", *sizes_of(path)):
        suite = load_suite(path, size)
        made = plan(suite)
        for task in suite.tasks:
            entries = [e for e in made.entries if e.task == task]
            assert len(entries) == len(suite.variants)
            parameters = {e.variant: e.parameters for e in entries}
            target = parameters[suite.baseline]
            if suite.match == "parameters":
                assert all(abs(n - target) <= 0.02 * target for n in parameters.values())
