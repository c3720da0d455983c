"""What every exit gives for each example: recorded once, so that criteria can be compared on it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import torchpact as tp
from torchpact import criteria
from torchpact.budget.search import Record, best_bounds
from torchpact_recipes.halting.networks import ReviewBatch, ReviewNet, pooled
from torchpact_recipes.halting.review_training import all_exits


class ExitRecord(NamedTuple):
    """What n examples give at each of L exits."""

    states: Tensor
    """Means over real tokens, (L, n, features)."""
    classes: Tensor
    """Class logits, (L, n, classes)."""
    labels: Tensor
    lengths: Tensor
    """Real tokens, (n,)."""

    @property
    def right(self) -> Tensor:
        """Whether each exit predicts the label, (L, n)."""
        return (self.classes.argmax(-1) == self.labels).double()


@torch.no_grad()
def record_exits(net: ReviewNet, batches: Iterable[ReviewBatch]) -> ExitRecord:
    """Run an adapted network once, without halting, and record its exits.

    Args:
        net: The network.
        batches: What it is called with.

    """
    states, classes, labels, lengths = [], [], [], []
    for inputs, given in batches:
        with torch.autocast("cpu", torch.bfloat16):
            found = all_exits(net, inputs)
        means = torch.stack([pooled(each.float(), inputs["attention_mask"]) for each in found])
        states.append(means)
        classes.append(net.read(means))
        labels.append(given)
        lengths.append(inputs["attention_mask"].sum(1))
    return ExitRecord(torch.cat(states, 1), torch.cat(classes, 1), torch.cat(labels), torch.cat(lengths))


@torch.no_grad()
def record_plain(net: ReviewNet, batches: Iterable[ReviewBatch]) -> Tensor:
    """Return the class logits of a network without exits, (n, classes)."""
    found = []
    for inputs, _ in batches:
        with torch.autocast("cpu", torch.bfloat16):
            found.append(net(**inputs).float())
    return torch.cat(found)


def halting_logits(heads: Sequence[criteria.Criterion], record: ExitRecord) -> Tensor:
    """Return what criteria say at each exit but the last, as a run of the network asks them, (L − 1, n).

    Args:
        heads: One for each exit but the last, or one for all.
        record: The exits.

    """
    found, memory = [], None
    for index in range(len(record.states) - 1):
        before = record.states[max(index - 1, 0)]
        head = heads[index if len(heads) > 1 else 0]
        logits = head(criteria.Exit(record.states[index], before, index, memory=memory))
        if isinstance(logits, tuple):
            logits, memory = logits
        found.append(logits.reshape(-1))
    return torch.stack(found)


def train_heads(
    heads: Sequence[criteria.Criterion], record: ExitRecord, tau: float, updates: int = 100, lr: float = 0.02
) -> None:
    """Train criteria by the advantage of halting, in errors, on all examples of a record at once.

    Args:
        heads: One for each exit but the last.
        record: Of examples that the network was not trained on.
        tau: The price of a step, in errors.
        updates: How many.
        lr: The learning rate of plain Adam.

    """
    weights = {id(p): p for head in heads for p in head.parameters()}  # of a shared read-out once
    optimizer = torch.optim.Adam([*weights.values()], lr=lr)
    losses = 1 - record.right.float()
    for _ in range(updates):
        logits = halting_logits(heads, record)
        whole = torch.cat([logits, torch.zeros_like(logits[:1])]).unsqueeze(2)
        loss = tp.advantage_loss(losses, whole, tau)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def common_bound(logits: Tensor, costs: Tensor, budget: float) -> tuple[float, ...]:
    """Return one bound for all exits, the largest at which the mean cost is within a budget.

    Args:
        logits: Of the exits but the last, (L − 1, n).
        costs: Of all exits, (L, n).
        budget: The mean cost.

    """
    values = logits.flatten().unique()
    scores = torch.zeros_like(costs)
    low, high = -1, len(values) - 1  # with bound ``low`` the budget is met; −1 halts all at the first exit
    while low < high:
        middle = (low + high + 1) // 2
        bounds = [float(values[middle])] * len(logits)
        fits = Record(logits, costs, scores).outcome(bounds)[0] <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    bound = float(values[low]) if low >= 0 else tp.Thresholds.ALWAYS
    return (bound,) * len(logits)


def bounds_within(
    logits: Tensor, costs: Tensor, scores: Tensor, budget: float
) -> dict[str, tuple[float, ...]]:
    """Return thresholds within a budget on validation data, of two kinds: one common bound, or each its own.

    Args:
        logits: Of the exits but the last, (L − 1, n).
        costs: Of all exits, (L, n).
        scores: Of all exits, (L, n), higher is better.
        budget: The mean cost.

    """
    found = {"common": common_bound(logits, costs, budget)}
    own = best_bounds(Record(logits, costs, scores), budget)
    return found if own is None else {**found, "each": own}


def exits_taken(logits: Tensor, bounds: Sequence[float]) -> Tensor:
    """Return the exit of each example, from 0."""
    return Record(logits, logits, logits).exits(bounds)
