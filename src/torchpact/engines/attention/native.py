"""Attention of single rows to ranges of keys on a CPU, by a kernel in C++: ``attend.cpp``.

``F.scaled_dot_product_attention`` takes rectangles only, so that examples with few active tokens wait for
those with many; besides, on 2 cores of an AMD EPYC 32×12 heads×128×32 took 6.7 ms there and 3.2 ms here.
"""

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from torchpact.engines.attention.ragged import Ragged
from torchpact.engines.base import Unsupported
from torchpact.engines.cpp_build import MAX_THREADS, load_library, switched_off
from torchpact.engines.threads import kernel_threads

SOURCE = Path(__file__).with_name("attend.cpp")
PRECISIONS = (torch.float32, torch.bfloat16)
MOST = 256
"""The most features of a head, as in the source."""


class _Call(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("queries", "keys", "values", "output")),
        *((name, c_void_p) for name in ("starts", "offsets", "first", "last")),
        ("query_step", c_int64),
        *((f"key_{name}", c_int64) for name in ("offset", "head", "step")),
        *((f"value_{name}", c_int64) for name in ("offset", "head", "step")),
        ("scale", c_float),
        *((name, c_int32) for name in ("groups", "heads", "kv_heads", "size", "bfloat16", "threads")),
    )


def native_problem(dtype: torch.dtype, device: torch.device, size: int) -> str | None:
    """Return None where the kernel can run, or one line that says why not.

    Args:
        dtype: The precision of queries, keys and values.
        device: Where they are.
        size: The features of a head.

    """
    if device.type != "cpu" or dtype not in PRECISIONS:
        return f"expected single precision or bfloat16 on a CPU, got {dtype} on {device}"
    if size > MOST:
        return f"expected heads of at most {MOST} features, got {size}"
    if switched_off():
        return "no compiled kernels, as TORCHPACT_NATIVE=0 asks"
    try:
        library()
    except Unsupported as error:
        return str(error)
    return None


def attend_natively(queries: Tensor, keys: Tensor, values: Tensor, scale: float, ragged: Ragged) -> Tensor:
    """Return what rows see: the values of the keys in their range, weighed by the softmax of the scores.

    Args:
        queries: (rows, heads, size); of an example one after the other.
        keys: (keys, kv_heads, size), or with a cache (examples, kv_heads, keys, size).
        values: Values, of the same shape.
        scale: What scores are multiplied by.
        ragged: The rows of each example, and what they attend to.

    Returns:
        The sums, (rows, heads · size).

    """
    rows, heads, size = queries.shape
    queries, keys, values = (x if _is_dense(x) else x.contiguous() for x in (queries, keys, values))
    if queries.stride(1) != size:
        queries = queries.contiguous()
    output = queries.new_empty(rows, heads * size)
    call = _Call(  # by position, which takes a third of the time
        queries.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        output.data_ptr(),
        ragged.starts.data_ptr(),
        ragged.offsets.data_ptr(),
        ragged.first.data_ptr(),
        ragged.last.data_ptr(),
        queries.stride(0),
        *_steps(keys),
        *_steps(values),
        scale,
        ragged.offsets.numel(),
        heads,
        keys.size(1),
        size,
        queries.dtype == torch.bfloat16,
        kernel_threads(MAX_THREADS),
    )
    library().torchpact_attend(byref(call))
    return output


def norm_natively(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    output: Tensor,
) -> None:
    """Add to rows in place, and write their norm; sums are rounded first, as they are where torch does it.

    Args:
        x: Rows, (rows, size), in single precision or bfloat16 and contiguous, as are all others.
        added: Rows that are added to them; None for none.
        weight: In single precision.
        bias: In single precision.
        eps: What is added to the variance.
        rms: Whether it is a root-mean-square norm, without the mean.
        output: Where the norm goes; it may be ``x``.

    """
    library().torchpact_norm(
        x.data_ptr(),
        None if added is None else added.data_ptr(),
        None if weight is None else weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        output.data_ptr(),
        x.size(0),
        x.size(1),
        eps,
        rms,
        x.dtype == torch.bfloat16,
        kernel_threads(MAX_THREADS),
    )


@cache
def library() -> ctypes.CDLL:
    """Return the kernel, compiled for this machine if it has not been.

    Raises:
        Unsupported: It cannot be compiled or loaded.

    """
    kernel = load_library(SOURCE)
    kernel.torchpact_attend.restype, kernel.torchpact_attend.argtypes = None, [POINTER(_Call)]
    pointers, integers = [c_void_p] * 5, [c_int32] * 3
    kernel.torchpact_norm.argtypes = [*pointers, c_int64, c_int32, c_float, *integers]
    kernel.torchpact_product.argtypes = [c_void_p, c_void_p, c_void_p, c_int64, c_int32, c_int32]
    kernel.torchpact_finish.argtypes = [*[c_void_p] * 5, c_int64, c_int32, c_int32]
    for function in (kernel.torchpact_norm, kernel.torchpact_product, kernel.torchpact_finish):
        function.restype = None
    return kernel


def _is_dense(x: Tensor) -> bool:
    """Whether the features of a head lie one after the other."""
    return x.size(-1) == 1 or x.stride(-1) == 1


def _steps(x: Tensor) -> tuple[int, ...]:
    """Of examples, heads and keys."""
    return (x.stride(0), x.stride(1), x.stride(0)) if x.dim() == 3 else x.stride()[:3]
