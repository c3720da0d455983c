"""Bernoulli variables and their Concrete relaxation, from one and the same noise (section 2.3)."""

import torch
from torch import Tensor


def logistic_noise(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw σ⁻¹(ε), ε ~ Uniform(0, 1), of the shape, type and device of ``like``; always finite."""
    if generator is None:
        uniform = torch.rand_like(like)
    else:
        # torch.compile cannot trace a generator, so this is the road not taken by default
        uniform = torch.rand(like.shape, dtype=like.dtype, device=like.device, generator=generator)
    return torch.logit(uniform, eps=torch.finfo(like.dtype).eps)


def bernoulli(logits: Tensor, noise: Tensor) -> Tensor:
    """Sample v ~ Bernoulli(σ(logits)) as a boolean: whether logits + noise is positive.

    This is the relaxed sample of the same noise, rounded: P(v̂ > ½) = P(v = 1) at any temperature.
    """
    return logits + noise > 0


def relaxed_bernoulli(logits: Tensor, noise: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Sample v̂ ~ RelaxedBernoulli(σ(logits); temperature); return v̂ and 1 − v̂ (eq. 7–8).

    Both come from the logit, so that neither loses its digits where the other is close to 1.

    >>> relaxed_bernoulli(torch.zeros(1), torch.full((1,), 30.0), temperature=0.5)
    (tensor([1.]), tensor([8.7565e-27]))
    """
    logit = (logits + noise) / temperature
    return torch.sigmoid(logit), torch.sigmoid(-logit)
