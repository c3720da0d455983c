"""Families of q to search with: modules that give a ``torch.distributions.Distribution`` when called.

Any other module of that kind will do as well. These three hold one vector z each; what they share is
that they can come as close as one likes to a point mass, without which the bound is not tight.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, Independent, Normal, constraints
from torch.nn.functional import logsigmoid

from torchpact.checks import check_count, check_number
from torchpact.core.relaxation import bernoulli, logistic_noise, relaxed_bernoulli


class ChainedBernoulli(Distribution):
    """A binary vector drawn one entry after the other, q(z) = Π q(z_i | z_<i) (section 3).

    ``conditional`` takes z_<i, of shape ``(n, i)``, and returns the ``n`` logits of z_i. For the
    relaxed samples it must be defined and smooth on [0, 1]^i. Samples are of the type and on the device
    of ``like``.
    """

    arg_constraints = {}  # noqa: RUF012 (torch reads it on the class)
    support = constraints.independent(constraints.boolean, 1)

    def __init__(
        self, conditional: Callable[[Tensor], Tensor], length: int, like: Tensor | None = None
    ) -> None:
        self.conditional = conditional
        self.like = torch.empty(0) if like is None else like
        self.length = check_count("length", length)
        super().__init__(event_shape=torch.Size([self.length]), validate_args=False)

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 (torch's signature)
        """Draw binary vectors, as floats."""
        with torch.no_grad():
            return self._draw(sample_shape, lambda a: bernoulli(a, logistic_noise(a)).to(a.dtype))

    def relaxed_rsample(self, temperature: float, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008
        """Draw differentiable vectors in [0, 1], each factor relaxed at the given relaxed z_<i (eq. 10)."""
        return self._draw(sample_shape, lambda a: relaxed_bernoulli(a, logistic_noise(a), temperature)[0])

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute log q(z), for binary z along the last dimension."""
        z = value.reshape(-1, self.length)
        logits = torch.stack([self._logits(z[:, :i]) for i in range(self.length)], -1)
        return torch.where(z > 0.5, logsigmoid(logits), logsigmoid(-logits)).sum(-1).reshape(value.shape[:-1])

    @property
    def mode(self) -> Tensor:
        """The greedy mode: each entry at its more probable value, given those before."""
        with torch.no_grad():
            return self._draw((), lambda a: (a > 0).to(a.dtype))

    def _draw(self, sample_shape: Any, draw: Callable[[Tensor], Tensor]) -> Tensor:
        shape = torch.Size(sample_shape)
        z = self.like.new_zeros(shape.numel(), 0)
        for _ in range(self.length):
            z = torch.cat([z, draw(self._logits(z)).unsqueeze(-1)], -1)
        return z.reshape(shape + self.event_shape)

    def _logits(self, prefix: Tensor) -> Tensor:
        logits = self.conditional(prefix)
        if logits.shape != prefix.shape[:1]:
            raise ValueError(
                f"expected the conditional to give {len(prefix)} logits for a prefix of shape "
                f"{tuple(prefix.shape)}, got shape {tuple(logits.shape)}"
            )
        return logits


class NormalVector(nn.Module):
    """Independent normal variables with learnable means and scales; starts at N(0, scale²).

    >>> NormalVector(3, scale=2)().stddev
    tensor([2., 2., 2.], grad_fn=...)
    """

    def __init__(self, length: int, scale: float = 1.0) -> None:
        super().__init__()
        check_number("scale", scale, 0, open_low=True, open_high=True)
        self.mean = nn.Parameter(torch.zeros(check_count("length", length)))
        self.log_scale = nn.Parameter(torch.full((length,), scale).log())

    def forward(self) -> Distribution:
        """Return q."""
        return Independent(Normal(self.mean, self.log_scale.exp()), 1)


class BernoulliVector(nn.Module):
    """Independent binary variables with learnable logits; starts uniform.

    >>> BernoulliVector(3)().log_prob(torch.ones(3)).exp()
    tensor(0.1250, grad_fn=...)
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(check_count("length", length)))

    def forward(self) -> Distribution:
        """Return q."""
        return Independent(Bernoulli(logits=self.logits), 1)


class LinearChain(nn.Module):
    """Dependent binary variables: the logit of each is linear in those before; starts uniform.

    >>> LinearChain(3)().log_prob(torch.ones(3)).exp()
    tensor(0.1250, grad_fn=...)
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(check_count("length", length)))
        self.weight = nn.Parameter(torch.zeros(length, length))

    def forward(self) -> ChainedBernoulli:
        """Return q."""
        return ChainedBernoulli(self._conditional, len(self.bias), like=self.bias)

    def _conditional(self, prefix: Tensor) -> Tensor:
        i = prefix.shape[-1]
        return self.bias[i] + (2 * prefix - 1) @ self.weight[i, :i]
