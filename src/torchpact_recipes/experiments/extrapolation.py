"""Parity of more elements than were ever used in training: whether more steps are taken, and help."""

from pathlib import Path

from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.gather import finished, inventory
from torchpact_recipes.experiments.parity import REPEATS, SIZES
from torchpact_recipes.experiments.plotting import canvas, save
from torchpact_recipes.experiments.rnn_figures import beyond, legend, points_of
from torchpact_recipes.experiments.rnn_runs import SequenceRun, sequence_run
from torchpact_recipes.experiments.runs import Scale

PRICES = {"relaxed": 0.001, "act": 0.001, "ponder": 0.3}
ELEMENTS = {"smoke": (4, 2), "fast": (12, 6), "paper": (96, 48)}
"""Elements of the vector, and how many of them are used in training at most; more are beyond."""


def runs(scale: Scale, seeds: list[int]) -> list[SequenceRun]:
    """The methods at one price each, and always as many steps as they may take."""
    name = "fast" if scale.name == "smoke" else scale.name
    size, high = ELEMENTS[scale.name]
    far = SIZES[name] | {"size": size, "high": high, "transfer": {"size": size, "low": high + 1}}
    always = far | {"max_steps": REPEATS[name][0 if scale.name == "smoke" else -1]}
    found = []
    for seed in seeds:
        found.append(sequence_run(scale.name, "parity", "repeat", seed, **always))
        found += [
            sequence_run(scale.name, "parity", method, seed, tau=tau, **far) for method, tau in PRICES.items()
        ]
    return found


def draw(archive: Archive, scale: Scale, seeds: list[int], folder: Path) -> list[Path]:
    """Accuracy and steps against difficulty, beyond that of training too."""
    wanted = runs(scale, seeds)
    found = finished(wanted, archive)
    points = points_of(found, archive)
    size, high = ELEMENTS[scale.name]
    with canvas(2, size=(8.4, 3.7)) as (figure, axes):
        beyond(axes[0], points, "accuracy_by_difficulty", "accuracy, %", high)
        beyond(axes[1], points, "steps_by_difficulty", "steps", high)
        legend(figure, axes[0])
        figure.suptitle(f"parity of {size}, trained on 1 to {high} elements, {scale.name}: means over seeds")
        numbers = {"points": points, **inventory(wanted, found)}
        return save(figure, folder, "rnn-parity-beyond", numbers)
