"""Rows of a recurrent layer on a GPU, moved by CUDA graphs of a few iterations each; see gpu.py.

The kernel brings the rows that go on to the front. The host looks, one graph late, at how many are left,
takes a graph for fewer when it can, leaves the rest to clusters where they are faster, and stops at 0. When
that is depends on the moment, and products of other sizes may round otherwise: with
``torch.use_deterministic_algorithms`` there is one size only, and no cluster.
"""

import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchpact.core import state as _state
from torchpact.engines.recurrent.gpu_call import Piece, Places, Result, UnderWay
from torchpact.engines.recurrent.layer import Layer

if TYPE_CHECKING:
    from torchpact.engines.recurrent.cluster import Clusters

ITERATIONS = 4
"""In a graph. Where they are fast, four take little longer than the host needs to start the next graph; in
the end up to two graphs are run in vain. Rows are gathered but twice, since the rows of a product are as many
throughout, and thousands of programs that count in one place wait for each other; before each of the two an
iteration that does not gather sets the count to 0, so four are the fewest there can be."""
LEAST_ROWS = 32
"""Of a product that is made smaller when sequences end, half as many in half precision. On an H200 a product
of cuBLAS in single precision takes longer for 16 rows than for 32: 32 µs and 28 with 1500 units."""


class Lane:
    """Buffers for so many rows, and graphs that run iterations on all of them or on fewer.

    There are two of all that is known of rows: an iteration that gathers reads one and writes the other.
    ``clusters`` read the rest once it is small enough for them.
    """

    adds_bias = False

    def __init__(
        self,
        layer: Layer,
        capacity: int,
        fixed: bool,
        clusters: "Clusters | None" = None,
    ) -> None:
        from torchpact.engines.recurrent import gpu_kernels  # which needs Triton

        self.kernels, self.max_steps = gpu_kernels, layer.max_steps
        weight, size = layer.weight_hh, layer.size
        self.weight = weight.t()
        with torch.inference_mode(False):  # within which alone they could be written to otherwise
            self._make_buffers(weight, layer.gates, capacity)
            self.flag = layer.weight_ih[:, -1].contiguous()
            self.c = torch.zeros_like(self.h) if layer.is_lstm else self.h
        missing = self.flag  # which is not read then
        given = (layer.bias_hh, layer.head, layer.head_bias)
        self.weights = [self.flag, *(missing if x is None else x for x in given)]
        block = max(1 << (size - 1).bit_length(), 16)
        self.warps = min(max(block // 128, 1), 16)  # four numbers a thread: those of one load
        self.shape = {"H": size, "BLOCK": block}
        self.cell: dict[str, Any] = {
            "KIND": layer.kind, "GATES": layer.gates, "BIASED": layer.bias_hh is not None,
            "ASKS": layer.head is not None, "HEAD_BIASED": layer.head_bias is not None,
        }  # fmt: skip
        self.lock = threading.Lock()
        self.places = Places()
        self.clusters = None if fixed else clusters
        least = LEAST_ROWS if weight.dtype == torch.float32 else LEAST_ROWS // 2
        if self.clusters is not None:
            least = max(least, self.clusters.most_rows)
        self.sizes = [capacity] if fixed else rungs(capacity, least)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.done: torch.cuda.Event | None = None
        if weight.is_cuda:
            with torch.cuda.device(weight.device), torch.inference_mode(False), torch.no_grad():
                self._capture()

    def _make_buffers(self, weight: Tensor, gates: int, capacity: int) -> None:
        size, device = weight.size(1), weight.device

        def zeros(*shape: int, dtype: torch.dtype = weight.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.gates = zeros(capacity, gates * size)
        self.h = zeros(2, capacity, size)
        self.notes = zeros(2, capacity, 4, dtype=torch.int32)
        self.odds = zeros(2, capacity, 2, dtype=torch.float32)
        self.counts = zeros(2, 4, dtype=torch.int32)  # two numbers, each at a multiple of 16 bytes
        self.table = zeros(10, dtype=torch.long)
        self.bound = zeros(1, dtype=torch.float32)
        # what the host looks at
        self.left = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=weight.is_cuda)

    def read(self, inputs: Tensor, piece: Piece, result: Result, bound: float) -> None:
        """Read some time steps; ``inputs`` are the inputs' part of all gates."""
        if not inputs.is_cuda:
            self._begin(inputs, piece, result, bound)
            while (left := int(self.counts[0, 0])) and not self._ends(left):
                self._iterate(self._size_for(left))
            self._finish(inputs, piece, result, bound, left)
            return
        with self.lock, torch.cuda.device(inputs.device):
            if self.done is not None:
                self.done.wait()  # of another stream, perhaps
            self._begin(inputs, piece, result, bound)
            left = self._run_to_the_end(self._size_for(piece.batch))
            self._finish(inputs, piece, result, bound, left)
            self.done = torch.cuda.current_stream().record_event()

    def _ends(self, left: int) -> bool:
        """Whether clusters read the rest."""
        return self.clusters is not None and left <= self.clusters.most_rows

    def _finish(self, inputs: Tensor, piece: Piece, result: Result, bound: float, left: int) -> None:
        if left:
            assert self.clusters is not None
            h, c, notes, odds = self._known(0)
            under_way = UnderWay(h, c, notes, odds, self.counts[0], left)
            self.clusters.finish(inputs, piece, result, bound, under_way)

    def __del__(self) -> None:
        # what runs in vain after the end still writes to the buffers, on whatever stream
        done = getattr(self, "done", None)
        if done is not None and not sys.is_finalizing():
            done.synchronize()

    def _begin(self, inputs: Tensor, piece: Piece, result: Result, bound: float) -> None:
        final, filled = _state.parts(result.final), result.of(piece.rows)
        first = tuple(map(torch.zeros_like, final)) if result.state is None else _state.parts(result.state)
        filled[1].fill_(1.0)
        places = self.places.of(piece, inputs)
        self.kernels.begin[(piece.batch,)](
            self.table, self.bound, bound, piece.batch, result.rows, first[0], first[-1],
            inputs, places, final[0], final[-1], *filled, *self._known(0), self.counts[0],
            **self.shape, LSTM=self.cell["KIND"] == 0, num_warps=self.warps,
        )  # fmt: skip

    def _iterate(self, rows: int) -> None:
        """Move so many rows by some iterations, and tell the host how many are left."""
        old = 0
        for iteration in range(ITERATIONS):
            gathers = (iteration + 1) % (ITERATIONS // 2) == 0  # twice, so as to end where it began
            new = 1 - old if gathers else old
            torch.mm(self.h[old, :rows], self.weight, out=self.gates[:rows])
            self.kernels.move[(rows,)](
                self.table, self.bound, self.gates, *self.weights,
                *self._known(old), self.counts[old], *self._known(new), self.counts[1 - old],
                self.max_steps, **self.shape, **self.cell, GATHERS=gathers, num_warps=self.warps,
            )  # fmt: skip
            old = new
        self.left.copy_(self.counts[0, :1], non_blocking=True)

    def _known(self, which: int) -> list[Tensor]:
        """One of the two buffers of all that is known of rows."""
        return [x[which] for x in (self.h, self.c, self.notes, self.odds)]

    def _run_to_the_end(self, rows: int) -> int:
        """Return how many rows are left at most, if clusters are to read them."""
        before: torch.cuda.Event | None = None
        while True:
            if rows in self.graphs:
                self.graphs[rows].replay()
            else:
                self._iterate(rows)
            now = torch.cuda.current_stream().record_event()
            if before is not None:
                before.synchronize()  # while the next iterations run; there are never more rows again
                left = int(self.left)
                if left == 0 or self._ends(left):
                    return left
                rows = self._size_for(left)
            before = now

    def _size_for(self, rows: int) -> int:
        return min(size for size in self.sizes if size >= rows)

    def _capture(self) -> None:
        """Make a graph for each size; where that cannot be done, kernels are started one by one."""
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for rows in self.sizes:  # what is done once, such as compiling, cannot be captured
                self._iterate(rows)
            stream.synchronize()
            try:
                for rows in self.sizes:
                    graph = torch.cuda.CUDAGraph()
                    graph.capture_begin(pool, capture_error_mode="thread_local")
                    try:
                        self._iterate(rows)
                    finally:
                        graph.capture_end()
                    self.graphs[rows] = graph
            except RuntimeError:
                self.graphs.clear()
        torch.cuda.current_stream().wait_stream(stream)


def rung(rows: int) -> int:
    """The next power of two, or three times one: sizes that buffers have.

    >>> rung(1), rung(64), rung(65), rung(100)
    (1, 64, 96, 128)
    """
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power >= 4 and rows <= power * 3 // 4 else power


def rungs(capacity: int, least: int) -> list[int]:
    """Sizes from a capacity down.

    >>> rungs(96, 16)
    [96, 64, 48, 32, 24, 16]
    """
    sizes = [capacity]
    while sizes[-1] > least:
        rows = sizes[-1]
        sizes.append(rows * 2 // 3 if rows & (rows - 1) else rows * 3 // 4)
    return sizes
