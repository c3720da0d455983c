"""Checkpoints: one safetensors file each, with what it is in its header and a digest over all of it.

The digest makes a flipped bit anywhere an error instead of a slightly wrong network. Files are written
under a temporary name and renamed, and the one before stays, so that there is a good one at any moment.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from torchpact.checks import MALFORMED, one_line
from torchpact.files import write_whole
from torchpact.models import ResNet, SequenceNet, build
from torchpact_recipes.hub_files import misfits, read_network
from torchpact_recipes.training.config import TrainConfig
from torchpact_recipes.training.sequence_config import SequenceTrainConfig

FORMAT = "torchpact checkpoint 1"

UNREADABLE: tuple[type[Exception], ...] = (SafetensorError, OSError, RuntimeError, MemoryError, *MALFORMED)
"""What reading a file raises of which nothing is known."""

M = TypeVar("M", bound=nn.Module)
C = TypeVar("C")


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or not one of ours; the message is one line."""


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors, and plain values that say what they are."""

    tensors: dict[str, Tensor]
    info: dict[str, Any]


def save_checkpoint(
    path: Path, tensors: dict[str, Tensor], info: dict[str, Any], *, keep: Path | None = None
) -> None:
    """Write a checkpoint; the one it replaces is kept as ``keep``, if given.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "last.safetensors"
    ...     save_checkpoint(path, {"weight": torch.ones(2)}, {"iteration": 3})
    ...     load_checkpoint(path).info
    {'iteration': 3}
    """
    stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    text = json.dumps(info)
    metadata = {"format": FORMAT, "info": text, "sha256": _digest(stored, text)}
    write_whole(path, save(stored, metadata), keep)


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint, on the CPU; anything but an unaltered one is refused."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                given = metadata.get("format", "a file without one")
                raise CheckpointError(f"{path}: expected the format {FORMAT!r}, got {given!r:.80}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        text = metadata.get("info", "")
        if _digest(tensors, text) != metadata.get("sha256"):
            raise CheckpointError(f"{path}: altered since it was written (its digest does not match)")
        info = json.loads(text)
        if not isinstance(info, dict):
            raise CheckpointError(f"{path}: expected values by name in its header, got {text!r:.40}")
    except CheckpointError:
        raise
    except UNREADABLE as error:
        raise CheckpointError(f"{path}: not a readable checkpoint ({one_line(error)})") from error
    return Checkpoint(tensors, info)


def load_latest(
    folder: Path, check: Callable[[Path, Checkpoint], None] = lambda path, checkpoint: None
) -> tuple[Checkpoint, list[str]]:
    """Read the newest good checkpoint of a run, and say what was wrong with any newer one.

    ``check`` refuses, by a ValueError, those that are sound but not of this run.
    """
    problems: list[str] = []
    for name in ("last", "previous"):
        path = folder / f"{name}.safetensors"
        try:
            checkpoint = load_checkpoint(path)
            check(path, checkpoint)
            return checkpoint, problems
        except ValueError as error:
            problems.append(str(error))
    raise CheckpointError("; ".join(problems))


def load_model(path: str | os.PathLike[str]) -> tuple[ResNet, TrainConfig]:
    """Return the network in a checkpoint, on the CPU and in evaluation, and what it was trained with."""
    return network_in(Path(path), load_checkpoint(path))


def load_network(path: Path) -> tuple[ResNet, TrainConfig | None]:
    """The same, or that of a folder of ``save_pretrained``, which does not say what it was trained with."""
    return (read_network(path), None) if path.is_dir() else load_model(path)


def network_in(path: Path, checkpoint: Checkpoint) -> tuple[ResNet, TrainConfig]:
    """Return the network in a checkpoint that was read from ``path``."""
    return _made(
        path, checkpoint, TrainConfig.from_dict,
        lambda config: build(config.network, config.training_mode()), lambda config: config.network.units,
    )  # fmt: skip


def load_sequence_model(path: str | os.PathLike[str]) -> tuple[SequenceNet, SequenceTrainConfig]:
    """Return the network for sequences in a checkpoint, in the same way."""
    return _made(
        Path(path), load_checkpoint(path), SequenceTrainConfig.from_dict,
        lambda config: SequenceNet(config.network, config.training_mode()),
        lambda config: config.network.layers,
    )  # fmt: skip


def is_of_sequences(path: Path) -> bool:
    """Whether the network in a checkpoint is one for sequences; those of ``save_pretrained`` never are."""
    if path.is_dir():
        return False
    config = load_checkpoint(path).info.get("config")
    return isinstance(config, dict) and "task" in config


def _made(
    path: Path,
    checkpoint: Checkpoint,
    read: Callable[[dict[str, Any]], C],
    make: Callable[[C], M],
    depth: Callable[[C], int],
) -> tuple[M, C]:
    prefix = "model."
    weights = {k.removeprefix(prefix): v for k, v in checkpoint.tensors.items() if k.startswith(prefix)}
    try:
        config = read(checkpoint.info["config"])
        if depth(config) > len(weights):
            raise ValueError(f"expected weights of {depth(config)} layers, got {len(weights)} tensors")
        with torch.device("meta"):  # weights that do not fit are told before any memory is taken
            told = misfits(make(config), weights)
        if told:
            raise ValueError(f"expected the weights that its configuration describes, got {told}")
        model = make(config)
        model.load_state_dict(weights)
    except UNREADABLE as error:
        raise CheckpointError(f"{path}: holds no network of ours ({one_line(error)})") from error
    return model.eval(), config


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    sha = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name]
        sha.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        sha.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
