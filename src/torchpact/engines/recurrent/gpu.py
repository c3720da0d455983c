"""The engine "recurrent_gpu": layers on a GPU, whose sequences do not keep step.

As on a CPU (native.py), a sequence that halts goes on to its next input at once. The inputs' part of all
gates is one matrix product. Layers of up to 512 units are then read by one launch, on GPUs with clusters, if
the batch is not too large (cluster.py). For others every iteration moves all rows that are not finished: a
product by cuBLAS, in the precision that torch is set to for it, and one Triton kernel that does the rest, in
CUDA graphs (gpu_lane.py). Where there are clusters, they finish what graphs began, once few enough rows are
left, unless torch is set to deterministic algorithms.

For torch's own cells with a halting unit, thresholded, in single and half precision.
"""

import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchpact.checks import one_line
from torchpact.core import state as _state
from torchpact.core.modes import Mode
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.engines.base import Unsupported
from torchpact.engines.build_cache import protect_compiler_caches
from torchpact.engines.cpp_build import switched_off
from torchpact.engines.recurrent.cluster import Clusters, clusters_for
from torchpact.engines.recurrent.gpu_call import Piece, Result, Whole, pieces_of
from torchpact.engines.recurrent.gpu_lane import Lane, rung
from torchpact.engines.recurrent.layer import Layer, layer_of
from torchpact.engines.recurrent.runner import (
    LayerCall,
    RecurrentEngine,
    RecurrentRunner,
    kernel_refusal,
    rnn_of,
)
from torchpact.nn.packed_sequence import time_first
from torchpact.specs import BlockSpec
from torchpact.specs.blocks import Bounds

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
MOST_UNITS = 4096
"""A program holds all gates of a row in registers."""
MOST_INPUTS = 1 << 30
"""How many numbers the inputs' part of the gates may have, if they fit into an eighth of the memory; longer
sequences are read in pieces."""
MOST_LANES = 4
"""Sizes of batches for which buffers and graphs are kept."""


class GPURecurrent(RecurrentEngine):
    """Clusters and CUDA graphs, for NVIDIA's GPUs."""

    name: ClassVar[str] = "recurrent_gpu"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float32: 1e-4,
        torch.float16: 2e-2,
        torch.bfloat16: 2e-2,
    }
    host_sync: ClassVar[bool] = True

    def check(self, spec: BlockSpec, call: LayerCall) -> None:
        """Raise :class:`Unsupported` if it cannot run such a layer on such a call."""
        layer = fitting_layer(spec)
        if layer.device.type != "cuda":
            raise Unsupported(f"expected a layer on a CUDA device, got one on {layer.device}")
        reason = kernel_refusal(layer, call)
        if reason is not None:
            raise Unsupported(reason)
        if switched_off():
            raise Unsupported("no compiled kernels, as TORCHPACT_NATIVE=0 asks")
        if importlib.util.find_spec("triton") is None:
            raise Unsupported("expected Triton, as it comes with PyTorch for CUDA, found none")

    def make(self, spec: BlockSpec, call: LayerCall) -> "GPURunner":
        """Return a runner of a layer that was checked, with buffers and graphs for batches of this size."""
        protect_compiler_caches()
        runner = GPURunner(spec)
        runner.prepare(call)
        return runner


class GPURunner(RecurrentRunner):
    """A layer that kernels read; threads may call it at the same time, on streams of their own."""

    host_sync = True  # to know how many rows are left

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__(rnn_of(spec))
        self.reader = Reader(fitting_layer(spec))

    def refusal(self, call: LayerCall) -> str | None:
        """Return None if it can run a call, or one line that says why not."""
        return kernel_refusal(self.reader.layer, call)

    def run(self, call: LayerCall) -> Any:
        """Run a call that was not refused."""
        bound, module = call.bound, self.module
        assert bound is not None
        if isinstance(call.input, Tensor) and call.lengths is None:
            return self._whole(call.input, call.state, bound)

        def read(
            packed: PackedSequence, u: State, mode: Mode, bounds: Bounds
        ) -> tuple[Tensor, State, Ponder]:
            return self.reader(packed, u, bound)

        return module.run(
            call.input, call.state, lengths=call.lengths, mode=call.mode, bounds=call.bounds, read=read
        )

    def _whole(self, input: Tensor, state: State | None, bound: float) -> Any:
        """Read sequences that are all of one length, with as little work for the host as can be."""
        module = self.module
        by_time = time_first(input, module.input_size, module.batch_first)
        time, batch = by_time.shape[:2]
        module.check_state(state, batch)
        data = by_time.reshape(time * batch, by_time.size(2))
        output, final, ponder = self.reader.whole(data, time, batch, state, bound)
        return output.transpose(0, 1) if module.batch_first else output, final, module.named(ponder)

    def prepare(self, call: LayerCall) -> None:
        """Make buffers and graphs for a call."""
        if isinstance(call.input, PackedSequence):
            batch = int(call.input.batch_sizes[0])
        else:
            batch = time_first(call.input, self.module.input_size, self.module.batch_first).size(1)
        if batch:
            self.reader.for_batch(batch)


def fitting_layer(spec: BlockSpec) -> Layer:
    """Return what the kernels need to know of a layer.

    Raises:
        Unsupported: It is one that kernels are not there for.

    """
    layer = layer_of(spec, PRECISIONS)
    if layer.size > MOST_UNITS:
        raise Unsupported(f"expected at most {MOST_UNITS} units, got {layer.size}")
    return layer


def _most_inputs(data: Tensor) -> int:
    if not data.is_cuda:
        return MOST_INPUTS
    return min(MOST_INPUTS, _memory(data.device) // 8 // data.element_size())


@cache
def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


class _Plan(NamedTuple):
    sizes: Tensor
    most: int
    pieces: list[Piece]


@lru_cache(maxsize=64)
def whole_pieces(time: int, batch: int, most: int) -> list[Piece]:
    """Return the pieces in which to read so many time steps of so many sequences each.

    >>> [piece.rows for piece in whole_pieces(time=3, batch=2, most=5)]
    [slice(0, 4, None), slice(4, 6, None)]
    """
    return pieces_of(torch.full((time,), batch, device="cpu"), most)


class Reader:
    """Reads packed sequences by clusters or graphs; keeps buffers and graphs for batches of a few sizes."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.problem: str | None = None
        """Why there are no kernels after all, once it was tried."""
        self.without_clusters: str | None = None
        """Why graphs have to do alone, on a device that should have clusters."""
        self.clusters: Clusters | None = None
        self.asked_for_clusters = False
        self.lanes: OrderedDict[Any, Lane] = OrderedDict()
        # without the flag rows often are of odd length, which makes products slow: a copy
        self._from_input = layer.weight_ih[:, :-1].contiguous().t()
        self._plan: _Plan | None = None
        self._lock = threading.Lock()

    def __call__(self, packed: PackedSequence, state: State, bound: float) -> tuple[Tensor, State, Ponder]:
        """Read packed sequences from a state on; a logit above ``bound`` halts."""
        sizes, most = packed.batch_sizes, self._most_rows(packed.data)
        return self._read(packed.data, state, bound, int(sizes[0]), self._pieces(sizes, most))

    def whole(
        self, data: Tensor, time: int, batch: int, state: State | None, bound: float
    ) -> tuple[Tensor, State, Ponder]:
        """Read sequences that are all of one length, from zeros if there is no state.

        The results have the shapes that a layer returns, time first: the host would take as long to give them
        to packed rows as the device takes for a short call.
        """
        pieces = whole_pieces(time, batch, self._most_rows(data))
        return self._read(data, state, bound, batch, pieces, (time, batch))

    def for_batch(self, batch: int) -> Clusters | Lane:
        """Return what reads a batch of this size; makes buffers and graphs for it where there are none.

        Raises:
            Unsupported: They cannot be made, or there is no memory for them now.

        """
        if self.problem is None:
            try:
                return self._made_for(batch)
            except torch.OutOfMemoryError as error:
                raise Unsupported(f"no memory for its buffers ({one_line(error)})") from error
            except Exception as error:  # Triton, and the C compiler that it calls, raise what they like
                self.problem = f"no kernels ({one_line(error)})"
        raise Unsupported(self.problem)

    def lane(self, batch: int) -> Lane:
        """Return buffers and graphs for a batch of this size or a little more; the last few are kept."""
        fixed = torch.are_deterministic_algorithms_enabled()
        # products are captured as they are made now
        precision = torch.backends.cuda.matmul.fp32_precision, getattr(torch.backends, "fp32_precision", None)
        key = rung(batch), fixed, precision
        with self._lock:
            lane = self.lanes.pop(key, None)
            if lane is None:
                while len(self.lanes) >= MOST_LANES:
                    self.lanes.popitem(last=False)
                lane = Lane(self.layer, rung(batch), fixed, self.clusters)
            self.lanes[key] = lane
        return lane

    def _made_for(self, batch: int) -> Clusters | Lane:
        if not self.asked_for_clusters:
            self._ask_for_clusters()
        clusters = self.clusters
        return clusters if clusters is not None and batch <= clusters.most_rows else self.lane(batch)

    def _ask_for_clusters(self) -> None:
        with self._lock:
            if not self.asked_for_clusters:
                try:
                    self.clusters = clusters_for(self.layer)
                except Unsupported as reason:
                    self.without_clusters = str(reason)
                self.asked_for_clusters = True

    def _read(
        self,
        data: Tensor,
        state: State | None,
        bound: float,
        batch: int,
        pieces: list[Piece],
        whole: Whole | None = None,
    ) -> tuple[Tensor, State, Ponder]:
        if not batch:
            return self._result(data, state, batch, whole).returned
        reader, result = self.for_batch(batch), None
        bias = None if reader.adds_bias else self.layer.bias_ih
        for piece in pieces:
            rows = data if len(pieces) == 1 else data[piece.rows]
            weight = self._from_input
            inputs = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
            if result is None:  # prepared while the device is at the product
                result = self._result(data, state, batch, whole)
            reader.read(inputs, piece, result, bound)
            result.state = result.final
        assert result is not None
        return result.returned

    def _result(self, data: Tensor, state: State | None, batch: int, whole: Whole | None) -> Result:
        max_steps = self.layer.max_steps
        if state is not None:
            state = _state.map_state(Tensor.contiguous, state)
            return Result(data, state, _state.map_state(torch.empty_like, state), max_steps, whole)
        h = data.new_empty((batch, self.layer.size))
        final = (h, torch.empty_like(h)) if self.layer.is_lstm else h
        return Result(data, None, final, max_steps, whole)

    def _most_rows(self, data: Tensor) -> int:
        return max(_most_inputs(data) // (self.layer.gates * self.layer.size), 1)

    def _pieces(self, sizes: Tensor, most: int) -> list[Piece]:
        """Return those of the last call, if this one is alike."""
        plan = self._plan
        if plan is None or plan.most != most or not torch.equal(plan.sizes, sizes):
            self._plan = plan = _Plan(sizes.clone(), most, pieces_of(sizes, most))
        return plan.pieces
