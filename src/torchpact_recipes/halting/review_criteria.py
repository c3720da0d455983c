"""Criteria on the exits of MiniLM: trained, priced, and what examples come to with some thresholds."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchpact import criteria
from torchpact_recipes.halting.exit_record import (
    ExitRecord,
    bounds_within,
    exits_taken,
    halting_logits,
    train_heads,
)
from torchpact_recipes.halting.review_training import ReviewSettings
from torchpact_recipes.halting.tables import Row

TAUS = (0.01, 0.03, 0.06)
LEARNED = ("learned confidence", "linear + confidence", "mlp")


class Trained(Protocol):
    """Where networks and records come from."""

    exits_arm: str
    """The name of the network with exits."""

    @property
    def layers(self) -> int:
        """How many layers the whole network has."""

    def network(self, arm: str, seed: int) -> Any:
        """Return a network."""

    def record(self, arm: str, seed: int, part: str) -> dict[str, Tensor]:
        """Return what it gives."""

    def exits(self, seed: int, part: str) -> ExitRecord:
        """Return the exits."""

    def exit_costs(self, heads: Callable[[Any], Any], length: int) -> Tensor:
        """Return FLOPs by exit and length."""

    @property
    def settings(self) -> ReviewSettings:
        """How networks were trained."""


class Tried(NamedTuple):
    """A criterion with its logits and costs on each part of the data."""

    logits: dict[str, Tensor]
    costs: dict[str, Tensor]


def heads_for(read: Any, width: int, exits: int) -> dict[str, list[criteria.Criterion]]:
    """Return the criteria that are compared; those to be trained one for each exit but the last."""

    def confidence() -> criteria.Criterion:
        return criteria.Confidence(read, pool="mean")

    made: dict[str, list[criteria.Criterion]] = {"confidence": [confidence()]}
    # its logits count steps, so that thresholds choose how many
    made["patience"] = [criteria.Unchanged(read, steps=1, pool="mean")]
    for _ in range(exits - 1):
        linear = criteria.Linear(width, bias=-1.0)
        both = criteria.Combined([confidence(), linear], "learned", bias=-3.0)
        alone = criteria.Combined([confidence()], "learned", bias=-3.0)
        made.setdefault("learned confidence", []).append(alone)
        made.setdefault("linear + confidence", []).append(both)
        made.setdefault("mlp", []).append(criteria.MLP(width, hidden=8, bias=-3.0))
    return made


def tried(work: Trained, seed: int, parts: Sequence[str], table: dict[str, Tensor]) -> dict[str, Tried]:
    """Return all criteria of a seed; heads are trained at several prices on examples of their own."""
    net = work.network(work.exits_arm, seed)
    records = {part: work.exits(seed, part) for part in parts}
    learn = work.exits(seed, "heads")
    found = {}
    exits, _, width = learn.states.shape
    for name in heads_for(net.read, width, exits):
        learned = name in LEARNED
        for tau in TAUS if learned else (0.0,):
            torch.manual_seed(seed)
            heads = heads_for(net.read, width, exits)[name]
            if learned:
                train_heads(heads, learn, tau)
            with torch.no_grad():
                logits = {part: halting_logits(heads, each) for part, each in records.items()}
            costs = {part: table[name][:, each.lengths] for part, each in records.items()}
            whole = {part: table["plain"][-1, each.lengths].mean() for part, each in records.items()}
            costs = {part: each / whole[part] for part, each in costs.items()}
            found[f"{name}, τ = {tau:g}" if learned else name] = Tried(logits, costs)
    return found


def cost_table(work: Trained) -> dict[str, Tensor]:
    """Return the FLOPs of all exits by length, for each criterion, and without any.

    Criteria look at the mean over tokens, so that what they cost does not depend on the length.
    """
    width = work.exits(0, "heads").states.size(2)
    exits = work.layers
    plain = work.exit_costs(lambda net: criteria.RandomExit([1 / exits] * exits), work.settings.length)
    table = {"plain": plain}
    for name in heads_for(torch.nn.Linear(1, 2), 1, exits):
        with_heads = work.exit_costs(partial(_heads_of, name, width, exits), 1)
        table[name] = plain + (with_heads[:, 1:] - plain[:, 1:2])
    return table


def _heads_of(name: str, width: int, exits: int, net: Any) -> Any:
    heads = heads_for(net.read, width, exits)[name]
    return heads if len(heads) > 1 else heads[0]


def chosen_bounds(one: Tried, record: ExitRecord, part: str, budget: float) -> dict[str, tuple[float, ...]]:
    """Return thresholds within a budget, of both kinds, by how many labels are right."""
    return bounds_within(one.logits[part], one.costs[part], record.right, budget)


def crossed_accuracy(one: Tried, record: ExitRecord, part: str, budget: float) -> dict[str, float]:
    """Return accuracies with thresholds of one half of the examples on the other half."""
    count = record.labels.numel()
    half = torch.arange(count) % 2 == 0
    total: dict[str, float] = {}
    for own, other in ((half, ~half), (~half, half)):
        logits, costs = one.logits[part], one.costs[part]
        bounds = bounds_within(logits[:, own], costs[:, own], record.right[:, own], budget)
        for kind, each in bounds.items():
            taken = exits_taken(logits[:, other], each).unsqueeze(0)
            total[kind] = total.get(kind, 0.0) + float(record.right[:, other].gather(0, taken).sum())
    return {kind: value / count for kind, value in total.items()}


def figures(accuracy: float, cost: float, layers: float) -> Row:
    """Return what a row shows of a network."""
    return {"accuracy": round(accuracy, 4), "cost": round(cost, 4), "layers": round(layers, 3)}


class Outcome(NamedTuple):
    """What examples come to with some thresholds."""

    right: Tensor
    costs: Tensor
    taken: Tensor
    """The exit of each, from 0."""

    @property
    def figures(self) -> Row:
        """The means, as a row."""
        right, cost, taken = (float(each.double().mean()) for each in self)
        return figures(right, cost, taken + 1)


def outcome(one: Tried, record: ExitRecord, part: str, bounds: Sequence[float]) -> Outcome:
    """Return what examples of a part come to with some thresholds."""
    taken = exits_taken(one.logits[part], bounds)
    index = taken.unsqueeze(0)
    return Outcome(record.right.gather(0, index)[0], one.costs[part].gather(0, index)[0], taken)


def oracle(record: ExitRecord, costs: Tensor, budget: float) -> float:
    """Return the accuracy if each example takes its cheapest right exit, the cheapest to gain first."""
    right = record.right > 0
    first = torch.where(right.any(0), right.int().argmax(0), 0)
    extra = costs.gather(0, first.unsqueeze(0))[0] - costs[0]
    order = torch.where(right.any(0), extra, torch.inf).sort().values
    room = budget * costs.size(1) - float(costs[0].sum())
    return int((order.cumsum(0) <= room).sum()) / costs.size(1)


def random_accuracy(record: ExitRecord, taken: Tensor) -> float:
    """Return the expected accuracy of random exits with the same histogram."""
    shares = torch.bincount(taken, minlength=len(record.right)).double() / len(taken)
    return float(shares @ record.right.mean(1))
