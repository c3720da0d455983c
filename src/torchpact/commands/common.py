"""What several commands share: where the data is, and which device to use."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from torchpact.data import Images, load_cifar10, load_sample

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
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"expected a device of auto, cpu or cuda; got {name!r}")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"expected a device that is there, got {name!r} and no GPU")
    return torch.device(name)


def load_data(root: Path | None, device: torch.device, limit: int | None = None) -> tuple[Images, Images]:
    """Return the training images, or the first ``limit`` of them, and the test images."""
    if root == Path("sample"):
        train, test = load_sample("train", device), load_sample("test", device)
    else:
        train, test = load_cifar10(root, "train", device), load_cifar10(root, "test", device)
    if limit is not None:
        if not 1 <= limit <= len(train):
            raise ValueError(f"expected 1 to {len(train)} images, got {limit}")
        train = Images(train.images[:limit], train.labels[:limit])
    return train, test
