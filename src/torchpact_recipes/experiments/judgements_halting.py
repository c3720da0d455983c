"""Claims of what networks have learned about when to halt: thresholds, sharpness, and maps."""

import math
from collections.abc import Callable, Sequence

from torchpact_recipes.experiments import fig4, fig5, variants
from torchpact_recipes.experiments.evidence import DEPTHS, Evidence, Measured, early_weight, undecided
from torchpact_recipes.experiments.runs import Run
from torchpact_recipes.experiments.verdicts import (
    NOTHING,
    Verdict,
    across,
    by_setting,
    claim,
    in_settings,
    judge,
)
from torchpact_recipes.training import preset


@claim("PSACT can be evaluated thresholded with very close results.", "section 5")
def thresholded(evidence: Evidence) -> tuple[Verdict, str]:
    """By less than 0.3 points, up or down."""
    lost = evidence.measure_fig5("relaxed", _lost(evidence, "discrete"))
    if not lost:
        return NOTHING
    verdict = in_settings(lost, lambda each: judge(each, above=-0.3, below=0.3, loosely=(-1, 1)))
    return verdict, f"accuracy lost, points: {by_setting(lost)}"


@claim("The probabilities of PSACT's latent variables saturate.", "section 5")
def saturated(evidence: Evidence) -> tuple[Verdict, str]:
    """Fewer than 5 % of the decisions are taken at probabilities that are neither low nor high.

    Of all PSACT networks that the paper speaks of and that have the number: the grids of fig. 5, fig. 4 where
    every pixel decides, and λ and δ. Not of what the paper warns of or does not have: heads without their
    bias, a start from nothing, decisions for a whole image, a stronger recipe.
    """
    wanted = evidence.finished(_of_the_papers_psact(evidence))
    shares: Measured = {}
    usual = preset(evidence.scale.preset)
    for run in wanted:
        share = undecided(run.config.network, evidence.results(run, "discrete"))
        if share is not None:
            label = f"τ = {run.config.tau:g}"
            if run.config.temperature != usual.temperature:
                label += f", λ = {run.config.temperature:g}"
            if run.config.clip != usual.clip:
                label += f", δ = {run.config.clip:g}"
            network = f"ResNet-{run.config.network.layers}"
            shares.setdefault(network, {}).setdefault(label, []).append(100 * share)
    if not shares:
        return NOTHING
    verdict = in_settings(shares, lambda each: judge(each, below=5, loosely=(-1, 20)))
    known = sum(len(each) for settings in shares.values() for each in settings.values())
    return verdict, (
        f"% of decisions taken at 0.1 < h < 0.9: {by_setting(shares)}; "
        f"recorded by {known} of {len(wanted)} runs of figs. 4 and 5, λ and δ"
    )


def _of_the_papers_psact(evidence: Evidence) -> list[Run]:
    scale, seeds = evidence.scale, evidence.seeds
    found = [run for run in fig4.runs(scale, seeds) if run.config.network.group == 1]
    found += fig5.runs(scale, seeds, 32)
    found += [run for _, run in variants.temperatures(scale, seeds)]
    found += fig5.runs(scale, seeds, 110)
    # by name, as those of the usual λ and δ are in fig. 5, too
    return [*{run.name: run for run in found if run.config.method == "relaxed"}.values()]


@claim("SACT evaluated thresholded loses at least 5 points of accuracy.", "supplement")
def sact_thresholded(evidence: Evidence) -> tuple[Verdict, str]:
    """With the paper's heads and with those of SACT's own code."""
    lost = _of_sact(evidence, _lost(evidence, "act"))
    if not lost:
        return NOTHING

    def loses(each: Sequence[float]) -> Verdict:
        return judge(each, above=math.nextafter(5, 0))  # 5 are enough

    verdict = in_settings(lost, loses)
    settings = [(f"{network}, {label}", each) for network, of in lost.items() for label, each in of.items()]
    much = [name for name, each in settings if loses(each) != "does not hold"]
    where = f" ({'; '.join(much)})" if verdict == "partly" else ""
    text = f"5 or more in {len(much)} of {len(settings)} settings{where}"
    return verdict, f"{text}; accuracy lost, points: {by_setting(lost)}"


@claim("Training by SACT does not result in a sharp halting distribution.", "supplement")
def sact_not_sharp(evidence: Evidence) -> tuple[Verdict, str]:
    """That is, more than a tenth of the output's weight is not on the last iteration."""
    early = _of_sact(evidence, lambda run: early_weight(run.config.network, evidence.results(run, "act")))
    if not early:
        return NOTHING
    verdict = in_settings(early, lambda each: judge(each, above=0.1))
    text = "weight in the output of iterations before the last, 1 − R (in the hard modes of PSACT it is 0)"
    return verdict, f"{text}: {by_setting(early)}"


@claim("Maps of computation follow the object.", "fig. 6")
def maps_follow(evidence: Evidence) -> tuple[Verdict, str]:
    """Whether a half of the pixels chosen by an image's own map says more than one by another image's.

    Both for SACT and PSACT; by images, as there is one seed: it must do so by two standard errors.
    """
    numbers = evidence.figure("fig6")
    if numbers is None:
        return NOTHING
    parts, verdicts = [], []
    for network in numbers["networks"]:
        shows = network["shows"]
        own, others, images = shows["own"], shows["others"], shows["images"]
        # as if the images were not the same: too large, if anything
        error = math.sqrt((own * (1 - own) + others * (1 - others)) / images)
        verdict: Verdict = (
            "holds" if own - others > 2 * error else "partly" if own > others else "does not hold"
        )
        verdicts.append(verdict)
        shares = f"{100 * own:.0f} % by its own map, {100 * others:.0f} % by that of another"
        gap = f"a gap of {100 * (own - others):.1f} with a standard error of {100 * error:.1f}"
        parts.append(f"{shares}, {gap} ({network['run']})")
    kept = f"images that {shows['judge']} names if {shows['kept']:.0%} of the pixels are left"
    return across(verdicts), f"{kept}: {'; '.join(parts)}; {images} images, 1 seed"


def _lost(evidence: Evidence, mode: str) -> Callable[[Run], float]:
    """What the thresholded mode loses to another, in points."""
    return lambda run: evidence.accuracy(run, mode) - evidence.accuracy(run, "thresholded")


def _of_sact(evidence: Evidence, number: Callable[[Run], float]) -> Measured:
    """A number of SACT, with the paper's heads and with those of SACT's own code."""
    found = evidence.measure_fig5("act", number)
    for depth in DEPTHS:
        name = f"{evidence.scale.network(depth)}, heads with batch norm"
        for run in evidence.finished(run for _, run in variants.heads(evidence.scale, evidence.seeds, depth)):
            if run.config.network.halting_norm:
                found.setdefault(name, {}).setdefault(f"τ = {run.config.tau:g}", []).append(number(run))
    return found
