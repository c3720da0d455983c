"""Fig. 3: a relaxed PSACT network through its training, evaluated in three modes."""

from pathlib import Path

from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.gather import Curve, finished, inventory, over_seeds, through_training
from torchpact_recipes.experiments.plotting import (
    GREY,
    LINES,
    MARKERS,
    MODE_COLORS,
    canvas,
    count_iterations,
    draw_curve,
    save,
)
from torchpact_recipes.experiments.runs import Run, Scale, adaptive, looks
from torchpact_recipes.training.evaluate import Evaluation
from torchpact_recipes.training.run_files import Event

TAU = 0.01
MODES = ("relaxed", "discrete", "thresholded")
PANELS = {"loss": "test loss", "accuracy": "test accuracy, %", "mflops": "MFLOPs an image"}


def runs(scale: Scale, seeds: list[int]) -> list[Run]:
    """The PSACT networks of fig. 5 with this τ, looked at more often."""
    return [adaptive(scale, 32, "relaxed", TAU, seed, **looks(scale, 8)) for seed in seeds]


def value(run: Run, event: Event, mode: str, name: str) -> float:
    """What a panel shows of one validation; the loss is that of the objective, nll + τ Σ N."""
    found = Evaluation(**event["modes"][mode])
    if name == "loss":
        return found.objective(run.config.tau)
    return 100 * found.accuracy if name == "accuracy" else found.flops / 1e6


def draw(archive: Archive, scale: Scale, seeds: list[int], folder: Path) -> list[Path]:
    """Above, what was measured in each mode; below, how far that is from the discrete one."""
    wanted = runs(scale, seeds)
    found = finished(wanted, archive)
    (group,) = found.values()

    def curve(name: str, mode: str, other: str | None = None) -> Curve:
        def shown(run: Run, event: Event) -> float:
            return value(run, event, mode, name) - (value(run, event, other, name) if other else 0.0)

        known = through_training(group, archive, shown)
        assert known is not None  # there is a validation at the end of every run
        return known

    curves = {name: {mode: curve(name, mode) for mode in MODES} for name in PANELS}
    gaps = {
        name: {mode: curve(name, mode, "discrete") for mode in MODES if mode != "discrete"} for name in PANELS
    }
    with canvas(3, 2, size=(9, 4.8), sharex=True, height_ratios=(1.5, 1)) as (figure, axes):
        for above, below, (name, title) in zip(axes[:3], axes[3:], PANELS.items(), strict=True):
            for panel, shown in ((above, curves[name]), (below, gaps[name])):
                for mode, known in shown.items():
                    style = {"color": MODE_COLORS[mode], "linestyle": LINES[mode], "marker": MARKERS[mode]}
                    draw_curve(panel, known, label=mode, **style)
            above.set_ylabel(title)
            below.axhline(0, color=GREY, linewidth=0.8)
            below.set_ylabel("minus discrete")
            count_iterations(below)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.align_ylabels()
        figure.suptitle(
            f"PSACT {scale.network(32)}, τ = {TAU}, {scale.length}: {over_seeds(found, wanted)}", fontsize=9
        )
        numbers = {"tau": TAU, "modes": curves, "minus_discrete": gaps, **inventory(wanted, found)}
        return save(figure, folder, "fig3", numbers)
