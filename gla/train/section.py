"""What the sections of a recipe have in common: a base, and values of more than one field."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _regular_expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as reason:
        raise ValueError(
            f"got {pattern!r}, expected a regular expression ({reason}); fix the pattern"
        ) from None
    return pattern


def _two(value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(
            f"got {value!r}, expected two numbers from 0 to below 1; fix with two, such as "
            "[0.9, 0.95]"
        )
    return value


Count = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], Field(strict=False), BeforeValidator(_two)]
Pattern = Annotated[str, AfterValidator(_regular_expression)]


class Section(BaseModel):
    """What every section shares: exact types, finite numbers, no unknown key."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
