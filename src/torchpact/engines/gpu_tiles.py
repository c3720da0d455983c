"""How convolutions on a GPU are cut up: constants that were measured."""

from typing import NamedTuple

from torch import Tensor


class Tiles(NamedTuple):
    """How a convolution is cut up: pixels, outputs and inputs of a product, and how programs run."""

    pixels: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    """Products whose inputs are loaded ahead, and the one at work."""
    programs: int
    """For every multiprocessor: enough to hide latency, few enough to start at once."""
    sharing: int = 0
    """What it costs programs to share a tile, in products; 0 where they never do."""


TILES = {
    16: (Tiles(128, 16, 16, 4, 4, 8), Tiles(128, 16, 16, 4, 4, 8)),
    32: (Tiles(128, 32, 32, 4, 4, 6), Tiles(128, 32, 32, 4, 4, 6)),
    64: (Tiles(128, 64, 64, 8, 3, 3), Tiles(128, 64, 64, 4, 3, 2)),
    128: (Tiles(128, 128, 64, 4, 3, 4), Tiles(64, 128, 64, 4, 4, 4)),
    256: (Tiles(128, 128, 64, 4, 4, 1, 6), Tiles(64, 128, 64, 4, 4, 1, 6)),
}
"""Of the first convolution of a unit and the second, by the largest power of two that divides the channels,
or the last: within 8 % of the fastest of 20 to 60 settings at 25 % and 50 % active pixels on an H200, for 64
and 128 channels (benchmarks/engines_gpu_tiles.py). Not measured yet: fewer channels, and sharing, so that of
256 channels only the shape of the tiles was."""


def tiles_for(channels: int) -> tuple[Tiles, Tiles]:
    """Return how to cut up convolutions of so many channels.

    >>> tiles_for(48)[0].outputs, tiles_for(192)[0].outputs
    (16, 64)
    """
    return TILES[min(channels & -channels, max(TILES))]


def fitting(tiles: Tiles, weight: Tensor, room: int) -> Tiles:
    """Return tiles that fit a convolution, which may have few inputs, and bytes of shared memory.

    >>> wide, narrow = torch.zeros(256, 256, 3, 3), torch.zeros(256, 32, 1, 1)
    >>> tiles = Tiles(64, 128, 64, warps=4, stages=4, programs=2)
    >>> fitting(tiles, wide, 227 * 1024).stages, fitting(tiles, wide, 100_000).stages
    (4, 2)
    >>> fitting(tiles, narrow, 100_000).inputs
    32
    """
    inputs = min(tiles.inputs, weight.size(1) & -weight.size(1))
    product = (tiles.pixels + tiles.outputs) * inputs * weight.element_size()
    return tiles._replace(inputs=inputs, stages=max(1, min(tiles.stages, room // product)))
