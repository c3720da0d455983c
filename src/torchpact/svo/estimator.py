"""What an estimator of ∇_φ E_q f(z) is, and the table of those there are."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.distributions import Distribution

from torchpact.svo.concrete import Concrete
from torchpact.svo.reinforce import Reinforce
from torchpact.svo.reparameterization import Reparameterization

Objective = Callable[[Tensor], Tensor]
"""f: n vectors z along the first dimension, to n values."""


class Estimator(Protocol):
    """Returns n numbers, one a sample, the mean of whose gradients estimates ∇_φ E_q f(z)."""

    def __call__(self, f: Objective, q: Distribution, samples: int) -> Tensor:
        """Draw ``samples`` from q, and return what to differentiate for each."""
        ...


ESTIMATORS: dict[str, Callable[[], Estimator]] = {
    "reparameterization": Reparameterization,
    "reinforce": Reinforce,
    "concrete": Concrete,
}


def as_estimator(estimator: Estimator | str) -> Estimator:
    """Return an estimator given as such, or by name with its default settings."""
    if isinstance(estimator, str):
        if estimator not in ESTIMATORS:
            names = ", ".join(ESTIMATORS)
            raise ValueError(f"expected an estimator, or one of the names {names}; got {estimator!r}")
        return ESTIMATORS[estimator]()
    if isinstance(estimator, type) or not callable(estimator):
        raise TypeError(f"expected an estimator or its name, got {estimator!r}")
    return estimator
