"""calibrate: thresholds on held-out inputs, the best within a budget, or the cheapest at a quality."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any, overload

import torch
from torch import Tensor, nn

from torchpact.budget.batches import listed
from torchpact.budget.budget import Budget
from torchpact.budget.confidence import betting_p_value, binomial_p_value, least_examples, passing
from torchpact.budget.heldout import HeldOut
from torchpact.budget.latency import LatencyMeter
from torchpact.budget.levels import LevelSearch, Tried
from torchpact.budget.progress import Progress, Report, reporter
from torchpact.budget.scores import Score
from torchpact.budget.search import best_bounds
from torchpact.budget.table import TableRow, ThresholdTable
from torchpact.checks import check_count, check_number
from torchpact.core.exits import exit_thresholds
from torchpact.core.thresholds import Thresholds

_CANDIDATES = 20
"""How many thresholds are tested for their quality, at most."""


@overload
def calibrate(
    net: nn.Module,
    batches: Iterable[Any],
    budget: Budget | float | None = None,
    score: Score | None = None,
    *,
    quality: float | None = None,
    confidence: float = 0.95,
    score_range: tuple[float, float] = (0.0, 1.0),
    inputs: Callable[[Any], Any] | None = None,
    runs: int = 24,
    progress: Report | bool | None = None,
    within: float | None = None,
) -> Thresholds: ...


@overload
def calibrate(
    net: nn.Module,
    batches: Iterable[Any],
    budget: Sequence[Budget | float],
    score: Score | None = None,
    *,
    inputs: Callable[[Any], Any] | None = None,
    runs: int = 24,
    progress: Report | bool | None = None,
    within: float | None = None,
) -> ThresholdTable: ...


def calibrate(
    net: nn.Module,
    batches: Iterable[Any],
    budget: Budget | float | Sequence[Budget | float] | None = None,
    score: Score | None = None,
    *,
    quality: float | None = None,
    confidence: float = 0.95,
    score_range: tuple[float, float] = (0.0, 1.0),
    inputs: Callable[[Any], Any] | None = None,
    runs: int = 24,
    progress: Report | bool | None = None,
    within: float | None = None,
) -> Thresholds | ThresholdTable:
    """Return thresholds for a network, chosen on held-out inputs.

    With a ``budget``, those of the best mean score whose mean cost, thresholded, is within it. Where the
    network has one block that decides per example, all exits are run once and thresholds are searched in
    that record; else the network is run with thresholds of two families, bisected to the budget, and single
    heads are moved after that.

    With a ``quality``, the cheapest found whose mean score is at most so much below that of the network
    without halting. It holds on new data: the probability over draws of the held-out examples that thresholds
    are returned that lose more is at most 1 − ``confidence``. Every second batch is for the search, the
    others for the test.

    Args:
        net: A network with adaptive blocks.
        batches: Held-out inputs, each what the network is called with: a mapping by name, a tuple by
            position, or the only argument.
        budget: A :class:`~torchpact.Budget` for all blocks, a share of the FLOPs, or several of them.
        score: A function of the network's output and the batch that returns a number for each example,
            higher is better. By default minus the difference to the output of the network without halting
            (the KL divergence of ``logits``, else the relative squared distance); with a ``quality``, whether
            the largest entry of the output is the same.
        quality: How much of the score may be lost, such as 0.01.
        confidence: Of the quality, in (0, 1).
        score_range: The least and the largest score of an example; for the quality.
        inputs: Takes what the network is called with out of a batch, as where a batch has labels besides.
        runs: How many moves of single heads may be tried for each budget.
        progress: Is told of progress, see :class:`~torchpact.budget.Progress`; True writes lines to standard
            error, False is quiet, and None writes lines if standard error is a terminal.
        within: The confidence, in (0.5, 1), with which the mean cost of new examples is within a budget of
            FLOPs: an upper confidence bound of it has to be. None is that the mean of those held out is, so
            that new ones cost more about every other time.

    Returns:
        Thresholds; of several budgets a :class:`~torchpact.ThresholdTable`.

    Raises:
        TypeError: Not exactly one of budget and quality is given, or a single batch instead of several.
        ValueError: The budget cannot be met, there are too few examples for the quality, or scores are not
            one finite number an example.

    Example:
        >>> block = tp.AdaptiveBlock(nn.Linear(8, 8), nn.Linear(8, 1), max_steps=4)
        >>> net = nn.Sequential(nn.Linear(8, 8), block)
        >>> batches = [torch.randn(32, 8) for _ in range(2)]
        >>> thresholds = calibrate(net, batches, budget=0.6)
        >>> with tp.use_mode(net, "thresholded"), tp.use_thresholds(net, thresholds):
        ...     print(bool(tp.count_flops(net, torch.cat(batches)).share <= 0.6))
        True
        >>> table = calibrate(net, batches, budget=[0.5, 0.8])
        >>> table.at(0.6) == table[0.5]
        True

    """
    if (budget is None) == (quality is None):
        raise TypeError("expected a budget or a quality for thresholds, one of the two")
    check_count("runs", runs, 0)
    if within is not None:
        check_number("within", within, 0.5, 1, open_low=True, open_high=True)
    report = reporter(progress)
    if quality is not None:
        return _at_quality(net, batches, score, quality, confidence, score_range, inputs, runs, report)
    several = isinstance(budget, Sequence)
    given = budget if isinstance(budget, Sequence) else [budget]
    asked = [each if isinstance(each, Budget) else Budget(each) for each in given]
    if not asked:
        raise ValueError("expected at least one budget, got none")
    if any(each.ms is None and each.target is None for each in asked):
        raise ValueError("expected a budget for all blocks together, got one for each")
    if len({each.ms is None for each in asked}) > 1:
        raise ValueError("expected budgets of one unit, got some in FLOPs and some in ms")
    search = _Search(HeldOut(net, batches, score or "similarity", inputs), runs, report, within)
    for each in asked:
        if each.ms is not None:
            search.time(each)
    rows = [
        search.by_ms(each) if each.ms is not None else search.by_flops(each.target or 0.0) for each in asked
    ]
    return ThresholdTable(rows, "flops" if asked[0].ms is None else "ms") if several else rows[0].thresholds


class _Search:
    """Looks for the best thresholds within shares of the FLOPs, by a record of exits or by runs."""

    def __init__(self, held: HeldOut, runs: int, report: Report, within: float | None = None) -> None:
        self.held = held
        self.levels = LevelSearch(held, runs, report, within)
        self.record = held.record() if held.per_example else None
        self.least = self.levels.least() if self.record is None else float(self.record.costs[0].mean())
        self._meters: dict[int, LatencyMeter] = {}
        """By the example that is timed, which its budgets hold."""
        self._timed: dict[int, list[tuple[Tried, float]]] = {}

    def by_flops(self, share: float) -> TableRow:
        """Return the best within a share.

        Raises:
            ValueError: One step of every block is above it.

        """
        found = self.best(share)
        if found is None:
            raise ValueError(
                f"expected a budget of {self.least:.4g} to 1 of the FLOPs, the least being one step of every "
                f"block; got {share:g}"
            )
        return TableRow(share, found.thresholds, found.cost, found.score)

    def best(self, share: float) -> Tried | None:
        """Return the best within a share, as it ran."""
        if self.record is None:
            return self.levels.best(share)
        (name,) = self.held.blocks
        room = share
        for _ in range(8):
            bounds = best_bounds(self.record, max(room, self.least))
            if bounds is None:
                return None
            tried = self.levels.run(Thresholds({name: bounds}))
            if tried.upper <= share * (1 + 1e-9):
                return tried
            # a decision near its bound went the other way, or what is known of the mean is not enough
            room = min(room, tried.cost) - max(1.1 * (tried.upper - share), 0.001 * share)
        return None

    def time(self, budget: Budget) -> None:
        """Measure thresholds that may take about so many milliseconds, by bisecting the share of the FLOPs.

        Raises:
            ValueError: It takes longer if all halt after the first step.

        """
        assert budget.ms is not None
        key = id(budget.example)
        if key not in self._meters:
            self._meters[key], self._timed[key] = LatencyMeter(self.held.net, budget.example), []
        meter, timed = self._meters[key], self._timed[key]
        never = self.levels.run(Thresholds("never"))
        first = self.levels.run(exit_thresholds(self.held.net, 1))
        least, most = meter.ms([first.thresholds, never.thresholds])
        if budget.ms < least:
            raise ValueError(
                f"expected a budget of {least:.3g} to {most:.3g} ms for {meter}; got {budget.ms:g}"
            )
        timed += [(first, least), (never, most)]
        low, high = self.least, max(never.cost, self.least)
        share = low + (high - low) * min(1.0, (budget.ms - least) / max(most - least, 1e-9))
        for _ in range(7):
            found = self.best(share)
            assert found is not None
            (ms,) = meter.ms([found.thresholds])
            timed.append((found, ms))
            low, high = (share, high) if ms <= budget.ms else (low, share)
            if high - low < 0.01:
                break
            share = (low + high) / 2
        if meter.busy:
            warnings.warn(f"times of {meter}", stacklevel=4)

    def by_ms(self, budget: Budget) -> TableRow:
        """Return the best of all that were measured, for other budgets too, whose longest time is within."""
        assert budget.ms is not None
        longest: dict[Thresholds, tuple[Tried, float]] = {}
        for tried, ms in self._timed[id(budget.example)]:
            longest[tried.thresholds] = tried, max(ms, longest.get(tried.thresholds, (tried, 0.0))[1])
        ends = [each for each in longest.values() if each[1] <= budget.ms]
        # of what was fast enough once, the fastest: all halt after the first step
        fitting = ends or [min(longest.values(), key=lambda each: each[1])]
        tried, ms = max(fitting, key=lambda each: (each[0].score, -each[1]))
        return TableRow(budget.ms, tried.thresholds, ms, tried.score)


def _at_quality(
    net: nn.Module,
    batches: Iterable[Any],
    score: Score | None,
    quality: float,
    confidence: float,
    score_range: tuple[float, float],
    inputs: Callable[[Any], Any] | None,
    runs: int,
    report: Report,
) -> Thresholds:
    """Return the cheapest thresholds found that pass a test of their quality."""
    check_number("quality", quality, 0, 1, open_low=True, open_high=True)
    check_number("confidence", confidence, 0, 1, open_low=True, open_high=True)
    low, high = score_range
    check_number("the largest score", high, low, open_low=True)
    given, level = listed(batches), 1 - confidence
    if len(given) < 2:
        raise ValueError(f"expected at least two batches, one to search and one to test on, got {len(given)}")
    search = _Search(HeldOut(net, given[::2], score or "agreement", inputs), runs, report)
    test = HeldOut(net, given[1::2], score or "agreement", inputs)
    never = Thresholds("never")
    full, whole = test.run(never), search.levels.run(never)
    if not bool(((full.scores >= low) & (full.scores <= high)).all()):
        raise ValueError(f"expected scores in [{low:g}, {high:g}]: pass score_range=")
    shares = torch.linspace(whole.cost, search.least, _CANDIDATES + 1).tolist()
    found: dict[Thresholds, Tried] = {}
    for number, share in enumerate(shares[1:], start=1):
        each = search.best(share)
        if each is not None:
            found[each.thresholds] = each
        report(Progress("candidates", number, _CANDIDATES, {"cost": share}))
    promising = [each for each in found.values() if whole.score - each.score <= quality]
    promising.sort(key=lambda each: -each.cost)  # before the test data is looked at: the dearest first
    spans = (0.0, 1.0) if score is None else (low - high, high - low)
    p_value = partial(_p_value, test=test, full=full.scores, bound=quality, spans=spans, level=level)
    tested = count(1)

    def reported(tried: Tried) -> float:
        p = p_value(tried)
        report(Progress("tests", next(tested), len(promising), {"cost": tried.cost, "p": p}))
        return p

    passed = passing(promising, reported, level)
    if not passed:
        need = least_examples(quality / (1 if score is None else high - low), level)
        warnings.warn(
            f"expected thresholds that lose at most {quality:g} at confidence {confidence:g}, found none on "
            f"{len(test)} test examples ({need} without a loss would show it): they are never",
            stacklevel=3,
        )
        return never
    return passed[-1].thresholds


def _p_value(
    tried: Tried, test: HeldOut, full: Tensor, bound: float, spans: tuple[float, float], level: float
) -> float:
    """Return the p-value of the hypothesis that thresholds lose more than the bound."""
    losses = full - test.run(tried.thresholds).scores
    if test.score == "agreement" and bool(((losses == 0) | (losses == 1)).all()):
        return binomial_p_value(losses, bound)
    return betting_p_value(losses, bound, *spans, level=level)
