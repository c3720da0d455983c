"""The rule that claims are judged by."""

import math

import pytest

from torchpact_recipes.experiments.verdicts import across, judge


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([2.1], "holds"),
        ([1.9], "does not hold"),
        ([2.1, 2.2, 9.0], "holds"),  # in every seed, though two standard errors are more than it is above
        ([1.9, 2.4, 2.5, 2.5, 2.5, 2.5], "holds"),  # mean 2.38, standard error 0.10
        ([1.9, 2.4, 2.1], "partly"),  # mean 2.13, standard error 0.15
        ([0.01, 8.82, 3.64], "partly"),
        ([0.01, 0.02, 3.64], "does not hold"),
    ],
)
def test_a_claim_holds_if_every_seed_or_the_mean_by_two_standard_errors_says_so(values, verdict):
    assert judge(values, above=2) == verdict
    assert judge([-value for value in values], below=-2) == verdict
    loosely = judge(values, above=2, loosely=(0, math.inf))
    assert loosely == ("holds" if verdict == "holds" else "partly")


def test_settings_that_disagree_hold_partly():
    assert across(["holds", "holds"]) == "holds"
    assert across(["holds", "partly"]) == across(["does not hold", "holds"]) == "partly"
    assert across(["partly", "does not hold"]) == across(["partly"]) == "partly"
    assert across(["does not hold"] * 2) == "does not hold"
