"""Fashion-MNIST, from the Debian package dataset-fashion-mnist or a folder with the four official files.

The digests are those of the unpacked files: Debian packs the same bytes anew.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from torchpact_recipes.data.augment import Images
from torchpact_recipes.data.files import DataError, check_size, data_folder, os_errors_as_data_errors

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
CLASSES = (
    "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip


@dataclass(frozen=True)
class IdxFile:
    """A file of unsigned bytes in the IDX format: its name, shape, and SHA-256 when unpacked."""

    name: str
    split: Literal["train", "test"]
    shape: tuple[int, ...]
    sha256: str

    @property
    def header(self) -> bytes:
        """Its first bytes: two of 0, the type, the number of dimensions, and these."""
        return struct.pack(f">HBB{len(self.shape)}I", 0, 8, len(self.shape), *self.shape)

    @property
    def size(self) -> int:
        """Its length in bytes, unpacked."""
        return len(self.header) + torch.Size(self.shape).numel()


FILES = (
    IdxFile(
        "train-images-idx3-ubyte", "train", (60_000, 28, 28),
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    IdxFile(
        "train-labels-idx1-ubyte", "train", (60_000,),
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    IdxFile(
        "t10k-images-idx3-ubyte", "test", (10_000, 28, 28),
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    IdxFile(
        "t10k-labels-idx1-ubyte", "test", (10_000,),
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
)  # fmt: skip


def load_fashion_mnist(
    root: str | os.PathLike[str] | None = None,
    split: Literal["train", "test"] = "train",
    *,
    files: Sequence[IdxFile] = FILES,
) -> Images:
    """Return one split of Fashion-MNIST: images (N, 1, 28, 28) as bytes, and labels.

    Every byte is checked. Nothing is fetched: Debian's package brings the files, and elsewhere the four
    official ones, packed or not, go into ``root``.

    Args:
        root: The folder of the files; by default ``fashion-mnist`` below $TORCHPACT_DATA or in the user's
            cache or, where that is not there, that of the Debian package.
        split: "train" (60,000 images) or "test" (10,000).
        files: What is expected.

    Raises:
        DataError: A file is missing, damaged or another one.
        ValueError: There is no such split.

    Example:
        >>> load_fashion_mnist("no/such/folder")
        Traceback (most recent call last):
        torchpact_recipes.data.files.DataError: no/such/folder/train-images-idx3-ubyte.gz: no such file;
        install the Debian package dataset-fashion-mnist, or put the four official files into a folder

    """
    if split not in ("train", "test"):
        raise ValueError(f"expected split to be 'train' or 'test', got {split!r}")
    folder = _usual_folder() if root is None else Path(root).expanduser()
    images, labels = (_read(folder, file) for file in files if file.split == split)
    return Images(images.unsqueeze(1), labels.to(torch.int64))


def _usual_folder() -> Path:
    own = data_folder("fashion-mnist")
    return own if own.is_dir() else DEBIAN


def _read(folder: Path, file: IdxFile) -> Tensor:
    """Return what a file holds, unpacked and checked."""
    packed, plain = folder / f"{file.name}.gz", folder / file.name
    path = plain if plain.is_file() else packed
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; install the Debian package dataset-fashion-mnist, "
            "or put the four official files into a folder"
        )
    with os_errors_as_data_errors():
        if path is plain:
            check_size(str(path), path.stat().st_size, file.size)
        data = path.read_bytes() if path is plain else _unpacked(path, file.size)
    check_size(str(path), len(data), file.size)
    digest = hashlib.sha256(data).hexdigest()
    if digest != file.sha256:
        raise DataError(f"{path}: expected sha256 {file.sha256} of what is in it, got {digest}")
    if not data.startswith(file.header):
        raise DataError(f"{path}: expected an IDX file of bytes of shape {file.shape}, got another")
    values = torch.frombuffer(bytearray(data[len(file.header) :]), dtype=torch.uint8)
    return values.view(file.shape)


def _unpacked(path: Path, size: int) -> bytes:
    """Return what a gzip file holds, or the first bytes of what is larger than expected."""
    with path.open("rb") as stream:
        packed = stream.read(size + 1024)  # what is packed is hardly larger than what is not
    try:
        # a file that was made to be large when unpacked is not unpacked any further
        return zlib.decompressobj(wbits=31).decompress(packed, size + 1)
    except zlib.error as error:
        raise DataError(f"{path}: expected a gzip file, got {error}") from error
