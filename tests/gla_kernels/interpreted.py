"""Runs one group of cases in Triton's interpreter, in a process of its own: `interpreted.py GROUP`.

Prints a line of JSON a case: its label, and each result's error over its limit (at most 1 is
right). Uninitialized memory is NaN; the interpreter's checks are on.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

import torch  # noqa: E402
from oracle import recurrence  # noqa: E402

from gla.testing import error, limit, make_inputs  # noqa: E402
from tests.gla_kernels import beside  # noqa: E402
from tests.ops import agreement  # noqa: E402
from tools import interpreter  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF = math.inf

# Keywords of `run`; unless they say otherwise, B 1, T 100, H 2, K = V = 32, a gate a channel, fp32.
GROUPS: dict[str, list[dict]] = {
    "gates": [
        dict(gate="none"),
        dict(gate="fixed", level=-1.0),
        dict(gate="head", level=-6.0, pattern="half"),
        dict(gate="channel"),
        dict(gate="head", dtype=BF16, gate_dtype=FP32),
    ],
    "levels": [
        dict(level=0.0),
        dict(level=-5.9, tokens=70),
        dict(level=-20.0, pattern="half", tokens=70),
        dict(level=-88.0, tokens=70, dtype=BF16),
        dict(level=-1e4, pattern="half", tokens=70),
    ],
    "resets": [
        dict(level=-INF, pattern="spikes"),
        dict(level=-INF, tokens=70),
        dict(level=-INF, pattern="half", tokens=70, dtype=BF16),
        dict(gate="head", level=-INF, pattern="spikes", tokens=70),
    ],
    "low precision": [
        dict(dtype=BF16),
        dict(dtype=BF16, gate="none"),
        dict(dtype=BF16, gate_dtype=FP32, level=-1.0),
        dict(dtype=BF16, level=-6.0, pattern="half", tokens=70),
        dict(dtype=FP16, gate="head"),
    ],
    "sizes": [
        dict(key_dim=24, value_dim=40, tokens=65, heads=1),
        dict(key_dim=1, value_dim=1, tokens=17),
        dict(key_dim=80, value_dim=8, tokens=63, heads=1, level=-6.0),
        dict(key_dim=16, value_dim=136, tokens=64, heads=1, dtype=BF16),
        dict(key_dim=256, value_dim=16, tokens=33, heads=1, dtype=BF16),
    ],
    "heads and strides": [
        dict(heads=4, kv_heads=2, tokens=70),
        dict(heads=2, kv_heads=1, tokens=70, gate="head", dtype=BF16),
        dict(batch=3, heads=1, tokens=65, strided=True),
        dict(batch=2, heads=1, tokens=65, strided=True, gate="none", state=False),
        dict(tokens=70, dtype=BF16, value_dtype=FP32),
    ],
    "short": [
        dict(tokens=1, batch=2),
        dict(tokens=3, level=-INF, pattern="half"),
        dict(tokens=16, gate="head", kv_heads=1, dtype=BF16),
        dict(tokens=5, offsets=[0, 2, 2, 5], gate="none"),
    ],
    "segments": [
        dict(tokens=200, segment=64),
        dict(tokens=200, segment=128, gate="none", dtype=BF16),
        dict(tokens=150, segment=64, gate="head", level=-20.0, pattern="half", heads=1, batch=2),
    ],
    "packed": [
        dict(tokens=150, offsets=[0, 3, 3, 70, 150], heads=1),
        dict(tokens=130, offsets=[0, 1, 130, 130], heads=1, gate="none", dtype=BF16),
        dict(tokens=70, offsets=[0, 0, 64, 70], heads=1, state=False, strided=True),
    ],
    "op": [
        dict(through_op=True, tokens=37),
        dict(through_op=True, tokens=37, normalizer=True, positive=True, gate="head"),
        dict(through_op=True, tokens=20, normalizer=True, positive=True, dtype=BF16),
        dict(through_op=True, tokens=1, dtype=BF16, gate="fixed"),
    ],
    "norm and gate": [
        dict(norm_gate=(3, 5, 24)),
        dict(norm_gate=(70, 3, 64), dtype=BF16),
        dict(norm_gate=(9, 2, 40), dtype=FP16, gate_dtype=FP32),
        dict(norm_gate=(0, 2, 16)),
    ],
    "convolution": [
        dict(tokens=100, channels=24, width=4, batch=2),
        dict(tokens=70, channels=80, width=3, dtype=BF16, strided=True),
        dict(tokens=5, channels=8, width=7, dtype=FP16, only="final"),
        dict(tokens=66, channels=8, width=1, state=False, only="y"),
        dict(tokens=130, channels=8, width=40),
        dict(tokens=1, channels=300, width=4, batch=3, dtype=BF16),
        dict(tokens=0, channels=8, width=4, batch=2),
    ],
    "packed convolution": [
        dict(tokens=150, channels=24, width=4, offsets=[0, 0, 2, 2, 65, 150, 150]),
        dict(tokens=130, channels=40, width=5, offsets=[0, 64, 130], dtype=BF16),
        dict(tokens=12, channels=16, width=4, offsets=[0, 1, 1, 12], state=False),
        dict(tokens=0, channels=16, width=4, offsets=[0, 0, 0]),
    ],
    "loss": [
        dict(rows=23, vocabulary=11),
        dict(rows=50, vocabulary=300, chunk=2000, dtype=BF16),
        dict(rows=3, vocabulary=9000, weight_dtype=FP32),
        dict(rows=40, vocabulary=128, dtype=FP16, ignore_index=7, size=8.0),
        dict(rows=8, vocabulary=40, ignore=1.0),
        dict(rows=0, vocabulary=40),
        dict(logits=True, dtype=FP32),
        dict(logits=True, dtype=BF16),
    ],
    "operators": [
        dict(operator="chunkwise"),
        dict(operator="chunkwise", segment=64),
        dict(operator="norm_gate"),
        dict(operator="short_convolution"),
        dict(operator="cross_entropy"),
    ],
    "models": [
        dict(kind="linear_attention", packed=True),
        dict(kind="linear_attention", compiled=True),
        dict(kind="mamba2"),
        dict(kind="linear_attention", autocast=True),
    ],
    "packed segments": [
        dict(tokens=250, offsets=[0, 3, 150, 150, 250], segment=64, heads=1),
        dict(tokens=250, offsets=[0, 130, 250], segment=64, heads=1, level=-INF, pattern="spikes"),
    ],
}

MEASURES = {
    "norm and gate": beside.run_norm_gate,
    "convolution": beside.run_convolution,
    "packed convolution": beside.run_convolution,
    "loss": beside.run_loss,
    "operators": beside.run_operator,
    "models": beside.run_model,
}


def run(
    *,
    segment: int | None = None,
    offsets: list[int] | None = None,
    strided: bool = False,
    value_dtype: torch.dtype | None = None,
    **keywords,
) -> dict[str, float]:
    """Error over limit of o, the final state and every gradient, both of them in the loss."""
    from gla_kernels.ops import chunkwise

    sizes: dict[str, Any] = dict(batch=1, tokens=100, heads=2, key_dim=32, value_dim=32) | keywords
    sequences = None if offsets is None else len(offsets) - 1
    inputs = make_inputs(**sizes, sequences=sequences)
    dtypes = [inputs.q.dtype]
    names = ["q", "k", "v", "log_decay", "S"]
    state = None if inputs.initial_state is None else inputs.initial_state.S
    tensors = [inputs.q, inputs.k, inputs.v, inputs.log_decay, state]
    if value_dtype is not None:
        tensors[2] = inputs.v.to(value_dtype)
    given = [(n, x) for n, x in zip(names, tensors, strict=True) if x is not None]
    leaves = {n: x.clone().requires_grad_() for n, x in given}
    wide = {n: x.double().requires_grad_() for n, x in given}
    arguments = {n: _strided(x) if strided else x for n, x in leaves.items()}
    cu = None if offsets is None else torch.tensor(offsets)
    if cu is not None and strided:
        cu = torch.stack([cu, cu + 1], 1)[:, 0]
    scale = 0.3

    q, k, v = (arguments.pop(n) for n in "qkv")
    gate, start = arguments.get("log_decay"), arguments.get("S")
    o, S, _ = chunkwise(q, k, v, gate, start, cu, scale, segment)
    expected = recurrence(
        wide["q"],
        wide["k"],
        wide["v"],
        wide.get("log_decay"),
        wide.get("S"),
        scale=scale,
        cu_seqlens=cu,
    )
    draws = torch.Generator().manual_seed(7)
    do = torch.randn(o.shape, generator=draws).to(o.dtype)
    if strided:
        do = do[..., :1].expand(o.shape)
    dS = torch.randn(S.shape, generator=draws)
    grads = torch.autograd.grad([o, S], list(leaves.values()), [do, dS])
    wanted = torch.autograd.grad(
        [expected.o, expected.S], list(wide.values()), [do.double(), dS.double()]
    )
    errors = {
        "o": error(o, expected.o) / limit(*dtypes),
        "S_T": error(S, expected.S) / limit(*dtypes),
    }
    for name, grad, reference in zip(leaves, grads, wanted, strict=True):
        assert grad.dtype == leaves[name].dtype
        errors["d" + name] = error(grad, reference) / limit(*dtypes, gradient=True)
    return errors


def run_op(**keywords) -> dict[str, float]:
    """The same through ``gla.gated_linear_attention(impl="triton")``, normalizer included."""
    sizes: dict[str, Any] = dict(batch=2, heads=1, key_dim=16, value_dim=16) | keywords
    inputs = make_inputs(**sizes)
    normalize = keywords.get("normalizer", False)
    got = agreement.evaluate(inputs, "triton", normalize=normalize)
    want = agreement.expect(inputs, normalize=normalize)
    errors = {}
    for name, x in got.values.items():
        errors[name] = error(x, want.values[name]) / limit(inputs.q.dtype)
    for name, x in got.gradients.items():
        distance = error(x, want.gradients[name])
        errors["d" + name] = distance / limit(inputs.q.dtype, gradient=True)
    return errors


def _strided(x: torch.Tensor) -> torch.Tensor:
    """The same values as a slice of a wider tensor whose heads lie before its tokens."""
    if x.dim() < 4 or (x.dtype == torch.float32 and x.shape[1] == 1):
        return x
    wide = torch.cat([x, torch.full_like(x, torch.nan)], -1).transpose(1, 2).contiguous()
    return wide.transpose(1, 2)[..., : x.shape[-1]]


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    interpreter.fix_bf16()
    interpreter.add_checks()
    group = sys.argv[1]
    for keywords in GROUPS[group]:
        label = ", ".join(f"{name} {value}" for name, value in keywords.items())
        options = dict(keywords)
        measure = run_op if options.pop("through_op", False) else MEASURES.get(group, run)
        if options.pop("logits", False):
            measure = beside.run_logits
        print(json.dumps({"case": label, "errors": measure(**options)}), flush=True)


if __name__ == "__main__":
    main()
