"""The sparse engine in plain PyTorch: active pixels are gathered and multiplied, one chunk after the other.

It runs what the compiled ones do not: on a CPU without a C++ compiler (or with ``TORCHPACT_NATIVE=0``), in
float16 or double precision, with channels that are no multiples of 16, or a first unit that makes fewer of
them; on a GPU without Triton; and everywhere hard modes of the user's own, for the halting loop decides.

Maps lie channels last within a border of zeros, seen as rows of pixels. The three pixels to the left, at
and to the right of one are then neighbours in memory, so that the nine inputs of a convolution are three
reads. Lists of pixels are filtered from those of the unit before, as pixels only ever halt.

On 2 CPU cores a convolution of 32 or 64 channels at half or a quarter of the pixels reaches, at batch 64,
0.5 to 0.7 of the speed that its share of pixels promises against the dense one. Gathering nine single pixels
reaches 0.3 to 0.5, nine accumulating products 0.45 to 0.6, dense convolutions of 4×4 tiles 0.2 to 0.4.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact.core.call_args import CallArgs
from torchpact.core.loop import HaltingLoop, decide
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.engines.base import NO_CONTEXT, Engine, Runner, Unsupported
from torchpact.engines.conv.folded import FoldedUnit
from torchpact.engines.conv.support import as_matrix, bounds_of, conv_block_problem, decides_per_pixel
from torchpact.specs import BlockSpec, ConvHead, ConvUnit, NetworkSpec
from torchpact.specs.blocks import Bounds

CHUNK = 4096  # pixels; 1024 is 4 to 8 % slower with 32 and 64 channels


class Sparse(Engine):
    """Blocks of residual units with a decision for every pixel, in hard modes."""

    name = "sparse"
    kinds = (ConvUnit,)
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float32: 1e-5,
        torch.float16: 1e-2,
        torch.bfloat16: 1e-2,
    }
    host_sync = True

    def supports(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> str | None:
        """Return None if it can run a block, or one line that says why not."""
        if isinstance(spec, NetworkSpec):
            return "sparse: expected a block, got a network"
        problem = conv_block_problem(spec)
        if problem is not None:
            return problem
        if not decides_per_pixel(spec):
            return "sparse: expected a decision for every pixel, by heads without batch norm"
        if not spec.mode.hard:
            return f"sparse: expected a hard mode, got {spec.mode}"
        return None

    def build(self, spec: BlockSpec | NetworkSpec, example: CallArgs = NO_CONTEXT) -> "SparseBlock":
        """Return a runner of a block.

        Raises:
            Unsupported: It cannot run it.

        """
        problem = self.supports(spec, example)
        if problem is not None:
            raise Unsupported(problem)
        assert isinstance(spec, BlockSpec)
        return SparseBlock(spec)


class SparseBlock(Runner):
    """A block that computes convolutions at active pixels only."""

    host_sync = True  # for the length of lists

    def __init__(self, spec: BlockSpec) -> None:
        units, heads = spec.conv_units, spec.conv_heads
        assert units is not None  # as the engine has seen
        assert heads is not None
        self.mode, self.details, self.max_steps = spec.mode, spec.keeps_details, spec.max_steps
        self.first = FoldedUnit(units[0])
        self.others = [_Bottleneck(unit) if unit.bottleneck else _Unit(unit) for unit in units[1:]]
        self.heads = [_Head.of(head) for head in heads]

    @torch.no_grad()
    def __call__(
        self, u: State, context: CallArgs = NO_CONTEXT, bounds: Bounds = None
    ) -> tuple[State, Ponder | None]:
        """Run the block."""
        assert isinstance(u, Tensor)
        bounds_of(self.mode, bounds, len(self.heads))  # which may refuse
        loop = HaltingLoop.start(
            self.mode, self.max_steps, bounds=bounds, may_stop=True, keeps_logits=self.details
        )
        state = F.pad(self.first(u).permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
        batch, height, width, channels = state.shape
        height, width = height - 2, width - 2
        live = state.new_zeros(state.shape[:3], dtype=torch.bool)
        live[:, 1:-1, 1:-1] = True
        near = active = live.flatten().nonzero().squeeze(1)
        rows = state.view(-1, channels)
        taps = rows.new_zeros(len(rows), 9, dtype=torch.float32)
        maps = [rows.new_zeros(len(rows), size) for size in self.others[0].sizes]
        for head, unit in zip(self.heads, self.others, strict=True):
            # in single precision: a large map adds up to more than half precision holds
            mean = state.sum((1, 2), dtype=torch.float32) / (height * width)
            pooled = F.linear(mean, head.pool, head.bias).flatten()
            logits = _gathered(rows, taps, width, near, active, head.taps)
            every = logits.new_full(live.shape, torch.inf)
            every.view(-1)[active] = logits + pooled[active // live[:1].numel()] if batch else logits
            loop, _ = decide(loop, every[:, None, 1:-1, 1:-1])
            assert loop.gate is not None  # there are units to come
            if loop.done or not len(active):
                loop.draw_the_rest()
                break
            live[:, 1:-1, 1:-1] = loop.gate[:, 0] > 0
            goes_on = live.view(-1)[active]
            if not goes_on.all():
                active = active[goes_on]
                seen = F.max_pool2d(live[:, None].float(), 3, stride=1, padding=1)
                near = near[seen.view(-1)[near] > 0]
            unit.add(state, maps, near, active)
        output = state[:, 1:-1, 1:-1].permute(0, 3, 1, 2)
        return output.contiguous(memory_format=torch.channels_last), loop.ponder()


class _Head(NamedTuple):
    """The weights of a head in single precision."""

    taps: Tensor
    """(inputs, taps)."""
    pool: Tensor
    bias: Tensor

    @classmethod
    def of(cls, head: ConvHead) -> "_Head":
        kernel = head.kernel
        assert kernel is not None  # as the engine has seen
        taps, pool, bias = (x.detach().float().clone() for x in (kernel[0], head.mean_weight, head.bias))
        return cls(taps.flatten(1), pool, bias)


class _Unit:
    """A unit of two 3×3 convolutions; the first is computed at all pixels near active ones."""

    def __init__(self, unit: ConvUnit) -> None:
        self.scale, self.shift = unit.scale.flatten(), unit.shift.flatten()
        (weight1, bias1), (weight2, _) = unit.convolutions
        assert bias1 is not None  # all but the last have one
        self.bias1, self.matrix1, self.matrix2 = bias1, as_matrix(weight1), as_matrix(weight2)
        self.sizes = [len(self.scale), len(self.bias1)]  # channels of maps to work with

    def add(self, state: Tensor, maps: Sequence[Tensor], near: Tensor, active: Tensor) -> None:
        """Add its output to the active pixels of a bordered map."""
        before, middle = maps
        rows, width = state.view(before.shape), state.size(2) - 2
        target = before.view(state.shape)[:, 1:-1, 1:-1]
        target.copy_(torch.addcmul(self.shift, state[:, 1:-1, 1:-1], self.scale).relu_())
        middle[near] = _convolve(before, width, near, self.matrix1).add_(self.bias1).relu_()
        rows.index_add_(0, active, _convolve(middle, width, active, self.matrix2))


class _Bottleneck:
    """A bottleneck unit, whose second convolution alone looks at neighbours."""

    def __init__(self, unit: ConvUnit) -> None:
        self.scale, self.shift = unit.scale.flatten(), unit.shift.flatten()
        bias1, bias2 = (bias for _, bias in unit.convolutions[:2])
        assert bias1 is not None  # all but the last have one
        assert bias2 is not None
        self.bias1, self.bias2 = bias1, bias2
        self.matrices = [as_matrix(weight) for weight, _ in unit.convolutions]
        self.sizes = [len(self.bias1)]

    def add(self, state: Tensor, maps: Sequence[Tensor], near: Tensor, active: Tensor) -> None:
        """Add its output to the active pixels of a bordered map."""
        (middle,) = maps
        rows, width = state.view(len(middle), -1), state.size(2) - 2
        for some in near.split(CHUNK):
            x = torch.addcmul(self.shift, rows[some], self.scale).relu_()
            middle[some] = torch.addmm(self.bias1, x, self.matrices[0]).relu_()
        for some in active.split(CHUNK):
            x = _convolve(middle, width, some, self.matrices[1]).add_(self.bias2).relu_()
            rows.index_add_(0, some, x @ self.matrices[2])


def _gathered(rows: Tensor, taps: Tensor, width: int, near: Tensor, active: Tensor, matrix: Tensor) -> Tensor:
    """Convolve to one channel at active pixels, in single precision.

    Pixels that are ``near`` are multiplied with all nine taps first, so that channels are read but once.
    """
    for some in near.split(CHUNK):
        taps[some] = rows[some].float() @ matrix
    offsets = [9 * ((width + 2) * (k // 3 - 1) + k % 3 - 1) + k for k in range(9)]
    places = 9 * active[:, None] + torch.tensor(offsets, device=rows.device)
    return taps.view(-1)[places].sum(1)


def _convolve(rows: Tensor, width: int, places: Tensor, matrix: Tensor) -> Tensor:
    """Convolve at the given rows of bordered maps, each ``width`` pixels wide."""
    row, channels = width + 2, rows.size(1)
    threes = rows.as_strided((len(rows) - 2, 3 * channels), (channels, 1))
    offsets = torch.tensor([-row - 1, -1, row - 1], device=rows.device)
    result = rows.new_empty(len(places), matrix.size(1))
    for some, out in zip(places.split(CHUNK), result.split(CHUNK), strict=True):
        taps = threes.index_select(0, (some[:, None] + offsets).view(-1))
        torch.mm(taps.view(len(some), -1), matrix, out=out)
    return result


SPARSE = Sparse()
