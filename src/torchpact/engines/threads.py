"""How many threads compiled kernels, and small operations of torch beside them, may use."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

GROUPS = Path("/sys/fs/cgroup")


def kernel_threads(most: int) -> int:
    """Return how many threads a kernel may use: torch's, no more than the control group's limit allows.

    ``torch.set_num_threads`` and ``OMP_NUM_THREADS`` are in torch's number; the kernels themselves leave out
    threads that their process may have no CPU for.

    Args:
        most: As many as the kernel knows what to do with.

    """
    return max(min(torch.get_num_threads(), most, cpu_limit()), 1)


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


@contextmanager
def one_thread_if_busy() -> Iterator[None]:
    """Let small operations of torch in this thread not wait for other threads where cores are busy.

    Those of a parallel operation spin when it is done, and the caller waits for all of them to begin.
    """
    busy = next((library for library in _watching if library.torchpact_is_busy()), None)
    if busy is None:
        yield
        return
    before = busy.torchpact_torch_threads(1)
    try:
        yield
    finally:
        busy.torchpact_torch_threads(before)


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
