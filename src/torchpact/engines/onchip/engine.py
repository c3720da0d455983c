"""The engine that keeps a network on the chip: one CUDA kernel a block, whose maps never leave shared memory.

The kernel is ``kernel.cu``, compiled for each block by NVRTC when a network is deployed; the user's cache
keeps what was made. Half precision, with sums in single. Plain networks run too, with all pixels active.

float16 is the better half: on an H200, with trained networks and real images, it halted where single
precision does at 0.9996 of the positions or more, bfloat16 at 0.997 or more.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact.block import Ponder
from torchpact.engines.folding import FoldedBlock, Unsupported
from torchpact.engines.onchip.pack import pack_convolutions, pack_heads, pack_last, pack_norms, pack_stem
from torchpact.engines.onchip.plan import Device, Plan, plans
from torchpact.models.resnet import ResNet
from torchpact.modes import Discrete, Mode, Thresholded
from torchpact.relaxation import logistic_noise

Outputs = tuple[Tensor, list[Ponder]]


class Args(ctypes.Structure):
    """The kernel's argument, which says what each is."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in (
                *("input", "output", "weights", "norms", "heads", "pools", "stem", "last"),
                *("bounds", "probs", "expected", "cost", "steps"),
            )
        ),
        *((f"{name}_stride", c_int64) for name in ("image", "channel", "row", "column")),
        ("bound", c_float),
        *((name, c_int32) for name in ("batch", "units", "keep_logits")),
    )


class Kernel(Protocol):
    """A compiled block."""

    def __call__(self, args: Args, ctas: int) -> None:
        """Launch it."""


def build(net: ResNet, blocks: Sequence[FoldedBlock]) -> Callable[[Tensor], Outputs]:
    """Return a runner of the whole network on a GPU."""
    device = net.stem.weight.device
    check(net, blocks)
    if device.type != "cuda":
        raise Unsupported(f"onchip: expected a network on a GPU, got one on {device}")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 0):
        raise Unsupported(f"onchip: expected a GPU of compute capability 8.0 or more, got {major}.{minor}")
    from torchpact.engines.onchip.driver import load, shared_limit

    count = torch.cuda.get_device_properties(device).multi_processor_count
    return OnChip(net, blocks, lambda plan: load(plan, device), Device(shared_limit(device), count))


def check(net: ResNet, blocks: Sequence[FoldedBlock]) -> None:
    """Refuse networks that the kernel does not know."""
    config, dtype = net.config, net.stem.weight.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        raise Unsupported(f"onchip: expected a network in half precision (bfloat16 or float16), got {dtype}")
    if config.adaptive and (config.per != "pixel" or config.group > 1 or config.halting_norm):
        raise Unsupported("onchip: expected a decision for every pixel, by heads without batch norm")
    if config.units > 255:
        raise Unsupported(f"onchip: expected no more than 255 units a block, got {config.units}")
    for block in blocks:
        if block.heads and not isinstance(block.mode, Thresholded | Discrete):
            raise Unsupported(f"onchip: expected the mode thresholded or discrete, got {block.mode}")


class OnChip:
    """A network as the kernel wants it; ``load`` makes a kernel of a plan."""

    def __init__(
        self, net: ResNet, blocks: Sequence[FoldedBlock], load: Callable[[Plan], Kernel], device: Device
    ) -> None:
        self.config, self.dtype = net.config, net.stem.weight.dtype
        self.load, self.device = cache(load), device
        self.stem, self.last = pack_stem(net.stem), pack_last(net.norm, net.classifier)
        self.weights = [_Weights(block, folded) for block, folded in zip(net.blocks, blocks, strict=True)]
        self.kernels: dict[tuple[int, int, int], list[tuple[Plan, Kernel]]] = {}
        self.plan(net.config.image_size, net.config.image_size, 1)  # which may fail

    def plan(self, height: int, width: int, batch: int) -> list[Plan]:
        """Return how to run so many images of this size."""
        channels = tuple(weights.channels for weights in self.weights)
        half = self.dtype == torch.float16
        adaptive = any(weights.adaptive for weights in self.weights)
        return plans(channels, height, width, self.config.classes, half, adaptive, batch, self.device)

    def prepare(self, height: int, width: int, batch: int) -> list[tuple[Plan, Kernel]]:
        """Return the kernels for so many images of this size, compiled at the first."""
        size = (height, width, batch)
        if size not in self.kernels:
            self.kernels[size] = [(plan, self.load(plan)) for plan in self.plan(*size)]
        return self.kernels[size]

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Outputs:
        """Run the network."""
        batch, _, height, width = images.shape
        ponders: list[Ponder] = []
        u = images
        for (plan, kernel), weights in zip(self.prepare(height, width, batch), self.weights, strict=True):
            shape = (batch, plan.height, plan.width, plan.channels)
            output = u.new_empty((batch, plan.classes) if plan.last else shape)
            args = weights.args(plan, batch)
            args.input, args.output = u.data_ptr(), output.data_ptr()
            args.stem, args.last = self.stem.data_ptr(), self.last.data_ptr()
            if plan.entry_stride == 1:
                args.image_stride, args.channel_stride, args.row_stride, args.column_stride = u.stride()
            finish = weights.decisions(args, plan, batch, u.device) if weights.adaptive else None
            if batch:
                kernel(args, -(-batch // plan.images))
            if finish is not None:
                ponders.append(finish())
            u = output
        return u, ponders


class _Weights:
    """What the kernel of a block reads."""

    def __init__(self, block: Any, folded: FoldedBlock) -> None:
        units, heads = list(block.steps), folded.heads
        self.mode: Mode = folded.mode
        self.units, self.adaptive = len(units), bool(heads)
        self.details = getattr(block, "details", True) or not isinstance(self.mode, Thresholded)
        self.channels = units[-1].conv2.weight.size(0)
        self.convolutions, self.norms = pack_convolutions(units), pack_norms(units)
        if heads:
            heads = heads[: self.units - 1]
            self.heads = pack_heads(heads)
            self.pools = torch.cat([head.linear.weight.detach().float() for head in heads])
            self.biases = torch.stack([F.pad(head.linear.bias.detach().float(), (0, 3)) for head in heads])
        self.scaled: dict[int, Tensor] = {}

    def args(self, plan: Plan, batch: int) -> Args:
        """Return the argument with what does not change from call to call."""
        args = Args(batch=batch, units=self.units)
        args.weights, args.norms = self.convolutions.data_ptr(), self.norms.data_ptr()
        if self.adaptive:
            pixels = plan.height * plan.width
            if pixels not in self.scaled:
                self.scaled[pixels] = torch.cat([self.pools / pixels, self.biases], 1)
            args.heads, args.pools = self.heads.data_ptr(), self.scaled[pixels].data_ptr()
        return args

    def decisions(self, args: Args, plan: Plan, batch: int, device: torch.device) -> Callable[[], Ponder]:
        """Tell the kernel where to write its decisions, and return what makes a ponder of them."""
        shape, mode = (batch, 1, plan.height, plan.width), self.mode
        cost = torch.empty(shape, device=device)
        steps = torch.empty(shape, dtype=torch.long, device=device)
        args.cost, args.steps = cost.data_ptr(), steps.data_ptr()
        if isinstance(mode, Thresholded):
            args.bound = math.log(mode.threshold) - math.log1p(-mode.threshold)
        if not self.details:
            unknown = torch.full((), torch.nan, device=device)
            nothing = unknown.expand(self.units, *shape)
            return lambda: Ponder(nothing, steps, unknown.expand(shape), cost, None)
        probs, expected = torch.empty(self.units, *shape, device=device), torch.empty(shape, device=device)
        args.probs, args.expected = probs.data_ptr(), expected.data_ptr()
        if isinstance(mode, Thresholded):
            return lambda: Ponder(probs, steps, expected, cost, None)
        assert isinstance(mode, Discrete)
        # as the dense engine draws it: for every position, halted or not
        bounds = torch.stack([-logistic_noise(each, mode.generator) for each in probs[1:]])
        args.bounds, args.keep_logits = bounds.data_ptr(), True

        def finish() -> Ponder:
            log_prob = mode.log_prob(probs, steps)
            args.bounds = bounds.data_ptr()  # which has to live until here
            return Ponder(torch.sigmoid(probs), steps, expected, cost, log_prob)

        return finish
