"""Inside a variational autoencoder: PACT decides how often a decoder refines its canvas (Fashion-MNIST).

The paper's reason for PACT: ACT's objective is discontinuous, so that it "cannot be incorporated into
stochastic models trained with reparameterization, such as variational autoencoder". The autoencoder is in
:mod:`~torchpact_recipes.experiments.vae.model`, its objective along lines in parameter space in
:mod:`~torchpact_recipes.experiments.vae.line`.

Protocol, written before the test set was opened:

* Data: pixels of at least half the brightness are ones, all others zeros. The first 50,000 training images
  are learned from, the last 10,000 are for validation.
* Networks: L = 8. Fixed numbers of steps K = 1 … 8, each a network of its own; PACT, trained relaxed and
  evaluated thresholded; ACT, evaluated as such. All have as many updates, the same learning rate, no warm-up
  and the seeds 0, 1, 2. The prices of PACT and ACT are those of ``TAUS``, in nats a step.
* Learning rates, the bias of halting heads and the range of prices were chosen for PACT in short runs on
  validation images. The same were taken for ACT.
* The best fixed number is the K of the highest mean bound on validation images. The price of PACT, and of
  ACT, is the highest whose mean bound there is no lower than that of the best fixed number; if there is none,
  the one with the highest bound.
* On test images every network is evaluated once, with two draws of v for an image, the same noise for all.
  What counts is the difference to the best fixed number, seed by seed, and mean steps.
* Lines in parameter space: from the networks of seed 0 at the prices chosen, with validation images.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.runs import AnyRun, Scale
from torchpact_recipes.experiments.vae import figure
from torchpact_recipes.experiments.vae.images import load_binary
from torchpact_recipes.experiments.vae.measure import lines_file, measure_lines
from torchpact_recipes.experiments.vae.training import MODES, VaeConfig, VaeRun, train

MAX_STEPS = 8
TAUS = (0.3, 0.6, 1.2)
SMOKE: dict[str, Any] = {"iterations": 2, "batch": 4, "latents": 2, "width": 4, "encoder": 4, "validation": 4}


def runs(scale: Scale, seeds: list[int]) -> list[VaeRun]:
    """All fixed numbers of steps, and both methods at all prices."""
    small = scale.name == "smoke"
    sizes: dict[str, Any] = SMOKE if small else {}
    steps, taus = (2, TAUS[:1]) if small else (MAX_STEPS, TAUS)
    found = []
    for seed in seeds:
        found += [VaeConfig(m, steps, tau, seed, **sizes) for tau in taus for m in ("relaxed", "act")]
        found += [VaeConfig("fixed", count, 0.0, seed, **sizes) for count in range(steps, 0, -1)]
    return [VaeRun(config) for config in found]


def make(
    wanted: Sequence[AnyRun], archive: Archive, scale: Scale, root: Path | None, say: Callable[[str], None]
) -> None:
    """Train the runs that are missing, one after the other, then measure lines; ``root`` has the images.

    A run takes a minute, and starts anew where it was stopped.
    """
    small = scale.images is not None
    root = Path("sample") if small and root is None else root
    ours = [run for run in wanted if isinstance(run, VaeRun)]
    todo = [run for run in ours if archive.record(run) is None]
    everything = {run.config.method for run in ours} == MODES.keys()
    lines = everything and not lines_file(archive).is_file()
    if todo or (lines and all(archive.weights(run) for run in ours)):
        images = load_binary(root, "train")[: scale.images]
        for run in todo:
            start = time.monotonic()
            train(run, archive, images, load_binary(root, "test")[: scale.images])
            say(f"{run.name}: trained in {time.monotonic() - start:.0f} s")
        if lines:
            held_out = images[-ours[0].config.validation :]
            measure_lines(ours, archive, held_out, points=5 if small else 61)


def draw(archive: Archive, scale: Scale, seeds: list[int], folder: Path) -> list[Path]:
    """Bounds against steps, and objectives on lines in parameter space."""
    return figure.draw(runs(scale, seeds), archive, folder)
