"""Synthetic tasks, by the ``kind`` that a suite names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from gla.compare.tasks.base import Case, Examples, Task
from gla.compare.tasks.copying import InductionHeads, SelectiveCopy
from gla.compare.tasks.mad import Compress, FuzzyRecall, InContextRecall, Memorize
from gla.compare.tasks.passkey import Passkey
from gla.compare.tasks.recall import MultiQueryRecall
from gla.errors import ConfigError
from gla.tables import describe_faults

__all__ = ["KINDS", "Case", "Examples", "Task", "build_task"]

_TASKS: tuple[type[Task], ...] = (
    MultiQueryRecall,
    SelectiveCopy,
    InductionHeads,
    Passkey,
    InContextRecall,
    FuzzyRecall,
    Memorize,
    Compress,
)
KINDS: dict[str, type[Task]] = {task.model_fields["kind"].default: task for task in _TASKS}


def build_task(table: Mapping[str, Any]) -> Task:
    """Check the options of a task, of which ``kind`` is one of ``KINDS``.

    Raises:
        ConfigError: One line for each fault.
    """
    task = KINDS[table["kind"]]
    try:
        return task.model_validate(dict(table))
    except ValidationError as faults:
        raise ConfigError(describe_faults(task, faults)) from None
