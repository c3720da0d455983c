"""Thresholds of networks whose positions or blocks see each other: families of one parameter, by runs."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchpact.budget.heldout import HeldOut
from torchpact.core.thresholds import Thresholds

_HALVINGS = 9


class Tried(NamedTuple):
    """Thresholds that were run."""

    cost: float
    score: float
    thresholds: Thresholds
    levels: tuple[float, ...] | None
    """The share of positions that each head would let go on, in the order of blocks and heads."""
    upper: float
    """What has to be within a budget: the mean cost, or an upper confidence bound of it."""


Family = Callable[[float], tuple[Thresholds, tuple[float, ...] | None]]


class LevelSearch:
    """Looks for thresholds by runs of the whole network.

    Two families have one parameter, from 0, where all halt after the first step, to 1, where nothing halts:
    in one each head lets the same share of positions go on, in the other all heads have one bound. The
    parameter is bisected to the budget. Then heads are moved one by one from the better of the two, all
    others a little the other way, and what scores better within the budget is kept.

    Args:
        held: The batches.
        runs: How many runs the last part may take for each budget.
        confidence: With which new examples are to be within the budget; None is that those held out are.

    """

    def __init__(self, held: HeldOut, runs: int, confidence: float | None = None) -> None:
        self.held, self.most, self.confidence = held, runs, confidence
        self.heads = {name: block.max_steps - 1 for name, block in held.blocks.items()}
        self.sorted: dict[str, Tensor] = {}
        for name in self.heads:
            rows = torch.cat(held.logits[name], 1)[:, torch.cat(held.real[name])]
            self.sorted[name] = (
                rows.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).sort(1).values
            )
        pooled = [rows.flatten() for rows in self.sorted.values()]
        self.pooled = torch.cat(pooled).sort().values
        self.tried: dict[Thresholds, Tried] = {}
        self.families: tuple[Family, ...] = (self._equal_shares, self._common_bound)
        self._known: dict[Family, dict[float, float]] = {}  # costs at levels

    def run(self, thresholds: Thresholds, levels: tuple[float, ...] | None = None) -> Tried:
        """Run the network with some thresholds, once."""
        if thresholds not in self.tried:
            outcome = self.held.run(thresholds)
            upper = outcome.cost if self.confidence is None else outcome.upper(self.confidence)
            self.tried[thresholds] = Tried(outcome.cost, outcome.score, thresholds, levels, upper)
        return self.tried[thresholds]

    def at(self, levels: Sequence[float]) -> Thresholds:
        """Return the thresholds at which each head lets a share of positions go on."""
        given, found = iter(levels), {}
        for name, count in self.heads.items():
            found[name] = [_quantile(self.sorted[name][i], next(given)) for i in range(count)]
        return Thresholds(found)

    def _equal_shares(self, level: float) -> tuple[Thresholds, tuple[float, ...] | None]:
        levels = (level,) * sum(self.heads.values())
        return self.at(levels), levels

    def _common_bound(self, level: float) -> tuple[Thresholds, tuple[float, ...] | None]:
        bound = _quantile(self.pooled, level)
        return Thresholds({name: [bound] * count for name, count in self.heads.items()}), None

    def least(self) -> float:
        """Return the least cost: one step of every block."""
        return self.run(*self._equal_shares(0.0)).upper

    def best(self, budget: float) -> Tried | None:
        """Return the best that is found within a budget; None where one step of every block is above it."""
        if self.least() > budget:
            return None
        self.run(*self._equal_shares(1.0))
        for family in self.families:
            self._bisected(family, budget)
        found = self._within(budget)
        assert found is not None
        self._moved(found, budget)
        return self._within(budget)

    def _within(self, budget: float) -> Tried | None:
        """Return the best score so far within a budget, of these the cheapest."""
        fitting = [each for each in self.tried.values() if each.upper <= budget * (1 + 1e-9)]
        return max(fitting, key=lambda each: (each.score, -each.cost), default=None)

    def _bisected(self, family: Family, budget: float) -> None:
        known = self._known.setdefault(family, {})
        low = max((level for level, cost in known.items() if cost <= budget), default=0.0)
        high = min((level for level, cost in known.items() if cost > budget and level > low), default=1.0)
        for _ in range(_HALVINGS):
            if high - low < 2.0**-_HALVINGS:
                break
            middle = (low + high) / 2
            tried = self.run(*family(middle))
            known[middle] = tried.upper
            low, high = (middle, high) if tried.upper <= budget else (low, middle)
            if 0.995 * budget <= tried.upper <= budget:
                break

    def _moved(self, found: Tried, budget: float) -> None:
        """Move single heads, and the others so that the cost stays what it is, as far as runs are left."""
        levels = [*(found.levels or self._levels_of(found.thresholds))]
        if len(levels) < 2:
            return
        order, begin, size = random.Random(0), len(self.tried), 0.25
        best = found
        while len(self.tried) - begin < self.most and size > 0.02:
            improved = False
            for index in order.sample(range(len(levels)), len(levels)):
                for sign in (1, -1):
                    if len(self.tried) - begin >= self.most:
                        return
                    moved = self._balanced(levels, index, sign * size, budget)
                    if moved is not None and moved.score > best.score + 1e-12 and moved.levels is not None:
                        best, levels, improved = moved, [*moved.levels], True
                        break
            if not improved:
                size /= 2

    def _balanced(self, levels: Sequence[float], index: int, by: float, budget: float) -> Tried | None:
        """Move one head and shift all others to the budget, by two runs at most; None where it is not met."""
        target = min(max(levels[index] + by, 0.0), 1.0)
        by = target - levels[index]
        if not by:
            return None
        shift = -by / max(len(levels) - 1, 1)
        found = None
        for _ in range(2):
            moved = tuple(
                target if i == index else min(max(level + shift, 0.0), 1.0) for i, level in enumerate(levels)
            )
            tried = self.run(self.at(moved), moved)
            if tried.upper <= budget:
                found = tried if found is None or tried.score > found.score else found
            # the shift that would have met the budget, were the cost linear in it
            slope = max(self.run(*self._equal_shares(1.0)).upper - self.least(), 1e-9)
            shift += (0.998 * budget - tried.upper) / slope
        return found

    def _levels_of(self, thresholds: Thresholds) -> list[float]:
        levels = []
        for (name, count), bounds in zip(
            self.heads.items(), thresholds.for_blocks(self.heads).values(), strict=True
        ):
            for index in range(count):
                row = self.sorted[name][index]
                levels.append(float((row <= bounds[index]).float().mean()) if len(row) else 1.0)
        return levels


def _quantile(values: Tensor, level: float) -> float:
    """Return a bound that a share ``level`` of sorted values stays below; always and never at 0 and 1."""
    if level >= 1 or not len(values):
        return Thresholds.NEVER
    if level <= 0:
        return Thresholds.ALWAYS
    place = level * len(values)
    index = min(int(place), len(values) - 1)
    below, above = values[max(index - 1, 0)], values[index]
    bound = float(below + (above - below) / 2) if below.isfinite() and above.isfinite() else float(below)
    return bound
