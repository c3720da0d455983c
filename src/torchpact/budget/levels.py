"""Thresholds of networks whose positions or blocks see each other: families of one parameter, by runs."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchpact.budget.heldout import HeldOut
from torchpact.budget.progress import Progress, Report
from torchpact.core.thresholds import Thresholds

_HALVINGS = 9
_ENOUGH = 64
"""Moves are tried on a quarter of the examples, and at least so many."""


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
    parameter is moved until the budget is met. Then heads are moved one by one from the better of the two,
    all others a little the other way; what scores better within the budget is kept. Where there are many
    examples, moves are tried on a part of the batches, and those that are better there on all.

    Args:
        held: The batches.
        runs: How many moves may be tried for each budget.
        report: Is told of progress.
        confidence: With which new examples are to be within the budget; None is that those held out are.

    """

    def __init__(
        self,
        held: HeldOut,
        runs: int,
        report: Report = lambda _: None,
        confidence: float | None = None,
    ) -> None:
        self.held, self.most, self.report, self.confidence = held, runs, report, confidence
        self.part = _part(held.sizes)
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
        self.sketched: dict[Thresholds, Tried] = {}
        self.families: tuple[Family, ...] = (self._equal_shares, self._common_bound)
        self._known: dict[Family, dict[float, float]] = {}  # costs at levels

    def run(self, thresholds: Thresholds, levels: tuple[float, ...] | None = None) -> Tried:
        """Run the network with some thresholds, once."""
        if thresholds not in self.tried:
            outcome = self.held.run(thresholds)
            upper = outcome.cost if self.confidence is None else outcome.upper(self.confidence)
            self.tried[thresholds] = Tried(outcome.cost, outcome.score, thresholds, levels, upper)
            seen = {"cost": outcome.cost, "score": outcome.score}
            # about as many as there will be: the ends and both families, and moves
            self.report(Progress("calibration", self.held.runs, 12 + self.most, seen))
        return self.tried[thresholds]

    def sketch(self, thresholds: Thresholds, levels: tuple[float, ...] | None = None) -> Tried:
        """Run a part of the batches with some thresholds, once; all where they are few."""
        if self.part is None:
            return self.run(thresholds, levels)
        if thresholds not in self.sketched:
            outcome = self.held.run(thresholds, self.part)
            cost = outcome.cost
            self.sketched[thresholds] = Tried(cost, outcome.score, thresholds, levels, upper=cost)
        return self.sketched[thresholds]

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
        known[0.0], known[1.0] = self.least(), self.run(*family(1.0)).upper
        for count in range(_HALVINGS):
            if high - low < 2.0**-_HALVINGS:
                break
            # where the line between the two meets the budget, and their middle if that has not sufficed
            rise = max(known[high] - known[low], 1e-12)
            share = min(max((0.998 * budget - known[low]) / rise, 0.02), 0.98) if count % 3 < 2 else 0.5
            level = low + share * (high - low)
            tried = self.run(*family(level))
            known[level] = tried.upper
            low, high = (level, high) if tried.upper <= budget else (low, level)
            if 0.995 * budget <= tried.upper <= budget:
                break

    def _moved(self, found: Tried, budget: float) -> None:
        """Move single heads, and the others so that the cost stays what it is, as far as runs are left."""
        levels = [*(found.levels or self._levels_of(found.thresholds))]
        if len(levels) < 2:
            return
        order, size, left = random.Random(0), 0.25, self.most
        best = self.sketch(found.thresholds, found.levels)
        room = budget * best.cost / found.upper  # of the part of the batches, in the mean
        while left > 0 and size > 0.02:
            improved = False
            for index in order.sample(range(len(levels)), len(levels)):
                for sign in (1, -1):
                    if left <= 0:
                        return
                    left -= 2
                    moved = self._balanced(levels, index, sign * size, room)
                    if moved is None or moved.score <= best.score + 1e-12 or moved.levels is None:
                        continue
                    whole = self.run(moved.thresholds, moved.levels)
                    if whole.upper > budget or whole.score <= found.score:
                        continue
                    best, found, levels, improved = moved, whole, [*moved.levels], True
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
            tried = self.sketch(self.at(moved), moved)
            if tried.cost <= budget:
                found = tried if found is None or tried.score > found.score else found
            # the shift that would have met the budget, were the cost linear in it
            slope = max(self.run(*self._equal_shares(1.0)).cost - self.least(), 1e-9)
            shift += (0.998 * budget - tried.cost) / slope
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


def _part(sizes: Sequence[int]) -> list[int] | None:
    """Return the numbers of some batches, spread evenly, that hold enough examples; None of few batches."""
    count, wanted = len(sizes), max(_ENOUGH, sum(sizes) // 4)
    stride = max(int(sum(sizes) / wanted), 1)
    return [*range(0, count, stride)] if stride > 1 and count > 1 else None


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
