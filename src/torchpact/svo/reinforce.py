"""The score function estimator (eq. 9)."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchpact.core.baseline import EMABaseline
from torchpact.svo._evaluate import evaluate


@dataclass
class Reinforce:
    """(f(z) − c)·∇ log q(z): unbiased for any f, needs no gradient of it; high variance.

    ``baseline`` is a callable from values of f to c, which must not depend on these values; None is
    for none.
    """

    baseline: Callable[[Tensor], Tensor] | None = field(default_factory=EMABaseline)

    def __call__(self, f: Callable[[Tensor], Tensor], q: Distribution, samples: int) -> Tensor:
        """Return f − c at samples of q, weighted so that the gradient is the score function's."""
        z = q.sample((samples,))
        with torch.no_grad():
            values = evaluate(f, z)
            c = 0.0 if self.baseline is None else self.baseline(values)
        log_prob = q.log_prob(z)
        if log_prob.shape != values.shape:
            raise ValueError(
                f"expected q.log_prob to give {samples} values, got shape {tuple(log_prob.shape)}; "
                "torch.distributions.Independent(q, 1) sums over a vector"
            )
        return (values - c) * log_prob
