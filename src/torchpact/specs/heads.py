"""What a halting head is: frozen records of weights and settings."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchpact.core.criterion import Criterion
from torchpact.specs.steps import Norm, Opaque


@dataclass(frozen=True, eq=False)
class ConvHead:
    """The logits W̃∗u + W·pool(u) + b of a map: a 3×3 convolution, the mean over the map, and a bias.

    Batch norms, each followed by a ReLU, may come before either. Without ``taps`` there is one logit an
    image; of a ``group`` logits are averaged over patches of group×group pixels.
    """

    taps: Tensor | None
    """W̃, of shape (1, channels, 3, 3)."""
    pool: Tensor
    """W, of shape (1, channels)."""
    bias: Tensor
    """b, of shape (1,)."""
    norm: Norm | None
    """Before the convolution."""
    pooled_norm: Norm | None
    """Before the product with the mean."""
    group: int
    module: Any
    """The head itself, for the dense reference."""


@dataclass(frozen=True, eq=False)
class LinearHead:
    """The logits w·u + b of the first tensor of a state."""

    weight: Tensor
    bias: Tensor | None
    module: Any


@dataclass(frozen=True, eq=False)
class RowHead:
    """The logits w·u + b of states whose positions are rows, of normalised ones if ``normalized``."""

    weight: Tensor
    bias: Tensor | None
    normalized: bool
    """Whether each row is normalised first: less its mean, over its standard deviation."""
    module: Any


@dataclass(frozen=True, eq=False)
class NeverHead:
    """A head whose logits are −∞."""

    module: Any


@dataclass(frozen=True, eq=False)
class CriterionHead:
    """A criterion: a module that is called with an exit, and may keep a memory."""

    module: Criterion


HeadSpec = ConvHead | LinearHead | RowHead | NeverHead | CriterionHead | Opaque
