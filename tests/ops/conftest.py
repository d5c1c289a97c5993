"""Settings of all tests of the op."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan() -> Iterator[None]:
    """Make torch.empty and its relatives return NaN, so that reading what nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory, see its documentation
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(before)
