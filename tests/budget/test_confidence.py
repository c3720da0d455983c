"""Quality at a confidence: the tests, and how often a bound is violated over many draws of the data."""

import math

import pytest
import torch

from torchpact.budget.confidence import betting_p_value, binomial_p_value, least_examples, passing


@pytest.mark.parametrize(("n", "ones", "bound"), [(5, 0, 0.3), (20, 3, 0.2), (8, 8, 0.5)])
def test_the_binomial_p_value_is_the_sum_of_the_probabilities(n, ones, bound):
    losses = torch.tensor([1.0] * ones + [0.0] * (n - ones))
    exact = sum(math.comb(n, k) * bound**k * (1 - bound) ** (n - k) for k in range(ones + 1))
    assert math.isclose(binomial_p_value(losses, bound), exact, rel_tol=1e-9)


def draws(kind, mean, n, generator):
    """Losses with a mean: of 0 and 1, or differences of scores in {-1, 0, 1}, or of scores in [0, 1]."""
    if kind == "zero or one":
        return (torch.rand(n, generator=generator) < mean).double()
    if kind == "differences":
        u = torch.rand(n, generator=generator)
        return (u < 0.05 + mean).double() - (u > 0.95).double()
    return torch.rand(n, generator=generator).double() * 2 * mean


P_VALUES = {
    "zero or one": lambda losses, bound: binomial_p_value(losses, bound),
    "differences": lambda losses, bound: betting_p_value(losses, bound, -1, 1),
    "uniform": lambda losses, bound: betting_p_value(losses, bound, 0, 1),
}


@pytest.mark.parametrize("kind", P_VALUES)
def test_a_mean_at_the_bound_is_rejected_at_most_as_often_as_the_level_says(kind):
    generator = torch.Generator().manual_seed(0)
    trials, level = 1000, 0.1
    wrong = sum(P_VALUES[kind](draws(kind, 0.05, 200, generator), 0.05) <= level for _ in range(trials))
    # were the rate exactly the level, more than this would be seen with a probability of 1e-4
    assert wrong <= trials * level + 3.72 * math.sqrt(trials * level * (1 - level))


@pytest.mark.parametrize(("kind", "n"), [("zero or one", 400), ("differences", 3000), ("uniform", 300)])
def test_a_mean_well_below_the_bound_is_found_to_be(kind, n):
    generator = torch.Generator().manual_seed(0)
    found = sum(P_VALUES[kind](draws(kind, 0.005, n, generator), 0.05) <= 0.05 for _ in range(50))
    assert found >= 45


def test_what_a_sequence_lets_pass_is_wrong_at_most_as_often_as_the_level_says():
    """Candidates lose more and more; a trial fails if one passes that loses more than allowed."""
    generator = torch.Generator().manual_seed(0)
    means, bound, level, trials = [0.0, 0.01, 0.03, 0.051, 0.06, 0.08], 0.05, 0.1, 600
    wrong = 0
    for _ in range(trials):
        u = torch.rand(500, generator=generator)  # the same examples for all candidates
        passed = passing(means, p_value_on(u, bound), level)
        wrong += any(mean > bound for mean in passed)
    assert wrong <= trials * level + 3.72 * math.sqrt(trials * level * (1 - level))
    assert len(passed) >= 2


def p_value_on(u, bound):
    """The p-value of a candidate that loses on a share of all examples, its mean, on these."""
    return lambda mean: binomial_p_value((u < mean).double(), bound)


@pytest.mark.parametrize(("bound", "level"), [(0.01, 0.05), (0.1, 0.2)])
def test_so_many_examples_without_a_loss_are_just_enough(bound, level):
    n = least_examples(bound, level)
    assert binomial_p_value(torch.zeros(n), bound) <= level < binomial_p_value(torch.zeros(n - 1), bound)
