"""What finished runs say of the paper's claims, before anybody judges."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchpact.experiments import fig4, fig5
from torchpact.experiments.archive import Archive
from torchpact.experiments.gather import at_end
from torchpact.experiments.runs import Run, Scale


@dataclass(frozen=True)
class Evidence:
    """The finished runs of a scale."""

    archive: Archive
    scale: Scale
    seeds: list[int]

    def groups(self, runs: list[Run]) -> dict[tuple[str, float, int], list[Run]]:
        """Those finished, seeds together, by method, τ and group."""
        found: dict[tuple[str, float, int], list[Run]] = {}
        for run in runs:
            if self.archive.record(run) is not None:
                key = run.config.method, run.config.tau, run.config.network.group
                found.setdefault(key, []).append(run)
        return found

    def fig5(self, depth: int, method: str) -> dict[float, list[Run]]:
        """The finished runs of a method in fig. 5, by τ, the dearest first."""
        found = self.groups(fig5.runs(self.scale, self.seeds, depth))
        return {tau: runs for (kind, tau, _), runs in sorted(found.items(), reverse=True) if kind == method}

    def fig4(self) -> dict[int, tuple[list[Run], list[Run]]]:
        """The finished runs of fig. 4, by M, where there are some of the relaxation and of REINFORCE."""
        found = self.groups(fig4.runs(self.scale, self.seeds))
        pairs = {}
        for group, latents in fig4.GROUPS.items():
            relaxed, reinforce = (found.get((method, fig4.TAU, group)) for method in fig4.METHODS)
            if relaxed and reinforce:
                pairs[latents] = relaxed, reinforce
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

    def curve(self, depth: int, method: str, mode: str) -> tuple[list[float], list[float]]:
        """MFLOPs and accuracies where the runs of a method in fig. 5 ended in a mode, the cheapest first."""
        ends = [at_end(runs, self.archive, mode) for runs in self.fig5(depth, method).values()]
        points = sorted((end["mflops"].mean, end["accuracy"].mean) for end in ends)
        return [x for x, _ in points], [y for _, y in points]

    def log_variances(self, runs: list[Run], part: str) -> dict[int, float]:
        """Mean logarithms, to base ten, of the variance of gradients by iteration: ``total``, or a part."""
        found: dict[int, list[float]] = {}
        for run in runs:
            for event in self.archive.history(run):
                if "gradient_variance" in event:
                    log = np.log10(event["gradient_variance"][part])
                    found.setdefault(event["iteration"], []).append(float(log))
        return {at: float(np.mean(logs)) for at, logs in found.items()}
