"""The encoder: pads and packs, the two losses, shared projections, files, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import tomli_w
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from gla import storage
from gla.errors import CheckpointError, ConfigError
from gla.models.config import ModelConfig
from gla.models.encoder import Encoder, EncoderConfig, sinusoids

MIXERS: dict[str, dict[str, Any]] = {
    "softmax": {"kind": "softmax_attention", "num_heads": 2},
    "linear": {
        "kind": "linear_attention",
        "gate": "none",
        "feature_map": "elu",
        "normalize": True,
        "num_heads": 2,
    },
    "linformer": {"kind": "linformer", "num_heads": 2, "k": 4, "n_max": 64},
    "shared": {"kind": "linformer", "num_heads": 2, "k": 4, "n_max": 64, "sharing": "layers"},
    "nystrom": {"kind": "nystrom", "num_heads": 2, "landmarks": 4, "conv_width": 3},
}
LENGTHS = [5, 1, 40, 17]


def make(name: str, gain: float = 10.0, **options: Any) -> Encoder:
    torch.manual_seed(0)
    tables: dict[str, Any] = {"layers": [f"{name}*2"], "mixers": {name: MIXERS[name]}, **options}
    config = EncoderConfig(d_model=16, vocab_size=32, classes=["a", "b", "c"], **tables)
    model = Encoder(config).double()
    with torch.no_grad():
        for n, p in model.named_parameters():
            if p.dim() > 1 and n[-1] not in "EF":
                p *= gain
    return model


@pytest.fixture(params=MIXERS)
def model(request: pytest.FixtureRequest) -> Encoder:
    return make(request.param)


def documents(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(32, (n,), generator=generator) for n in LENGTHS]


def padded(rows: list[torch.Tensor], where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 50 tokens with random pads behind, before or in between; and their mask."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(32, (len(rows), 50), generator=generator)
    mask = torch.zeros(len(rows), 50, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = {
            "right": torch.arange(len(row)),
            "left": torch.arange(50 - len(row), 50),
            "inside": torch.randperm(50, generator=generator)[: len(row)].sort().values,
        }[where]
        tokens[i, place], mask[i, place] = row, True
    return tokens, mask


@pytest.mark.parametrize("where", ["right", "left", "inside"])
@torch.no_grad()
def test_a_padded_batch_equals_documents_one_by_one(model, where):
    rows = documents()
    tokens, mask = padded(rows, where)
    h, logits = model(tokens, mask=mask), model.class_logits(tokens, mask=mask)
    assert not h[~mask].any()
    for i, row in enumerate(rows):
        torch.testing.assert_close(h[i, mask[i]], model(row[None])[0], rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(
            logits[i], model.class_logits(row[None])[0], rtol=1e-9, atol=1e-10
        )


def test_a_pack_equals_a_padded_batch_with_all_gradients(model):
    rows = documents()
    tokens, mask = padded(rows, "right")
    labels = torch.tensor([0, 2, 1, 0])
    pack = torch.cat(rows)[None]
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    losses = (
        model.class_loss(tokens, labels, mask=mask),
        model.class_loss(pack, labels, cu_seqlens=cu_seqlens),
    )
    alone = torch.stack(
        [model.class_loss(r[None], c[None]) for r, c in zip(rows, labels, strict=True)]
    )
    parameters = [p for p in model.parameters() if p is not model.head]
    grads = [
        torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (*losses, alone.mean())
    ]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(losses[0], alone.mean(), rtol=1e-10, atol=1e-12)
    for a, b, c in zip(*grads, strict=True):
        assert (a is None) == (c is None)
        if a is not None:
            torch.testing.assert_close(a, c, rtol=1e-7, atol=1e-9)
            torch.testing.assert_close(b, c, rtol=1e-7, atol=1e-9)


def test_the_class_comes_from_the_mean_of_the_hidden_states(model):
    row = documents()[2][None]
    head = model.class_head
    wanted = model(row).mean(1) @ head.weight.T + head.bias
    torch.testing.assert_close(model.class_logits(row), wanted)
    loss = model.class_loss(row, torch.tensor([1]))
    torch.testing.assert_close(loss, -wanted.log_softmax(-1)[0, 1])
    double = model.class_loss(row.repeat(2, 1), torch.tensor([1, 1]), reduction="sum")
    torch.testing.assert_close(double, 2 * loss)


def test_the_masked_loss_is_asked_for_at_targets_only(model):
    tokens = documents()[2][None].clone()
    targets = torch.full_like(tokens, -100)
    targets[0, [3, 20]] = tokens[0, [3, 20]]
    tokens[0, [3, 20]] = 0
    logits = model(tokens) @ model.embed.weight.T
    wanted = F.cross_entropy(logits[0], targets[0], ignore_index=-100)
    torch.testing.assert_close(model.masked_loss(tokens, targets), wanted)
    torch.testing.assert_close(model.masked_loss(tokens, targets, reduction="sum"), 2 * wanted)
    assert float(model.masked_loss(tokens, torch.full_like(tokens, -100)).detach()) == 0
    with pytest.raises(ValueError, match=r"targets: got shape \[1, 39\]"):
        model.masked_loss(tokens, targets[:, 1:])


def test_order_matters(model):
    """Positions are known: a document read backwards is another document."""
    row = documents()[2][None]
    difference = model.class_logits(row) - model.class_logits(row.flip(1))
    assert difference.abs().max() > 1e-4


def test_sinusoids_by_hand():
    x = sinusoids(torch.tensor([0, 3]), 4)
    assert x[0].tolist() == [0, 0, 1, 1]
    wanted = torch.tensor([3.0, 0.03, 3.0, 0.03])
    torch.testing.assert_close(x[1], torch.cat([wanted[:2].sin(), wanted[2:].cos()]))
    assert sinusoids(torch.arange(2), 5).shape == (2, 5)


def test_the_loss_starts_at_that_of_a_guess():
    model = make("softmax", gain=1.0)
    tokens, targets = torch.randint(32, (2, 4, 60))
    assert (
        abs(float(model.masked_loss(tokens, targets).detach()) / torch.tensor(32.0).log() - 1)
        < 0.03
    )
    labels = torch.tensor([0, 1, 2, 0])
    assert (
        abs(float(model.class_loss(tokens, labels).detach()) / torch.tensor(3.0).log() - 1) < 0.03
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_is_near(model, dtype):
    wide = model.float()
    rows = documents()
    tokens, mask = padded(rows, "right")
    wanted = wide.class_logits(tokens, mask=mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert wide.class_loss(tokens, torch.tensor([0, 1, 2, 0]), mask=mask).isfinite()
    got = wide.to(dtype).class_logits(tokens, mask=mask)
    assert got.dtype == dtype
    assert (got.float() - wanted).abs().max() < 0.1 * wanted.abs().max()


def test_a_model_made_without_memory_draws_the_same_weights(model):
    with torch.device("meta"):
        empty = Encoder(model.config)
    empty = empty.to_empty(device="cpu")
    torch.manual_seed(3)
    empty.reset_parameters()
    torch.manual_seed(3)
    model.float().reset_parameters()
    for (name, a), (_, b) in zip(empty.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_no_tokens_no_rows_and_empty_documents(model):
    assert model(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 16)
    assert model(torch.zeros(0, 9, dtype=torch.int64)).shape == (0, 9, 16)
    tokens, cu_seqlens = documents()[3][None], torch.tensor([0, 0, 5, 5, 17])
    logits = model.class_logits(tokens, cu_seqlens=cu_seqlens)
    assert logits.shape == (4, 3) and bool(logits.isfinite().all())
    torch.testing.assert_close(logits[1], model.class_logits(tokens[:, :5])[0])


def test_layers_share_their_projection_where_the_table_says_so():
    shared, own = make("shared"), make("linformer")
    blocks: Any = shared.blocks
    assert blocks[0].mixer.E is blocks[1].mixer.E and blocks[0].mixer.F is None
    assert own.num_parameters() - shared.num_parameters() == 3 * 4 * 64
    moved = shared.to(torch.float32)
    blocks = moved.blocks
    assert blocks[0].mixer.E is blocks[1].mixer.E


def test_presets_stand_in_their_bidirectional_form():
    for name in ("softmax", "linear", "linformer", "nystrom"):
        config = EncoderConfig(d_model=64, vocab_size=8, layers=[name])
        mixer: Any = config.mixers[name]
        assert mixer.causal is False
        Encoder(config)
        assert EncoderConfig(**config.model_dump(exclude_none=True)) == config
    causal: Any = ModelConfig(d_model=64, vocab_size=8, layers=["softmax"]).mixers["softmax"]
    assert causal.causal is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": ["linformer_causal"]}, "mixers.linformer_causal: got a causal mixer"),
        ({"layers": ["gla"]}, "mixers.gla.gate: got 'channel' with causal = false"),
        (
            {
                "layers": ["a"],
                "mixers": {"a": {"kind": "softmax_attention", "causal": True}},
            },
            "mixers.a: got a causal mixer",
        ),
        (
            {"layers": ["a"], "mixers": {"a": {"kind": "linformer", "causal": True}}},
            "mixers.a.causal: got true, expected false: each of the k slots",
        ),
        ({"layers": ["a"], "mixers": {"a": {"kind": "nowhere"}}}, "mixers.a.kind: got 'nowhere'"),
    ],
)
def test_what_is_causal_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Encoder(EncoderConfig(d_model=64, vocab_size=8, **options))


def test_no_classes_no_class_loss():
    model = Encoder(EncoderConfig(d_model=64, vocab_size=8, layers=["softmax"]))
    assert model.class_head is None
    with pytest.raises(ConfigError, match="classes: got none"):
        model.class_logits(torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.parametrize("labels", [[3], [-1], [0, 1], [1.0]])
def test_labels_that_do_not_fit_are_named(labels):
    with pytest.raises(ValueError, match=r"^labels: got .*, expected \[1\] int64 from 0 to 2; fix"):
        make("softmax").class_loss(documents()[0][None], torch.tensor(labels))


@pytest.mark.parametrize("name", ["shared", "nystrom"])
def test_a_saved_encoder_loads(tmp_path, name):
    model = make(name).float()

    def write(folder):
        weights = {n: p.contiguous() for n, p in model.named_parameters()}  # each tensor once
        save_file(weights, folder / "model.safetensors")
        tables = {"model": model.config.model_dump(mode="json", exclude_none=True)}
        (folder / "config.toml").write_text(tomli_w.dumps(tables))

    folder = tmp_path / "checkpoints" / "step-00000001"
    storage.write_folder(folder, write)
    for path in (tmp_path, folder):
        loaded = Encoder.load(path)
        assert not loaded.training
        tokens = documents()[2][None]
        assert torch.equal(loaded.class_logits(tokens), model.class_logits(tokens))
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError):
        Encoder.load(tmp_path)
