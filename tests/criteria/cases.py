"""Criteria of every kind, and the same decisions by loops over positions, one number at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import torchpact as tp
from torchpact import criteria

CLASSES = 5


@dataclass(frozen=True)
class Case:
    """A criterion, and the logits of an example's tokens by hand."""

    name: str
    make: Callable[..., Any]
    """Called with the read-out and ``per``."""
    logits: Callable[[list[list[list[float]]], list[Any], int], float]
    """Of class probabilities by exit and token, of states by exit (with the first) and token, and an exit."""

    def __str__(self) -> str:
        return self.name


def logit(p: float) -> float:
    return math.inf if p >= 1 else -math.inf if p <= 0 else math.log(p) - math.log1p(-p)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def probability(probs: Any, _states: Any, exit: int) -> float:
    return logit(mean([max(p) for p in probs[exit]]))


def margin(probs: Any, _states: Any, exit: int) -> float:
    return logit(mean([sorted(p)[-1] - sorted(p)[-2] for p in probs[exit]]))


def entropy(probs: Any, _states: Any, exit: int) -> float:
    shares = [-sum(x * math.log(x) for x in p if x) / math.log(len(p)) for p in probs[exit]]
    return logit(1 - mean(shares))


def unchanged(steps: int) -> Callable[..., float]:
    def count(probs: Any, _states: Any, exit: int) -> float:
        predictions = [[p.index(max(p)) for p in row] for row in probs[: exit + 1]]
        same = 0
        for now, before in zip(predictions[:0:-1], predictions[-2::-1], strict=True):
            if now != before:
                break
            same += 1
        return same - steps + 0.5

    return count


def latent(_probs: Any, states: Any, exit: int) -> float:
    now, before = states[exit + 1], states[exit]
    moved = sum((a - b) ** 2 for u, v in zip(now, before, strict=True) for a, b in zip(u, v, strict=True))
    return -math.log(math.sqrt(moved) / math.sqrt(sum(b**2 for v in before for b in v)))


def divergence(probs: Any, _states: Any, exit: int) -> float:
    if not exit:
        return -math.inf
    pairs = zip(probs[exit], probs[exit - 1], strict=True)
    found = [sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True)) for p, q in pairs]
    return -math.log(mean(found))


def either(probs: Any, states: Any, exit: int) -> float:
    return max(probability(probs, states, exit) - 1.0, unchanged(2)(probs, states, exit))


def both(probs: Any, states: Any, exit: int) -> float:
    return min(latent(probs, states, exit) - 0.5, unchanged(1)(probs, states, exit))


CASES = [
    Case("probability", criteria.Confidence, probability),
    Case("margin", lambda read, **kw: criteria.Confidence(read, "margin", **kw), margin),
    Case("entropy", lambda read, **kw: criteria.Confidence(read, "entropy", **kw), entropy),
    *(
        Case(f"unchanged {k}", lambda read, k=k, **kw: criteria.Unchanged(read, k, **kw), unchanged(k))
        for k in (1, 2, 3)
    ),
    Case("latent change", lambda _read, **kw: criteria.LatentChange(**kw), latent),
    Case("divergence", criteria.Divergence, divergence),
    Case(
        "any of two",
        lambda read, **kw: criteria.Combined(
            [criteria.Confidence(read, **kw), criteria.Unchanged(read, 2, **kw)], "any", bounds=[1.0, 0.0]
        ),
        either,
    ),
    Case(
        "all of two",
        lambda read, **kw: criteria.Combined(
            [criteria.LatentChange(**kw), criteria.Unchanged(read, 1, **kw)], "all", bounds=[0.5, 0.0]
        ),
        both,
    ),
]


def by_hand(
    case: Case, states: list[Tensor], read: Callable[[Tensor], Tensor], real: Tensor | None, per: str
) -> Tensor:
    """Return logits after all steps but the last, (L − 1, batch, length or 1), by loops over tokens.

    Args:
        case: The criterion.
        states: (batch, length, features) before the first step, and after each.
        read: Class logits of a token.
        real: False for padding; None where there is none.
        per: "token" or "example".

    """
    batch, length = states[0].shape[:2]
    rows = torch.zeros(len(states) - 2, batch, length if per == "token" else 1)
    for b in range(batch):
        tokens = [t for t in range(length) if real is None or real[b, t]]
        for group in [[t] for t in range(length)] if per == "token" else [tokens]:
            probs = [[read(u[b, t]).double().softmax(-1).tolist() for t in group] for u in states[1:]]
            vectors = [[u[b, t].double().tolist() for t in group] for u in states]
            for exit in range(len(states) - 2):
                rows[exit, b, group[0] if per == "token" else 0] = case.logits(probs, vectors, exit)
    return rows


def bound_within(logits: Tensor) -> float:
    """Return the threshold that spreads positions over the most depths, away from all logits."""
    values: list[float] = logits[logits.isfinite()].unique().tolist()
    middles = [(a + b) / 2 for a, b in pairwise(values) if b - a > 1e-2]
    return max(middles or [0.0], key=lambda bound: len(steps_of(logits, bound).unique()))


def steps_of(logits: Tensor, bound: float) -> Tensor:
    """Return how many steps are run where the first logit above a bound halts."""
    steps = torch.full(logits.shape[1:], len(logits) + 1)
    for index in reversed(range(len(logits))):
        steps[logits[index] > bound] = index + 1
    return steps


def block(criterion: Any, length: int = 6, size: int = 4) -> tp.AdaptiveBlock:
    """Return a block of tokens whose steps move them less and less."""
    torch.manual_seed(0)

    class Step(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(size, size), 2.0 / (1 + index)

        def forward(self, u: Tensor) -> Tensor:
            moved: Tensor = self.scale * (3 * self.linear(u)).sin()
            return u + moved

    return tp.AdaptiveBlock([Step(index) for index in range(length)], criterion, mode="thresholded")
