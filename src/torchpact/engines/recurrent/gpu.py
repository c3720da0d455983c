"""Recurrent layers on a GPU: who halts goes on to the next input, whoever else still ponders.

As on a CPU (:mod:`~torchpact.engines.recurrent.native`), sequences do not keep step. The inputs' part of all
gates is one matrix product. Layers of up to 512 units are then read by one launch, on GPUs with clusters, if
the batch is not too large (``recurrent_cluster``). For others every iteration moves all rows that are under
way: a product by cuBLAS, in the precision that torch is set to for it, and one Triton kernel that does the
rest, in CUDA graphs (``recurrent_gpu_lane``). Where there are clusters, they finish what graphs began, once
few enough rows are left, unless torch is set to deterministic algorithms.

For torch's own cells with a halting unit, thresholded, in single and half precision. The weights are read
where they are, so that changes need no notice; graphs are made anew when a weight is another tensor. For all
else, where Triton cannot compile, and with ``TORCHPACT_NATIVE=0``, there is the loop of the layer.
"""

import importlib.util
import threading
from collections import OrderedDict
from functools import cache, lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchpact.core import state as _state
from torchpact.core.block import AdaptiveBlock
from torchpact.core.modes import Mode, Thresholded
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.engines.block_spec import Unsupported
from torchpact.engines.conv.native.engine import switched_off
from torchpact.engines.recurrent.cluster import Clusters, clusters_for
from torchpact.engines.recurrent.gpu_call import Cell, Piece, Result, Whole, pieces_of
from torchpact.engines.recurrent.gpu_lane import Lane, rung
from torchpact.engines.recurrent.native import KINDS, _never_halts
from torchpact.nn.cells import HaltingUnit

Weights = list[nn.Parameter]
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
MOST_UNITS = 4096
"""A program holds all gates of a row in registers."""
MOST_INPUTS = 1 << 30
"""How many numbers the inputs' part of the gates may have, if they fit into an eighth of the memory; what is
longer is read in pieces."""
MOST_IN_PLACE = 1 << 28
"""Multiplications of a product of inputs up to which the weights of a cell are read where they are, in single
precision. The flag is the last input, so that their rows often are of odd length, which makes products slow;
but a copy is one more launch for the host, which a short call waits for."""
MOST_LANES = 4
"""Sizes of batches for which buffers and graphs are kept."""


def kernel_for(block: AdaptiveBlock, mode: Mode, data: Tensor, batch: int) -> "RecurrentGPU | None":
    """Return what reads sequences as a recurrent layer's block would; None if nothing does."""
    weights = fitting_weights(block, mode, data) if data.is_cuda else None
    if weights is None or switched_off() or not _there():
        return None
    with _GUARD:
        made = _MADE.get(block)
        if made is None or not made.is_of(block, weights):
            _MADE[block] = made = RecurrentGPU(block, weights)
    return made if made.is_ready(batch) else None


def forget(block: AdaptiveBlock) -> None:
    """Give back the buffers and graphs of a layer's block."""
    _MADE.pop(block, None)


def fitting_weights(block: AdaptiveBlock, mode: Mode, data: Tensor) -> Weights | None:
    """Return all weights if the kernels do what the modules would, with nobody watching them do it."""
    made_of = _made_of(block)
    cell, head = made_of[:2]
    if not isinstance(cell, Cell) or type(cell) not in KINDS or type(mode) is not Thresholded:
        return None
    if type(cell) is nn.RNNCell and cell.nonlinearity != "tanh":
        return None
    if type(head) is HaltingUnit:
        made_of.append(_child(head, "linear"))
        if type(made_of[-1]) is not nn.Linear:
            return None
    elif not _never_halts(head):
        return None
    if cell.hidden_size > MOST_UNITS or data.dtype not in PRECISIONS:
        return None
    if torch.is_autocast_enabled(data.device.type) or torch._C._len_torch_dispatch_stack():
        return None
    weights, dtype, device = [], data.dtype, data.device
    for module in made_of:  # every call does all this before the device has anything to do
        if module._forward_hooks or module._forward_pre_hooks:
            return None
        for p in module._parameters.values():
            if p is not None:
                if p.dtype != dtype or p.device != device or not p.is_contiguous():
                    return None
                weights.append(p)
    return weights


@cache
def _there() -> bool:
    return importlib.util.find_spec("triton") is not None


def _made_of(block: AdaptiveBlock) -> list[nn.Module]:
    """The cell, the head, and all that they are in: quickly, as attributes of modules are not found."""
    steps, halting = _child(block, "steps"), _child(block, "halting")
    transition = _child(steps, "0")
    return [_child(transition, "cell"), _child(halting, "0"), transition, steps, halting, block]


def _child(module: nn.Module, name: str) -> nn.Module:
    child = module._modules[name]
    assert child is not None
    return child


def _parts_of(block: AdaptiveBlock) -> list[nn.Module]:
    return _made_of(block)[:2]


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


class RecurrentGPU:
    """The cell and the halting unit of a block, and buffers for batches of some sizes."""

    def __init__(self, block: AdaptiveBlock, weights: Weights) -> None:
        self.problem: str | None = None
        """Why there are no kernels after all, once it was tried."""
        self.without_clusters: str | None = None
        """Why graphs have to do alone, on a device that should have clusters."""
        self.cell, self.head, self.max_steps = *map(ref, _parts_of(block)), block.max_steps
        self._weights = [(ref(p), p.data_ptr()) for p in weights]
        cell = self.cell()
        assert isinstance(cell, Cell)
        self._from_input = cell.weight_ih.detach()[:, :-1]
        self._in_place = self._from_input.t()
        self._plan: _Plan | None = None
        self._clusters: Clusters | None = None
        self._asked_for_clusters = False
        self._lanes: OrderedDict[Any, Lane] = OrderedDict()
        self._lock = threading.Lock()

    def is_of(self, block: AdaptiveBlock, weights: Weights) -> bool:
        """Whether graphs that were captured hold for what the block is made of now."""
        cell, head = _parts_of(block)
        if cell is not self.cell() or head is not self.head() or block.max_steps != self.max_steps:
            return False
        if len(weights) != len(self._weights):
            return False
        for p, (seen, address) in zip(weights, self._weights, strict=True):
            if p is not seen() or p.data_ptr() != address:
                return False
        return True

    def is_ready(self, batch: int) -> bool:
        """Whether such a batch can be read; makes buffers and graphs for it where there are none."""
        if self.problem is None and batch:
            try:
                self._reader(batch)
            except torch.OutOfMemoryError:
                return False
            except Exception as error:  # Triton, and the C compiler that it calls, raise what they like
                self.problem = str(error)
        return self.problem is None

    def __call__(self, packed: PackedSequence, state: State, mode: Mode) -> tuple[Tensor, State, Ponder]:
        """Read packed sequences from a state on, in thresholded mode."""
        sizes, most = packed.batch_sizes, self._most_rows(packed.data)
        return self._read(packed.data, state, mode, int(sizes[0]), self._pieces(sizes, most))

    def whole(
        self, data: Tensor, time: int, batch: int, state: State | None, mode: Mode
    ) -> tuple[Tensor, State, Ponder]:
        """Read sequences that are all as long, from zeros if there is no state.

        What comes back has the shapes that a layer returns, time first: it takes the host as long as a short
        call takes the device to give them to packed rows.
        """
        pieces = whole_pieces(time, batch, self._most_rows(data))
        return self._read(data, state, mode, batch, pieces, (time, batch))

    def _read(
        self,
        data: Tensor,
        state: State | None,
        mode: Mode,
        batch: int,
        pieces: list[Piece],
        whole: Whole | None = None,
    ) -> tuple[Tensor, State, Ponder]:
        cell = self.cell()
        assert isinstance(mode, Thresholded)
        assert isinstance(cell, Cell)
        if not batch:
            return self._result(cell, data, state, batch, whole).returned
        reader, result = self._reader(batch), None
        bias = None if reader.adds_bias else cell.bias_ih
        for piece in pieces:
            inputs = self._gates(data if len(pieces) == 1 else data[piece.rows], bias)
            if result is None:  # what can be is done while the device is at the product
                result = self._result(cell, data, state, batch, whole)
            reader.read(inputs, piece, result, mode.bound)
            result.state = result.final
        assert result is not None
        return result.returned

    def _gates(self, data: Tensor, bias: Tensor | None) -> Tensor:
        """The inputs' part of all gates."""
        weight = self._in_place
        if data.element_size() < 4 or data.size(0) * weight.numel() > MOST_IN_PLACE:
            weight = self._from_input.contiguous().t()
        return torch.mm(data, weight) if bias is None else torch.addmm(bias, data, weight)

    def _result(
        self, cell: Cell, data: Tensor, state: State | None, batch: int, whole: Whole | None
    ) -> Result:
        if state is not None:
            state = _state.map_state(Tensor.contiguous, state)
            return Result(data, state, _state.map_state(torch.empty_like, state), self.max_steps, whole)
        h = data.new_empty((batch, cell.hidden_size))
        final = (h, torch.empty_like(h)) if isinstance(cell, nn.LSTMCell) else h
        return Result(data, None, final, self.max_steps, whole)

    def _most_rows(self, data: Tensor) -> int:
        return max(_most_inputs(data) // self._from_input.size(0), 1)

    def _pieces(self, sizes: Tensor, most: int) -> list[Piece]:
        """Those of the last call, if this one is alike."""
        plan = self._plan
        if plan is None or plan.most != most or not torch.equal(plan.sizes, sizes):
            self._plan = plan = _Plan(sizes.clone(), most, pieces_of(sizes, most))
        return plan.pieces

    def _reader(self, batch: int) -> Clusters | Lane:
        """What reads a batch of this size."""
        if not self._asked_for_clusters:
            self._ask_for_clusters()
        clusters = self._clusters
        return clusters if clusters is not None and batch <= clusters.most_rows else self._lane(batch)

    def _ask_for_clusters(self) -> None:
        with self._lock:
            if not self._asked_for_clusters:
                cell = self.cell()
                assert isinstance(cell, Cell)
                try:
                    self._clusters = clusters_for(cell, self.head(), self.max_steps)
                except Unsupported as reason:
                    self.without_clusters = str(reason)
                self._asked_for_clusters = True

    def _lane(self, batch: int) -> Lane:
        """Buffers and graphs for a batch of this size or a little more, of the last few that were used."""
        fixed = torch.are_deterministic_algorithms_enabled()
        # products are captured as they are made now
        precision = torch.backends.cuda.matmul.fp32_precision, getattr(torch.backends, "fp32_precision", None)
        key = rung(batch), fixed, precision
        with self._lock:
            lane = self._lanes.pop(key, None)
            if lane is None:
                while len(self._lanes) >= MOST_LANES:
                    self._lanes.popitem(last=False)
                cell, head = self.cell(), self.head()
                assert isinstance(cell, Cell)
                lane = Lane(cell, head, self.max_steps, rung(batch), fixed, self._clusters)
            self._lanes[key] = lane
        return lane


_MADE: WeakKeyDictionary[nn.Module, RecurrentGPU] = WeakKeyDictionary()
_GUARD = threading.Lock()
