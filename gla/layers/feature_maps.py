"""Feature maps: what is applied to the queries and keys of each head before the recurrence.

| name         | phi(x), x of one head [K]                                         | F             |
|--------------|-------------------------------------------------------------------|---------------|
| "identity"   | x                                                                 | K             |
| "silu"       | x * sigmoid(x)                                                    | K             |
| "elu"        | elu(x) + 1 (Katharopoulos et al. 2020, arXiv 2006.16236)          | K             |
| "relu"       | relu(x) + 1e-3                                                    | K             |
| "exp"        | exp(x / rms(x))                                                   | K             |
| "favor"      | exp(W y - |y|^2 / 2) / sqrt(F), y = x / rms(x) / K^(1/4)          | 4 K           |
| "favor_pair" | [exp(W y), exp(-W y)] * exp(-|y|^2 / 2) / sqrt(F)                 | 4 K           |
| "taylor"     | [1, y, y_i^2 / sqrt(2), y_i y_j (i < j)], y = x / K^(1/4)         | 1 + K(K+3)/2  |
| "hedgehog"   | softmax([2 u, -2 u]), u = U x + b learned for each head           | 2 K           |
| "dpfp"       | r_i r_(i+j), r = [relu(x), relu(-x)], j = 1 ... n                 | 2 K n         |

F is the number of features. phi(q) . phi(k) is above 0 for all q and k, as a normalizer needs it,
from "elu" to "hedgehog", and at times 0 or below for the rest. "taylor" comes out in fp32 or wider,
whatever goes in: its terms cancel, and rounded to bf16 they may leave less than 0.

FAVOR+ (Choromanski et al. 2020, arXiv 2009.14794): the mean over draws of phi(q) . phi(k) is
exp(y_q . y_k); with y scaled by K^(-1/4) that is exp(q . k / sqrt(K)) for q and k of unit rms. W is
made of orthogonal blocks with rows of the norms of Gaussian vectors. Queries and keys are set to
unit rms first, which bounds the exponents (from about -18 to 10 for K = 64), so nothing needs to be
subtracted: a maximum over keys in time would look ahead, one per feature would change the kernel.
With the few features that are affordable it is a kernel of its own, not softmax.

"taylor" is the square of Based (Arora et al. 2024, arXiv 2402.18668): its products are
1 + s + s^2 / 2 with s = q . k / sqrt(K). "hedgehog" is arXiv 2402.04347, "dpfp" arXiv 2102.11174.

Sizes: B batch, T tokens, H heads, G heads of keys, K their dimension, F features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gla.errors import ConfigError
from gla.layers.linear import WideModule

FeatureMapName = Literal[
    "identity", "silu", "elu", "relu", "exp", "favor", "favor_pair", "taylor", "hedgehog", "dpfp"
]
POSITIVE = ("elu", "relu", "exp", "favor", "favor_pair", "taylor", "hedgehog")
RELU_FLOOR = 1e-3
_RMS_EPS = 1e-6


class FeatureMap(nn.Module):
    """phi of queries and keys alike, without parameters.

    Args:
        function: [..., K] -> [..., F].
        num_features: F.

    Attributes:
        num_features: F.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], num_features: int) -> None:
        super().__init__()
        self.function, self.num_features = function, num_features

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, T, H, K], k [B, T, G, K] -> phi(q) [B, T, H, F], phi(k) [B, T, G, F]."""
        return self.function(q), self.function(k)


class RandomFeatures(WideModule):
    """FAVOR+: one draw for all heads, in the state dict, the same in training and decoding.

    The draw follows from ``seed``, which comes from torch's generator when the layer is
    initialized, and from the number of redraws; so a run that is resumed draws what the run that
    went on would have drawn.

    Args:
        dim: K.
        num_features: F.
        pair: whether each row of W gives exp(W y) and exp(-W y).
        redraw_every: W is drawn again every so many training steps; 0 is never.

    Attributes:
        W: [F or F / 2, K] fp32 or wider.
        seed: [] int64.
        redraws: [] int64, how often W was drawn again.
    """

    W: Tensor
    seed: Tensor
    redraws: Tensor

    def __init__(self, dim: int, num_features: int, pair: bool, redraw_every: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.pair, self.redraw_every = pair, redraw_every
        rows = num_features // 2 if pair else num_features
        self.register_buffer("W", torch.empty(rows, dim))
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64))
        self.register_buffer("redraws", torch.zeros((), dtype=torch.int64))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Take another seed from torch's generator, and the first draw of it."""
        seed = torch.randint(2**48, (), device="cpu")
        self.redraws.zero_()
        self.seed.copy_(seed)
        if not self.seed.is_meta:
            self._draw()

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """See ``FeatureMap.forward``."""
        return _in_wide(self._phi, q), _in_wide(self._phi, k)

    def redraw(self, step: int) -> None:
        """Draw W again if an update after ``step`` updates is to use another draw."""
        if self.redraw_every and step and step % self.redraw_every == 0:
            self.redraws.fill_(step // self.redraw_every)
            self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        # On the CPU, so that every device and every rank has the same numbers.
        generator = torch.Generator().manual_seed(int(self.seed) * 2**15 + int(self.redraws))
        rows, dim = self.W.shape
        self.W.copy_(orthogonal_rows(rows, dim, generator))

    def _phi(self, x: Tensor) -> Tensor:
        y = _unit_rms(x) * x.shape[-1] ** -0.25
        with torch.autocast(x.device.type, enabled=False):
            projected = y @ self.W.to(y.dtype).T
        if self.pair:
            projected = torch.cat([projected, -projected], dim=-1)
        half_square = y.square().sum(-1, keepdim=True) / 2
        return torch.exp(projected - half_square) * self.num_features**-0.5


def redraw_features(model: nn.Module, step: int) -> None:
    """Draw anew the random features of a model that are due after ``step`` updates.

    To be called at the start of an update, on every rank: what is drawn follows from seed and step,
    and what is evaluated or saved after an update has the features that were trained.
    """
    for module in model.modules():
        if isinstance(module, RandomFeatures):
            module.redraw(step)


class Hedgehog(nn.Module):
    """One learned map a head, one for queries and one for keys.

    Args:
        num_heads: H.
        num_kv_heads: G.
        dim: K.
    """

    no_weight_decay = True

    def __init__(self, num_heads: int, num_kv_heads: int, dim: int) -> None:
        super().__init__()
        self.num_features = 2 * dim
        self.q_map = nn.Parameter(torch.empty(num_heads, dim, dim))
        self.k_map = nn.Parameter(torch.empty(num_kv_heads, dim, dim))
        self.q_bias = nn.Parameter(torch.empty(num_heads, dim))
        self.k_bias = nn.Parameter(torch.empty(num_kv_heads, dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start every map as the identity."""
        for weight in (self.q_map, self.k_map):
            weight.copy_(torch.eye(weight.shape[-1]).expand_as(weight))
        self.q_bias.zero_()
        self.k_bias.zero_()

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """See ``FeatureMap.forward``."""
        maps = ((q, self.q_map, self.q_bias), (k, self.k_map, self.k_bias))
        mapped = (torch.einsum("bthk,hfk->bthf", x, w.to(x.dtype)) + b for x, w, b in maps)
        phi_q, phi_k = (
            _in_wide(lambda u: torch.cat([2 * u, -2 * u], dim=-1).softmax(-1), u).to(q.dtype)
            for u in mapped
        )
        return phi_q, phi_k


def build_feature_map(
    name: FeatureMapName,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    num_features: int | None = None,
    redraw_every: int = 0,
) -> FeatureMap | RandomFeatures | Hedgehog:
    """Return the map of a name; called as ``map(q, k)``, it has ``num_features``.

    Args:
        name: of the table above.
        num_heads: H.
        num_kv_heads: G.
        dim: K.
        num_features: F of FAVOR+ (4 K by default) and DPFP (2 K by default).
        redraw_every: of FAVOR+.

    Raises:
        ConfigError: an F that the map cannot have.
    """
    if num_features is not None and name not in ("favor", "favor_pair", "dpfp"):
        raise ConfigError(
            f"num_features: got {num_features} with feature_map {name!r}, expected none: it "
            "follows from key_dim; fix by leaving num_features out"
        )
    if redraw_every and name not in ("favor", "favor_pair"):
        raise ConfigError(
            f"redraw_every: got {redraw_every} with feature_map {name!r}, expected 0: it draws "
            "nothing; fix by leaving redraw_every out"
        )
    steps = {"favor_pair": 2, "dpfp": 2 * dim}
    size = num_features or (2 * dim if name == "dpfp" else 4 * dim)
    if size % steps.get(name, 1):
        raise ConfigError(
            f"num_features: got {size} with feature_map {name!r}, expected a multiple of "
            f"{steps[name]}; fix num_features"
        )
    match name:
        case "favor" | "favor_pair":
            return RandomFeatures(dim, size, name == "favor_pair", redraw_every)
        case "hedgehog":
            return Hedgehog(num_heads, num_kv_heads, dim)
        case "taylor":
            return FeatureMap(lambda x: taylor(_wide(x)), 1 + dim * (dim + 3) // 2)
        case "dpfp":
            return FeatureMap(lambda x: dpfp(x, size // (2 * dim)), size)
    return FeatureMap(_PLAIN[name], dim)


def taylor(x: Tensor) -> Tensor:
    """[..., K] -> [..., 1 + K + K (K + 1) / 2]."""
    dim = x.shape[-1]
    y = x * dim**-0.25
    i, j = torch.triu_indices(dim, dim, offset=1, device=x.device)
    squares = y.square() * 2**-0.5
    return torch.cat([torch.ones_like(y[..., :1]), y, squares, y[..., i] * y[..., j]], dim=-1)


def dpfp(x: Tensor, shifts: int) -> Tensor:
    """[..., K] -> [..., 2 K shifts]; feature i of shift j is r_i r_((i + j) mod 2K)."""
    r = torch.cat([F.relu(x), F.relu(-x)], dim=-1)
    return torch.cat([r * r.roll(-j, -1) for j in range(1, shifts + 1)], dim=-1)


def orthogonal_rows(rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """Rows of orthogonal blocks [rows, dim] fp64, each as long as a Gaussian vector would be.

    A block is the Q factor of a Gaussian matrix, with the signs that make it uniformly distributed.
    """
    blocks = []
    for start in range(0, rows, dim):
        gauss = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(gauss)
        blocks.append((q * r.diagonal().sign()).T[: rows - start])
    lengths = torch.randn(rows, dim, generator=generator, dtype=torch.float64).norm(dim=1)
    return torch.cat(blocks) * lengths.unsqueeze(1)


def _unit_rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=_RMS_EPS)


def _in_wide(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply in fp32 or wider, and return in the dtype of x."""
    return function(_wide(x)).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _elu_plus_one(x: Tensor) -> Tensor:
    # Not F.elu(x) + 1, which is 0 from x = -17 on in fp32 and from -6.5 on in bf16.
    return torch.where(x > 0, x + 1, x.clamp_max(0).exp())


_PLAIN = cast(
    dict[str, Callable[[Tensor], Tensor]],
    {
        "identity": lambda x: x,
        "silu": F.silu,
        "elu": _elu_plus_one,
        "relu": lambda x: F.relu(x) + RELU_FLOOR,
        "exp": lambda x: _in_wide(lambda y: torch.exp(_unit_rms(y)), x),
    },
)
