"""What finished runs say of the paper's claims, before anybody judges."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchpact.models import ResNetConfig
from torchpact_recipes.experiments import fig4, fig5
from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.runs import Run, Scale

DEPTHS = (32, 110)

Measured = dict[str, dict[str, list[float]]]
"""A number by network, by setting in words, and by seed."""


@dataclass(frozen=True)
class Evidence:
    """The finished runs of a scale."""

    archive: Archive
    scale: Scale
    seeds: list[int]

    def finished(self, runs: Iterable[Run]) -> list[Run]:
        """Those of the runs that are."""
        return [run for run in runs if self.archive.record(run) is not None]

    def groups(self, runs: list[Run]) -> dict[tuple[str, float, int], list[Run]]:
        """Those finished, seeds together, by method, τ and group."""
        found: dict[tuple[str, float, int], list[Run]] = {}
        for run in self.finished(runs):
            key = run.config.method, run.config.tau, run.config.network.group
            found.setdefault(key, []).append(run)
        return found

    def fig5(self, depth: int, method: str) -> dict[float, list[Run]]:
        """The finished runs of a method in fig. 5, by τ, the dearest first."""
        found = self.groups(fig5.runs(self.scale, self.seeds, depth))
        return {tau: runs for (kind, tau, _), runs in sorted(found.items(), reverse=True) if kind == method}

    def measure_fig5(self, method: str, number: Callable[[Run], float]) -> Measured:
        """A number of every finished run of a method in fig. 5, of both networks."""
        return {
            self.scale.network(depth): {
                f"τ = {tau:g}": [number(run) for run in runs] for tau, runs in found.items()
            }
            for depth in DEPTHS
            if (found := self.fig5(depth, method))
        }

    def fig4(self) -> dict[int, list[tuple[Run, Run]]]:
        """The finished runs of fig. 4, by M: for every seed that of the relaxation and that of REINFORCE."""
        found = self.groups(fig4.runs(self.scale, self.seeds))
        pairs = {}
        for group, latents in fig4.GROUPS.items():
            both = (found.get((method, fig4.TAU, group), []) for method in fig4.METHODS)
            if paired := pair(*both):
                pairs[latents] = paired
        return pairs

    def figure(self, name: str) -> dict[str, Any] | None:
        """The numbers of a figure, if it has been drawn."""
        path = self.archive.results / "figures" / f"{name}.json"
        if not path.is_file():
            return None
        numbers: dict[str, Any] = json.loads(path.read_text())
        return numbers

    def results(self, run: Run, mode: str) -> dict[str, Any]:
        """What one run measured in a mode."""
        record = self.archive.record(run)
        assert record is not None
        found: dict[str, Any] = record["results"][mode]
        return found

    def accuracy(self, run: Run, mode: str) -> float:
        """In per cent."""
        return 100 * float(self.results(run, mode)["accuracy"])

    def mflops(self, run: Run, mode: str) -> float:
        """An image."""
        return float(self.results(run, mode)["flops"]) / 1e6

    def curve(self, depth: int, method: str, mode: str, seed: int) -> tuple[list[float], list[float]]:
        """MFLOPs and accuracies where the runs of a method in fig. 5 and a seed ended, the cheapest first."""
        runs = [
            run for group in self.fig5(depth, method).values() for run in group if run.config.seed == seed
        ]
        points = sorted((self.mflops(run, mode), self.accuracy(run, mode)) for run in runs)
        return [x for x, _ in points], [y for _, y in points]

    def log_variances(self, run: Run, part: str) -> dict[int, float]:
        """Logarithms, to base ten, of the variance of gradients by iteration: ``total``, or a part."""
        return {
            event["iteration"]: float(np.log10(event["gradient_variance"][part]))
            for event in self.archive.history(run)
            if "gradient_variance" in event
        }


def pair(some: list[Run], others: list[Run]) -> list[tuple[Run, Run]]:
    """Runs of two settings, of equal seeds."""
    return [(one, other) for one in some for other in others if one.config.seed == other.config.seed]


def _positions(network: ResNetConfig, results: dict[str, Any]) -> list[int]:
    return [(network.image_size >> k) ** 2 for k in range(len(results["steps"]))]


def undecided(network: ResNetConfig, results: dict[str, Any]) -> float | None:
    """The share of all decisions; results have that of every block, in which a pixel takes one a step."""
    if results.get("undecided") is None:
        return None
    decisions = np.multiply(_positions(network, results), np.minimum(results["steps"], network.units - 1))
    return float(np.average(results["undecided"], weights=decisions))


def early_weight(network: ResNetConfig, results: dict[str, Any]) -> float:
    """What iterations before the last weigh in ACT's output: 1 − R, the mean over all pixels of all blocks.

    As its cost is N + R. It is 0 where all but the last halting probability is, as in a sharp distribution.
    """
    remainders = np.subtract(results["cost"], results["steps"])
    return 1 - float(np.average(remainders, weights=_positions(network, results)))
