"""The sparse engine for GPUs: Triton kernels over lists of active pixels, without a word from the host.

An iteration is four kernels: heads decide at active pixels; the lists are filtered, and the input of the next
unit is put through its batch norm where it will be looked at; the first convolution runs at pixels near
active ones, the second at those themselves. On small maps the first two are one. Half precision and single;
see gpu_kernels and gpu_lists.
"""

import importlib.util
import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchpact.block import Ponder
from torchpact.engines.folding import FoldedBlock, FoldedUnit, Runner, Unsupported, as_matrix
from torchpact.models.units import HaltingHead
from torchpact.modes import Discrete, Thresholded
from torchpact.relaxation import logistic_noise


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
    splits: int = 1
    """Programs that may share the inputs of a tile, where there are fewer tiles than programs."""


TILES = {
    16: (Tiles(128, 16, 16, 4, 4, 8), Tiles(128, 16, 16, 4, 4, 8)),
    32: (Tiles(128, 32, 32, 4, 4, 6), Tiles(128, 32, 32, 4, 4, 6)),
    64: (Tiles(128, 64, 64, 8, 3, 3), Tiles(128, 64, 64, 4, 3, 2)),
    128: (Tiles(128, 128, 64, 4, 3, 4), Tiles(64, 128, 64, 4, 4, 4)),
    256: (Tiles(64, 128, 64, 4, 4, 2, 4), Tiles(64, 128, 64, 4, 4, 2, 4)),
}
"""Of the first convolution of a unit and the second, by the largest power of two that divides the channels,
or the last: within 8 % of the fastest of 20 to 60 settings at 25 % and 50 % active pixels on an H200, for 64
to 256 channels (benchmarks/engines_gpu_tiles.py). For fewer channels they are not measured yet, nor splits."""

SMALL = 256
"""Pixels of a map up to which one program decides for all of an image. With 64 images of 14×14 two kernels
took 21 µs for that, at most 7 of which were spent on memory; not measured yet in one."""


def tiles_for(channels: int) -> tuple[Tiles, Tiles]:
    """Return how to cut up convolutions of so many channels.

    >>> tiles_for(48)[0].outputs, tiles_for(192)[0].outputs
    (16, 64)
    """
    return TILES[min(channels & -channels, max(TILES))]


def build(block: FoldedBlock) -> Runner:
    """Return a runner for a block with a decision for every pixel."""
    device, channels, head = block.weight.device, block.weight.size(0), block.head
    if head is None or head.conv is None or head.norm is not None or head.group > 1:
        raise Unsupported("gpu: expected a decision for every pixel, by heads without batch norm")
    if not isinstance(block.mode, Thresholded | Discrete):
        raise Unsupported(f"gpu: expected the mode thresholded or discrete, got {block.mode}")
    if channels % 16:
        raise Unsupported(f"gpu: expected channels in multiples of 16, got {channels}")
    if importlib.util.find_spec("triton") is None:
        raise Unsupported("gpu: expected the package triton to be installed")
    if device.type != "cuda":
        raise Unsupported(f"gpu: expected a network on a GPU, got one on {device}")
    return SparseGPUBlock(block)


class SparseGPUBlock:
    """A block that computes convolutions at active pixels only.

    The first unit, which runs everywhere, is computed by the same kernels if ``own_first`` and its stride is
    1, and else by cuDNN. Maps of up to ``small`` pixels are decided on by one program an image.
    """

    def __init__(
        self,
        block: FoldedBlock,
        *,
        tiles: tuple[Tiles, Tiles] | None = None,
        own_first: bool = True,
        small: int = SMALL,
    ) -> None:
        self.mode = block.mode
        self.first = block.units[0]
        self.units = [_Unit(unit) for unit in block.units[1:]]
        self.heads = [_Head(head) for head in block.heads[: len(self.units)]]
        same = self.first.stride == 1 and not self.first.padding
        self.own_first = _Unit(self.first) if own_first and same else None
        channels = block.weight.size(0)
        self.tiles = tiles or tiles_for(channels)
        self.slice = min(channels & -channels, 64)
        # products of pixels with nine taps lie where a map is not in use
        self.small = small if channels * block.weight.element_size() >= 64 else 0
        exact = block.weight.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32
        self.precision = "ieee" if exact else "tf32"
        self.processors = 1
        if block.weight.device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(block.weight.device).multi_processor_count

    @torch.no_grad()
    def __call__(self, u: Tensor) -> tuple[Tensor, Ponder | None]:
        """Run the block."""
        run = _Run(self, u)
        for index, (unit, head) in enumerate(zip(self.units, self.heads, strict=True)):
            if run.small:
                run.advance(index, head, unit)
            else:
                run.decide(index, head)
                run.prepare(index, unit)
            run.convolve(unit, first=True)
            run.convolve(unit, first=False)
        return run.u.permute(0, 3, 1, 2), run.ponder()

    def noise(self, like: Tensor) -> Tensor:
        """Draw what decides, as the dense engine does: for every position, halted or not."""
        if isinstance(self.mode, Discrete):
            return logistic_noise(like.unsqueeze(1), self.mode.generator)
        return like  # not read

    @property
    def bound(self) -> float:
        """What logits must exceed for a halt, unless noise decides."""
        if isinstance(self.mode, Thresholded):
            return math.log(self.mode.threshold) - math.log1p(-self.mode.threshold)
        return 0.0


class _Unit:
    """The weights of a unit as the kernels want them."""

    def __init__(self, unit: FoldedUnit) -> None:
        self.weights = [as_matrix(unit.weight1), as_matrix(unit.weight2)]
        self.scale, self.shift, self.bias1 = (
            x.flatten().float().contiguous() for x in (unit.scale, unit.shift, unit.bias1)
        )


class _Head:
    """The weights of a halting head, likewise."""

    def __init__(self, head: HaltingHead) -> None:
        assert head.conv is not None
        taps = head.conv.weight.detach()[0].flatten(1)
        self.taps = torch.nn.functional.pad(taps, (0, 7)).contiguous()
        self.weight = taps.t().float().flatten()
        self.pooled_weight, self.pooled_bias = (
            x.detach().float().flatten().contiguous() for x in (head.linear.weight, head.linear.bias)
        )


class _Run:
    """One run of a block: the maps, the lists, and what is known of every pixel."""

    def __init__(self, block: SparseGPUBlock, u: Tensor) -> None:
        from torchpact.engines import gpu_kernels, gpu_lists

        self.block, self.kernels, self.deciding = block, gpu_kernels, gpu_lists
        if block.own_first is None:
            # of a size of its own, so that it may be changed in place
            self.u = block.first(u).permute(0, 2, 3, 1).contiguous()
        else:
            self.u = u.permute(0, 2, 3, 1).contiguous()
        self.before, self.middle = torch.empty_like(self.u), torch.empty_like(self.u)
        shape, device = self.u.shape[:3], u.device
        self.pixels = shape.numel()
        self.small = 0 < shape[1] * shape[2] <= block.small
        self._make_notes(shape, device)
        programs, sizes = zip(*(self._room(each) for each in block.tiles), strict=True)
        self.partial = torch.empty(max(sizes), device=device)
        # all that starts from zero, in one; every count at an address alike: of pixels near active ones, and
        # of active ones, then that of far ones, which small maps do without
        zeros = torch.zeros(len(block.units) * 4 + max(programs), dtype=torch.int32, device=device)
        self.counts = zeros[: len(block.units) * 4].view(-1, 4)
        self.arrivals = zeros[len(block.units) * 4 :]
        self.lists: tuple[Tensor, ...] = (self.goes_on,) * 3  # not read: at first everyone is active
        self.lengths: tuple[Tensor, ...] = (self.goes_on,) * 3
        if block.own_first is None:
            self.sums = self.u.sum((1, 2), dtype=torch.float32)
        else:
            self._first_unit(block.own_first)

    def _make_notes(self, shape: torch.Size, device: torch.device) -> None:
        """Make what the first decision fills."""
        self.probs = torch.empty(len(self.block.units) + 1, *shape, device=device)
        self.steps = torch.empty(shape, dtype=torch.long, device=device)
        self.cost, self.survival, self.expected = (torch.empty(shape, device=device) for _ in range(3))
        self.log_q = torch.empty(shape, device=device) if isinstance(self.block.mode, Discrete) else self.cost
        self.goes_on = torch.empty(shape, dtype=torch.uint8, device=device)

    def _first_unit(self, unit: _Unit) -> None:
        tile, given = 64, self.u
        channels = given.size(3)
        self.kernels.activate[(max(1, -(-self.pixels // tile)),)](
            given, unit.scale, unit.shift, self.before, self.pixels, C=channels, P=tile, K=self.block.slice
        )
        self.sums = torch.zeros(len(given), channels, device=given.device)
        self.u = torch.empty_like(given)
        self.convolve(unit, first=True, everywhere=True, old=given)
        self.convolve(unit, first=False, everywhere=True, old=given)

    def _noted(self, index: int) -> tuple[object, ...]:
        """What decisions are added to."""
        return (
            self.goes_on, self.steps, self.cost, self.probs, self.survival, self.expected, self.log_q,
            index + 1, len(self.probs), self.block.bound,
        )  # fmt: skip

    def advance(self, index: int, head: _Head, unit: _Unit) -> None:
        """Decide and prepare at once."""
        block, (images, height, width, channels) = self.block, self.u.shape
        near, active = (torch.empty(self.pixels, dtype=torch.int32, device=self.u.device) for _ in range(2))
        self.lists, counts = (near, near, active), self.counts[index]
        self.lengths = (counts[1], counts[1], counts[0])
        tile = max(16, 1 << (height * width - 1).bit_length())
        self.deciding.advance[(images,)](
            self.u, head.taps, self.middle.view(torch.float32), self.sums, head.pooled_weight,
            head.pooled_bias, block.noise(self.survival), *self._noted(index), unit.scale, unit.shift,
            self.before, near, active, counts[:2].view(torch.int64), self.pixels, height, width,
            C=channels, P=min(tile, 256), K=min(block.slice, 32), ALL=index == 0,
            SAMPLES=isinstance(block.mode, Discrete), num_warps=8,
        )  # fmt: skip

    def decide(self, index: int, head: _Head) -> None:
        """Ask a head at active pixels."""
        block, (_, height, width, channels) = self.block, self.u.shape
        tile = 16 if channels > 128 else 2048 // block.slice  # wide pixels are long to read: by more programs
        self.deciding.decide[self._grid(tile, 8)](
            self.u, head.weight, self.sums, head.pooled_weight, head.pooled_bias, block.noise(self.survival),
            self.lists[2], self.lengths[2], self.pixels, *self._noted(index), height, width,
            C=channels, P=tile, K=block.slice, ALL=index == 0, SAMPLES=isinstance(block.mode, Discrete),
        )  # fmt: skip

    def prepare(self, index: int, unit: _Unit) -> None:
        """Filter the lists, and make what the first convolution of a unit looks at."""
        _, height, width, channels = self.u.shape
        old, old_length = self.lists[0], self.lengths[0]
        far, near, active = (
            torch.empty(self.pixels, dtype=torch.int32, device=self.u.device) for _ in range(3)
        )
        counts = self.counts[index]
        self.lists, self.lengths = (far, near, active), (counts[2], counts[1], counts[0])
        tile = 128
        self.deciding.prepare[self._grid(tile, 8)](
            self.u, unit.scale, unit.shift, self.before, self.goes_on, old, old_length, self.pixels,
            far, self.lengths[0], near, self.lengths[1], active, self.lengths[2], height, width,
            C=channels, P=tile, K=min(self.block.slice, 32), ALL=index == 0,
        )  # fmt: skip

    def convolve(
        self, unit: _Unit, *, first: bool, everywhere: bool = False, old: Tensor | None = None
    ) -> None:
        """Run the first convolution of a unit near active pixels, or the second at these."""
        _, height, width, channels = self.u.shape
        x, y = (self.before, self.middle) if first else (self.middle, self.u)
        which, tiles = (1 if first else 2), self.block.tiles[0 if first else 1]
        self.kernels.convolve[self._programs(tiles)](
            x, unit.weights[0 if first else 1], unit.bias1, y, self.u if old is None else old, self.sums,
            self.partial, self.arrivals, self.lists[which], self.lengths[which], self.pixels, height, width,
            C=channels, D=channels, TAPS=9, P=tiles.pixels, N=tiles.outputs, K=tiles.inputs, ALL=everywhere,
            LAST=not first, SPLITS=tiles.splits, PRECISION=self.block.precision,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip

    def _programs(self, tiles: Tiles) -> tuple[int, int]:
        return self._grid(tiles.pixels, tiles.programs, self.u.size(3) // tiles.outputs, tiles.splits)

    def _room(self, tiles: Tiles) -> tuple[int, int]:
        """How many programs a convolution has, and the sums that they leave for each other."""
        programs = math.prod(self._programs(tiles))
        return programs, programs * tiles.pixels * tiles.outputs if tiles.splits > 1 else 0

    def _grid(self, tile: int, programs: int, parts: int = 1, splits: int = 1) -> tuple[int, int]:
        """As many programs as run at once, or fewer if there is not so much work."""
        at_once = -(-programs * self.block.processors // parts)
        return max(1, min(at_once, -(-self.pixels // tile) * splits)), parts

    def ponder(self) -> Ponder:
        """Return what was decided."""
        steps = self.steps.unsqueeze(1)
        sampled = isinstance(self.block.mode, Discrete)
        return Ponder(
            probs=self.probs.unsqueeze(2),
            steps=steps,
            expected_steps=self.expected.unsqueeze(1),
            cost=self.cost.unsqueeze(1),
            log_prob=self.log_q.unsqueeze(1) if sampled else None,
        )
