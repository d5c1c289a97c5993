"""A model as sessions and batches use it: reading, one step at a time, and the weights' width.

The eager step is ``LanguageModel.decode_step``. The compiled one computes the same in one graph
and writes the new state over the old one, so that nothing is allocated for it: on a CPU a graph of
``torch.compile``, on a GPU a CUDA graph. Which of them runs is the caller's choice, never a guess.

Sizes: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from gla import state as states
from gla.errors import ConfigError
from gla.generate.int8 import Int8Linear
from gla.layers.linear import Linear, WideModule
from gla.models.language_model import LanguageModel
from gla.state import ModelState

WIDTHS = ("fp32", "bf16", "int8")
PREFILL_TOKENS = 2048  # read at once, over all rows


class Decoder:
    """Reads and steps for any number of rows and sessions.

    Args:
        model: used as it is, in the mode (train or eval) that it is in.
        compiled: compile the step at its first call: some ten seconds on a CPU, for each of one row
            and many rows.

    Raises:
        ConfigError: compiling a model whose state grows.
    """

    def __init__(self, model: LanguageModel, compiled: bool = False) -> None:
        self.model = model
        self.device = model.embed.weight.device
        self.compiled = compiled
        self._graphs: dict[int, _Graph] = {}
        self._fingerprint: tuple[list[int], str] | None = None
        if compiled:
            _refuse_growth(model)
            self._step = torch.compile(_step_in_place, fullgraph=True)

    def prefill(
        self, tokens: Tensor, state: ModelState | None, mask: Tensor | None = None
    ) -> tuple[Tensor, ModelState]:
        """``LanguageModel.prefill`` of tokens on any device; the given state stays as it was."""
        piece = max(64, PREFILL_TOKENS // max(1, tokens.shape[0]))
        mask = None if mask is None else mask.to(self.device)
        logits, after = self.model.prefill(tokens.to(self.device), state, mask, piece)
        # A graph is compiled for each layout in memory: let there be one.
        return logits, states.map_tensors(after, torch.Tensor.contiguous)

    @torch.no_grad()
    def step(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Read one token a row.

        Args:
            tokens: [B] int64, any device.
            state: of B rows. It may be overwritten: go on with the one returned.

        Returns:
            Logits [B, V] of the token after, and the next state.

        Raises:
            ConfigError: compiling without a C++ compiler.
        """
        tokens = tokens.to(self.device)
        if not self.compiled:
            return self.model.decode_step(tokens, state)
        if self.device.type == "cuda":
            return self._replay(tokens, state), state
        try:
            return self._step(self.model, tokens, state), state
        except torch._inductor.exc.InvalidCxxCompiler:  # pyright: ignore
            raise ConfigError(
                "compile: got a machine without a C++ compiler, expected g++ or clang++; fix by "
                "installing one or without compile"
            ) from None

    def _replay(self, tokens: Tensor, state: ModelState) -> Tensor:
        """A step by the CUDA graph of so many rows; rows of other sessions may go in between."""
        mine = [x for _, x in states.named_tensors(state)]
        graph = self._graphs.get(len(tokens))
        if graph is None:
            graph = self._graphs[len(tokens)] = _capture(self.model, tokens, state)
        torch._foreach_copy_(graph.buffers, mine)  # pyright: ignore
        graph.tokens.copy_(tokens)
        graph.graph.replay()
        torch._foreach_copy_(mine, graph.buffers)  # pyright: ignore
        return graph.logits.clone()

    @property
    def weights(self) -> str:
        """Width of the model's weights: "fp32", "bf16", "int8", or another dtype's name."""
        if any(isinstance(module, Int8Linear) for module in self.model.modules()):
            return "int8"
        name = str(self.model.embed.weight.dtype).removeprefix("torch.")
        return {"float32": "fp32", "bfloat16": "bf16"}.get(name, name)

    def fingerprint(self) -> str:
        """SHA-256 of the model's config and every weight; computed again where one changed."""
        weights = self.model.state_dict()
        versions = [n for x in weights.values() for n in (x.data_ptr(), x._version)]
        if self._fingerprint is None or self._fingerprint[0] != versions:
            digest = hashlib.sha256(self.model.config.model_dump_json().encode())
            for name, weight in sorted(weights.items()):
                digest.update(f"\n{name} {weight.dtype} {list(weight.shape)}\n".encode())
                flat = weight.detach().cpu().contiguous().reshape(-1)
                digest.update(flat.view(torch.uint8).numpy())
            self._fingerprint = versions, digest.hexdigest()
        return self._fingerprint[1]


class _Graph(NamedTuple):
    """A captured step and the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    buffers: list[Tensor]
    logits: Tensor


def narrow(model: LanguageModel, weights: str) -> LanguageModel:
    """Keep a model's weights in fewer bits, in place; see ``gla.generate.int8``.

    With "bf16" weights and activations are bf16, with "int8" the weights of linear maps are 8-bit
    integers with a scale each row, and the rest is bf16. Gates and states stay in fp32 in both.

    Args:
        model: in eval mode; it cannot be trained afterwards.
        weights: "fp32" leaves the model as it is.

    Raises:
        ConfigError: another word.
    """
    if weights not in WIDTHS:
        raise ConfigError(f"weights: got {weights!r}, expected one of {', '.join(WIDTHS)}")
    if weights == "fp32":
        return model
    if weights == "int8":
        if model.head is None:  # tied: rows are looked up in the one, and multiplied in the other
            model.head = cast(Linear, Int8Linear(model.embed.weight, None))
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and not isinstance(child, WideModule):
                    setattr(module, name, Int8Linear(child.weight, child.bias))
    return model.bfloat16()


def _step_in_place(model: LanguageModel, tokens: Tensor, state: ModelState) -> Tensor:
    logits, after = model.decode_step(tokens, state)
    olds, news = states.named_tensors(state), states.named_tensors(after)
    for (_, old), (_, new) in zip(olds, news, strict=True):
        old.copy_(new)
    return logits


def _capture(model: LanguageModel, tokens: Tensor, state: ModelState) -> _Graph:
    """Record a step on a side stream, as CUDA graphs ask for, after a few that warm it up."""
    tokens = tokens.clone()
    state = states.map_tensors(state, torch.clone)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            _step_in_place(model, tokens, state)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = _step_in_place(model, tokens, state)
    return _Graph(graph, tokens, [x for _, x in states.named_tensors(state)], logits)


def _refuse_growth(model: LanguageModel) -> None:
    for name, x in states.named_tensors(model.init_state(1)):
        if 0 in x.shape:
            layer = model.config.layer_names[int(name.split(".")[1])]
            raise ConfigError(
                f"compile: got the layer {layer!r}, whose state grows with the text, expected "
                "states of constant size (recurrent and window layers); fix by leaving compile out"
            )
