"""Residual units as modules with their batch norms folded, and blocks of them: what runs densely."""

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.core.block import AdaptiveBlock
from torchpact.engines.conv.support import conv_block_problem
from torchpact.nn.conv_units import join_patches, shortcut, split_patches
from torchpact.specs import BlockSpec, ConvUnit


class FoldedUnit(nn.Module):
    """A residual unit in evaluation: its first batch norm is a scale and a shift, the others are gone.

    They follow convolutions, whose weights take them up; between the first and its convolution is a ReLU,
    which keeps them apart.

    >>> from torchpact.specs import step_spec
    >>> unit = tp.models.ResidualUnit(16, 32, stride=2).eval()
    >>> u = torch.randn(1, 16, 8, 8)
    >>> torch.allclose(FoldedUnit(step_spec(unit))(u), unit(u), atol=1e-4)
    True
    """

    gated = True

    scale: Tensor
    shift: Tensor

    def __init__(self, unit: ConvUnit) -> None:
        super().__init__()
        self.stride, self.padding, self.group, self.strides = (
            unit.stride,
            unit.padding,
            unit.group,
            unit.strides,
        )
        self.register_buffer("scale", unit.scale)
        self.register_buffer("shift", unit.shift)
        for number, (weight, bias) in enumerate(unit.convolutions, start=1):
            self.register_buffer(f"weight{number}", weight)
            self.register_buffer(f"bias{number}", bias)  # the last has none

    def forward(self, u: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return u + f(u)·gate, in patches if the unit has a ``group``."""
        u = join_patches(u)
        x = torch.addcmul(self.shift, u, self.scale).relu_()
        for number, stride in enumerate(self.strides, start=1):
            weight, bias = self.get_buffer(f"weight{number}"), self._buffers[f"bias{number}"]
            x = F.conv2d(x, weight, bias, stride, padding=weight.size(2) // 2)
            if bias is not None:
                x = x.relu_()
        u, x = split_patches(shortcut(u, self.stride, self.padding), self.group), split_patches(x, self.group)
        return x.add_(u) if gate is None else torch.addcmul(u, x, gate)


def folded_units(spec: BlockSpec) -> list[FoldedUnit]:
    """Return the units of a block, folded; one that iterations share is a single module.

    Raises:
        TypeError: The steps are no convolutional units.

    """
    units = spec.conv_units
    if units is None:
        raise TypeError(conv_block_problem(spec))
    made = {id(unit): FoldedUnit(unit) for unit in units}
    return [made[id(unit)] for unit in units]


def folded_block(spec: BlockSpec) -> AdaptiveBlock:
    """Return a block whose units are folded, in evaluation; its heads are copies.

    Args:
        spec: A block of convolutional units, see
            :func:`~torchpact.engines.conv.support.conv_block_problem`.

    Returns:
        A block in the mode of the spec.

    Raises:
        TypeError: Its steps are no convolutional units.

    Example:
        >>> from torchpact.models import HaltingHead, ResidualUnit
        >>> from torchpact.specs import block_spec
        >>> block = tp.AdaptiveBlock([ResidualUnit(16, 16) for _ in "ab"], [HaltingHead(16)], mode="act")
        >>> u = torch.randn(1, 16, 4, 4)
        >>> torch.allclose(folded_block(block_spec(block.eval()))(u)[0], block(u)[0], atol=1e-4)
        True

    """
    modules = {id(head): head.module for head in spec.heads}
    copies = {key: deepcopy(module).eval() for key, module in modules.items()}
    block = AdaptiveBlock(
        folded_units(spec), [copies[id(head)] for head in spec.heads], mode=spec.mode, name=spec.label
    )
    block.details = spec.keeps_details
    return block.eval()
