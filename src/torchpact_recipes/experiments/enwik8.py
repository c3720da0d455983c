"""enwik8: bits a character and steps of one-step, repeating and adaptive LSTMs, and where they ponder."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.gather import finished, inventory, over_seeds
from torchpact_recipes.experiments.plotting import canvas, save
from torchpact_recipes.experiments.rnn_figures import NAMES, PAINT, SHOWN, overview, points_of
from torchpact_recipes.experiments.rnn_runs import SequenceRun, sequence_run
from torchpact_recipes.experiments.runs import Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHODS = ("relaxed", "act")
TAUS: dict[str, tuple[float, ...]] = {
    "smoke": (0.01,),
    "fast": (0.01, 0.001),
    "paper": (0.1, 0.03, 0.01, 0.003),
}
FREE: dict[str, tuple[float, ...]] = {"smoke": (0.01,), "fast": (0.03,), "paper": (0.03, 0.01)}
"""Prices of those that pay nothing in the first half of training."""
REPEATS: dict[str, tuple[int, ...]] = {"smoke": (2,), "fast": (2, 3), "paper": (2, 3, 5)}
SETTINGS: dict[str, dict[str, Any]] = {
    # 26 million characters; reading the validation text is no small part of so short a run
    "fast": {"iterations": 4000, "validate_every": 4000},
}
SHOWN_CHARACTERS = 120


def runs(scale: Scale, seeds: list[int]) -> list[SequenceRun]:
    """One step, fixed numbers of them, and both methods for every τ."""

    def run(method: str, seed: int, **settings: Any) -> SequenceRun:
        chosen = SETTINGS.get(scale.name, {}) | settings
        return sequence_run(scale.name, "enwik8", method, seed, **chosen)

    found = []
    for seed in seeds:
        found.append(run("plain", seed))
        found += [run("repeat", seed, max_steps=steps) for steps in REPEATS[scale.name]]
        found += [run(m, seed, tau=tau) for m in METHODS for tau in TAUS[scale.name]]
        found += [run(m, seed, tau=tau, free=0.5) for m in METHODS for tau in FREE[scale.name]]
    return found


def draw(archive: Archive, scale: Scale, seeds: list[int], folder: Path) -> list[Path]:
    """Bits a character against τ and steps; and steps over a passage, by the kind of character too."""
    wanted = runs(scale, seeds)
    found = finished(wanted, archive)
    points = points_of(found, archive)
    numbers = {"points": points, **inventory(wanted, found)}
    title = f"enwik8, {scale.name}: {over_seeds(found, wanted)}"
    label, steps = "bits a character", "steps a character"
    paths = overview(folder, "rnn-enwik8", title, numbers, "bits", label, steps)
    pondering = _most_uneven(found, archive)
    if pondering:
        with canvas(1, 2 * len(pondering), size=(11, 3.2 * len(pondering))) as (figure, axes):
            for place, (method, measured) in enumerate(pondering.items()):
                _passage(axes[2 * place], measured, method)
                _bits(axes[2 * place + 1], measured)
            paths += save(figure, folder, "rnn-enwik8-passage", pondering)
    return paths


def _most_uneven(found: dict[str, list[SequenceRun]], archive: Archive) -> dict[str, dict[str, Any]]:
    """For each method, the run whose steps differ most from one character to another."""
    best: dict[str, dict[str, Any]] = {}
    for group in found.values():
        for run in group:
            record, method = archive.record(run), run.config.method
            if record is None or method not in METHODS:
                continue
            measured = record["results"][SHOWN[method]] | {"run": run.name}
            if method not in best or _variance(measured) > _variance(best[method]):
                best[method] = measured
    return best


def _variance(measured: dict[str, Any]) -> float:
    steps = measured["passage_steps"]
    mean = sum(steps) / len(steps)
    return float(sum((s - mean) ** 2 for s in steps)) / len(steps)


def _passage(axes: "Axes", measured: dict[str, Any], method: str) -> None:
    """Bars of the steps that each character took, with the characters below."""
    steps = measured["passage_steps"][:SHOWN_CHARACTERS]
    axes.bar(range(len(steps)), steps, color=PAINT[method], width=0.8)
    _characters(axes, measured)
    kinds = ", ".join(f"{kind} {mean:.2f}" for kind, mean in measured["steps_by_kind"].items())
    axes.set_title(f"{NAMES[method]}, {measured['run']}; mean steps: {kinds}")
    axes.set_ylabel("steps")
    axes.locator_params("y", integer=True)


def _bits(axes: "Axes", measured: dict[str, Any]) -> None:
    """What each character of the same text cost."""
    bits = measured["passage_bits"][:SHOWN_CHARACTERS]
    axes.bar(range(len(bits)), bits, color="#bbbbbb", width=0.8)
    axes.set_xticks([])
    axes.set_xlim(-1, len(bits))
    axes.set_ylabel("bits")


def _characters(axes: "Axes", measured: dict[str, Any]) -> None:
    text = measured["passage"][:SHOWN_CHARACTERS]
    shown = [{" ": "␣", "\n": "¶"}.get(c, c if c.isascii() and c.isprintable() else "·") for c in text]
    axes.set_xticks(range(len(shown)), shown, fontfamily="monospace", fontsize=6.5, parse_math=False)
    axes.set_xlim(-1, len(shown))
    axes.grid(visible=False)
