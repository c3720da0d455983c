"""What benchmarks of halting measure with: intervals, images made harder, and networks with fewer units."""

import importlib
from pathlib import Path

import pytest
import torch

import torchpact as tp

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module


def test_the_interval_of_a_mean_is_that_of_the_normal_approximation(bench):
    torch.manual_seed(0)
    values = torch.randn(400) + 1
    mean, low, high = bench("bootstrap").interval(values)
    error = float(values.std()) / 20
    assert mean == pytest.approx(float(values.mean()))
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.02)


def test_images_that_are_distorted_by_nothing_are_shifted_and_flipped_at_most(bench):
    images = torch.randint(256, (20, 3, 32, 32), dtype=torch.uint8)
    found = bench("frozen_data").distorted(images, 0.0, torch.Generator().manual_seed(0))
    for before, after in zip(images, found, strict=True):
        inner = after[:, 4:28, 4:28]
        shifted = [
            image[:, top : top + 24, left : left + 24]
            for image in (before, before.flip(2))
            for top in range(2, 7)
            for left in range(2, 7)
        ]
        assert any(torch.equal(inner, each) for each in shifted)


def test_the_strength_of_a_distortion_is_found_by_the_accuracy_that_it_leaves(bench):
    data, seen = bench("frozen_data"), []
    images = bench("frozen_exits").Images(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4).long())

    def correct(given):
        seen.append(given.shape)
        return 1.0 - 0.1 * len(seen)  # 0.9, 0.8, …: above 0.75 twice, so that the strength is 0.75 and more

    found = data.matched_strength(correct, images, 0.75)
    assert len(seen) == 6
    assert 0.75 < found < 0.77


def test_exits_of_a_trunk_are_those_of_the_network_and_cost_what_their_units_do(bench):
    exits = bench("frozen_exits")
    inputs, trunk = torch.randn(2, 3, 32, 32), exits.Trunk((5, 5, 5))
    trunk.fit_norms(torch.randn(8, 3, 32, 32))
    found = trunk.run(exits.Split(inputs, torch.zeros(2).long()))
    with torch.no_grad():
        logits, _ = tp.models.resnet32(pretrained="plain")(inputs)
    assert torch.allclose(found["logits"], logits, atol=1e-3)
    unit, whole = 9_437_184, 137_725_184
    costs = exits.costs_of((5, 5, 5))
    assert [float(x) for x in costs.diff()[:3]] == pytest.approx([unit / whole] * 3, abs=1e-3)
    assert float(costs[-1]) == pytest.approx(1, abs=5e-3)
    assert float(exits.costs_of((4, 4, 5))[3]) == pytest.approx(1 - 3 * unit / whole, abs=5e-3)


def test_a_histogram_of_random_depths_has_the_loss_of_its_mixture(bench):
    alive, parity = bench("heads_alive"), bench("prefix_parity")
    torch.manual_seed(0)
    loop = parity.Loop(8).requires_grad_(False)
    net = alive.Adaptive(loop, tp.criteria.Linear(8, bias=-3.0, per="pixel"))
    given = parity.strings(20, 6, torch.Generator().manual_seed(0))
    with tp.use_thresholds(net, tp.exit_thresholds(net, 3)):  # all halt after three steps: nothing is random
        row = alive.measured(net, "pixel", given)
    assert (row["alive"], row["steps"]) == ("0.000", "3.00")
    assert row["loss"] == row["random_loss"]
    states = loop.states(given.tokens, 3)
    assert float(row["loss"]) == pytest.approx(float(loop.losses(states[2], given.parity).mean()), abs=1e-4)
