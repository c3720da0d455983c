"""The entry point: maximise any f(z) by gradient steps on the parameters of q."""

import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from torchpact.checks import check_count
from torchpact.svo._evaluate import evaluate
from torchpact.svo.estimator import Estimator, as_estimator


@dataclass(frozen=True)
class Result:
    """What :func:`maximize` found; the histories hold one number an iteration."""

    argmax: Tensor
    """The best z found: the mode of q at the end, or a sample on the way if that was better."""
    value: float
    """f(argmax)."""
    bound: Tensor
    """A Monte Carlo estimate of L(φ) = E_q f(z) ≤ max f, from hard samples for discrete q (eq. 1)."""
    gradient_norm: Tensor
    """The norm of the gradient estimate."""
    gradient_variance: Tensor
    """An unbiased estimate of the variance of one sample's gradient, summed over parameters."""

    def __repr__(self) -> str:
        return f"Result(value={self.value:.6g}, argmax={self.argmax}, iterations={len(self.bound)})"


def maximize(
    f: Callable[[Tensor], Tensor],
    q: nn.Module,
    estimator: Estimator | str,
    *,
    iterations: int = 1000,
    samples: int = 16,
    lr: float = 0.05,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    seed: int | None = None,
) -> Result:
    """Maximise f(z) by stochastic variational optimization of E_q f(z) (section 3).

    ``f`` takes ``samples`` vectors along the first dimension and returns as many values. ``q`` is a
    module that returns a distribution when called, such as those in :mod:`torchpact.svo`; it is
    trained in place. ``estimator`` is "reparameterization", "reinforce", "concrete", or an object of
    those classes. With ``seed`` the outcome is reproducible and the global generator left alone.

    >>> q = tp.svo.NormalVector(2)
    >>> result = maximize(lambda z: -((z - 3) ** 2).sum(-1), q, "reparameterization", iterations=300, seed=0)
    >>> result.argmax.round(decimals=1)
    tensor([3., 3.])
    """
    estimator = as_estimator(estimator)
    check_count("iterations", iterations)
    if check_count("samples", samples, minimum=2) % 2:
        raise ValueError(f"expected an even number of samples, got {samples}")
    if not isinstance(q, nn.Module):
        raise TypeError(f"expected q to be an nn.Module, got {type(q).__name__}")
    parameters = [p for p in q.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("expected a q with parameters to learn, got none")

    steps = optimizer(parameters, lr=lr, maximize=True)
    history = []
    best, argmax = -math.inf, torch.empty(0)
    with nullcontext() if seed is None else torch.random.fork_rng():
        if seed is not None:
            torch.manual_seed(seed)
        for iteration in range(iterations):
            surrogate = estimator(f, _distribution(q), samples)
            if not surrogate.isfinite().all():
                raise FloatingPointError(f"f gave NaN or infinity in iteration {iteration}")
            # Two half-batches: their mean is the gradient, their difference tells its variance
            halves = [
                torch.autograd.grad(half.mean(), parameters, retain_graph=True) for half in surrogate.chunk(2)
            ]
            squared_norm, variance = torch.zeros(()), torch.zeros(())
            for parameter, a, b in zip(parameters, *halves, strict=True):
                parameter.grad = (a + b) / 2
                squared_norm = squared_norm + parameter.grad.square().sum().cpu()
                variance = variance + (a - b).square().sum().cpu() * samples / 4
            with torch.no_grad():
                z = _distribution(q).sample((samples,))
                values = evaluate(f, z)
                if values.max() > best:
                    best, argmax = values.max().item(), z[values.argmax()].clone()
            history.append(torch.stack([values.mean().cpu(), squared_norm.sqrt(), variance]))
            steps.step()
            steps.zero_grad()
    with torch.no_grad(), suppress(NotImplementedError):  # not every distribution knows its mode
        mode = _distribution(q).mode
        value = evaluate(f, mode.unsqueeze(0)).item()
        if value >= best:
            best, argmax = value, mode.clone()
    bounds, norms, variances = torch.stack(history).unbind(-1)
    return Result(argmax, best, bounds, norms, variances)


def _distribution(q: nn.Module) -> Distribution:
    distribution = q()
    if not isinstance(distribution, Distribution):
        raise TypeError(f"expected q() to give a torch Distribution, got {type(distribution).__name__}")
    return distribution
