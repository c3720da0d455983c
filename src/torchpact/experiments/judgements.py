"""The claims of the paper, and how each is judged by numbers.

Bounds of the judgements are written where they are used; nothing is typed in by hand but the claims
themselves.
"""

from collections.abc import Callable, Sized
from typing import Any, Literal

import numpy as np

from torchpact.experiments import fig2, fig3, fig4, variants
from torchpact.experiments.evidence import Evidence
from torchpact.experiments.gather import at_end, spread
from torchpact.experiments.runs import Run
from torchpact.models import ResNetConfig
from torchpact.training import preset

Verdict = Literal["holds", "partly", "does not hold", "not measured yet"]


Judge = Callable[[Evidence], tuple[Verdict, str]]
CLAIMS: list[tuple[str, str, Judge]] = []


def _claim(text: str, where: str) -> Callable[[Judge], Judge]:
    def enter(judge: Judge) -> Judge:
        CLAIMS.append((text, where, judge))
        return judge

    return enter


@_claim("ACT's ponder cost jumps with h; PACT's expected number of iterations does not.", "fig. 2")
def _jumps(evidence: Evidence) -> tuple[Verdict, str]:
    at = np.linspace(0, 1, 2001).tolist()
    act, pact = fig2.ponder_costs(at), fig2.pact_steps(at)
    jumps = int((np.abs(np.diff(act)) > 0.1).sum())
    steepest = float(np.abs(np.diff(pact)).max() * (len(pact) - 1))
    verdict: Verdict = "holds" if jumps == 2 and steepest < 3 else "does not hold"
    return verdict, f"{jumps} jumps of ρ; N has a slope of at most {steepest:.2f}"


@_claim("Loss and accuracy of the relaxed, discrete and thresholded models stay close in training.", "fig. 3")
def _modes_stay_close(evidence: Evidence) -> tuple[Verdict, str]:
    runs = [r for r in fig3.runs(evidence.scale, evidence.seeds) if evidence.archive.record(r) is not None]
    if not runs:
        return "not measured yet", ""
    during, apart = [], []
    for run in runs:
        gaps = []
        for event in evidence.archive.history(run):
            if event["kind"] == "validate":
                accuracies, losses = (
                    [fig3.value(run, event, mode, name) for mode in event["modes"]]
                    for name in ("accuracy", "loss")
                )
                gaps.append((max(accuracies) - min(accuracies), max(losses) - min(losses)))
        during.append(max(gap for gap, _ in gaps))
        apart.append(max(gap for _, gap in gaps))
    worst = max(during)
    verdict: Verdict = "does not hold" if worst > 5 else "partly"
    if worst < 1 and max(apart) < 0.05:
        verdict = "holds"
    return (
        verdict,
        f"largest gap in training: {spread(during)} points, at most {max(apart):.4f} of loss ({_n(runs)})",
    )


@_claim("The relaxed model requires more computation than the discrete one.", "section 5")
def _relaxed_costs_more(evidence: Evidence) -> tuple[Verdict, str]:
    ratios = [
        evidence.results(run, "relaxed")["flops"] / evidence.results(run, "discrete")["flops"]
        for runs in evidence.fig5(32, "relaxed").values()
        for run in runs
    ]
    if not ratios:
        return "not measured yet", ""
    more = sum(r > 1 for r in ratios)
    verdict: Verdict = (
        "holds" if more == len(ratios) else "partly" if 2 * more > len(ratios) else "does not hold"
    )
    low, high = min(ratios), max(ratios)
    return verdict, f"{low:.3f} to {high:.3f} times the FLOPs, more in {more} of {len(ratios)} runs"


@_claim("The gradients of REINFORCE have about 100 times the variance for M = 1344.", "fig. 4")
def _variance(evidence: Evidence) -> tuple[Verdict, str]:
    ratios: dict[str, dict[int, float]] = {"total": {}, "latents": {}}
    for part, gaps in ratios.items():
        for latents, both in evidence.fig4().items():
            relaxed, reinforce = (evidence.log_variances(runs, part) for runs in both)
            times = sorted(relaxed.keys() & reinforce.keys())
            if times:
                gaps[latents] = float(np.mean([reinforce[at] - relaxed[at] for at in times]))
    if 1344 not in ratios["total"]:
        return "not measured yet", ""
    many = ratios["total"][1344]
    verdict: Verdict = "holds" if 1.5 < many < 2.5 else "partly" if many > 0.5 else "does not hold"
    total, latent = (
        ", ".join(f"10^{gap:.1f} for M = {m}" for m, gap in gaps.items()) for gaps in ratios.values()
    )
    return verdict, f"ratio of the variances, mean over training: {total}; of what latents add: {latent}"


@_claim("REINFORCE is competitive for M = 21 and 84 only.", "fig. 4")
def _competitive(evidence: Evidence) -> tuple[Verdict, str]:
    gaps, costs = {}, {}
    for latents, both in evidence.fig4().items():
        relaxed, reinforce = (at_end(runs, evidence.archive, "discrete") for runs in both)
        gaps[latents] = relaxed["accuracy"].mean - reinforce["accuracy"].mean
        costs[latents] = f"{relaxed['mflops'].mean:.0f} and {reinforce['mflops'].mean:.0f} MFLOPs"
    if len(gaps) < len(fig4.GROUPS):
        return "not measured yet", ""
    text = ", ".join(f"{gap:+.1f} for M = {m} ({costs[m]})" for m, gap in gaps.items())
    few = max(gaps[21], gaps[84]) < 2
    many = min(gaps[336], gaps[1344]) > 2
    verdict: Verdict = "holds" if few and many else "partly" if few or many else "does not hold"
    return verdict, f"points by which the relaxation is better, and what both cost: {text}"


def _similar(evidence: Evidence, depth: int) -> tuple[Verdict, str]:
    curves = [evidence.curve(depth, "relaxed", "discrete"), evidence.curve(depth, "act", "act")]
    if any(len(x) < 2 for x, _ in curves):
        return "not measured yet", ""
    (x1, y1), (x2, y2) = curves
    low, high = max(x1[0], x2[0]), min(x1[-1], x2[-1])
    if low >= high:
        return "not measured yet", "no FLOPs in common"
    at = np.linspace(low, high, 50)
    gap = np.interp(at, x1, y1) - np.interp(at, x2, y2)
    worst = float(np.abs(gap).max())
    verdict: Verdict = "holds" if worst < 0.5 else "partly" if worst < 2 else "does not hold"
    return verdict, f"PSACT less SACT at equal FLOPs: {gap.min():+.2f} to {gap.max():+.2f} points"


@_claim("PSACT and SACT perform similarly, ResNet-32.", "fig. 5")
def _similar32(evidence: Evidence) -> tuple[Verdict, str]:
    return _similar(evidence, 32)


@_claim("PSACT and SACT perform similarly, ResNet-110.", "fig. 5")
def _similar110(evidence: Evidence) -> tuple[Verdict, str]:
    return _similar(evidence, 110)


@_claim("PSACT needs a somewhat lower τ for the same FLOPs.", "section 5")
def _lower_tau(evidence: Evidence) -> tuple[Verdict, str]:
    psact, sact = evidence.fig5(32, "relaxed"), evidence.fig5(32, "act")
    shared = [tau for tau in psact if tau in sact]
    if not shared:
        return "not measured yet", ""
    parts, less = [], 0
    for tau in shared:
        ours = at_end(psact[tau], evidence.archive, "discrete")["mflops"].mean
        theirs = at_end(sact[tau], evidence.archive, "act")["mflops"].mean
        less += ours < theirs
        parts.append(f"{ours:.0f} and {theirs:.0f} at τ = {tau:g}")
    verdict: Verdict = "holds" if less == len(shared) else "partly" if less else "does not hold"
    return verdict, f"MFLOPs of PSACT and SACT: {', '.join(parts)}"


@_claim("Relaxed PSACT trains ResNet-110, with 1344 18-ary latent variables.", "section 5")
def _trains110(evidence: Evidence) -> tuple[Verdict, str]:
    found = evidence.fig5(110, "relaxed")
    if not found:
        return "not measured yet", ""
    parts = []
    for tau, runs in found.items():
        end = at_end(runs, evidence.archive, "discrete")
        parts.append(f"{end['accuracy']} % at {end['mflops'].mean:.0f} MFLOPs (τ = {tau:g})")
    best = max(at_end(runs, evidence.archive, "discrete")["accuracy"].mean for runs in found.values())
    verdict: Verdict = "holds" if best > 90 else "partly" if best > 80 else "does not hold"
    return verdict, "; ".join(parts)


@_claim("Temperatures from 0.4 to 0.8 give similar results.", "supplement")
def _temperature(evidence: Evidence) -> tuple[Verdict, str]:
    return _alike(evidence, lambda run: run.config.clip > 0, at_least=4)


@_claim("δ = 0 gives similar results to δ = 0.01.", "section 4")
def _clipping(evidence: Evidence) -> tuple[Verdict, str]:
    usual = preset(evidence.scale.preset).temperature
    return _alike(evidence, lambda run: run.config.temperature == usual, at_least=2)


def _alike(evidence: Evidence, chosen: Callable[[Run], bool], at_least: int) -> tuple[Verdict, str]:
    """Whether variants of λ and δ, with equal seeds, end alike: in half a point and a tenth of the FLOPs."""
    ends: dict[str, dict[int, Run]] = {}
    for label, run in variants.temperatures(evidence.scale, evidence.seeds):
        if chosen(run) and evidence.archive.record(run) is not None:
            ends.setdefault(label, {})[run.config.seed] = run
    seeds = [seed for seed in evidence.seeds if all(seed in of for of in ends.values())]
    if len(ends) < at_least or not seeds:
        return "not measured yet", ""
    points = {
        label: at_end([of[seed] for seed in seeds], evidence.archive, "thresholded")
        for label, of in ends.items()
    }
    accuracies, mflops = ([p[name].mean for p in points.values()] for name in ("accuracy", "mflops"))
    apart, ratio = max(accuracies) - min(accuracies), max(mflops) / min(mflops)
    verdict: Verdict = "partly" if apart < 1.5 and ratio < 1.3 else "does not hold"
    if apart < 0.5 and ratio < 1.1:
        verdict = "holds"
    each = ", ".join(f"{p['accuracy']} % at {p['mflops'].mean:.0f} ({label})" for label, p in points.items())
    return verdict, f"accuracy at MFLOPs: {each}; {_n(seeds)}"


@_claim("PSACT can be evaluated thresholded with very close results.", "section 5")
def _thresholded(evidence: Evidence) -> tuple[Verdict, str]:
    lost = _lost(evidence, _fig5_settings(evidence, "relaxed"), "discrete")
    if not lost:
        return "not measured yet", ""
    worst = max(max(each) for taus in lost.values() for each in taus.values())
    verdict: Verdict = "holds" if worst < 0.3 else "partly" if worst < 1 else "does not hold"
    return verdict, _losses(lost)


def _undecided(network: ResNetConfig, results: dict[str, Any]) -> float | None:
    """The share of all decisions; results have that of every block, in which a pixel takes one a step."""
    if results.get("undecided") is None:
        return None
    positions = [(network.image_size >> k) ** 2 for k in range(len(results["steps"]))]
    decisions = np.multiply(positions, np.minimum(results["steps"], network.units - 1))
    return float(np.average(results["undecided"], weights=decisions))


@_claim("The probabilities of PSACT's latent variables saturate.", "section 5")
def _saturated(evidence: Evidence) -> tuple[Verdict, str]:
    parts, worst = [], 0.0
    for depth in (32, 110):
        for tau, runs in evidence.fig5(depth, "relaxed").items():
            known = [_undecided(run.config.network, evidence.results(run, "discrete")) for run in runs]
            shares = [100 * each for each in known if each is not None]
            if shares:
                worst = max(worst, *shares)
                parts.append(f"{spread(shares)} ({evidence.scale.network(depth)}, τ = {tau:g})")
    if not parts:
        return "not measured yet", ""
    verdict: Verdict = "holds" if worst < 5 else "partly" if worst < 20 else "does not hold"
    return verdict, f"% of decisions taken at 0.1 < h < 0.9: {', '.join(parts)}"


@_claim("SACT evaluated thresholded loses at least 5 points of accuracy.", "supplement")
def _sact_thresholded(evidence: Evidence) -> tuple[Verdict, str]:
    """With the paper's heads and with those of SACT's own code; it must show everywhere to hold."""
    with_norm = [
        (f"{evidence.scale.network(depth)}, heads with batch norm", run.config.tau, [run])
        for depth in (32, 110)
        for _, run in variants.heads(evidence.scale, evidence.seeds[:1], depth)
        if run.config.network.halting_norm and evidence.archive.record(run) is not None
    ]
    lost = _lost(evidence, _fig5_settings(evidence, "act") + with_norm, "act")
    if not lost:
        return "not measured yet", ""
    means = {(name, tau): spread(each).mean for name, taus in lost.items() for tau, each in taus.items()}
    much = [f"{name}, τ = {tau:g}" for (name, tau), mean in means.items() if mean >= 5]
    verdict: Verdict = "holds" if len(much) == len(means) else "partly" if much else "does not hold"
    where = f" ({'; '.join(much)})" if verdict == "partly" else ""
    return verdict, f"5 or more in {len(much)} of {len(means)} settings{where}; {_losses(lost)}"


@_claim("Maps of computation follow the object.", "fig. 6")
def _maps_follow(evidence: Evidence) -> tuple[Verdict, str]:
    """Whether a half of the pixels chosen by an image's own map says more than one by another image's."""
    numbers = evidence.figure("fig6")
    if numbers is None:
        return "not measured yet", ""
    psact = numbers["networks"][-1]["shows"]
    parts = []
    for network in numbers["networks"]:
        shows = network["shows"]
        own, others = 100 * shows["own"], 100 * shows["others"]
        parts.append(f"{own:.0f} % by its own map, {others:.0f} % by that of another ({network['run']})")
    # two standard errors of a share, at most
    noise = 1 / np.sqrt(psact["images"])
    gap = psact["own"] - psact["others"]
    verdict: Verdict = "holds" if gap > noise else "does not hold"
    kept = f"images that {psact['judge']} names if {psact['kept']:.0%} of the pixels are left"
    return verdict, f"{kept}: {'; '.join(parts)}; {psact['images']} images"


Setting = tuple[str, float, list[Run]]
"""Whose runs they are, τ, and the runs, which differ by their seeds."""


def _fig5_settings(evidence: Evidence, method: str) -> list[Setting]:
    return [
        (evidence.scale.network(depth), tau, runs)
        for depth in (32, 110)
        for tau, runs in evidence.fig5(depth, method).items()
    ]


def _lost(evidence: Evidence, settings: list[Setting], mode: str) -> dict[str, dict[float, list[float]]]:
    """What the thresholded mode loses to another, in points, by network and τ, run by run."""
    found: dict[str, dict[float, list[float]]] = {}
    for name, tau, runs in settings:
        accuracies = [[evidence.results(run, m)["accuracy"] for m in (mode, "thresholded")] for run in runs]
        found.setdefault(name, {})[tau] = [100 * (other - ours) for other, ours in accuracies]
    return found


def _losses(lost: dict[str, dict[float, list[float]]]) -> str:
    """Network by network."""
    parts = [
        f"{', '.join(f'{spread(each)} (τ = {tau:g})' for tau, each in taus.items())} for {name}"
        for name, taus in lost.items()
    ]
    return f"accuracy lost, points: {'; '.join(parts)}"


def _n(seeds: Sized) -> str:
    return f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
