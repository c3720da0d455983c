"""Fig. 6: where SACT and PSACT compute, ResNet-110, τ = 0.005; and its long version of the supplement."""

from dataclasses import asdict
from pathlib import Path

from torchpact_recipes.data import load_sample
from torchpact_recipes.data.cifar10_formats import CLASSES
from torchpact_recipes.experiments import fig5
from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.occlusion import what_maps_show
from torchpact_recipes.experiments.runs import Run, Scale
from torchpact_recipes.training.checkpoint import load_model
from torchpact_recipes.training.titles import title_of
from torchpact_recipes.viz import compare_maps, ponder_maps, save

TAU = 0.005
SEED = 0
"""Of the choice of test images, and of the noise of the relaxation."""
JUDGED = 400
"""How many images are asked whether maps follow the object; of a scale that only shows that it works, as few
as the figure has."""
ROWS = {"fig6": 3, "fig6-extended": 10}
ACROSS = 2


def runs(scale: Scale, seeds: list[int]) -> list[Run]:
    """The networks of fig. 5, right, that it shows: SACT and PSACT of the first seed."""
    there = fig5.runs(scale, seeds[:1], depth=110)
    tau = 0.01 if scale.name == "smoke" else TAU
    return [
        next(run for run in there if (run.config.method, run.config.tau) == (method, tau))
        for method in ("act", "relaxed")
    ]


def draw(archive: Archive, scale: Scale, seeds: list[int], folder: Path) -> list[Path]:
    """Both versions, of random test images; these are of the bundled sample, so that it takes no data set."""
    networks = []
    for run in runs(scale, seeds):
        weights = archive.pretrained(run)
        if weights is None:
            given = f"in {archive.files(run).last} or in the zoo"
            raise ValueError(f"expected the weights of {run.name} {given}, got none")
        networks.append((run, load_model(weights)[0]))
    sample = load_sample("test")
    chosen = sample.random(ACROSS * max(ROWS.values()), SEED)
    judged = sample.random(JUDGED, SEED) if scale.images is None else chosen
    shown = {
        run.name: what_maps_show(ponder_maps(model, judged.images, seed=SEED).total, judged)
        for run, model in networks
    }
    maps = [(run, ponder_maps(model, chosen.images, seed=SEED)) for run, model in networks]
    paths = []
    for name, rows in ROWS.items():
        count = ACROSS * rows
        columns = [(title_of(run.config), found.first(count)) for run, found in maps]
        with compare_maps(chosen.images[:count], columns, across=ACROSS) as figure:
            numbers = {
                "images": [CLASSES[label] for label in chosen.labels[:count].tolist()],
                "networks": [
                    {
                        "run": run.name,
                        "quantity": found.quantity,
                        "blocks": found.means()[:count],
                        "shows": asdict(shown[run.name]),
                    }
                    for run, found in maps
                ],
            }
            paths += save(figure, folder, name, numbers)
    return paths
