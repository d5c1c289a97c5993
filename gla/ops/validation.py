"""What the op accepts: shapes always, values in checked mode. Sizes: see gated_linear_attention."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from gla.state import LinearState

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_HEAD_DIM = 512
_checks = os.environ.get("GLA_CHECK", "") not in ("", "0")


@contextlib.contextmanager
def checks(enabled: bool = True) -> Iterator[None]:
    """Turn value checks of the op's inputs (NaN, gates above 0) on or off inside the block."""
    global _checks
    before, _checks = _checks, enabled
    try:
        yield
    finally:
        _checks = before


def checks_enabled() -> bool:
    """Whether values are checked now; GLA_CHECK=1 in the environment sets the start value."""
    return _checks


def _expect(good: bool, name: str, got: object, expected: str, fix: str, *sizes: object) -> None:
    """Raise unless good. Words are put together only then: this runs for every decoded token.

    A tensor as ``got`` is named by its shape; ``sizes`` fill the braces of ``expected``.
    """
    if not good:
        got = f"shape {list(got.shape)}" if isinstance(got, Tensor) else got
        raise ValueError(f"{name}: got {got}, expected {expected.format(*sizes)}; fix {fix}")


def check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: LinearState | None,
    cu_seqlens: Tensor | None,
    normalize: bool,
    causal: bool,
) -> None:
    """Raise ValueError for the first input whose rank, shape, dtype or device does not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _expect(isinstance(x, Tensor), name, type(x).__name__, "a tensor", name)
        _expect(x.dim() == 4, name, x, "4 dimensions [B, T, heads, dim]", name)
        _expect(x.dtype in _FLOATS, name, x.dtype, "fp32, bf16, fp16 or fp64", "its dtype")
        _expect(x.dtype == q.dtype, name, x.dtype, "the dtype of q, {}", "its dtype", q.dtype)
        _expect(x.device == q.device, name, x.device, "the device of q, {}", name, q.device)
    B, T, H, K = q.shape
    V = v.shape[-1]
    _check_heads("k", k, B, T, H)
    _expect(k.shape[-1] == K, "k", k, "key dimension {} as in q", "k or q", K)
    _check_heads("v", v, B, T, H)
    fits = "a {} dimension from 1 to {}"
    _expect(1 <= K <= MAX_HEAD_DIM, "q", q, fits, "the number of heads", "key", MAX_HEAD_DIM)
    _expect(1 <= V <= MAX_HEAD_DIM, "v", v, fits, "the number of heads", "value", MAX_HEAD_DIM)
    if log_decay is not None:
        _check_log_decay(log_decay, q, causal)
    N = B if cu_seqlens is None else _check_cu_seqlens(cu_seqlens, q)
    if initial_state is not None:
        _check_state(initial_state, q, N, V, normalize)


def _check_heads(name: str, x: Tensor, B: int, T: int, H: int) -> None:
    G = x.shape[2]
    _expect(x.shape[0] == B and x.shape[1] == T, name, x, "[{}, {}, ...] as in q", name, B, T)
    if G == 0 or H % G:
        _expect(False, name, f"{G} heads", "a divisor of the {} heads of q", name, H)


def _check_log_decay(g: Tensor, q: Tensor, causal: bool) -> None:
    B, T, H, K = q.shape
    name = "log_decay"
    _expect(isinstance(g, Tensor), name, type(g).__name__, "a tensor", name)
    _expect(causal, name, "a tensor with causal=False", "None", "log_decay=None or causal=True")
    _expect(g.dtype in _FLOATS, name, g.dtype, "a float dtype", "log_decay.float()")
    _expect(g.device == q.device, name, g.device, "the device of q, {}", name, q.device)
    shapes = "[{0}], [{1}, {2}, {0}] or [{1}, {2}, {0}, {3}] (or fewer heads that divide {0})"
    fits = g.dim() == 1 or (g.dim() in (3, 4) and g.shape[0] == B and g.shape[1] == T)
    fits = fits and (g.dim() < 4 or g.shape[3] == K)
    _expect(fits, name, g, shapes, name, H, B, T, K)
    G = g.shape[0] if g.dim() == 1 else g.shape[2]
    _expect(G > 0 and H % G == 0, name, g, shapes, name, H, B, T, K)


def _check_cu_seqlens(cu: Tensor, q: Tensor) -> int:
    B, T = q.shape[:2]
    name = "cu_seqlens"
    _expect(isinstance(cu, Tensor), name, type(cu).__name__, "a tensor [N+1]", name)
    _expect(cu.dim() == 1 and cu.shape[0] >= 1, name, cu, "[N+1]", name)
    _expect(cu.dtype in (torch.int32, torch.int64), name, cu.dtype, "int32 or int64", name)
    _expect(cu.device == q.device, name, cu.device, "the device of q, {}", name, q.device)
    _expect(B == 1, name, q, "one row (B = 1) with packed documents", "q.reshape(1, B*T, ...)")
    if not torch.compiler.is_compiling() and not _is_symbolic(cu):
        ends = cu.tolist()
        good = ends[0] == 0 and ends[-1] == T and all(a <= b for a, b in itertools.pairwise(ends))
        shown = ends if len(ends) <= 8 else [*ends[:4], "...", *ends[-3:]]
        _expect(good, name, shown, "non-decreasing offsets from 0 to T = {}", name, T)
    return cu.shape[0] - 1


def _is_symbolic(x: Tensor) -> bool:
    """True for tensors without readable values: meta, fake, or being transformed."""
    from torch._C._functorch import is_functorch_wrapped_tensor
    from torch._subclasses.fake_tensor import FakeTensor

    wrapped = is_functorch_wrapped_tensor(x)
    return x.device.type == "meta" or isinstance(x, FakeTensor) or wrapped


def _check_state(state: LinearState, q: Tensor, N: int, V: int, normalize: bool) -> None:
    H, K = q.shape[2:]
    name = "initial_state"
    _expect(isinstance(state, LinearState), name, type(state).__name__, "a LinearState", name)
    wide = torch.promote_types(q.dtype, torch.float32)
    for part, x, shape in (("S", state.S, (N, H, K, V)), ("z", state.z, (N, H, K))):
        label = "initial_state." + part
        if x is None:
            _expect(part == "z" and not normalize, label, None, "a tensor {}", label, shape)
            continue
        if part == "z":
            _expect(normalize, label, x, "None without normalize", "normalize=True or z=None")
        _expect(tuple(x.shape) == shape, label, x, "{}", label, shape)
        _expect(x.dtype == wide, label, x.dtype, "{}", label, wide)
        _expect(x.device == q.device, label, x.device, "the device of q, {}", label, q.device)


def check_values(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: LinearState | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, LinearState | None]:
    """Checked mode: refuse NaN in any input and gates above 0. Returns the inputs."""
    q, k, v = (_checked(x, name, False) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    if log_decay is not None:
        log_decay = _checked(log_decay, "log_decay", True)
    if state is not None:
        z = None if state.z is None else _checked(state.z, "initial_state.z", False)
        state = LinearState(_checked(state.S, "initial_state.S", False), z)
    return q, k, v, log_decay, state


# An operator, so that a compiled graph keeps the check; its output is used, so it is not dropped.
@torch.library.custom_op("gla::checked", mutates_args=())
def _checked(x: Tensor, name: str, is_gate: bool) -> Tensor:
    _expect(not bool(x.isnan().any()), name, "NaN", "numbers", "what computes it")
    if is_gate and x.numel():
        largest = float(x.max())
        _expect(largest <= 0, name, f"the value {largest:.4g}", "at most 0", "by log(gate)")
    return x.clone()


@_checked.register_fake
def _(x: Tensor, name: str, is_gate: bool) -> Tensor:
    return torch.empty_like(x)


_checked.register_autograd(lambda ctx, grad: (grad, None, None))
