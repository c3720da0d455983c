"""Layers of several networks at once: weights have a dimension more, the first, and the batch is that of all.

Images of the networks lie one after the other. On a GPU kernels are for all of them; elsewhere, and where
there is no such kernel, each network has its turn.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpact.checks import at_least_single
from torchpact.models import HaltingHead
from torchpact.nn.conv_units import FusibleNorm, average_patches, join_patches


class EnsembleConv2d(nn.Conv2d):
    """3×3 convolutions of several networks: ``weight`` has a dimension more, the first."""

    kernels: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """Convolve the maps of each by its own."""
        found: Tensor | None = None if self.kernels is None else self.kernels.by_kernels(self, x)
        if found is not None:
            return found
        parts = zip(x.chunk(len(self.weight)), self.weight, strict=True)
        return torch.cat([F.conv2d(part, weight, None, self.stride, self.padding) for part, weight in parts])


class EnsembleNorm(FusibleNorm):
    """Batch norms of several networks, a row of weights and statistics each; with their ReLU."""

    kernels: Any = None

    def activated(self, x: Tensor) -> Tensor:
        """Normalise and rectify the maps of each."""
        if self.kernels is not None:
            found: Tensor = self.kernels.FusedBatchNormReLU.by_kernels(self, x)
            return found
        self.get_buffer("num_batches_tracked").add_(1)
        statistics = self.get_buffer("running_mean"), self.get_buffer("running_var")
        rows = zip(x.chunk(len(self.weight)), *statistics, self.weight, self.bias, strict=True)
        return torch.cat([self._one(*row) for row in rows])

    def _one(self, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.relu(F.batch_norm(x, mean, var, weight, bias, True, self.momentum or 0.0, self.eps))


class EnsembleHead(HaltingHead):
    """Halting heads of several networks, of the paper's kind."""

    kernels: Any = None

    def forward(self, u: Tensor) -> Tensor:
        """Return logits that broadcast to ``u``."""
        assert self.conv is not None
        u, bias = join_patches(u), self.linear.bias.flatten()
        if self.kernels is not None:
            taps = self.conv.weight.permute(0, 1, 3, 4, 2).flatten(1, 3)
            logits = self.kernels.halting_logits(u, torch.cat([taps, self.linear.weight], 1), bias)
        else:
            parts = zip(u.chunk(len(bias)), self.conv.weight, self.linear.weight, bias, strict=True)
            logits = torch.cat([_logits(*each) for each in parts])
        return average_patches(logits, self.group)


def _logits(u: Tensor, weight: Tensor, pooled: Tensor, bias: Tensor) -> Tensor:
    local = at_least_single(F.conv2d(u, weight, padding=1))
    mean = at_least_single(F.linear(u.mean((2, 3)), pooled))[:, :, None, None]
    return local + mean + at_least_single(bias)


class EnsembleLinear(nn.Linear):
    """Linear layers of several networks."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the rows of each by its own weights."""
        rows = x.unflatten(0, (len(self.weight), -1))
        return torch.baddbmm(self.bias.unsqueeze(1), rows, self.weight.transpose(1, 2)).flatten(0, 1)


def _conv_kernels() -> Any:
    from torchpact_recipes.training.ensemble import conv

    return conv


def _norm_kernels() -> Any:
    from torchpact_recipes.training.kernels import fused_bn_relu

    return fused_bn_relu


def _head_kernels() -> Any:
    from torchpact_recipes.training.kernels import fused_head

    return fused_head


ENSEMBLE_LAYERS: dict[type[nn.Module], tuple[type[nn.Module], Callable[[], Any] | None]] = {
    nn.Conv2d: (EnsembleConv2d, _conv_kernels),
    nn.BatchNorm2d: (EnsembleNorm, _norm_kernels),
    HaltingHead: (EnsembleHead, _head_kernels),
    nn.Linear: (EnsembleLinear, None),
}
"""What modules become, and what imports their kernels, which need Triton."""
