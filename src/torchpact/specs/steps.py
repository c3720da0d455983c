"""What one step of a block is: frozen records of weights and settings."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchpact.specs.attention import AttentionLayer


@dataclass(frozen=True, eq=False)
class Norm:
    """A batch norm in evaluation: ``x · scale + shift`` for each channel, in double precision.

    >>> norm = nn.BatchNorm2d(3, eps=0.0)
    >>> norm.running_mean.fill_(1), norm.running_var.fill_(4)
    (tensor([1., 1., 1.]), tensor([4., 4., 4.]))
    >>> Norm.of(norm).shift
    tensor([-0.5000, -0.5000, -0.5000], dtype=torch.float64)
    """

    scale: Tensor
    shift: Tensor

    @classmethod
    def of(cls, norm: nn.BatchNorm2d) -> "Norm":
        """Return what a batch norm is in evaluation."""
        mean, variance, weight, bias = norm.running_mean, norm.running_var, norm.weight, norm.bias
        if mean is None or variance is None or weight is None or bias is None:
            raise TypeError(f"expected a batch norm with statistics, weight and bias, got {norm}")
        scale = weight.detach().double() * torch.rsqrt(variance.double() + norm.eps)
        return cls(scale, bias.detach().double() - mean.double() * scale)


@dataclass(frozen=True, eq=False)
class Conv:
    """A convolution without bias, of padding ``(kernel − 1) / 2``."""

    weight: Tensor
    stride: int = 1

    @property
    def price(self) -> int:
        """The FLOPs at one position of its output."""
        return 2 * self.weight.numel()


@dataclass(frozen=True, eq=False)
class ConvUnit:
    """A residual unit ``u + f(u)·a`` of two or three convolutions, each with a batch norm and a ReLU.

    ``order`` "pre" is norm, ReLU, convolution. Two convolutions are 3×3; of three (a bottleneck) the one in
    the middle is. The shortcut has no parameters: the mean over ``stride``² pixels, and ``padding`` channels
    of zeros more, half of them before and half after.
    """

    convs: tuple[Conv, ...]
    norms: tuple[Norm, ...]
    stride: int
    padding: int
    group: int = 1
    """Patches of group×group pixels share a decision."""
    order: Literal["pre"] = "pre"

    @property
    def bottleneck(self) -> bool:
        """Whether it has three convolutions."""
        return len(self.convs) == 3

    @property
    def weight(self) -> Tensor:
        """The first weight, which tells channels, device and precision."""
        return self.convs[0].weight

    @property
    def strides(self) -> list[int]:
        """Those of the convolutions."""
        return [conv.stride for conv in self.convs]

    @property
    def channels(self) -> int:
        """How many channels it makes."""
        return self.convs[-1].weight.size(0)

    @cached_property
    def scale(self) -> Tensor:
        """The scale of the first norm, of shape (channels, 1, 1); a ReLU keeps it from being folded."""
        return self.norms[0].scale[:, None, None].to(self.weight.dtype)

    @cached_property
    def shift(self) -> Tensor:
        """The shift of the first norm, see :attr:`scale`."""
        return self.norms[0].shift[:, None, None].to(self.weight.dtype)

    @cached_property
    def convolutions(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weights and biases with all norms but the first folded in, channels last; the last has no bias."""
        folded: list[tuple[Tensor, Tensor | None]] = []
        for index, conv in enumerate(self.convs):
            weight, bias = conv.weight.detach(), None
            if index + 1 < len(self.convs):
                norm = self.norms[index + 1]
                weight = weight.double() * norm.scale[:, None, None, None]
                bias = norm.shift.to(conv.weight.dtype, copy=True)
            layout = torch.channels_last
            folded.append((weight.to(conv.weight.dtype, memory_format=layout, copy=True), bias))
        return folded


@dataclass(frozen=True, eq=False)
class PositionwiseResidual:
    """A step u + f(u)·a whose f looks at one position at a time, along the dimension ``features``."""

    function: nn.Module
    features: int = -1


@dataclass(frozen=True, eq=False)
class RecurrentCell:
    """A cell of torch with one input more: a flag that tells the first iteration of a time step."""

    cell: nn.Module
    kind: Literal["lstm", "gru", "rnn"]

    @property
    def units(self) -> int:
        """The features of its output."""
        return int(self.cell.hidden_size)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Opaque:
    """Any step or head: a module that can only be called."""

    module: Any
    reason: str = ""
    """Why no more is known of it, for people; empty where nothing was expected."""


StepSpec = ConvUnit | AttentionLayer | PositionwiseResidual | RecurrentCell | Opaque
