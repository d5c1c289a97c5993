"""Floating-point operations of a model, counted layer by layer, and what a device can do.

A multiplication and an addition are two operations. Only products of matrices are counted: norms,
gates and activations are left out, as in PaLM's definition of model FLOPs utilization (Chowdhery et
al. 2022, arXiv 2204.02311). The backward pass takes twice the forward pass; what activation
checkpointing computes again is not counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gla.errors import GlaError
from gla.layers.cached_attention import CachedAttention
from gla.layers.linformer import Linformer
from gla.layers.linformer_causal import LinformerCausal
from gla.layers.mixer import Mixer
from gla.layers.nystrom import Nystrom
from gla.layers.short_convolution import ShortConvolution
from gla.state import LinearState

BACKWARD = 2  # times the forward pass

# Dense bf16 operations a second with sums in fp32 (fp16 for the two that have no bf16), from the
# makers' data sheets, by what is left of a device's name without ``_BESIDE``.
_PEAKS = {
    "b200": 2250e12,
    "h200": 989e12,
    "h200 nvl": 836e12,
    "h100": 989e12,
    "h100 nvl": 835e12,
    "h100 pcie": 756e12,
    "a100": 312e12,
    "a100 pcie": 312e12,
    "l40s": 362e12,
    "l40": 181e12,
    "l4": 121e12,
    "a40": 150e12,
    "a10": 125e12,
    "a10g": 70e12,
    "rtx a6000": 155e12,
    "rtx 5090": 209e12,
    "rtx 4090": 165e12,
    "rtx 3090": 71e12,
    "v100": 125e12,
    "v100 pcie": 112e12,
    "t4": 65e12,
    "mi300x": 1307e12,
    "mi250x": 191e12,  # torch sees each of its two dies as a device
}
# Makers, families, sockets and memories. Any other word ("Ti", "Laptop", "MIG") is another device.
_BESIDE = re.compile(r"nvidia|tesla|geforce|amd|instinct|radeon|sxm\d?|oam|hbm\d\w?|\d+gb")


def flops_per_token(model: nn.Module, seq_len: int) -> dict[str, float]:
    """Return the operations of a forward pass for a token, by part of the model.

    Args:
        model: With ``blocks``, each with a ``mixer``.
        seq_len: Tokens of a row: layers of softmax attention read what stands before a token.

    Returns:
        ``blocks.N.mixer``, ``blocks.N.mlp`` and ``head`` (or further parts), with their sums. Of a
        mixer of one's own that has no matrix state and does not tell ``mixing_flops(seq_len)``,
        only the linear maps are counted.
    """
    counts: dict[str, float] = {}
    for name, module in model.named_modules():
        parts = name.split(".")
        part = ".".join(parts[:3]) if parts[0] == "blocks" else parts[0]
        if count := _own_flops(module, seq_len):
            counts[part] = counts.get(part, 0.0) + count
    tied = getattr(model, "head", 1) is None
    if tied:  # the head multiplies with the embedding
        counts["head"] = 2.0 * model.embed.weight.numel()  # type: ignore[union-attr]
    return counts


def _own_flops(module: nn.Module, seq_len: int) -> float:
    """Operations a token of a module itself, its parts left out."""
    if isinstance(module, nn.Linear | ShortConvolution):
        return 2.0 * module.weight.numel()
    if not isinstance(module, Mixer):
        return 0.0
    mixing = getattr(module, "mixing_flops", None)  # a mixer of one's own may tell
    if mixing is not None:
        return float(mixing(seq_len))
    if isinstance(module, CachedAttention):
        read = tokens_read(module, seq_len)
        return 4.0 * module.out_proj.in_features * read  # scores, and their sum of values
    if isinstance(module, LinformerCausal):
        read, config = slots_and_tokens_read(module, seq_len), module.config
        into_slots = 4.0 * config.k * module.num_kv_heads * module.dim  # of a key and a value
        return into_slots + 4.0 * module.out_proj.in_features * read
    if isinstance(module, Linformer):
        return _linformer(module)
    if isinstance(module, Nystrom):
        return _nystrom(module, seq_len)
    try:
        state = module.init_state(1)
    except GlaError:  # one that reads both ways, or keeps none
        return 0.0
    # A state takes in k v^T and is read by q: two products of K x V a head.
    return 4.0 * sum(S.numel() for S in _matrix_states(state))


def slots_and_tokens_read(mixer: LinformerCausal, seq_len: int) -> float:
    """Return how many slots and tokens a token reads on average.

    It reads its block as far as itself, from the second block on the one before, and from the
    third on the slots.
    """
    k, c = mixer.config.k, mixer.config.block
    whole, rest = divmod(seq_len, c)
    own = whole * c * (c + 1) / 2 + rest * (rest + 1) / 2
    return (own + c * max(0, seq_len - c) + k * max(0, seq_len - 2 * c)) / seq_len


def _linformer(mixer: Linformer) -> float:
    """Products with E and F, scores and values; mixing E by length is not counted."""
    return 8.0 * mixer.config.k * mixer.num_heads * mixer.dim


def _nystrom(mixer: Nystrom, seq_len: int) -> float:
    """Landmarks, scores, the inverse, the convolution; products with values go from the right."""
    config, width = mixer.config, mixer.num_heads * mixer.dim
    m, squared = config.landmarks, config.landmarks**2
    # means @ q, means @ k; near, far; far @ v; near @ …: a token's share of each is 2 m a channel
    tokens = 12.0 * m * width
    # middle; inverse @ …; four products an iteration, once a document
    document = 4.0 * squared * width + 8.0 * config.iterations * m * squared * mixer.num_heads
    return tokens + document / seq_len + 2.0 * config.conv_width * width


def _matrix_states(state: object) -> Iterator[Tensor]:
    """Yield the S of every ``LinearState`` in a state."""
    if isinstance(state, LinearState):
        yield state.S
    elif isinstance(state, tuple):
        for part in state:
            yield from _matrix_states(part)


def tokens_read(mixer: CachedAttention, seq_len: int) -> float:
    """Return how many tokens a token of softmax attention reads on average."""
    config = mixer.config
    window, full = getattr(config, "window", None), mean_context(seq_len, None)
    if window is None:
        return full
    # Further groups of tokens as large as the window: rounds of Reformer, blocks of BigBird.
    groups = getattr(config, "rounds", 1) + getattr(config, "random_blocks", 0)
    return min(full, mean_context(seq_len, window * groups + mixer.pinned))


def mean_context(seq_len: int, window: int | None) -> float:
    """Return how many tokens a token reads on average, itself included."""
    window = min(window or seq_len, seq_len)
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return what a GPU can do a second at half precision, or None where that is not known."""
    if device.type != "cuda" or precision == "fp32":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """Return the peak of a device by the name that its driver gives, compared in whole words."""
    words = re.split(r"[\s-]+", name.lower())
    return _PEAKS.get(" ".join(word for word in words if not _BESIDE.fullmatch(word)))
