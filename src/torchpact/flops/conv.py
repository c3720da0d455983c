"""FLOPs of a block of convolutional units, from how many of them ran at each position."""

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact.specs import BlockSpec, ConvUnit


def conv_block_flops(spec: BlockSpec, steps: Tensor, height: int, width: int) -> Tensor:
    """Return the FLOPs of a block for each image, from how many units ran at each position.

    The first unit is charged in full. Unit l > 1 is charged where it ran: its convolutions at the active
    positions, but for the first, which is needed at those and their eight neighbours. The halting head after
    unit l < L is charged where unit l ran: its convolution at these positions, its product with the mean for
    an image that has any.

    Args:
        spec: A block whose steps are convolutional units.
        steps: How many units ran, of shape (batch, 1, rows, columns): for pixels, patches or images.
        height: Of the maps.
        width: Of the maps.

    Returns:
        Integers of shape (batch,).

    Raises:
        ValueError: The positions do not tile maps of this size.

    """
    units, heads = spec.conv_units, spec.conv_heads
    assert units is not None
    first, *others = units
    # Unit l runs where steps ≥ l, so that Σ_l over masks is a sum of steps, and the masks dilated are
    # those of the dilated steps: one max-pooling stands for L.
    alike = 1
    if steps.shape[2:].numel() == 1:  # of a whole image: one pixel stands for all
        alike, height, width = height * width, 1, 1
    steps = _spread(steps, height, width).float()
    flops = _sum(torch.ones_like(steps)) * alike * sum(unit_prices(first))
    if others:
        near = F.max_pool2d(steps, 3, stride=1, padding=1)
        before, after = unit_prices(others[0])
        flops = flops + (_sum(near - 1) * before + _sum(steps - 1) * after) * alike
    if heads:
        asked = steps.clamp(max=len(heads))
        if heads[0].taps is not None:
            flops = flops + _sum(asked) * alike * (2 * heads[0].taps.numel())
        if heads[0].pool is not None:
            flops = flops + asked.amax((1, 2, 3)).long() * (2 * heads[0].pool.numel())
    return flops


def plain_conv_flops(spec: BlockSpec, height: int, width: int) -> int:
    """Return the FLOPs of a block on one image if all of its units run everywhere and nothing is decided."""
    assert spec.conv_units is not None
    return height * width * sum(sum(unit_prices(unit)) for unit in spec.conv_units)


def unit_prices(unit: ConvUnit) -> tuple[int, int]:
    """Return the FLOPs of a unit at one position of its output: those that neighbours need, and the others.

    The first convolution of a bottleneck that halves the map runs at all pixels of what it is given.
    """
    first, *others = (conv.price for conv in unit.convs)
    return unit.stride**2 * first if unit.bottleneck else first, sum(others)


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
