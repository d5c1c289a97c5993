"""What the op accepts: shapes always, values in checked mode. Sizes: see gated_linear_attention."""

from __future__ import annotations

import contextlib
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


def _shape(x: Tensor) -> str:
    return str(list(x.shape))


def _expect(good: bool, name: str, got: object, expected: str, fix: str) -> None:
    if not good:
        raise ValueError(f"{name}: got {got}, expected {expected}; fix {fix}")


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
        _expect(x.dim() == 4, name, f"shape {_shape(x)}", "4 dimensions [B, T, heads, dim]", name)
        _expect(x.dtype in _FLOATS, name, x.dtype, "fp32, bf16, fp16 or fp64", f"{name}.to(...)")
        _expect(x.dtype == q.dtype, name, x.dtype, f"the dtype of q, {q.dtype}", f"{name}.to(q.dtype)")
        _expect(x.device == q.device, name, x.device, f"the device of q, {q.device}", name)
    B, T, H, K = q.shape
    V = v.shape[-1]
    _check_heads("k", k, B, T, H)
    _expect(k.shape[-1] == K, "k", f"shape {_shape(k)}", f"key dimension {K} as in q", "k or q")
    _check_heads("v", v, B, T, H)
    _expect(1 <= K <= MAX_HEAD_DIM, "q", f"key dimension {K}", f"1 to {MAX_HEAD_DIM}", "the head count")
    _expect(1 <= V <= MAX_HEAD_DIM, "v", f"value dimension {V}", f"1 to {MAX_HEAD_DIM}", "the head count")
    if log_decay is not None:
        _check_log_decay(log_decay, q, causal)
    N = B if cu_seqlens is None else _check_cu_seqlens(cu_seqlens, q)
    if initial_state is not None:
        _check_state(initial_state, q, N, V, normalize)


def _check_heads(name: str, x: Tensor, B: int, T: int, H: int) -> None:
    got, G = f"shape {_shape(x)}", x.shape[2]
    _expect(x.shape[:2] == (B, T), name, got, f"[{B}, {T}, ...] as in q", name)
    _expect(G > 0 and H % G == 0, name, f"{G} heads", f"a divisor of the {H} heads of q", name)


def _check_log_decay(g: Tensor, q: Tensor, causal: bool) -> None:
    B, T, H, K = q.shape
    _expect(causal, "log_decay", "a tensor with causal=False", "None", "log_decay=None or causal=True")
    _expect(g.dtype in _FLOATS, "log_decay", g.dtype, "a float dtype", "log_decay.float()")
    _expect(g.device == q.device, "log_decay", g.device, f"the device of q, {q.device}", "log_decay")
    expected = f"[{H}], [{B}, {T}, {H}] or [{B}, {T}, {H}, {K}] (or fewer heads that divide {H})"
    fits = (g.dim() == 1) or (g.dim() in (3, 4) and g.shape[:2] == (B, T))
    fits = fits and (g.dim() < 4 or g.shape[3] == K)
    _expect(fits, "log_decay", f"shape {_shape(g)}", expected, "log_decay")
    G = g.shape[0] if g.dim() == 1 else g.shape[2]
    _expect(G > 0 and H % G == 0, "log_decay", f"{G} heads", expected, "log_decay")


def _check_cu_seqlens(cu: Tensor, q: Tensor) -> int:
    B, T = q.shape[:2]
    fix = "cu_seqlens"
    _expect(cu.dim() == 1 and cu.shape[0] >= 1, fix, f"shape {_shape(cu)}", "[N+1]", fix)
    _expect(cu.dtype in (torch.int32, torch.int64), fix, cu.dtype, "int32 or int64", fix)
    _expect(B == 1, fix, f"B = {B} rows in q", "B = 1 with packed documents", "q.reshape(1, B*T, ...)")
    if not torch.compiler.is_compiling() and not _is_symbolic(cu):
        ends = cu.tolist()
        good = ends[0] == 0 and ends[-1] == T and all(a <= b for a, b in zip(ends, ends[1:], strict=False))
        shown = ends if len(ends) <= 8 else [*ends[:4], "...", *ends[-3:]]
        _expect(good, fix, shown, f"non-decreasing offsets from 0 to T = {T}", fix)
    return cu.shape[0] - 1


def _is_symbolic(x: Tensor) -> bool:
    """True for tensors without readable values: meta, fake, or being transformed."""
    from torch._subclasses.fake_tensor import FakeTensor

    return x.device.type == "meta" or isinstance(x, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(x)


def _check_state(state: LinearState, q: Tensor, N: int, V: int, normalize: bool) -> None:
    H, K = q.shape[2:]
    wide = torch.promote_types(q.dtype, torch.float32)
    for name, x, shape in (("S", state.S, (N, H, K, V)), ("z", state.z, (N, H, K))):
        label = f"initial_state.{name}"
        if x is None:
            _expect(name == "z" and not normalize, label, None, f"a tensor {list(shape)}", label)
            continue
        if name == "z":
            _expect(normalize, label, "a tensor", "None without normalize", "normalize=True or z=None")
        _expect(x.shape == shape, label, f"shape {_shape(x)}", str(list(shape)), label)
        _expect(x.dtype == wide, label, x.dtype, str(wide), f"{label}.to({wide})")
        _expect(x.device == q.device, label, x.device, f"the device of q, {q.device}", label)


def check_values(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None):
    """Checked mode: refuse NaN in any input and gates above 0. Returns the inputs."""
    q, k, v = (_checked(x, name, False) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    if log_decay is not None:
        log_decay = _checked(log_decay, "log_decay", True)
    return q, k, v, log_decay


# An operator, so that a compiled graph keeps the check; its output is used, so it is not dropped.
@torch.library.custom_op("gla::checked", mutates_args=())
def _checked(x: Tensor, name: str, is_gate: bool) -> Tensor:
    _expect(not bool(x.isnan().any()), name, "NaN", "numbers", f"what computes {name}")
    if is_gate and x.numel():
        largest = float(x.max())
        _expect(largest <= 0, name, f"a largest value of {largest:.4g}", "at most 0", "pass log(gate)")
    return x.clone()


@_checked.register_fake
def _(x: Tensor, name: str, is_gate: bool) -> Tensor:
    return torch.empty_like(x)


_checked.register_autograd(lambda ctx, grad: (grad, None, None))
