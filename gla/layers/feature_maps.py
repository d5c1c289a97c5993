"""Feature maps: what is applied to queries and keys before the recurrence, element by element.

"elu" is elu(x) + 1 (Katharopoulos et al. 2020, arXiv 2006.16236); "relu" is relu(x) + 1e-3, the
small term of which keeps the normalizer off zero. "identity" and "silu" can be negative, so that a
sum of their products is no normalizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

RELU_FLOOR = 1e-3


class FeatureMap(NamedTuple):
    """A map and whether all its values are above zero, as the normalizer asks."""

    function: Callable[[Tensor], Tensor]
    positive: bool


FEATURE_MAPS = {
    "identity": FeatureMap(lambda x: x, positive=False),
    "elu": FeatureMap(lambda x: F.elu(x) + 1, positive=True),
    "relu": FeatureMap(lambda x: F.relu(x) + RELU_FLOOR, positive=True),
    "silu": FeatureMap(F.silu, positive=False),
}
