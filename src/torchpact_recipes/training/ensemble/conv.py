"""3×3 convolutions of several networks that are trained together, for a GPU.

Those of stride 1 are narrow_conv.py's, which are for several networks as for one. Those of stride 2 are here:
a network has two of them, which cuDNN does well, but it would have to be asked for each network in turn. As
there, a program adds up the products of nine taps for some pixels.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.library import triton_op, wrap_triton

from torchpact_recipes.training.kernels import narrow_conv

PIXELS, WARPS = 64, 4
"""Of a program."""
CHUNK, STEP = 512, 64
"""Pixels of a program of the kernel's gradient, and how many at a time."""


@triton.jit  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    x, kernel, y, x_height, x_width, height, width, end,
    FROM: tl.constexpr, TO: tl.constexpr, TURNED: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Convolve ``x`` to ``y``, of so many channels; ``TURNED``, ``x`` is a gradient of the output.

    ``kernel`` lies as outputs × taps × inputs; the last size and ``end`` are those of ``y``.
    """
    network = tl.program_id(1).to(tl.int64)
    images = end // (height * width)
    x, y = x + network * images * x_height * x_width * FROM, y + network * end * TO
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    image, row, column = pixel // (height * width), pixel // width % height, pixel % width
    c, d = tl.arange(0, FROM), tl.arange(0, TO)
    kernel += network * 9 * FROM * TO
    total = tl.zeros((PIXELS, TO), tl.float32)
    for tap in range(9):
        if TURNED:
            i, j = row + 1 - tap // 3, column + 1 - tap % 3  # twice where the output is
            there = (i >= 0) & (j >= 0) & (i % 2 == 0) & (j % 2 == 0)
            i, j = i // 2, j // 2
            weights = tl.load(kernel + c[:, None] * (9 * TO) + tap * TO + d[None, :])
        else:
            i, j = 2 * row + tap // 3 - 1, 2 * column + tap % 3 - 1
            there = (i >= 0) & (j >= 0)
            weights = tl.trans(tl.load(kernel + d[:, None] * (9 * FROM) + tap * FROM + c[None, :]))
        there = there & (pixel < end) & (i < x_height) & (j < x_width)
        at = (image.to(tl.int64) * x_height + i) * x_width + j
        values = tl.load(x + at[:, None] * FROM + c[None, :], mask=there[:, None], other=0)
        total = tl.dot(values, weights, total)
    at = pixel.to(tl.int64)[:, None] * TO + d[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=(pixel < end)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _kernel_gradient(  # type: ignore[no-untyped-def]
    x, dy, sums, x_height, x_width, height, width, end,
    IN: tl.constexpr, OUT: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One row of the kernel: its three taps share what they load of ``dy``."""
    tap_row = tl.program_id(1)
    network = tl.program_id(2).to(tl.int64)
    images = end // (height * width)
    x, dy = x + network * images * x_height * x_width * IN, dy + network * end * OUT
    i, o = tl.arange(0, IN), tl.arange(0, OUT)
    left = tl.zeros((OUT, IN), tl.float32)
    middle = tl.zeros((OUT, IN), tl.float32)
    right = tl.zeros((OUT, IN), tl.float32)
    for start in range(0, CHUNK, STEP):
        pixel = tl.program_id(0) * CHUNK + start + tl.arange(0, STEP)
        image, above = pixel // (height * width), 2 * (pixel // width % height) + tap_row - 1
        column = 2 * (pixel % width)
        there = (pixel < end) & (above >= 0) & (above < x_height)
        at = x + ((image.to(tl.int64) * x_height + above) * x_width + column)[:, None] * IN + i[None, :]
        gradient = tl.load(
            dy + pixel.to(tl.int64)[:, None] * OUT + o[None, :], mask=(pixel < end)[:, None], other=0
        )
        gradient = tl.trans(gradient)
        left = tl.dot(gradient, tl.load(at - IN, mask=(there & (column > 0))[:, None], other=0), left)
        middle = tl.dot(gradient, tl.load(at, mask=there[:, None], other=0), middle)
        right = tl.dot(
            gradient, tl.load(at + IN, mask=(there & (column + 1 < x_width))[:, None], other=0), right
        )
    chunk = network * tl.num_programs(0) + tl.program_id(0)
    at = sums + ((chunk * 3 + tap_row) * OUT + o)[:, None] * (3 * IN) + i[None, :]
    tl.store(at, left)
    tl.store(at + IN, middle)
    tl.store(at + 2 * IN, right)


def _sizes(source: Tensor, target: Tensor, networks: int) -> tuple[int, ...]:
    """Sizes of the one's maps and of the other's, and the latter's pixels for each network."""
    height, width = target.shape[2:]
    return *source.shape[2:], height, width, target.size(0) // networks * height * width


def _launch(x: Tensor, weight: Tensor, y: Tensor, turned: bool) -> None:
    networks = len(weight)
    sizes = _sizes(x, y, networks)
    wrap_triton(_convolve)[(triton.cdiv(sizes[-1], PIXELS), networks)](
        x, weight.movedim(2, -1).contiguous(), y, *sizes,
        FROM=x.size(1), TO=y.size(1), TURNED=turned, PIXELS=PIXELS, num_warps=WARPS,
    )  # fmt: skip


@triton_op("torchpact::strided_conv", mutates_args={})
def strided_conv(x: Tensor, weight: Tensor) -> Tensor:
    """What ``F.conv2d(x, weight, stride=2, padding=1)`` is, for 3×3 kernels of several networks.

    The first dimension of ``weight`` is the network's; images of the networks lie one after the other.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    height, width = ((size + 1) // 2 for size in x.shape[2:])
    y = torch.empty(
        (len(x), weight.size(1), height, width),
        dtype=x.dtype, device=x.device, memory_format=torch.channels_last,
    )  # fmt: skip
    _launch(x, weight, y, turned=False)
    return y


@triton_op("torchpact::strided_conv_gradients", mutates_args={})
def _gradients(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the maps, and that of the kernels in single precision."""
    networks, outputs, inputs = weight.shape[:3]
    x = x.contiguous(memory_format=torch.channels_last)
    dy = dy.contiguous(memory_format=torch.channels_last)
    dx = torch.empty_like(x)
    _launch(dy, weight, dx, turned=True)
    sizes = _sizes(x, dy, networks)
    chunks = triton.cdiv(sizes[-1], CHUNK)
    sums = x.new_empty(networks, chunks, 3, outputs, 3 * inputs, dtype=torch.float32)
    wrap_triton(_kernel_gradient)[(chunks, 3, networks)](
        x, dy, sums, *sizes, IN=inputs, OUT=outputs, CHUNK=CHUNK, STEP=STEP, num_warps=WARPS
    )
    # from rows of the kernel, outputs, columns, inputs
    gradient = sums.sum(1).view(networks, 3, outputs, 3, inputs).permute(0, 2, 4, 1, 3)
    return dx, gradient.contiguous()


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    dx, gradient = _gradients(x, weight, dy)
    return dx, gradient.to(weight.dtype)


strided_conv.register_autograd(_backward, setup_context=_setup)


def fits(conv: nn.Conv2d) -> bool:
    """Whether the kernels above do what this convolution does."""
    known = {conv.in_channels, conv.out_channels} <= set(narrow_conv.CHANNELS)
    return known and narrow_conv.is_three_by_three(conv, stride=2)


def by_kernels(conv: nn.Conv2d, x: Tensor) -> Tensor | None:
    """Convolve the maps of several networks, in autocast's precision; None where no kernel is for that."""
    dtype = torch.get_autocast_dtype("cuda")
    if narrow_conv.fits(conv, type(conv)):
        return narrow_conv.NarrowConv2d.by_kernels(conv, x, dtype)  # type: ignore[arg-type]
    if fits(conv):
        found: Tensor = strided_conv(x.to(dtype), conv.weight.to(dtype))
        return found
    return None
