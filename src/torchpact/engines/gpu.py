"""The sparse engine for GPUs: Triton kernels over lists of active pixels, without a word from the host.

An iteration is four kernels: heads decide at active pixels, the lists are filtered, the first convolution
runs at pixels near active ones, the second at those themselves. Half precision and single; see gpu_kernels.
"""

import importlib.util
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact.block import Ponder
from torchpact.engines.folding import FoldedBlock, FoldedUnit, Runner, Unsupported, as_matrix
from torchpact.modes import Discrete, Thresholded
from torchpact.relaxation import logistic_noise

TILES_AT_ONCE = 8
"""Programs for every multiprocessor: enough to hide latency, few enough to start at once."""


def build(block: FoldedBlock) -> Runner:
    """Return a runner for a block with a decision for every pixel."""
    device, channels, head = block.weight.device, block.weight.size(0), block.head
    if head is None or head.conv is None or head.norm is not None or head.group > 1:
        raise Unsupported("gpu: expected a decision for every pixel, by heads without batch norm")
    if not isinstance(block.mode, Thresholded | Discrete):
        raise Unsupported(f"gpu: expected the mode thresholded or discrete, got {block.mode}")
    if channels % 16:
        raise Unsupported(f"gpu: expected channels in multiples of 16, got {channels}")
    if importlib.util.find_spec("triton") is None:
        raise Unsupported("gpu: expected the package triton to be installed")
    if device.type != "cuda":
        raise Unsupported(f"gpu: expected a network on a GPU, got one on {device}")
    return SparseGPUBlock(block)


class SparseGPUBlock:
    """A block that computes convolutions at active pixels only."""

    def __init__(self, block: FoldedBlock) -> None:
        self.mode = block.mode
        self.max_steps = len(block.units)
        self.first = block.units[0]
        self.units = [_Unit(unit) for unit in block.units[1:]]
        self.heads = [
            (as_matrix(head.conv.weight.detach()).float().flatten(), head.linear)
            for head in block.heads[: len(self.units)]
            if head.conv is not None
        ]
        self.channels = block.weight.size(0)
        power = self.channels & -self.channels  # the largest power of two that divides it
        self.n, self.k = min(power, 128), min(power, 64)
        self.p = 128 if self.n < 128 else 64
        exact = block.weight.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32
        self.precision = "ieee" if exact else "tf32"
        self.programs = 4
        if block.weight.device.type == "cuda":
            properties = torch.cuda.get_device_properties(block.weight.device)
            self.programs = TILES_AT_ONCE * properties.multi_processor_count

    @torch.no_grad()
    def __call__(self, u: Tensor) -> tuple[Tensor, Ponder | None]:
        """Run the block."""
        from torchpact.engines import gpu_kernels as kernels

        u = self.first(u).permute(0, 2, 3, 1).contiguous()
        batch, height, width, channels = u.shape
        run = _Decisions(u, self.max_steps)
        sums = u.sum((1, 2), dtype=torch.float32)
        middle = torch.empty_like(u)
        pixels = batch * height * width
        everyone = torch.arange(pixels, dtype=torch.int32, device=u.device)
        counts = torch.zeros(len(self.units) + 1, 2, dtype=torch.int32, device=u.device)
        counts[0] = pixels
        near, active = everyone, everyone
        size = {"height": height, "width": width}
        for k, (unit, (weight, linear)) in enumerate(zip(self.units, self.heads, strict=True)):
            pooled = F.linear(sums / (height * width), linear.weight.float(), linear.bias.float()).flatten()
            noise = self._noise(run.steps)
            _launch(kernels.decide, self._tiles(pixels, 64))(
                u, weight, pooled, noise, active, counts[k, 1], run.goes_on, run.steps, run.probs[k],
                run.survival, run.expected, run.log_q, k + 1, self._bound, **size,
                C=channels, P=64, K=self.k, SAMPLES=isinstance(self.mode, Discrete),
            )  # fmt: skip
            old, near, active = near, torch.empty_like(near), torch.empty_like(near)
            _launch(kernels.filter_lists, self._tiles(pixels, 256))(
                old,
                counts[k, 0],
                run.goes_on,
                near,
                counts[k + 1, 0],
                active,
                counts[k + 1, 1],
                **size,
                P=256,
            )
            shape = {"C": channels, "P": self.p, "N": self.n, "K": self.k, "PRECISION": self.precision}
            grid = (*self._tiles(pixels, self.p), channels // self.n)
            _launch(kernels.convolve, grid)(
                u, unit.weight1, unit.scale, unit.shift, unit.bias1, middle, sums,
                near, counts[k + 1, 0], **size, **shape, FIRST=True,
            )  # fmt: skip
            _launch(kernels.convolve, grid)(
                middle, unit.weight2, unit.scale, unit.shift, unit.bias1, u, sums,
                active, counts[k + 1, 1], **size, **shape, FIRST=False,
            )  # fmt: skip
        return u.permute(0, 3, 1, 2), run.ponder(self.mode)

    def _tiles(self, pixels: int, tile: int) -> tuple[int]:
        return (max(1, min(self.programs, -(-pixels // tile))),)

    def _noise(self, like: Tensor) -> Tensor:
        if isinstance(self.mode, Discrete):
            # as the dense engine draws it: for every position, halted or not
            shape = like.unsqueeze(1).to(torch.float32)
            return logistic_noise(shape, self.mode.generator)
        return like  # not read

    @property
    def _bound(self) -> float:
        if isinstance(self.mode, Thresholded):
            return math.log(self.mode.threshold) - math.log1p(-self.mode.threshold)
        return 0.0


class _Unit:
    """The weights of a unit as the kernels want them."""

    def __init__(self, unit: FoldedUnit) -> None:
        self.weight1, self.weight2 = as_matrix(unit.weight1), as_matrix(unit.weight2)
        self.scale, self.shift, self.bias1 = (
            x.flatten().float().contiguous() for x in (unit.scale, unit.shift, unit.bias1)
        )


class _Decisions:
    """What is known of every pixel while a block runs."""

    def __init__(self, u: Tensor, max_steps: int) -> None:
        shape = u.shape[:3]
        single = {"dtype": torch.float32, "device": u.device}
        self.probs = torch.ones(max_steps, *shape, **single)  # type: ignore[call-overload]
        self.survival = torch.ones(shape, **single)  # type: ignore[call-overload]
        self.expected = torch.ones(shape, **single)  # type: ignore[call-overload]
        self.log_q = torch.zeros(shape, **single)  # type: ignore[call-overload]
        self.steps = torch.ones(shape, dtype=torch.long, device=u.device)
        self.goes_on = torch.zeros(shape, dtype=torch.uint8, device=u.device)

    def ponder(self, mode: Any) -> Ponder:
        steps = self.steps.unsqueeze(1)
        return Ponder(
            probs=self.probs.unsqueeze(2),
            steps=steps,
            expected_steps=self.expected.unsqueeze(1),
            cost=steps.float(),
            log_prob=self.log_q.unsqueeze(1) if isinstance(mode, Discrete) else None,
        )


def _launch(kernel: Any, grid: tuple[int, ...]) -> Any:
    return kernel[grid]
