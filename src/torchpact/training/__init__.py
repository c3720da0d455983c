"""Training: one trainer for plain, relaxed, REINFORCE and ACT networks.

What to train    TrainConfig, preset, PRESETS
Train it         Trainer, train_together, TrainingError
Use it           evaluate, Evaluation, load_checkpoint, save_checkpoint, load_model, CheckpointError
"""

from torchpact.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    load_model,
    save_checkpoint,
)
from torchpact.training.config import PRESETS, TrainConfig, preset
from torchpact.training.evaluate import Evaluation, evaluate, evaluate_modes
from torchpact.training.learner import Learner, Metrics
from torchpact.training.trainer import Trainer, TrainingError, train_together

__all__ = [
    "PRESETS",
    "Checkpoint",
    "CheckpointError",
    "Evaluation",
    "Learner",
    "Metrics",
    "TrainConfig",
    "Trainer",
    "TrainingError",
    "evaluate",
    "evaluate_modes",
    "load_checkpoint",
    "load_model",
    "preset",
    "save_checkpoint",
    "train_together",
]
