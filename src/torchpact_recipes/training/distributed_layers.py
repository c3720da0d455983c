"""Layers and modes that see the whole batch of which each process has a share; see ``distributed``."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchpact import Discrete, Mode, Relaxed
from torchpact.checks import at_least_single
from torchpact.core.relaxation import logistic_noise
from torchpact_recipes.training import distributed


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
        if not self.training or distributed.world() == 1:
            return super().forward(x)
        self._check_input_dim(x)
        u = at_least_single(x)
        own = torch.stack(torch.var_mean(u, (0, 2, 3), correction=0))
        # every process's in its row: unlike sums of squares, variances about own means lose no digits
        rows = own.new_zeros(distributed.world(), *own.shape)
        rows[distributed.rank()] = own
        var, mean = _Sum.apply(rows).unbind(1)
        center = mean.mean(0)
        spread = var.mean(0) + (mean - center).square().mean(0)
        self._track(center, spread, distributed.world() * u.numel() / u.size(1))
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
    whole = torch.cat([logits.detach()] * distributed.world())  # of one channel, so it costs next to nothing
    return logistic_noise(whole, generator)[distributed.share(len(whole))]


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
