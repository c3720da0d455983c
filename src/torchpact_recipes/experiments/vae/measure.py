"""What is chosen on validation images, and what is measured on lines through the networks chosen."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchpact.files import write_whole
from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.gather import finished, spread
from torchpact_recipes.experiments.vae.line import (
    Line,
    Objective,
    change_over,
    halting_line,
    jumps,
    random_line,
)
from torchpact_recipes.experiments.vae.training import VaeRun, load

PARTS = ("encoder.", "decoder.steps.", "pixels.", "decoder.halting.", "")
"""Beginnings of the names of parameters that a random direction is of; the last has all."""
HALF = 0.02
"""Intervals on lines in random directions are from −2 % to 2 % of the norm of each parameter."""


@dataclass(frozen=True)
class Choice:
    """What validation images chose."""

    fixed: str
    """The setting of the best fixed number of steps."""
    relaxed: str
    act: str


def choose(wanted: Sequence[VaeRun], archive: Archive) -> Choice:
    """Choose by the protocol: see :mod:`torchpact_recipes.experiments.vae`."""
    found = finished(wanted, archive)
    bounds = {setting: _bound(group, archive, "validation") for setting, group in found.items()}
    settings: dict[str, dict[float, str]] = {"fixed": {}, "relaxed": {}, "act": {}}
    for setting, group in found.items():
        config = group[0].config
        settings[config.method][config.max_steps if config.method == "fixed" else config.tau] = setting
    for method, those in settings.items():
        if not those:
            raise ValueError(f"expected finished runs of method {method} in {archive.results}, got none")
    fixed = max(settings["fixed"].values(), key=bounds.__getitem__)
    chosen = []
    for method in ("relaxed", "act"):
        those = settings[method]
        good = [tau for tau, setting in those.items() if bounds[setting] >= bounds[fixed]]
        chosen.append(those[max(good)] if good else max(those.values(), key=bounds.__getitem__))
    return Choice(fixed, *chosen)


def _bound(group: Sequence[VaeRun], archive: Archive, split: str) -> float:
    return spread([result_of(run, archive, split)["elbo"] for run in group]).mean


def result_of(run: VaeRun, archive: Archive, split: str) -> dict[str, Any]:
    """Return what a finished run came to, in the mode that it is compared in."""
    record = archive.record(run)
    assert record is not None
    found: dict[str, Any] = record["results"][split][run.config.modes[-1]]
    return found


def lines_file(archive: Archive) -> Path:
    """Return the file of what is measured on lines."""
    return archive.results / "vae-lines" / "lines.json"


def measure_lines(
    wanted: Sequence[VaeRun], archive: Archive, images: Tensor, *, count: int = 1000, points: int = 61
) -> Path:
    """Measure objectives of PACT and ACT on lines through networks of one seed, and keep the numbers.

    Args:
        wanted: The runs of the experiment; those of the first seed at the prices chosen are taken.
        archive: Has them, and takes the numbers.
        images: Rows of booleans, of which the first are taken.
        count: How many of them.
        points: Places on lines that are drawn.

    Returns:
        The file of the numbers.

    """
    choice, numbers = choose(wanted, archive), {}
    methods: tuple[tuple[Literal["relaxed", "act"], str], ...] = (
        ("relaxed", choice.relaxed),
        ("act", choice.act),
    )
    for method, setting in methods:
        run = next(run for run in wanted if run.setting == setting)
        net = load(run, archive).double()
        generator = torch.Generator().manual_seed(1)
        x = images[:count].double()
        noise = torch.randn(len(x), run.config.latents, generator=generator).double()
        objective = Objective(net, x, noise, method, run.config.tau)
        numbers[method] = {
            "run": run.name,
            "tau": run.config.tau,
            "images": len(x),
            "one": _one_image(objective, random_line(net, "", 0), 4 * points + 1),
            "halting": _along(objective, halting_line(net), 3.0, points),
            "changes": [
                change_over(objective, random_line(net, part, seed), HALF).__dict__
                for part in PARTS
                for seed in range(3)
            ],
        }
    path = lines_file(archive)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, f"{json.dumps(numbers, indent=1)}\n".encode())
    return path


def _places(half: float, points: int) -> list[float]:
    return [half * (2 * k / (points - 1) - 1) for k in range(points)]


def _one_image(objective: Objective, line: Line, points: int, among: int = 16) -> dict[str, Any]:
    """Return objective and bound of the image, of the first few, whose number of steps changes most often."""
    places = _places(0.1, points)
    few = Objective(
        objective.net, objective.x[:among], objective.noise[:among], objective.mode, objective.tau
    )
    seen = [few.at(line, t) for t in places]
    steps = torch.stack([values.steps for values in seen])
    which = int((steps[1:] != steps[:-1]).sum(0).argmax())
    alone = Objective(
        objective.net, objective.x[which : which + 1], objective.noise[which : which + 1],
        objective.mode, objective.tau,
    )  # fmt: skip
    return {
        "image": which,
        "t": places,
        "objective": [values.objective[which].item() for values in seen],
        "elbo": [values.elbo[which].item() for values in seen],
        "steps": steps[:, which].tolist(),
        # relaxed, what is counted as steps changes nothing
        "jumps": [j.__dict__ for j in jumps(alone, line, places)] if objective.mode == "act" else [],
    }


def _along(objective: Objective, line: Line, half: float, points: int) -> dict[str, Any]:
    """Return the mean objective on a line, and its pathwise derivative."""
    places = _places(half, points)
    seen = [objective.at(line, t) for t in places]
    return {
        "t": places,
        "objective": [values.objective.mean().item() for values in seen],
        "slope": [values.slope.mean().item() for values in seen],
        "elbo": [values.elbo.mean().item() for values in seen],
        "elbo_slope": [values.elbo_slope.mean().item() for values in seen],
        "steps": [values.steps.double().mean().item() for values in seen],
    }
