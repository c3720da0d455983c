"""The prior over the number of iterations."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, constraints

from torchpact.checks import check_count, readable


class TruncatedGeometric(Distribution):
    """The truncated geometric prior p(z) ∝ exp(−τ z) on {1, …, L} (eq. 20).

    ``tau`` is the price of one more iteration on the log scale; 0 gives the uniform distribution.
    The normaliser is a sum of ``max_steps`` terms rather than the closed form, which is 0/0 at τ = 0.

    Args:
        tau: The price, at least 0: a number, or a tensor of any shape for a batch of priors.
        max_steps: L.
        validate_args: Whether values are checked, as in other distributions of torch.

    Raises:
        ValueError: A price is negative or not finite, or ``max_steps`` is below 1.

    Example:
        >>> prior = TruncatedGeometric(torch.tensor(0.1), max_steps=3)
        >>> prior.enumerate_support(), prior.log_prob(prior.enumerate_support()).exp()
        (tensor([1., 2., 3.]), tensor([0.3672, 0.3322, 0.3006]))
        >>> prior.mean
        tensor(1.9334)

    """

    arg_constraints = {"tau": constraints.nonnegative}  # noqa: RUF012 (torch reads it on the class)
    has_enumerate_support = True

    def __init__(self, tau: float | Tensor, max_steps: int, validate_args: bool | None = None) -> None:
        self.max_steps = check_count("max_steps", max_steps)
        self.tau = tau if isinstance(tau, Tensor) else torch.tensor(tau, dtype=torch.get_default_dtype())
        fine = (self.tau >= 0) & self.tau.isfinite()
        if validate_args is not False and readable(fine) and not fine.all():
            worst = self.tau[~fine].flatten()[0].item()
            raise ValueError(f"expected tau in [0, inf), got {worst}")
        super().__init__(self.tau.shape, validate_args=validate_args)

    @property
    def _categorical(self) -> Categorical:
        return Categorical(logits=-self.tau.unsqueeze(-1) * self._beyond_first, validate_args=False)

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self) -> Any:
        """The integers 1 … L."""
        return constraints.integer_interval(1, self.max_steps)

    @property
    def probs(self) -> Tensor:
        """p(z = l), with l along the last dimension."""
        probs: Tensor = self._categorical.probs
        return probs

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute log p(z = value), normalised."""
        if self._validate_args:
            self._validate_sample(value)
        log_prob: Tensor = self._categorical.log_prob(value - 1)
        return log_prob

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 (torch's signature)
        """Draw whole numbers of iterations, in the type of ``tau``."""
        sample: Tensor = self._categorical.sample(torch.Size(sample_shape))
        return (sample + 1).to(self.tau.dtype)

    @property
    def mean(self) -> Tensor:
        """E z."""
        return 1 + (self.probs * self._beyond_first).sum(-1)

    @property
    def variance(self) -> Tensor:
        """E (z − E z)²."""
        deviation = self._beyond_first - (self.mean - 1).unsqueeze(-1)
        return (self.probs * deviation**2).sum(-1)

    @property
    def mode(self) -> Tensor:
        """One iteration, always."""
        return torch.ones_like(self.tau)

    @property
    def _beyond_first(self) -> Tensor:
        return torch.arange(self.max_steps, dtype=self.tau.dtype, device=self.tau.device)

    def entropy(self) -> Tensor:
        """−E log p(z)."""
        entropy: Tensor = self._categorical.entropy()
        return entropy

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return 1 … L along a new first dimension."""
        values = 1 + self._beyond_first
        values = values.view((-1,) + (1,) * len(self.batch_shape))
        return values.expand((-1, *self.batch_shape)) if expand else values

    def expand(self, batch_shape: Any, _instance: Any = None) -> "TruncatedGeometric":
        """Return the same prior for a larger batch, without copying."""
        new: TruncatedGeometric = self._get_checked_instance(TruncatedGeometric, _instance)
        new.tau = self.tau.expand(torch.Size(batch_shape))
        new.max_steps = self.max_steps
        super(TruncatedGeometric, new).__init__(torch.Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new
