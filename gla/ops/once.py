"""The backward operators are differentiable once: what a second derivative through them is told."""

from __future__ import annotations

from typing import Any, NoReturn


def save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep nothing for a backward that never comes."""


def refuse_double_backward(ctx: Any, *grads: Any) -> NoReturn:
    """Raise where autograd asks for the gradient of a gradient."""
    raise RuntimeError(
        "gla.gated_linear_attention: got a double backward (create_graph=True), expected first "
        "derivatives only; fix by differentiating once, or by writing the recurrence in torch"
    )
