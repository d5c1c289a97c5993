"""Carried states, documents that see each other, and what a batch is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import gla
from gla import state as states
from gla.errors import CheckpointError, ConfigError
from gla.layers.linear_attention import LinearAttention
from gla.layers.mixer import build_mixer, mixer_config
from gla.models.language_model import LanguageModel
from gla.train.config import RunConfig
from gla.train.distributed import Ranks
from gla.train.flops import flops_per_token, peak_of
from gla.train.inputs import open_inputs, with_vocab_size
from gla.train.objective import LanguageModeling, check_state_is_bounded

Recipe = Callable[..., RunConfig]
CPU = torch.device("cpu")
LAYERS = ["gla", "window"]


def objective(recipe: Recipe, ranks: Ranks | None = None, **changes: object) -> LanguageModeling:
    config = with_vocab_size(recipe(model__layers=LAYERS, **changes), 300)
    torch.manual_seed(0)
    return LanguageModeling(config, open_inputs(config.data), CPU, "fp32", ranks)


def test_rows_that_go_on_give_the_loss_of_the_whole_text(recipe: Recipe) -> None:
    one = objective(recipe, train__carry_state=True, train__global_batch_size=2)
    steps, tokens, ends, total = 12, [], [0], 0.0
    targets: list[torch.Tensor] = []
    for step in range(steps):
        batch = one.batches(step)[0]
        with torch.no_grad():
            total += float(one.loss(batch, 0))
        one.settle(True)
        # Row 0 again, as a pack of documents from the epoch's start.
        row = one.source.batch(step, 0, 1)
        offsets = row.cu_seqlens.tolist()
        if row.goes_on[0] >= 0 and step:
            ends.pop()
        ends += [sum(map(len, tokens)) + end for end in offsets[1:]]
        tokens.append(row.tokens[0])
        targets.append(row.targets[0])
    assert len(ends) > 2  # documents ended and began on the way
    other = objective(recipe, train__carry_state=True, train__global_batch_size=2)
    second = [other.source.batch(step, 1, 1) for step in range(steps)]
    with torch.no_grad():
        first_row = one.model.loss(
            torch.cat(tokens)[None],
            torch.cat(targets)[None],
            cu_seqlens=torch.tensor(ends, dtype=torch.int32),
            reduction="sum",
        )
        state = one.model.init_state(1)
        alone = 0.0
        for row in second:
            whole = one._state_of(row, state)
            loss, after = one.model.loss_and_state(row.tokens, row.targets, whole, row.cu_seqlens)
            state = states.select(after, row.last)
            alone += float(loss)
    assert total == pytest.approx(float(first_row) + alone, rel=1e-5)


def test_a_skipped_step_goes_on_from_the_state_before(recipe: Recipe) -> None:
    one = objective(recipe, train__carry_state=True)
    one.loss(one.batches(0)[0], 0)
    one.settle(True)
    kept = one.tensors()
    one.loss(one.batches(1)[0], 0)
    one.settle(False)
    assert all(torch.equal(t, kept[n]) for n, t in one.tensors().items())
    assert all(not t.requires_grad for t in kept.values())


def test_carried_states_move_to_another_number_of_processes(recipe: Recipe) -> None:
    one = objective(recipe, train__carry_state=True)
    one.loss(one.batches(0)[0], 0)
    one.settle(True)
    saved = one.tensors()
    halves = [objective(recipe, Ranks(r, 2), train__carry_state=True) for r in range(2)]
    for half in halves:
        half.restore(saved)
    for name, tensor in saved.items():
        carried = [half._carried[0] for half in halves]
        parts = [dict(states.named_tensors(c))[name] for c in carried if c is not None]
        assert torch.equal(torch.cat(parts), tensor), name
    with pytest.raises(CheckpointError, match="carried"):
        halves[0].restore({name: tensor[:1] for name, tensor in saved.items()})


def test_a_state_that_grows_is_refused(recipe: Recipe) -> None:
    config = with_vocab_size(recipe(model__layers=["gla", "softmax"], train__carry_state=True), 300)
    with pytest.raises(ConfigError, match=r"train\.carry_state.*'softmax'.*window"):
        LanguageModeling(config, open_inputs(config.data), CPU, "fp32")
    model = LanguageModel(gla.ModelConfig(d_model=32, vocab_size=16, layers=LAYERS))
    check_state_is_bounded(model)


def test_documents_of_a_row_see_each_other_only_if_asked(recipe: Recipe) -> None:
    apart, together = (objective(recipe, train__isolate_documents=x) for x in (True, False))
    for step in range(20):
        a, b = apart.batches(step)[0], together.batches(step)[0]
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets)
        if len(a.cu_seqlens) > len(b.cu_seqlens):
            break
    else:
        raise AssertionError("no row holds two documents")
    assert len(b.cu_seqlens) == 5  # four rows
    assert set(b.cu_seqlens.tolist()) < set(a.cu_seqlens.tolist())
    first = b.cu_seqlens.tolist()
    inner = next(e for e in a.cu_seqlens.tolist() if e not in first)
    row_end = next(e for e in first if e > inner)
    changed = b.tokens.clone()
    changed[0, inner - 1] = (changed[0, inner - 1] + 1) % 300  # before the second document
    with torch.no_grad():
        for batch, moves in ((a, False), (b, True)):
            ends = batch.cu_seqlens
            one, other = (apart.model(t, cu_seqlens=ends).logits for t in (batch.tokens, changed))
            assert (not torch.equal(one[0, inner:row_end], other[0, inner:row_end])) == moves


@pytest.mark.parametrize("length", [48, 64])
@pytest.mark.parametrize(
    "table",
    [
        {"kind": "linformer", "k": 8, "num_heads": 4},
        {"kind": "linformer", "k": 8, "num_heads": 2, "projection": "input", "sharing": "none"},
        {"kind": "nystrom", "landmarks": 8, "num_heads": 4, "conv_width": 0},
        {"kind": "linformer_causal", "k": 8, "block": 16, "num_heads": 4, "num_kv_heads": 2},
    ],
    ids=lambda table: table["kind"],
)
def test_operations_of_slots_and_landmarks_are_those_that_torch_counts(table, length) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    mixer = build_mixer(64, mixer_config(table))
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([mixer])
    math = sdpa_kernel(SDPBackend.MATH)  # torch does not count the fused one of CPUs
    with FlopCounterMode(display=False) as counter, torch.no_grad(), math:
        mixer(torch.randn(1, length, 64))
    theirs = counter.get_total_flops() / length
    if table["kind"] == "linformer_causal":
        # torch counts the products with masked places too, and scores over twice the channels,
        # of which one half is zeros: a slot is read without rotation, a token with it.
        k, c = 8, 16
        theirs -= 6 * 64 * (k + 2 * c)
        for t in range(length):
            read = t % c + 1 + c * (t >= c) + k * (t >= 2 * c)
            theirs += 4 * 64 * read / length
    assert sum(flops_per_token(model, length).values()) == pytest.approx(theirs)


def test_operations_are_those_that_torch_counts() -> None:
    """Linear maps, and scores and values of softmax attention, against FlopCounterMode."""
    from torch.utils.flop_counter import FlopCounterMode

    length = 48
    for layers in (["gla"], ["softmax"], ["gla*2", "softmax"]):
        config = gla.ModelConfig(d_model=64, vocab_size=96, layers=layers)
        model = LanguageModel(config)
        tokens = torch.arange(length)[None]
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(tokens, need_state=False)
        counted = flops_per_token(model, length)
        assert set(counted) == {"head"} | {
            f"blocks.{i}.{part}" for i in range(len(model.blocks)) for part in ("mixer", "mlp")
        }
        ours = length * sum(counted.values())
        # The recurrence is one opaque operation to torch: 4 K V a token and head.
        recurrence = length * sum(
            4 * m.num_heads * m.key_dim * m.value_dim
            for m in model.modules()
            if isinstance(m, LinearAttention)
        )
        theirs = counter.get_total_flops()
        softmax = config.layer_names.count("softmax")
        # torch counts the whole square of scores, of which a causal layer needs (T + 1) / 2T.
        square = softmax * 4 * 64 * length * length
        seen = square if theirs > ours - recurrence else 0
        needed = softmax * 4 * 64 * length * (length + 1) / 2
        assert ours - recurrence - needed == pytest.approx(theirs - seen), layers


def test_the_recurrence_is_counted_as_its_two_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    heads, K, V, T = 2, 8, 16, 5
    config = gla.ModelConfig(
        d_model=32,
        vocab_size=16,
        layers=["x"],
        mixers={"x": {"kind": "linear_attention", "num_heads": heads, "key_dim": 16}},
    )
    model = LanguageModel(config)
    q, k, v = (torch.randn(heads, T, n) for n in (K, K, V))
    S = torch.zeros(heads, K, V)
    with FlopCounterMode(display=False) as counter:
        for t in range(T):
            S = S + torch.bmm(k[:, t, :, None], v[:, t, None, :])
            torch.bmm(q[:, t, None, :], S)
    linear = sum(
        2 * m.weight.numel()
        for name, m in model.blocks[0].named_modules()
        if isinstance(m, torch.nn.Linear) and name.startswith("mixer")
    )
    ours = flops_per_token(model, T)["blocks.0.mixer"] - linear
    assert ours * T == counter.get_total_flops()


# Mixers over slots of a whole document: only their linear maps are counted.
UNCOUNTED = {"linformer", "linformer_causal", "nystrom"}


@pytest.mark.parametrize("preset", sorted(gla.presets().keys() - UNCOUNTED))
def test_every_preset_is_counted(preset: str) -> None:
    model = LanguageModel(gla.ModelConfig(d_model=128, vocab_size=16, layers=[preset]))
    linear = sum(
        2 * m.weight.numel()
        for name, m in model.blocks[0].named_modules()
        if isinstance(m, torch.nn.Linear) and name.startswith("mixer")
    )
    short, long = (flops_per_token(model, n)["blocks.0.mixer"] - linear for n in (256, 4096))
    assert short > 0
    full = preset == "softmax"
    assert (long > 10 * short) == full  # all others read a bounded number of tokens, or a state


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA RTX A6000", 155),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 5090", 209),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla T4", 65),
        ("AMD Instinct MI250X", 191),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA A1000", None),
        ("NVIDIA T400", None),
        ("Quadro RTX 6000", None),
        ("", None),
    ],
)
def test_a_peak_is_found_by_whole_words(name: str, tflops: float | None) -> None:
    assert peak_of(name) == (None if tflops is None else tflops * 1e12)


def test_the_device_has_no_peak_on_a_cpu(recipe: Recipe) -> None:
    one = objective(recipe)
    figures = one.utilization(1000.0)
    assert set(figures) == {"tflops"}
    forward = sum(flops_per_token(one.model, 64).values())
    assert figures["tflops"] == pytest.approx(3 * forward * 1000 / 1e12)
