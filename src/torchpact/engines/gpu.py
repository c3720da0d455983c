"""The sparse engine for GPUs: Triton kernels over lists of active pixels, without a word from the host.

An iteration is four kernels: heads decide at active pixels; the lists are filtered, and the input of the next
unit is put through its batch norm where it will be looked at; the first convolution runs at pixels near
active ones, the second at those themselves. On small maps the first two are one. Half precision and single;
see gpu_kernels and gpu_lists.
"""

import importlib.util
import math
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact.block import Ponder
from torchpact.engines.folding import FoldedBlock, FoldedUnit, Runner, Unsupported, as_matrix
from torchpact.engines.gpu_tiles import Tiles, deciding, fitting, tiles_for
from torchpact.models.units import HaltingHead
from torchpact.modes import Discrete, Thresholded
from torchpact.relaxation import logistic_noise

SMALL = 256
"""Pixels of a map up to which one program decides for all of an image. With 64 images of 14×14 and 256
channels two kernels took 21 µs, 13 to decide and 8 for lists; one took 12, and now waits for less."""

SHARED_MEMORY = 64 * 1024
"""Bytes that a program may have where the device does not tell."""


def build(block: FoldedBlock) -> Runner:
    """Return a runner for a block with a decision for every pixel."""
    device, channels, head = block.weight.device, block.channels, block.head
    if head is None or head.conv is None or head.norm is not None or head.group > 1:
        raise Unsupported("gpu: expected a decision for every pixel, by heads without batch norm")
    if not isinstance(block.mode, Thresholded | Discrete):
        raise Unsupported(f"gpu: expected the mode thresholded or discrete, got {block.mode}")
    if channels % 16 or block.weight.size(0) % 16:
        least = channels if channels % 16 else block.weight.size(0)
        raise Unsupported(f"gpu: expected channels in multiples of 16, got {least}")
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
        self.slice = min(block.channels & -block.channels, 64)
        self.processors, self.room = 1, SHARED_MEMORY
        if block.weight.device.type == "cuda":
            device = torch.cuda.get_device_properties(block.weight.device)
            self.processors = device.multi_processor_count
            self.room = getattr(device, "shared_memory_per_block_optin", self.room)
        self.tiles = [
            fitting((tiles or tiles_for(weight.size(0)))[1 if index else 0], weight, self.room)
            for index, (weight, _) in enumerate(block.units[-1].convolutions)
        ]
        self.widths = [weight.size(1) for weight, _ in block.units[-1].convolutions]
        # products of pixels with nine taps lie where a map is not in use
        self.small = small if block.weight.size(0) * block.weight.element_size() >= 64 else 0
        exact = block.weight.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32
        self.precision = "ieee" if exact else "tf32"

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
            run.residual(unit)
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
        self.scale, self.shift = (x.flatten().float().contiguous() for x in (unit.scale, unit.shift))
        self.convolutions = [
            (as_matrix(weight), None if bias is None else bias.float(), weight.size(2) * weight.size(3))
            for weight, bias in unit.convolutions
        ]


class _Head:
    """The weights of a halting head, likewise."""

    def __init__(self, head: HaltingHead) -> None:
        assert head.conv is not None
        taps, pooled = head.conv.weight.detach()[0].flatten(1), head.linear.weight.detach()
        self.weight = taps.t().float().flatten()
        self.columns = F.pad(torch.cat([taps, pooled.t()], 1), (0, 6)).contiguous()
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
        # what each convolution reads: the first the unit's activated input, others what came before them
        self.maps = [self.u.new_empty(*self.u.shape[:3], width) for width in block.widths]
        shape, device = self.u.shape[:3], u.device
        self.pixels = shape.numel()
        self.small = self.pixels > 0 and shape[1] * shape[2] <= block.small
        self._make_notes(shape, device)
        # for each unit how many pixels are active, near and far
        self.counts = torch.zeros(len(block.units), 4, dtype=torch.int32, device=device)
        # room for lists; small maps have none of far pixels. All at addresses alike, or else kernels would be
        # compiled for unlike ones
        shape_of_lists = (2 if self.small else 4, -(-self.pixels // 4) * 4)
        self.room = torch.empty(shape_of_lists, dtype=torch.int32, device=device).unbind()
        self.lists: tuple[Tensor, ...] = (self.goes_on,) * 3  # not read: at first everyone is active
        self.lengths: tuple[Tensor, ...] = (self.goes_on,) * 3
        self.sums = self.expected  # not read for small maps, whose pixels are added up with each decision
        if not self.small and block.own_first is None:
            self.sums = self.u.sum((1, 2), dtype=torch.float32)
        elif not self.small:
            self.sums = torch.zeros(self.u.size(0), self.u.size(3), dtype=torch.float32, device=device)
        if block.own_first is not None:
            self._first_unit(block.own_first)

    def _make_notes(self, shape: torch.Size, device: torch.device) -> None:
        """Make what the first decision fills."""
        single = partial(torch.empty, dtype=torch.float32, device=device)
        self.probs = single((len(self.block.units) + 1, *shape))
        self.steps = torch.empty(shape, dtype=torch.long, device=device)
        self.cost, self.survival, self.expected = (single(shape) for _ in range(3))
        self.log_q = single(shape) if isinstance(self.block.mode, Discrete) else self.cost
        self.goes_on = torch.empty(shape, dtype=torch.uint8, device=device)

    def _first_unit(self, unit: _Unit) -> None:
        given, channels = self.u, self.u.size(3)
        inputs = min(channels & -channels, 256)
        tile = 4096 // inputs
        self.kernels.activate[(max(1, -(-self.pixels // tile)),)](
            given, unit.scale, unit.shift, self.maps[0], self.pixels, C=channels, P=tile, K=inputs
        )
        self.u = torch.empty_like(given)
        self.residual(unit, given)

    def _noted(self, index: int) -> tuple[object, ...]:
        """What decisions are added to."""
        return (
            self.goes_on, self.steps, self.cost, self.probs, self.survival, self.expected, self.log_q,
            index + 1, len(self.probs), self.block.bound,
        )  # fmt: skip

    def advance(self, index: int, head: _Head, unit: _Unit) -> None:
        """Decide and prepare at once."""
        block, (images, height, width, channels) = self.block, self.u.shape
        counts, (near, active) = self.counts[index], self.room
        self.lists, self.lengths = (near, near, active), (counts[1], counts[1], counts[0])
        alone = images <= block.processors
        tiles = deciding(height * width, channels, self.u.element_size(), block.room, alone)
        self.deciding.advance[(images,)](
            self.u, head.columns, self.maps[1].view(torch.float32), head.pooled_bias,
            block.noise(self.survival), *self._noted(index), unit.scale, unit.shift, self.maps[0],
            near, active, counts[:2].view(torch.int64), self.pixels, height, width,
            C=channels, P=tiles.pixels, K=tiles.inputs, ALL=index == 0,
            SAMPLES=isinstance(block.mode, Discrete), LOOKS=not alone,
            num_warps=tiles.warps, num_stages=tiles.stages,
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
        near, active, *fars = self.room
        far, counts = fars[index % 2], self.counts[index]  # the one that is not read
        self.lists, self.lengths = (far, near, active), (counts[2], counts[1], counts[0])
        tile = 128
        self.deciding.prepare[self._grid(tile, 8)](
            self.u, unit.scale, unit.shift, self.maps[0], self.goes_on, old, old_length, self.pixels,
            far, self.lengths[0], near, self.lengths[1], active, self.lengths[2], height, width,
            C=channels, P=tile, K=min(self.block.slice, 32), ALL=index == 0,
        )  # fmt: skip

    def residual(self, unit: _Unit, everywhere: Tensor | None = None) -> None:
        """Run the convolutions of a unit: the first near active pixels, others at these.

        If a map is given they run ``everywhere``, and are added to that.
        """
        _, height, width, _ = self.u.shape
        last = len(unit.convolutions) - 1
        old, outputs = self.u if everywhere is None else everywhere, [*self.maps[1:], self.u]
        for index, (weight, bias, taps) in enumerate(unit.convolutions):
            tiles, which = self.block.tiles[index], 2 if index else 1
            parts = weight.size(1) // tiles.outputs
            self.kernels.convolve[self._grid(tiles.pixels, tiles.programs, parts)](
                self.maps[index], weight, unit.scale if bias is None else bias, outputs[index], old,
                self.sums, self.lists[which], self.lengths[which], self.pixels, height, width,
                C=self.maps[index].size(3), D=weight.size(1), TAPS=taps,
                P=tiles.pixels, N=tiles.outputs, K=tiles.inputs,
                ALL=everywhere is not None, LAST=index == last, SUMS=not self.small,
                PRECISION=self.block.precision, num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip

    def _grid(self, tile: int, programs: int, parts: int = 1) -> tuple[int]:
        """As many programs as run at once, or as there are tiles, in so many ``parts`` each."""
        return (max(1, min(programs * self.block.processors, -(-self.pixels // tile) * parts)),)

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
