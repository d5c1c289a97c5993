"""Diagnostics against what is computed from the definitions, on small models in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gla.models.config import ModelConfig
from gla.models.diagnose import (
    attention_matrix,
    decays,
    diagnose,
    effective_rank,
    half_lives,
    look,
    mixers,
    output_std,
    projection_gradients,
    redraws,
    singular_values,
    state_growth,
)
from gla.models.encoder import Encoder, EncoderConfig
from gla.models.language_model import LanguageModel
from gla.train.device import prepare_blocks

TOKENS = torch.randint(32, (1, 37), generator=torch.Generator().manual_seed(0))
ENDS = torch.tensor([0, 20, 37])


def language_model(*layers: str, **mixers: dict[str, Any]) -> LanguageModel:
    torch.manual_seed(0)
    tables: dict[str, Any] = {"layers": list(layers), "mixers": mixers}
    model = LanguageModel(ModelConfig(d_model=16, vocab_size=32, **tables)).double().eval()
    return louder(model)


def encoder(*layers: str, **mixers: dict[str, Any]) -> Encoder:
    torch.manual_seed(0)
    tables: dict[str, Any] = {"layers": list(layers), "mixers": mixers}
    return louder(Encoder(EncoderConfig(d_model=16, vocab_size=32, **tables)).double().eval())


def louder(model: Any) -> Any:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and name[-1] not in "EF":
                p *= 10
    return model


def test_effective_rank_by_hand():
    values = torch.tensor([[3.0, 3.0, 3.0], [5.0, 0.0, 0.0], [0.0, 0.0, 0.0], [2.0, 1.0, 1.0]])
    wanted = [3, 1, 0, math.exp(0.5 * math.log(2) + 0.5 * math.log(4))]
    assert effective_rank(values).tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (1, 1)])
def test_the_matrix_of_softmax_attention(heads):
    table = {"kind": "softmax_attention", "num_heads": heads[0], "num_kv_heads": heads[1]}
    model = language_model("a", a={**table, "rotary": False})
    mixer: Any = mixers(model)["blocks.0.mixer"]
    x = torch.randn(1, 37, 16, dtype=torch.float64)
    q = mixer.q_proj(x).view(37, heads[0], -1)
    k = mixer.k_proj(x).view(37, heads[1], -1).repeat_interleave(heads[0] // heads[1], 1)
    scores = torch.einsum("thk,shk->hts", q, k) / mixer.dim**0.5
    future = torch.ones(37, 37).triu(1).bool()
    wanted = scores.masked_fill(future, -math.inf).softmax(-1)
    before = mixer(x)[0]
    torch.testing.assert_close(attention_matrix(mixer, x), wanted)
    assert torch.equal(mixer(x)[0], before)  # the hooks are gone


@pytest.mark.parametrize("name", ["window", "sinks", "reformer", "linformer_causal"])
def test_rows_of_causal_attention_are_weights_of_the_past(name):
    model = language_model(name)
    A = attention_matrix(mixers(model)["blocks.0.mixer"], torch.randn(1, 37, 16).double())
    assert A.triu(1).abs().max() == 0
    torch.testing.assert_close(A.sum(-1), torch.ones_like(A[..., 0]))


def test_the_matrix_of_linformer_has_the_rank_of_its_slots():
    model = encoder("a", a={"kind": "linformer", "num_heads": 2, "k": 3, "n_max": 40})
    mixer: Any = mixers(model)["blocks.0.mixer"]
    x = torch.randn(1, 37, 16, dtype=torch.float64)
    q, k = (p(x).view(37, 2, 8) for p in (mixer.q_proj, mixer.k_proj))
    slots = torch.einsum("kl,lhd->khd", mixer.E[:, :37], k)
    p = (torch.einsum("lhd,khd->hlk", q, slots) / 8**0.5).softmax(-1)
    torch.testing.assert_close(attention_matrix(mixer, x), p @ mixer.F[:, :37])
    values = singular_values(model, look(model, TOKENS), 37)["blocks.0.mixer"]
    assert values.shape == (2, 37)
    assert bool((values[:, 3:] < 1e-5 * values[:, :1]).all()) and bool((values[:, 2] > 0).all())


def test_recurrences_have_no_attention_matrix():
    model = language_model("gla", "softmax")
    assert list(singular_values(model, look(model, TOKENS), 37)) == ["blocks.1.mixer"]


def test_output_std_is_that_before_the_last_map():
    model = language_model("softmax", "gla")
    block: Any = model.blocks[0]
    last, block.mixer.out_proj = block.mixer.out_proj, torch.nn.Identity()
    x = block.mixer_norm(model.embed(TOKENS))
    parts = [block.mixer(x[:, a:b])[0] for a, b in ((0, 20), (20, 37))]
    wanted = float(torch.cat(parts, 1).detach().float().std())
    block.mixer.out_proj = last
    found = output_std(look(model, TOKENS, ENDS))
    assert list(found) == ["blocks.0.mixer", "blocks.1.mixer"]
    assert found["blocks.0.mixer"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks_are_looked_into_too(checkpointing, monkeypatch):
    model = language_model("gla")
    wanted = look(model, TOKENS)
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile(f, backend="eager"))
    prepare_blocks(model, torch.device("cpu"), compiled=True, checkpointing=checkpointing)
    with torch.no_grad():
        model(TOKENS)  # hooks that come after this are unknown to the compiled block
    found = look(model, TOKENS)
    assert output_std(found) == pytest.approx(output_std(wanted))
    torch.testing.assert_close(found.log_decays, wanted.log_decays)
    assert list(found.log_decays) == ["blocks.0.mixer"]


def test_one_pass_shows_what_passes_of_their_own_would():
    model = language_model("gla", "softmax", "linformer_causal")
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    diagnose(model, TOKENS, ENDS)
    assert calls == [1]
    packed, alone = look(model, TOKENS, ENDS), look(model, TOKENS[:, :20])
    one, other = singular_values(model, packed, 20), singular_values(model, alone, 20)
    assert (
        list(one) == ["blocks.1.mixer", "blocks.2.mixer"] and one["blocks.1.mixer"].shape[1] == 20
    )
    torch.testing.assert_close(one, other)
    first, second = (look(model, TOKENS[:, a:b]).state for a, b in ((0, 20), (20, 37)))
    wanted = torch.cat([first.layers[0].recurrent.S, second.layers[0].recurrent.S])
    torch.testing.assert_close(packed.state.layers[0].recurrent.S, wanted)


def test_decays_come_from_gated_layers_only_and_recording_ends():
    tables = {name: {"kind": "linear_attention", "gate": name} for name in ("none", "head")}
    model = language_model("none", "head", "gla", "window", **tables)
    seen = look(model, TOKENS, ENDS)
    found, lives = decays(seen), half_lives(seen)
    assert list(found) == list(lives) == ["blocks.1.mixer", "blocks.2.mixer"]
    for name, values in found.items():
        assert bool(((values > 0) & (values < 1)).all())
        torch.testing.assert_close(values ** lives[name], torch.full_like(values, 0.5))
    model(TOKENS)
    assert all(getattr(m, "last_log_decay", None) is None for m in model.modules())


class Gate(torch.nn.Module):
    """One head keeps all, one forgets at once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.0, -math.inf])


def test_half_lives_of_fixed_gates_and_of_closed_ones():
    model = language_model(
        "a",
        "b",
        "softmax",
        a={"kind": "linear_attention", "gate": "fixed", "num_heads": 2},
        b={"kind": "linear_attention"},
    )
    lives = half_lives(look(model, TOKENS, ENDS))
    assert list(lives) == ["blocks.0.mixer", "blocks.1.mixer"]
    mixer: Any = mixers(model)["blocks.0.mixer"]
    decay = mixer.gate(torch.zeros(1, 1, 16, dtype=torch.float64)).exp().flatten()
    for life, gamma in zip(lives["blocks.0.mixer"].tolist(), decay.tolist(), strict=True):
        assert gamma**life == pytest.approx(0.5, rel=1e-4)
    mixer.gate = Gate()
    found = half_lives(look(model, TOKENS, ENDS))["blocks.0.mixer"].tolist()
    assert found == [1e6, 0]
    assert mixer.last_log_decay is None


def test_state_growth_by_a_loop():
    model = language_model("softmax", "gla")
    rows = state_growth(model, TOKENS)
    assert [row.position for row in rows] == [1, 2, 4, 8, 16, 32, 37]
    assert {row.layer for row in rows} == {"blocks.1.mixer"}
    state = None
    for t in range(37):
        state = model(TOKENS[:, t : t + 1], state=state).state
    S: Any = state.layers[1].recurrent.S[0].detach()  # type: ignore[union-attr]
    norms, ranks = [], []
    for head in S:
        values = torch.linalg.svd(head.float()).S
        share = values / values.sum()
        ranks.append(math.exp(-sum(float(p) * math.log(float(p)) for p in share if p > 0)))
        norms.append(float((head**2).sum().sqrt()))
    assert rows[-1].norm == pytest.approx(sum(norms) / len(norms), rel=1e-5)
    assert rows[-1].rank == pytest.approx(sum(ranks) / len(ranks), rel=1e-3)
    assert rows[0].rank == pytest.approx(1, rel=1e-3)  # one outer product


def test_gradients_of_projections():
    model = encoder("linformer*2")
    found = projection_gradients(model, lambda: model.masked_loss(TOKENS, TOKENS))
    model.masked_loss(TOKENS, TOKENS).backward()
    named: Any = dict(model.named_parameters())
    wanted = {n: float(p.grad.norm()) for n, p in named.items() if n[-1] in "EF"}
    assert found == pytest.approx(wanted)
    causal = language_model("a", a={"kind": "linformer_causal", "block": 4, "k": 2})
    grads = projection_gradients(causal, lambda: causal.loss(TOKENS[:, :-1], TOKENS[:, 1:]))
    assert list(grads) == ["blocks.0.mixer.slots.log_E"] and min(grads.values()) > 0
    assert projection_gradients(language_model("softmax"), pytest.fail) == {}  # no loss is made


def test_redraws_are_counted():
    model = language_model("softmax", "performer")
    assert redraws(model) == {"blocks.1.mixer": 0}
    feature_map: Any = mixers(model)["blocks.1.mixer"]
    feature_map.feature_map.redraws.fill_(3)
    assert redraws(model) == {"blocks.1.mixer": 3}


def test_what_a_run_watches_is_flat_and_finite():
    model = language_model("softmax", "gla", "performer", "linformer_causal", "hgrn2")
    values = diagnose(model, TOKENS, ENDS)
    kinds = {name.split("/")[0] for name in values}
    assert kinds == {
        "output_std",
        "decay",
        "half_life",
        "attention_rank",
        "state_norm",
        "state_rank",
        "redraws",
    }
    assert all(v.dim() == 1 and bool(v.isfinite().all()) for v in values.values())
    assert values["state_norm/blocks.4.mixer"].numel() == 2  # two documents, one head
    for layer in ("nystrom", "linformer", "linear"):
        found = diagnose(encoder(layer), TOKENS, ENDS)
        assert set(found) <= {"output_std/blocks.0.mixer", "attention_rank/blocks.0.mixer"}
