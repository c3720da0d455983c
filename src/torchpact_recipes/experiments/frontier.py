"""Beyond the paper: the best trade-off of accuracy and FLOPs that a recipe of today gives."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchpact.models import ResNetConfig
from torchpact_recipes.experiments import fig5
from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.gather import at_end, finished, inventory, over_seeds
from torchpact_recipes.experiments.labels import Label, write_labels
from torchpact_recipes.experiments.plotting import GREY, canvas, draw_points, save
from torchpact_recipes.experiments.published import PUBLISHED, Published
from torchpact_recipes.experiments.runs import SCALES, Run, Scale
from torchpact_recipes.training import preset
from torchpact_recipes.training.config import DISTILL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TAUGHT: dict[str, Any] = {"distill": DISTILL, "lr": 0.005}
"""Of adaptive networks with a teacher, whose gradients are four times as large as those of labels: with
learning rates of 0.1 and 0.02 they made all halting heads of ResNet-32 constants within a hundred iterations,
with this one those of the third block only. Prices that make a difference are four times as large, too."""


class Way(NamedTuple):
    """How adaptive networks are trained."""

    settings: dict[str, Any]
    taus: tuple[float, ...]

    @property
    def taught(self) -> bool:
        """Whether by a teacher's outputs, and not by labels alone."""
        return "distill" in self.settings


PAPER = SCALES["paper"]
TEACHER, LABELS, PAPERS = "strong, taught", "strong, by labels", f"the paper's, {PAPER.length}"
COLORS = {TEACHER: "#0072B2", LABELS: "#009E73", PAPERS: "#E69F00"}
"""By recipe."""

ADAPTIVE: dict[str, Any] = {"marker": "s"}
PLAIN: dict[str, Any] = {"marker": "*", "markersize": 9, "linestyle": ""}
OTHER: dict[str, Any] = {"marker": "o", "markerfacecolor": "none", "linestyle": "", "color": GREY}

WAYS = {32: [Way(TAUGHT, (0.12, 0.06, 0.03))], 110: [Way({}, (0.01, 0.006, 0.002))]}


def runs(scale: Scale, seeds: list[int]) -> list[Run]:
    """Plain networks and PSACT from them, all by the preset ``strong``, whatever the scale, unless smoke.

    The teacher is a plain ResNet-110 of the same seed, which had none; PSACT of its own depth starts from it.
    """
    small = scale.name == "smoke"
    settings = scale.settings if small else {}
    found = []
    for seed in seeds:
        common = settings | {"seed": seed}
        teacher = _plain(scale.depths[110], common)
        found.append(teacher)
        for depth, ways in WAYS.items():
            units = scale.depths[depth]
            start = teacher
            if units != teacher.config.network.units:
                start = _plain(units, common | {"distill": DISTILL}, teacher)
                found += [_plain(units, common), start]
            network = ResNetConfig(units=units)
            found += [
                Run(
                    preset("strong", network=network, tau=tau, **common, **way.settings),
                    start,
                    teacher if way.taught else None,
                )
                for way in ways
                for tau in way.taus[: 1 if small else None]
            ]
    return found


def _plain(units: int, settings: dict[str, Any], teacher: Run | None = None) -> Run:
    network = ResNetConfig(units=units, adaptive=False)
    # the price of steps that it does not take: as its files have it
    config = preset("strong", method="plain", network=network, tau_ramp=0.25, **settings)
    return Run(config, teacher=teacher)


class Part(NamedTuple):
    """Finished runs of one setting, where they are, and the recipe that they were trained by."""

    recipe: str
    archive: Archive
    group: list[Run]


def draw(archive: Archive, scale: Scale, seeds: list[int], folder: Path) -> list[Path]:
    """Thresholded networks, plain ones and what others have published; beside them the paper's recipe."""
    wanted = runs(scale, seeds)
    found = finished(wanted, archive)
    parts = [Part(TEACHER if g[0].teacher else LABELS, archive, g) for g in found.values()]
    numbers: dict[str, Any] = inventory(wanted, found)
    with canvas(columns=2, size=(9, 4)) as (figure, panels):
        _explain(figure)  # first, as labels are written where there is room
        for depth, axes in zip(WAYS, panels, strict=True):
            # the small networks of a smoke test are neither the paper's nor those that others have published
            real = scale.depths[depth] == (depth - 2) // 6
            shown = [p for p in parts if p.group[0].config.network.units == scale.depths[depth]]
            shown += _by_the_paper(archive.beside(PAPER.name), seeds, depth) if real else []
            others = PUBLISHED[depth] if real else ()
            points = [_point(part) for part in shown]
            numbers[scale.network(depth)] = points
            _draw_points(axes, points, others)
            axes.set_title(scale.network(depth))
        figure.suptitle(f"Thresholded, {over_seeds(found, wanted)}, τ beside the points", fontsize=9)
        return save(figure, folder, "frontier", numbers)


def _by_the_paper(archive: Archive, seeds: list[int], depth: int) -> list[Part]:
    """PSACT of fig. 5 by all of the paper's iterations, and what it starts from, as far as there are any."""
    groups: dict[str, list[Run]] = {}
    for run in fig5.runs(PAPER, seeds, depth):
        if run.config.method != "act" and archive.record(run) is not None:
            groups.setdefault(run.setting, []).append(run)
    return [Part(PAPERS, archive, group) for group in groups.values()]


def _point(part: Part) -> dict[str, Any]:
    config = part.group[0].config
    plain = config.method == "plain"
    start = {
        "recipe": part.recipe,
        "runs": [run.name for run in part.group],
        "tau": None if plain else config.tau,
    }
    return start | at_end(part.group, part.archive, "plain" if plain else "thresholded")


def _draw_points(axes: "Axes", points: list[dict[str, Any]], others: tuple[Published, ...]) -> None:
    """A colour for every recipe, a marker for plain networks and one for adaptive ones."""
    labels = []
    for recipe, color in COLORS.items():
        adaptive, plain = (
            [p for p in points if p["recipe"] == recipe and (p["tau"] is None) == kind]
            for kind in (False, True)
        )
        draw_points(axes, adaptive, color=color, **ADAPTIVE)
        draw_points(axes, plain, color=color, **PLAIN)
        labels += [Label(p["mflops"].mean, p["accuracy"].mean, f"{p['tau']:g}", color) for p in adaptive]
    for other in others:
        axes.plot(other.mflops, other.accuracy, **OTHER)
        labels.append(Label(other.mflops, other.accuracy, other.label, GREY))
    axes.set(xlabel="MFLOPs an image", ylabel="test accuracy, %")
    axes.margins(0.1)
    write_labels(axes, labels)


def _explain(figure: "Figure") -> None:
    """Say below the panels what colours and markers mean."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=color, label=recipe) for recipe, color in COLORS.items()]
    handles += [
        Line2D([], [], color="black", label="PSACT", **ADAPTIVE),
        Line2D([], [], color="black", label="plain", **PLAIN),
        Line2D([], [], label="published", **OTHER),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
