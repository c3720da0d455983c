"""The paper's equations as pure functions on tensors.

Iterations run along ``dim``; every other dimension is a position (an example, a pixel, …), and each
position is on its own. The last iteration always halts, so the last entry along ``dim`` is never
read. Results come in the precision of the input, but at least single.

The functions look at the values they are given and refuse probabilities outside [0, 1] and NaN. On a
GPU that look waits for the device; it is skipped under ``torch.compile``, ``torch.func`` and graph capture.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchpact.checks import check_logits, check_number, check_probabilities


class ACTHalting(NamedTuple):
    """What adaptive computation time makes of halting probabilities (eq. 29–30, alg. 4)."""

    weights: Tensor
    """The halting distribution ẑ, of the shape of ``h``."""
    steps: Tensor
    """N, the number of iterations run, per position; integer, without gradient."""
    remainder: Tensor
    """R, the weight of iteration N, per position."""
    ponder_cost: Tensor
    """ρ = N + R; its gradient is −1 for every h before iteration N, and 0 from it on."""


def stick_breaking(xi: Tensor, dim: int = 0) -> Tensor:
    """Turn halting decisions, or probabilities, into the halting distribution (eq. 14, 15 and 18).

    ``z[l] = xi[l] · Π_{i<l} (1 − xi[i])``, with ``xi`` of the last iteration taken as 1: one-hot if
    every ``xi`` is 0 or 1, the probabilities q(z = l) if ``xi`` holds the halting probabilities, and
    the relaxed ẑ if it holds samples of RelaxedBernoulli. Sums to 1 along ``dim``.

    Args:
        xi: Numbers in [0, 1], with the iterations along ``dim``; the last is not read.
        dim: The dimension of the iterations.

    Returns:
        The halting distribution, of the shape of ``xi``.

    Raises:
        ValueError: A number is outside [0, 1] or NaN, or there is no iteration.

    Example:
        >>> stick_breaking(torch.tensor([0.5, 0.5, 0.0]))
        tensor([0.5000, 0.2500, 0.2500])

    """
    xi = check_probabilities("xi", xi, dim)
    used = xi.narrow(dim, 0, xi.size(dim) - 1)
    one = torch.ones_like(xi.narrow(dim, 0, 1))
    remaining = torch.cat([one, (1 - used).cumprod(dim)], dim)
    return torch.cat([used, one], dim) * remaining


def log_stick_breaking(logits: Tensor, dim: int = 0) -> Tensor:
    """Compute log q(z = l) from the logits of the halting probabilities (the logarithm of eq. 15).

    Exact where ``stick_breaking(logits.sigmoid()).log()`` has long rounded to −∞ or 0, and free of
    NaN, in the gradient too, at infinite logits.

    Args:
        logits: Those of the halting probabilities, with the iterations along ``dim``; the last is not read.
        dim: The dimension of the iterations.

    Returns:
        Log-probabilities, of the shape of ``logits``.

    Raises:
        ValueError: A logit is NaN, or there is no iteration.

    Example:
        >>> log_stick_breaking(torch.tensor([-200.0, 200.0, 0.0]))
        tensor([-200.,    0., -200.])

    """
    return log_stick_breaking_of(check_logits("logits", logits, dim), dim)


def expected_steps(h: Tensor, dim: int = 0) -> Tensor:
    """Compute N = Σ l · h[l] · Π_{i<l} (1 − h[i]), the expected number of iterations (eq. 24).

    Args:
        h: Halting probabilities, with the iterations along ``dim``; the last is not read.
        dim: The dimension of the iterations.

    Returns:
        N for each position, in [1, L].

    Raises:
        ValueError: A number is outside [0, 1] or NaN, or there is no iteration.

    Example:
        >>> expected_steps(torch.tensor([0.5, 0.5, 0.0]))
        tensor(1.7500)

    """
    h = check_probabilities("h", h, dim)
    return steps_from_survival(1 - h.narrow(dim, 0, h.size(dim) - 1), dim)


def act_halting(h: Tensor, eps: float = 0.01, dim: int = 0) -> ACTHalting:
    """Adaptive computation time's halting distribution and ponder cost (eq. 29–30, alg. 4).

    Args:
        h: Halting probabilities, with the iterations along ``dim``; the last is not read.
        eps: Iterations go on while the sum of h is below 1 − ``eps``.
        dim: The dimension of the iterations.

    Returns:
        The halting distribution, N, R and ρ = N + R.

    Raises:
        ValueError: A number is outside [0, 1] or NaN, or ``eps`` outside (0, 1).

    Example:
        >>> weights, steps, remainder, ponder_cost = act_halting(torch.tensor([0.25, 0.5, 0.5, 0.5]))
        >>> weights, steps, remainder, ponder_cost
        (tensor([0.2500, 0.5000, 0.2500, 0.0000]), tensor(3), tensor(0.2500), tensor(3.2500))

    """
    check_number("eps", eps, 0, 1, open_low=True, open_high=True)
    h = check_probabilities("h", h, dim)
    *used, last = h.unbind(dim)
    remaining = torch.ones_like(last)
    steps = torch.ones_like(last, dtype=torch.long)
    weights = []
    for probability in used:
        weight, remaining = act_step(remaining, probability, eps)
        steps = steps + (remaining > 0)
        weights.append(weight)
    weights.append(remaining)
    stacked = torch.stack(weights, dim)
    remainder = stacked.gather(dim, (steps - 1).unsqueeze(dim)).squeeze(dim)
    return ACTHalting(stacked, steps, remainder, steps + remainder)


def act_step(remaining: Tensor, h: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """One turn of the loop of alg. 4: the weight of this iteration, and the remainder after it.

    A remainder of 0 says that the position has halted.
    """
    left = remaining - h
    # c < 1 − ε of the algorithm, word for word: left > ε would round to the other side of some ties
    goes_on = 1 - left < 1 - eps
    weight = torch.where(goes_on, h, remaining)
    return weight, torch.where(goes_on, left, torch.zeros_like(left))


def iteration_index(count: int, positions: Tensor) -> Tensor:
    """Return 1 … count along a new first dimension, to be compared with something of every position."""
    index = torch.arange(1, count + 1, device=positions.device)
    return index.view((-1,) + (1,) * positions.dim())


def log_stick_breaking_of(logits: Tensor, dim: int) -> Tensor:
    """Compute :func:`log_stick_breaking` without looking at the logits."""
    used = logits.narrow(dim, 0, logits.size(dim) - 1)
    zero = torch.zeros_like(logits.narrow(dim, 0, 1))
    log_remaining = torch.cat([zero, logsigmoid(-used).cumsum(dim)], dim)
    return torch.cat([logsigmoid(used), zero], dim) + log_remaining


def steps_from_survival(stay: Tensor, dim: int) -> Tensor:
    """Compute N from 1 − h of all iterations but the last."""
    # N = Σ_l P(z ≥ l): a sum of L numbers in [0, 1], the first of them 1, so that rounding cannot
    # take it out of [1, L]. `stay` holds 1 − h for all but the last iteration. Not cumprod, whose
    # gradient looks for zeros on the host and costs as much as a convolution in a compiled training step.
    if not stay.size(dim):  # L is 1
        return torch.ones_like(stay.sum(dim))
    survival, *others = stay.unbind(dim)
    total = 1 + survival
    for each in others:
        survival = survival * each
        total = total + survival
    return total
