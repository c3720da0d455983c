"""What a call of a recurrent layer on a GPU is about: its pieces, and what it returns; see gpu.py."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact.core import state as _state
from torchpact.core.ponder import Ponder
from torchpact.core.state import State

Whole = tuple[int, int]
"""The number of time steps of every sequence, and the number of sequences."""


class Result:
    """What a call returns, filled by the kernels; before a call of few iterations every launch counts.

    Of ``whole`` sequences it has the shapes that a layer returns, time first; of others it has packed rows.
    """

    def __init__(
        self, data: Tensor, state: State | None, final: State, max_steps: int, whole: Whole | None = None
    ) -> None:
        self.state = state
        """What the sequences begin with, None for zeros; before the next piece what they have come to."""
        self.final, self.rows = final, data.size(0)
        rows, size = self.rows, _state.parts(final)[0].size(1)
        shape, strides = (whole[::-1], (1, whole[1])) if whole else ((rows,), (1,))
        device, single = data.device, torch.float32
        self.output = data.new_empty((*(whole or (rows,)), size))
        self.probs = torch.empty_strided((max_steps, *shape), (rows, *strides), dtype=single, device=device)
        self.cost = torch.empty_strided(shape, strides, dtype=single, device=device)
        self.expected = torch.empty_strided(shape, strides, dtype=single, device=device)
        self.steps = torch.empty_strided(shape, strides, dtype=torch.long, device=device)

    def of(self, rows: slice) -> list[Tensor]:
        """Output, probs, steps, cost and expected steps of some packed rows, or of all as they are."""
        singles = [self.steps, self.cost, self.expected]
        count, begin, size = rows.stop - rows.start, rows.start, self.output.size(-1)
        if count == self.rows:
            return [self.output, self.probs, *singles]
        return [
            self.output.as_strided((count, size), (size, 1), begin * size),
            self.probs.as_strided((self.probs.size(0), count), (self.rows, 1), begin),
            *(each.as_strided((count,), (1,), begin) for each in singles),
        ]

    @property
    def returned(self) -> tuple[Tensor, State, Ponder]:
        """All of it."""
        ponder = Ponder(self.probs, self.steps, self.expected, self.cost, None)
        return self.output, self.final, ponder


class UnderWay(NamedTuple):
    """Rows that a lane has begun to read, as its buffers have them."""

    h: Tensor
    c: Tensor
    notes: Tensor
    odds: Tensor
    left: Tensor
    """How many there are; the device knows."""
    most: int
    """How many there are at most; the host knows."""


class Piece(NamedTuple):
    """Time steps to be read at once."""

    rows: slice
    """What their rows are of all packed ones."""
    places: Tensor
    """Where among these each time step begins, and their end twice: after the last, no row is left."""
    batch: int
    """How many sequences are so long."""


class Places:
    """Those of the last piece, on the device.

    Kept for the stream they were made on: once dropped, only that stream's order keeps their memory from
    reuse.
    """

    def __init__(self) -> None:
        self.kept: tuple[Tensor, int, Tensor] | None = None

    def of(self, piece: Piece, inputs: Tensor) -> Tensor:
        """Return those of a piece where its ``inputs`` are; to be held until what reads them is launched."""
        stream = torch._C._cuda_getCurrentRawStream(inputs.device.index) if inputs.is_cuda else 0
        kept = self.kept
        if kept is None or kept[0] is not piece.places or kept[1] != stream:
            places = piece.places.to(inputs.device, torch.int32)
            self.kept = kept = piece.places, stream, places
        return kept[2]


def pieces_of(sizes: Tensor, most: int) -> list[Piece]:
    """Cut time steps of so many sequences each into pieces of at most so many rows, but at least one step.

    >>> [(piece.rows, piece.batch) for piece in pieces_of(torch.tensor([3, 2, 2, 1]), most=5)]
    [(slice(0, 5, None), 3), (slice(5, 8, None), 2)]
    """
    offsets = F.pad(sizes.cumsum(0), (1, 1))
    offsets[-1] = offsets[-2]
    time, begin, pieces = len(sizes), 0, []
    while begin < time:
        first = int(offsets[begin])
        end = max(int((offsets[: time + 1] <= first + most).sum()) - 1, begin + 1)
        last = int(offsets[end])
        places = offsets[begin : end + 2].clamp(max=last) - first
        pieces.append(Piece(slice(first, last), places, int(sizes[begin])))
        begin = end
    return pieces
