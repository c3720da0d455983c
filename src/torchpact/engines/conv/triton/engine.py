"""The engine "gpu": blocks on a GPU by Triton kernels over lists of active pixels; see ``block.py``."""

import importlib.util
from collections.abc import Mapping
from typing import ClassVar

import torch

from torchpact.core.call_args import CallArgs
from torchpact.core.modes import Discrete, Thresholded
from torchpact.engines.base import NO_CONTEXT, Engine, Unsupported
from torchpact.engines.build_cache import protect_compiler_caches
from torchpact.engines.conv.support import conv_block_problem, decides_per_pixel
from torchpact.engines.conv.triton.block import SparseGPUBlock
from torchpact.specs import BlockSpec, ConvUnit, NetworkSpec


class TritonEngine(Engine):
    """Blocks of residual units on a GPU with a decision for every pixel."""

    name = "gpu"
    kinds = (ConvUnit,)
    devices = ("cuda",)
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float32: 1e-5,
        torch.float16: 1e-2,
        torch.bfloat16: 1e-2,
    }

    def supports(self, spec: BlockSpec | NetworkSpec, example: CallArgs) -> str | None:
        """Return None if it can run a block, or one line that says why not."""
        if isinstance(spec, NetworkSpec):
            return "gpu: expected a block, got a network"
        problem = conv_block_problem(spec)
        if problem is not None:
            return problem
        units = spec.conv_units
        assert units is not None  # as there is no problem
        weight, channels = units[0].weight, units[0].channels
        if not decides_per_pixel(spec):
            return "gpu: expected a decision for every pixel, by heads without batch norm"
        if units[0].padding < 0:
            return "gpu: expected a first unit that makes no fewer channels than it is given"
        if type(spec.mode) not in (Thresholded, Discrete):
            return f"gpu: expected the mode thresholded or discrete, got {spec.mode}"
        if channels % 16 or weight.size(0) % 16:
            least = channels if channels % 16 else weight.size(0)
            return f"gpu: expected channels in multiples of 16, got {least}"
        if importlib.util.find_spec("triton") is None:
            return "gpu: expected the package triton to be installed"
        if weight.device.type != "cuda":
            return f"gpu: expected a network on a GPU, got one on {weight.device}"
        return None

    def build(self, spec: BlockSpec | NetworkSpec, example: CallArgs = NO_CONTEXT) -> SparseGPUBlock:
        """Return a runner of a block.

        Raises:
            Unsupported: It cannot run it.

        """
        problem = self.supports(spec, example)
        if problem is not None:
            raise Unsupported(problem)
        assert isinstance(spec, BlockSpec)
        protect_compiler_caches()
        return SparseGPUBlock(spec)


GPU = TritonEngine()
