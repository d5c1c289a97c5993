"""The equation, its one public function, and the choice of form.

    S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T          S_t in R^{K x V}
    z_t = exp(g_t) * z_{t-1} + k_t                    z_t in R^K, only when normalize=True
    o_t = scale * S_t^T q_t                           or S_t^T q_t / max(z_t^T q_t, 1e-6)

``g`` is ``log_decay``, the natural logarithm of the forget gate, at most 0; ``g = None`` is plain
linear attention. Sources: Katharopoulos et al. 2020 (arXiv 2006.16236) for the ungated recurrence
and its normalizer, Yang et al. 2023 (arXiv 2312.06635) for the gated one and its chunkwise form.

Sizes: B batch, T tokens, H heads, G heads of k, v or log_decay (H a multiple of G), K key
dimension, V value dimension, N sequences (N = B, or the number of packed documents).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gla.ops import forms
from gla.ops.validation import check_shapes, check_values, checks, checks_enabled
from gla.state import LinearState

__all__ = ["NORMALIZER_FLOOR", "Output", "checks", "gated_linear_attention"]

NORMALIZER_FLOOR = 1e-6


class Output(NamedTuple):
    """What the op returns.

    Attributes:
        o: [B, T, H, V] in the dtype of v.
        final_state: LinearState after the last token of each of the N sequences, fp32 (fp64 for
            fp64 inputs), differentiable.
    """

    o: Tensor
    final_state: LinearState


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    normalize: bool = False,
    initial_state: LinearState | None = None,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> Output:
    """Run the recurrence over T tokens; the module's docstring states the equation.

    Args:
        q: [B, T, H, K] queries; fp32, bf16, fp16 or fp64.
        k: [B, T, G, K] keys, dtype of q.
        v: [B, T, G, V] values, dtype of q.
        log_decay: natural log of the forget gate, at most 0, any float dtype: None; [G] fixed per
            head; [B, T, G] per head and token; [B, T, G, K] per key channel. ``-inf`` at t is an
            exact reset: nothing before t is read after it.
        scale: factor on the output, K**-0.5 by default; ignored when ``normalize``.
        normalize: divide by the normalizer z^T q, floored at 1e-6. Meant for positive feature maps.
            Where one token has all the weight, o is its value and the gradients of q and k are
            zero but for the last bit of o: use fp64 if you need them there.
        initial_state: of N sequences, fp32 (fp64 for fp64 inputs); zero if None.
        cu_seqlens: [N+1] int32 or int64 offsets of documents packed into one row (B = 1).
        causal: False lets every position read the state of the whole sequence; gates, chunk_size
            and a named impl are refused.
        chunk_size: tokens a chunk of the chunked forms, a power of two from 16 to 256; the form's
            own choice if None. The recurrent form has no chunks and refuses it.
        impl: "auto", "recurrent", "torch" or "triton"; ``gla.ops.forms`` states the rule of "auto".

    Returns:
        Output(o [B, T, H, V], final_state). Gradients reach q, k, v, log_decay and initial_state.

    Raises:
        ValueError: wrong rank, shape, dtype, device, cu_seqlens or option; the message names it.
            In checked mode (``gla.checks`` or GLA_CHECK=1) also NaN inputs and gates above 0.
    """
    check_shapes(q, k, v, log_decay, initial_state, cu_seqlens, normalize, causal)
    if checks_enabled():
        q, k, v, log_decay, initial_state = check_values(q, k, v, log_decay, initial_state)
    form = forms.choose(impl, q, v, chunk_size, causal, normalize)
    try:
        factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    except (TypeError, ValueError):
        raise ValueError(f"scale: got {scale!r}, expected a number; fix scale") from None
    state = None if initial_state is None else initial_state.S
    if not normalize:
        o, state = form(q, k, v, log_decay, state, cu_seqlens, factor)
        return Output(o, LinearState(state))

    # The normalizer is the output for one more value column that is always 1; z is that column of
    # S. It is kept in the state's dtype until after the division.
    wide = torch.promote_types(v.dtype, torch.float32)
    ones = torch.ones((), dtype=wide, device=v.device).expand(*v.shape[:-1], 1)
    if initial_state is not None and initial_state.z is not None:
        state = torch.cat([initial_state.S, initial_state.z.unsqueeze(-1)], dim=-1)
    o, state = form(q, k, torch.cat([v.to(wide), ones], -1), log_decay, state, cu_seqlens, 1.0)
    o = o[..., :-1] / o[..., -1:].clamp_min(NORMALIZER_FLOOR)
    return Output(o.to(v.dtype), LinearState(state[..., :-1], state[..., -1]))
