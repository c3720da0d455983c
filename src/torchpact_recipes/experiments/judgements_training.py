"""Claims of how PACT is trained: figs. 2 to 4, and what λ and δ change."""

import math
from collections.abc import Callable

import numpy as np

from torchpact_recipes.experiments import fig2, fig3, fig4, variants
from torchpact_recipes.experiments.evidence import Evidence
from torchpact_recipes.experiments.runs import Run
from torchpact_recipes.experiments.verdicts import (
    NOTHING,
    Verdict,
    across,
    by_setting,
    claim,
    in_settings,
    in_words,
    judge,
    seeds,
    worst,
)
from torchpact_recipes.training import preset


@claim("ACT's ponder cost jumps with h; PACT's expected number of iterations does not.", "fig. 2")
def jumps(evidence: Evidence) -> tuple[Verdict, str]:
    """By the equations alone."""
    at = np.linspace(0, 1, 2001).tolist()
    act, pact = fig2.ponder_costs(at), fig2.pact_steps(at)
    found = int((np.abs(np.diff(act)) > 0.1).sum())
    steepest = float(np.abs(np.diff(pact)).max() * (len(pact) - 1))
    verdict: Verdict = "holds" if found == 2 and steepest < 3 else "does not hold"
    return verdict, f"{found} jumps of ρ; N has a slope of at most {steepest:.2f}; exact, without a seed"


@claim("Loss and accuracy of the relaxed, discrete and thresholded models stay close in training.", "fig. 3")
def modes_stay_close(evidence: Evidence) -> tuple[Verdict, str]:
    """By the largest gap between any two of them at any time."""
    apart: dict[str, list[float]] = {"accuracy": [], "loss": []}
    for run in evidence.finished(fig3.runs(evidence.scale, evidence.seeds)):
        looks = [event for event in evidence.archive.history(run) if event["kind"] == "validate"]
        for name, gaps in apart.items():
            each = [[fig3.value(run, event, mode, name) for mode in event["modes"]] for event in looks]
            gaps.append(max(max(values) - min(values) for values in each))
    points, loss = apart.values()
    if not points:
        return NOTHING
    verdict = worst(
        judge(points, below=1, loosely=(-math.inf, 5)),
        judge(loss, below=0.05, loosely=(-math.inf, 0.25)),
    )
    gaps_in_words = f"{in_words(points)} points of accuracy, {in_words(loss, 4)} of loss"
    return verdict, f"largest gap in training: {gaps_in_words}; {seeds(points)}"


@claim("The relaxed model requires more computation than the discrete one.", "section 5")
def relaxed_costs_more(evidence: Evidence) -> tuple[Verdict, str]:
    """In every run of fig. 5."""
    times = evidence.measure_fig5(
        "relaxed", lambda run: evidence.mflops(run, "relaxed") / evidence.mflops(run, "discrete")
    )
    if not times:
        return NOTHING
    return in_settings(times, lambda each: judge(each, above=1)), f"times the FLOPs: {by_setting(times, 3)}"


@claim("The gradients of REINFORCE have about 100 times the variance for M = 1344.", "fig. 4")
def variance(evidence: Evidence) -> tuple[Verdict, str]:
    """By logarithms, as the figure has them, and their mean over training: 30 to 300 times is about 100."""
    total, latents = (
        {m: logs for m, pairs in evidence.fig4().items() if (logs := _log_ratios(evidence, pairs, part))}
        for part in ("total", "latents")
    )
    if 1344 not in total:
        return NOTHING
    means = [float(np.mean(each)) for each in total[1344]]
    verdict = judge(means, above=1.5, below=2.5, loosely=(0.5, math.inf))

    def shown(by_m: dict[int, list[list[float]]]) -> str:
        each = {m: in_words([float(np.mean(one)) for one in logs], 1) for m, logs in by_m.items()}
        return ", ".join(f"{text} (M = {m})" for m, text in each.items())

    first, last = (in_words([one[k] for one in total[1344]], 1) for k in (0, -1))
    return verdict, (
        f"log₁₀ of the ratio, mean over training: {shown(total)}; at M = 1344, {first} at the first look and "
        f"{last} at the last; of what latents add: {shown(latents)}; {seeds(*total.values())}"
    )


def _log_ratios(evidence: Evidence, pairs: list[tuple[Run, Run]], part: str) -> list[list[float]]:
    """Of REINFORCE's variance to the relaxation's, by seed and through training."""
    found = []
    for pair in pairs:
        relaxed, reinforce = (evidence.log_variances(run, part) for run in pair)
        if times := sorted(relaxed.keys() & reinforce.keys()):
            found.append([reinforce[at] - relaxed[at] for at in times])
    return found


@claim("REINFORCE is competitive for M = 21 and 84 only.", "fig. 4")
def competitive(evidence: Evidence) -> tuple[Verdict, str]:
    """Competitive is by less than two points worse than the relaxation of the same seed."""
    found = evidence.fig4()
    if len(found) < len(fig4.GROUPS):
        return NOTHING
    parts, verdicts = [], []
    for latents, pairs in found.items():
        better = [evidence.accuracy(a, "discrete") - evidence.accuracy(b, "discrete") for a, b in pairs]
        verdicts.append(judge(better, below=2) if latents <= 84 else judge(better, above=2))
        costs = (
            in_words([evidence.mflops(run, "discrete") for run in runs], 0)
            for runs in zip(*pairs, strict=True)
        )
        parts.append(f"{in_words(better, 1, '+')} for M = {latents} ({' and '.join(costs)} MFLOPs)")
    text = f"points by which the relaxation is better, and what both cost: {', '.join(parts)}"
    return across(verdicts), f"{text}; {seeds(*found.values())}"


@claim("Temperatures from 0.4 to 0.8 give similar results.", "supplement")
def temperature(evidence: Evidence) -> tuple[Verdict, str]:
    """All with the same δ."""
    return _alike(evidence, lambda run: run.config.clip > 0, at_least=4)


@claim("δ = 0 gives similar results to δ = 0.01.", "section 4")
def clipping(evidence: Evidence) -> tuple[Verdict, str]:
    """Both with the same λ."""
    usual = preset(evidence.scale.preset).temperature
    return _alike(evidence, lambda run: run.config.temperature == usual, at_least=2)


def _alike(evidence: Evidence, chosen: Callable[[Run], bool], at_least: int) -> tuple[Verdict, str]:
    """Whether variants of λ and δ, with equal seeds, end alike: in half a point and a tenth of the FLOPs."""
    ends: dict[str, dict[int, Run]] = {}
    for label, run in variants.temperatures(evidence.scale, evidence.seeds):
        if chosen(run) and evidence.archive.record(run) is not None:
            ends.setdefault(label, {})[run.config.seed] = run
    common = [seed for seed in evidence.seeds if all(seed in of for of in ends.values())]
    if len(ends) < at_least or not common:
        return NOTHING
    accuracies, mflops = (
        {label: [number(of[seed], "thresholded") for seed in common] for label, of in ends.items()}
        for number in (evidence.accuracy, evidence.mflops)
    )
    apart = [max(of) - min(of) for of in zip(*accuracies.values(), strict=True)]
    ratios = [max(of) / min(of) for of in zip(*mflops.values(), strict=True)]
    verdict = worst(
        judge(apart, below=0.5, loosely=(-math.inf, 1.5)), judge(ratios, below=1.1, loosely=(0, 1.3))
    )
    each = ", ".join(
        f"{in_words(accuracies[label])} % at {in_words(mflops[label], 0)} ({label})" for label in ends
    )
    return verdict, f"accuracy at MFLOPs: {each}; {seeds(common)}"
