"""Calling the kernels of the engine ``onchip`` with little work of the host.

The device waits for all that the host does before the first kernel starts, and a single image takes hardly
longer than that. So what does not change from call to call is made once for each size and layout of images,
memory is asked for in two or three pieces, and tensors are cut from those while the device is at work.
"""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any, Protocol

import torch
from torch import Tensor

from torchpact.core.modes import Discrete, Mode
from torchpact.core.ponder import Ponder
from torchpact.engines.conv.onchip.pack import pack_convolutions, pack_heads, pack_norms, pack_pools
from torchpact.engines.conv.onchip.plan import Plan
from torchpact.engines.conv.support import bounds_of
from torchpact.specs import BlockSpec
from torchpact.specs.blocks import Bounds


class Args(ctypes.Structure):
    """The kernel's argument, which says what each is."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in (
                *("input", "output", "weights", "norms", "heads", "pools", "stem", "last"),
                *("bounds", "probs", "expected", "cost", "steps", "nan"),
            )
        ),
        *((f"{name}_stride", c_int64) for name in ("image", "channel", "row", "column")),
        ("bound", c_float),
        *((name, c_int32) for name in ("batch", "units", "keep_logits")),
    )


class Kernel(Protocol):
    """A compiled block."""

    def __call__(self, args: Args, ctas: int) -> None:
        """Launch it."""


class Weights:
    """A block: what its kernel reads, and how it decides."""

    def __init__(self, spec: BlockSpec, common: dict[str, int]) -> None:
        units, heads = spec.conv_units, spec.conv_heads
        assert units is not None  # as the engine has seen
        assert heads is not None
        self.name = spec.name
        self.mode: Mode = spec.mode
        self.units, self.adaptive = len(units), bool(heads)
        self.details, self.draws = spec.keeps_details, self.adaptive and isinstance(self.mode, Discrete)
        self.channels = units[-1].channels
        self.convolutions, self.norms = pack_convolutions(units), pack_norms(units)
        self.common = common | {"weights": self.convolutions.data_ptr(), "norms": self.norms.data_ptr()}
        self.per_image = bool(heads) and heads[0].taps is None  # pixels of an image decide alike, then
        if heads:
            self.heads, self.pools = pack_heads(heads), pack_pools(heads)
            self.common |= {"heads": self.heads.data_ptr(), "pools": self.pools.data_ptr()}

    def args(self, batch: int) -> Args:
        """Return an argument with what does not change from call to call."""
        return Args(batch=batch, units=self.units, keep_logits=self.draws, **self.common)

    def tell_bounds(
        self, args: Args, bounds: Bounds, shape: Sequence[int], device: torch.device
    ) -> Tensor | None:
        """Tell a kernel what logits must exceed at (batch, 1, height, width) pixels.

        Returns:
            Bounds of all pixels, to be kept until the kernel has been started; None if one number does.

        """
        limits = bounds_of(self.mode, bounds, self.units - 1)
        if limits is not None and len({*limits}) == 1:
            args.bound = limits[0]
            return None
        if limits is None:
            by_pixel = self._drawn(shape, device)
        else:
            by_pixel = torch.empty(len(limits), *shape, dtype=torch.float32, device=device)
            for each, limit in zip(by_pixel, limits, strict=True):
                each.fill_(limit)
        args.bounds = by_pixel.data_ptr()
        return by_pixel

    def _drawn(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Draw as the dense engine does: for every position, halted or not."""
        assert isinstance(self.mode, Discrete)
        like = torch.empty(self.positions(shape), dtype=torch.float32, device=device)
        drawn = torch.stack([-self.mode.noise(like) for _ in range(self.units - 1)])
        return drawn.expand(-1, *shape).contiguous()

    def positions(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return how many of (batch, 1, height, width) pixels decide by themselves."""
        return (shape[0], 1, 1, 1) if self.per_image else tuple(shape)


Stage = tuple[Plan, Kernel, Weights]


class Call:
    """How images of one size and layout, or maps between blocks, run through some blocks.

    Threads may share it. Called with them, it returns what the last block makes, and the ponders.
    """

    def __init__(self, stages: Sequence[Stage], example: Tensor) -> None:
        batch, self.dtype = len(example), example.dtype
        self.launches = [
            (kernel, -(-batch // plan.images) * plan.cluster) for plan, kernel, _ in stages if batch
        ]
        self.args = (Args * len(stages))(*(weights.args(batch) for _, _, weights in stages))
        if stages[0][0].entry_stride == 1:
            first = self.args[0]
            first.image_stride, first.channel_stride, first.row_stride, first.column_stride = example.stride()
        shapes = [_output_shape(plan, batch) for plan, _, _ in stages]
        self.output_shape = shapes.pop()
        maps, notes, details = _Pieces(2), _Pieces(8), _Pieces(4)
        self.map_places = [2 * maps.add(torch.Size(shape).numel()) for shape in shapes]
        self.blocks = [
            _Block(index, weights, (batch, 1, plan.height, plan.width), notes, details)
            for index, (plan, _, weights) in enumerate(stages)
            if weights.adaptive
        ]
        self.brief = next((block for block in self.blocks if not block.details), None)
        self.nan = 2 * notes.add(1)  # a float's place: what is not kept is one number
        self.sizes = [pieces.size for pieces in (maps, notes, details)]

    def __call__(
        self, images: Tensor, bounds: Mapping[str, Bounds] | None = None
    ) -> tuple[Tensor, list[Ponder]]:
        """Run the blocks, with these bounds by their names."""
        device, told = images.device, bounds or {}
        args = type(self.args).from_buffer_copy(self.args)
        maps_size, notes_size, details_size = self.sizes
        maps = notes = details = None
        args[0].input = images.data_ptr()
        if self.map_places:
            maps = torch.empty(maps_size, dtype=self.dtype, device=device)
            start = maps.data_ptr()
            for index, place in enumerate(self.map_places):
                args[index].output = args[index + 1].input = start + place
        if self.blocks:
            notes = torch.empty(notes_size, dtype=torch.int64, device=device)
            if details_size:
                details = torch.empty(details_size, dtype=torch.float32, device=device)
            self._tell_places(args, notes, details)
        output = None
        if len(self.launches) < 2:
            output = torch.empty(self.output_shape, dtype=self.dtype, device=device)
            args[-1].output = output.data_ptr()
        held = [
            block.weights.tell_bounds(args[block.index], told.get(block.weights.name), block.pixels, device)
            for block in self.blocks
        ]
        for index, (kernel, ctas) in enumerate(self.launches):
            if output is None and index:  # the first one has been started
                output = torch.empty(self.output_shape, dtype=self.dtype, device=device)
                args[-1].output = output.data_ptr()
            kernel(args[index], ctas)
        del held
        assert output is not None
        return output, self._ponders(notes, details)

    def _tell_places(self, args: Any, notes: Tensor, details: Tensor | None) -> None:
        start, more = notes.data_ptr(), 0 if details is None else details.data_ptr()
        for block in self.blocks:
            own = args[block.index]
            own.steps, own.cost = start + 8 * block.steps, start + 4 * block.cost
            if block.details:
                own.probs, own.expected = more + 4 * block.probs, more + 4 * block.expected
        if self.brief is not None:
            args[self.brief.index].nan = start + 4 * self.nan

    def _ponders(self, notes: Tensor | None, details: Tensor | None) -> list[Ponder]:
        if notes is None:
            return []
        floats = notes.view(torch.float32)
        if self.brief is not None and not self.launches:  # no kernel has written it
            floats[self.nan] = torch.nan
        return [block.ponder(notes, floats, details, self.nan) for block in self.blocks]


class _Pieces:
    """Places one after the other, in multiples of 16 bytes."""

    def __init__(self, bytes_each: int) -> None:
        self.size, self.step = 0, 16 // bytes_each

    def add(self, count: int) -> int:
        place = self.size
        self.size += -(-count // self.step) * self.step
        return place


class _Block:
    """Where an adaptive block's ponder lies in the pieces of memory of a call."""

    def __init__(
        self, index: int, weights: Weights, shape: tuple[int, ...], notes: _Pieces, details: _Pieces
    ) -> None:
        self.index, self.weights, self.pixels = index, weights, shape
        batch, _, height, width = shape
        count = batch * height * width
        self.shape, self.strides = weights.positions(shape), (height * width, height * width, width, 1)
        self.all_shape, self.all_strides = (weights.units, *self.shape), (max(count, 1), *self.strides)
        self.steps = notes.add(count)
        self.cost = 2 * notes.add(-(-count // 2))  # counted in floats
        self.details = weights.details
        if self.details:
            self.probs, self.expected = details.add(weights.units * count), details.add(count)

    def ponder(self, notes: Tensor, floats: Tensor, details: Tensor | None, nan: int) -> Ponder:
        """Cut it out."""
        steps = notes.as_strided(self.shape, self.strides, self.steps)
        cost = floats.as_strided(self.shape, self.strides, self.cost)
        if details is None or not self.details:
            probs = floats.as_strided(self.all_shape, _NOWHERE, nan)
            return Ponder(probs, steps, floats.as_strided(self.shape, _NOWHERE[1:], nan), cost, None)
        probs = details.as_strided(self.all_shape, self.all_strides, self.probs)
        expected = details.as_strided(self.shape, self.strides, self.expected)
        if not self.weights.draws:
            return Ponder(probs, steps, expected, cost, None)
        score = self.weights.mode.log_prob(probs, steps)  # of logits
        return Ponder(torch.sigmoid(probs), steps, expected, cost, score)


_NOWHERE = (0, 0, 0, 0, 0)
"""Strides of what is one number everywhere."""


def _output_shape(plan: Plan, batch: int) -> tuple[int, ...]:
    return (batch, plan.classes) if plan.last else (batch, plan.height, plan.width, plan.channels)
