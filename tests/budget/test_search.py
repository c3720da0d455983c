"""Thresholds from a record of exits, against every combination of thresholds."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchpact as tp
from torchpact.budget import search
from torchpact.budget.search import Record, best_bounds, candidates


def random_record(seed, steps, examples, ties=False):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(steps - 1, examples, generator=generator)
    if ties:
        logits = logits.round()
    scores = torch.rand(steps, examples, generator=generator)
    costs = torch.rand(steps, examples, generator=generator).cumsum(0)
    return Record(logits, costs.double(), scores.double())


def outcome_by_hand(record, bounds):
    """Run example by example."""
    cost = score = 0.0
    steps, examples = record.costs.shape
    for i in range(examples):
        exit_ = next((l for l in range(steps - 1) if record.logits[l, i] > bounds[l]), steps - 1)
        cost += float(record.costs[exit_, i]) / examples
        score += float(record.scores[exit_, i]) / examples
    return cost, score


def exhaustive(record, budget):
    """The best score over all thresholds, at every logit, between them, and beyond."""
    options = [sorted({-1e9, *row.tolist()}) for row in record.logits]
    scores = [
        score
        for bounds in product(*options)
        for cost, score in [outcome_by_hand(record, bounds)]
        if cost <= budget + 1e-12
    ]
    return max(scores, default=None)


@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 5), st.booleans(), st.floats(0, 1))
def test_the_best_bounds_are_those_of_an_exhaustive_search(seed, steps, examples, ties, level):
    record = random_record(seed, steps, examples, ties)
    low, high = float(record.costs[0].mean()), float(record.costs[-1].mean())
    budget = low + 1e-9 + level * (high - low)
    bounds = best_bounds(record, budget)
    cost, score = outcome_by_hand(record, bounds)
    assert cost <= budget + 1e-9
    assert abs(score - exhaustive(record, budget)) < 1e-9


def test_a_budget_below_the_first_exit_has_no_bounds():
    record = random_record(0, 3, 4)
    assert best_bounds(record, float(record.costs[0].mean()) - 1e-6) is None


def test_what_is_found_without_trying_all_is_nearly_always_the_best(monkeypatch):
    monkeypatch.setattr(search, "MOST_COMBINATIONS", 0)
    gaps = []
    for seed in range(20):
        record = random_record(seed, 4, 5)
        low, high = float(record.costs[0].mean()), float(record.costs[-1].mean())
        budget = low + 1e-9 + (high - low) * (seed % 10 + 0.5) / 10
        cost, score = outcome_by_hand(record, best_bounds(record, budget))
        assert cost <= budget + 1e-9
        gaps.append(exhaustive(record, budget) - score)
    assert sum(gap < 1e-9 for gap in gaps) >= 18


@pytest.mark.parametrize("examples", [1, 7, 300])
def test_bounds_of_many_examples_are_executed_as_searched(examples):
    record = random_record(1, 5, examples, ties=examples == 300)
    bounds = best_bounds(record, 1.4)
    assert record.outcome(bounds) == pytest.approx(outcome_by_hand(record, bounds))
    assert record.outcome(bounds)[0] <= 1.4


def test_neighbours_in_single_precision_are_told_apart():
    low = torch.tensor(1.0)
    high = torch.nextafter(low, torch.tensor(2.0))
    bounds = candidates(torch.stack([low, high]))
    assert len(bounds) == 3
    assert [bool(x > bounds[1]) for x in (low, high)] == [False, True]


def test_logits_that_are_nan_never_halt_but_at_always():
    record = Record(
        torch.tensor([[torch.nan, 1.0]]), torch.tensor([[1.0, 1.0], [2.0, 2.0]]), torch.zeros(2, 2)
    )
    assert record.exits([0.0]).tolist() == [1, 0]
    assert record.exits([tp.Thresholds.ALWAYS]).tolist() == [0, 0]
    bounds = best_bounds(record, 1.5)
    assert bounds is not None
    assert record.outcome(bounds)[0] <= 1.5
