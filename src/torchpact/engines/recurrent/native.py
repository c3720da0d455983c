"""Recurrent layers on a CPU, compiled: who halts goes on to the next input, whoever else still ponders.

The kernel is ``recurrent.cpp``, compiled as :mod:`~torchpact.engines.conv.native.engine` is, on first use. It
is for torch's own cells with a halting unit, in single precision and thresholded; for all else, without
a compiler, and with ``TORCHPACT_NATIVE=0``, :class:`~torchpact.AdaptiveRNN` has a loop of its own.

A layer's weights are laid out for the kernel once, and anew when they have changed. That shows in a tensor's
identity, address or version, or else, after an edit through ``.data`` or NumPy, in its values, of which every
call looks at some hundreds: all of a small tensor, and a sample of a large one. Who edits but a few numbers
of a large weight through ``.data`` calls :func:`forget` on the layer's block.
"""

import ctypes
import math
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from torchpact.core import state as _state
from torchpact.core.block import AdaptiveBlock
from torchpact.core.modes import Mode, Thresholded
from torchpact.core.state import State
from torchpact.engines.block_spec import Unsupported
from torchpact.engines.conv.native.engine import MAX_THREADS, SINGLE, _built, switched_off
from torchpact.nn.cells import HaltingUnit, Transition, never_halt

SOURCE = Path(__file__).with_name("recurrent.cpp")
KINDS: dict[type[nn.Module], tuple[int, int]] = {nn.LSTMCell: (0, 4), nn.GRUCell: (1, 3), nn.RNNCell: (2, 1)}
"""What the kernel calls a cell, and how many gates it has."""
MOST_INPUTS = 16_000_000
"""How many numbers the inputs' part of the gates may have; what is longer is read in pieces."""
SAMPLED = 256
"""How many numbers of a large weight are looked at in every call: each may be a miss of all caches, and 512
units have 2 million, of which a call of one time step takes longer to compare all than to compute."""


class _Layer(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weights", "flag", "hidden_bias", "head")),
        ("head_bias", c_float),
        ("bound", c_float),
        *((name, c_int32) for name in ("kind", "units", "max_steps")),
    )


class _Call(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("lengths", "offsets", "inputs", "h", "c")),
        *((name, c_void_p) for name in ("spare", "output", "logits", "steps")),
        ("rows", c_int64),
        *((name, c_int32) for name in ("batch", "begin", "end", "threads")),
    )


class Reading(NamedTuple):
    """What a layer did with packed sequences, row by row."""

    output: Tensor
    final: State
    """The state after each sequence's last time step, in the order of packing."""
    logits: Tensor
    """Those of h after every iteration but the last, (L − 1, rows); +∞ where there was none."""
    steps: Tensor


def kernel_for(block: AdaptiveBlock, mode: Mode) -> "RecurrentKernel | None":
    """Return the kernel that does what a recurrent layer's block would; None if there is none."""
    transition, head = block.steps[0], block.halting[0]
    assert isinstance(transition, Transition)
    made_of = _MadeOf(transition.cell, head, block.max_steps, list(block.parameters()))
    if not _fits(block, made_of, mode):
        return None
    laid_out = _LAID_OUT.get(block)
    if laid_out is None or not laid_out.is_of(made_of):
        _LAID_OUT[block] = laid_out = _LaidOut(made_of)
    return laid_out.kernel


def forget(block: AdaptiveBlock) -> None:
    """Have the weights of a layer's block laid out anew when it is called next."""
    _LAID_OUT.pop(block, None)


class _MadeOf(NamedTuple):
    cell: nn.Module
    head: nn.Module
    max_steps: int
    weights: list[nn.Parameter]


class _LaidOut:
    """A block's kernel, and what it was made of."""

    def __init__(self, made_of: _MadeOf) -> None:
        *self.parts, weights = made_of
        self.weights = [_Seen(p) for p in weights]
        self.kernel = RecurrentKernel(made_of.cell, made_of.head, made_of.max_steps)

    def is_of(self, made_of: _MadeOf) -> bool:
        """Whether a kernel made now would be the same."""
        *parts, weights = made_of
        return (
            parts == self.parts
            and len(weights) == len(self.weights)
            and all(seen.is_still(p) for seen, p in zip(self.weights, weights, strict=True))
        )


_LAID_OUT: WeakKeyDictionary[nn.Module, _LaidOut] = WeakKeyDictionary()


class _Seen:
    """A weight as it was; the view of it keeps its address from being another's."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.address = ref(weight), weight.data_ptr()
        self.version = _version(weight)
        self.sample = _sample(weight)
        self.before = self.sample.clone()

    def is_still(self, weight: Tensor) -> bool:
        """Whether a weight is this one, unchanged as far as one can see without reading all of it."""
        return (
            weight is self.weight()
            and weight.data_ptr() == self.address
            and _version(weight) == self.version
            and torch.equal(self.sample, self.before)
        )


def _version(weight: Tensor) -> int | None:
    return None if weight.is_inference() else weight._version


def _sample(weight: Tensor) -> Tensor:
    """A view of the bits of numbers all over a weight; of all if it is small or has no version."""
    numbers = weight.detach().view(-1).view(torch.int32)
    if weight.is_inference() or len(numbers) <= 16 * SAMPLED:
        return numbers
    return numbers[:: len(numbers) // SAMPLED | 1]  # odd, so that it meets all columns


def _fits(block: AdaptiveBlock, made_of: _MadeOf, mode: Mode) -> bool:
    """Whether the kernel does what these modules would, with nobody watching them do it."""
    cell, head, _, weights = made_of
    if type(cell) not in KINDS or type(mode) is not Thresholded:
        return False
    if type(cell) is nn.RNNCell and cell.nonlinearity != "tanh":
        return False
    if not _never_halts(head) and not (type(head) is HaltingUnit and type(head.linear) is nn.Linear):
        return False
    if any(p.dtype != torch.float32 or not p.is_cpu or not p.is_contiguous() for p in weights):
        return False
    if any(m._forward_hooks or m._forward_pre_hooks for m in block.modules()):
        return False
    if torch.is_autocast_enabled("cpu") or torch._C._len_torch_dispatch_stack():
        return False
    return not switched_off() and _there()


def _never_halts(head: nn.Module) -> bool:
    return getattr(head, "function", None) is never_halt


@cache
def _there() -> bool:
    """Whether there is a kernel."""
    try:
        library()
    except Unsupported:
        return False
    return True


class RecurrentKernel:
    """A cell and its halting unit in the layout of the kernel; weights that change later are not seen."""

    def __init__(self, cell: nn.Module, head: nn.Module, max_steps: int) -> None:
        assert isinstance(cell, nn.LSTMCell | nn.GRUCell | nn.RNNCell)
        kind, gates = KINDS[type(cell)]
        lanes, self.size = int(library().torchpact_lanes()), cell.hidden_size
        self.units = -(-self.size // lanes) * lanes  # those added have weights of 0, and stay 0
        self.gates, self.max_steps, self.has_c = gates, max_steps, kind == 0

        def blocks(weight: Tensor) -> Tensor:
            """Rows of gates as [units / lanes][gates][lanes]."""
            by_gate = weight.detach().view(gates, self.size, -1)
            padded = F.pad(by_gate, (0, 0, 0, self.units - self.size))
            return padded.view(gates, -1, lanes, by_gate.size(2)).transpose(0, 1)

        nothing = torch.zeros(gates * self.size, **SINGLE)
        in_bias, hidden_bias = (nothing if b is None else b.detach() for b in (cell.bias_ih, cell.bias_hh))
        self.inner = torch.zeros(self.units, **SINGLE)
        if kind == 1:  # the bias of the new state is inside the reset gate
            hidden_bias = hidden_bias.clone()
            self.inner[: self.size] = hidden_bias[2 * self.size :]
            hidden_bias[2 * self.size :] = 0
        self.bias = blocks(in_bias + hidden_bias).flatten()
        inputs = blocks(cell.weight_ih).flatten(0, 2)
        self.from_input, self.flag = inputs[:, :-1].contiguous(), inputs[:, -1].contiguous()
        self.weights = self._pad(blocks(cell.weight_hh)).permute(0, 3, 1, 2).contiguous()
        self.head, head_bias = torch.zeros(self.units, **SINGLE), -math.inf
        if isinstance(head, HaltingUnit):
            weight, bias = head.linear.weight, head.linear.bias
            self.head, head_bias = self._pad(weight.detach()[0]), 0.0 if bias is None else bias.item()
        self.c = _Layer(
            weights=self.weights.data_ptr(),
            flag=self.flag.data_ptr(),
            hidden_bias=self.inner.data_ptr(),
            head=self.head.data_ptr(),
            head_bias=head_bias,
            kind=kind,
            units=self.units,
            max_steps=max_steps,
        )

    def _pad(self, x: Tensor) -> Tensor:
        """A copy with as many units as the kernel has, in memory order."""
        return F.pad(x, (0, self.units - self.size)).clone(memory_format=torch.contiguous_format)

    def _unpad(self, x: Tensor) -> Tensor:
        return x[:, : self.size].contiguous()

    def __call__(self, packed: PackedSequence, state: State, mode: Mode) -> Reading:
        """Read sequences from a state on, in thresholded mode."""
        assert isinstance(mode, Thresholded)
        sizes = packed.batch_sizes
        batch, rows = int(sizes[0]), len(packed.data)
        offsets = F.pad(sizes.cumsum(0), (1, 0))
        lengths = (sizes.unsqueeze(1) > torch.arange(batch, device="cpu")).sum(0)
        parts = [self._pad(part) for part in _state.parts(state)]
        spare = torch.empty_like(parts[0])
        output = torch.empty(rows, self.units, **SINGLE)
        logits = torch.full((self.max_steps - 1, rows), torch.inf, **SINGLE)
        steps = torch.empty(rows, dtype=torch.long, device="cpu")
        layer = _Layer.from_buffer_copy(self.c)  # other threads may be at it with another threshold
        layer.bound = mode.bound
        call = _Call(
            lengths=lengths.data_ptr(),
            offsets=offsets.data_ptr(),
            h=parts[0].data_ptr(),
            c=parts[-1].data_ptr(),
            spare=spare.data_ptr(),
            output=output.data_ptr(),
            logits=logits.data_ptr(),
            steps=steps.data_ptr(),
            rows=rows,
            batch=batch,
            threads=max(min(torch.get_num_threads(), MAX_THREADS, batch), 1),
        )
        time, begin = len(sizes), 0
        while begin < time:
            most = int(offsets[begin]) + max(MOST_INPUTS // (self.gates * self.units), 1)
            end = max(int((offsets <= most).sum()) - 1, begin + 1)
            chunk = packed.data[offsets[begin] : offsets[end]]
            inputs = F.linear(chunk, self.from_input, self.bias).contiguous()
            call.inputs, call.begin, call.end = inputs.data_ptr(), begin, end
            library().torchpact_read(byref(layer), byref(call))
            begin = end
        final = tuple(self._unpad(part) for part in parts)
        return Reading(self._unpad(output), final if self.has_c else final[0], logits, steps)


@cache
def library() -> ctypes.CDLL:
    """Return the kernel, compiled for this machine if it has not been; raise Unsupported if that fails."""
    try:
        kernel = ctypes.CDLL(str(_built(SOURCE)))
    except (OSError, RuntimeError) as error:
        raise Unsupported(f"recurrent: no library ({' '.join(str(error).split())})") from error
    kernel.torchpact_lanes.restype, kernel.torchpact_lanes.argtypes = c_int32, []
    kernel.torchpact_read.restype = None
    kernel.torchpact_read.argtypes = [POINTER(_Layer), POINTER(_Call)]
    return kernel
