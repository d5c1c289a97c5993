"""What a report says of results that are written down here by hand."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gla.compare import plots
from gla.compare.plan import Plan, known_cells, plan
from gla.compare.report import page, with_diverged, write_report
from gla.compare.suite import Cell, load_suite
from gla.compare.summary import summarize

SEEDS = ("seeds", "4")
ONE_RATE = ("variants.gla.lr", "[1e-3]")
Figures = Callable[[Cell], float | None]


def made_of(suite_file: Path, *overrides: tuple[str, str]) -> Plan:
    return plan(load_suite(suite_file, None, [SEEDS, *overrides]))


def results_of(made: Plan, accuracy: Figures, **more: Any) -> dict[str, dict[str, Any]]:
    """Results of all cells; those of a sweep first, since the others follow from them."""
    results: dict[str, dict[str, Any]] = {}
    for _ in range(2):
        for cell in known_cells(made, results):
            value = accuracy(cell)
            results[cell.folder] = {
                **{name: getattr(cell, name) for name in ("task", "variant", "lr", "seed")},
                "digest": cell.digest,
                "status": "done" if value is not None else "diverged",
                "metrics": {} if value is None else {"accuracy": value, "loss": 1.0},
                "steps": 6,
                "parameters": 1,
                "d_model": 32,
                "state_bytes": 8,
                **{"device": "cpu", "precision": "fp32", "threads": 1, "code": "c" * 64},
                "versions": {"gla": "1", "torch": "2"},
                **more,
            }
    return results


def variant(made: Plan, results: dict, out: Path, name: str = "gla") -> dict[str, Any]:
    return summarize(made, results, out)["tasks"]["recall"]["variants"][name]


def test_the_seed_that_picks_among_more_rates_is_left_out(suite_file: Path, tmp_path: Path) -> None:
    def accuracy(cell: Cell) -> float:
        lucky = cell.variant == "gla" and cell.lr == 1e-2 and cell.seed == 0
        return 0.5 + 0.001 * cell.seed + 0.4 * lucky

    made = made_of(suite_file)
    row = variant(made, results_of(made, accuracy), tmp_path)
    assert row["lr"] == 1e-2 and row["values"][0] == 0.9
    assert row["difference"]["mean"] == 0 and row["difference"]["n"] == 3
    assert row["verdict"] == "not distinguishable"
    assert "It is left out" in page(summarize(made, results_of(made, accuracy), tmp_path), {})
    # As many rates for both: what that flatters, it flatters alike.
    both = made_of(suite_file, ("variants.softmax.lr", "[1e-3, 3e-3]"))
    summary = summarize(both, results_of(both, accuracy), tmp_path)
    difference = summary["tasks"]["recall"]["variants"]["gla"]["difference"]
    assert difference["mean"] == pytest.approx(0.1) and difference["n"] == 4
    assert "Learning rates, seed 0:" in page(summary, {})


def test_those_that_solve_a_task_are_not_ranked(suite_file: Path, tmp_path: Path) -> None:
    made = made_of(suite_file, ONE_RATE)

    def accuracy(cell: Cell) -> float:
        return 0.999 if cell.variant == "gla" else 0.991 + 0.0001 * cell.seed

    assert variant(made, results_of(made, accuracy), tmp_path)["verdict"] == "better"
    solved = results_of(made, accuracy, status="solved")
    assert variant(made, solved, tmp_path)["verdict"] == "both solve it"
    next(r for r in solved.values() if r["variant"] == "softmax")["status"] = "done"
    assert variant(made, solved, tmp_path)["verdict"] == "better"
    assert variant(made, {}, tmp_path)["verdict"] == "no pair of seeds"


@pytest.mark.parametrize("figures", [{}, {"accuracy": None, "loss": None}])
def test_seeds_without_a_figure_are_counted(
    suite_file: Path, tmp_path: Path, figures: dict
) -> None:
    made = made_of(suite_file, ONE_RATE)
    results = results_of(made, lambda cell: 0.5 + 0.1 * cell.seed)
    (bad,) = (r for r in results.values() if r["variant"] == "gla" and r["seed"] == 2)
    bad |= {"metrics": figures}
    row = variant(made, results, tmp_path)
    assert row["diverged"] == 1 and row["n"] == row["difference"]["n"] == 3
    assert row["mean"] == pytest.approx(1.9 / 3)
    assert with_diverged(row).startswith("0.6333 ± ") and with_diverged(row).endswith(
        "(1 diverged)"
    )
    assert write_report(made, results, tmp_path)["complete"]


def test_a_length_that_is_named_twice_counts_once(suite_file: Path, tmp_path: Path) -> None:
    made = made_of(suite_file, ONE_RATE)
    case = {"axes": {"length": 32}, "metrics": {"accuracy": 0.5}}
    row = variant(made, results_of(made, lambda _: 0.5, cases=[case, case]), tmp_path)
    assert [c["metrics"]["accuracy"]["n"] for c in row["cases"]] == [4]


def test_curves_are_means_over_all_seeds(suite_file: Path, tmp_path: Path) -> None:
    made = made_of(suite_file, ONE_RATE)
    results = results_of(made, lambda cell: None if cell.seed == 3 else 0.9)
    for folder, result in results.items():
        if result["variant"] == "gla":
            (tmp_path / folder).mkdir(parents=True)
            steps = {0: (2, 4), 1: (2,), 2: (2, 4), 3: (2,)}[result["seed"]]
            rows = [{"step": s, "val_accuracy": 0.1 * s + 0.01 * result["seed"]} for s in steps]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / folder / "metrics.jsonl").write_text(text)
            if result["seed"] == 1:  # solved at 3, which no line of the metrics says
                result |= {"status": "solved", "steps": 3}
    curve = variant(made, results, tmp_path)["curve"]
    assert [step for step, _ in curve] == [2, 4, 6]
    assert curve[0][1] == pytest.approx((0.2 + 0.21 + 0.22) / 3)
    assert curve[1][1] == pytest.approx((0.4 + 0.9 + 0.42) / 3)
    assert curve[2][1] == pytest.approx(0.9)


def test_numbers_in_the_table_are_exact(suite_file: Path, tmp_path: Path) -> None:
    made = made_of(suite_file, ONE_RATE)
    case = {"axes": {"length": 1048577, "depth": 0.25}, "metrics": {"accuracy": 1 / 3}}
    write_report(made, results_of(made, lambda _: 0.1 + 0.2, cases=[case]), tmp_path)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "report.csv").read_text())))
    assert len(rows) == 8 * 3 and {row["seed"] for row in rows} == set("0123")
    tests = [row for row in rows if row["axes"]]
    assert {row["axes"] for row in tests} == {"length=1048577 depth=0.25"}
    assert {float(row["value"]) for row in tests} == {1 / 3}
    assert {float(row["value"]) for row in rows if not row["axes"]} == {0.1 + 0.2, 1.0}


def test_the_page_escapes_texts_and_tells_mixed_versions(suite_file: Path, tmp_path: Path) -> None:
    made = made_of(suite_file, ONE_RATE, ("title", "<script>'&"))
    results = results_of(made, lambda _: 0.5)
    text = page(summarize(made, results, tmp_path), {})
    assert "<script" not in text and "<h1>&lt;script&gt;&#x27;&amp;</h1>" in text
    assert "made alike" not in text
    next(iter(results.values()))["code"] = "<" * 64
    text = page(summarize(made, results, tmp_path), {})
    assert "Not all cells were made alike" in text and "(&lt;&lt;" in text and "(<" not in text


@pytest.mark.parametrize(
    ("points", "axis"),
    [
        ([{"length": 32, "pairs": 4}, {"length": 64, "pairs": 8}], "pairs"),
        ([{"length": 32, "pairs": 4}, {"length": 64, "pairs": 4}], "length"),
        ([{"length": 96, "depth": 0.0}, {"length": 96, "depth": 0.5}], "depth"),
        ([{"length": 96, "depth": 0.5}, {"length": 192, "depth": 0.5}], "length"),
    ],
)
def test_tests_are_drawn_over_the_axis_that_tells_them_apart(
    suite_file: Path, tmp_path: Path, points: list[dict], axis: str
) -> None:
    made = made_of(suite_file, ONE_RATE)
    cases = [{"axes": point, "metrics": {"accuracy": 0.5}} for point in points]
    row = summarize(made, results_of(made, lambda _: 0.5, cases=cases), tmp_path)["tasks"]["recall"]
    figure = plots._figure(4, 3)
    axes = figure.add_subplot()
    plots._by_axis(axes, row, "cases", None, "by length")
    assert axes.get_xlabel() == axis
    places = [point[axis] for point in points]
    assert [list(line.get_xdata()) for line in axes.get_lines()[:2]] == [places] * 2
    assert axes.get_xscale() == ("linear" if 0 in places else "log")


def test_tests_without_any_figure_are_drawn(suite_file: Path, tmp_path: Path) -> None:
    made = made_of(suite_file, ONE_RATE)
    case = {"axes": {"length": 32}, "metrics": {"accuracy": None, "loss": None}}
    row = summarize(made, results_of(made, lambda _: 0.5, cases=[case]), tmp_path)
    assert plots.draw(row["tasks"]["recall"])["overview"][1:4] == b"PNG"
