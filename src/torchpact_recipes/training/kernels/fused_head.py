"""Halting heads for training on a GPU, with one kernel for the logits and one for their gradients.

A head's logits are few numbers made of all of u: nine taps of a convolution to a single channel, and a
product with the mean over the map. A program has an image, so that the mean is its own affair, and reads it
once. The ten products are the ten columns of a matrix, that of u with the weights: a logit is the sum of nine
of its neighbours' and of the mean of the tenth. In the gradients, too: those of u are its product with the
weights, those of the weights its product with u.

Rows and biases may be those of several networks that are trained together: then each is for its share of the
batch, one after the other.
"""

from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.library import triton_op, wrap_triton

from torchpact.models import HaltingHead
from torchpact.nn.conv_units import average_patches, join_patches, stacked_rows
from torchpact_recipes.training.module_replacement import replace_modules, with_class

M = TypeVar("M", bound=nn.Module)

TILE = 8192
"""Values that a program holds at a time."""
WARPS = {"logits": 8, "gradients": 4}
"""Of a program: the faster of 4, 8 and 16 on an H200, for 128 maps of 32×16×16."""

ROWS = 16
"""Nine taps, the mean and the bias, to a power of two."""


@triton.jit  # type: ignore[untyped-decorator]
def _logits(  # type: ignore[no-untyped-def]
    u, rows, bias, logits, products, images, height, width, C,
    WIDE: tl.constexpr, PIXELS: tl.constexpr, ROWS: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    network = tl.program_id(0) // images
    size = height * width
    start_of = tl.program_id(0).to(tl.int64) * size
    products += start_of * 9
    c, t = tl.arange(0, WIDE), tl.arange(0, ROWS)
    in_rows = (c < C)[:, None] & (t < 10)[None, :]
    weights = tl.load(rows + (network * 10 + t)[None, :] * C + c[:, None], mask=in_rows, other=0)
    pooled = tl.full((), 0.0, tl.float32)
    for start in range(0, size, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        here = (pixel < size)[:, None] & (c < C)[None, :]
        value = tl.load(u + (start_of + pixel)[:, None] * C + c[None, :], mask=here, other=0)
        if SINGLE:
            product = tl.dot(value, weights, input_precision="ieee")
        else:  # the weights as two halves, which have all of their digits
            first = weights.to(value.dtype)
            product = tl.dot(value, first)
            product = tl.dot(value, (weights - first.to(tl.float32)).to(value.dtype), product)
        pooled += tl.sum(tl.sum(tl.where((t == 9)[None, :], product, 0), 1), 0)
        at = products + t[None, :] * size + pixel[:, None]
        tl.store(at, product, mask=(pixel < size)[:, None] & (t < 9)[None, :])
    pooled = pooled / size + tl.load(bias + network)
    tl.debug_barrier()  # the products of all pixels are there
    for start in range(0, size, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        row, column = pixel // width, pixel % width
        logit = tl.zeros((PIXELS,), tl.float32)
        for tap in tl.static_range(9):
            i, j = tap // 3 - 1, tap % 3 - 1
            there = (row + i >= 0) & (row + i < height) & (column + j >= 0) & (column + j < width)
            logit += tl.load(products + tap * size + pixel + i * width + j, mask=there, other=0)
        tl.store(logits + start_of + pixel, logit + pooled, mask=pixel < size)


@triton.jit  # type: ignore[untyped-decorator]
def _gradients(  # type: ignore[no-untyped-def]
    dlogits, u, rows, du, sums, images, height, width, C,
    WIDE: tl.constexpr, PIXELS: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows += tl.program_id(0) // images * 10 * C
    size = height * width
    start_of = tl.program_id(0).to(tl.int64) * size
    c, t = tl.arange(0, WIDE), tl.arange(0, ROWS)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, size, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        total += tl.sum(tl.load(dlogits + start_of + pixel, mask=pixel < size, other=0), 0)
    in_rows = (t < 10)[:, None] & (c < C)[None, :]
    weights = tl.load(rows + t[:, None] * C + c[None, :], mask=in_rows, other=0).to(u.dtype.element_ty)
    i, j = (t // 3 - 1)[None, :], (t % 3 - 1)[None, :]
    products = tl.zeros((ROWS, WIDE), tl.float32)
    for start in range(0, size, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        row, column = (pixel // width)[:, None] - i, (pixel % width)[:, None] - j
        there = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        there = there & (pixel < size)[:, None] & (t < 9)[None, :]
        share = tl.load(dlogits + start_of + row * width + column, mask=there, other=0)
        share = tl.where((t == 9)[None, :], total / size, share).to(u.dtype.element_ty)
        here = (pixel < size)[:, None] & (c < C)[None, :]
        at = (start_of + pixel)[:, None] * C + c[None, :]
        gradient = tl.dot(share, weights, input_precision=PRECISION)
        tl.store(du + at, gradient.to(u.dtype.element_ty), mask=here)
        value = tl.load(u + at, mask=here, other=0)
        products = tl.dot(tl.trans(share), value, products, input_precision=PRECISION)
    products = tl.where((t == 10)[:, None], total, products)
    at = sums + (tl.program_id(0) * ROWS + t)[:, None] * C + c[None, :]
    tl.store(at, products, mask=(c < C)[None, :])


def _shape(u: Tensor) -> dict[str, int]:
    wide = max(triton.next_power_of_2(u.size(1)), 16)
    return {"C": u.size(1), "WIDE": wide, "PIXELS": max(TILE // wide, 16)}


@triton_op("torchpact::halting_logits", mutates_args={})
def halting_logits(u: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
    """The logits of maps: nine taps and the weights of the mean are the ``rows``; in single precision.

    With a dimension more than that, they are those of several networks, with a bias each.
    """
    u = u.contiguous(memory_format=torch.channels_last)
    batch, _, height, width = u.shape
    logits = u.new_empty(batch, 1, height, width, dtype=torch.float32)
    products = u.new_empty(batch, 9, height * width, dtype=torch.float32)
    wrap_triton(_logits)[(batch,)](
        u, rows.contiguous(), bias, logits, products, batch // bias.numel(), height, width,
        **_shape(u), ROWS=ROWS, SINGLE=u.dtype == torch.float32, num_warps=WARPS["logits"],
    )  # fmt: skip
    return logits


@triton_op("torchpact::halting_logits_gradients", mutates_args={})
def _all_gradients(dlogits: Tensor, u: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the maps, and of rows and bias for every image."""
    u = u.contiguous(memory_format=torch.channels_last)
    batch, channels, height, width = u.shape
    du = torch.empty_like(u)
    sums = u.new_empty(batch, ROWS, channels, dtype=torch.float32)
    wrap_triton(_gradients)[(batch,)](
        dlogits.contiguous(), u, rows.contiguous(), du, sums, batch // _networks(rows), height, width,
        **_shape(u), ROWS=ROWS, PRECISION="ieee", num_warps=WARPS["gradients"],
    )  # fmt: skip
    return du, sums


def _networks(rows: Tensor) -> int:
    return rows.size(0) if rows.dim() == 3 else 1


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, rows = ctx.saved_tensors
    du, sums = _all_gradients(dlogits, u, rows)
    total = sums.unflatten(0, (_networks(rows), -1)).sum(1)
    return du, total[:, :10].view_as(rows), total[:, 10, :1].flatten()


halting_logits.register_autograd(_backward, setup_context=_setup)


class FusedHead(HaltingHead):
    """A halting head that uses the kernels above where they serve: for the paper's heads, on a GPU."""

    def forward(self, u: Tensor) -> Tensor:
        """Return logits that broadcast to ``u``."""
        if not torch.is_grad_enabled() or u.device.type != "cuda" or u.dtype == torch.double:
            return super().forward(u)
        return self.by_kernels(u)

    def by_kernels(self, u: Tensor) -> Tensor:
        """Return the logits with one kernel, and have their gradients with another."""
        assert self.conv is not None
        rows = stacked_rows(self.conv, self.linear)
        logits: Tensor = halting_logits(join_patches(u), rows, self.linear.bias)
        return average_patches(logits, self.group)


def with_fused_heads(model: M) -> M:
    """Return a model whose halting heads, where they fit, use the kernels above.

    They are replaced in the model itself; names and parameters stay as they are.
    """
    return replace_modules(model, lambda module: with_class(module, FusedHead) if fits(module) else module)


def fits(head: nn.Module) -> bool:
    """Whether the kernels above do what this head does."""
    return type(head) is HaltingHead and head.conv is not None and head.norm is None
