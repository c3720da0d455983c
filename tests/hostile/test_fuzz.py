"""A few of the cases of ``make fuzz``: those of its fixed seed."""

import random

import pytest

from tests.hostile import deployments
from tests.hostile.damage import CASES, Samples, run_case

EACH = 12


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return Samples(tmp_path_factory.mktemp("samples"))


@pytest.mark.parametrize("name", CASES)
def test_hostile_cases_end_as_promised(samples, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    outcomes = [run_case(name, seed, samples) for seed in range(EACH)]
    assert all(outcomes)


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_networks_are_deployed_as_what_they_are(first):
    for seed in range(first, first + 10):
        assert deployments.case(random.Random(seed))
