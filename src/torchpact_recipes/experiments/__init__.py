"""The paper's experiments: one file a figure or table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchpact_recipes.experiments import (
    addition,
    claims,
    enwik8,
    extrapolation,
    fig2,
    fig3,
    fig4,
    fig5,
    fig5_resnet110,
    fig6,
    frontier,
    parity,
    summary,
    vae,
)
from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.runs import SCALES, AnyRun, Run, Scale
from torchpact_recipes.experiments.sweep import make, missing
from torchpact_recipes.experiments.variants import COMPARISONS


@dataclass(frozen=True)
class Experiment:
    """What has to be trained for a figure or table, and how it is made from what is finished.

    ``draw(archive, scale, seeds, folder)`` makes its files, with a note of what is missing, and returns
    their paths.
    """

    runs: Callable[[Scale, list[int]], Sequence[AnyRun]]
    draw: Callable[[Archive, Scale, list[int], Path], list[Path]]
    most_seeds: int | None = None
    """How many seeds it has at most, unless more are asked for."""
    make: Callable[[Sequence[AnyRun], Archive, Scale, Path | None, Callable[[str], None]], None] | None = None
    """Makes its missing runs from the folder of its data, where the trainers of the command do not."""
    least_seeds: int = 1
    """How many it has at least, where a scale is for measuring and not only for seeing that it works."""

    def seeds(self, scale: Scale) -> list[int]:
        """The seeds it has by itself."""
        count = max(scale.seeds, self.least_seeds) if scale.images is None else scale.seeds
        return list(range(min(count, self.most_seeds or count)))


EXPERIMENTS = {
    "fig2": Experiment(fig2.runs, fig2.draw),
    "fig3": Experiment(fig3.runs, fig3.draw),
    "fig4": Experiment(fig4.runs, fig4.draw),
    "fig5": Experiment(fig5.runs, fig5.draw),
    "fig5-resnet110": Experiment(fig5_resnet110.runs, fig5_resnet110.draw, most_seeds=1),
    "fig6": Experiment(fig6.runs, fig6.draw, most_seeds=1),
    **{c.name: Experiment(c.runs, c.draw, most_seeds=1) for c in COMPARISONS},
    "frontier": Experiment(frontier.runs, frontier.draw, most_seeds=1),
    "table": Experiment(claims.runs, claims.draw),
    "summary": Experiment(summary.runs, summary.draw),
    "rnn-parity": Experiment(parity.runs, parity.draw, least_seeds=3),
    "rnn-parity-beyond": Experiment(extrapolation.runs, extrapolation.draw, least_seeds=3),
    "rnn-addition": Experiment(addition.runs, addition.draw, least_seeds=3),
    "rnn-enwik8": Experiment(enwik8.runs, enwik8.draw, least_seeds=3),
    "vae": Experiment(vae.runs, vae.draw, make=vae.make),
}

FIRST = ("fig5", "fig4", "fig3", "fig5-resnet110")
"""What says most about the paper, and is trained before the rest if all is asked for."""

__all__ = [
    "EXPERIMENTS",
    "FIRST",
    "SCALES",
    "AnyRun",
    "Archive",
    "Experiment",
    "Run",
    "Scale",
    "make",
    "missing",
]
