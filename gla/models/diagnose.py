"""What goes on inside a model: sizes of outputs, memory of gates and states, rank of attention.

Everything is measured on given tokens, from outside: hooks look at the maps of a mixer, and no
mixer knows of it. One forward pass, ``look``, shows what most of the figures here are made of.

Sizes: T tokens, H heads, G heads of keys and values, K key dimension, V value dimension.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from gla.layers.gates import DecayRecorder
from gla.layers.linformer import Linformer
from gla.layers.linformer_causal import BlockSlots, LinformerCausal
from gla.layers.mixer import Mixer
from gla.layers.nystrom import Nystrom
from gla.layers.reformer import Reformer
from gla.layers.softmax_attention import SoftmaxAttention
from gla.models.encoder import Encoder
from gla.models.language_model import LanguageModel
from gla.state import LinearState

Model = LanguageModel | Encoder

STD_BAND = (0.5, 2.0)  # where the outputs of a mixer ought to lie, before their last map
LONGEST_HALF_LIFE = 1e6  # tokens; a gate that forgets less counts as this
ATTENTION_TOKENS = 256  # tokens of which attention matrices are made

_STATES = 2  # documents whose states are measured in training: singular values take time

# Weights of tokens that a mixer reads values by: one matrix a head, found by reading unit vectors.
_BY_WEIGHTS = (SoftmaxAttention, Reformer, Linformer, LinformerCausal, Nystrom)


class Seen(NamedTuple):
    """What one forward pass showed, by layer.

    Attributes:
        inputs: [B, T, D], what each mixer was given.
        outputs: [B, T, ...], what each mixer made before its last map.
        log_decays: of each layer with a gate, a sample [n, ...] or [G], see ``DecayRecorder``.
        state: of a language model after the tokens; None of an encoder.
    """

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    log_decays: dict[str, Tensor]
    state: Any


class StateAt(NamedTuple):
    """A layer's matrix state after so many tokens: means over heads.

    Attributes:
        layer: name of the block's mixer.
        position: tokens read.
        norm: Frobenius norm of S.
        rank: effective rank of S.
    """

    layer: str
    position: int
    norm: float
    rank: float


def effective_rank(singular_values: Tensor) -> Tensor:
    """exp of the entropy of the singular values' shares (Roy and Vetterli 2007): [..., n] -> [...].

    n for n equal values, 1 for a single one, 0 where all are 0.
    """
    total = singular_values.sum(-1, keepdim=True)
    share = singular_values / total.clamp_min(torch.finfo(total.dtype).tiny)
    entropy = -torch.special.xlogy(share, share).sum(-1)
    return entropy.exp() * (total.squeeze(-1) > 0)


def mixers(model: Model) -> dict[str, Mixer]:
    """The mixer of each block by its name in the model."""
    return {f"blocks.{i}.mixer": cast(Any, b).mixer for i, b in enumerate(model.blocks)}


@torch.no_grad()
def look(model: Model, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Seen:
    """Run the model once, and keep what the functions below read.

    Args:
        model: in eval mode.
        tokens: [B, T] int64.
        cu_seqlens: [N+1], as the model takes it.
    """
    layers = mixers(model)
    gates = {n: m for n, m in layers.items() if isinstance(m, DecayRecorder)}
    with contextlib.ExitStack() as stack:
        # Compiled code calls no hook that came later. (Without it nothing can be compiled.)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        inputs = {n: stack.enter_context(_recorded(m)) for n, m in layers.items()}
        outputs = {n: stack.enter_context(_recorded(_last_map(m))) for n, m in layers.items()}
        log_decays = stack.enter_context(_decays_recorded(gates))
        out = model(tokens, cu_seqlens=cu_seqlens)
        return Seen(
            {n: x[0] for n, x in inputs.items()},
            {n: x[0] for n, x in outputs.items()},
            log_decays(),
            None if isinstance(out, Tensor) else out.state,
        )


def output_std(seen: Seen) -> dict[str, float]:
    """Standard deviation of what each mixer makes before its last map, by layer."""
    return {n: float(x.float().std()) for n, x in seen.outputs.items()}


def decays(seen: Seen) -> dict[str, Tensor]:
    """A sample [n] fp32 of each layer's decay: 1 keeps the memory, 0 forgets it."""
    return {n: x.float().flatten().exp() for n, x in seen.log_decays.items()}


def half_lives(seen: Seen) -> dict[str, Tensor]:
    """Tokens after which a gate has forgotten half: a sample [n] fp32 of each layer with a gate.

    ln 2 / -log_decay, at most ``LONGEST_HALF_LIFE``; 0 where a gate is closed.
    """
    return {
        n: (math.log(2) / -x.float().flatten()).nan_to_num(0).abs().clamp(0, LONGEST_HALF_LIFE)
        for n, x in seen.log_decays.items()
    }


@torch.no_grad()
def singular_values(model: Model, seen: Seen, length: int) -> dict[str, Tensor]:
    """Singular values of each layer's attention matrices, by layer: [H, T] fp32, falling.

    Layers whose outputs are no weighted sums of values (recurrences) are left out.

    Args:
        model: in eval mode.
        seen: what it was given.
        length: of the first document; of that, the first ``ATTENTION_TOKENS`` attend.
    """
    T = min(length, ATTENTION_TOKENS)
    return {
        n: torch.linalg.svdvals(attention_matrix(m, seen.inputs[n][:1, :T]).float())
        for n, m in mixers(model).items()
        if isinstance(m, _BY_WEIGHTS)
    }


@torch.no_grad()
def attention_matrix(mixer: Any, x: Tensor) -> Tensor:
    """The weights with which each head of a mixer sums up values: x [1, T, D] -> [H, T, T].

    The mixer is run on x with its values replaced by unit vectors, as many at a time as a head has
    channels, so what is found is what the mixer does, masks and positions included.
    """
    T, dim, H = x.shape[1], mixer.dim, mixer.num_heads
    heads = mixer.v_proj.out_features // dim
    columns = []
    for start in range(0, T, dim):
        values = x.new_zeros(T, dim)
        n = min(dim, T - start)
        values[range(start, start + n), range(n)] = 1
        units = values.repeat(1, heads).unsqueeze(0)
        with _replaced(mixer.v_proj, units), _recorded(mixer.out_proj) as seen:
            mixer(x, need_state=False)
        columns.append(seen[0][0].unflatten(-1, (H, dim))[..., :n])
    return torch.cat(columns, dim=-1).transpose(0, 1)


@torch.no_grad()
def state_growth(model: LanguageModel, tokens: Tensor) -> list[StateAt]:
    """Size and rank of the matrix states after 1, 2, 4, … tokens and at the end.

    Args:
        model: in eval mode.
        tokens: [1, T] int64.
    """
    T = tokens.shape[1]
    marks = [2**i for i in range(T.bit_length()) if 2**i < T] + [T]
    rows, state, before = [], None, 0
    for mark in marks:
        state = model(tokens[:, before:mark], state=state).state
        before = mark
        rows += [StateAt(n, mark, *_size_of(S)) for n, S in matrix_states(model, state)]
    return rows


def matrix_states(model: LanguageModel, state: Any) -> Iterator[tuple[str, Tensor]]:
    """The matrix state [N, H, K, V] of each layer that has one, by layer."""
    for name, layer in zip(mixers(model), state.layers, strict=True):
        for part in (layer, *layer):
            if isinstance(part, LinearState):
                yield name, part.S
                break


def projection_gradients(model: Model, loss: Callable[[], Tensor]) -> dict[str, float]:
    """Norm of the gradient of each Linformer's E and F (log_E of the block-causal one), by name.

    Args:
        model: any.
        loss: makes a scalar with a graph to the model's parameters; called where there are some.
    """
    found = {
        f"{name}.{part}": parameter
        for name, module in model.named_modules()
        if isinstance(module, Linformer | BlockSlots)
        for part, parameter in module.named_parameters(recurse=False)
        if part in ("E", "F", "log_E") and parameter.requires_grad
    }
    if not found:
        return {}
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss(), list(found.values()), allow_unused=True)
    return {n: 0.0 if g is None else float(g.norm()) for n, g in zip(found, gradients, strict=True)}


def redraws(model: Model) -> dict[str, int]:
    """How often each layer's random features were drawn again, by layer."""
    return {
        name.removesuffix(".feature_map"): int(cast(Any, module).redraws)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "redraws", None), Tensor)
    }


def diagnose(model: Model, tokens: Tensor, cu_seqlens: Tensor) -> dict[str, Tensor]:
    """All of the above that a training run watches: {"what/layer": values}, 1-D, fp32.

    Args:
        model: in eval mode.
        tokens: [1, T] int64.
        cu_seqlens: [N+1]; attention matrices are those of the first document, states those after
            the two longest.
    """
    seen = look(model, tokens, cu_seqlens)
    values = {f"output_std/{n}": torch.tensor([x]) for n, x in output_std(seen).items()}
    values |= {f"decay/{n}": x for n, x in decays(seen).items()}
    values |= {f"half_life/{n}": x for n, x in half_lives(seen).items()}
    spectra = singular_values(model, seen, int(cu_seqlens[1]))
    values |= {f"attention_rank/{n}": effective_rank(x) for n, x in spectra.items()}
    if isinstance(model, LanguageModel):
        lengths = cu_seqlens.diff()
        longest = lengths.topk(min(_STATES, len(lengths))).indices
        for name, S in matrix_states(model, seen.state):
            S = S[longest]
            values[f"state_norm/{name}"] = S.float().norm(dim=(-2, -1)).flatten()
            ranks = effective_rank(torch.linalg.svdvals(S.float()))
            values[f"state_rank/{name}"] = ranks.flatten()
    counts = {f"redraws/{n}": torch.tensor([float(x)]) for n, x in redraws(model).items()}
    return values | counts


def _size_of(S: Tensor) -> tuple[float, float]:
    norm = S.float().norm(dim=(-2, -1)).mean()
    return float(norm), float(effective_rank(torch.linalg.svdvals(S.float())).mean())


def _last_map(mixer: nn.Module) -> nn.Module:
    return getattr(mixer, "out_proj", mixer)


@contextlib.contextmanager
def _decays_recorded(
    layers: Mapping[str, DecayRecorder],
) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Let gates keep samples; yields what returns those of the latest pass."""
    for layer in layers.values():
        layer.record = True
    try:
        yield lambda: {
            n: m.last_log_decay for n, m in layers.items() if m.last_log_decay is not None
        }
    finally:
        for layer in layers.values():
            layer.record, layer.last_log_decay = False, None


@contextlib.contextmanager
def _recorded(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the first argument of each call of a module."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    try:
        yield seen
    finally:
        handle.remove()


@contextlib.contextmanager
def _replaced(module: nn.Module, output: Tensor) -> Iterator[None]:
    """Let a module return ``output`` whatever it is given."""
    handle = module.register_forward_hook(lambda *_: output)
    try:
        yield
    finally:
        handle.remove()
