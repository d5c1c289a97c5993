"""Two articles' tables, measured here, with the printed figures beside them.

The first (on linear attention in practice): one attention layer of width 512, batch 1, over the
length. The second (on Linformer): memory of the scores at batch 8, 2,048 tokens, 8 heads. Neither
names its device or its precision; ours run in fp32, whole layers with their projections.

Sizes: B batch, T tokens, D width, H heads, K dimension of a head, k slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from gla.compare.measure import available_memory, best_time, peak_memory_of
from gla.layers.linear import Linear
from gla.layers.mixer import build_mixer, mixer_config
from gla.models.config import presets

WIDTH, HEADS = 512, 8
LENGTHS = (1024, 4096, 8192, 16384, 65536)
BATCH, MEMORY_LENGTH = 8, 2048
SLOTS = (512, 256, 128)
_COPIES = 3  # of the scores: products, masked, weights
_COPIES_BACKWARD = 5  # products, scaled, weights, and the gradients of two of them

# Milliseconds and GB at LENGTHS; None: out of memory.
PRINTED = {
    "standard": {
        "ms": (3.2, 41.0, 158.0, None, None),
        "gb": (0.2, 2.1, 8.2, None, None),
    },
    "linear": {
        "ms": (4.1, 8.6, 14.3, 26.8, 98.6),
        "gb": (0.3, 0.4, 0.5, 0.7, 2.1),
    },
}
# MB of the scores.
PRINTED_MEMORY = {"standard": 1024, "linformer 512": 256, "linformer 256": 128, "linformer 128": 64}

Row = dict[str, Any]


class StandardAttention(nn.Module):
    """Softmax attention written out: all scores are in memory. x [B, T, D] -> [B, T, D].

    Args:
        causal: Whether a token reads itself and those before it only.
    """

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.qkv_proj, self.out_proj = Linear(WIDTH, 3 * WIDTH), Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        q, k, v = rearrange(self.qkv_proj(x), "b t (n h k) -> n b h t k", n=3, h=HEADS)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return self.out_proj(rearrange(scores.softmax(-1) @ v, "b h t k -> b t (h k)")), None


def scores_bytes(batch: int, length: int, keys: int) -> int:
    """Bytes of the scores of all heads in fp32."""
    return 4 * batch * HEADS * length * keys


def first_article(
    device: torch.device, seconds: float, lengths: Sequence[int], note: Callable[[str], None]
) -> list[Row]:
    """Measure a forward pass of one layer at each length.

    Returns:
        {"layer", "length", "ms", "gb", "needs_gb", "printed_ms", "printed_gb", "printed_oom"}; ms
        and gb are None where ``needs_gb`` of memory are not there.
    """
    layers = {
        "standard": StandardAttention(causal=True),
        "sdpa": _mixer("softmax", rotary=False),
        "linear": _mixer("linear", impl="torch"),
    }
    rows = []
    for name, layer in layers.items():
        layer.to(device).eval()
        for length in lengths:
            note(f"{name} at {length:,} tokens")
            needs = _COPIES * scores_bytes(1, length, length) if name == "standard" else 0
            ms, gb = _time_and_memory(layer, length, device, seconds, needs)
            rows.append(
                {
                    "layer": name,
                    "length": length,
                    "ms": ms,
                    "gb": gb,
                    "needs_gb": needs / 1e9,
                    **_printed(name, length),
                }
            )
    return rows


def _printed(layer: str, length: int) -> Row:
    if layer not in PRINTED or length not in LENGTHS:
        return {"printed_ms": None, "printed_gb": None, "printed_oom": False}
    ms, gb = (PRINTED[layer][unit][LENGTHS.index(length)] for unit in ("ms", "gb"))
    return {"printed_ms": ms, "printed_gb": gb, "printed_oom": ms is None}


@torch.no_grad()
def _time_and_memory(
    layer: nn.Module, length: int, device: torch.device, seconds: float, needs: int
) -> tuple[float | None, float | None]:
    if not _fits(needs, device):
        return None, None
    x = torch.randn(1, length, WIDTH, device=device)

    def run() -> None:
        layer(x, **({} if isinstance(layer, StandardAttention) else {"need_state": False}))

    peak = peak_memory_of(run, device)
    return 1e3 * best_time(run, device, seconds), None if peak is None else peak / 1e9


def _fits(needs: int, device: torch.device) -> bool:
    free = available_memory(device)
    return free is None or needs <= free * 0.8


def second_article(device: torch.device, note: Callable[[str], None]) -> list[Row]:
    """Measure the memory of a forward and backward pass of one bidirectional layer.

    Returns:
        {"layer", "keys", "needs_gb", "run", "scores_mb", "printed_mb", "peak_mb"}: keys that a
        query meets, whether the GB needed were there, the scores by their shape and as printed, and
        the measured peak of the whole pass. MB are 2^20 bytes.
    """
    layers: dict[str, tuple[nn.Module, int]] = {
        "standard": (StandardAttention(causal=False), MEMORY_LENGTH)
    }
    for k in SLOTS:
        table = {"kind": "linformer", "k": k, "n_max": MEMORY_LENGTH, "num_heads": HEADS}
        layers[f"linformer {k}"] = (build_mixer(WIDTH, mixer_config(table)), k)
    layers["sdpa"] = (_mixer("softmax", rotary=False, causal=False), 0)
    layers["linear"] = (_mixer("linear", causal=False), 0)
    rows = []
    for name, (layer, keys) in layers.items():
        note(f"{name}: memory")
        layer.to(device)
        x = torch.randn(BATCH, MEMORY_LENGTH, WIDTH, device=device)

        def run(layer: nn.Module = layer, x: Tensor = x) -> None:
            layer(x)[0].sum().backward()
            layer.zero_grad()

        needs = _COPIES_BACKWARD * scores_bytes(BATCH, MEMORY_LENGTH, keys)
        fits = _fits(needs, device)
        peak = peak_memory_of(run, device) if fits else None
        rows.append(
            {
                "layer": name,
                "keys": keys,
                "needs_gb": needs / 1e9,
                "run": fits,
                "scores_mb": scores_bytes(BATCH, MEMORY_LENGTH, keys) / 2**20,
                "printed_mb": PRINTED_MEMORY.get(name),
                "peak_mb": None if peak is None else peak / 2**20,
            }
        )
    return rows


def _mixer(name: str, **changes: Any) -> nn.Module:
    return build_mixer(WIDTH, mixer_config({**presets()[name], "num_heads": HEADS, **changes}))
