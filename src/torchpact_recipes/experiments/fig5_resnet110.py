"""Fig. 5, right: the same for ResNet-110."""

from pathlib import Path

from torchpact_recipes.experiments import fig5
from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.runs import Run, Scale


def runs(scale: Scale, seeds: list[int]) -> list[Run]:
    """As for ResNet-32, with τ of its own."""
    return fig5.runs(scale, seeds, depth=110)


def draw(archive: Archive, scale: Scale, seeds: list[int], folder: Path) -> list[Path]:
    """As for ResNet-32."""
    return fig5.draw(archive, scale, seeds, folder, depth=110, name="fig5-resnet110")
