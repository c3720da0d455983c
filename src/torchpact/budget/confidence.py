"""Quality that holds on new data: tests that a mean loss is below a bound, and a sequence of them.

As in CALM (Schuster et al., 2022), after "Learn then Test" (Angelopoulos et al., 2021): candidates are tested
in an order that was fixed without looking at the test data, the safest first, each at the full level, until
one fails; so the probability that any of those that passed loses more than allowed is at most the level.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def binomial_p_value(losses: Tensor, bound: float) -> float:
    """Return the probability of at most as many ones, were the mean the bound: exact for losses of 0 and 1.

    Args:
        losses: 0 or 1, (n,).
        bound: In (0, 1).

    Example:
        >>> round(binomial_p_value(torch.tensor([0.0, 0.0, 1.0]), 0.5), 6)  # of 3 throws at most one: 4/8
        0.5

    """
    n, ones = len(losses), int(losses.sum())
    logs = [
        math.lgamma(n + 1)
        - math.lgamma(k + 1)
        - math.lgamma(n - k + 1)
        + k * math.log(bound)
        + (n - k) * math.log1p(-bound)
        for k in range(ones + 1)
    ]
    return min(1.0, math.fsum(map(math.exp, logs)))


def betting_p_value(losses: Tensor, bound: float, low: float, high: float, level: float = 0.05) -> float:
    """Return a p-value for a mean of at least the bound, for losses within [low, high].

    The losses, in a random order, are bet on one by one: the capital grows where they are below the bound,
    and is a supermartingale where their mean is not (Waudby-Smith and Ramdas, 2024). Stakes adapt to the
    variance, so that differences of scores, which are mostly 0, need far fewer examples than by Hoeffding's
    inequality.

    Args:
        losses: (n,).
        bound: Between low and high.
        low: The least that a loss can be.
        high: The largest.
        level: The level that stakes are chosen for; the p-value holds at every level.

    Example:
        >>> [round(betting_p_value(torch.zeros(n), 0.01, -1.0, 1.0), 3) for n in (50, 500)]
        [0.636, 0.011]

    """
    n = len(losses)
    mean = (bound - low) / (high - low)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    scaled = ((losses.double()[order] - low) / (high - low)).clamp(0, 1)
    before = torch.cat([torch.zeros(1, dtype=torch.double), scaled[:-1]])
    count = torch.arange(1, n + 1, dtype=torch.double)
    centre = (mean + before.cumsum(0)) / count  # of the examples before, and of one at the bound
    squares = torch.cat([torch.zeros(1, dtype=torch.double), (scaled - centre).square()[:-1]]).cumsum(0)
    # of the differences before, as if one had been larger: the stake is finite
    variance = (1 / n + squares) / count
    stakes = (2 * math.log(1 / level) / (n * variance)).sqrt().clamp(max=0.9 / max(1 - mean, 1e-12))
    capital = torch.log1p(stakes * (mean - scaled)).cumsum(0)
    return min(1.0, math.exp(-float(capital.max()))) if n else 1.0


def passing(candidates: Sequence[T], p_value: Callable[[T], float], level: float) -> list[T]:
    """Return the candidates before the first whose p-value is above the level: fixed-sequence testing.

    Args:
        candidates: In an order that does not depend on the test data.
        p_value: Of the hypothesis that a candidate loses more than allowed.
        level: The probability that is allowed for a candidate that passes wrongly.

    Example:
        >>> passing([0.01, 0.02, 0.3, 0.01], lambda p: p, level=0.05)
        [0.01, 0.02]

    """
    passed: list[T] = []
    for candidate in candidates:
        if p_value(candidate) > level:
            break
        passed.append(candidate)
    return passed


def least_examples(bound: float, level: float) -> int:
    """Return how many examples without any loss it takes to show that 0-or-1 losses are below a bound.

    >>> least_examples(0.01, 0.05)
    299
    """
    return math.ceil(math.log(level) / math.log1p(-bound))
