"""A block run by Triton kernels over lists of active pixels, without a host sync.

An iteration is three kernels: heads decide at active pixels, and lists are made; the first convolution runs
at pixels near active ones, the second at those themselves. Bottlenecks have a third one, like the second.
While it has what is new in registers, the last one puts it through the next batch norm and multiplies it with
the taps of the next head, and with what each head to come has for the mean; for pixels that do not change any
more the first kernel does so, where they are looked at, by several programs where images are few.
Half precision and single; see gpu_kernels and lists.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from torchpact.core.call_args import CallArgs
from torchpact.core.modes import Discrete
from torchpact.core.ponder import Ponder, decisions_only
from torchpact.core.state import State
from torchpact.engines.base import NO_CONTEXT, Runner
from torchpact.engines.conv.folded import FoldedUnit
from torchpact.engines.conv.support import bounds_of
from torchpact.engines.conv.triton.tiles import (
    FROZEN,
    RAISING,
    Tiles,
    fitting,
    region_for,
    share_for,
    tiles_of,
    warps_for,
)
from torchpact.engines.conv.triton.weights import Head, Unit, pack_heads
from torchpact.nn.conv_units import join_patches
from torchpact.specs import BlockSpec, ConvUnit
from torchpact.specs.blocks import Bounds

SHARED_MEMORY = 64 * 1024
"""Bytes that a program may have where the device does not tell."""


class SparseGPUBlock(Runner):
    """A block that computes convolutions at active pixels only.

    The first unit, which runs everywhere, is computed by the same kernels if ``own_first`` and 16 divides the
    channels that it is given, and else by cuDNN. A program decides for rows and columns of an image up to
    ``region``, if given, and surveys ``frozen`` pixels at a time.
    """

    def __init__(
        self,
        spec: BlockSpec,
        *,
        tiles: Sequence[Tiles] | None = None,
        own_first: bool = True,
        region: tuple[int, int] | None = None,
        frozen: int = FROZEN,
    ) -> None:
        units, heads = spec.conv_units, spec.conv_heads
        assert units is not None  # as the engine has seen
        assert heads is not None
        first, last, dtype = units[0], units[-1], units[0].weight.dtype
        self.mode, self.details, self.channels = spec.mode, spec.keeps_details, first.channels
        self.first, self.stride = FoldedUnit(first), first.stride
        self.units = [Unit(unit) for unit in units[1:]]
        self.heads = pack_heads(heads)
        fits = first.weight.size(1) % 16 == 0
        self.own_first = Unit(first) if own_first and fits else None
        self.region, self.frozen = region, frozen
        self.processors, self.room = 1, SHARED_MEMORY
        if first.weight.device.type == "cuda":
            device = torch.cuda.get_device_properties(first.weight.device)
            self.processors = device.multi_processor_count
            self.room = getattr(device, "shared_memory_per_block_optin", self.room)
        self.single = dtype == torch.float32
        self.tiles, self.first_tiles = (self._cut(unit, tiles) for unit in (last, first))
        self.widths = [weight.size(1) for weight, _ in last.convolutions]
        # a first convolution of 1×1 looks at no neighbours, and may activate what it reads by itself
        self.bottleneck = first.bottleneck
        self.raises = self.bottleneck and self.channels <= RAISING
        # products of pixels with the taps of a head lie apart for every so many channels
        self.part = self.tiles[-1].outputs
        self.precision = "ieee" if self.single and not torch.backends.cudnn.allow_tf32 else "tf32"

    def _cut(self, unit: ConvUnit, tiles: Sequence[Tiles] | None) -> list[Tiles]:
        """How the convolutions of a unit are cut up: as given, the last of these also for others."""
        cut = []
        for index, (weight, _) in enumerate(unit.convolutions):
            choice = tiles[min(index, len(tiles) - 1)] if tiles else tiles_of(weight, index)
            cut.append(fitting(choice, weight, self.room))
        return cut

    def surveyed(self, channels: int) -> int:
        """How many channels of so many are surveyed at once: all that registers hold."""
        return min(channels & -channels, 64 if self.single else 256)

    @torch.no_grad()
    def __call__(
        self, u: State, context: CallArgs = NO_CONTEXT, bounds: Bounds = None
    ) -> tuple[State, Ponder | None]:
        """Run the block."""
        assert isinstance(u, Tensor)
        run = Run(self, join_patches(u), bounds)
        for index in range(len(self.units)):
            run.advance(index)
            run.residual(index)
        return run.u.permute(0, 3, 1, 2), run.ponder()

    def noise(self, like: Tensor | None) -> Tensor | None:
        """Draw what decides, as the dense engine does: for every position, halted or not."""
        if isinstance(self.mode, Discrete) and like is not None:
            return self.mode.noise(like.unsqueeze(1))
        return None


class Run:
    """One run of a block: the maps, the lists, and what is known of every pixel."""

    def __init__(self, block: SparseGPUBlock, u: Tensor, bounds: Bounds = None) -> None:
        from torchpact.engines.conv.triton import gpu_kernels
        from torchpact.engines.conv.triton import lists as gpu_lists

        self.block, self.kernels, self.lists = block, gpu_kernels, gpu_lists
        count = len(block.heads)
        # what logits must exceed, unless noise decides
        self.bounds = bounds_of(block.mode, bounds, count) or (0.0,) * count
        self.width = block.heads[0].columns.size(1)
        given = u if block.own_first else block.first(u)
        # of a size of its own, so that what cuDNN has made may be changed in place
        self.u = given.permute(0, 2, 3, 1).contiguous()
        given = self.u
        if block.own_first:
            stride = block.stride
            size = (-(-given.size(1) // stride), -(-given.size(2) // stride))
            self.u = given.new_empty(len(given), *size, block.channels)
        # what each convolution reads: the first the unit's activated input, unless it activates that by
        # itself; others what came before them
        self.raised = None if block.raises else torch.empty_like(self.u)
        middle = [self.u.new_empty(*self.u.shape[:3], width) for width in block.widths[1:]]
        self.maps = [self.u if self.raised is None else self.raised, *middle]
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
        self._begin(given)

    def _make_counts(self, device: torch.device) -> None:
        """Make what kernels count in, which the first one makes zero."""
        # for each unit how many pixels are active and near; at addresses alike, or else kernels would be
        # compiled for unlike ones
        self.counts = torch.empty(len(self.block.units), 4, dtype=torch.int32, device=device)

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
        # with what every head has for the mean
        self.pools = single((parts, len(self.block.heads), *shape))

    def _begin(self, given: Tensor) -> None:
        """Run the first unit, unless cuDNN has, and make what the first decision looks at."""
        block, unit = self.block, self.block.own_first
        if unit is None:
            self._survey(given, block.units[0], self.raised, block.heads[0])
            return
        # maps of its own where it has a stride, or other channels come in
        first, size = given, given.shape[1:3]
        if block.bottleneck:
            self.counts.zero_()
        else:
            first = self.maps[0] if given.shape == self.u.shape else torch.empty_like(given)
            self._survey(given, unit, first)
        maps = [first]
        for stride, later in zip(unit.strides, self.maps[1:], strict=False):
            size = torch.Size(-(-length // stride) for length in size)
            same = size == later.shape[1:3]
            maps.append(later if same else later.new_empty(len(later), *size, later.size(3)))
        self._convolve(-1, unit, block.first_tiles, maps, given)

    def _survey(self, u: Tensor, unit: Unit, to: Tensor | None, head: Head | None = None) -> None:
        """Put all pixels through the batch norm of a unit, and multiply them with the taps of a head."""
        channels, pixels = u.size(3), u.shape[:3].numel()
        tile = 4096 // min(channels & -channels, 256)
        self.kernels.survey_all[(max(1, -(-pixels // tile)),)](
            u, unit.scale, unit.shift, to, head.columns if head else u, self.products[0], self.pools,
            self.counts, self.counts.numel(), pixels,
            C=channels, N=self.block.part if head else channels, P=tile, K=self.block.surveyed(channels),
            W=self.width, HEADS=len(self.block.heads), ASKED=head is not None,
        )  # fmt: skip

    def _next(self, index: int) -> tuple[Unit, Head | None, Tensor]:
        """What comes after a unit: the next, the head that is asked before it, and where its products go."""
        units, heads = self.block.units, self.block.heads
        if index + 1 < len(units):
            return units[index + 1], heads[index + 1], self.products[(index + 1) % 2]
        return units[index], None, self.products[0]  # not read

    def advance(self, index: int) -> None:
        """Decide, make lists, and what is looked at of pixels that do not change."""
        block, region, (_, height, width, channels) = self.block, self.region, self.u.shape
        head, unit, (_, after, products) = block.heads[index], block.units[index], self._next(index)
        self.lists.advance[(self.regions * self.share,)](
            self.u, self.products[index % 2], self.pools, head.bias, block.noise(self.log_q),
            self.goes_on[index % 2], self.goes_on[(index + 1) % 2],
            self.steps, self.cost, *self.details, self.log_q, index + 1, len(block.units) + 1,
            self.bounds[index], unit.scale, unit.shift, self.raised, after.columns if after else
            head.columns, products, self.near, self.active, self.frozen, self.counts[index,
            :2].view(torch.int64), self.pixels, height, width,
            C=channels, N=block.part, R=block.frozen, K=block.surveyed(channels), ROWS=region.rows,
            COLUMNS=region.columns, ABOVE=region.above, BESIDE=region.beside,
            W=self.width, HEADS=len(block.heads), SHARE=self.share, REACH=1 if block.bottleneck else 2,
            ALL=index == 0, ASKED=after is not None,
            num_warps=warps_for(self.regions, block.processors, region.pixels),
        )  # fmt: skip

    def residual(self, index: int) -> None:
        """Run the convolutions of a unit: the first near active pixels, others at these."""
        self._convolve(index, self.block.units[index], self.block.tiles, self.maps, self.u)

    def _convolve(
        self, index: int, unit: Unit, cut: Sequence[Tiles], maps: Sequence[Tensor], old: Tensor
    ) -> None:
        """Run the convolutions of a unit, which read these maps, and add them to what is ``old``.

        Before the first decision they run everywhere.
        """
        block, everywhere = self.block, index < 0
        next_unit, head, products = self._next(index)
        last = len(unit.convolutions) - 1
        outputs = [*maps[1:], self.u]
        for number, (weight, bias, taps) in enumerate(unit.convolutions):
            tiles, places = cut[number], self.active if number else self.near
            asked = number == last and head is not None
            parts = weight.size(1) // tiles.outputs
            raises = number == 0 and (block.bottleneck if everywhere else block.raises)
            normed = unit if raises else next_unit
            pixels, before = outputs[number].shape[:3].numel(), old if number == last else maps[number]
            self.kernels.convolve[self._grid(pixels, tiles, parts)](
                maps[number], weight, unit.scale if bias is None else bias, outputs[number], old,
                normed.scale, normed.shift, self.raised, weight if head is None else head.columns,
                products, self.pools, places, self.counts[index, 0 if number else 1], pixels,
                len(block.heads) - index - 1, *outputs[number].shape[1:3], *before.shape[1:3],
                C=maps[number].size(3), D=weight.size(1), TAPS=taps,
                P=tiles.pixels, N=tiles.outputs, K=tiles.inputs, STRIDE=unit.strides[number],
                KEPT=old.size(3), RAISES=raises, W=self.width, HEADS=len(block.heads),
                ALL=everywhere, LAST=number == last, ASKED=asked, PRECISION=block.precision,
                num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers,
            )  # fmt: skip

    def _grid(self, pixels: int, tiles: Tiles, parts: int) -> tuple[int]:
        """As many programs as run at once, or as there are tiles, in so many ``parts`` each."""
        tiled = -(-pixels // tiles.pixels) * parts
        return (max(1, min(tiles.programs * self.block.processors, tiled)),)

    def ponder(self) -> Ponder:
        """Return what was decided."""
        probs, _, expected = self.details
        steps, cost = self.steps.unsqueeze(1), self.cost.unsqueeze(1)
        if probs is None or expected is None:
            return decisions_only(len(self.block.units) + 1, steps, cost)
        return Ponder(
            probs=probs.unsqueeze(2),
            steps=steps,
            expected_steps=expected.unsqueeze(1),
            cost=cost,
            log_prob=None if self.log_q is None else self.log_q.unsqueeze(1),
        )
