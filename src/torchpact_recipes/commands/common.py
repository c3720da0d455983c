"""What several commands share: where data and networks are, and which device to use."""

import re
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
import typer

from torchpact import Mode
from torchpact.core.modes import MODES
from torchpact.models import ResNet
from torchpact.plugins import CommandError
from torchpact_recipes import zoo
from torchpact_recipes.data import DataError, Images, load_cifar10, load_sample
from torchpact_recipes.hub_files import FILES, files_in, mode_of, name_of
from torchpact_recipes.training import TrainConfig
from torchpact_recipes.training.checkpoint import CheckpointError, is_of_sequences, load_network
from torchpact_recipes.training.run_files import RunFiles

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


class Interrupted(CommandError):
    """A command that was stopped by a signal; the message is one line and says what is left."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.code = 128 + number


class Network(NamedTuple):
    """A network for images, and what it was trained with; folders of ``save_pretrained`` do not say."""

    model: ResNet
    config: TrainConfig | None

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes to evaluate in: those that go with its training, or the one that it was saved in."""
        if self.config is not None:
            return self.config.modes
        own = mode_of(self.model)
        return () if own is None else (name_of(own),)

    @property
    def recipe(self) -> str:
        """How it was trained, as far as is known."""
        return "recipe unknown" if self.config is None else f"{self.config.method}, tau {self.config.tau:g}"

    def mode(self, name: str) -> Mode | str:
        """The mode of that name, with the settings that the network was saved with, if in this mode."""
        own = mode_of(self.model)
        return own if self.config is None and own is not None and MODES.get(name) is type(own) else name


def network_file(name: str | Path) -> Path:
    """Return the checkpoint a user means, be it a run's or the zoo's, or the folder of a saved network."""
    path = Path(name)
    if path.is_file():  # a part of a saved network is nothing without the rest of its folder
        return path.parent if path.name in FILES and _is_saved(path.parent) else path
    files = RunFiles(path)
    last = next((file for file in (files.last, files.previous) if file.is_file()), None)
    if last is not None and _is_saved(path):
        got = f"{last.name} and {FILES[1]}: name one of them"
        raise CheckpointError(f"{path}: expected a run or a saved network, got both ({got})")
    if last is not None or _is_saved(path):
        return last or path
    known = {entry.name: entry.path for entry in zoo.entries()}
    if str(name) in known:  # whatever else a folder of that name holds
        return known[str(name)]
    if path.is_dir():
        saved = files_in(path)
        got = f"{saved[0]} alone" if saved else "a folder without any"
        raise CheckpointError(f"{path}: expected a checkpoint, or {' and '.join(FILES)}; got {got}")
    where = zoo.hint(str(name), known)
    raise CheckpointError(f"{path}: no such checkpoint or folder, nor network of the zoo ({where})")


def _is_saved(folder: Path) -> bool:
    return len(files_in(folder)) == len(FILES)


def find_network(name: str | Path) -> Network:
    """Return the network for images that a user names."""
    path = network_file(name)
    if is_of_sequences(path):
        raise CheckpointError(f"{path}: expected a network for images, got one for sequences")
    return Network(*load_network(path))


def load_test(root: Path | None, device: torch.device) -> Images:
    """Return the test images."""
    return _load(root, "test", device)


def load_data(
    root: Path | None, device: torch.device, limit: int | None = None, *, or_sample: bool = True
) -> tuple[Images, Images]:
    """Return the training images, or the first ``limit`` of them, and the test images.

    ``or_sample`` is whether who has no CIFAR-10 is told of the sample.
    """
    train = _load(root, "train", device, or_sample)
    test = _load(root, "test", device, or_sample)
    if limit is not None:
        if not 1 <= limit <= len(train):
            raise ValueError(f"expected 1 to {len(train)} images, got {limit}")
        train = Images(train.images[:limit], train.labels[:limit])
    return train, test


def _load(
    root: Path | None, split: Literal["train", "test"], device: torch.device, or_sample: bool = True
) -> Images:
    if root == Path("sample"):
        return load_sample(split, device)
    try:
        return load_cifar10(root, split, device)
    except DataError as error:
        if not or_sample:
            raise
        raise DataError(f"{error}; or take the bundled sample: --data sample") from error
