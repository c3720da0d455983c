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


TILES = {
    16: (Tiles(128, 16, 16, 4, 4, 8), Tiles(128, 16, 16, 4, 4, 8)),
    32: (Tiles(128, 32, 32, 4, 4, 6), Tiles(128, 32, 32, 4, 4, 6)),
    64: (Tiles(128, 64, 64, 8, 3, 3), Tiles(128, 64, 64, 4, 3, 2)),
    128: (Tiles(128, 128, 64, 4, 3, 4), Tiles(64, 128, 64, 4, 4, 4)),
    256: (Tiles(64, 128, 64, 4, 3, 3), Tiles(64, 128, 64, 4, 3, 3)),
}
"""Of the first convolution of a unit and the second, by the largest power of two that divides the channels,
or the last: within 8 % of the fastest of 20 to 60 settings at 25 % and 50 % active pixels on an H200, for 64
to 256 channels (benchmarks/engines_gpu_tiles.py). Fewer channels have not been measured.

With 256 channels on 64 maps of 14×14 there are 1.2 tiles for each multiprocessor at 25 %, and what counts is
who has two. Neither sums over parts of the inputs, so that all have as much to do, nor half as many outputs
where there are few tiles paid: the former go through memory (24 to 30 µs instead of 20), the latter gained
3 µs at 10 % and lost 4 at 50 %."""


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


def deciding(pixels: int, channels: int, size: int, room: int, alone: bool) -> Tiles:
    """Return how the kernel that decides for small maps is cut up.

    Programs that have a multiprocessor ``alone`` load many inputs at once, of ``size`` bytes each, if these
    fit in registers and bytes of shared memory; those that wait for each other run side by side. With 256
    channels of 14×14 pixels 128 of them and 8 warps took 9.4 µs on an H200, all of them and 16 warps 11.1.

    >>> deciding(14 * 14, 256, size=2, room=227 * 1024, alone=True)
    Tiles(pixels=256, outputs=16, inputs=128, warps=8, stages=1, programs=1)
    >>> deciding(14 * 14, 256, size=2, room=227 * 1024, alone=False).inputs
    32
    """
    tile = min(256, max(16, 1 << (pixels - 1).bit_length()))
    inputs = channels & -channels
    if size > 2 or not alone:  # single products are written out one by one
        return Tiles(tile, 16, min(inputs, 32), 8, 3, 1)
    while inputs > 32 and (tile * inputs > 32 * 1024 or (tile + 16) * inputs * size > room - 8192):
        inputs //= 2
    return Tiles(tile, 16, inputs, 8, 1, 1)
