"""The engine that keeps blocks on the chip: one CUDA kernel a block, whose maps never leave shared memory.

The kernel is ``kernel.cu``, compiled for each block by NVRTC when a network is deployed; the user's cache
keeps what was made. Half precision, with sums in single. It runs networks as a whole, or single blocks; plain
ones too, with all pixels active.

float16 is the better half: on an H200, with trained networks and real images, it halted where single
precision does at 0.9996 of the positions or more, bfloat16 at 0.997 or more.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from torchpact.core.call_args import CallArgs
from torchpact.core.modes import Discrete, Thresholded
from torchpact.engines.base import NO_CONTEXT, Engine, Unsupported
from torchpact.engines.conv.onchip.block import OnChipBlock
from torchpact.engines.conv.onchip.kernels import on_device
from torchpact.engines.conv.onchip.network import OnChipNetwork
from torchpact.engines.conv.onchip.plan import CHANNELS
from torchpact.engines.conv.support import conv_block_problem
from torchpact.specs import BlockSpec, ConvUnit, NetworkSpec


class OnChip(Engine):
    """Networks as a whole, and blocks of residual units, on a GPU in half precision."""

    name = "onchip"
    kinds = (ConvUnit,)
    devices = ("cuda",)
    whole = True
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.float16: 2e-3, torch.bfloat16: 1e-2}

    def supports(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> str | None:
        """Return None if it can run a block or a network, or one line that says why not."""
        if isinstance(spec, NetworkSpec):
            problem, device = network_problem(spec), spec.device
        else:
            problem = conv_block_problem(spec) or block_problem(spec)
            device = torch.device("meta") if problem else _units(spec)[0].weight.device
        if problem is None and device.type != "cuda":
            return f"onchip: expected a network on a GPU, got one on {device}"
        return problem

    def build(self, spec: BlockSpec | NetworkSpec, example: CallArgs = NO_CONTEXT) -> Any:
        """Return an :class:`OnChipBlock`, or of a network an :class:`OnChipNetwork`.

        Raises:
            Unsupported: It cannot run it, the GPU is too old, or there is no compiler.

        """
        problem = self.supports(spec, example)
        if problem is not None:
            raise Unsupported(problem)
        if isinstance(spec, NetworkSpec):
            return OnChipNetwork(spec, *on_device(spec.device))
        return OnChipBlock(spec, *on_device(_units(spec)[0].weight.device))


def network_problem(spec: NetworkSpec) -> str | None:
    """Return why the kernels cannot run a network, apart from the device; None if they can."""
    for number, block in enumerate(spec.blocks):
        # norms may be more exact than the rest: they are folded in double precision
        problem = conv_block_problem(block, one_precision=False) or kernel_problem(block)
        if problem is not None:
            return problem
        units = _units(block)
        changes = (units[0].stride, 2 * units[0].padding)
        if changes != ((2, units[0].channels) if number else (1, 0)):
            return "onchip: expected a first block of stride 1, and others that double the channels"
    stem = spec.stem.weight
    if spec.stem.stride != 1 or tuple(stem.shape[1:]) != (3, 3, 3):
        return f"onchip: expected a stem of 3×3 for three colours, got {tuple(stem.shape)}"
    return None


def block_problem(spec: BlockSpec) -> str | None:
    """Return why the kernel cannot run a single block, apart from the device; None if it can."""
    problem = kernel_problem(spec)
    if problem is not None:
        return problem
    first = _units(spec)[0]
    same, doubled = (first.stride, first.padding) == (1, 0), 2 * first.padding == first.channels > 16
    if not (same or (first.stride == 2 and doubled)):
        return (
            "onchip: expected a first unit of stride 1, or one of stride 2 that doubles 16 channels or more; "
            f"got stride {first.stride} from {first.channels - first.padding} to {first.channels}"
        )
    return None


def kernel_problem(spec: BlockSpec) -> str | None:
    """Return what the kernel does not know of a block of convolutional units; None if it knows all."""
    units, heads = _units(spec), spec.conv_heads or ()
    dtype, channels = units[0].weight.dtype, units[0].channels
    if dtype not in (torch.bfloat16, torch.float16):
        return f"onchip: expected a network in half precision (bfloat16 or float16), got {dtype}"
    if units[0].bottleneck:
        return "onchip: expected units of two 3×3 convolutions, got bottlenecks"
    if any(head.pooled_norm is not None for head in heads):
        return "onchip: expected heads without batch norm"
    if heads and heads[0].group > 1:
        patch = f"{heads[0].group}×{heads[0].group}"
        return f"onchip: expected a decision for every pixel or image, got one for {patch} pixels"
    if channels not in CHANNELS:
        return f"onchip: expected channels among {', '.join(map(str, CHANNELS))}; got {channels}"
    if len(units) > 255:
        return f"onchip: expected no more than 255 units a block, got {len(units)}"
    if heads and type(spec.mode) not in (Thresholded, Discrete):
        return f"onchip: expected the mode thresholded or discrete, got {spec.mode}"
    return None


def _units(spec: BlockSpec) -> tuple[ConvUnit, ...]:
    units = spec.conv_units
    assert units is not None  # or there is a problem
    return units


ONCHIP = OnChip()
