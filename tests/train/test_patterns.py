"""Patterns of layers on the command line."""

from __future__ import annotations

import pytest

from gla.train.config import apply_overrides


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("gla*2, softmax", ["gla*2", "softmax"]),
        ("(gla*3, softmax)*2", ["(gla*3, softmax)*2"]),
        ("window, (gla, (softmax, gla)*2)*2", ["window", "(gla, (softmax, gla)*2)*2"]),
        ('["(gla, softmax)*2"]', ["(gla, softmax)*2"]),
    ],
)
def test_an_override_keeps_what_stands_in_parentheses(text, layers):
    assert apply_overrides({}, [("model.layers", text)]) == {"model": {"layers": layers}}
