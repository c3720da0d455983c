"""Decisions by a bound, and what they come to, given the losses of all exits."""

from typing import NamedTuple

import torch
from torch import Tensor


class Exits(NamedTuple):
    """What heads learn from, and are judged by; P positions decide, the length of a string or 1."""

    states: Tensor
    """After every step, (L, batch, width, length)."""
    features: Tensor
    """What the head sees, (L, batch, width or thrice the width, P)."""
    losses: Tensor
    """(L, batch, P)."""
    right: Tensor
    """(L, batch, P)."""
    distance: Tensor
    """(batch, P)."""
    parity: Tensor
    """(batch, length)."""


def steps_at(logits: Tensor, bound: float) -> Tensor:
    """Return the steps of every position where logits are compared with a bound."""
    fires = torch.cat([logits[:-1] > bound, torch.ones_like(logits[:1], dtype=torch.bool)])
    return fires.to(torch.uint8).argmax(0) + 1


def calibrated(logits: Tensor, budget: float) -> float:
    """Return the bound with the given mean steps, by bisection."""
    low, high = logits[:-1].min().item() - 1, logits[:-1].max().item() + 1
    for _ in range(40):
        middle = (low + high) / 2
        above = steps_at(logits, middle).float().mean().item() > budget
        low, high = (low, middle) if above else (middle, high)
    return low


def ranks(x: Tensor) -> Tensor:
    """Return the mean rank of every value."""
    _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    mean: Tensor = (counts.cumsum(0) - counts.double() / 2)[inverse]
    return mean


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Return Spearman's correlation, 0 where one of them is constant."""
    if x.unique().numel() < 2:
        return 0.0
    return torch.corrcoef(torch.stack([ranks(x.flatten()), ranks(y.flatten())]))[0, 1].item()


def strings_right(exits: Exits, steps: Tensor) -> float:
    """Return the share of strings that are right at all positions, each at its own step."""
    return exits.right.gather(0, (steps - 1).unsqueeze(0))[0].all(1).float().mean().item()


def cost_of(exits: Exits, steps: Tensor, tau: float) -> float:
    """Return the mean loss at these steps, and their price."""
    return (exits.losses.gather(0, (steps - 1).unsqueeze(0))[0] + tau * steps).mean().item()
