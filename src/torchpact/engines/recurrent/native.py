"""The engine "recurrent": layers on a CPU by a kernel in C++, whose sequences do not keep step.

A sequence that halts goes on to its next input at once, while others still iterate on theirs; all that are
not finished move by one iteration together. The kernel is ``recurrent.cpp``, for torch's own cells with a
halting unit, in single precision and thresholded; its weights are laid out when a runner is built.
"""

import ctypes
import math
from collections.abc import Mapping
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from torchpact.core import state as _state
from torchpact.core.modes import Mode
from torchpact.core.ponder import Ponder, ponder_of_logits
from torchpact.core.state import State
from torchpact.engines.base import Unsupported
from torchpact.engines.cpp_build import MAX_THREADS, SINGLE, load_library, switched_off
from torchpact.engines.recurrent.layer import Layer, layer_of
from torchpact.engines.recurrent.runner import (
    LayerCall,
    RecurrentEngine,
    RecurrentRunner,
    kernel_refusal,
    rnn_of,
)
from torchpact.engines.threads import kernel_threads
from torchpact.specs import BlockSpec
from torchpact.specs.blocks import Bounds

SOURCE = Path(__file__).with_name("recurrent.cpp")
MOST_INPUTS = 16_000_000
"""How many numbers the inputs' part of the gates may have; longer sequences are read in pieces."""
PRECISIONS = (torch.float32,)


class NativeRecurrent(RecurrentEngine):
    """The kernel in C++, for the CPU."""

    name: ClassVar[str] = "recurrent"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.float32: 1e-4}

    def check(self, spec: BlockSpec, call: LayerCall) -> None:
        """Raise :class:`Unsupported` if it cannot run such a layer on such a call."""
        layer = layer_of(spec, PRECISIONS)
        if layer.device.type != "cpu":
            raise Unsupported(f"expected a layer on the CPU, got one on {layer.device}")
        reason = kernel_refusal(layer, call)
        if reason is not None:
            raise Unsupported(reason)
        if switched_off():
            raise Unsupported("no compiled kernels, as TORCHPACT_NATIVE=0 asks")
        library()

    def make(self, spec: BlockSpec, call: LayerCall) -> "NativeRunner":
        """Return a runner of a layer that was checked."""
        return NativeRunner(spec)


class NativeRunner(RecurrentRunner):
    """A layer with its weights laid out; threads may call it at once, since each call has its own buffers."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__(rnn_of(spec))
        self.layer = layer_of(spec, PRECISIONS)
        self.kernel = RecurrentKernel(self.layer)

    def refusal(self, call: LayerCall) -> str | None:
        """Return None if it can run a call, or one line that says why not."""
        return kernel_refusal(self.layer, call)

    def run(self, call: LayerCall) -> Any:
        """Run a call that was not refused."""
        bound = call.bound
        assert bound is not None

        def read(
            packed: PackedSequence, u: State, mode: Mode, bounds: Bounds
        ) -> tuple[Tensor, State, Ponder]:
            found = self.kernel(packed, u, bound)
            logits = [*found.logits]
            ponder = ponder_of_logits(logits, self.layer.max_steps, found.steps, mode, dtype=torch.float32)
            return found.output, found.final, ponder

        return self.module.run(
            call.input, call.state, lengths=call.lengths, mode=call.mode, bounds=call.bounds, read=read
        )


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


class RecurrentKernel:
    """A cell and its halting head in the layout of the kernel: a copy."""

    def __init__(self, layer: Layer) -> None:
        lanes, gates, self.size = int(library().torchpact_lanes()), layer.gates, layer.size
        self.units = -(-self.size // lanes) * lanes  # those added have weights of 0, and stay 0
        self.gates, self.max_steps, self.is_lstm = gates, layer.max_steps, layer.is_lstm

        def blocks(weight: Tensor) -> Tensor:
            """Rows of gates as [units / lanes][gates][lanes]."""
            by_gate = weight.view(gates, self.size, -1)
            padded = F.pad(by_gate, (0, 0, 0, self.units - self.size))
            return padded.view(gates, -1, lanes, by_gate.size(2)).transpose(0, 1)

        nothing = torch.zeros(gates * self.size, **SINGLE)
        in_bias, hidden_bias = (nothing if b is None else b for b in (layer.bias_ih, layer.bias_hh))
        self.inner = torch.zeros(self.units, **SINGLE)
        if layer.kind == 1:  # the bias of a GRU's new state is inside the reset gate
            hidden_bias = hidden_bias.clone()
            self.inner[: self.size] = hidden_bias[2 * self.size :]
            hidden_bias[2 * self.size :] = 0
        self.bias = blocks(in_bias + hidden_bias).flatten()
        inputs = blocks(layer.weight_ih).flatten(0, 2)
        self.from_input, self.flag = inputs[:, :-1].contiguous(), inputs[:, -1].contiguous()
        self.weights = self._pad(blocks(layer.weight_hh)).permute(0, 3, 1, 2).contiguous()
        self.head, head_bias = torch.zeros(self.units, **SINGLE), -math.inf
        if layer.head is not None:
            self.head = self._pad(layer.head)
            head_bias = 0.0 if layer.head_bias is None else layer.head_bias.item()
        self.c = _Layer(
            weights=self.weights.data_ptr(),
            flag=self.flag.data_ptr(),
            hidden_bias=self.inner.data_ptr(),
            head=self.head.data_ptr(),
            head_bias=head_bias,
            kind=layer.kind,
            units=self.units,
            max_steps=layer.max_steps,
        )

    def _pad(self, x: Tensor) -> Tensor:
        """Return a copy with as many units as the kernel has, in memory order."""
        return F.pad(x, (0, self.units - self.size)).clone(memory_format=torch.contiguous_format)

    def _unpad(self, x: Tensor) -> Tensor:
        return x[:, : self.size].contiguous()

    def __call__(self, packed: PackedSequence, state: State, bound: float) -> Reading:
        """Read sequences, each from a state on; a logit above ``bound`` halts."""
        sizes = packed.batch_sizes
        batch, rows = int(sizes[0]), len(packed.data)
        offsets = F.pad(sizes.cumsum(0), (1, 0))
        lengths = (sizes.unsqueeze(1) > torch.arange(batch, device="cpu")).sum(0)
        parts = [self._pad(part) for part in _state.parts(state)]
        spare = torch.empty_like(parts[0])
        output = torch.empty(rows, self.units, **SINGLE)
        logits = torch.full((self.max_steps - 1, rows), torch.inf, **SINGLE)
        steps = torch.empty(rows, dtype=torch.long, device="cpu")
        layer = _Layer.from_buffer_copy(self.c)  # other threads may run it with another threshold
        layer.bound = bound
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
            threads=kernel_threads(min(MAX_THREADS, batch)),
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
        return Reading(self._unpad(output), final if self.is_lstm else final[0], logits, steps)


@cache
def library() -> ctypes.CDLL:
    """Return the kernel, compiled for this machine if it has not been.

    Raises:
        Unsupported: It cannot be compiled or loaded.

    """
    kernel = load_library(SOURCE)
    kernel.torchpact_lanes.restype, kernel.torchpact_lanes.argtypes = c_int32, []
    kernel.torchpact_read.restype = None
    kernel.torchpact_read.argtypes = [POINTER(_Layer), POINTER(_Call)]
    return kernel
