"""The native engine, for CPUs: convolutions at active pixels, in registers, without gathering.

The kernel is ``native.cpp``, which :mod:`~torchpact.engines.cpp_build` turns into a library in about five
seconds when it is first wanted. Where there is no compiler, :mod:`~torchpact.engines.conv.sparse` remains.
Maps of bfloat16 models are multiplied as such where the processor can (AVX512-BF16), and else in single
precision, in which sums and states always are.
"""

import ctypes
import threading
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from torchpact.core.call_args import CallArgs
from torchpact.core.modes import Discrete, Thresholded
from torchpact.core.ponder import Ponder
from torchpact.core.state import State
from torchpact.engines.base import NO_CONTEXT, Engine, Runner, Unsupported
from torchpact.engines.conv.support import bounds_of, conv_block_problem
from torchpact.engines.cpp_build import MAX_THREADS, SINGLE, load_library
from torchpact.engines.threads import calm, kernel_threads
from torchpact.nn.conv_units import join_patches, split_patches, split_ponder
from torchpact.specs import BlockSpec, ConvHead, ConvUnit, NetworkSpec, Norm
from torchpact.specs.blocks import Bounds

SOURCE = Path(__file__).with_name("native.cpp")
BLOCK = 16  # output channels whose weights lie together, as in the kernel


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
        ("limits", c_void_p),
        ("bounds", c_void_p),
        ("logits", c_void_p),
        ("probs", c_void_p),
        ("steps", c_void_p),
        ("expected", c_void_p),
        ("workspace", c_void_p),
    )


MOST_LIMITS = 64
"""Thresholds of runs that are kept as tensors."""


class Native(Engine):
    """Blocks of residual units on a CPU, with decisions for pixels, patches or images."""

    name = "native"
    kinds = (ConvUnit,)
    devices = ("cpu",)
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

    def supports(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> str | None:
        """Return None if it can run a block, or one line that says why not."""
        if isinstance(spec, NetworkSpec):
            return "native: expected a block, got a network"
        problem = conv_block_problem(spec)
        if problem is not None:
            return problem
        units = spec.conv_units
        assert units is not None  # as there is no problem
        weight = units[0].weight
        if weight.device.type != "cpu":
            return f"native: expected a model on the CPU, got one on {weight.device}"
        if weight.dtype not in (torch.float32, torch.bfloat16):
            return f"native: expected single precision or bfloat16, got {weight.dtype}"
        channels = [weight.size(1), weight.size(0), units[0].channels]
        if any(count % BLOCK for count in channels):
            counts = ", ".join(map(str, dict.fromkeys(channels)))
            return f"native: expected multiples of {BLOCK} channels, got {counts}"
        if units[0].padding < 0:
            return "native: expected a first unit that makes no fewer channels than it is given"
        if type(spec.mode) not in (Thresholded, Discrete):
            return f"native: expected the mode Thresholded or Discrete, got {spec.mode}"
        return None

    def build(self, spec: BlockSpec | NetworkSpec, example: CallArgs = NO_CONTEXT) -> "NativeBlock":
        """Return a runner of a block, in the kernel's layout.

        Raises:
            Unsupported: It cannot run it, or there is no compiler.

        """
        problem = self.supports(spec, example)
        if problem is not None:
            raise Unsupported(problem)
        assert isinstance(spec, BlockSpec)
        library()
        return NativeBlock(spec)


class NativeBlock(Runner):
    """A block in the kernel's layout; threads may call it at the same time, each has its own workspace."""

    def __init__(self, spec: BlockSpec) -> None:
        units, heads = spec.conv_units, spec.conv_heads
        assert units is not None  # as the engine has seen
        assert heads is not None
        self.mode, self.units = spec.mode, len(units)
        first, self.dtype = units[0], units[0].weight.dtype
        self.half = self.dtype == torch.bfloat16 and bool(library().torchpact_has_half())
        self.weights = _pack(units, heads, self.half)
        self.local = bool(heads) and heads[0].taps is not None
        self.group = heads[0].group if heads else 1
        self.heads = len(heads)
        self.c = _Block(
            inputs=first.weight.size(1),
            outputs=first.channels,
            stride=first.stride,
            units=self.units,
            middle=first.weight.size(0) if first.bottleneck else 0,
            heads=self.heads,
            local=self.local,
            norm=bool(heads) and heads[0].pooled_norm is not None,
            group=self.group,
            half=self.half,
            weights=self.weights.data_ptr(),
        )
        self.workspaces = _Workspaces()
        self.limits: dict[Bounds, Tensor] = {}

    @torch.no_grad()
    @calm
    def __call__(
        self, u: State, context: CallArgs = NO_CONTEXT, bounds: Bounds = None
    ) -> tuple[State, Ponder | None]:
        """Run the block."""
        assert isinstance(u, Tensor)
        precision = self.dtype if self.half else torch.float32
        source = join_patches(u).to(precision).contiguous(memory_format=torch.channels_last)
        batch, _, height, width = source.shape
        stride, group = self.c.stride, self.group
        shape = (batch, self.c.outputs, -(-height // stride), -(-width // stride))
        if shape[2] % group or shape[3] % group:
            raise Unsupported(f"native: expected maps that patches of {group} pixels tile, got {shape[2:]}")
        output = torch.empty(shape, dtype=precision, memory_format=torch.channels_last, device="cpu")
        call = _Call(batch=batch, height=height, width=width, threads=kernel_threads(MAX_THREADS))
        call.input, call.output = source.data_ptr(), output.data_ptr()
        call.workspace = self._workspace(call)
        if not self.heads:
            library().torchpact_run(byref(self.c), byref(call))
            return output.to(self.dtype), None

        positions = (batch, 1, shape[2] // group, shape[3] // group) if self.local else (batch, 1, 1, 1)
        probs = torch.ones(self.units, *positions, **SINGLE)
        steps = torch.ones(positions, dtype=torch.long, device="cpu")
        expected = torch.ones(positions, **SINGLE)
        call.probs, call.steps, call.expected = probs.data_ptr(), steps.data_ptr(), expected.data_ptr()
        limit, logits = self._limits(bounds), None
        if limit is not None:
            call.limits = limit.data_ptr()
        else:
            limit, logits = self._drawn(probs[1:]), torch.full_like(probs, torch.inf)
            call.bounds, call.logits = limit.data_ptr(), logits.data_ptr()
        library().torchpact_run(byref(self.c), byref(call))
        log_prob = None if logits is None else self.mode.log_prob(logits, steps)
        ponder = Ponder(probs, steps, expected, steps.float(), log_prob)
        return split_patches(output.to(self.dtype), group), split_ponder(ponder, group)

    def _limits(self, bounds: Bounds) -> Tensor | None:
        """Return what the logits of each head must exceed, kept from call to call; None where it is drawn."""
        known = self.limits.get(bounds)
        if known is None:
            limits = bounds_of(self.mode, bounds, self.heads)
            if limits is None:
                return None
            if len(self.limits) >= MOST_LIMITS:
                self.limits.clear()
            known = self.limits[bounds] = torch.tensor(limits, **SINGLE)
        return known

    def _drawn(self, like: Tensor) -> Tensor:
        """Return what logits must exceed, drawn for every decision at every position."""
        assert isinstance(self.mode, Discrete)
        return torch.stack([-self.mode.noise(each) for each in like])

    def _workspace(self, call: _Call) -> int:
        """Return the address of this thread's buffers for maps of this size, kept from call to call."""
        held = self.workspaces.held
        key = (call.height, call.width, call.threads)
        if key not in held:
            held.clear()  # of another size: one at a time
            size = library().torchpact_workspace(byref(self.c), *key)
            held[key] = torch.zeros(size // 4, **SINGLE)
            call.workspace = held[key].data_ptr()
            library().torchpact_prepare(byref(self.c), byref(call))
        return held[key].data_ptr()


class _Workspaces(threading.local):
    """The workspace of each thread, by the size of maps and the number of threads."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int, int], Tensor] = {}


def _pack(units: Sequence[ConvUnit], heads: Sequence[ConvHead], half: bool) -> Tensor:
    """Return all weights of a block in the order in which the kernel walks over them."""
    parts: list[Tensor] = []
    for unit in units:
        parts += _pack_unit(unit, half)
    for head in heads:
        parts += _pack_head(head)
    return torch.cat([part.detach().flatten().float() for part in parts])


def _pack_unit(unit: ConvUnit, half: bool) -> list[Tensor]:
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


def _pack_head(head: ConvHead) -> list[Tensor]:
    channels = head.channels
    nothing = torch.zeros(channels, **SINGLE)
    local, pooled = (_pack_norm(norm, nothing) for norm in (head.norm, head.pooled_norm))
    conv = torch.zeros(9, channels, **SINGLE) if head.kernel is None else head.kernel[0].flatten(1).t()
    bias = torch.cat([head.bias.detach(), torch.zeros(BLOCK - 1, **SINGLE)])
    return [*local, conv, *pooled, head.mean_weight, bias]


def _pack_norm(norm: Norm | None, nothing: Tensor) -> tuple[Tensor, Tensor]:
    return (nothing, nothing) if norm is None else (norm.scale, norm.shift)


@cache
def library() -> ctypes.CDLL:
    """Return the kernel, compiled for this machine if it has not been; raise Unsupported if that fails."""
    try:
        kernel = load_library(SOURCE)
    except Unsupported as reason:
        raise Unsupported(f"native: {reason}") from reason
    kernel.torchpact_has_half.restype, kernel.torchpact_has_half.argtypes = c_int32, []
    kernel.torchpact_workspace.restype = c_int64
    kernel.torchpact_workspace.argtypes = [POINTER(_Block), c_int32, c_int32, c_int32]
    for function in (kernel.torchpact_run, kernel.torchpact_prepare):
        function.restype, function.argtypes = None, [POINTER(_Block), POINTER(_Call)]
    return kernel


NATIVE = Native()
