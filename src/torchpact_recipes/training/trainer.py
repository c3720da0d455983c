"""Training a network on images: a learner, the loop around it, and validation on the test set."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchpact.models import warm_start
from torchpact_recipes import zoo
from torchpact_recipes.data import Images
from torchpact_recipes.training import distributed
from torchpact_recipes.training.checkpoint import load_network
from torchpact_recipes.training.config import TrainConfig
from torchpact_recipes.training.evaluate import evaluate_modes
from torchpact_recipes.training.learner import Learner
from torchpact_recipes.training.loop import TrainingLoop
from torchpact_recipes.training.resuming import describe
from torchpact_recipes.training.run_files import Event
from torchpact_recipes.training.state import derived_seed
from torchpact_recipes.training.variance import gradient_variance


class Trainer(TrainingLoop[Learner]):
    """Trains one network on images; several can take turns on one device, see :func:`train_together`.

    ``initial`` is the checkpoint of a plain network to start from, or the folder of one that was saved,
    ``teacher`` that of one to learn from, if the configuration says so; by default the same.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: str | os.PathLike[str],
        train: Images,
        test: Images,
        *,
        resume: bool = False,
        initial: Path | None = None,
        teacher: Path | None = None,
        report: Callable[[Event], None] = lambda event: None,
        tensorboard: bool = False,
        **learner_options: Any,
    ) -> None:
        taught_by = (teacher or initial) if config.distill else teacher
        known = None if taught_by is None else distributed.on_first(lambda: load_network(taught_by))[0]
        learner = Learner(config, train, train.images.device, teacher=known, **learner_options)

        def validate() -> dict[str, Any]:
            seed = derived_seed(config.seed, "validation")
            found: dict[str, Any] = {
                "modes": evaluate_modes(
                    learner.model, test, config.modes, precision=config.precision, seed=seed
                )
            }
            if config.variance_samples:
                found["gradient_variance"] = gradient_variance(learner, config.variance_samples)
            return found

        def start() -> None:
            if initial is not None:
                plain, _ = distributed.on_first(lambda: load_network(initial))
                try:
                    warm_start(learner.model, plain.to(learner.device))
                except ValueError as error:
                    raise ValueError(f"{zoo.called(initial)}: {error}") from None

        super().__init__(
            learner,
            folder,
            validate,
            start=start,
            about={
                "warm_start": _named(initial),
                "teacher": _named(taught_by),
                "data": describe(train, "images", train.images, train.labels),
            },
            resume=resume,
            report=report,
            tensorboard=tensorboard,
        )


def _named(checkpoint: Path | None) -> str | None:
    """The run and the file: where on this machine it lies is nobody else's affair."""
    return None if checkpoint is None else f"{checkpoint.parent.name}/{checkpoint.name}"
