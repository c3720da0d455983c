"""What criteria that can be executed gain over fixed exits: fitted on one half, judged on the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchpact.budget.exit_losses import BlockExits
from torchpact.budget.frontier import cost_at, hull, loss_at, oracle
from torchpact.budget.ridge import Predictor
from torchpact.budget.search import Record, bounds_at_price

PRICES = 16
NEAR = 0.05
"""The share of what the cheapest exit loses that a point may lose to be chosen."""
RESAMPLES = 1000

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Gain:
    """What a criterion gains over the best mixture of fixed exits, on examples that it was not fitted on."""

    criterion: str
    """"confidence" of the exit's output, or a "linear" predictor of the advantage of halting; or the "heads"
    of the network."""
    cost: float
    """Of the point that saved most on the other half of the examples, of those that lost next to nothing."""
    loss: float
    saved: float
    """Cost saved, as a share of the original's FLOPs, at equal loss."""
    low: float
    """The ends of its interval: a paired bootstrap over examples, at 95 % for all criteria together."""
    high: float
    loss_saved: float
    """Loss saved at equal cost."""
    excess: tuple[float, float]
    """The interval of the loss above that of the last exit."""
    curve: Points
    """Costs and losses at several prices of the cost."""


class Served(NamedTuple):
    """Each exit through the better of its read-outs: that of the network, or the fitted one besides."""

    costs: Tensor
    losses: Tensor
    sure: Tensor | None
    fitted: Tensor
    """Whether it is the fitted one, (L,)."""


def served(exits: BlockExits) -> Served:
    """Return each exit through the fitted read-out where its mean is better by more than noise."""
    if exits.readout is None:
        return Served(exits.costs, exits.raw, exits.raw_sure, torch.zeros(exits.steps, dtype=torch.bool))
    raw = exits.raw.double().mean(1)
    room = 0.01 * (raw - raw[-1]).clamp(min=0).max()
    fitted = exits.readout.double().mean(1) < raw - room
    pick = fitted.unsqueeze(1)
    sure = exits.raw_sure
    if sure is not None and exits.readout_sure is not None:
        sure = torch.where(pick, exits.readout_sure, sure)
    costs = exits.costs + pick * exits.readout_cost
    return Served(costs, torch.where(pick, exits.readout, exits.raw), sure, fitted)


def evaluations(exits: BlockExits, fitted: Tensor) -> Tensor:
    """Return what a criterion on outputs costs besides at each exit: read-outs of those before, (L, 1)."""
    each = exits.tail + fitted.double() * exits.readout_cost
    before = torch.cat([torch.zeros(1, dtype=torch.double), each[:-1].cumsum(0)])
    return before.unsqueeze(1)


def points(costs: Tensor, losses: Tensor) -> Tensor:
    """Return the frontier of mixtures of fixed exits, (m, 2), given their means, (L,) each."""
    return torch.stack([costs, losses], 1)[hull(costs, losses)]


class _Fold(NamedTuple):
    costs: Tensor
    losses: Tensor
    sure: Tensor | None
    features: Tensor


class _Choice(NamedTuple):
    """Exits of units, (n,)."""

    fitted: Tensor
    judged: Tensor


def _confident(fit: _Fold, judge: _Fold, price: float) -> _Choice:
    assert fit.sure is not None
    assert judge.sure is not None
    record = Record(fit.sure[:-1], fit.costs, -fit.losses)
    bounds = bounds_at_price(record, price)
    return _Choice(record.exits(bounds), Record(judge.sure[:-1], judge.costs, -judge.losses).exits(bounds))


def _linear(fit: _Fold, judge: _Fold, price: float, predictors: Sequence[Predictor]) -> _Choice:
    """Return exits where a linear function of the state predicts that halting is better than going on."""
    values = fit.losses + price * fit.costs
    going_on, count = values[-1], len(values) - 1
    own, other = torch.zeros(fit.features.shape[:2]), torch.zeros(judge.features.shape[:2])
    for step in reversed(range(count)):
        own[step], weights = predictors[step].fit(going_on - values[step])
        other[step] = predictors[step].predict(judge.features[step], weights)
        going_on = torch.where(own[step] > 0, values[step], going_on)
    bounds = [0.0] * count
    return _Choice(
        Record(own, fit.costs, -fit.losses).exits(bounds),
        Record(other, judge.costs, -judge.losses).exits(bounds),
    )


def gains(exits: BlockExits, seed: int = 0) -> list[Gain]:
    """Return what each criterion gains, cross-fitted: on each half the thresholds or weights of the other.

    On the half that it is fitted on, the point is chosen that saves most, among those that lose little
    against the best exit: a saving where most of the quality is gone is of no use. Without any it is that
    exit for all.

    Args:
        exits: What exits give.
        seed: Of the bootstrap.

    """
    if exits.steps < 2:
        return []
    give = served(exits)
    extra = evaluations(exits, give.fitted)
    names = [*(["confidence"] if give.sure is not None else []), "linear"]
    masks = [exits.halves == half for half in (0, 1)]
    prices = _prices(give)
    found = {}
    folds: dict[str, list[_Fold]] = {}
    predictors = [[Predictor(step[mask]) for step in exits.features] for mask in masks]
    for name in names:
        costs = (give.costs + (extra if name == "confidence" else 0)).double()
        folds[name] = [
            _Fold(
                costs[:, mask],
                give.losses[:, mask].double(),
                None if give.sure is None else give.sure[:, mask],
                exits.features[:, mask],
            )
            for mask in masks
        ]
        found[name] = _crossed(name, folds[name], prices, predictors, give, masks)
    return _judged(found, exits, give, seed)


def gain_of_heads(exits: BlockExits, seed: int = 0) -> Gain | None:
    """Return what the network's own heads gain at their present thresholds, through its own read-out.

    Args:
        exits: What exits give.
        seed: Of the bootstrap.

    Returns:
        The gain, without a curve; None where nothing can halt, or losses are of examples whose positions
        decide one by one.

    """
    examples = int(exits.examples.max()) + 1
    of_positions = exits.examples.numel() > examples
    if exits.steps < 2 or (not of_positions and exits.logits.size(1) != examples):
        return None
    logits = exits.h.double().logit() if of_positions else exits.logits
    at = Record(logits, exits.costs, -exits.raw).exits(exits.bounds).unsqueeze(0)
    cost, loss = (x.double().gather(0, at)[0] for x in (exits.costs, exits.raw))
    (found,) = _judged({"heads": _Crossed(cost, loss, ())}, exits, served(exits), seed)
    return found


def _prices(give: Served) -> list[float]:
    """Return prices of the cost that cover what the oracle pays, and more, in equal ratios."""
    slopes = oracle(give.costs, give.losses).diff(dim=0)
    rates = -slopes[:, 1] / slopes[:, 0]
    rates = rates[rates.isfinite()]
    if not len(rates):  # the cheapest exit is the best for all
        return [1.0]
    low, high = rates.quantile(torch.tensor([0.05, 0.95], dtype=torch.double)).log()
    return torch.linspace(float(low) - 2, float(high) + 1.5, PRICES, dtype=torch.double).exp().tolist()


class _Crossed(NamedTuple):
    """Outcomes of all units, on the half that a criterion was not fitted on."""

    cost: Tensor
    loss: Tensor
    curve: Points


def _crossed(
    name: str,
    folds: list[_Fold],
    prices: list[float],
    predictors: list[list[Predictor]],
    give: Served,
    masks: list[Tensor],
) -> _Crossed:
    cost, loss = torch.zeros_like(give.costs[0].double()), torch.zeros_like(give.losses[0].double())
    totals = torch.zeros(len(prices), 2, dtype=torch.double)
    for number, (fit, judge) in enumerate((folds, folds[::-1])):
        own, other = masks[number], masks[1 - number]
        means = give.costs[:, own].double().mean(1), fit.losses.mean(1)
        fixed, least = points(*means), hull(*means)[-1]
        # to begin with, all take the exit of the least loss, at its cost without criteria
        best, chosen = 0.0, None
        allowed = float(means[1][least] + NEAR * (means[1][0] - means[1][least]))
        for index, price in enumerate(prices):
            choice = (
                _confident(fit, judge, price)
                if name == "confidence"
                else _linear(fit, judge, price, predictors[number])
            )
            at = choice.fitted.unsqueeze(0)
            spent, lost = float(fit.costs.gather(0, at).mean()), float(fit.losses.gather(0, at).mean())
            saved = cost_at(fixed, lost) - spent
            if saved > best and lost <= allowed:
                best, chosen = saved, choice.judged
            at = choice.judged.unsqueeze(0)
            totals[index, 0] += judge.costs.gather(0, at).sum()
            totals[index, 1] += judge.losses.gather(0, at).sum()
        if chosen is None:
            cost[other], loss[other] = give.costs[least, other].double(), judge.losses[least]
        else:
            cost[other] = judge.costs.gather(0, chosen.unsqueeze(0))[0]
            loss[other] = judge.losses.gather(0, chosen.unsqueeze(0))[0]
    curve = tuple((float(c), float(x)) for c, x in totals / len(cost))
    return _Crossed(cost, loss, tuple(sorted(set(curve))))


def _judged(found: dict[str, _Crossed], exits: BlockExits, give: Served, seed: int) -> list[Gain]:
    """Return gains with intervals: examples are drawn again with all that they gave."""
    count = int(exits.examples.max()) + 1
    parts = [give.costs.double(), give.losses.double()]
    for each in found.values():
        parts += [each.cost.unsqueeze(0), each.loss.unsqueeze(0)]
    rows = torch.cat([*parts, torch.ones(1, exits.examples.numel(), dtype=torch.double)])
    sums = torch.zeros(len(rows), count, dtype=torch.double).index_add_(1, exits.examples, rows)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (RESAMPLES, count), generator=generator)
    weights = torch.zeros(RESAMPLES, count, dtype=torch.double)
    weights.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.double))
    totals = torch.cat([sums.sum(1, keepdim=True).T, weights @ sums.T])
    means = totals[:, :-1] / totals[:, -1:].clamp(min=1)
    steps = exits.steps
    frontiers = [points(row[:steps], row[steps : 2 * steps]) for row in means]
    level = 0.05 / max(len(found), 1)
    results = []
    for index, (name, each) in enumerate(found.items()):
        own = means[:, 2 * steps + 2 * index : 2 * steps + 2 * index + 2].tolist()
        saved = [cost_at(line, loss) - cost for line, (cost, loss) in zip(frontiers, own, strict=True)]
        low, high = torch.tensor(saved[1:]).quantile(torch.tensor([level / 2, 1 - level / 2])).tolist()
        above = torch.tensor([x[1] for x in own[1:]]) - means[1:, 2 * steps - 1].float()
        least, most = above.quantile(torch.tensor([0.025, 0.975])).tolist()
        cost, loss = own[0]
        better = loss_at(frontiers[0], cost) - loss
        results.append(Gain(name, cost, loss, saved[0], low, high, better, (least, most), each.curve))
    return results
