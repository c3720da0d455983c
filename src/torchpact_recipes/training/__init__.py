"""Training: one loop for images and sequences, plain networks and adaptive ones by any method.

What to train    TrainConfig, preset, PRESETS; for sequences SequenceTrainConfig, sequence_preset
Train it         Trainer, SequenceTrainer, Texts; train_together, TrainingError
Use it           evaluate, Evaluation, evaluate_on_task, evaluate_on_text, evaluate_sequences
Keep it          load_checkpoint, save_checkpoint, load_model, load_sequence_model, CheckpointError
"""

import warnings

from torchpact_recipes.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    load_model,
    load_sequence_model,
    save_checkpoint,
)
from torchpact_recipes.training.config import PRESETS, TrainConfig, preset
from torchpact_recipes.training.evaluate import Evaluation, evaluate, evaluate_modes
from torchpact_recipes.training.images import Learner, Trainer
from torchpact_recipes.training.loop import BaseLearner, Metrics, train_together
from torchpact_recipes.training.run import TrainingRun
from torchpact_recipes.training.run_files import TrainingError
from torchpact_recipes.training.sequence_config import SequenceTrainConfig
from torchpact_recipes.training.sequence_evaluate import TaskEvaluation, evaluate_on_task
from torchpact_recipes.training.sequence_presets import sequence_preset
from torchpact_recipes.training.sequences import SequenceLearner, SequenceTrainer, Texts, evaluate_sequences
from torchpact_recipes.training.text import TextEvaluation, evaluate_on_text

__all__ = [
    "PRESETS",
    "BaseLearner",
    "Checkpoint",
    "CheckpointError",
    "Evaluation",
    "Learner",
    "Metrics",
    "SequenceLearner",
    "SequenceTrainConfig",
    "SequenceTrainer",
    "TaskEvaluation",
    "TextEvaluation",
    "Texts",
    "TrainConfig",
    "Trainer",
    "TrainingError",
    "TrainingRun",
    "evaluate",
    "evaluate_modes",
    "evaluate_on_task",
    "evaluate_on_text",
    "evaluate_sequences",
    "load_checkpoint",
    "load_model",
    "load_sequence_model",
    "preset",
    "save_checkpoint",
    "sequence_preset",
    "train_together",
]


def __getattr__(name: str) -> object:
    if name == "TrainingLoop":
        warnings.warn(
            "TrainingLoop is now TrainingRun; the old name works until the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return TrainingRun
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
