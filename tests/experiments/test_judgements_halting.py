"""Made-up runs that halt in either way must give either verdict."""

import pytest

from tests.experiments.judging import SCALE, SEEDS, all_modes, judge, write, write_fig5, write_fig6
from tests.experiments.synthetic import evaluation
from tests.experiments.synthetic import write as write_events
from torchpact_recipes.experiments import fig4, fig5, frontier, variants


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
    ("lost", "psact", "sact"),
    [((0.1, 0.45), "partly", "does not hold"), ((6.0, 4.8), "does not hold", "partly")],
)
def test_what_the_thresholded_mode_loses_is_judged_by_every_seed(archive, lost, psact, sact):
    def end(run):
        return all_modes((0.9, 1e8)) | {"thresholded": (0.9 - lost[run.config.seed] / 100, 1e8)}

    write_fig5(archive, end)
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


@pytest.mark.parametrize(
    ("remainders", "verdict"),
    [((0.5, 0.6), "holds"), ((0.95, 0.7), "partly"), ((1.0, 0.98), "does not hold")],
)
def test_sharp_halting_leaves_all_weight_to_the_last_iteration(archive, remainders, verdict):
    """If R is 1 in other blocks, what is left of the first one's 1,024 pixels counts as of 1,344."""
    for run in fig5.runs(SCALE, SEEDS):
        if run.config.method == "act":
            known = evaluation(90, 100)
            rest = remainders[run.config.seed]
            act = known | {"cost": [1 + rest, 3.0, 4.0]}
            write_events(archive, run, {1000: {"modes": {"act": act, "thresholded": known}}})
    found = judge(archive, "sharp")
    assert found.verdict == verdict
    mean = (1 - sum(remainders) / 2) * 1024 / 1344
    assert f": {mean:.2f} ± " in found.measured


def write_undecided(archive, run, share):
    known = evaluation(90, 100)
    modes = {"relaxed": known, "discrete": known | {"undecided": [share] * 3}, "thresholded": known}
    write_events(archive, run, {1000: {"modes": modes}})


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ((0.01, 0.02), "holds"),
        ((0.01, 0.06), "partly"),  # the mean is, but not in every seed
        ((0.1, 0.1), "partly"),
        ((0.5, 0.5), "does not hold"),
    ],
)
def test_probabilities_that_saturate_leave_little_undecided(archive, shares, verdict):
    for run in fig5.runs(SCALE, SEEDS):
        if run.config.method == "relaxed":
            write_undecided(archive, run, shares[run.config.seed])
    assert judge(archive, "saturate").verdict == verdict


@pytest.mark.parametrize("where", ["fig. 4", "fig. 5, ResNet-110", "λ = 0.4", "λ = 0.67, δ = 0"])
def test_all_of_the_papers_networks_must_saturate(archive, where):
    """One setting that does not is enough."""
    settings = {
        "fig. 4": [
            r for r in fig4.runs(SCALE, SEEDS) if r.config.method == "relaxed" and r.config.network.group == 1
        ],
        "fig. 5, ResNet-110": [r for r in fig5.runs(SCALE, SEEDS, 110) if r.config.method == "relaxed"],
    }
    for label, run in variants.temperatures(SCALE, SEEDS):
        settings.setdefault(label, []).append(run)
    for name, runs in settings.items():
        for run in runs:
            write_undecided(archive, run, 0.5 if name == where else 0.01)
    assert judge(archive, "saturate").verdict == "partly"


def test_networks_that_the_paper_does_not_have_need_not_saturate(archive):
    runs = [run for _, run in variants.temperatures(SCALE, SEEDS)]
    for run in runs:
        write_undecided(archive, run, 0.01)
    others = [run for _, run in variants.dead_units(SCALE, SEEDS)] + [
        run for _, run in variants.baselines(SCALE, SEEDS)
    ]
    others += [run for run in frontier.runs(SCALE, SEEDS) if run.config.method == "relaxed"]
    papers = {run.name for run in runs + fig5.runs(SCALE, SEEDS)}
    for run in others:
        if run.name not in papers:
            write_undecided(archive, run, 0.5)
    found = judge(archive, "saturate")
    assert found.verdict == "holds"
    assert "recorded by 10 of 10 runs" in found.measured


def test_runs_that_did_not_record_what_is_undecided_are_counted(archive):
    write_fig5(archive, lambda run: all_modes((0.9, 1e8)), depths=(32,))
    for run in fig5.runs(SCALE, SEEDS, 110):
        if run.config.method == "relaxed":
            write_undecided(archive, run, 0.01)
    assert "recorded by 6 of 16 runs" in judge(archive, "saturate").measured


@pytest.mark.parametrize(
    ("sact", "psact", "verdict"),
    [
        (0.6, 0.6, "holds"),
        (0.45, 0.6, "partly"),
        (0.6, 0.45, "partly"),
        (0.51, 0.51, "partly"),  # less than two standard errors, 0.035 each
        (0.45, 0.4, "does not hold"),
    ],
)
def test_maps_of_both_methods_must_follow_the_object(archive, sact, psact, verdict):
    write_fig6(archive, sact, psact)
    found = judge(archive, "follow the object")
    assert found.verdict == verdict
    assert f"{100 * sact:.0f} % by its own map, 45 % by that of another" in found.measured
    assert "standard error of 3.5 (psact)" in found.measured
