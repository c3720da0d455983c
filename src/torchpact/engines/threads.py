"""How many threads compiled kernels, and small operations of torch beside them, may use."""

import ctypes
import threading
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

GROUPS = Path("/sys/fs/cgroup")


def kernel_threads(most: int) -> int:
    """Return how many threads a kernel may use: torch's, no more than the control group's limit allows.

    ``torch.set_num_threads`` and ``OMP_NUM_THREADS`` are in torch's number; the kernels themselves leave out
    threads that their process may have no CPU for.

    Args:
        most: As many as the kernel knows what to do with.

    """
    return max(min(_meant.threads or torch.get_num_threads(), most, cpu_limit()), 1)


_watching: list[ctypes.CDLL] = []


def watch(library: ctypes.CDLL) -> None:
    """Have a kernel say from now on whether others keep the cores busy.

    Args:
        library: One that has ``team.hpp`` in it.

    """
    library.torchpact_is_busy.restype, library.torchpact_is_busy.argtypes = ctypes.c_int32, []
    library.torchpact_torch_threads.restype = ctypes.c_int32
    library.torchpact_torch_threads.argtypes = [ctypes.c_int32]
    _watching.append(library)


def calm(run: Callable[P, R]) -> Callable[P, R]:
    """Have small operations of torch in a function wait for no other thread while others keep the cores busy.

    Threads of a parallel operation spin when it is done, and its caller waits for all of them to begin.
    Kernels that the function calls share their work as ever.

    Args:
        run: What calls kernels, and operations that take a small part of its time.

    """

    @wraps(run)
    def calmly(*args: P.args, **kwargs: P.kwargs) -> R:
        for library in _watching:
            if library.torchpact_is_busy():
                break
        else:
            return run(*args, **kwargs)
        if _meant.threads:  # it is calm around this one
            return run(*args, **kwargs)
        _meant.threads = library.torchpact_torch_threads(1)
        try:
            return run(*args, **kwargs)
        finally:
            library.torchpact_torch_threads(_meant.threads)
            _meant.threads = 0

    return calmly


class _Meant(threading.local):
    """How many threads kernels may use while torch is to use one; 0: as many as torch."""

    threads = 0


_meant = _Meant()


@cache
def cpu_limit(groups: Path = GROUPS, member: Path = Path("/proc/self/cgroup")) -> int:
    """Return the CPUs that the limits of this process's control groups amount to, rounded up.

    Args:
        groups: Where control groups are mounted.
        member: What tells the groups of this process.

    Returns:
        The least of the limits of its group and those around it; a large number without limits.

    """
    limits = [2.0**16]
    try:
        lines = member.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and "cpu" not in names.split(","):
            continue
        mounts = [groups / names, groups / "cpu"] if names else []
        root = next((each for each in mounts if each.is_dir()), groups)
        own = root / path.lstrip("/")
        limits += [_limit_of(folder) for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return max(-int(-min(limits) // 1), 1)


def _limit_of(folder: Path) -> float:
    """CPUs by the files of a control group, of either version."""
    try:
        if (folder / "cpu.max").exists():  # "max 100000" without a limit
            quota, period = (folder / "cpu.max").read_text().split()
        else:  # -1 without a limit
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        limit = float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):
        return float("inf")
    return limit if limit > 0 else float("inf")
