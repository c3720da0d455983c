"""Claims of accuracy against FLOPs: fig. 5."""

import itertools
import math

import numpy as np

from torchpact_recipes.experiments.evidence import DEPTHS, Evidence, pair
from torchpact_recipes.experiments.verdicts import NOTHING, Verdict, across, claim, in_words, judge, seeds
from torchpact_recipes.training.titles import METHODS

_MODES = {"relaxed": "discrete", "act": "act"}
"""In which the paper evaluates what it trains so."""


def _similar(evidence: Evidence, depth: int) -> tuple[Verdict, str]:
    """By the largest gap between the two curves of a seed, where they have FLOPs in common."""
    gaps, curves = [], 0
    for seed in evidence.seeds:
        (x1, y1), (x2, y2) = (evidence.curve(depth, *of, seed) for of in _MODES.items())
        if min(len(x1), len(x2)) < 2:
            continue
        curves += 1
        low, high = max(x1[0], x2[0]), min(x1[-1], x2[-1])
        if low < high:
            at = np.linspace(low, high, 50)
            gaps.append(np.interp(at, x1, y1) - np.interp(at, x2, y2))
    if not gaps:
        return "not measured yet", "no FLOPs in common" if curves else ""
    apart = [float(np.abs(gap).max()) for gap in gaps]
    verdict = judge(apart, below=0.5, loosely=(0, 2))
    mean = in_words([float(gap.mean()) for gap in gaps], sign="+")
    return verdict, (
        f"PSACT less SACT at equal FLOPs: {mean} points on average, "
        f"farthest apart {in_words(apart)}; {seeds(gaps)}"
    )


@claim("PSACT and SACT perform similarly, ResNet-32.", "fig. 5")
def similar32(evidence: Evidence) -> tuple[Verdict, str]:
    """Within half a point."""
    return _similar(evidence, 32)


@claim("PSACT and SACT perform similarly, ResNet-110.", "fig. 5")
def similar110(evidence: Evidence) -> tuple[Verdict, str]:
    """Within half a point."""
    return _similar(evidence, 110)


@claim("PSACT needs a somewhat lower τ for the same FLOPs.", "section 5")
def lower_tau(evidence: Evidence) -> tuple[Verdict, str]:
    """That is, at every τ that both have it costs less than SACT of the same seed."""
    parts, verdicts = [], []
    for depth in DEPTHS:
        psact, sact = (evidence.fig5(depth, method) for method in _MODES)
        found = {tau: pairs for tau, runs in psact.items() if (pairs := pair(runs, sact.get(tau, [])))}
        costs = {
            tau: [
                [evidence.mflops(a, "discrete") for a, _ in pairs],
                [evidence.mflops(b, "act") for _, b in pairs],
            ]
            for tau, pairs in found.items()
        }
        verdicts += [judge([b - a for a, b in zip(*both, strict=True)], above=0) for both in costs.values()]
        if costs:
            each = ", ".join(
                f"{in_words(a, 0)} and {in_words(b, 0)} at τ = {tau:g}" for tau, (a, b) in costs.items()
            )
            parts.append(f"{each} for {evidence.scale.network(depth)}, {seeds(*found.values())}")
    if not parts:
        return NOTHING
    return across(verdicts), f"MFLOPs of PSACT and SACT: {'; '.join(parts)}"


@claim("Higher values of τ correspond to fewer FLOPs.", "supplement")
def higher_tau(evidence: Evidence) -> tuple[Verdict, str]:
    """They grow from each τ of a grid to the next lower one."""
    parts, verdicts = [], []
    for depth, (method, mode) in itertools.product(DEPTHS, _MODES.items()):
        found = evidence.fig5(depth, method)
        if len(found) < 2:
            continue
        costs = [{run.config.seed: evidence.mflops(run, mode) for run in runs} for runs in found.values()]
        grows = [
            [lower[seed] - higher[seed] for seed in higher if seed in lower]
            for higher, lower in itertools.pairwise(costs)
        ]
        verdicts += [judge(each, above=0) for each in grows if each]
        values = ", ".join(in_words([*cost.values()], 0) for cost in costs)
        taus = f"τ = {', '.join(f'{tau:g}' for tau in found)}"
        name = f"{METHODS[method]} {evidence.scale.network(depth)}"
        parts.append(f"{values} for {name} ({taus}), {seeds(*costs)}")
    if not verdicts:
        return NOTHING
    return across(verdicts), f"MFLOPs: {'; '.join(parts)}"


@claim("Relaxed PSACT trains ResNet-110, with 1344 18-ary latent variables.", "section 5")
def trains110(evidence: Evidence) -> tuple[Verdict, str]:
    """To more than 90 %, with every τ."""
    found = evidence.fig5(110, "relaxed")
    if not found:
        return NOTHING
    parts, verdicts = [], []
    for tau, runs in found.items():
        accuracies, mflops = (
            [number(run, "discrete") for run in runs] for number in (evidence.accuracy, evidence.mflops)
        )
        verdicts.append(judge(accuracies, above=90, loosely=(80, math.inf)))
        parts.append(f"{in_words(accuracies)} % at {in_words(mflops, 0)} MFLOPs (τ = {tau:g})")
    return across(verdicts), f"{', '.join(parts)}; {seeds(*found.values())}"
