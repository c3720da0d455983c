"""The sparse engine for GPUs: Triton kernels over lists of active pixels, without a word from the host.

An iteration is three kernels: heads decide at active pixels, and lists are made; the first convolution runs
at pixels near active ones, the second at those themselves. While it has what is new in registers, the second
puts it through the next batch norm and multiplies it with the taps of the next head; for pixels that do not
change any more the first kernel does so, where they are looked at, by several programs where images are few.
Half precision and single; see gpu_kernels and gpu_lists.
"""

import importlib.util
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact.block import Ponder, _decisions
from torchpact.engines.folding import FoldedBlock, FoldedUnit, Runner, Unsupported, as_matrix
from torchpact.engines.gpu_tiles import (
    FROZEN,
    Tiles,
    fitting,
    read_at_once,
    region_for,
    share_for,
    tiles_for,
    warps_for,
)
from torchpact.models.units import HaltingHead
from torchpact.modes import Discrete, Thresholded

SHARED_MEMORY = 64 * 1024
"""Bytes that a program may have where the device does not tell."""


def build(block: FoldedBlock) -> Runner:
    """Return a runner for a block with a decision for every pixel."""
    device, channels, head = block.weight.device, block.channels, block.head
    if head is None or head.conv is None or head.norm is not None or head.group > 1:
        raise Unsupported("gpu: expected a decision for every pixel, by heads without batch norm")
    if len(block.units) < 2:
        raise Unsupported(f"gpu: expected a block of at least two units, got {len(block.units)}")
    if torch.are_deterministic_algorithms_enabled():  # the size of maps is not known yet
        raise Unsupported("gpu: expected no deterministic algorithms, large maps are added up in any order")
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
    1, and else by cuDNN. A program decides for rows and columns of an image up to ``region``, if given, and
    surveys ``frozen`` pixels at a time.
    """

    def __init__(
        self,
        block: FoldedBlock,
        *,
        tiles: tuple[Tiles, Tiles] | None = None,
        own_first: bool = True,
        region: tuple[int, int] | None = None,
        frozen: int = FROZEN,
    ) -> None:
        self.mode, self.details = block.mode, block.details
        self.first = block.units[0]
        self.units = [_Unit(unit) for unit in block.units[1:]]
        self.heads = [_Head(head) for head in block.heads[: len(self.units)]]
        same = self.first.stride == 1 and not self.first.padding
        self.own_first = _Unit(self.first) if own_first and same else None
        self.region, self.frozen = region, frozen
        self.processors, self.room = 1, SHARED_MEMORY
        if block.weight.device.type == "cuda":
            device = torch.cuda.get_device_properties(block.weight.device)
            self.processors = device.multi_processor_count
            self.room = getattr(device, "shared_memory_per_block_optin", self.room)
        single = block.weight.dtype == torch.float32
        self.tiles = [
            fitting((tiles or tiles_for(weight.size(0), single))[1 if index else 0], weight, self.room)
            for index, (weight, _) in enumerate(block.units[-1].convolutions)
        ]
        self.widths = [weight.size(1) for weight, _ in block.units[-1].convolutions]
        # products of pixels with the taps of a head lie apart for every so many channels
        self.part = self.tiles[-1].outputs
        # channels that are surveyed at once: all that registers hold
        self.inputs = min(block.channels & -block.channels, 64 if single else 256)
        self.precision = "ieee" if single and not torch.backends.cudnn.allow_tf32 else "tf32"

    @torch.no_grad()
    def __call__(self, u: Tensor) -> tuple[Tensor, Ponder | None]:
        """Run the block."""
        run = _Run(self, u)
        for index in range(len(self.units)):
            run.advance(index)
            run.residual(index)
        return run.u.permute(0, 3, 1, 2), run.ponder()

    def noise(self, like: Tensor | None) -> Tensor | None:
        """Draw what decides, as the dense engine does: for every position, halted or not."""
        if isinstance(self.mode, Discrete) and like is not None:
            return self.mode.noise(like.unsqueeze(1))
        return None

    @property
    def bound(self) -> float:
        """What logits must exceed for a halt, unless noise decides."""
        return self.mode.bound if isinstance(self.mode, Thresholded) else 0.0


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
        self.columns = F.pad(head.conv.weight.detach()[0].flatten(1), (0, 7)).contiguous()
        self.pooled_weight, self.pooled_bias = (
            x.detach().float().flatten().contiguous() for x in (head.linear.weight, head.linear.bias)
        )


class _Run:
    """One run of a block: the maps, the lists, and what is known of every pixel."""

    def __init__(self, block: SparseGPUBlock, u: Tensor) -> None:
        from torchpact.engines import gpu_kernels, gpu_lists

        self.block, self.kernels, self.lists = block, gpu_kernels, gpu_lists
        if block.own_first is None:
            # of a size of its own, so that it may be changed in place
            self.u = block.first(u).permute(0, 2, 3, 1).contiguous()
        else:
            self.u = u.permute(0, 2, 3, 1).contiguous()
        # what each convolution reads: the first the unit's activated input, others what came before them
        self.maps = [self.u.new_empty(*self.u.shape[:3], width) for width in block.widths]
        shape, device = self.u.shape[:3], u.device
        self.pixels = shape.numel()
        self.region = region_for(shape[1], shape[2], block.region)
        self.regions = shape[0] * self.region.number(*shape[1:])
        self.share = share_for(self.regions, block.processors)
        self._make_notes(shape, device)
        self._make_counts(device)
        self.near, self.active = (torch.empty_like(self.steps, dtype=torch.int32) for _ in range(2))
        # what the convolutions of a unit leave for each other is not read while lists are made
        self.frozen, need = self.maps[1].view(-1).view(torch.int32), self.regions * self.region.pixels
        if len(self.frozen) < need:
            self.frozen = torch.empty(need, dtype=torch.int32, device=device)
        self._begin()

    def _make_counts(self, device: torch.device) -> None:
        """Make what kernels count and add up in, which the first kernel makes zero."""
        # for each unit how many pixels are active and near; at addresses alike, or else kernels would be
        # compiled for unlike ones
        counts, (images, _, _, channels) = 4 * len(self.block.units), self.u.shape
        sums = 0 if self.region.whole else images * channels  # a program that sees all of an image needs none
        self.zeros = torch.empty(counts + sums, dtype=torch.int32, device=device)
        self.counts = self.zeros[:counts].view(-1, 4)
        self.sums: Tensor | None = None
        if not self.region.whole:
            self.sums = self.zeros[counts:].view(torch.float32).view(images, channels)

    def _make_notes(self, shape: torch.Size, device: torch.device) -> None:
        """Make what the first decision fills."""
        single = partial(torch.empty, dtype=torch.float32, device=device)
        self.steps = torch.empty(shape, dtype=torch.long, device=device)
        self.cost = single(shape)
        self.details: list[Tensor | None] = [None] * 3  # probabilities, of being left, expected steps
        if self.block.details:
            self.details = [single((len(self.block.units) + 1, *shape)), single(shape), single(shape)]
        self.log_q = single(shape) if isinstance(self.block.mode, Discrete) else None
        # what a decision reads, and what it leaves for the next: who goes on, and products with nine taps,
        # which need room of their own only if other programs may still read what was there
        self.goes_on = [torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(2)]
        parts, own = self.u.size(3) // self.block.part, self.region.whole and self.share == 1
        products = [single((parts, 9, *shape)) for _ in range(1 if own else 2)]
        self.products = (products[0], products[-1])

    def _begin(self) -> None:
        """Run the first unit, unless cuDNN has, and make what the first decision looks at."""
        block = self.block
        if block.own_first is None:
            self._survey(block.units[0], block.heads[0])
            if self.sums is not None:
                torch.sum(self.u, (1, 2), dtype=torch.float32, out=self.sums)
            return
        self._survey(block.own_first, None)
        given, self.u = self.u, torch.empty_like(self.u)
        self.residual(-1, given)

    def _survey(self, unit: _Unit, head: _Head | None) -> None:
        """Put all pixels through the batch norm of a unit, and multiply them with the taps of a head."""
        channels = self.u.size(3)
        tile = 4096 // min(channels & -channels, 256)
        self.kernels.survey_all[(max(1, -(-self.pixels // tile)),)](
            self.u, unit.scale, unit.shift, self.maps[0], head.columns if head else self.u, self.products[0],
            self.zeros, len(self.zeros), self.pixels,
            C=channels, N=self.block.part, P=tile, K=self.block.inputs, ASKED=head is not None,
        )  # fmt: skip

    def _next(self, index: int) -> tuple[_Unit, _Head | None, Tensor]:
        """What comes after a unit: the next, the head that is asked before it, and where its products go."""
        units, heads = self.block.units, self.block.heads
        if index + 1 < len(units):
            return units[index + 1], heads[index + 1], self.products[(index + 1) % 2]
        return units[index], None, self.products[0]  # not read

    def advance(self, index: int) -> None:
        """Decide, make lists, and what is looked at of pixels that do not change."""
        block, region, (_, height, width, channels) = self.block, self.region, self.u.shape
        head, unit, (_, after, products) = block.heads[index], block.units[index], self._next(index)
        alone = self.regions <= block.processors
        self.lists.advance[(self.regions * self.share,)](
            self.u, self.products[index % 2], self.sums, head.pooled_weight, head.pooled_bias,
            block.noise(self.log_q), self.goes_on[index % 2], self.goes_on[(index + 1) % 2],
            self.steps, self.cost, *self.details, self.log_q, index + 1, len(block.units) + 1, block.bound,
            unit.scale, unit.shift, self.maps[0], after.columns if after else head.columns, products,
            self.near, self.active, self.frozen, self.counts[index, :2].view(torch.int64),
            self.pixels, height, width,
            C=channels, N=block.part, R=block.frozen, K=block.inputs, ROWS=region.rows,
            COLUMNS=region.columns, ABOVE=region.above, BESIDE=region.beside,
            POOL=read_at_once(region.pixels if region.whole else 1, channels, alone),
            SHARE=self.share, ALL=index == 0, ASKED=after is not None,
            num_warps=warps_for(self.regions, block.processors, region.pixels),
        )  # fmt: skip

    def residual(self, index: int, everywhere: Tensor | None = None) -> None:
        """Run the convolutions of a unit: the first near active pixels, others at these.

        If a map is given they run ``everywhere``, and are added to that.
        """
        block, (_, height, width, _) = self.block, self.u.shape
        unit = block.units[index] if everywhere is None else block.own_first
        assert unit is not None
        next_unit, head, products = self._next(index)
        last = len(unit.convolutions) - 1
        old, outputs = self.u if everywhere is None else everywhere, [*self.maps[1:], self.u]
        for number, (weight, bias, taps) in enumerate(unit.convolutions):
            tiles, places = block.tiles[number], self.active if number else self.near
            asked = number == last and head is not None
            parts = weight.size(1) // tiles.outputs
            self.kernels.convolve[self._grid(tiles.pixels, tiles.programs, parts)](
                self.maps[number], weight, unit.scale if bias is None else bias, outputs[number], old,
                next_unit.scale, next_unit.shift, self.maps[0], weight if head is None else head.columns,
                products, products if self.sums is None else self.sums, places,
                self.counts[index, 0 if number else 1], self.pixels, height, width,
                C=self.maps[number].size(3), D=weight.size(1), TAPS=taps,
                P=tiles.pixels, N=tiles.outputs, K=tiles.inputs,
                ALL=everywhere is not None, LAST=number == last, ASKED=asked,
                SUMS=asked and self.sums is not None, PRECISION=block.precision,
                num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers,
            )  # fmt: skip

    def _grid(self, tile: int, programs: int, parts: int = 1) -> tuple[int]:
        """As many programs as run at once, or as there are tiles, in so many ``parts`` each."""
        return (max(1, min(programs * self.block.processors, -(-self.pixels // tile) * parts)),)

    def ponder(self) -> Ponder:
        """Return what was decided."""
        probs, _, expected = self.details
        steps, cost = self.steps.unsqueeze(1), self.cost.unsqueeze(1)
        if probs is None or expected is None:
            return _decisions(len(self.block.units) + 1, steps, cost)
        return Ponder(
            probs=probs.unsqueeze(2),
            steps=steps,
            expected_steps=expected.unsqueeze(1),
            cost=cost,
            log_prob=None if self.log_q is None else self.log_q.unsqueeze(1),
        )
