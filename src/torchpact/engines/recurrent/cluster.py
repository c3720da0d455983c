"""Recurrent layers of up to 512 units on a GPU with clusters (Hopper and later): one launch reads everything.

The kernel is ``recurrent_cluster.cu``: a cluster of 1 to 16 multiprocessors keeps the recurrent weights in
registers and reads its share of the sequences alone, each at its own pace. Sums of products are in single
precision, as exact as without tensor cores, whatever torch is set to. Compiled by NVRTC on first use.

Of a large batch, which CUDA graphs begin to read (gpu_lane.py), clusters read the rows that are left.
"""

import ctypes
from collections.abc import Callable
from ctypes import Structure, byref, c_char_p, c_float, c_int, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torchpact.checks import one_line
from torchpact.core import state as _state
from torchpact.engines.base import Unsupported
from torchpact.engines.conv.onchip.driver import clusters_at_once, driver
from torchpact.engines.conv.onchip.nvrtc import compiled
from torchpact.engines.recurrent.gpu_call import Piece, Places, Result, UnderWay
from torchpact.engines.recurrent.layer import Layer

SOURCE = Path(__file__).with_name("recurrent_cluster.cu")
THREADS = 256
MOST_UNITS = 512
"""A cluster has at most 16 CTAs, of 32 units each."""
MOST_OUTPUTS = {4: 3 << 16, 2: 1 << 16}
"""Rows times units up to which this is the fastest way, by the bytes of a number: of a batch, and of the rows
that graphs leave. On an H200, in single precision, an iteration of 128 units took 1.7 µs with 64 rows, 6.6
with 512 and 24.5 with 2048, by graphs 10.2, 10.6 and 18.4; one of 512 units 7.9 with 64, 27.3 with 256 and
50.9 with 512, by graphs 16.4, 26.6 and 37.5. The limit is above where they meet, since sequences end: with
fewer a cluster is faster at once, and graphs are not. In half precision cuBLAS has tensor cores."""
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# of cuda.h
_SHARED, _LARGE_CLUSTER = 8, 14  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_…, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class Shape(NamedTuple):
    """What the kernel is compiled for: the macros of its source."""

    kind: int
    gates: int
    units: int
    ctas: int
    slots: int
    numbers: int

    @property
    def macros(self) -> dict[str, int]:
        """By their names."""
        return {name.upper(): value for name, value in self._asdict().items()}

    @property
    def shared_bytes(self) -> int:
        """Of shared memory of a CTA, as the source lays it out."""
        in_memory = max(self.ctas - 8, 0) * THREADS or 1
        padded = 32 * self.ctas
        numbers = self.slots * (2 * (padded + 4) + 36 + 7) + in_memory * self.gates * 4 + padded
        return -(-(4 * numbers + 4) // 16) * 16


def shape_of(layer: Layer) -> Shape:
    """Return what a layer needs: the fewest CTAs, powers of two, and as many slots as fit."""
    ctas = 1 << (-(-layer.size // 32) - 1).bit_length()
    slots = 32 if ctas < 16 else 16
    return Shape(layer.kind, layer.gates, layer.size, ctas, slots, NUMBERS[layer.dtype])


class Args(Structure):
    """As in the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("inputs", "weight", "flag")),
        *((name, c_void_p) for name in ("input_bias", "hidden_bias", "head", "head_bias")),
        *((name, c_void_p) for name in ("first_h", "first_c")),
        *((name, c_void_p) for name in ("h", "c", "output", "probs", "cost", "expected", "steps", "offsets")),
        *((name, c_void_p) for name in ("notes", "count", "odds")),
        ("bound", c_float),
        *((name, c_int) for name in ("batch", "rows", "max_steps", "flag_stride", "slots")),
    )


Launch = Callable[[Args, int], None]


class Clusters:
    """A layer that clusters read: ``launch`` starts some of them; ``at_once`` run at a time."""

    adds_bias = True
    """Whether the bias of the inputs is added here, and is no part of the product that is read."""

    def __init__(self, layer: Layer, launch: Launch, at_once: int) -> None:
        self.layer = layer  # whose weights the kernel has by their addresses
        self.launch, self.at_once, self.shape = launch, at_once, shape_of(layer)
        self.weights = Args(
            weight=_address(layer.weight_hh),
            flag=_address(layer.weight_ih[:, -1]),
            input_bias=_address(layer.bias_ih),
            hidden_bias=_address(layer.bias_hh),
            head=_address(layer.head),
            head_bias=_address(layer.head_bias),
            max_steps=layer.max_steps,
            flag_stride=layer.weight_ih.size(1),
        )
        self.bytes = layer.weight_hh.element_size()
        self.most_rows = MOST_OUTPUTS[self.bytes] // layer.size
        """Of a batch, for which this is the fastest way."""
        self.places = Places()

    def read(self, inputs: Tensor, piece: Piece, result: Result, bound: float) -> None:
        """Read some time steps; ``inputs`` are the inputs' part of all gates, without their bias."""
        places = self.places.of(piece, inputs)
        args = self._args(inputs, places, piece, result, bound)
        if result.state is not None:
            first = _state.parts(result.state)
            args.first_h, args.first_c = first[0].data_ptr(), first[-1].data_ptr()
        self._launch(args, piece.batch)

    def finish(self, inputs: Tensor, piece: Piece, result: Result, bound: float, under_way: UnderWay) -> None:
        """Read on what others have begun, whose ``inputs`` have their bias."""
        places = self.places.of(piece, inputs)
        args = self._args(inputs, places, piece, result, bound)
        args.input_bias = None
        args.first_h, args.first_c = under_way.h.data_ptr(), under_way.c.data_ptr()
        args.notes, args.odds = under_way.notes.data_ptr(), under_way.odds.data_ptr()
        args.count = under_way.left.data_ptr()
        self._launch(args, under_way.most)

    def _args(self, inputs: Tensor, places: Tensor, piece: Piece, result: Result, bound: float) -> Args:
        begin, final = piece.rows.start, _state.parts(result.final)
        args = Args.from_buffer_copy(self.weights)
        args.inputs, args.offsets = inputs.data_ptr(), places.data_ptr()
        args.h, args.c = final[0].data_ptr(), final[-1].data_ptr()
        args.output = result.output.data_ptr() + begin * self.shape.units * self.bytes
        args.probs = result.probs.data_ptr() + begin * 4
        args.cost = result.cost.data_ptr() + begin * 4
        args.expected = result.expected.data_ptr() + begin * 4
        args.steps = result.steps.data_ptr() + begin * 8
        args.bound, args.batch, args.rows = bound, piece.batch, result.rows
        return args

    def _launch(self, args: Args, rows: int) -> None:
        args.slots = min(-(-rows // self.at_once), self.shape.slots)
        self.launch(args, min(-(-rows // args.slots), self.at_once))


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def clusters_for(layer: Layer) -> Clusters | None:
    """Return what reads a layer by clusters; None where its device or its size rules them out.

    Raises:
        Unsupported: The kernel cannot be compiled or loaded.
        torch.OutOfMemoryError: There is no memory for it now.

    """
    weight = layer.weight_hh
    if not weight.is_cuda or weight.dtype not in NUMBERS or layer.size > MOST_UNITS:
        return None
    if torch.cuda.get_device_capability(weight.device) < (9, 0) or weight.data_ptr() % 16:
        return None
    try:
        loaded = _loaded(shape_of(layer), weight.device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, OSError, ImportError, ValueError) as error:  # of NVRTC, or of the driver
        raise Unsupported(f"no clusters ({one_line(error)})") from error
    return Clusters(layer, loaded, loaded.at_once)


def compile_cell(shape: Shape, arch: str) -> bytes:
    """Return the machine code for an architecture such as sm_90."""
    return compiled("recurrent", SOURCE.read_text(encoding="utf-8"), shape.macros, arch)


@cache
def _loaded(shape: Shape, device: torch.device) -> "Loaded":
    return Loaded(shape, device)


class Loaded:
    """A kernel on a device; ``at_once`` is how many clusters it can run at a time."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.context, self.module, self.function = c_void_p(), c_void_p(), c_void_p()
        major, minor = torch.cuda.get_device_capability(device)
        code = compile_cell(shape, f"sm_{major}{minor}")
        with torch.cuda.device(device):
            self._load(driver(), code)
        if not self.at_once:
            raise Unsupported(f"no room for clusters of {shape.ctas}")

    def _load(self, cuda: ctypes.CDLL, code: bytes) -> None:
        _checked(cuda.cuDevicePrimaryCtxRetain(byref(self.context), self.device.index))
        _checked(cuda.cuCtxSetCurrent(self.context))  # a thread that has not used CUDA yet has none
        _checked(cuda.cuModuleLoadData(byref(self.module), code))
        _checked(cuda.cuModuleGetFunction(byref(self.function), self.module, b"read_sequences"))
        _checked(cuda.cuFuncSetAttribute(self.function, _SHARED, self.shape.shared_bytes))
        if self.shape.ctas > 8:
            _checked(cuda.cuFuncSetAttribute(self.function, _LARGE_CLUSTER, 1))
        self.at_once = clusters_at_once(self.function, self.shape.ctas, THREADS, self.shape.shared_bytes)

    def __call__(self, args: Args, clusters: int) -> None:
        """Launch on the current stream of its device."""
        if torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self(args, clusters)
        grid, block = (clusters * self.shape.ctas, 1, 1), (THREADS, 1, 1)
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        pointers = byref(c_void_p(ctypes.addressof(args)))
        launch, shared_bytes = driver().cuLaunchKernel, self.shape.shared_bytes
        _checked(launch(self.function, *grid, *block, shared_bytes, stream, pointers, None))


def _checked(status: int) -> None:
    """Raise what a call of the CUDA driver reports, if it is an error."""
    if status:
        text = c_char_p()
        driver().cuGetErrorString(status, byref(text))
        kind = torch.OutOfMemoryError if status == _OUT_OF_MEMORY else RuntimeError
        raise kind(f"the CUDA driver reported {status}, {(text.value or b'unknown').decode()}")
