"""A model as sessions and batches use it: reading, one step at a time, and the weights' width.

The eager step is ``LanguageModel.decode_step``. The compiled one computes the same in one graph
and writes the new state over the old one, so that nothing is allocated for it: on a CPU a graph of
``torch.export`` that Inductor compiles, on a GPU a CUDA graph. Which of them runs is the caller's
choice, never a guess.

Sizes: B rows, V vocabulary.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.fx.graph import CodeGen

from gla import state as states
from gla.errors import ConfigError, StateError
from gla.generate.int8 import FEW_ROWS, Int8Linear
from gla.layers.linear import Linear, WideModule
from gla.models.backbone import Block
from gla.models.inputs import check_step
from gla.models.language_model import LanguageModel
from gla.models.weights import gather
from gla.state import ModelState
from gla.tables import nearest

WIDTHS = ("fp32", "bf16", "int8")
PREFILL_TOKENS = 2048  # read at once, over all rows


class Decoder:
    """Reads and steps for any number of rows and sessions.

    Args:
        model: used as it is, in the mode (train or eval) that it is in.
        compiled: compile the step at its first call: some ten seconds on a CPU, for each of one row
            and many rows; again after the weights as a whole have moved or changed their dtype. A
            module or parameter that is replaced by itself later on is not noticed.

    Raises:
        ConfigError: compiling a model whose state grows.
    """

    def __init__(self, model: LanguageModel, compiled: bool = False) -> None:
        self.model = model
        self.device = model.embed.weight.device
        self.compiled = compiled
        self._graphs: dict[int, _Graph] = {}  # by rows, on a GPU
        self._steps: dict[int, Callable[..., list[Tensor]]] = {}  # by range of rows, on a CPU
        self._made_for: object = None  # the weights of these steps
        self._ends = [1]  # where the ranges of rows end
        self._layout: list[Any] = []  # of states
        # The last state of a compiled step, found to be right, and its tensors.
        self._known: tuple[ModelState | None, list[Tensor]] = None, []
        self._fingerprint: tuple[list[int], str] | None = None
        if compiled:
            _refuse_growth(model)

    def prefill(
        self, tokens: Tensor, state: ModelState | None, mask: Tensor | None = None
    ) -> tuple[Tensor, ModelState]:
        """``LanguageModel.prefill`` of tokens on any device; the given state stays as it was."""
        piece = max(64, PREFILL_TOKENS // max(1, tokens.shape[0]))
        mask = None if mask is None else mask.to(self.device)
        logits, after = self.model.prefill(tokens.to(self.device), state, mask, piece)
        # A graph takes one layout in memory.
        return logits, states.map_tensors(after, torch.Tensor.contiguous)

    @torch.no_grad()
    def step(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Read one token a row.

        Args:
            tokens: [B] integers, any device.
            state: of B rows. It may be overwritten: go on with the one returned.

        Returns:
            Logits [B, V] of the token after, and the next state.

        Raises:
            ConfigError: compiling without a C++ compiler.
            StateError: a state of another model or number of sequences.
            ValueError: tokens of another shape.
        """
        tokens = tokens.to(self.device, torch.int64).contiguous()
        if not self.compiled or tokens.shape[0] == 0:
            return self.model.decode_step(tokens, state)
        if self.device.type == "cuda":
            return self._replay(tokens, state), state
        check_step(len(self.model.blocks), tokens, state)
        graph = self._compiled_step(tokens)
        known, parts = self._known
        if state is not known:
            state, parts = self._known = self._checked(state)
        return graph(tokens, *parts)[0], state

    def _compiled_step(self, tokens: Tensor) -> Callable[..., list[Tensor]]:
        """The graph for so many rows, compiled if need be."""
        embedding = self.model.embed.weight
        weights = embedding.data_ptr(), embedding.dtype
        if self._made_for != weights:
            self._made_for, self._steps, self._known = weights, {}, (None, [])
            self._layout = _layout(states.tensors(self.model.init_state(1)))
            self._ends = [1, FEW_ROWS] if self.weights == "int8" else [1]
        number = bisect.bisect_left(self._ends, tokens.shape[0])
        if number not in self._steps:
            least, *most = [0, *self._ends][number:][:2]
            try:
                self._steps[number] = _compile(self.model, tokens, least + 1, *most)
            except torch._inductor.exc.InvalidCxxCompiler:  # pyright: ignore
                raise ConfigError(
                    "compile: got a machine without a C++ compiler, expected g++ or clang++; fix "
                    "by installing one or without compile"
                ) from None
        return self._steps[number]

    def _checked(self, state: ModelState) -> tuple[ModelState, list[Tensor]]:
        """The state as the graphs take it, which do not look, and its tensors."""
        state = states.map_tensors(state, torch.Tensor.contiguous)
        parts = states.tensors(state)
        rows = {x.shape[0] for x in parts}
        if _layout(parts) != self._layout or len(rows) > 1:
            raise StateError(
                "state: got tensors of other sizes, dtypes or devices, expected those of this "
                "model; fix by using the state of this model"
            )
        return state, parts

    def _replay(self, tokens: Tensor, state: ModelState) -> Tensor:
        """A step by the CUDA graph of so many rows; rows of other sessions may go in between."""
        mine = states.tensors(state)
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
        """SHA-256 of the model's architecture and weights; computed again where one changed."""
        weights = self.model.state_dict()
        versions = [n for x in weights.values() for n in (x.data_ptr(), x._version)]
        if self._fingerprint is None or self._fingerprint[0] != versions:
            architecture = self.model.config.with_impl("auto").model_dump_json()
            digest = hashlib.sha256(architecture.encode())
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
    """Keep a model's weights in fewer bits, in place, and gathered for reading on a CPU.

    With "bf16" weights and activations are bf16, with "int8" the weights of linear maps are 8-bit
    integers with a scale each row, and the rest is bf16; see ``gla.generate.int8``. Gates and
    states stay in fp32 in both. ``gla.models.weights.gather`` says what gathering is.

    Args:
        model: in eval mode; with fewer bits it cannot be trained afterwards.
        weights: "fp32" leaves the numbers as they are.

    Raises:
        ConfigError: another word.
    """
    if weights not in WIDTHS:
        raise ConfigError(f"weights: got {weights!r}, expected {nearest(str(weights), WIDTHS)}")
    if weights == "int8":
        if model.head is None:  # tied: rows are looked up in the one, and multiplied in the other
            model.head = cast(Linear, Int8Linear(model.embed.weight, None))
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and not isinstance(child, WideModule):
                    setattr(module, name, Int8Linear(child.weight, child.bias))
    model = model if weights == "fp32" else model.bfloat16()
    gather(model)
    return model


def _step_in_place(model: LanguageModel, tokens: Tensor, state: ModelState) -> Tensor:
    logits, after = model.decode_step(tokens, state)
    for old, new in zip(states.tensors(state), states.tensors(after), strict=True):
        old.copy_(new)
    return logits


def _layout(parts: list[Tensor]) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    """What all states of a model share: sizes but for rows, dtypes, devices."""
    return [(x.shape[1:], x.dtype, x.device) for x in parts]


class _Step(nn.Module):
    """A step as ``torch.export`` takes it: tensors in, those of the state written over.

    Args:
        model: the model.
        like: a state, for its layout.
    """

    def __init__(self, model: LanguageModel, like: ModelState) -> None:
        super().__init__()
        self.model, self.like = model, like

    def forward(self, tokens: Tensor, *tensors: Tensor) -> Tensor:
        """tokens [B] and the state's tensors -> logits [B, V]."""
        left = iter(tensors)
        return _step_in_place(
            self.model, tokens, states.map_tensors(self.like, lambda _: next(left))
        )


def _compile(
    model: LanguageModel, tokens: Tensor, least: int, most: int | None = None
) -> Callable[..., list[Tensor]]:
    """Compile the step for ``least`` to ``most`` rows; ``tokens`` has so many, as an example.

    Not by ``torch.compile``: what that checks before each call, hundreds of attributes of modules,
    takes as long as a third of the step.
    """
    state = model.init_state(len(tokens))
    left = states.tensors(state)
    sizes = None
    if least != most:
        rows = torch.export.Dim("rows", min=least, max=most)
        sizes = ({0: rows}, tuple({0: rows} for _ in left))
    step = _Step(model, state)
    exported = torch.export.export(step, (tokens, *left), dynamic_shapes=sizes, strict=False)
    graph = exported.module()
    graph.graph.set_codegen(CodeGen())  # tensors in, tensors out: no trees of them
    graph.recompile()
    fakes = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    # Sizes are checked by the caller: the graph would check those of all weights at every call.
    run = torch._inductor.compile(graph, fakes, options={"size_asserts": False})
    return cast(Callable[..., list[Tensor]], run)


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
    return _Graph(graph, tokens, states.tensors(state), logits)


def _refuse_growth(model: LanguageModel) -> None:
    for name, block in zip(model.config.layer_names, model.blocks, strict=True):
        if not cast(Block, block).mixer.step_is_one_graph:
            raise ConfigError(
                f"compile: got the layer {name!r}, whose step depends on its position, expected "
                "recurrent and window layers; fix by leaving compile out"
            )
    for name, x in states.named_tensors(model.init_state(1)):
        if 0 in x.shape:
            layer = model.config.layer_names[int(name.split(".")[1])]
            raise ConfigError(
                f"compile: got the layer {layer!r}, whose state grows with the text, expected "
                "states of constant size (recurrent and window layers); fix by leaving compile out"
            )
