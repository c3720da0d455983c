"""FLOPs of a block of residual units, from how many of them ran at each position."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.nn.conv_units import Bottleneck, HaltingHead


def block_flops(block: Any, steps: Tensor, height: int, width: int) -> Tensor:
    """Return the FLOPs of a block for each image, from how many units ran at each position."""
    first, *others = block.steps
    heads: list[HaltingHead] = [*getattr(block, "halting", ())]  # a plain block has none
    # Unit l runs where steps ≥ l, so that Σ_l over masks is a sum of steps, and the masks dilated are
    # those of the dilated steps: one max-pooling stands for L.
    steps = _spread(steps, height, width).float()
    flops = _sum(torch.ones_like(steps)) * sum(unit_prices(first))
    if others:
        near = F.max_pool2d(steps, 3, stride=1, padding=1)
        before, after = unit_prices(others[0])
        flops = flops + _sum(near - 1) * before + _sum(steps - 1) * after
    if heads:
        asked = steps.clamp(max=len(heads))
        if heads[0].conv is not None:
            flops = flops + _sum(asked) * price(heads[0].conv)
        flops = flops + asked.amax((1, 2, 3)).long() * price(heads[0].linear)
    return flops


def plain_flops(block: Any, height: int, width: int) -> int:
    """Return the FLOPs of a block on one image if all of its units run everywhere and nobody decides."""
    return height * width * sum(sum(unit_prices(unit)) for unit in block.steps)


def unit_prices(unit: Any) -> tuple[int, int]:
    """The FLOPs of a unit at one position of its output: those that neighbours need, too, and the others.

    The first convolution of a bottleneck that halves the map runs at all pixels of what it is given.
    """
    if isinstance(unit, Bottleneck):
        return unit.stride**2 * price(unit.conv1), price(unit.conv2) + price(unit.conv3)
    return price(unit.conv1), price(unit.conv2)


def price(layer: nn.Conv2d | nn.Linear) -> int:
    """The FLOPs of a layer at one position of its output."""
    return 2 * layer.weight.numel()


def _spread(steps: Tensor, height: int, width: int) -> Tensor:
    """Give every pixel of a map the steps of its position: itself, its patch or its image."""
    rows, columns = steps.shape[2:]
    if height % rows or width % columns:
        raise ValueError(
            f"expected ponders of a map of {height}×{width} pixels, got {rows}×{columns} positions"
        )
    steps = steps[:, :, :, None, :, None].expand(-1, -1, -1, height // rows, -1, width // columns)
    return steps.reshape(-1, 1, height, width)


def _sum(x: Tensor) -> Tensor:
    """Sum over positions, as integers: FLOPs have more digits than a float holds."""
    return x.sum((1, 2, 3), dtype=torch.long)
