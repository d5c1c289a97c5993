"""Reformer against a loop over tokens, and its hashes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gla.errors import ConfigError
from gla.layers.reformer import Hash, Reformer, ReformerConfig

from .test_softmax_attention import turned


@torch.no_grad()
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("T", [1, 2, 30])
def test_equals_a_loop(make, rounds, T):
    layer: Any = make(
        {"kind": "reformer", "num_heads": 2, "buckets": 4, "rounds": rounds, "window": 2}
    )
    x = torch.randn(T, 16, dtype=torch.float64)
    q = (x @ layer.qk_proj.weight.T).view(T, 2, 8)
    k = q / q.norm(dim=-1, keepdim=True)
    v = (x @ layer.v_proj.weight.T).view(T, 2, 8)
    bucket = [
        [
            [
                max(range(4), key=lambda b: (W.T @ k[t, h] * (-1) ** (b // 2))[b % 2])
                for W in layer.hash.W
            ]
            for h in range(2)
        ]
        for t in range(T)
    ]
    q_turned, k_turned = turned(q), turned(k)
    rows = []
    for t in range(T):
        heads = []
        for h in range(2):
            read = set()
            for r in range(rounds):
                same = [s for s in range(t) if bucket[s][h][r] == bucket[t][h][r]]
                read |= set(same[-2:])
            places = [t, *sorted(read)]
            scores = k_turned[places, h] @ q_turned[t, h]
            scores[0] -= 4
            weights = scores.softmax(0)
            heads.append(weights @ v[places, h])
        rows.append(torch.cat(heads))
    wanted = torch.stack(rows) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x[None])[0][0], wanted, rtol=1e-10, atol=1e-11)


def test_close_vectors_share_a_bucket_more_often_than_far_ones():
    torch.manual_seed(0)
    hashes = Hash(16, 8, 500)
    x, y = torch.randn(2, 1, 1, 1, 16).unbind(0)
    near = x + 0.1 * y
    share = {
        name: (hashes(x) == hashes(z)).float().mean().item()
        for name, z in (("itself", x), ("near", near), ("scaled", 3 * x), ("opposite", -x))
    }
    assert share["itself"] == share["scaled"] == 1
    assert share["near"] > 0.8 and share["opposite"] == 0


def test_wrong_options_say_what_is_wrong(make):
    with pytest.raises(ConfigError, match="buckets: got 3, expected a multiple of 2"):
        make({"kind": "reformer", "buckets": 3})
    with pytest.raises(ConfigError, match="num_heads: got d_model / num_heads = 1"):
        Reformer(16, ReformerConfig(num_heads=16))
