"""Claims are judged by numbers: made-up results of either kind must give either verdict."""

import json

import pytest

from tests.experiments.synthetic import evaluation
from tests.experiments.synthetic import write as write_events
from torchpact.experiments import SCALES, Archive, claims, fig3, fig4, fig5, variants

SCALE, SEEDS = SCALES["fast"], [0, 1]


def write(archive, run, modes, variance=None):
    """A run with one validation: accuracy and FLOPs by mode."""
    event = {"modes": {mode: evaluation(100 * a, flops / 1e6) for mode, (a, flops) in modes.items()}}
    if variance is not None:
        event["gradient_variance"] = variance
    write_events(archive, run, {1000: event})


def judge(archive, text):
    (found,) = [f for f in claims.findings(archive, SCALE, SEEDS) if text in f.claim]
    return found


@pytest.fixture
def archive(tmp_path):
    return Archive(tmp_path / "results", tmp_path / "runs")


def test_without_runs_nothing_is_judged_but_what_is_exact(archive, tmp_path):
    found = claims.findings(archive, SCALE, SEEDS)
    assert {f.verdict for f in found[1:]} == {"not measured yet"}
    assert found[0].verdict == "holds"
    table, numbers = claims.draw(archive, SCALE, SEEDS, tmp_path / "figures")
    assert len(json.loads(numbers.read_text())) == len(found) == len(table.read_text().splitlines()) - 2


@pytest.mark.parametrize(
    ("lost", "psact", "sact"),
    [(0.001, "holds", "does not hold"), (0.006, "partly", "does not hold"), (0.06, "does not hold", "holds")],
)
def test_what_the_thresholded_mode_loses(archive, lost, psact, sact):
    for run in fig5.runs(SCALE, SEEDS):
        if run.config.method != "plain":
            own = "discrete" if run.config.method == "relaxed" else "act"
            modes = {own: (0.9, 1e8), "thresholded": (0.9 - lost, 1e8), "relaxed": (0.9, 1.1e8)}
            write(archive, run, modes)
    assert judge(archive, "PSACT can be evaluated thresholded").verdict == psact
    assert judge(archive, "SACT evaluated thresholded loses").verdict == sact


@pytest.mark.parametrize(
    ("much", "verdict"),
    [({True}, "partly"), ({False}, "partly"), ({True, False}, "holds"), (set(), "does not hold")],
)
def test_what_sact_loses_is_judged_by_both_networks_and_both_kinds_of_heads(archive, much, verdict):
    """``much``: whether heads that lose six points, on ResNet-110 or on both, have batch norm."""
    for depth in (32, 110):
        for _, run in variants.heads(SCALE, SEEDS[:1], depth):
            six = run.config.network.halting_norm in much and (depth == 110 or verdict == "holds")
            write(archive, run, {"act": (0.9, 1e8), "thresholded": (0.84 if six else 0.89, 1e8)})
    found = judge(archive, "SACT evaluated thresholded loses")
    assert found.verdict == verdict
    settings = {"partly": 3, "holds": 14, "does not hold": 0}[verdict]
    assert found.measured.startswith(f"5 or more in {settings} of 14 settings")
    assert ("(ResNet-110, heads with batch norm, τ = 0.005; " in found.measured) == (much == {True})


@pytest.mark.parametrize(("ratio", "verdict"), [(1.1, "holds"), (0.9, "does not hold")])
def test_the_computation_of_the_relaxed_model(archive, ratio, verdict):
    for run in fig5.runs(SCALE, SEEDS):
        if run.config.method == "relaxed":
            write(
                archive,
                run,
                {"relaxed": (0.9, ratio * 1e8), "discrete": (0.9, 1e8), "thresholded": (0.9, 1e8)},
            )
    found = judge(archive, "requires more computation")
    assert found.verdict == verdict
    assert found.measured.startswith(f"{ratio:.3f} to {ratio:.3f} times")


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


@pytest.mark.parametrize(("gap", "verdict"), [(2.0, "holds"), (3.5, "partly"), (0.2, "does not hold")])
def test_the_variance_of_reinforce(archive, gap, verdict):
    for run in fig4.runs(SCALE, SEEDS):
        exponent = -5 + (gap if run.config.method == "reinforce" else 0)
        accuracy = 0.9 - (0.1 if run.config.method == "reinforce" and run.config.network.group < 4 else 0)
        variance = {"latents": 10 ** (exponent + 0.1), "halting": 1.0, "total": 10**exponent}
        write(archive, run, {"discrete": (accuracy, 1e8)}, variance=variance)
    found = judge(archive, "100 times the variance")
    assert found.verdict == verdict
    assert found.measured.count(f"10^{gap:.1f} for M = 1344") == 2  # of both parts, for both methods
    assert judge(archive, "competitive").verdict == "holds"


@pytest.mark.parametrize(("gap", "verdict"), [(0.001, "holds"), (0.03, "partly"), (0.07, "does not hold")])
def test_modes_through_training(archive, gap, verdict):
    for run in fig3.runs(SCALE, SEEDS):
        write(archive, run, {"relaxed": (0.9, 1e8), "discrete": (0.9, 1e8), "thresholded": (0.9 - gap, 1e8)})
    assert judge(archive, "stay close").verdict == verdict


def test_modes_whose_losses_part_do_not_stay_close(archive):
    for run in fig3.runs(SCALE, SEEDS):
        modes = {mode: evaluation(90, 100) for mode in ("relaxed", "discrete", "thresholded")}
        modes["discrete"] |= {"nll": 0.7}
        write_events(archive, run, {1000: {"modes": modes}})
    assert judge(archive, "stay close").verdict == "partly"


def test_curves_that_share_no_flops_are_not_compared(archive):
    for run in fig5.runs(SCALE, SEEDS):
        if run.config.method != "plain":
            relaxed = run.config.method == "relaxed"
            flops = (2e8 if relaxed else 1e8) - 1e8 * run.config.tau
            write(archive, run, dict.fromkeys(("relaxed", "discrete", "thresholded", "act"), (0.9, flops)))
    assert judge(archive, "perform similarly, ResNet-32").verdict == "not measured yet"


@pytest.mark.parametrize(
    ("worse", "dearer", "verdict"),
    [(0.001, 1.02, "holds"), (0.01, 1.02, "partly"), (0.001, 1.2, "partly"), (0.03, 1.0, "does not hold")],
)
def test_temperatures_and_clipping_end_alike(archive, worse, dearer, verdict):
    labelled = variants.temperatures(SCALE, SEEDS)
    for label, run in labelled[:-2]:
        odd = label == "λ = 0.4"
        end = 0.9 - worse * odd, 1e8 * (dearer if odd else 1)
        write(archive, run, dict.fromkeys(("relaxed", "discrete", "thresholded"), end))
    assert judge(archive, "Temperatures from 0.4").verdict == verdict
    assert judge(archive, "δ = 0 gives").verdict == "not measured yet"
    for _, run in labelled[-2:]:
        write(archive, run, {"thresholded": (0.9 - worse, 1e8 * dearer)})
    assert judge(archive, "δ = 0 gives").verdict == verdict


@pytest.mark.parametrize(("share", "verdict"), [(0.01, "holds"), (0.1, "partly"), (0.5, "does not hold")])
def test_probabilities_that_saturate_leave_little_undecided(archive, share, verdict):
    for run in fig5.runs(SCALE, SEEDS):
        if run.config.method == "relaxed":
            known = evaluation(90, 100)
            modes = {"relaxed": known, "discrete": known | {"undecided": [share] * 3}, "thresholded": known}
            write_events(archive, run, {1000: {"modes": modes}})
    assert judge(archive, "saturate").verdict == verdict
