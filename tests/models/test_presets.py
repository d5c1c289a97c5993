"""The contract of every mixer of a language model: each preset, whole models and single layers.

A mixer joins by being a preset. Its windows, blocks and slots are made small here, so that short
sequences pass all their edges.
"""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gla.layers.mixer import Mixer, build_mixer, mixer_config, register_mixer
from gla.layers.softmax_attention import SoftmaxAttention, SoftmaxAttentionConfig
from gla.models.config import ModelConfig, presets
from gla.models.language_model import LanguageModel
from gla.state import load, nbytes, save, select

D, V, T = 16, 32, 21
SMALL = {
    "window": 4, "global_tokens": 2, "random_blocks": 2, "buckets": 4, "state_dim": 6, "k": 3,
    "block": 4,
}  # fmt: skip
TOLERANCE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-11}
# Those whose decode state grows; the others promise a constant one.
GROWING = {"softmax", "bigbird", "reformer"}


def small(name: str) -> dict[str, Any]:
    """The table of a preset with two heads and with sizes that 21 tokens reach, chunks too."""
    table = presets()[name] | {"num_heads": 2}
    config = mixer_config(table)
    if hasattr(config, "chunk_size"):
        table["chunk_size"] = 16
    cut = {key: size for key, size in SMALL.items() if (getattr(config, key, None) or 0) > size}
    return table | cut


NAMES = [name for name in presets() if build_mixer(D, mixer_config(small(name))).causal]
every_preset = pytest.mark.parametrize("name", NAMES)


def make_mixer(name: str, **options: Any) -> Mixer:
    """One layer in fp64 with weights of unit gain."""
    torch.manual_seed(0)
    layer = build_mixer(D, mixer_config(small(name) | options)).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(std=p.shape[-1] ** -0.5 if p.dim() > 1 else 1.0)
    return layer


def make_model(
    name: str, dtype: torch.dtype = torch.float64, gain: float = 1.0, **options: Any
) -> LanguageModel:
    """Two blocks of a preset; ``gain`` multiplies the weights of its linear maps."""
    torch.manual_seed(0)
    options = {"d_model": D, "vocab_size": V, "layers": ["mixer*2"], **options}
    model = LanguageModel(ModelConfig(mixers={"mixer": small(name)}, **options)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p *= gain
    return model


def tokens(*shape: int, seed: int = 1, size: int = V) -> Tensor:
    return torch.randint(0, size, shape, generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_all_presets_are_here() -> None:
    wanted = (
        "linear performer based retnet lightning gla hgrn2 mamba2 softmax window sinks longformer "
        "bigbird reformer"
    )
    assert set(wanted.split()) <= set(NAMES)


class TestCausality:
    @every_preset
    def test_noise_from_any_place_on_changes_nothing_before_it(self, name):
        layer, x = make_mixer(name), noise(1, T, D)
        y, _ = layer(x)
        for p in range(T):
            changed = torch.cat([x[:, :p], 3 * noise(1, T - p, D, seed=3 + p)], 1)
            difference = (layer(changed)[0] - y).abs()
            assert p == 0 or difference[:, :p].max() <= 1e-12
            assert difference[:, p].max() > 1e-3

    @every_preset
    def test_the_jacobian_is_zero_above_the_diagonal_only(self, name):
        """Exactly 0; the chunked form gets a gate's gradient from sums that cancel to rounding."""
        weights = noise(T, D, seed=2)
        on_the_op = hasattr(mixer_config(small(name)), "impl")
        exact = {"impl": "recurrent", "chunk_size": None}
        forms: list[dict[str, Any]] = [{}, exact] if on_the_op else [{}]
        for options in forms:
            layer = make_mixer(name, **options)

            def outputs(x: Tensor, layer: Mixer = layer) -> Tensor:
                return (layer(x[None])[0][0] * weights).sum(-1)

            jacobian: Any = torch.autograd.functional.jacobian(outputs, noise(T, D))  # [T, T, D]
            size = jacobian.abs().amax(-1)
            limit = 1e-14 * size.max() if on_the_op and not options else 0
            assert bool((size.triu(1) <= limit).all())
            assert bool((size.diagonal() > 1e-6).all())


class TestSameWhateverTheWay:
    """Logits do not depend on how the tokens reach the model."""

    @every_preset
    def test_split_prefill_and_decoding(self, name):
        model, x = make_model(name, gain=10.0), tokens(2, T)
        whole, end = model(x)
        for cut in (1, 2, 3, 5, 8, T - 1):
            first, state = model(x[:, :cut])
            second, state = model(x[:, cut:], state)
            torch.testing.assert_close(torch.cat([first, second], 1), whole, **TOLERANCE)
            assert torch.equal(state.position, end.position)
        logits, state = model.prefill(x[:, :13], piece=5)
        torch.testing.assert_close(logits, whole[:, 12], **TOLERANCE)
        for start, before in ((13, state), (0, model.init_state(2))):
            state = before
            for t in range(start, T):
                logits, state = model.decode_step(x[:, t], state)
                torch.testing.assert_close(logits, whole[:, t], **TOLERANCE)

    @every_preset
    def test_packed_documents_and_their_gradients(self, name):
        model, lengths = make_model(name, gain=10.0), [1, 2, 0, 3, 11, 1, 8]
        x, y = tokens(1, sum(lengths)), tokens(1, sum(lengths), seed=2)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        parameters = list(model.parameters())
        loss = model.loss(x, y, cu_seqlens=cu_seqlens, reduction="sum")
        packed = torch.autograd.grad(loss, parameters)
        pairs = zip(x.split(lengths, 1), y.split(lengths, 1), strict=True)
        total = torch.stack([model.loss(a, b, reduction="sum") for a, b in pairs if a.numel()])
        torch.testing.assert_close(loss, total.sum(), **TOLERANCE)
        separate = torch.autograd.grad(total.sum(), parameters)
        for a, b in zip(packed, separate, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)

    @every_preset
    def test_pads_other_rows_and_a_warm_state(self, name):
        model, x = make_model(name, gain=10.0), tokens(3, 11)
        mask = torch.tensor([[0] * 4 + [1] * 7, [1, 0] * 5 + [1], [1] * 6 + [0] * 5]).bool()
        warm = model(tokens(3, 6, seed=4)).state
        for state in (None, warm):
            logits, end = model(x, state, mask=mask)
            other = model(x.where(mask, (x + 7) % V), state, mask=mask)
            assert torch.equal(other.logits, logits)
            for row in range(3):
                before = None if state is None else select(state, [row])
                alone, after = model(x[row, mask[row]].unsqueeze(0), before)
                torch.testing.assert_close(logits[row, mask[row]], alone[0], **TOLERANCE)
                next_token = tokens(1, seed=9)
                a, _ = model.decode_step(next_token, select(end, [row]))
                torch.testing.assert_close(a, model.decode_step(next_token, after)[0], **TOLERANCE)


@every_preset
def test_no_rows_no_tokens_and_empty_documents(name):
    model = make_model(name)
    warm, nothing = model(tokens(3, 9)).state, torch.tensor([0, 0, 3, 3])
    assert model(tokens(0, 5)).logits.shape == (0, 5, V)
    for state in (None, warm):
        assert model(tokens(3, 0), state).logits.shape == (3, 0, V)
        logits, after = model(tokens(1, 3), state, cu_seqlens=nothing)
        before = None if state is None else select(state, [1])
        torch.testing.assert_close(logits, model(tokens(1, 3), before).logits, **TOLERANCE)
        assert after.position.tolist() == [0, 3, 0] if state is None else [9, 12, 9]
    assert model(tokens(1, 0), cu_seqlens=torch.tensor([0])).logits.shape == (1, 0, V)


# Weights of one mixer with H heads at width d, by hand. RMSNorm of the output: one head's values.
COUNTS: dict[str, Callable[[int, int], int]] = {
    "linear": lambda d, H: 4 * d * d,
    "performer": lambda d, H: 4 * d * d,
    "based": lambda d, H: 2 * d * (d // 4) + 2 * d * d,
    "retnet": lambda d, H: 4 * d * d + d // H,
    "lightning": lambda d, H: 5 * d * d + d // H,
    "gla": lambda d, H: 4 * d * d + d // H + 16 * d + 16 * (d // 2) + d // 2,
    "hgrn2": lambda d, H: 4 * d * d + d // H + d,
    # projections of z, u and the output; of B and C; of the step; convolution; A, b and D; norm
    "mamba2": lambda d, H: 6 * d * d + 256 * d + d * H + 4 * (2 * d + 256) + 3 * H + 2 * d,
    "softmax": lambda d, H: 4 * d * d,
    "window": lambda d, H: 4 * d * d,
    "sinks": lambda d, H: 4 * d * d,
    "longformer": lambda d, H: 4 * d * d,
    "bigbird": lambda d, H: 4 * d * d,
    "reformer": lambda d, H: 3 * d * d,
    # 64 slots: weights of the 64 tokens of a block, and a decay
    "linformer_causal": lambda d, H: 4 * d * d + H * 64 * (64 + 1),
}


class TestWeights:
    @every_preset
    @pytest.mark.parametrize("d", [128, 192])
    def test_their_number(self, name, d):
        mixer = build_mixer(d, mixer_config(presets()[name]))
        heads: Any = mixer.num_heads
        assert heads == d // 64 * (2 if name == "mamba2" else 1)
        assert sum(p.numel() for p in mixer.parameters()) == COUNTS[name](d, heads)

    @every_preset
    def test_all_of_them_learn(self, name):
        model = make_model(name, gain=10.0)
        model.loss(tokens(2, T), tokens(2, T, seed=2)).backward()
        for weight, p in model.named_parameters():
            assert p.grad is not None and p.grad.abs().sum() > 0, weight

    @every_preset
    def test_they_travel_in_a_state_dict_before_any_forward(self, name):
        model = make_model(name)
        torch.manual_seed(5)
        other = LanguageModel(model.config).double()
        other.load_state_dict(model.state_dict())
        x = tokens(2, T)
        assert torch.equal(other(x).logits, model(x).logits)

    @every_preset
    def test_a_model_made_without_memory_draws_the_same_ones(self, name):
        model = make_model(name, torch.float32)
        with torch.device("meta"):
            deferred = LanguageModel(model.config)
        deferred.to_empty(device="cpu")
        for other in (deferred, model):
            torch.manual_seed(3)
            other.reset_parameters()
        for key, value in deferred.state_dict().items():
            assert torch.equal(value, model.state_dict()[key]), key

    @every_preset
    @pytest.mark.parametrize("d", [64, 256])
    def test_they_start_at_a_uniform_guess(self, name, d):
        torch.manual_seed(0)
        model = LanguageModel(ModelConfig(d_model=d, vocab_size=1000, layers=[f"{name}*3"]))
        x = tokens(2, 65, size=1000)
        loss = model.loss(x[:, :-1], x[:, 1:]).item()
        assert abs(loss / math.log(1000) - 1) < 0.03


@torch.no_grad()
@every_preset
def test_the_decode_state_is_as_large_as_promised(name):
    model = make_model(name, torch.float32)
    sizes = []
    state = model.init_state(1)
    for _ in range(3):
        _, state = model.prefill(tokens(1, 150), state)
        sizes.append(nbytes(state))
    assert (len(set(sizes)) > 1) == (name in GROWING)


@every_preset
def test_a_state_written_to_a_file_goes_on_as_it_was(name, tmp_path):
    model = make_model(name, torch.float32)
    _, state = model.prefill(tokens(1, T))
    save(state, tmp_path / "state")
    loaded, _ = load(tmp_path / "state", model.init_state(1))
    again = tokens(1, 9, seed=4)
    assert torch.equal(model(again, loaded).logits, model(again, state).logits)


@every_preset
def test_half_precision_is_finite(name):
    model, x = make_model(name, torch.float32), tokens(2, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(x, x)
        _, state = model(x)
        logits, _ = model.decode_step(x[:, 0], state)
    loss.backward()
    assert logits.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.bfloat16()
    logits, state = model(x)
    assert logits.isfinite().all()
    assert model.decode_step(x[:, 0], state)[0].isfinite().all()


def losses(model: LanguageModel, batches: list[Tensor], lr: float) -> list[float]:
    """Train on next tokens, a batch [B, T + 1] a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    found = []
    for x in batches:
        loss = model.loss(x[:, :-1], x[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def lead_on_fresh_tokens(model: LanguageModel, steps: int) -> float:
    """By how many standard errors the last 50 losses on iid tokens are below ln V."""
    batches = [tokens(8, 33, seed=100 + i, size=8) for i in range(steps)]
    last = torch.tensor(losses(model, batches, 1e-2)[-50:])
    return ((math.log(8) - last.mean()) / (last.std() / 50**0.5)).item()


class TestTraining:
    @every_preset
    def test_fresh_tokens_cannot_be_predicted(self, name):
        model = make_model(name, torch.float32, vocab_size=8)
        assert lead_on_fresh_tokens(model, steps=100) < 4

    def test_a_leak_would_be_noticed(self, monkeypatch):
        from gla.layers import mixer as module

        class LeakyConfig(SoftmaxAttentionConfig):
            kind: Any = "leaky"

        class Leaky(SoftmaxAttention):
            def set_depth(self, layer: int, layers: int) -> None:
                self.causal = False  # after the model has asked

        monkeypatch.setattr(module, "_MIXERS", dict(module._MIXERS))
        register_mixer("leaky", LeakyConfig, Leaky)
        torch.manual_seed(0)
        mixers = {"a": {"kind": "leaky"}}
        model = LanguageModel(ModelConfig(d_model=D, vocab_size=8, layers=["a*2"], mixers=mixers))
        assert lead_on_fresh_tokens(model, steps=100) > 10

    @every_preset
    def test_fifty_steps_on_real_text(self, name):
        text = torch.tensor(list(inspect.getsource(argparse).encode()))
        model = make_model(name, torch.float32, d_model=32, vocab_size=256)
        starts = [tokens(8, seed=i, size=len(text) - 65) for i in range(50)]
        batches = [torch.stack([text[s : s + 65] for s in rows]) for rows in starts]
        found = losses(model, batches, 1e-2)
        assert abs(found[0] / math.log(256) - 1) < 0.03
        assert sum(found[-5:]) / 5 < 3.2  # the entropy of single bytes is 3.1 nats
        assert sum(found[-5:]) < sum(found[20:25])


@pytest.mark.slow
@every_preset
def test_the_loss_is_one_graph(name):
    model, x = make_model(name, torch.float32), tokens(2, 24)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: model.loss(x, x), backend="aot_eager", fullgraph=True)
    wanted, got = model.loss(x, x), compiled(x)
    torch.testing.assert_close(got, wanted)
    gradients = [torch.autograd.grad(y, list(model.parameters())) for y in (got, wanted)]
    torch.testing.assert_close(gradients[0], gradients[1])
