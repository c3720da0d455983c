"""The reparameterization trick, for any distribution with ``rsample`` (eq. 5–6)."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.distributions import Distribution

from torchpact.svo._evaluate import evaluate


@dataclass(frozen=True)
class Reparameterization:
    """Differentiates f(g(ε, φ)) through the sample: unbiased, low variance, needs smooth f."""

    def __call__(self, f: Callable[[Tensor], Tensor], q: Distribution, samples: int) -> Tensor:
        """Return f at differentiable samples of q."""
        if not q.has_rsample:
            raise ValueError(f"expected a q with rsample, got {q}; try the concrete estimator")
        return evaluate(f, q.rsample((samples,)))
