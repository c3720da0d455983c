"""Which algorithms torch picks where there are several: those of equal bits, or the fastest."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import cudnn


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Within it torch uses algorithms that give the same bits every time, or refuses what has none.

    >>> with deterministic_algorithms():
    ...     torch.are_deterministic_algorithms_enabled()
    True
    """
    # cuBLAS reads it when first used, and torch refuses matrix products without it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    enabled, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark = cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    cudnn.benchmark = False  # which picks by time, and so differently from run to run
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        cudnn.benchmark = benchmark


@contextmanager
def fastest_algorithms() -> Iterator[None]:
    """Within it cuDNN tries its algorithms for a convolution when it first meets one.

    >>> with fastest_algorithms():
    ...     torch.backends.cudnn.benchmark
    True
    """
    before, cudnn.benchmark = cudnn.benchmark, True
    try:
        yield
    finally:
        cudnn.benchmark = before
