"""The sparse engine in plain PyTorch: active pixels are gathered and multiplied, one chunk after the other.

Maps lie channels last within a border of zeros, seen as rows of pixels. The three pixels to the left, at
and to the right of one are then neighbours in memory, so that the nine inputs of a convolution are three
reads. Lists of pixels are filtered from those of the unit before, as pixels only ever halt.

On 2 CPU cores a convolution of 32 or 64 channels at half or a quarter of the pixels reaches, at batch 64,
0.5 to 0.7 of the speed that its share of pixels promises against the dense one. Gathering nine single pixels
reaches 0.3 to 0.5, nine accumulating products 0.45 to 0.6, dense convolutions of 4×4 tiles 0.2 to 0.4.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact.core.ponder import Ponder, ponder_of_logits
from torchpact.engines.block_spec import (
    FoldedBlock,
    FoldedBottleneck,
    FoldedUnit,
    Runner,
    Unsupported,
    as_matrix,
)

CHUNK = 4096  # pixels; 1024 is 4 to 8 % slower with 32 and 64 channels


def build(block: FoldedBlock) -> Runner:
    """Return a runner for a block with a decision for every pixel."""
    head = block.head
    if head is None or head.conv is None or head.norm is not None or head.group > 1:
        raise Unsupported("sparse: expected a decision for every pixel, by heads without batch norm")
    if not block.mode.hard:
        raise Unsupported(f"sparse: expected a hard mode, got {block.mode}")
    return SparseBlock(block)


class SparseBlock:
    """A block that computes convolutions at active pixels only."""

    waits = True  # for the length of lists

    def __init__(self, block: FoldedBlock) -> None:
        self.block = block.adaptive()
        self.first = block.units[0]
        self.others = [
            _Bottleneck(unit) if isinstance(unit, FoldedBottleneck) else _Unit(unit)
            for unit in block.units[1:]
        ]
        self.heads = [(_taps(head.conv.weight.detach()), head.linear) for head in block.heads if head.conv]

    @torch.no_grad()
    def __call__(self, u: Tensor) -> tuple[Tensor, Ponder | None]:
        """Run the block."""
        mode, block = self.block.mode, self.block
        if not len(u):
            output, ponder = block(u)
            return output, ponder
        state = F.pad(self.first(u).permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
        batch, height, width, channels = state.shape
        height, width = height - 2, width - 2
        live = state.new_zeros(state.shape[:3], dtype=torch.bool)
        live[:, 1:-1, 1:-1] = True
        near = active = live.flatten().nonzero().squeeze(1)
        rows = state.view(-1, channels)
        taps = rows.new_zeros(len(rows), 9, dtype=torch.float32)
        maps = [rows.new_zeros(len(rows), size) for size in (self.others[0].sizes if self.others else ())]
        asked: list[Tensor] = []
        steps = torch.ones(batch, 1, height, width, dtype=torch.long, device=u.device)
        for (matrix, linear), unit in zip(self.heads, self.others, strict=True):
            # in single precision: a large map adds up to more than half precision holds
            mean = state.sum((1, 2), dtype=torch.float32) / (height * width)
            pooled = F.linear(mean, linear.weight.float(), linear.bias.float()).flatten()
            image = active // live[0].numel()
            logits = _gathered(rows, taps, width, near, active, matrix) + pooled[image]
            every = logits.new_full(live.shape, torch.inf)
            every.view(-1)[active] = logits
            asked.append(every[:, None, 1:-1, 1:-1])
            _, remaining = mode.halt(torch.ones_like(logits), logits)
            goes_on = mode.gate(remaining) > 0
            if not goes_on.all():
                live.view(-1)[active] = goes_on
                active = active[goes_on]
                if not len(active):
                    break
                seen = F.max_pool2d(live[:, None].float(), 3, stride=1, padding=1)
                near = near[seen.view(-1)[near] > 0]
            steps += live[:, None, 1:-1, 1:-1]
            unit.add(state, maps, near, active)
        ponder = ponder_of_logits(asked, block.max_steps, steps, mode)
        return state[:, 1:-1, 1:-1].permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last), ponder


class _Unit:
    """Of two 3×3 convolutions, the first of which is wanted at all pixels near active ones."""

    def __init__(self, unit: FoldedUnit) -> None:
        self.scale, self.shift, self.bias1 = unit.scale.flatten(), unit.shift.flatten(), unit.bias1
        self.matrix1, self.matrix2 = as_matrix(unit.weight1), as_matrix(unit.weight2)
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
    """Of which only the second convolution looks at neighbours."""

    def __init__(self, unit: FoldedBottleneck) -> None:
        self.scale, self.shift = unit.scale.flatten(), unit.shift.flatten()
        self.bias1, self.bias2 = unit.bias1, unit.bias2
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


def _taps(weight: Tensor) -> Tensor:
    """Return the weights of a head as a matrix of (inputs, taps), in single precision."""
    return weight[0].flatten(1).float().contiguous()


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
