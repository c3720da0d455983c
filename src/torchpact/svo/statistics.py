"""Mean and variance of an estimator's gradient, to be held against an exact one."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchpact.checks import check_count
from torchpact.svo.estimator import Estimator, as_estimator


class GradientStatistics(NamedTuple):
    """Moments of one sample's gradient, over the parameters of q flattened into one vector."""

    mean: Tensor
    variance: Tensor
    samples: int

    @property
    def standard_error(self) -> Tensor:
        """The standard deviation of ``mean``."""
        return (self.variance / self.samples).sqrt()


def gradient_statistics(
    f: Callable[[Tensor], Tensor],
    q: nn.Module,
    estimator: Estimator | str,
    samples: int = 1000,
    chunk: int = 250,
) -> GradientStatistics:
    """Draw single-sample gradients of E_q f(z), and return their mean and variance.

    >>> statistics = gradient_statistics(lambda z: z.sum(-1), tp.svo.BernoulliVector(2), "concrete")
    >>> statistics.mean.shape, statistics.samples
    (torch.Size([2]), 1000)
    """
    estimator = as_estimator(estimator)
    check_count("samples", samples, minimum=2)
    check_count("chunk", chunk)
    parameters = [p for p in q.parameters() if p.requires_grad]
    rows = []
    for start in range(0, samples, chunk):
        count = min(chunk, samples - start)
        surrogate = estimator(f, q(), count)
        one_each = torch.eye(count, dtype=surrogate.dtype, device=surrogate.device)
        grads = torch.autograd.grad(surrogate, parameters, one_each, is_grads_batched=True)
        rows.append(torch.cat([g.reshape(count, -1) for g in grads], -1))
    gradients = torch.cat(rows)
    return GradientStatistics(gradients.mean(0), gradients.var(0), samples)
