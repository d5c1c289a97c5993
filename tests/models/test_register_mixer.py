"""A mixer from outside: the example of the documentation, run, and held to the promises."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any, Literal

import pytest
import torch

import gla
from gla.errors import ConfigError, StateError
from gla.layers import mixer as module
from gla.layers.mixer import Mixer, MixerConfig
from gla.state import select


@pytest.fixture
def example(monkeypatch):
    """The names that the example in the docstring of ``register_mixer`` defines."""
    monkeypatch.setattr(module, "_MIXERS", dict(module._MIXERS))
    text = inspect.getdoc(gla.register_mixer)
    assert text is not None
    block = text.split("::\n", 1)[1].split("\nArgs:", 1)[0]
    code = textwrap.dedent(block)
    names = {}
    exec(compile(code, "example", "exec", dont_inherit=True), names)  # noqa: S102
    lines = [line for line in code.splitlines() if line.strip()]
    start = next(i for i, line in enumerate(lines) if line.startswith("class"))
    end = next(i for i, line in enumerate(lines) if line.startswith("gla.register_mixer"))
    assert end - start <= 20
    return names


def test_the_example_keeps_the_promises_of_a_mixer(example):
    torch.manual_seed(0)
    model = gla.LanguageModel(example["config"]).double()
    block: Any = model.blocks[0]
    assert type(block.mixer).__name__ == "LookBack"
    tokens = torch.randint(0, 256, (1, 12))
    whole, _ = model(tokens)
    first, state = model(tokens[:, :5])
    second, state = model(tokens[:, 5:11], state)
    last, _ = model.decode_step(tokens[:, 11], state)
    joined = torch.cat([first, second, last.unsqueeze(1)], 1)
    torch.testing.assert_close(joined, whole, rtol=1e-11, atol=1e-12)
    lengths = [1, 2, 0, 9]
    packed, end = model(tokens, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    separate = [model(part).logits for part in tokens.split(lengths, 1) if part.numel()]
    torch.testing.assert_close(packed, torch.cat(separate, 1), rtol=1e-11, atol=1e-12)
    assert select(end, [3]).layers[0].recent.shape == (1, 2, 64)


def test_the_example_is_initialized_like_any_mixer(example):
    model = gla.LanguageModel(example["config"])
    plain = torch.nn.Linear(64, 64, bias=False)
    block: Any = model.blocks[0]
    ratio = block.mixer.out_proj.weight.std() / plain.weight.std()
    assert abs(ratio.item() - 6**-0.5) < 0.05  # 1 / sqrt(2 * 3 blocks)


def test_a_mixer_that_is_not_registered_is_told_of():
    with pytest.raises(ConfigError) as caught:
        gla.ModelConfig(
            d_model=64, vocab_size=256, layers=["mean"], mixers={"mean": {"kind": "average"}}
        )
    line = str(caught.value)
    assert line.startswith("mixers.mean.kind: got 'average', expected one of ")
    assert "\n" not in line and "; fix the name, or register a mixer of your own (gla." in line


def test_a_config_without_its_kind_is_refused():
    class Nameless(MixerConfig):
        width: int = 3

    class Misnamed(MixerConfig):
        kind: Literal["other"] = "other"

    with pytest.raises(ConfigError, match=r"Nameless\.kind: got no field, expected the name 'x'"):
        gla.register_mixer("x", Nameless, Mixer)
    with pytest.raises(ConfigError, match=r"Misnamed\.kind: got the default 'other'"):
        gla.register_mixer("x", Misnamed, Mixer)


def test_a_mixer_that_gives_too_little_is_told_of():
    class WithoutForward(Mixer):
        pass

    class WithoutState(Mixer):
        def forward(self, x, state=None, *, cu_seqlens=None, need_state=True):
            return x, None

    build: Any = WithoutForward
    with pytest.raises(TypeError, match="forward"):
        build()
    layer = WithoutState()
    with pytest.raises(StateError, match=r"^WithoutState\.init_state: got none, expected one"):
        layer.init_state(1)
    layer.causal = False
    with pytest.raises(StateError, match="a call for a state"):
        layer.init_state(1)
