"""How convolutions on a GPU are cut up: constants that were measured."""

from typing import NamedTuple

import torch
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
    registers: int | None = None
    """Of a thread, at most, so that as many programs fit; None: as many as the compiler likes."""


TILES = {
    16: (Tiles(128, 16, 16, 4, 4, 8), Tiles(128, 16, 16, 4, 4, 6, 80)),
    32: (Tiles(128, 32, 32, 4, 4, 5), Tiles(128, 32, 32, 4, 4, 4, 128)),
    64: (Tiles(128, 64, 64, 8, 3, 3), Tiles(128, 64, 64, 4, 3, 3, 168)),
    128: (Tiles(64, 128, 32, 4, 5, 4), Tiles(64, 128, 64, 4, 4, 4)),
    256: (Tiles(64, 128, 64, 4, 3, 3), Tiles(64, 128, 64, 4, 3, 3, 168)),
    512: (Tiles(64, 128, 64, 4, 4, 2), Tiles(64, 128, 64, 4, 4, 2)),
}
"""Of the first convolution of a unit and the second, by the largest power of two that divides the channels,
or the last. Those of 64 to 256 channels were within 8 % of the fastest of 20 to 60 settings at 25 % and 50 %
active pixels on an H200 (benchmarks/engines_gpu_tiles.py), when the second did not yet leave what the next
iteration looks at, for which it takes more registers. Blocks at 25 %, 50 % and 100 %, in µs, with and without
a bound on these: 64 channels 397, 505, 637 and 411, 500, 641; 256 channels 289, 315, 331 and 304, 316, 376;
128 channels were slower with it (302 to 447 and 282 to 432), and have 266, 364 and 424 where the first had
products of 64 inputs before: 274, 344 and 433. By shared memory three programs fit a multiprocessor instead
of two: all tiles of 25 % run at once, those of 50 % in two rounds. 64 maps of 512×7×7 at 25 %: 321, with the
tiles of 256 channels 388. Fewer channels have not been measured: as many programs as have registers at once,
without spilling.

With 256 channels on 64 maps of 14×14 there are 1.2 tiles for each multiprocessor at 25 %, and what counts is
who has two. Neither sums over parts of the inputs, so that all have as much to do, nor half as many outputs
where there are few tiles paid: the former go through memory (24 to 30 µs instead of 20), the latter gained
3 µs at 10 % and lost 4 at 50 %."""

SINGLE = Tiles(64, 64, 32, 4, 3, 3)
"""Of both convolutions in single precision, from 64 channels: the others spill 0.9 to 6 KB a thread there, by
what the compiler says for compute capability 9.0, this one nothing."""


POINTWISE = {
    64: (Tiles(64, 64, 64, 4, 3, 3), TILES[64][1]),
    128: (Tiles(64, 128, 64, 4, 3, 3), TILES[128][1]),
    512: (TILES[512][0], Tiles(64, 128, 64, 4, 3, 2)),
}
"""The same for 1×1 convolutions, where others were faster in one of the four blocks of a network much like
ResNet-50: 64 outputs 390 and 638 µs at 25 % and 100 %, with the tiles of 3×3 ones 396 and 658; 128 outputs
461 and 716 for 484 and 720; 512 and more 520 and 707 for 525 and 722 (with two stages), 310 and 333 for 321
and 344. Tiles of 8 warps or 128 pixels were up to 40 % slower, of 32 pixels 4 % faster to 23 % slower."""

RAISING = 1024
"""Channels of maps, at most, that the first convolution of a bottleneck activates by itself. Otherwise the
last one of the unit before leaves them activated, too, as do decisions for pixels near active ones. All
active, a unit of 512 channels took 14 µs less so, one of 1024 2 µs more, one of 2048 9 µs more; with 25 %
active one of 1024 took 3 µs less, one of 2048 1 µs more."""

LEAST_INPUTS = 16
"""Of a product, on tensor cores."""


def tiles_for(channels: int, single: bool = False) -> tuple[Tiles, Tiles]:
    """Return how to cut up convolutions of so many channels.

    >>> tiles_for(48)[0].outputs, tiles_for(192)[0].outputs, tiles_for(256, single=True)[0].outputs
    (16, 64, 64)
    """
    power = min(channels & -channels, max(TILES))
    return (SINGLE, SINGLE) if single and power >= SINGLE.outputs else TILES[power]


def tiles_of(weight: Tensor, index: int) -> Tiles:
    """Return how to cut up a convolution of a unit."""
    channels, single = weight.size(0), weight.dtype == torch.float32
    power = min(channels & -channels, max(TILES))
    if weight.size(2) == 1 and not single and power in POINTWISE:
        return POINTWISE[power][1 if index else 0]
    return tiles_for(channels, single)[1 if index else 0]


def fitting(tiles: Tiles, weight: Tensor, room: int) -> Tiles:
    """Return tiles that fit a convolution, which may have few inputs, and bytes of shared memory.

    A tile is the sum of two products at least, if there are inputs for them. With a single one, of 32 or 64,
    what ptxas of CUDA 12.8 (Triton 3.6) makes of the head's product after it reads registers that nothing was
    written to, and so any address, on compute capability 9.0; of 16, it does as it should.

    >>> wide, narrow, one = (torch.zeros(256, n, size, size) for n, size in ((256, 3), (96, 1), (64, 1)))
    >>> tiles = Tiles(64, 128, 64, warps=4, stages=4, programs=2)
    >>> fitting(tiles, wide, 227 * 1024).stages, fitting(tiles, wide, 100_000).stages
    (4, 2)
    >>> fitting(tiles, narrow, 100_000).inputs, fitting(tiles, one, 100_000).inputs
    (32, 32)
    """
    inputs = min(tiles.inputs, weight.size(1) & -weight.size(1))
    if weight[0].numel() == inputs > LEAST_INPUTS:
        inputs //= 2
    product = (tiles.pixels + tiles.outputs) * inputs * weight.element_size()
    return tiles._replace(inputs=inputs, stages=max(1, min(tiles.stages, room // product)))


class Region(NamedTuple):
    """Where a program decides: rows and columns, with a margin if that is not all of the image."""

    rows: int
    columns: int
    above: int
    """Rows at either end that belong to others."""
    beside: int
    """The same for columns."""

    @property
    def pixels(self) -> int:
        """How many there are, with those of the margin."""
        return self.rows * self.columns

    @property
    def whole(self) -> bool:
        """Whether it is all of the image."""
        return self.above == self.beside == 0

    def number(self, height: int, width: int) -> int:
        """How many an image has."""
        return -(-height // (self.rows - 2 * self.above)) * -(-width // (self.columns - 2 * self.beside))


MARGIN = 2
"""Who is looked at depends on decisions that far away."""

REGION = (16, 32)
"""Rows and columns that a program decides for, at most. A row is the bits of a number: 60 of them at most."""

WHOLE = (32, 32)
"""But maps up to this size are one region: nothing is decided twice, and no sums are shared. At 25 %,
50 % and 100 % active, blocks of 64 maps of 128×28×28 took 301, 351 and 443 µs on an H200, in smaller regions
303, 353 and 458; 1024 of 16×32×32 with 25 % and 100 % 731 and 969 for 768 and 1031."""


FROZEN = 64
"""Pixels that do not change, but are looked at, which a program takes at a time. What counts is how often:
half of it made blocks of 64 to 256 channels 4 to 12 % slower. Of 12×28 pixels a quarter of which is active,
in blobs, about 70 are like that."""

MOST_SHARE = 4
"""Programs that have a region in common, at most: more would find nothing left to survey."""


def share_for(regions: int, processors: int) -> int:
    """Return how many programs have a region in common: as many as find a multiprocessor.

    >>> share_for(64, 132), share_for(640, 132), share_for(1, 132)
    (2, 1, 4)
    """
    return max(1, min(MOST_SHARE, processors // max(1, regions)))


def warps_for(regions: int, processors: int, pixels: int = 0) -> int:
    """Return how many warps decide for a region of so many pixels: many if few regions wait for each other.

    Blocks of 64 channels with 640 regions on the 132 multiprocessors of an H200 took 389 µs with 4 warps and
    411 with 8, those of 128 channels with 192 regions 290 and 282, those of 256 with 64 regions 338 and 304;
    1024 maps of 16×32×32, each a region, 761 and 731.

    >>> warps_for(192, 132), warps_for(640, 132), warps_for(640, 132, pixels=1024)
    (8, 4, 8)
    """
    return 8 if regions <= 2 * processors or pixels > 512 else 4


def region_for(height: int, width: int, most: tuple[int, int] | None = None) -> Region:
    """Return how images are cut up for decisions: into regions up to ``most`` rows and columns, if given.

    >>> region_for(14, 14)
    Region(rows=16, columns=16, above=0, beside=0)
    >>> region_for(28, 28).whole
    True
    >>> region_for(56, 56), region_for(56, 56).number(56, 56)
    (Region(rows=16, columns=32, above=2, beside=2), 10)
    """
    if most is None:
        most = WHOLE if height <= WHOLE[0] and width <= WHOLE[1] else REGION
    rows, columns = (
        min(limit, max(4, 1 << (size - 1).bit_length()))
        for limit, size in zip(most, (height, width), strict=True)
    )
    return Region(rows, columns, MARGIN if height > rows else 0, MARGIN if width > columns else 0)
