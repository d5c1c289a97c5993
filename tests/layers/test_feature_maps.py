"""Feature maps: products against the kernels that they stand for, random draws, signs, bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import gla
from gla.layers.feature_maps import (
    POSITIVE,
    RandomFeatures,
    build_feature_map,
    orthogonal_rows,
    taylor,
)
from gla.testing import error, limit

ALL = (
    "identity",
    "silu",
    "elu",
    "relu",
    "exp",
    "favor",
    "favor_pair",
    "taylor",
    "hedgehog",
    "dpfp",
)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_products_of_taylor_features_are_the_series_to_the_square():
    q, k = draw(16), draw(16, seed=1)
    s = q @ k / 4
    torch.testing.assert_close(taylor(q) @ taylor(k), 1 + s + s * s / 2)
    assert len(taylor(q)) == 153


@pytest.mark.parametrize("pair", [False, True])
def test_the_mean_product_of_random_features_is_the_softmax_kernel(pair):
    q, k = draw(1, 1, 1, 4), draw(1, 1, 1, 4, seed=1)
    unit_q, unit_k = (x.flatten() / x.square().mean().sqrt() for x in (q, k))
    wanted = math.exp(unit_q @ unit_k / 4**0.5)
    products = []
    for seed in range(300):
        torch.manual_seed(seed)
        phi_q, phi_k = RandomFeatures(4, 512, pair, 0).double()(q, k)
        products.append((phi_q * phi_k).sum())
    found = torch.stack(products)
    error = found.std() / 300**0.5
    assert error < 0.06 * wanted  # the test is sharp: a missing |y|^2 / 2 is a factor of e^2
    assert abs(found.mean() - wanted) < 4 * error


def test_pairs_of_random_features_vary_less():
    q, k = draw(1, 50, 1, 8), draw(1, 50, 1, 8, seed=1)
    spread = {}
    for pair in (False, True):
        products = []
        for seed in range(100):
            torch.manual_seed(seed)
            phi_q, phi_k = RandomFeatures(8, 16, pair, 0).double()(q, k)
            products.append((phi_q * phi_k).sum(-1))
        spread[pair] = torch.stack(products).var(0).mean()
    assert spread[True] < 0.9 * spread[False]


def test_draws_are_orthogonal_blocks_with_rows_as_long_as_gaussian_ones():
    rows = orthogonal_rows(4000, 16, torch.Generator().manual_seed(0))
    block = rows[32:48]
    products = block @ block.T
    torch.testing.assert_close(products, torch.diag(products.diagonal()), atol=1e-12, rtol=0)
    # Rows of N(0, I) entries: squared lengths of mean 16 and variance 32.
    lengths = rows.square().sum(1)
    assert abs(lengths.mean() - 16) < 0.4 and abs(lengths.var() - 32) < 4
    assert abs(rows.mean()) < 0.02  # no preferred sign
    assert orthogonal_rows(19, 16, torch.Generator().manual_seed(0)).shape == (19, 16)


def test_exponents_of_random_features_stay_where_every_float_takes_them():
    torch.manual_seed(0)
    q = torch.randn(1, 4000, 1, 64) * torch.logspace(-3, 3, 4000).view(1, -1, 1, 1)
    phi = RandomFeatures(64, 256, False, 0)(q, q)[0] * 16  # sqrt(F)
    assert -19 < phi.log().min() and phi.log().max() < 10


def test_positive_maps_have_positive_products_and_the_others_do_not():
    for name in ALL:
        phi: Any = build_feature_map(name, 1, 1, 4)  # pyright: ignore[reportArgumentType]
        q, k = 3 * draw(1, 500, 1, 4), 3 * draw(1, 500, 1, 4, seed=1)
        phi_q, phi_k = phi.double()(q, k)
        assert phi_q.shape[-1] == phi.num_features, name
        assert bool(((phi_q * phi_k).sum(-1) > 0).all()) == (name in POSITIVE), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_elu_keeps_small_values(dtype):
    """exp(x) for x below 0; as elu(x) + 1 it is 0 from -17 on, in bf16 from -6.5 on."""
    phi: Any = build_feature_map("elu", 1, 1, 4)
    x = torch.tensor([-20.0, -6.0, 0.0, 2.0], dtype=dtype).view(1, 1, 1, 4)
    found = phi(x, x)[0].flatten()
    wanted = torch.tensor([math.exp(-20), math.exp(-6), 1, 3], dtype=torch.float64).to(dtype)
    torch.testing.assert_close(found, wanted, atol=0, rtol=0.01)


@pytest.mark.parametrize("name", POSITIVE)
def test_one_token_reads_itself_in_bf16(name):
    """Of one token the normalized output is its value, whatever the features."""
    torch.manual_seed(0)
    phi: Any = build_feature_map(name, 1, 1, 16)
    size = 1 if name == "hedgehog" else 4  # at 4 it goes below the normalizer's floor in any dtype
    q, k, v = (size * torch.randn(2000, 1, 1, 16).bfloat16() for _ in range(3))
    phi_q, phi_k = phi(q, k)
    o = gla.gated_linear_attention(phi_q, phi_k, v.to(phi_q.dtype), normalize=True).o
    assert error(o, v) <= limit(torch.bfloat16)


def test_dpfp_reads_negative_inputs_and_gives_nothing_negative():
    phi: Any = build_feature_map("dpfp", 1, 1, 2)
    x = torch.tensor([3.0, -2.0]).view(1, 1, 1, 2)
    # r = [3, 0, 0, 2]: r_i r_(i+1) = [0, 0, 0, 6]
    assert phi(x, x)[0].flatten().tolist() == [0, 0, 0, 6]
    assert bool((phi(draw(1, 9, 1, 2), draw(1, 9, 1, 2))[0] >= 0).all())


def test_hedgehog_starts_as_a_softmax_of_both_signs():
    phi: Any = build_feature_map("hedgehog", 2, 1, 4)
    q, k = draw(1, 3, 2, 4).float(), draw(1, 3, 1, 4).float()
    for mapped, x in zip(phi(q, k), (q, k), strict=True):
        torch.testing.assert_close(mapped, torch.cat([2 * x, -2 * x], -1).softmax(-1))
    phi.q_bias.data[1] = torch.tensor([1.0, 0, 0, -1])
    moved = q[:, :, 1] + phi.q_bias.data[1]
    wanted = torch.cat([2 * moved, -2 * moved], -1).softmax(-1)
    torch.testing.assert_close(phi(q, k)[0][:, :, 1], wanted)


class TestRedraws:
    def build(self, every: int, seed: int = 0) -> RandomFeatures:
        torch.manual_seed(seed)
        return RandomFeatures(8, 32, False, every)

    def test_only_at_their_step_and_only_when_asked(self):
        phi, never = self.build(3), self.build(0)
        first = phi.W.clone()
        assert torch.equal(first, never.W)
        for step in (1, 2):
            phi.redraw(step)
            assert torch.equal(phi.W, first) and phi.redraws == 0
        phi.redraw(3)
        assert not torch.equal(phi.W, first) and phi.redraws == 1
        for step in range(1, 9):
            never.redraw(step)
        assert torch.equal(never.W, first) and never.redraws == 0

    def test_a_draw_follows_from_seed_and_step(self):
        """A layer that joins at step 6 draws what one that was there from the start drew."""
        old, new = self.build(3), self.build(3, seed=1)
        for step in range(1, 6):
            old.redraw(step)
        new.load_state_dict(old.state_dict())
        torch.manual_seed(77)
        for step in range(6, 10):
            old.redraw(step)
            torch.randn(5)
            new.redraw(step)
            assert torch.equal(old.W, new.W)
        assert old.redraws == 3

    def test_other_layers_draw_other_numbers(self):
        torch.manual_seed(0)
        a, b = RandomFeatures(8, 32, False, 1), RandomFeatures(8, 32, False, 1)
        assert not torch.equal(a.W, b.W)
        for phi in (a, b):
            phi.redraw(1)
        assert not torch.equal(a.W, b.W)

    def test_draws_stay_in_fp32_and_leave_the_generator_alone(self):
        phi = self.build(1).bfloat16()
        assert phi.W.dtype == torch.float32
        before = torch.get_rng_state()
        phi.redraw(1)
        assert torch.equal(torch.get_rng_state(), before)
        x = torch.randn(1, 3, 1, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(phi(x, x)[0], phi(x, x)[1])
        assert phi(x.bfloat16(), x.bfloat16())[0].dtype == torch.bfloat16
