"""The engine that keeps a network on the chip: one CUDA kernel a block, whose maps never leave shared memory.

The kernel is ``kernel.cu``, compiled for each block by NVRTC when a network is deployed; the user's cache
keeps what was made. Half precision, with sums in single. Plain networks run too, with all pixels active.

float16 is the better half: on an H200, with trained networks and real images, it halted where single
precision does at 0.9996 of the positions or more, bfloat16 at 0.997 or more.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from torchpact.block import Ponder, _decisions
from torchpact.engines.folding import FoldedBlock, Unsupported
from torchpact.engines.onchip.pack import (
    pack_convolutions,
    pack_heads,
    pack_last,
    pack_norms,
    pack_pools,
    pack_stem,
)
from torchpact.engines.onchip.plan import Device, Plan, candidates
from torchpact.engines.timing import interleaved
from torchpact.models.resnet import ResNet
from torchpact.modes import Discrete, Mode, Thresholded

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


def build(net: ResNet, blocks: Sequence[FoldedBlock]) -> "OnChip":
    """Return a runner of the whole network on a GPU."""
    device = net.stem.weight.device
    check(net, blocks)
    if device.type != "cuda":
        raise Unsupported(f"onchip: expected a network on a GPU, got one on {device}")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 0):
        raise Unsupported(f"onchip: expected a GPU of compute capability 8.0 or more, got {major}.{minor}")
    from torchpact.engines.onchip.driver import load, shared_limit
    from torchpact.engines.onchip.nvrtc import compiler

    compiler()  # which may fail
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
    """A network as the kernel wants it; ``load`` makes a kernel of a plan. Threads may share it."""

    def __init__(
        self, net: ResNet, blocks: Sequence[FoldedBlock], load: Callable[[Plan], Kernel], device: Device
    ) -> None:
        self.config, self.dtype = net.config, net.stem.weight.dtype
        self.load, self.device = load, device
        self.loaded: dict[Plan, Kernel | str] = {}  # or why it cannot be
        self._loading = threading.Lock()
        self.stem, self.last = pack_stem(net.stem), pack_last(net.norm, net.classifier)
        common = {"stem": self.stem.data_ptr(), "last": self.last.data_ptr()}
        self.weights = [
            _Weights(block, folded, common) for block, folded in zip(net.blocks, blocks, strict=True)
        ]
        self.brief = any(weights.adaptive and not weights.details for weights in self.weights)
        self.kernels: dict[tuple[int, int, int], list[tuple[Plan, Kernel]]] = {}
        self.candidates(net.config.image_size, net.config.image_size, 1)  # which may fail

    @property
    def direct(self) -> bool:
        """Whether it starts so little that a CUDA graph would gain nothing: a kernel a block.

        Without a graph, outputs are written where the caller has them. Samples are drawn by many kernels.
        """
        return not any(weights.draws for weights in self.weights)

    def candidates(self, height: int, width: int, batch: int) -> list[list[Plan]]:
        """Return ways to run each block for so many images of this size, the likeliest first."""
        channels = tuple(weights.channels for weights in self.weights)
        half = self.dtype == torch.float16
        adaptive = any(weights.adaptive for weights in self.weights)
        return candidates(channels, height, width, self.config.classes, half, adaptive, batch, self.device)

    def prepare(self, height: int, width: int, batch: int) -> list[tuple[Plan, Kernel]]:
        """Return the kernels for so many images of this size, compiled at the first."""
        size = (height, width, batch)
        if size not in self.kernels:
            self.kernels[size] = self._with_kernels([plans[0] for plans in self.candidates(*size)])
        return self.kernels[size]

    def _with_kernels(self, plans: Sequence[Plan]) -> list[tuple[Plan, Kernel]]:
        with self._loading:
            new = [plan for plan in dict.fromkeys(plans) if plan not in self.loaded]
            if new:
                with ThreadPoolExecutor(8) as pool:  # each takes seconds to compile
                    self.loaded.update(zip(new, pool.map(self._load, new), strict=True))
        found = []
        for plan in plans:
            kernel = self.loaded[plan]
            if isinstance(kernel, str):
                raise Unsupported(kernel)
            found.append((plan, kernel))
        return found

    def _load(self, plan: Plan) -> Kernel | str:
        try:
            return self.load(plan)
        except Unsupported as problem:
            return str(problem)

    def tune(self, images: Tensor) -> None:
        """For images of this size, take the kernels that are the fastest with these."""
        height, width = images.shape[2:]
        by_block = self.candidates(height, width, len(images))
        self._with_kernels([plan for plans in by_block for plan in plans])
        chosen, u = [], images
        for plans, weights in zip(by_block, self.weights, strict=True):
            ways = {str(i): way for i, way in enumerate(self._with_kernels(plans))}
            if len(ways) > 1:
                runs = {name: partial(weights.run, *way, u) for name, way in ways.items()}
                seconds = interleaved(runs, seconds=0.1, most=50)
                best = ways[min(ways, key=seconds.__getitem__)]
            else:
                best = ways["0"]
            chosen.append(best)
            u, _ = weights.run(*best, u)
        self.kernels[height, width, len(images)] = chosen

    def __call__(self, images: Tensor) -> Outputs:
        """Run the network."""
        batch, _, height, width = images.shape
        ponders: list[Ponder] = []
        u, nan = images, None
        if self.brief:
            nan = torch.empty((), dtype=torch.float32, device=images.device)
        for (plan, kernel), weights in zip(self.prepare(height, width, batch), self.weights, strict=True):
            u, ponder = weights.run(plan, kernel, u, nan)
            if ponder is not None:
                ponders.append(ponder)
        if nan is not None:
            nan.fill_(torch.nan)  # last, for the first kernel waits for the host
        return u, ponders


class _Weights:
    """A block: what its kernel reads, and the tensors that it writes.

    The device waits for what the host does until its first kernel starts, so a call does little: what does
    not change from call to call is kept.
    """

    def __init__(self, block: Any, folded: FoldedBlock, common: dict[str, int]) -> None:
        units, heads = list(block.steps), folded.heads
        self.mode: Mode = folded.mode
        self.units, self.adaptive = len(units), bool(heads)
        self.details, self.draws = folded.details, self.adaptive and isinstance(self.mode, Discrete)
        self.channels = units[-1].conv2.weight.size(0)
        self.convolutions, self.norms = pack_convolutions(units), pack_norms(units)
        self.common = common | {"weights": self.convolutions.data_ptr(), "norms": self.norms.data_ptr()}
        if heads:
            heads = heads[: self.units - 1]
            self.heads = pack_heads(heads)
            self.common["heads"] = self.heads.data_ptr()
            self.pools = pack_pools(heads)
            self.common["pools"] = self.pools.data_ptr()
        self.known: dict[int, Args] = {}

    def run(
        self, plan: Plan, kernel: Kernel, u: Tensor, nan: Tensor | None = None
    ) -> tuple[Tensor, Ponder | None]:
        """Run the block on a map, or the first one on images; what is not kept is ``nan``."""
        batch = len(u)
        args = self.args(batch)
        output = u.new_empty(
            (batch, plan.classes) if plan.last else (batch, plan.height, plan.width, plan.channels)
        )
        args.input, args.output = u.data_ptr(), output.data_ptr()
        if plan.entry_stride == 1:
            args.image_stride, args.channel_stride, args.row_stride, args.column_stride = u.stride()
        ponder = None
        if self.adaptive:
            ponder = self.ponder(args, (batch, 1, plan.height, plan.width), u.device, nan)
        if ponder is not None and self.draws:
            bounds = self.drawn(ponder.probs)
            args.bounds, args.keep_logits = bounds.data_ptr(), True
        if batch:
            kernel(args, -(-batch // plan.images))
        if ponder is not None and self.draws:
            score = self.mode.log_prob(ponder.probs, ponder.steps)
            ponder = ponder._replace(probs=torch.sigmoid(ponder.probs), log_prob=score)
        return output, ponder

    def args(self, batch: int) -> Args:
        """Return an argument with what does not change from call to call."""
        if batch not in self.known:
            args = Args(batch=batch, units=self.units, **self.common)
            if isinstance(self.mode, Thresholded):
                args.bound = self.mode.bound
            self.known[batch] = args
        return Args.from_buffer_copy(self.known[batch])

    def ponder(self, args: Args, shape: tuple[int, ...], device: torch.device, nan: Tensor | None) -> Ponder:
        """Return what the kernel is going to fill, and tell it where that is."""
        steps = torch.empty(shape, dtype=torch.long, device=device)
        cost = torch.empty(shape, dtype=torch.float32, device=device)
        args.steps, args.cost = steps.data_ptr(), cost.data_ptr()
        if not self.details:
            return _decisions(self.units, steps, cost, nan)
        probs = torch.empty((self.units, *shape), dtype=torch.float32, device=device)
        expected = torch.empty(shape, dtype=torch.float32, device=device)
        args.probs, args.expected = probs.data_ptr(), expected.data_ptr()
        return Ponder(probs, steps, expected, cost, None)

    def drawn(self, like: Tensor) -> Tensor:
        """Return what logits must exceed, as the dense engine draws it: for every position, halted or not."""
        assert isinstance(self.mode, Discrete)
        return torch.stack([-self.mode.noise(each) for each in like[1:]])
