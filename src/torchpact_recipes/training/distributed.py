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
from torch import Tensor, nn

from torchpact import Discrete, Mode, Relaxed
from torchpact.checks import at_least_single
from torchpact.core.relaxation import logistic_noise

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


class _Sum(torch.autograd.Function):
    """The sum over processes; so is its gradient, since every process uses it.

    That of torch.distributed.nn is deprecated from torch 2.13 on, for one that torch 2.9 lacks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Sum.forward(ctx, gradient.contiguous())


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """Batch norm by the statistics of the whole batch, of which each process has an equal share.

    It is what nn.SyncBatchNorm is, on a CPU too, of which that refuses tensors (torch 2.13); by itself, or in
    evaluation, nn.BatchNorm2d.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise this process's share."""
        if not self.training or world() == 1:
            return super().forward(x)
        self._check_input_dim(x)
        u = at_least_single(x)
        own = torch.stack(torch.var_mean(u, (0, 2, 3), correction=0))
        # every process's in its row: unlike sums of squares, variances about own means lose no digits
        rows = own.new_zeros(world(), *own.shape)
        rows[rank()] = own
        var, mean = _Sum.apply(rows).unbind(1)
        center = mean.mean(0)
        spread = var.mean(0) + (mean - center).square().mean(0)
        self._track(center, spread, world() * u.numel() / u.size(1))
        scale = (spread + self.eps).rsqrt() * self.weight
        return ((u - _channels(center)) * _channels(scale) + _channels(self.bias)).to(x.dtype)

    @torch.no_grad()
    def _track(self, center: Tensor, spread: Tensor, count: float) -> None:
        """Update the running statistics, with the unbiased variance, as nn.BatchNorm2d does."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked += 1
        self.running_mean.lerp_(center.to(self.running_mean.dtype), self.momentum)
        unbiased = spread * (count / max(count - 1, 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)


def _channels(x: Tensor) -> Tensor:
    return x[:, None, None]


def _shared_noise(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return this process's share of the noise of the whole batch, as a single process would draw it."""
    whole = torch.cat([logits.detach()] * world())  # of one channel, so it costs next to nothing
    return logistic_noise(whole, generator)[share(len(whole))]


class _SharedRelaxed(Relaxed):
    def noise(self, logits: Tensor) -> Tensor:
        return _shared_noise(logits, self.generator)


class _SharedDiscrete(Discrete):
    def noise(self, logits: Tensor) -> Tensor:
        return _shared_noise(logits, self.generator)


def with_global_noise(mode: Mode | None) -> Mode | None:
    """A mode that draws, where it does, for the whole batch."""
    if isinstance(mode, Relaxed):
        return _SharedRelaxed(mode.temperature, mode.clip, mode.generator)
    return _SharedDiscrete(mode.generator) if isinstance(mode, Discrete) else mode


def with_global_norms(model: nn.Module) -> None:
    """Put :class:`GlobalBatchNorm2d` in the place of every nn.BatchNorm2d; names stay as they are."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.BatchNorm2d:
                norm = GlobalBatchNorm2d(child.num_features, child.eps, child.momentum)
                norm.load_state_dict(child.state_dict())
                setattr(parent, name, norm)
