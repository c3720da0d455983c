"""What else the paper says or leaves open: variants of one network, side by side, accuracy against FLOPs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.gather import at_end, finished, inventory, over_seeds, spread
from torchpact_recipes.experiments.plotting import canvas, draw_points, save
from torchpact_recipes.experiments.runs import Run, Scale, adaptive, by_lot, looks, plain, plain_again

# Okabe and Ito's colours again, in an order for things that have none of their own
_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#888888")

Labelled = list[tuple[str, Run]]


def temperatures(scale: Scale, seeds: list[int]) -> Labelled:
    """λ from 0.4 to 0.8, which the paper explored, and δ = 0, which computes everything."""
    settings: dict[str, dict[str, Any]] = {
        f"λ = {value:.2g}": {"temperature": value} for value in (0.4, 0.5, 2 / 3, 0.8)
    }
    settings["λ = 0.67, δ = 0"] = {"clip": 0.0}
    return [
        (label, adaptive(scale, 32, "relaxed", 0.01, seed, **chosen, **looks(scale, 4)))
        for label, chosen in _few(scale, settings).items()
        for seed in seeds
    ]


def dead_units(scale: Scale, seeds: list[int]) -> Labelled:
    """With and without the two remedies against residual units that never run."""
    small = scale.name == "smoke"
    return [
        (
            f"{'warm' if warm else 'cold'} start, bias {bias:g}",
            adaptive(
                scale, 32, "relaxed", 0.01, seed, warm=warm, network={"halting_bias": bias}, **looks(scale, 4)
            ),
        )
        for warm, bias in ((True, -3.0), (True, 0.0), (False, -3.0), (False, 0.0))[-1 if small else 0 :]
        for seed in seeds
    ]


LOTS = {0.05: (1.26, 1.17, 1.99), 0.02: (3.63, 2.41, 2.61), 0.01: (4.25, 3.74, 4.0)}
"""By τ, the steps that PSACT ResNet-32 took in each block in fast runs: random masks get as many."""


def baselines(scale: Scale, seeds: list[int]) -> Labelled:
    """PSACT against plain networks of fewer units or more iterations, and against other decisions."""
    often = looks(scale, 4)
    depths = (14, 20, 26, 32) if scale.name != "smoke" else (32,)
    taus = (0.05, 0.02, 0.01) if scale.name != "smoke" else (0.01,)
    found: Labelled = [
        ("plain networks", plain(scale, depth, seed, **often)) for depth in depths for seed in seeds
    ]
    found += [("plain, trained twice as long", plain_again(scale, 32, seed, **often)) for seed in seeds]
    for label, network in (("PSACT", {}), ("PACT, a decision an image", {"per": "image"})):
        found += [
            (label, adaptive(scale, 32, "relaxed", tau, seed, network=network, **often))
            for tau in taus
            for seed in seeds
        ]
    found += [
        ("random decisions", by_lot(scale, 32, LOTS[tau], seed, **often)) for tau in taus for seed in seeds
    ]
    return found


def heads(scale: Scale, seeds: list[int], depth: int = 32) -> Labelled:
    """SACT with the paper's halting heads, and with those of SACT's own code, which have batch norm."""
    taus = {32: (0.1, 0.05, 0.01, 0.005), 110: (0.005, 0.001, 0.0005)}[depth]
    if scale.name == "smoke":
        taus = (0.01,)
    return [
        (label, adaptive(scale, depth, "act", tau, seed, network={"halting_norm": norm}, **looks(scale, 4)))
        for label, norm in (("the paper's head", False), ("head with batch norm", True))
        for tau in taus
        for seed in seeds
    ]


@dataclass(frozen=True)
class Comparison:
    """Variants to compare; ``modes`` are those they are evaluated in. Braces in ``title`` are the network."""

    name: str
    title: str
    labelled: Callable[[Scale, list[int]], Labelled]
    modes: tuple[str, ...] = ("thresholded", "plain", "discrete")
    every: bool = False
    """Whether in all of these modes, or in the first that a variant has."""
    depth: int = 32

    def runs(self, scale: Scale, seeds: list[int]) -> list[Run]:
        """All that is compared."""
        return [run for _, run in self.labelled(scale, seeds)]

    def draw(self, archive: Archive, scale: Scale, seeds: list[int], folder: Path) -> list[Path]:
        """A colour for every variant, a line for every mode."""
        labelled = self.labelled(scale, seeds)
        labels = {run.setting: label for label, run in labelled}
        wanted = [run for _, run in labelled]
        found = finished(wanted, archive)
        points: list[dict[str, Any]] = []
        for setting, group in found.items():
            known = [(archive.record(run) or {})["results"] for run in group]
            modes = [mode for mode in self.modes if all(mode in results for results in known)]
            for mode in modes if self.every else modes[:1]:
                point: dict[str, Any] = {
                    "label": labels[setting],
                    "setting": setting,
                    "mode": mode,
                    "n": len(group),
                }
                points.append(point | at_end(group, archive, mode) | _steps(group, archive, mode))
        order = list(dict.fromkeys(labels.values()))
        with canvas(size=(6.2, 4.2)) as (figure, (axes,)):
            for label, mode in dict.fromkeys((p["label"], p["mode"]) for p in points):
                chosen = [p for p in points if (p["label"], p["mode"]) == (label, mode)]
                chosen.sort(key=lambda p: p["mflops"].mean)
                style = {"marker": "s" if mode == "thresholded" else "o", "linestyle": "-"}
                style |= {"color": _PALETTE[order.index(label) % len(_PALETTE)]}
                if self.every and mode == "thresholded":
                    style |= {"linestyle": ":"}
                shown = f"{label}, {mode}" if self.every and mode != self.modes[0] else label
                draw_points(axes, chosen, shown, **style)
            axes.set(xlabel="MFLOPs an image", ylabel="test accuracy, %")
            axes.set_title(
                f"{self.title.format(scale.network(self.depth))}, {scale.length}: {over_seeds(found, wanted)}"
            )
            axes.legend(loc="best")
            numbers = {"points": points, **inventory(wanted, found)}
            return save(figure, folder, self.name, numbers)


def _few(scale: Scale, settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return settings if scale.name != "smoke" else dict(list(settings.items())[-1:])


def _steps(group: list[Run], archive: Archive, mode: str) -> dict[str, list[float]]:
    """Mean iterations of each block, which show units that never run."""
    each = [(archive.record(run) or {})["results"][mode]["steps"] for run in group]
    return {"steps": [spread(block).mean for block in zip(*each, strict=True)]}


COMPARISONS = (
    Comparison("temperature", "PSACT {}, τ = 0.01", temperatures),
    Comparison("dead-units", "PSACT {}, τ = 0.01", dead_units),
    Comparison("baselines", "up to {}", baselines),
    Comparison("sact-heads", "SACT {}", heads, modes=("act", "thresholded"), every=True),
    Comparison(
        "sact-heads-resnet110",
        "SACT {}",
        partial(heads, depth=110),
        modes=("act", "thresholded"),
        every=True,
        depth=110,
    ),
)
