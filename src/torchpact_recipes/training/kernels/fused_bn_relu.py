"""Batch norm and ReLU for training on a GPU, with a kernel for the statistics and one for each gradient.

Small maps are bound by the number of kernels, not by what these do. A compiled nn.BatchNorm2d sums in two or
three: partial sums, their sums, and what follows of them. Here every program leaves its partial sums and
takes a ticket; the one with the last ticket adds them up, always in the same order, and puts the tickets
back. The pointwise rest is plain torch, for the compiler to join to its neighbours.

Weights, statistics and tickets may be those of several networks that are trained together, a row each: then
each is for its share of the batch, one after the other.
"""

from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.library import triton_op
from torch.nn import functional as F

from torchpact.nn.conv_units import FusibleNorm
from torchpact_recipes.training.module_replacement import replace_modules, with_class

M = TypeVar("M", bound=nn.Module)

PROGRAMS, TILE, WARPS = 132, 8192, 4
"""A program a multiprocessor of an H200, which leaves few partial sums; values that it holds at a time; its
warps. Of 18 settings the fastest there for 128 maps of 32×16×16 and 64×8×8."""
AT_ONCE = 4 * PROGRAMS
"""Programs of all networks that have their turn at the same time."""


@triton.jit  # type: ignore[untyped-decorator]
def _last_adds_up(first, second, partial, ticket, c, C, WIDE: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Leave a program's two sums; return whether it is the last, and if so, the sums of all."""
    programs, network = tl.num_programs(0), tl.program_id(1)
    partial, ticket = partial + network * programs * 2 * C, ticket + network
    at = partial + tl.program_id(0) * 2 * C + c
    tl.store(at, first, mask=c < C)
    tl.store(at + C, second, mask=c < C)
    tl.debug_barrier()  # all of the program's threads have stored before one of them takes the ticket
    last = tl.atomic_add(ticket, 1) == programs - 1
    if last:
        first = tl.zeros((WIDE,), tl.float32)
        second = tl.zeros((WIDE,), tl.float32)
        for start in range(0, programs, ROWS):
            row = start + tl.arange(0, ROWS)
            here = (row < programs)[:, None] & (c < C)[None, :]
            left = partial + row[:, None] * 2 * C + c[None, :]
            # past the first cache, which does not see what other multiprocessors write
            first += tl.sum(tl.load(left, mask=here, other=0, cache_modifier=".cg"), 0)
            second += tl.sum(tl.load(left + C, mask=here, other=0, cache_modifier=".cg"), 0)
        tl.store(ticket, 0)
    return last, first, second


@triton.jit  # type: ignore[untyped-decorator]
def _moments(  # type: ignore[no-untyped-def]
    x, running_mean, running_var, moments, partial, ticket, pixels, momentum, eps,
    C, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Mean and reciprocal deviation of every channel; the running ones move towards them."""
    network, networks = tl.program_id(1), tl.num_programs(1)
    x, moments = x + network.to(tl.int64) * pixels * C, moments + network * C
    running_mean, running_var = running_mean + network * C, running_var + network * C
    c = tl.arange(0, WIDE)
    used = c < C
    # sums of squares about a value that is among them lose no digits to a mean far from zero
    center = tl.load(x + c, mask=used, other=0).to(tl.float32)
    total = tl.zeros((WIDE,), tl.float32)
    squares = tl.zeros((WIDE,), tl.float32)
    for start in range(tl.program_id(0) * ROWS, pixels, tl.num_programs(0) * ROWS):
        pixel = start + tl.arange(0, ROWS)
        here = (pixel < pixels)[:, None] & used[None, :]
        value = tl.load(x + pixel.to(tl.int64)[:, None] * C + c[None, :], mask=here, other=0).to(tl.float32)
        off = tl.where(here, value - center[None, :], 0)
        total += tl.sum(off, 0)
        squares += tl.sum(off * off, 0)
    last, total, squares = _last_adds_up(total, squares, partial, ticket, c, C, WIDE, ROWS)
    if last:
        shift = total / pixels
        var = tl.maximum(squares / pixels - shift * shift, 0)
        tl.store(moments + c, center + shift, mask=used)
        tl.store(moments + networks * C + c, 1 / tl.sqrt(var + eps), mask=used)
        past = tl.load(running_mean + c, mask=used, other=0)
        tl.store(running_mean + c, past + momentum * (center + shift - past), mask=used)
        past = tl.load(running_var + c, mask=used, other=0)
        unbiased = var * (pixels / tl.maximum(pixels - 1, 1))
        tl.store(running_var + c, past + momentum * (unbiased - past), mask=used)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_sums(  # type: ignore[no-untyped-def]
    dy, x, moments, weight, bias, sums, partial, ticket, pixels,
    C, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of weight and bias: what passed the ReLU, times normalised input, and alone."""
    network, networks = tl.program_id(1), tl.num_programs(1)
    start_of = network.to(tl.int64) * pixels * C
    dy, x, moments, sums = dy + start_of, x + start_of, moments + network * C, sums + network * C
    weight, bias = weight + network * C, bias + network * C
    c = tl.arange(0, WIDE)
    used = c < C
    mean = tl.load(moments + c, mask=used, other=0)
    reciprocal = tl.load(moments + networks * C + c, mask=used, other=0)
    scale, shift = tl.load(weight + c, mask=used, other=0), tl.load(bias + c, mask=used, other=0)
    products = tl.zeros((WIDE,), tl.float32)
    total = tl.zeros((WIDE,), tl.float32)
    for start in range(tl.program_id(0) * ROWS, pixels, tl.num_programs(0) * ROWS):
        pixel = start + tl.arange(0, ROWS)
        here = (pixel < pixels)[:, None] & used[None, :]
        at = pixel.to(tl.int64)[:, None] * C + c[None, :]
        normal = tl.load(x + at, mask=here, other=0).to(tl.float32)
        normal = (normal - mean[None, :]) * reciprocal[None, :]
        passed = tl.load(dy + at, mask=here, other=0).to(tl.float32)
        passed = tl.where(normal * scale[None, :] + shift[None, :] > 0, passed, 0)
        products += tl.sum(passed * normal, 0)
        total += tl.sum(passed, 0)
    last, products, total = _last_adds_up(products, total, partial, ticket, c, C, WIDE, ROWS)
    if last:
        tl.store(sums + c, products, mask=used)
        tl.store(sums + networks * C + c, total, mask=used)


def _launch(kernel: Any, x: Tensor, arguments: tuple[Any, ...], ticket: Tensor, *numbers: float) -> None:
    batch, channels, height, width = x.shape
    networks = ticket.numel()
    pixels, wide = batch // networks * height * width, triton.next_power_of_2(channels)
    rows = max(TILE // wide, 1)
    most = min(PROGRAMS, max(AT_ONCE // networks, 1))
    programs = min(most, max(triton.cdiv(pixels, rows), 1))
    partial = x.new_empty(networks, programs, 2, channels, dtype=torch.float32)
    kernel[(programs, networks)](
        *arguments, partial, ticket, pixels, *numbers, C=channels, WIDE=wide, ROWS=rows, num_warps=WARPS
    )


# That a ticket is written to goes unsaid, as it is zero before and after: nothing need be copied for it.


@torch.library.custom_op("torchpact::channel_moments", mutates_args={"running_mean", "running_var"})
def channel_moments(
    x: Tensor, running_mean: Tensor, running_var: Tensor, ticket: Tensor, momentum: float, eps: float
) -> Tensor:
    """The mean of every channel and the reciprocal of its deviation; moves the running statistics."""
    x = x.contiguous(memory_format=torch.channels_last)
    moments = x.new_empty(2, *running_mean.shape, dtype=torch.float32)
    _launch(_moments, x, (x, running_mean, running_var, moments), ticket, momentum, eps)
    return moments


@channel_moments.register_fake
def _(
    x: Tensor, running_mean: Tensor, running_var: Tensor, ticket: Tensor, momentum: float, eps: float
) -> Tensor:
    return x.new_empty(2, *running_mean.shape, dtype=torch.float32)


@torch.library.custom_op("torchpact::norm_gradient_sums", mutates_args=())
def norm_gradient_sums(
    dy: Tensor, x: Tensor, moments: Tensor, weight: Tensor, bias: Tensor, ticket: Tensor
) -> Tensor:
    """The gradients of weight and bias, in single precision."""
    x = x.contiguous(memory_format=torch.channels_last)
    dy = dy.contiguous(memory_format=torch.channels_last)
    sums = torch.empty_like(moments)
    _launch(_gradient_sums, x, (dy, x, moments, weight, bias, sums), ticket)
    return sums


@norm_gradient_sums.register_fake
def _(dy: Tensor, x: Tensor, moments: Tensor, weight: Tensor, bias: Tensor, ticket: Tensor) -> Tensor:
    return torch.empty_like(moments)


# Of torch.library rather than torch.autograd.Function, which compiled code could not be cached with; as a
# triton_op the compiler sees through it.


@triton_op("torchpact::norm_relu", mutates_args={})
def norm_relu(x: Tensor, moments: Tensor, weight: Tensor, bias: Tensor, ticket: Tensor) -> Tensor:
    """relu((x − mean)·reciprocal·weight + bias), with the gradients it has if the moments are those of x."""
    given = _by_network(x, weight)
    return F.relu(_affine(_normal(given, moments), weight, bias)).to(x.dtype).view_as(x)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, moments, weight, bias, ticket = ctx.saved_tensors
    dweight, dbias = norm_gradient_sums(dy, x, moments, weight, bias, ticket).unbind()
    normal = _normal(_by_network(x, weight), moments)
    passed = torch.where(_affine(normal, weight, bias) > 0, _by_network(dy, weight).float(), 0.0)
    pixels = x.numel() // weight.numel()
    inner = passed - _channels(dbias / pixels) - normal * _channels(dweight / pixels)
    dx = (inner * _channels(weight * moments[1])).to(x.dtype)
    return dx.view_as(x), None, dweight, dbias, None


norm_relu.register_autograd(_backward, setup_context=_setup)


def _normal(x: Tensor, moments: Tensor) -> Tensor:
    return (x.float() - _channels(moments[0])) * _channels(moments[1])


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x * _channels(weight) + _channels(bias)


def _by_network(x: Tensor, weight: Tensor) -> Tensor:
    """Maps by network where there are several."""
    return x.unflatten(0, (weight.size(0), -1)) if weight.dim() == 2 else x


def _channels(x: Tensor) -> Tensor:
    """For the maps of one network, or of each."""
    return x[:, None, None] if x.dim() == 1 else x[:, None, :, None, None]


class FusedBatchNormReLU(FusibleNorm):
    """nn.BatchNorm2d that can be had with its ReLU, by the kernels above where they serve: on a GPU."""

    def activated(self, x: Tensor) -> Tensor:
        """Normalise and rectify."""
        if not self.training or x.device.type != "cuda":
            return F.relu(self(x))
        return self.by_kernels(x)

    def by_kernels(self, x: Tensor) -> Tensor:
        """Normalise and rectify in training."""
        ticket, mean, var, count = (
            self.get_buffer(name) for name in ("ticket", "running_mean", "running_var", "num_batches_tracked")
        )
        count.add_(1)
        assert self.momentum is not None  # or it would not fit
        moments = channel_moments(x.detach(), mean, var, ticket, self.momentum, self.eps)
        y: Tensor = norm_relu(x, moments, self.weight, self.bias, ticket)
        return y


def fits(norm: nn.Module) -> bool:
    """Whether the kernels above do what this batch norm does."""
    return (
        type(norm) is nn.BatchNorm2d
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and norm.weight.dtype == torch.float32
    )


def with_fused_norms(model: M) -> M:
    """Return a model whose batch norms, where they fit, use the kernels above.

    They are replaced in the model itself; names, parameters and saved state stay as they are.
    """
    return replace_modules(model, lambda module: _fused_norm(module) if fits(module) else module)


def _fused_norm(module: nn.Module) -> FusedBatchNormReLU:
    norm = with_class(module, FusedBatchNormReLU)
    ticket = torch.zeros((), dtype=torch.int32, device=norm.weight.device)
    norm.register_buffer("ticket", ticket, persistent=False)
    return norm
