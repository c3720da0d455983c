"""What several commands share: where the data is, and which device to use."""

import re
from pathlib import Path
from typing import Annotated

import torch
import typer

from torchpact.data import Images, load_cifar10, load_sample
from torchpact.models import ResNet, zoo
from torchpact.training import TrainConfig
from torchpact.training.checkpoint import CheckpointError, is_of_sequences, load_model
from torchpact.training.run_files import RunFiles

DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="Folder of the data set, if not the usual one; 'sample' is for a small one that is bundled.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


def pick_device(name: str) -> torch.device:
    """Return the device asked for; "auto" is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name):
        raise ValueError(f"expected a device of auto, cpu or cuda, or one as cuda:0; got {name!r}")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"expected a device that is there, got {name!r} and {count or 'no'} GPU")
    return device


class Interrupted(Exception):
    """A command that was stopped by a signal; the message is one line and says what is left."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.code = 128 + number


def network_file(name: str | Path) -> Path:
    """Return the checkpoint that a user means: a file, the last of a run's folder, or one of the zoo."""
    path = Path(name)
    files = RunFiles(path)
    for file in (path, files.last, files.previous):
        if file.is_file():
            return file
    # a folder of that name may be what save_pretrained has made
    known = {entry.name: entry.path for entry in zoo.entries()}
    if str(name) not in known and path.is_dir():
        raise CheckpointError(f"{path}: expected a checkpoint, got a folder without one")
    if str(name) not in known:
        raise CheckpointError(f"{path}: no such checkpoint, nor network of the zoo ({', '.join(known)})")
    return known[str(name)]


def find_network(name: str) -> tuple[ResNet, TrainConfig]:
    """Return the network for images that a user names, and what it was trained with."""
    path = network_file(name)
    if is_of_sequences(path):
        raise CheckpointError(f"{path}: expected a network for images, got one for sequences")
    return load_model(path)


def load_test(root: Path | None, device: torch.device) -> Images:
    """Return the test images."""
    if root == Path("sample"):
        return load_sample("test", device)
    return load_cifar10(root, "test", device)


def load_data(root: Path | None, device: torch.device, limit: int | None = None) -> tuple[Images, Images]:
    """Return the training images, or the first ``limit`` of them, and the test images."""
    train = load_sample("train", device) if root == Path("sample") else load_cifar10(root, "train", device)
    test = load_test(root, device)
    if limit is not None:
        if not 1 <= limit <= len(train):
            raise ValueError(f"expected 1 to {len(train)} images, got {limit}")
        train = Images(train.images[:limit], train.labels[:limit])
    return train, test
