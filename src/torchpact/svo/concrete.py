"""The Concrete relaxation of binary vectors, chains included (eq. 10–11)."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.distributions import Bernoulli, Distribution, Independent

from torchpact.checks import check_number
from torchpact.core.relaxation import logistic_noise, relaxed_bernoulli
from torchpact.svo._evaluate import evaluate
from torchpact.svo.families import ChainedBernoulli


@dataclass(frozen=True)
class Concrete:
    """Differentiates f through relaxed samples: biased, low variance, needs f smooth on [0, 1]^d."""

    temperature: float = 2 / 3

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0, open_low=True, open_high=True)

    def __call__(self, f: Callable[[Tensor], Tensor], q: Distribution, samples: int) -> Tensor:
        """Return f at relaxed samples of q."""
        return evaluate(f, self.sample(q, samples))

    def sample(self, q: Distribution, samples: int) -> Tensor:
        """Draw relaxed vectors ẑ ~ q_λ."""
        if isinstance(q, ChainedBernoulli):
            return q.relaxed_rsample(self.temperature, (samples,))
        base = q.base_dist if isinstance(q, Independent) else q
        if not isinstance(base, Bernoulli):
            raise ValueError(f"expected a q over binary vectors, got {q}")
        logits = base.logits.expand(samples, *base.logits.shape)
        return relaxed_bernoulli(logits, logistic_noise(logits), self.temperature)[0]
