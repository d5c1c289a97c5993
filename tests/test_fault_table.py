"""Every fault of the table has a test, and the tests that it names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TABLE = TESTS / "fault_table.md"
ROWS = [*range(1, 52), *range(61, 82), *range(83, 87)]


def rows() -> dict[int, list[str]]:
    """Return {number: names of tests}."""
    found = {}
    for line in TABLE.read_text().splitlines():
        if match := re.match(r"\| (\d+) \|.*\|([^|]*)\|$", line):
            found[int(match[1])] = re.findall(r"`([^`]+)`", match[2])
    return found


def test_no_row_is_missing() -> None:
    assert sorted(rows()) == ROWS


@pytest.mark.parametrize("number", ROWS)
def test_the_tests_of_a_row_exist(number: int) -> None:
    names = rows()[number]
    assert names
    for name in names:
        file, _, function = name.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert function in functions, name
