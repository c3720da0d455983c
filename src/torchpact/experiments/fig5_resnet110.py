"""Fig. 5, right: the same for ResNet-110."""

from torchpact.experiments import fig5
from torchpact.experiments.runs import Run, Scale


def runs(scale: Scale, seeds: list[int]) -> list[Run]:
    """One seed, unless more are asked for."""
    return fig5.runs(scale, seeds, depth=110)
