"""What a halting head is: frozen records of weights and settings."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from torchpact.core.criterion import Criterion
from torchpact.specs.steps import Norm, Opaque


@dataclass(frozen=True, eq=False)
class ConvHead:
    """The logits W̃∗u + W·pool(u) + b of a map: a convolution, the mean over the map, and a bias.

    Batch norms, each followed by a ReLU, may come before either. Without ``taps`` there is one logit an
    image; of a ``group`` logits are averaged over patches of group×group pixels.

    Example:
        >>> head = ConvHead(torch.ones(1, 2, 1, 1), None, torch.zeros(1))
        >>> head.kernel[0, 0], head.mean_weight
        (tensor([[0., 0., 0.],
                [0., 1., 0.],
                [0., 0., 0.]]), tensor([[0., 0.]]))

    """

    taps: Tensor | None
    """W̃, of shape (1, channels, 3, 3), or (1, channels, 1, 1)."""
    pool: Tensor | None
    """W, of shape (1, channels); None where the mean does not count."""
    bias: Tensor
    """b, of shape (1,)."""
    norm: Norm | None = None
    """Before the convolution."""
    pooled_norm: Norm | None = None
    """Before the product with the mean."""
    group: int = 1
    module: Any = None
    """The head itself, for the dense reference."""

    @property
    def channels(self) -> int:
        """How many channels it looks at."""
        return next(weight for weight in (self.taps, self.pool) if weight is not None).size(1)

    @property
    def kernel(self) -> Tensor | None:
        """``taps`` as those of a 3×3 convolution, zeros around a single one."""
        if self.taps is None or self.taps.size(2) == 3:
            return self.taps
        return F.pad(self.taps, (1, 1, 1, 1))

    @property
    def mean_weight(self) -> Tensor:
        """``pool``, or zeros."""
        return self.bias.new_zeros(1, self.channels) if self.pool is None else self.pool


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
