"""Thresholds of one block that decides per example, from a record of all exits: nothing is run again."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from torchpact.core.modes import exceeds
from torchpact.core.thresholds import Thresholds

MOST_COMBINATIONS = 2_000_000
"""Up to so many combinations of thresholds, times examples, are all tried."""
_SWEEPS = 30
_PRICES = 40
_NEAR = 3
"""How far apart heads are that are moved in pairs."""


class Record(NamedTuple):
    """What n examples give at each of the L exits of a block."""

    logits: Tensor
    """Of the L − 1 heads, (L − 1, n)."""
    costs: Tensor
    """(L, n)."""
    scores: Tensor
    """(L, n); higher is better."""

    def exits(self, bounds: Sequence[float]) -> Tensor:
        """Return the exit of each example, from 0, as a run with these bounds takes it."""
        exits = torch.full(self.logits.shape[1:], len(self.logits))
        for index in reversed(range(len(self.logits))):
            exits = torch.where(exceeds(self.logits[index], bounds[index]), index, exits)
        return exits

    def outcome(self, bounds: Sequence[float]) -> tuple[float, float]:
        """Return the mean cost and the mean score of a run with these bounds."""
        exits = self.exits(bounds).unsqueeze(0)
        return float(self.costs.gather(0, exits).mean()), float(self.scores.gather(0, exits).mean())


def candidates(logits: Tensor) -> list[float]:
    """Return the bounds that tell values apart: always, one between each two neighbours, never.

    >>> candidates(torch.tensor([1.0, 3.0, 1.0]))
    [-inf, 2.0, inf]
    """
    values = logits[~logits.isnan()].float().unique()
    low, high = values[:-1], values[1:]
    middle = low + (high - low) / 2
    middle = torch.where((middle < high) & (middle >= low), middle, low)  # neighbours in single precision
    middle = middle[middle.isfinite()]
    return [Thresholds.ALWAYS, *middle.unique().tolist(), Thresholds.NEVER]


def best_bounds(record: Record, budget: float) -> tuple[float, ...] | None:
    """Return bounds of the best mean score whose mean cost is within the budget; None where there are none.

    All combinations are tried where they are few. Otherwise bounds are improved one by one, each to its
    optimum given the others: for the score less a price times the cost, at prices found by bisection, and
    then for the score under the constraint itself, alone and in pairs.

    Args:
        record: Of held-out examples.
        budget: A mean cost.

    Example:
        >>> logits = torch.tensor([[0.3, 0.1, -2.0]])
        >>> costs, scores = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
        >>> record = Record(logits, costs.expand(2, 3), scores)
        >>> best_bounds(record, budget=1.4)
        (-0.95...,)

    """
    record = Record(record.logits.float().cpu(), record.costs.double().cpu(), record.scores.double().cpu())
    options = [candidates(row) for row in record.logits]
    if prod(map(len, options)) * record.costs.size(1) <= MOST_COMBINATIONS:
        return _best_of_all(record, options, budget)
    never = (Thresholds.NEVER,) * len(options)
    tried = [never, (Thresholds.ALWAYS, *never[1:]), *_by_prices(record, budget)]
    found = _best(record, tried, budget)
    return None if found is None else _polished(record, options, found, budget)


def bounds_at_price(record: Record, price: float) -> tuple[float, ...]:
    """Return bounds of a high mean score less price times mean cost: each is optimal given the others.

    Args:
        record: Of held-out examples.
        price: Of a unit of the cost.

    """
    record = Record(record.logits.float().cpu(), record.costs.double().cpu(), record.scores.double().cpu())
    return tuple(_swept(record, [Thresholds.NEVER] * len(record.logits), price))


def _best_of_all(
    record: Record, options: Sequence[Sequence[float]], budget: float
) -> tuple[float, ...] | None:
    """Return the best of all combinations of bounds, that of the first head varying slowest."""
    costs, scores = record.costs[-1:], record.scores[-1:]  # of going on, for each combination of later heads
    for index in reversed(range(len(options))):
        halts = torch.stack([exceeds(record.logits[index], bound) for bound in options[index]]).unsqueeze(1)
        costs = torch.where(halts, record.costs[index], costs).flatten(0, 1)
        scores = torch.where(halts, record.scores[index], scores).flatten(0, 1)
    cost, score = costs.mean(1), scores.mean(1)
    score = torch.where(cost <= budget * (1 + 1e-12), score, -torch.inf)
    if not bool(score.isfinite().any()):
        return None
    ties = score >= score.max() - 1e-12
    place, found = int(torch.where(ties, cost, torch.inf).argmin()), []
    for each in reversed(options):
        place, index = divmod(place, len(each))
        found.append(each[index])
    return tuple(found[::-1])


def _best(record: Record, tried: Iterable[tuple[float, ...]], budget: float) -> tuple[float, ...] | None:
    """Return the bounds with the highest score within the budget, of these the cheapest."""
    best: tuple[tuple[float, float], tuple[float, ...]] | None = None
    for bounds in tried:
        cost, score = record.outcome(bounds)
        if cost <= budget * (1 + 1e-12) and (best is None or (score, -cost) > best[0]):
            best = (score, -cost), bounds
    return None if best is None else best[1]


def _by_prices(record: Record, budget: float) -> list[tuple[float, ...]]:
    """Return bounds that are optimal one by one at several prices of the cost, around that of the budget."""
    never = [Thresholds.NEVER] * len(record.logits)
    found, low, high = [], 0.0, None
    price = float(record.scores.std() / record.costs.std().clamp(min=1e-12)) or 1.0
    bounds = never
    for _ in range(_PRICES):
        options = [_swept(record, start, price) for start in (never, bounds)]
        bounds = max(options, key=lambda each: _valued(record, each, price))
        found += [tuple(each) for each in options]
        if record.outcome(bounds)[0] > budget:
            low = price
        else:
            high = price
        price = 2 * price if high is None else (low + high) / 2
        if high is not None and high - low < 1e-6 * high:
            break
    return found


def _valued(record: Record, bounds: Sequence[float], price: float) -> float:
    cost, score = record.outcome(bounds)
    return score - price * cost


def _swept(record: Record, bounds: Sequence[float], price: float) -> list[float]:
    """Return bounds, moved to their optima one by one, from the last to the first, until none moves."""
    bounds = [*bounds]
    for _ in range(_SWEEPS):
        before = [*bounds]
        for index in reversed(range(len(bounds))):
            bounds[index] = _optimum(record, bounds, index, price=price)[0]
        if bounds == before:
            break
    return bounds


def _optimum(
    record: Record, bounds: Sequence[float], index: int, *, price: float = 0.0, budget: float | None = None
) -> tuple[float, float, float]:
    """Return the best bound of one head given the others, and the mean score and cost with it.

    Best is the mean score less price times cost and, with a budget, among those within it.
    """
    count = record.costs.size(1)
    halted = torch.zeros(count, dtype=torch.bool)
    for before in range(index):
        halted |= exceeds(record.logits[before], bounds[before])
    without = [*bounds]
    without[index] = Thresholds.NEVER
    exits = record.exits(without).unsqueeze(0)
    cost, score = record.costs.gather(0, exits)[0], record.scores.gather(0, exits)[0]
    asked = (~halted).nonzero().squeeze(1)
    logits = record.logits[index][asked].nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = logits.argsort(descending=True, stable=True)
    rows, sorted_logits = asked[order], logits[order]
    zero = torch.zeros(1, dtype=torch.double)
    saved = torch.cat([zero, (record.costs[index][rows] - cost[rows]).cumsum(0)])
    gained = torch.cat([zero, (record.scores[index][rows] - score[rows]).cumsum(0)])
    costs, scores = (cost.sum() + saved) / count, (score.sum() + gained) / count
    # a bound lies between different logits; the first k halt
    apart = torch.ones(len(rows) + 1, dtype=torch.bool)
    apart[1:-1] = sorted_logits[:-1] > sorted_logits[1:]
    value = torch.where(apart, scores - price * costs, -torch.inf)
    if budget is not None:
        value = torch.where(costs <= budget * (1 + 1e-12), value, -torch.inf)
    # of equal values the cheapest
    top = value.max()
    ties = value >= top - 1e-12 * (1 + abs(float(top)))
    chosen = int(torch.where(ties, costs, torch.inf).argmin())
    if chosen == 0:
        bound = Thresholds.NEVER
    elif chosen == len(rows):
        bound = Thresholds.ALWAYS
    else:
        between = candidates(sorted_logits[chosen - 1 : chosen + 1])[1:-1]
        bound = between[0] if between else float(sorted_logits[chosen])
    return bound, float(value[chosen]), float(costs[chosen])


def _polished(
    record: Record, options: Sequence[Sequence[float]], bounds: Sequence[float], budget: float
) -> tuple[float, ...]:
    """Return bounds improved within the budget, one by one and in pairs, until nothing is gained."""
    bounds = [*bounds]
    for _ in range(_SWEEPS):
        score = record.outcome(bounds)[1]
        best, best_score = None, score + 1e-12 * (1 + abs(score))
        for index in range(len(bounds)):
            trial, value, _ = _optimum(record, bounds, index, budget=budget)
            if value > best_score:
                best, best_score = [*bounds[:index], trial, *bounds[index + 1 :]], value
        if best is None:
            for first in range(len(bounds)):
                stride = max(1, len(options[first]) // 12)
                for option in [*options[first][::stride], Thresholds.NEVER]:
                    moved = [*bounds[:first], option, *bounds[first + 1 :]]
                    for second in range(len(bounds)):
                        if second == first or abs(second - first) > _NEAR:
                            continue
                        trial, value, _ = _optimum(record, moved, second, budget=budget)
                        if value > best_score:
                            best, best_score = [*moved[:second], trial, *moved[second + 1 :]], value
        if best is None:
            break
        bounds = best
    return tuple(bounds)
