"""Made-up runs of fig. 5 of either kind must give either verdict."""

import pytest

from tests.experiments.judging import SCALE, SEEDS, all_modes, judge, write, write_fig5
from torchpact_recipes.experiments import fig5


@pytest.mark.parametrize(("better", "verdict"), [(0.0, "holds"), (0.01, "partly"), (0.03, "does not hold")])
def test_equal_flops_are_compared_between_points(archive, better, verdict):
    for run in fig5.runs(SCALE, SEEDS):
        if run.config.method != "plain":
            relaxed = run.config.method == "relaxed"
            flops = 1e8 - 4e8 * run.config.tau * (2 if relaxed else 1)
            accuracy = 0.8 + flops / 1e9 + (better if relaxed else 0)
            mode = "discrete" if relaxed else "act"
            write(
                archive,
                run,
                {mode: (accuracy, flops), "thresholded": (accuracy, flops), "relaxed": (0.9, 1e8)},
            )
    assert judge(archive, "perform similarly, ResNet-32").verdict == verdict
    # PSACT halts more at every τ of these made-up results
    assert judge(archive, "somewhat lower τ").verdict == "holds"


def test_curves_are_compared_seed_by_seed(archive):
    """PSACT is better in one seed and worse in the other, so that their means are alike."""

    def end(run):
        better = 0.007 * (1 - 2 * run.config.seed) if run.config.method == "relaxed" else 0
        return all_modes((0.8 + better, 1e8 - 4e8 * run.config.tau))

    write_fig5(archive, end)
    for network in ("ResNet-32", "ResNet-110"):
        found = judge(archive, f"perform similarly, {network}")
        assert found.verdict == "partly"
        assert found.measured.endswith("+0.00 ± 0.99 points on average, farthest apart 0.70 ± 0.00; 2 seeds")


def test_curves_that_share_no_flops_are_not_compared(archive):
    for run in fig5.runs(SCALE, SEEDS):
        if run.config.method != "plain":
            relaxed = run.config.method == "relaxed"
            flops = (2e8 if relaxed else 1e8) - 1e8 * run.config.tau
            write(archive, run, dict.fromkeys(("relaxed", "discrete", "thresholded", "act"), (0.9, flops)))
    assert judge(archive, "perform similarly, ResNet-32").verdict == "not measured yet"


@pytest.mark.parametrize(
    ("less", "verdict"),
    [
        ({(32, 0), (32, 1), (110, 0), (110, 1)}, "holds"),
        ({(32, 0), (32, 1)}, "partly"),
        ({(32, 0), (110, 0)}, "partly"),
        (set(), "does not hold"),
    ],
)
def test_both_networks_and_every_seed_must_need_a_lower_tau(archive, less, verdict):
    """``less``: the depths and seeds in which PSACT costs less than SACT of the same τ, by much."""

    def end(run):
        cheaper = (run.config.network.layers, run.config.seed) in less
        factor = {"act": 1, "relaxed": 0.8 if cheaper else 1.01}[run.config.method]
        return all_modes((0.9, factor * (1e8 - 4e8 * run.config.tau)))

    write_fig5(archive, end)
    found = judge(archive, "somewhat lower τ")
    assert found.verdict == verdict
    assert found.measured.count(" at τ = ") == 5  # three that ResNet-32 has in common, and two of ResNet-110


@pytest.mark.parametrize(
    ("slopes", "verdict"), [((4, 2), "holds"), ((4, -1), "partly"), ((1, -4), "does not hold")]
)
def test_flops_must_fall_with_tau_in_every_seed(archive, slopes, verdict):
    write_fig5(archive, lambda run: all_modes((0.9, 2e8 - 1e8 * slopes[run.config.seed] * run.config.tau)))
    assert judge(archive, "Higher values of τ").verdict == verdict


def test_flops_that_grow_anywhere_in_a_grid_are_seen(archive):
    """The least τ of SACT ResNet-110 costs the least of all, which no other grid has."""
    write_fig5(
        archive, lambda run: all_modes((0.9, 1e8 - 4e8 * run.config.tau - 9e7 * (run.config.tau == 0.0005)))
    )
    assert judge(archive, "Higher values of τ").verdict == "partly"


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [((0.91, 0.92), "holds"), ((0.92, 0.89), "partly"), ((0.7, 0.6), "does not hold")],
)
def test_resnet110_must_train_in_every_seed(archive, accuracies, verdict):
    write_fig5(archive, lambda run: all_modes((accuracies[run.config.seed], 1e8)))
    found = judge(archive, "trains ResNet-110")
    assert found.verdict == verdict
    assert found.measured.endswith("2 seeds")
