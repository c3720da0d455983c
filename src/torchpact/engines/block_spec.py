"""A block with its batch norms folded away: what every engine is built from."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.core.block import AdaptiveBlock
from torchpact.core.modes import Mode, Thresholded
from torchpact.core.ponder import Ponder
from torchpact.nn.conv_units import Bottleneck, HaltingHead, ResidualUnit, join_patches, split_patches

Runner = Callable[[Tensor], tuple[Tensor, Ponder | None]]
"""A block ready to run: maps in and out are channels last; a plain block has no ponder."""


class Unsupported(ValueError):
    """Why an engine cannot run a block; one line."""


class FoldedUnit(nn.Module):
    """A residual unit in evaluation: its first batch norm is a scale and a shift, its second is gone.

    The second follows a convolution, whose weights take it up; between the first and its convolution is a
    ReLU, which keeps them apart.

    >>> unit = tp.models.ResidualUnit(16, 32, stride=2).eval()
    >>> u = torch.randn(1, 16, 8, 8)
    >>> torch.allclose(FoldedUnit(unit)(u), unit(u), atol=1e-4)
    True
    """

    gated = True

    scale: Tensor
    shift: Tensor
    weight1: Tensor
    bias1: Tensor
    weight2: Tensor

    def __init__(self, unit: Any) -> None:
        super().__init__()
        scale, shift = fold_norm(unit.norm1)
        scale2, shift2 = fold_norm(unit.norm2)
        self._hold(scale=scale[:, None, None], shift=shift[:, None, None], like=unit.conv1.weight)
        self._hold(weight1=_scaled(unit.conv1, scale2), bias1=shift2, like=unit.conv1.weight)
        self._hold(weight2=unit.conv2.weight.detach(), like=unit.conv1.weight)
        self.stride, self.padding, self.group = unit.stride, unit.padding, unit.group

    def _hold(self, *, like: Tensor, **buffers: Tensor) -> None:
        for name, value in buffers.items():
            layout = torch.channels_last if value.dim() == 4 else torch.contiguous_format
            self.register_buffer(name, value.to(like.dtype, memory_format=layout, copy=True))

    @property
    def convolutions(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weights and biases; the last has none, and no ReLU after it."""
        return [(self.weight1, self.bias1), (self.weight2, None)]

    @property
    def strides(self) -> list[int]:
        """Of the convolutions."""
        return [self.stride, 1]

    shortcut: Any = ResidualUnit.shortcut  # which looks at the stride and the padding only

    def forward(self, u: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return u + f(u)·gate, in patches if the unit has a ``group``."""
        u = join_patches(u)
        residual = self._residual(torch.addcmul(self.shift, u, self.scale).relu_())
        u, residual = split_patches(self.shortcut(u), self.group), split_patches(residual, self.group)
        return residual.add_(u) if gate is None else torch.addcmul(u, residual, gate)

    def _residual(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.weight1, self.bias1, self.stride, padding=1).relu_()
        return F.conv2d(x, self.weight2, padding=1)


class FoldedBottleneck(FoldedUnit):
    """A unit of three convolutions, of which only the second, which has the stride, is 3×3; likewise."""

    bias2: Tensor
    weight3: Tensor

    def __init__(self, unit: Any) -> None:
        super().__init__(unit)
        scale3, shift3 = fold_norm(unit.norm3)
        self._hold(bias2=shift3, weight3=unit.conv3.weight.detach(), like=self.weight1)
        self.weight2 = _scaled(unit.conv2, scale3).to(
            self.weight1.dtype, memory_format=torch.channels_last, copy=True
        )

    @property
    def convolutions(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weights and biases; the last has none, and no ReLU after it."""
        return [(self.weight1, self.bias1), (self.weight2, self.bias2), (self.weight3, None)]

    @property
    def strides(self) -> list[int]:
        """Of the convolutions."""
        return [1, self.stride, 1]

    def _residual(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.weight1, self.bias1).relu_()
        x = F.conv2d(x, self.weight2, self.bias2, self.stride, padding=1).relu_()
        return F.conv2d(x, self.weight3)


class FoldedBlock:
    """The units and heads of a block of a ResNet, and the mode that decides; a plain block has no heads.

    Without ``details`` a thresholded run keeps decisions only; see :class:`use_mode`.
    """

    def __init__(self, block: nn.Module, mode: Mode | None = None, details: bool | None = None) -> None:
        adaptive: AdaptiveBlock | None = block if isinstance(block, AdaptiveBlock) else None
        steps: Any = block.steps  # plain blocks have them too
        heads: Any = adaptive.halting if adaptive else ()
        count = adaptive.max_steps if adaptive else len(steps)
        # as they are, for engines that fold by themselves; a single one that is shared stands for all
        self.steps: list[Any] = [*steps] * (count if len(steps) == 1 else 1)
        self.bottleneck = isinstance(self.steps[0], Bottleneck)
        fold = FoldedBottleneck if self.bottleneck else FoldedUnit
        self.units = [fold(unit) for unit in self.steps]
        heads = [*heads] * (count if len(heads) == 1 else 1)
        self.heads: list[HaltingHead] = [deepcopy(head).eval() for head in heads[: max(count - 1, 1)]]
        self.mode: Mode = mode or (adaptive.mode if adaptive else Thresholded())
        wanted = details if details is not None else adaptive is None or adaptive.details
        self.details = wanted or not isinstance(self.mode, Thresholded)

    @property
    def halting(self) -> list[HaltingHead]:
        """The heads, by the name that they have in a block."""
        return self.heads

    @property
    def head(self) -> HaltingHead | None:
        """The first head, by which to tell what they are like."""
        return self.heads[0] if self.heads else None

    @property
    def weight(self) -> Tensor:
        """The first weight, by which to tell channels, device and precision."""
        return self.units[0].weight1

    @property
    def channels(self) -> int:
        """How many channels its maps have."""
        return self.units[0].convolutions[-1][0].size(0)

    def adaptive(self) -> AdaptiveBlock:
        """Return units and heads as a block."""
        block = AdaptiveBlock(self.units, self.heads, mode=self.mode).eval()
        block.details = self.details
        return block


def fold_norm(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return the scale and the shift that a batch norm is in evaluation, in double precision.

    >>> norm = nn.BatchNorm2d(3, eps=0.0)
    >>> norm.running_mean.fill_(1), norm.running_var.fill_(4)
    (tensor([1., 1., 1.]), tensor([4., 4., 4.]))
    >>> fold_norm(norm)[1]
    tensor([-0.5000, -0.5000, -0.5000], dtype=torch.float64)
    """
    mean, variance, weight, bias = norm.running_mean, norm.running_var, norm.weight, norm.bias
    assert mean is not None  # ours track statistics
    assert variance is not None
    scale = weight.detach().double() * torch.rsqrt(variance.double() + norm.eps)
    return scale, bias.detach().double() - mean.double() * scale


def _scaled(conv: nn.Conv2d, scale: Tensor) -> Tensor:
    """The weights of a convolution with the scale of the batch norm after it, in double precision."""
    return conv.weight.detach().double() * scale[:, None, None, None]


def as_matrix(weight: Tensor) -> Tensor:
    """Return the weights of a convolution as a matrix of (taps · inputs, outputs)."""
    return weight.permute(2, 3, 1, 0).reshape(-1, len(weight)).contiguous()
