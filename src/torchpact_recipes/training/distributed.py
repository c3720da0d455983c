"""Several processes training one network, as ``torchrun -m torchpact train`` starts them.

Every process holds the network and the data set, and works on its share of each batch. Statistics of
batch norm, gradients (by DistributedDataParallel) and what is reported are those of the whole batch, and
so is all that is drawn: every process draws the crops and the noise of the whole batch, and takes its share.
So the number of processes changes no result beyond rounding. Without a process group all of this does
nothing.
"""

import importlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
"""How long a process waits for the others; the first validates meanwhile. torchrun itself ends all
processes within a second when one has failed."""


class FirstFailed(RuntimeError):
    """The first process could not do its part; it has the error itself."""


def join(device: torch.device) -> torch.device:
    """Join the processes that torchrun has started, if it has, and return this one's device."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        return device
    if device.type == "cuda":
        if device.index is not None:
            raise ValueError(f"expected device cuda, of which each process takes its own, got {device}")
        local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= count:
            raise ValueError(
                f"expected a GPU for every process, got {count} and process {local} of this host"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    # Its functions have the group there is when it is imported as a default argument. An optimizer would
    # import it later: the group then outlives leave(), and its threads now and then abort the exit.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    return device


def leave() -> None:
    """Part from the other processes at the end; after an error just exit, since this may wait for them."""
    if world() > 1:
        dist.destroy_process_group()


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def share(batch: int) -> slice:
    """The part of a batch that is this process's."""
    if batch % world():
        raise ValueError(f"expected a batch that {world()} processes share evenly, got {batch}")
    size = batch // world()
    return slice(rank() * size, (rank() + 1) * size)


def mean(x: Tensor) -> Tensor:
    """The mean of a tensor over processes, in place; without gradients."""
    if world() > 1:
        dist.all_reduce(x)
        x /= world()
    return x


def on_first(work: Callable[[], T]) -> T:
    """Let the first process do something, such as files; return, or fail, in all of them.

    The others wait for it and get what it returns, or raise :class:`FirstFailed`.
    """
    if world() == 1:
        return work()
    error: Exception | None = None
    outcome: list[Any] = [None, None]
    if rank() == 0:
        try:
            outcome[0] = work()
        except Exception as problem:
            error, outcome[1] = problem, str(problem)
    dist.broadcast_object_list(outcome, src=0)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise FirstFailed(f"process 0 failed: {outcome[1]}")
    result: T = outcome[0]
    return result
