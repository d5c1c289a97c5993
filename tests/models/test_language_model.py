"""What a whole model promises, in fp64, for pure models of every preset and for a hybrid."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gla.errors import ConfigError, StateError
from gla.models.config import ModelConfig
from gla.models.language_model import LanguageModel
from gla.state import map_tensors, named_tensors, nbytes, select

TOLERANCE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-11}
T = 19


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 32, shape, generator=torch.Generator().manual_seed(seed))


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 16, T - 1])
def test_split_anywhere_changes_nothing(model, cut):
    tokens = draw(2, T)
    whole, end = model(tokens)
    first, state = model(tokens[:, :cut])
    second, state = model(tokens[:, cut:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, **TOLERANCE)
    assert torch.equal(state.position, end.position)


def test_prefill_and_decoding_equal_forward(model):
    tokens = draw(2, T)
    whole, _ = model(tokens)
    logits, state = model.prefill(tokens[:, :11], piece=4)
    torch.testing.assert_close(logits, whole[:, 10], **TOLERANCE)
    for t in range(11, T):
        logits, state = model.decode_step(tokens[:, t], state)
        torch.testing.assert_close(logits, whole[:, t], **TOLERANCE)
    assert state.position.tolist() == [T, T]


def test_decoding_from_nothing_equals_forward(model):
    tokens = draw(2, 6)
    state = model.init_state(2)
    whole = model(tokens).logits
    for t in range(6):
        logits, state = model.decode_step(tokens[:, t], state)
        torch.testing.assert_close(logits, whole[:, t], **TOLERANCE)


def test_later_tokens_change_nothing(model):
    tokens = draw(1, T)
    whole = model(tokens).logits
    for p in range(1, T):
        changed = torch.cat([tokens[:, :p], (tokens[:, p:] + 7) % 32], 1)
        difference = model(changed).logits - whole
        assert difference[:, :p].abs().max() <= 1e-12
        assert difference[:, p].abs().max() > 1e-3


def test_packed_documents_equal_separate_ones_with_every_gradient(model):
    lengths = [1, 2, 3, 0, 8, 1, 4]
    tokens, targets = draw(1, 19), draw(1, 19, seed=2)
    targets[0, 5] = -100
    cu_seqlens = offsets(lengths)
    logits, end = model(tokens, cu_seqlens=cu_seqlens)
    loss = model.loss(tokens, targets, cu_seqlens=cu_seqlens, reduction="sum")
    packed = torch.autograd.grad(loss, list(model.parameters()))

    total = torch.zeros((), dtype=torch.float64)
    pairs = zip(tokens.split(lengths, 1), targets.split(lengths, 1), strict=True)
    start = 0
    for n, (x, y) in enumerate(pairs):
        if lengths[n] == 0:
            assert end.position[n] == 0
            continue
        alone, state = model(x)
        torch.testing.assert_close(logits[:, start : start + lengths[n]], alone, **TOLERANCE)
        next_token = draw(1, seed=n)
        from_pack = model.decode_step(next_token, select(end, [n]))[0]
        torch.testing.assert_close(from_pack, model.decode_step(next_token, state)[0], **TOLERANCE)
        total = total + torch.nn.functional.cross_entropy(
            alone[0], y[0], reduction="sum", ignore_index=-100
        )
        start += lengths[n]
    torch.testing.assert_close(loss, total, **TOLERANCE)
    separate = torch.autograd.grad(total, list(model.parameters()))
    for a, b in zip(packed, separate, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


MASKS = {
    "left": [[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1], [0] * 8 + [1]],
    "right": [[1, 1, 1, 1, 0, 0, 0, 0, 0], [1] + [0] * 8, [1] * 9],
    "inside": [[1, 0, 1, 1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 1, 0, 1, 0], [1] * 9],
    "one row": [[0, 0, 1, 1, 0, 1, 1, 1, 0]],
    "a row of pads": [[0] * 9, [1, 1, 1, 0, 0, 0, 1, 1, 1]],
}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("where", MASKS)
def test_pads_change_nothing(model, where, warm):
    mask = torch.tensor(MASKS[where]).bool()
    B = len(mask)
    tokens = draw(B, 9)
    state = model(draw(B, 7, seed=3)).state if warm else None
    logits, end = model(tokens, state, mask=mask)
    last, prefilled = model.prefill(tokens, state, mask=mask, piece=4)
    assert bool((logits[~mask] == 0).all())
    other = model(tokens.where(mask, (tokens + 11) % 32), state, mask=mask)
    assert torch.equal(other.logits, logits)
    for row in range(B):
        real = tokens[row, mask[row]].unsqueeze(0)
        if real.numel() == 0:
            assert bool((last[row] == 0).all())
            continue
        alone, after = model(real, select(state, [row]) if state else None)
        torch.testing.assert_close(logits[row, mask[row]], alone[0], **TOLERANCE)
        torch.testing.assert_close(last[row], alone[0, -1], **TOLERANCE)
        for ended in (end, prefilled):
            y, _ = model.decode_step(draw(1), select(ended, [row]))
            torch.testing.assert_close(y, model.decode_step(draw(1), after)[0], **TOLERANCE)


def test_a_row_in_a_batch_equals_the_row_alone_and_states_can_be_reordered(model):
    tokens = draw(3, T)
    logits, state = model(tokens)
    for row in range(3):
        torch.testing.assert_close(logits[[row]], model(tokens[[row]]).logits, **TOLERANCE)
    order = [2, 0, 2, 1]
    picked, _ = model.decode_step(draw(4), select(state, order))
    again, _ = model.decode_step(draw(4), model(tokens[order]).state)
    torch.testing.assert_close(picked, again, **TOLERANCE)


def test_decoding_leaves_its_state_as_it_was(model):
    _, state = model.prefill(draw(1, T))
    first, after = model.decode_step(draw(1), state)
    model.decode_step(draw(1, seed=9), state)
    model.decode_step(draw(1, seed=9), after)
    again, _ = model.decode_step(draw(1), state)
    assert torch.equal(first, again)


@torch.no_grad()
def test_decode_state_has_a_constant_size_unless_a_layer_reads_everything(make):
    for layers, constant in ((["gla", "ring", "conv"], True), (["gla", "softmax"], False)):
        model = make(layers, torch.float32)
        _, state = model.prefill(draw(1, 10))
        before = nbytes(state)
        _, state = model.prefill(draw(1, 300), state)
        assert (nbytes(state) == before) == constant


def test_state_carries_gradients(hybrid):
    tokens = draw(1, 8)
    whole = torch.autograd.grad(hybrid(tokens).logits[:, -1].sum(), list(hybrid.parameters()))
    state = hybrid(tokens[:, :4]).state
    split = hybrid(tokens[:, 4:], state).logits[:, -1].sum()
    for a, b in zip(whole, torch.autograd.grad(split, list(hybrid.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
    detached = map_tensors(state, torch.Tensor.detach)
    assert not any(x.requires_grad for _, x in named_tensors(detached))


@pytest.mark.parametrize("preset", ["gla", "linear", "softmax", "window"])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("d_model", [64, 512])
def test_the_first_loss_is_that_of_a_uniform_guess(preset, tie, d_model):
    torch.manual_seed(0)
    config = ModelConfig(
        d_model=d_model, vocab_size=1000, layers=[f"{preset}*4"], tie_embeddings=tie
    )
    model = LanguageModel(config)
    tokens = torch.randint(0, 1000, (2, 65))
    loss = model.loss(tokens[:, :-1], tokens[:, 1:]).item()
    assert abs(loss / math.log(1000) - 1) < 0.03


def test_initialization_is_the_documented_one(make):
    model = make(["gla", "softmax"], torch.float32, gain=1.0)
    big = LanguageModel(ModelConfig(d_model=256, vocab_size=500, layers=["gla*4", "softmax*4"]))
    assert abs(big.embed.weight.std().item() - 0.02) < 2e-3
    blocks: Any = big.blocks
    for block in blocks:
        assert abs(block.mixer.q_proj.weight.std().item() - 0.02) < 1e-3
        assert abs(block.mlp.up_proj.weight.std().item() - 0.02) < 1e-3
        for last in (block.mixer.out_proj, block.mlp.down_proj):
            assert abs(last.weight.std().item() - 0.02 / 4) < 5e-4  # sqrt(2 * 8 blocks) = 4
        assert torch.equal(block.mlp_norm.weight, torch.ones(256))
    with torch.device("meta"):
        deferred = LanguageModel(model.config)
    deferred.to_empty(device="cpu")
    for p in deferred.parameters():
        p.data.fill_(math.nan)
    torch.manual_seed(1)
    deferred.reset_parameters()
    torch.manual_seed(1)
    model.reset_parameters()
    for (name, a), b in zip(deferred.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_tied_and_untied_heads(make):
    tied, untied = make(["gla"], gain=1.0), make(["gla"], tie_embeddings=False, gain=1.0)
    assert untied.num_parameters() == tied.num_parameters() + 16 * 32
    assert "head.weight" in untied.state_dict() and "head.weight" not in tied.state_dict()
    tokens = draw(1, 5)
    logits = tied(tokens).logits
    with torch.no_grad():
        tied.embed.weight[0] += 1
    assert not torch.equal(tied(tokens).logits[..., 0], logits[..., 0])


def test_weights_round_trip_through_a_state_dict(model):
    other = LanguageModel(model.config).double()
    other.load_state_dict(model.state_dict())
    tokens = draw(1, T)
    assert torch.equal(model(tokens).logits, other(tokens).logits)


def test_no_state_when_not_asked_for(model):
    out = model(draw(1, 3), need_state=False)
    assert out.state is None
    assert torch.equal(out.logits, model(draw(1, 3)).logits)


@pytest.mark.parametrize("T", [1, 2, 3, 7, 17, 63, 64, 65, 129])
def test_any_length(hybrid, T):
    logits, state = hybrid(draw(1, T))
    assert logits.isfinite().all() and state.position.tolist() == [T]


def test_no_tokens(hybrid):
    _, state = hybrid(draw(1, 4))
    logits, after = hybrid(draw(1, 0), state)
    assert logits.shape == (1, 0, 32)
    y, _ = hybrid.decode_step(draw(1), after)
    torch.testing.assert_close(y, hybrid.decode_step(draw(1), state)[0], **TOLERANCE)


def test_half_precision(make):
    model = make(["full", "conv", "ring", "kernel"], torch.float32, gain=1.0)
    tokens, targets = draw(2, T), draw(2, T, seed=2)
    wanted = model.loss(tokens, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, state = model(tokens)
        loss = model.loss(tokens, targets)
        model.decode_step(tokens[:, 0], state)
    assert loss.dtype == torch.float32 and logits.dtype == torch.bfloat16
    torch.testing.assert_close(loss, wanted, rtol=1e-2, atol=1e-2)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    for layer in (state.layers[1], state.layers[3]):
        assert all(x.dtype == torch.float32 for _, x in named_tensors(layer))
    model.bfloat16()
    assert model(tokens).logits.dtype == torch.bfloat16


def test_a_mixer_that_cannot_do_what_is_asked_says_so_when_the_model_is_built():
    mixers = {"wide": {"kind": "softmax_attention", "num_heads": 3}}
    config = ModelConfig(d_model=16, vocab_size=8, layers=["wide"], mixers=mixers)
    with pytest.raises(ConfigError, match=r"^mixers\.wide\.num_heads: got 3 .* 16 % 3 = 1"):
        LanguageModel(config)


BAD_CALLS = {
    "tokens: got shape": lambda m: m(draw(4)),
    "tokens: got torch.float32": lambda m: m(draw(1, 4).float()),
    "tokens: got ids from 30 to 33, expected 0 to 31": lambda m: m(torch.arange(30, 34)[None]),
    "tokens: got ids from -1 to -1": lambda m: m.decode_step(
        -torch.ones(1).long(), m.init_state(1)
    ),
    "cu_seqlens: got B = 2": lambda m: m(draw(2, 4), cu_seqlens=offsets([4])),
    "cu_seqlens: got offsets from 0 to 3": lambda m: m(draw(1, 4), cu_seqlens=offsets([3])),
    "cu_seqlens: got shape": lambda m: m(draw(1, 4), cu_seqlens=offsets([4]).float()),
    "mask: got shape": lambda m: m(draw(1, 4), mask=torch.ones(1, 3).bool()),
    "mask: got a mask and cu_seqlens": lambda m: m(
        draw(1, 4), cu_seqlens=offsets([4]), mask=torch.ones(1, 4).bool()
    ),
    "targets: got shape": lambda m: m.loss(draw(1, 4), draw(1, 3)),
    "reduction: got 'none'": lambda m: m.loss(draw(1, 4), draw(1, 4), reduction="none"),
    "tokens: got T = 0": lambda m: m.prefill(draw(1, 0)),
    "tokens: got shape [1, 1]": lambda m: m.decode_step(draw(1, 1), m.init_state(1)),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_wrong_arguments_are_named(hybrid, message):
    with pytest.raises(ValueError) as error:
        BAD_CALLS[message](hybrid)
    assert str(error.value).startswith(message)
    assert "expected" in str(error.value) and "fix" in str(error.value)


def test_a_state_of_another_model_or_batch_is_refused(hybrid, make):
    with pytest.raises(StateError, match=r"state: got 1 layers, expected 4"):
        hybrid(draw(1, 3), make(["gla"]).init_state(1))
    with pytest.raises(StateError, match=r"state: got 2 sequences, expected 1"):
        hybrid(draw(1, 3), hybrid.init_state(2))
    with pytest.raises(StateError, match=r"state: got 1 sequences, expected 2"):
        hybrid.decode_step(draw(2), hybrid.init_state(1))
