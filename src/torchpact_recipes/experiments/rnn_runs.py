"""The runs of the experiments on sequences; like those on images, each is found again by its name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchpact_recipes.training import SequenceTrainConfig, sequence_preset

PRESET = {"smoke": "tiny", "fast": "small", "paper": "paper"}
"""The presets that go with the scales of a reproduction; experiments change some of their settings."""

SMOKE: Mapping[str, Any] = {
    "iterations": 2,
    "batch": 4,
    "hidden": 4,
    "max_steps": 2,
    "window": 4,
    "examples": 60,
    "log_every": 1,
    "validate_every": 2,
    "checkpoint_every": 2,
}


@dataclass(frozen=True)
class SequenceRun:
    """A network to train on sequences; it starts from nothing."""

    config: SequenceTrainConfig

    @property
    def needs(self) -> tuple["SequenceRun", ...]:
        """Nothing: it starts from scratch."""
        return ()

    @property
    def name(self) -> str:
        """What tells it from other runs of its scale; the folder of its files.

        >>> config = sequence_preset("parity", "tiny", method="act", tau=0.01, seed=2)
        >>> SequenceRun(config).name
        'parity-size8-act-tau0.01-seed2'
        """
        return f"{self.setting}-seed{self.config.seed}"

    @property
    def setting(self) -> str:
        """What it has in common with runs of other seeds."""
        config = self.config
        sizes = [f"{name.replace('_', '')}{size}" for name, size in config.sizes.items()]
        method = f"repeat{config.network.max_steps}" if config.method == "repeat" else config.method
        price = [] if config.method in ("plain", "repeat") else [f"tau{config.tau:g}"]
        free = [f"free{config.free:g}"] if config.free else []
        return "-".join([config.task, *sizes, method, *price, *free])

    @property
    def kind(self) -> SequenceTrainConfig:
        """What runs that are alike have in common."""
        return replace(self.config, tau=0.0, seed=0, free=0.0)


def sequence_run(scale: str, task: str, method: str, seed: int, **settings: Any) -> SequenceRun:
    """A run of a scale; ``settings`` are those of its preset that change."""
    chosen = {"method": method, "seed": seed} | settings
    if scale == "smoke":
        chosen |= SMOKE
    return SequenceRun(sequence_preset(task, PRESET[scale], **chosen))
