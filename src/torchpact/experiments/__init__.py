"""The paper's experiments: one file a figure or table.

Each has ``runs(scale, seeds)``, what has to be trained for it, and ``draw(archive, scale, seeds, folder)``,
which makes its files from the results and returns their paths.
"""

from types import ModuleType

from torchpact.experiments import fig4, fig5, fig5_resnet110
from torchpact.experiments.archive import Archive
from torchpact.experiments.runs import SCALES, Run, Scale
from torchpact.experiments.sweep import make, missing

EXPERIMENTS: dict[str, ModuleType] = {
    "fig4": fig4,
    "fig5": fig5,
    "fig5-resnet110": fig5_resnet110,
}

__all__ = ["EXPERIMENTS", "SCALES", "Archive", "Run", "Scale", "make", "missing"]
