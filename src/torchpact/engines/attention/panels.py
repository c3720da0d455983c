"""Products of few rows on a CPU by a kernel in C++ with little overhead: ``attend_products.hpp``.

oneDNN inside torch takes 14 µs for one row of 384×384 on 2 cores of an AMD EPYC, this kernel 4; 32 rows of
384→1536 take 94 and 76 µs, in bfloat16 53 and 44; from 256 rows on oneDNN is as fast or faster.
"""

from collections.abc import Callable, Sequence
from ctypes import Structure, byref, c_float, c_int32, c_void_p
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact.engines.attention.native import library, native_problem
from torchpact.engines.cpp_build import MAX_THREADS
from torchpact.engines.threads import kernel_threads
from torchpact.engines.timing import timed

FUNCTIONS = ("", "gelu", "gelu_tanh", "silu", "relu")
"""The activations that are fused, as the kernel numbers them."""
FEW = 128
"""The most rows that it is used for."""
PROBE = (32, 256, 768)
"""Rows, inputs and outputs of the trial."""


class Product(Structure):
    """A product as the kernel takes it."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        *((name, c_int32) for name in ("inputs", "outputs", "function")),
    )


class Norm(Structure):
    """A norm as the kernel takes it."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("rms", c_int32))


class _Layer(Structure):
    _fields_ = (
        *((name, Product) for name in ("out", "gate", "up", "down")),
        *((name, Norm) for name in ("norm1", "norm2")),
        ("post", c_int32),
    )


class LayerFinish:
    """What follows attention in a layer, for few rows, in one call of the kernel.

    Args:
        products: The output projection, the gate if there is one, and the MLP's up and down.
        norms: The two norms, which must outlive this.
        post: Whether norms stand after the sums; otherwise the second stands before the MLP.

    """

    def __init__(
        self, products: "Sequence[PanelProduct | None]", norms: tuple[Norm, Norm], post: bool
    ) -> None:
        self.products = products  # which hold the weights
        out, _, up, down = products
        assert out is not None
        assert up is not None
        assert down is not None
        self.wide = 2 * (out.outputs + up.outputs)
        self.outputs, self.pairs = down.outputs, down.dtype == torch.bfloat16
        told = [Product() if each is None else each.told for each in products]
        self.told = _Layer(*told, *norms, post)

    def __call__(self, u: Tensor, attended: Tensor) -> Tensor:
        """Return rows after the layer, from what they were and what they saw, both contiguous."""
        rows = len(u)
        space, output = u.new_empty(rows, self.wide), u.new_empty(rows, self.outputs)
        library().torchpact_finish(
            byref(self.told),
            attended.data_ptr(),
            u.data_ptr(),
            space.data_ptr(),
            output.data_ptr(),
            rows,
            self.pairs,
            kernel_threads(MAX_THREADS),
        )
        return output


class PanelProduct:
    """A linear layer and an activation, for few rows: a copy of the weights in panels.

    Args:
        weight: (outputs, inputs), in single precision or bfloat16.
        bias: (outputs), if any.
        function: One of :data:`FUNCTIONS`.

    """

    def __init__(self, weight: Tensor, bias: Tensor | None, function: str) -> None:
        self.outputs, inputs = weight.shape
        self.dtype = weight.dtype
        self.panels = in_panels(weight)
        self.bias = None if bias is None else bias.float().contiguous()
        data = None if self.bias is None else self.bias.data_ptr()
        self.told = Product(self.panels.data_ptr(), data, inputs, self.outputs, FUNCTIONS.index(function))

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs of rows, (rows, inputs), of the weights' precision."""
        x = x if x.is_contiguous() else x.contiguous()
        output = x.new_empty(len(x), self.outputs)
        pairs = self.dtype == torch.bfloat16
        library().torchpact_product(
            byref(self.told), x.data_ptr(), output.data_ptr(), len(x), pairs, kernel_threads(MAX_THREADS)
        )
        return output


def in_panels(weight: Tensor) -> Tensor:
    """Return a copy of weights as the kernel reads them.

    Args:
        weight: (outputs, inputs).

    """
    wide: int = library().torchpact_panel()
    padded: Tensor = F.pad(weight, (0, 0, 0, -len(weight) % wide)).unflatten(0, (-1, wide))
    pairs = weight.dtype == torch.bfloat16
    laid: Tensor = padded.unflatten(2, (-1, 2)).permute(0, 2, 1, 3) if pairs else padded.transpose(1, 2)
    return laid.contiguous()


def panels_fit(weight: Tensor) -> bool:
    """Return whether the kernel can multiply by weights, and is right and fast in their precision.

    Args:
        weight: (outputs, inputs).

    """
    if (
        weight.device.type != "cpu"
        or not weight.numel()
        or (weight.dtype == torch.bfloat16 and weight.size(1) % 2)
    ):
        return False
    return panels_pay(weight.dtype)


@cache
def panels_pay(dtype: torch.dtype) -> bool:
    """Return whether the kernel gives the same as ``F.linear``, and no later, on this machine.

    It is measured at the first call for a precision, for a few milliseconds.

    Args:
        dtype: The precision.

    """
    if native_problem(dtype, torch.device("cpu"), 1) is not None:
        return False
    if dtype == torch.bfloat16 and not library().torchpact_multiplies_pairs():
        return False
    with torch.no_grad():
        x, weight, bias = trial(PROBE, dtype)
        made = PanelProduct(weight, bias, "")
        expected = F.linear(x.float(), weight.float(), bias.float())
        if not (made(x).float() - expected).abs().max() <= expected.abs().max() / 128:
            return False
        return _least(lambda: made(x)) <= 1.1 * _least(lambda: F.linear(x, weight, bias))


def trial(sizes: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return random rows, a weight and a bias, to try products on.

    Args:
        sizes: Rows, inputs and outputs.
        dtype: The precision.

    """
    rows, inputs, outputs = sizes
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, inputs), (outputs, inputs), (outputs,)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, bias


def _least(function: Callable[[], Tensor]) -> float:
    """Return the least time that a function takes, in seconds."""
    return min(timed(function) for _ in range(7))
