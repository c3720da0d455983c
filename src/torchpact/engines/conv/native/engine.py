"""The sparse engine for CPUs, compiled: active pixels go straight through registers, and nothing is gathered.

The kernel is ``native.cpp``, without dependencies, which the machine's own C++ compiler turns into a library
in about five seconds when it is first wanted; the user's cache keeps it. Where there is no compiler,
:mod:`~torchpact.engines.conv.sparse` remains, as it does with ``TORCHPACT_NATIVE=0`` in the environment: then
nothing is compiled and nothing compiled is loaded. Maps of bfloat16 models are multiplied as such where the
processor can (AVX512-BF16), and else in single precision, in which sums and states always are.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchpact.core.modes import Discrete, Mode, Thresholded
from torchpact.core.ponder import Ponder
from torchpact.engines.block_spec import FoldedBlock, FoldedUnit, Runner, Unsupported, fold_norm
from torchpact.files import user_cache, write_whole
from torchpact.nn.conv_units import HaltingHead

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared")
BLOCK = 16  # output channels whose weights lie together, as in the kernel
MAX_THREADS = 64  # as in the kernel
SINGLE: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
"""What the kernels read and write, whatever the defaults of torch are."""


class _Block(Structure):
    _fields_ = (
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("stride", c_int32),
        ("units", c_int32),
        ("middle", c_int32),
        ("heads", c_int32),
        ("local", c_int32),
        ("norm", c_int32),
        ("group", c_int32),
        ("half", c_int32),
        ("weights", c_void_p),
    )


class _Call(Structure):
    _fields_ = (
        ("batch", c_int32),
        ("height", c_int32),
        ("width", c_int32),
        ("threads", c_int32),
        ("input", c_void_p),
        ("output", c_void_p),
        ("bound", c_float),
        ("bounds", c_void_p),
        ("logits", c_void_p),
        ("probs", c_void_p),
        ("steps", c_void_p),
        ("expected", c_void_p),
        ("workspace", c_void_p),
    )


def build(block: FoldedBlock) -> Runner:
    """Return a runner for a block on the CPU, in a mode that compares logits with bounds."""
    weight = block.weight
    if weight.device.type != "cpu":
        raise Unsupported(f"native: expected a model on the CPU, got one on {weight.device}")
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise Unsupported(f"native: expected single precision or bfloat16, got {weight.dtype}")
    channels = [weight.size(1), weight.size(0), block.channels]
    if any(count % BLOCK for count in channels):
        counts = ", ".join(map(str, dict.fromkeys(channels)))
        raise Unsupported(f"native: expected multiples of {BLOCK} channels, got {counts}")
    if block.units[0].padding < 0:
        raise Unsupported("native: expected a first unit that makes no fewer channels than it is given")
    if not isinstance(block.mode, Thresholded | Discrete):
        raise Unsupported(f"native: expected the mode Thresholded or Discrete, got {block.mode}")
    library()
    return NativeBlock(block)


class NativeBlock:
    """A block in the kernel's layout; threads may call it at the same time, each has its own workspace."""

    def __init__(self, block: FoldedBlock) -> None:
        self.mode = block.mode
        self.units, self.dtype = len(block.units), block.weight.dtype
        self.half = self.dtype == torch.bfloat16 and bool(library().torchpact_has_half())
        self.weights = _pack(block, self.half)
        head, first = block.head, block.units[0]
        self.local = head is not None and head.conv is not None
        self.group = 1 if head is None else head.group
        self.heads = len(block.heads)
        self.c = _Block(
            inputs=first.weight1.size(1),
            outputs=block.channels,
            stride=first.stride,
            units=self.units,
            middle=first.weight1.size(0) if block.bottleneck else 0,
            heads=self.heads,
            local=self.local,
            norm=head is not None and head.pooled_norm is not None,
            group=self.group,
            half=self.half,
            weights=self.weights.data_ptr(),
        )
        self.workspaces = _Workspaces()

    @torch.no_grad()
    def __call__(self, u: Tensor) -> tuple[Tensor, Ponder | None]:
        """Run the block."""
        precision = self.dtype if self.half else torch.float32
        source = u.to(precision).contiguous(memory_format=torch.channels_last)
        batch, _, height, width = source.shape
        stride = self.c.stride
        shape = (batch, self.c.outputs, -(-height // stride), -(-width // stride))
        output = torch.empty(shape, dtype=precision, memory_format=torch.channels_last, device="cpu")
        call = _Call(
            batch=batch, height=height, width=width, threads=min(torch.get_num_threads(), MAX_THREADS)
        )
        call.input, call.output = source.data_ptr(), output.data_ptr()
        call.workspace = self._workspace(call)
        if not self.heads:
            library().torchpact_run(byref(self.c), byref(call))
            return output.to(self.dtype), None

        group = self.group
        positions = (batch, 1, shape[2] // group, shape[3] // group) if self.local else (batch, 1, 1, 1)
        probs = torch.ones(self.units, *positions, **SINGLE)
        steps = torch.ones(positions, dtype=torch.long, device="cpu")
        expected = torch.ones(positions, **SINGLE)
        call.probs, call.steps, call.expected = probs.data_ptr(), steps.data_ptr(), expected.data_ptr()
        logits = None
        bound = bounds_of(self.mode, probs[1:])
        if isinstance(bound, Tensor):
            logits = torch.full_like(probs, torch.inf)
            call.bounds, call.logits = bound.data_ptr(), logits.data_ptr()
        else:
            call.bound = bound
        library().torchpact_run(byref(self.c), byref(call))
        log_prob = None if logits is None else self.mode.log_prob(logits, steps)
        return output.to(self.dtype), Ponder(probs, steps, expected, steps.float(), log_prob)

    def _workspace(self, call: _Call) -> int:
        """Return the address of this thread's buffers for maps of this size, kept from call to call."""
        held = self.workspaces.held
        key = (call.height, call.width, call.threads)
        if key not in held:
            held.clear()  # of another size: one at a time
            size = library().torchpact_workspace(byref(self.c), call.height, call.width)
            held[key] = torch.zeros(size * call.threads // 4, **SINGLE)
            call.workspace = held[key].data_ptr()
            library().torchpact_prepare(byref(self.c), byref(call))
        return held[key].data_ptr()


class _Workspaces(threading.local):
    """The workspace of each thread, by the size of maps and the number of threads."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int, int], Tensor] = {}


def bounds_of(mode: Mode, like: Tensor) -> float | Tensor:
    """Return what logits must exceed for a halt: one number, or drawn anew for every one.

    >>> bounds_of(tp.Thresholded(), torch.zeros(3))
    0.0
    """
    if isinstance(mode, Thresholded):
        return mode.bound
    assert isinstance(mode, Discrete)
    return torch.stack([-mode.noise(each) for each in like])


def _pack(block: FoldedBlock, half: bool) -> Tensor:
    """Return all weights of a block in the order in which the kernel walks over them."""
    parts: list[Tensor] = []
    for unit in block.units:
        parts += _pack_unit(unit, half)
    for head in block.heads:
        parts += _pack_head(head, block.channels)
    return torch.cat([part.detach().flatten().float() for part in parts])


def _pack_unit(unit: FoldedUnit, half: bool) -> list[Tensor]:
    parts = [unit.scale, unit.shift]
    for weight, bias in unit.convolutions:
        blocks = _in_pairs(weight) if half else _in_blocks(weight)
        parts += [blocks] if bias is None else [blocks, bias]
    return parts


def _in_blocks(weight: Tensor) -> Tensor:
    """Return weights as [outputs / 16][taps][inputs][16]."""
    blocks: Tensor = weight.flatten(2).unflatten(0, (-1, BLOCK))
    return blocks.permute(0, 3, 2, 1)


def _in_pairs(weight: Tensor) -> Tensor:
    """Return weights of bfloat16 as [outputs / 16][taps][inputs / 2][16][2], two in the memory of a float."""
    pairs: Tensor = _in_blocks(weight).unflatten(2, (-1, 2)).transpose(3, 4)
    return pairs.contiguous().view(torch.float32)


def _pack_head(head: HaltingHead, channels: int) -> list[Tensor]:
    nothing = torch.zeros(channels, **SINGLE)
    local = (nothing, nothing) if head.norm is None else fold_norm(head.norm)
    pooled = (nothing, nothing) if head.pooled_norm is None else fold_norm(head.pooled_norm)
    conv = torch.zeros(9, channels, **SINGLE) if head.conv is None else head.conv.weight[0].flatten(1).t()
    bias = torch.cat([head.linear.bias, torch.zeros(BLOCK - 1, **SINGLE)])
    return [*local, conv, *pooled, head.linear.weight, bias]


@cache
def library() -> ctypes.CDLL:
    """Return the kernel, compiled for this machine if it has not been; raise Unsupported if that fails."""
    try:
        kernel = ctypes.CDLL(str(_built(SOURCE)))
    except (OSError, RuntimeError) as error:  # the latter where there is no home
        raise Unsupported(f"native: no library ({' '.join(str(error).split())})") from error
    kernel.torchpact_has_half.restype, kernel.torchpact_has_half.argtypes = c_int32, []
    kernel.torchpact_workspace.restype = c_int64
    kernel.torchpact_workspace.argtypes = [POINTER(_Block), c_int32, c_int32]
    for function in (kernel.torchpact_run, kernel.torchpact_prepare):
        function.restype, function.argtypes = None, [POINTER(_Block), POINTER(_Call)]
    return kernel


def switched_off() -> bool:
    """Whether the user wants no compiler to run: ``TORCHPACT_NATIVE=0``."""
    return os.environ.get("TORCHPACT_NATIVE") == "0"


def _built(source: Path) -> Path:
    """Return where the library of a source file is, once it is there."""
    if switched_off():
        raise Unsupported("native: no compiled kernels, as TORCHPACT_NATIVE=0 asks")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None:
        raise Unsupported("native: expected a C++ compiler (c++, g++, clang++ or $CXX), found none")
    # what the compiler and -march=native stand for here, so that a shared home serves unlike machines
    target = _run(compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull)
    text = b"".join(
        path.read_bytes() for path in (source, *sorted(source.parent.glob(f"{source.stem}_*.hpp")))
    )
    key = hashlib.sha256(text + " ".join(FLAGS).encode() + target).hexdigest()[:16]
    path = user_cache() / f"{source.stem}-{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / path.name
            _run(compiler, *FLAGS, str(source), "-o", str(built))
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, built.read_bytes())
    return path


def _run(*command: str) -> bytes:
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        problem = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise Unsupported(f"native: {Path(command[0]).name} failed ({' '.join(problem)})")
    return done.stdout
