"""Beyond the paper: the best trade-off of accuracy and FLOPs that a recipe of today gives."""

from pathlib import Path
from typing import Any

from torchpact.experiments.archive import Archive
from torchpact.experiments.gather import at_end, finished, inventory, over_seeds
from torchpact.experiments.labels import Label, write_labels
from torchpact.experiments.plotting import COLORS, GREY, canvas, draw_points, save
from torchpact.experiments.published import PUBLISHED
from torchpact.experiments.runs import Run, Scale
from torchpact.models import ResNetConfig
from torchpact.training import preset
from torchpact.training.config import DISTILL

TAUS = {32: (0.12, 0.06, 0.03), 110: (0.04, 0.02)}
TAUGHT: dict[str, Any] = {"distill": DISTILL, "lr": 0.005, "tau_ramp": 0.0}
"""Of adaptive networks. A teacher's gradients are four times as large as those of labels: with learning rates
of 0.1 and 0.02 they made all halting heads of ResNet-32 constants within a hundred iterations, with this one
those of the third block only. Where the price rose from 0, heads never halted before it had risen, nor
afterwards. Prices that make a difference are four times as large, too; those of ResNet-110 are a guess."""


def runs(scale: Scale, seeds: list[int]) -> list[Run]:
    """Plain networks and PSACT from them, all by the preset ``strong``, whatever the scale, unless smoke.

    The teacher of all is a plain ResNet-110 of the same seed, which had none; PSACT of its own depth starts
    from it, too.
    """
    small = scale.name == "smoke"
    settings = scale.settings if small else {}
    found = []
    for seed in seeds:
        common = settings | {"seed": seed}
        teacher = _plain(scale.depths[110], common)
        found.append(teacher)
        for depth, taus in TAUS.items():
            units = scale.depths[depth]
            start = teacher
            if units != teacher.config.network.units:
                start = _plain(units, common | {"distill": DISTILL}, teacher)
                found += [_plain(units, common), start]
            network = ResNetConfig(units=units)
            found += [
                Run(preset("strong", network=network, tau=tau, **common, **TAUGHT), start, teacher)
                for tau in taus[: 1 if small else None]
            ]
    return found


def _plain(units: int, settings: dict[str, Any], teacher: Run | None = None) -> Run:
    network = ResNetConfig(units=units, adaptive=False)
    return Run(preset("strong", method="plain", network=network, **settings), teacher=teacher)


def draw(archive: Archive, scale: Scale, seeds: list[int], folder: Path) -> list[Path]:
    """Thresholded networks, the plain ones, and what others have published."""
    wanted = runs(scale, seeds)
    found = finished(wanted, archive)
    with canvas(columns=2, size=(9, 4)) as (figure, panels):
        numbers: dict[str, Any] = inventory(wanted, found)
        for depth, axes in zip(TAUS, panels, strict=True):
            labels = []
            for mode in ("thresholded", "plain"):
                groups = [
                    group
                    for group in found.values()
                    if group[0].config.network.units == scale.depths[depth]
                    and (group[0].config.method == "plain") == (mode == "plain")
                ]
                points: list[dict[str, Any]] = [
                    {"tau": g[0].config.tau} | at_end(g, archive, mode) for g in groups
                ]
                numbers[f"ResNet-{depth}, {mode}"] = points
                if not points:
                    continue
                color = COLORS["plain" if mode == "plain" else "relaxed"]
                style = {"marker": "*", "linestyle": ""} if mode == "plain" else {"marker": "s"}
                name = "plain" if mode == "plain" else "PSACT, thresholded"
                draw_points(axes, points, name, color=color, **style)
                texts = [
                    f"{g[0].config.tau:g}" if mode != "plain" else "taught" if g[0].teacher else "by labels"
                    for g in groups
                ]
                labels += [
                    Label(p["mflops"].mean, p["accuracy"].mean, text, color)
                    for p, text in zip(points, texts, strict=True)
                ]
            if scale.depths[depth] == (depth - 2) // 6:
                for other in PUBLISHED[depth]:
                    axes.plot(other.mflops, other.accuracy, "o", color=GREY, markerfacecolor="none")
                    labels.append(Label(other.mflops, other.accuracy, other.label, GREY))
            axes.set(xlabel="MFLOPs an image", ylabel="test accuracy, %", title=scale.network(depth))
            axes.margins(0.1)
            if len(axes.get_legend_handles_labels()[0]) > 1:
                axes.legend(loc="lower right")
            write_labels(axes, labels)
        figure.suptitle(f"Recipe “strong”: {over_seeds(found, wanted)}")
        return save(figure, folder, "frontier", numbers)
