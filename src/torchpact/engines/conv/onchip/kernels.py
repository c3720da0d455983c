"""Blocks as the kernel of the engine ``onchip`` wants them: plans are chosen, loaded and called."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from torchpact.core.ponder import Ponder
from torchpact.engines.base import Unsupported
from torchpact.engines.conv.onchip.calls import Call, Kernel, Weights
from torchpact.engines.conv.onchip.plan import Device, Plan
from torchpact.engines.graphs import replayed
from torchpact.engines.timing import interleaved
from torchpact.specs.blocks import Bounds

Outputs = tuple[Tensor, list[Ponder]]

MOST_CALLS = 256
"""Sizes and layouts of images for which it is remembered how they run."""


def on_device(device: torch.device) -> tuple[Callable[[Plan], Kernel], Device]:
    """Return what loads a block's kernel on a GPU, and what plans have to know of that."""
    if device.type != "cuda":
        raise Unsupported(f"onchip: expected a network on a GPU, got one on {device}")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 0):
        raise Unsupported(f"onchip: expected a GPU of compute capability 8.0 or more, got {major}.{minor}")
    from torchpact.engines.conv.onchip.driver import load, shared_limit
    from torchpact.engines.conv.onchip.nvrtc import compiler

    compiler()  # which may fail
    count = torch.cuda.get_device_properties(device).multi_processor_count
    limits = Device(shared_limit(device), count, overlaps=major >= 9, clusters=major >= 9)
    return partial(load, device=device), limits


class Kernels:
    """Blocks as the kernel wants them; ``load`` makes a kernel of a plan. Threads may share it."""

    rows = 2  # the dimension of inputs that is their height; the next is their width

    def __init__(self, weights: Sequence[Weights], load: Callable[[Plan], Kernel], device: Device) -> None:
        self.weights, self.load, self.device = weights, load, device
        self.loaded: dict[Plan, Kernel | str] = {}  # or why it cannot be
        self._loading = threading.Lock()
        self.kernels: dict[tuple[int, int, int], list[tuple[Plan, Kernel]]] = {}
        self.calls: dict[tuple[torch.Size, tuple[int, ...]], Call | str] = {}  # or why there is none

    def candidates(self, height: int, width: int, batch: int) -> list[list[Plan]]:
        """Return ways to run each block for so many inputs of this size, the likeliest first."""
        raise NotImplementedError

    def size_of(self, images: Tensor) -> tuple[int, int, int]:
        """Return the height and width of the inputs, and how many there are."""
        return images.size(self.rows), images.size(self.rows + 1), len(images)

    def prepare(self, height: int, width: int, batch: int) -> list[tuple[Plan, Kernel]]:
        """Return the kernels for so many inputs of this size, compiled at the first."""
        size = (height, width, batch)
        if size not in self.kernels:
            by_block = self.candidates(*size)
            self._load_all(plans[0] for plans in by_block)  # at once; others only where these cannot be
            self.kernels[size] = [self._first_loaded(plans) for plans in by_block]
        return self.kernels[size]

    def _first_loaded(self, plans: Sequence[Plan]) -> tuple[Plan, Kernel]:
        for plan in plans:
            self._load_all([plan])
            kernel = self.loaded[plan]
            if not isinstance(kernel, str):
                return plan, kernel
        raise Unsupported(str(self.loaded[plans[0]]))

    def with_kernels(self, plans: Sequence[Plan]) -> list[tuple[Plan, Kernel]]:
        """Return those of the plans that can be loaded: one of them, at least."""
        self._load_all(plans)
        loaded = [(plan, self.loaded[plan]) for plan in plans]
        found = [(plan, kernel) for plan, kernel in loaded if not isinstance(kernel, str)]
        if not found:
            raise Unsupported(str(loaded[0][1]))
        return found

    def _load_all(self, plans: Iterable[Plan]) -> None:
        with self._loading:
            new = [plan for plan in dict.fromkeys(plans) if plan not in self.loaded]
            if new:
                with ThreadPoolExecutor(8) as pool:  # each takes seconds to compile
                    self.loaded.update(zip(new, pool.map(self._load, new), strict=True))

    def _load(self, plan: Plan) -> Kernel | str:
        try:
            return self.load(plan)
        except Unsupported as problem:
            return str(problem)

    def choose(self, images: Tensor) -> None:
        """For inputs of this size, take the kernels that are the fastest with these."""
        size = self.size_of(images)
        by_block = self.candidates(*size)
        self._load_all(plan for plans in by_block for plan in plans)
        chosen, u = [], images
        for plans, weights in zip(by_block, self.weights, strict=True):
            ways = {str(i): way for i, way in enumerate(self.with_kernels(plans))}
            calls = {name: Call([(*way, weights)], u) for name, way in ways.items()}
            best = "0"
            if len(ways) > 1:
                runs: dict[str, Callable[[], object]] = {
                    name: partial(call, u) for name, call in calls.items()
                }
                if not weights.draws:  # from generators, which a graph would have to know
                    runs = {name: replayed(run, u.device) for name, run in runs.items()}
                seconds = interleaved(runs, seconds=0.1, most=50)
                best = min(ways, key=seconds.__getitem__)
            chosen.append(ways[best])
            u, _ = calls[best](u)
        self.kernels[size] = chosen
        self.calls.clear()

    def run(self, images: Tensor, bounds: Mapping[str, Bounds] | None = None) -> Outputs:
        """Run the blocks, with these bounds by their names.

        Raises:
            Unsupported: There is no kernel for inputs of this size.

        """
        layout = images.shape, images.stride()
        call = self.calls.get(layout)
        if call is None:
            call = self._prepared(images)
            if len(self.calls) >= MOST_CALLS:
                self.calls.clear()
            self.calls[layout] = call
        if isinstance(call, str):
            raise Unsupported(call)
        return call(images, bounds)

    def _prepared(self, images: Tensor) -> Call | str:
        try:
            kernels = self.prepare(*self.size_of(images))
        except Unsupported as problem:
            return str(problem)
        return Call([(*each, weights) for each, weights in zip(kernels, self.weights, strict=True)], images)
