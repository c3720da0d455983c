"""3×3 convolutions of few channels for training on a GPU, where cuDNN's take more than twice as long.

The maps are channels-last. A program of the convolution has some pixels and adds up nine products of
(pixels × channels) with (channels × channels), one for each tap of the kernel. The gradient of the input is
the same convolution with the kernel turned around; that of the kernel is summed over chunks of pixels first,
and then over the chunks, always in the same order.

Several kernels may be given at once, of as many networks that are trained together: each is for its share of
the batch, one after the other.
"""

from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.library import triton_op, wrap_triton
from torch.nn import functional as F

from torchpact_recipes.training.module_replacement import replace_modules, with_class

M = TypeVar("M", bound=nn.Module)

CHANNELS = (16, 32, 64)
"""Where these are faster than cuDNN; see benchmarks/narrow_conv.py."""

IMAGE = 3
"""The channels of what a stem is given; it is padded with zeros to as many as come out."""

# by channels, the fastest of 12 to 18 settings each on an H200, for 128 maps of CIFAR's sizes, alone or with
# seven others at once
TILES = {16: (128, 2), 32: (256, 4), 64: (64, 4)}
"""Pixels and warps of a program."""
CHUNKS = {16: (512, 64, 1), 32: (256, 64, 2), 64: (256, 64, 4)}
"""Pixels of a program of the kernel's gradient, how many at a time, and its warps."""
MANY = 4
"""Networks from which on chunks are twice as large: they are enough, and half as much is added up."""
STAGES = 3
"""Taps on their way while one is multiplied."""


@triton.jit  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    x, kernel, y, height, width, end,
    C: tl.constexpr, TURNED: tl.constexpr, PIXELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``kernel`` lies as outputs × taps × inputs; ``TURNED`` around, its outputs are what comes in."""
    network = tl.program_id(1).to(tl.int64)
    x, y, kernel = x + network * end * C, y + network * end * C, kernel + network * 9 * C * C
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    row, column = pixel // width % height, pixel % width
    # a bit for each tap that lies inside of the image
    rows = tl.where(row > 0, 0b111, 0) | 0b111000 | tl.where(row < height - 1, 0b111000000, 0)
    columns = (
        tl.where(column > 0, 0b001001001, 0) | 0b010010010 | tl.where(column < width - 1, 0b100100100, 0)
    )
    inside = tl.where(pixel < end, rows & columns, 0)
    c = tl.arange(0, C)
    at = pixel.to(tl.int64)[:, None] * C + c[None, :]
    inputs_at = x + at
    weights_at = kernel + c[:, None] * (9 * C) + c[None, :]
    total = tl.zeros((PIXELS, C), tl.float32)
    for tap in tl.range(0, 9, num_stages=STAGES):
        offset = ((tap // 3 - 1) * width + tap % 3 - 1) * C
        inputs = tl.load(inputs_at + offset, mask=((inside >> tap) & 1)[:, None] != 0, other=0)
        if TURNED:  # noqa: SIM108 — only one of the two is compiled
            weights = tl.load(weights_at + (8 - tap) * C)
        else:
            weights = tl.trans(tl.load(weights_at + tap * C))
        total = tl.dot(inputs, weights, total)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=(pixel < end)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _kernel_gradient(  # type: ignore[no-untyped-def]
    x, dy, sums, height, width, end, C: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr
):
    """One row of the kernel: its three taps share what they load of ``dy``."""
    i = tl.program_id(1) - 1
    network = tl.program_id(2).to(tl.int64)
    x, dy = x + network * end * C, dy + network * end * C
    c = tl.arange(0, C)
    left = tl.zeros((C, C), tl.float32)
    middle = tl.zeros((C, C), tl.float32)
    right = tl.zeros((C, C), tl.float32)
    for start in range(0, CHUNK, STEP):
        pixel = tl.program_id(0) * CHUNK + start + tl.arange(0, STEP)
        row, column = pixel // width % height + i, pixel % width
        there = (pixel < end) & (row >= 0) & (row < height)
        at = x + (pixel + i * width).to(tl.int64)[:, None] * C + c[None, :]
        gradient = tl.load(
            dy + pixel.to(tl.int64)[:, None] * C + c[None, :], mask=(pixel < end)[:, None], other=0
        )
        gradient = tl.trans(gradient)
        left = tl.dot(gradient, tl.load(at - C, mask=(there & (column > 0))[:, None], other=0), left)
        middle = tl.dot(gradient, tl.load(at, mask=there[:, None], other=0), middle)
        right = tl.dot(
            gradient, tl.load(at + C, mask=(there & (column < width - 1))[:, None], other=0), right
        )
    chunk = network * tl.num_programs(0) + tl.program_id(0)
    at = sums + ((chunk * 3 + i + 1) * C + c)[:, None] * (3 * C) + c[None, :]
    tl.store(at, left)
    tl.store(at + C, middle)
    tl.store(at + 2 * C, right)


@triton_op("torchpact::narrow_conv", mutates_args={})
def narrow_conv(x: Tensor, weight: Tensor, turned: bool = False) -> Tensor:
    """What ``F.conv2d(x, weight, padding=1)`` is, for a 3×3 kernel of as many outputs as inputs.

    ``turned``, it is what ``F.conv_transpose2d`` is: the gradient of the input. With a dimension more than
    that, ``weight`` is the kernels of several networks.
    """
    _, channels, height, width = x.shape
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.empty_like(x)
    networks = _networks(weight)
    end = x.size(0) // networks * height * width
    pixels, warps = TILES[channels]
    wrap_triton(_convolve)[(triton.cdiv(end, pixels), networks)](
        x, weight.movedim(-3, -1).contiguous(), y, height, width, end,
        C=channels, TURNED=turned, PIXELS=pixels, STAGES=STAGES, num_warps=warps,
    )  # fmt: skip
    return y


def _networks(weight: Tensor) -> int:
    return weight.size(0) if weight.dim() == 5 else 1


@triton_op("torchpact::narrow_conv_weight_gradient", mutates_args={})
def _weight_gradient(x: Tensor, dy: Tensor, networks: int = 1) -> Tensor:
    """The gradients of the kernels of so many networks, in single precision."""
    _, channels, height, width = x.shape
    x = x.contiguous(memory_format=torch.channels_last)
    dy = dy.contiguous(memory_format=torch.channels_last)
    end = x.size(0) // networks * height * width
    chunk, step, warps = CHUNKS[channels]
    if networks >= MANY:
        chunk *= 2
    chunks = triton.cdiv(end, chunk)
    sums = x.new_empty(networks, chunks, 3, channels, 3 * channels, dtype=torch.float32)
    wrap_triton(_kernel_gradient)[(chunks, 3, networks)](
        x, dy, sums, height, width, end,
        C=channels, CHUNK=chunk, STEP=step, num_warps=warps,
    )  # fmt: skip
    # from rows of the kernel, outputs, columns, inputs; inputs lie last, as in the weight
    gradient = sums.sum(1).view(networks, 3, channels, 3, channels).permute(0, 2, 1, 3, 4)
    return gradient.contiguous().permute(0, 1, 4, 2, 3)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    x, weight, turned = inputs
    assert not turned  # which is a gradient already
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    gradient = _weight_gradient(x, dy, _networks(weight)).to(weight.dtype)
    return narrow_conv(dy, weight, True), gradient.view_as(weight), None


narrow_conv.register_autograd(_backward, setup_context=_setup)


class NarrowConv2d(nn.Conv2d):
    """nn.Conv2d that takes the kernels above where it can; for half precision on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve."""
        if not torch.is_autocast_enabled(x.device.type) or x.device.type != "cuda":
            return super().forward(x)
        return self.by_kernels(x, torch.get_autocast_dtype("cuda"))

    def by_kernels(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Convolve in this precision."""
        missing = (0, 0, 0, 0, 0, self.out_channels - self.in_channels)
        y: Tensor = narrow_conv(F.pad(x.to(dtype), missing), F.pad(self.weight.to(dtype), missing))
        return y


def fits(conv: nn.Module, kind: type[nn.Conv2d] = nn.Conv2d) -> bool:
    """Whether the kernels above do what this convolution of a kind does, and are faster."""
    return (
        type(conv) is kind
        and conv.in_channels in (conv.out_channels, IMAGE)
        and conv.out_channels in CHANNELS
        and is_three_by_three(conv, stride=1)
    )


def is_three_by_three(conv: nn.Conv2d, stride: int) -> bool:
    """Whether a convolution is 3×3 of this stride, padded with zeros, and nothing else."""
    return (
        (conv.kernel_size, conv.stride, conv.padding) == ((3, 3), (stride, stride), (1, 1))
        and (conv.dilation, conv.groups, conv.bias) == ((1, 1), 1, None)
        and conv.padding_mode == "zeros"
    )


def with_narrow_convs(model: M) -> M:
    """Return a model whose convolutions, where they fit, use the kernels above.

    They are replaced in the model itself; names and parameters stay as they are.
    """
    return replace_modules(model, lambda module: with_class(module, NarrowConv2d) if fits(module) else module)
