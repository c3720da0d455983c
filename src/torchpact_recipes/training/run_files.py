"""The files a run leaves, what of it TensorBoard shows, and the error of one that cannot go on."""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import torchpact
from torchpact.plugins import CommandError

Event = dict[str, Any]
"""A line of the history: kind "train" or "validate", the iteration, and what was measured."""


class TrainingError(CommandError, RuntimeError):
    """Training that cannot go on; the message is one line and says what is left."""


@dataclass
class RunFiles:
    """The files of a run, all in one folder."""

    folder: Path

    def check(self) -> None:
        """Refuse a folder that is not that of a run."""
        if not self.run.is_file():
            got = "one without run.json" if self.folder.is_dir() else "no folder"
            raise ValueError(f"{self.folder}: expected the folder of a run, got {got}")

    @property
    def run(self) -> Path:
        """Configuration, versions and results."""
        return self.folder / "run.json"

    @property
    def history(self) -> Path:
        """One event a line."""
        return self.folder / "history.jsonl"

    @property
    def last(self) -> Path:
        """The newest checkpoint."""
        return self.folder / "last.safetensors"

    @property
    def previous(self) -> Path:
        """The one before it."""
        return self.folder / "previous.safetensors"

    @property
    def refused(self) -> Path:
        """One that was the newest and could not be used when the run went on."""
        return self.folder / "refused.safetensors"

    @property
    def best(self) -> Path:
        """The one that did best in validation."""
        return self.folder / "best.safetensors"

    @property
    def tensorboard(self) -> Path:
        """What TensorBoard shows, where that was asked for."""
        return self.folder / "tensorboard"


def versions(device: torch.device) -> dict[str, str]:
    """What a run is made with."""
    processor = platform.processor() or platform.machine()
    return {
        "torchpact": torchpact.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
    }


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event that TensorBoard draws, by name.

    >>> event = {"kind": "validate", "modes": {"act": {"accuracy": 0.5, "nll": 1.0, "flops": 2e6}}}
    >>> scalars(event)
    {'validate/act/accuracy': 0.5, 'validate/act/nll': 1.0, 'validate/act/mflops': 2.0}
    """
    if event["kind"] == "train":
        names = [
            name for name in event if name in ("loss", "nll", "accuracy") or name.endswith("_per_second")
        ]
        blocks = enumerate(event["expected_steps"], 1)
        return {f"train/{name}": event[name] for name in names} | {
            f"train/expected_steps/block{k}": steps for k, steps in blocks
        }
    found = {}
    for mode, measured in event["modes"].items():
        for name in ("accuracy", "nll", "bits_per_character", "steps"):
            if isinstance(measured.get(name), float):
                found[f"validate/{mode}/{name}"] = measured[name]
        if "flops" in measured:
            found[f"validate/{mode}/mflops"] = measured["flops"] / 1e6
    return found


def summary_writer() -> Any:
    """TensorBoard's SummaryWriter, which only those need who ask for it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "expected the package tensorboard to be installed (from a clone: "
            'pip install "./src/torchpact_recipes[train]")'
        ) from None
    return SummaryWriter
