"""Getting files and keeping them: checked by size and md5, never half written, never unpickled."""

import hashlib
import os
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Protocol

from torchpact.files import user_cache

# A server that says nothing for this long is taken to be away
TIMEOUT_SECONDS = 20.0
CHUNK_BYTES = 1 << 18


class DataError(ValueError):
    """Data that is missing, damaged or not what was expected; the message is one line."""


class Progress(Protocol):
    """Called with the progress of a step; ``total`` is None where it is unknown."""

    def __call__(self, description: str, done: int, total: int | None, /) -> None:
        """Take note."""


def silent(description: str, done: int, total: int | None, /) -> None:
    """Ignore progress."""


def data_folder(name: str) -> Path:
    """Return the folder of the data set ``name``, below $TORCHPACT_DATA or the user's cache.

    >>> data_folder("cifar10").name
    'cifar10'
    """
    base = os.environ.get("TORCHPACT_DATA")
    return (Path(base).expanduser() if base else user_cache()) / name


def check_size(name: str, got: int, expected: int) -> None:
    """Refuse a file of the wrong length."""
    if got != expected:
        raise DataError(f"{name}: expected {expected} bytes, got {got}")


def check_content(name: str, data: bytes, size: int, md5: str) -> None:
    """Refuse anything but the very bytes expected.

    >>> check_content("hello.txt", b"hello", 5, "5d41402abc4b2a76b9719d911017c592")
    """
    check_size(name, len(data), size)
    got = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if got != md5:
        raise DataError(f"{name}: expected md5 {md5}, got {got}")


def read_checked(path: Path, size: int, md5: str | None) -> bytes:
    """Return the bytes of a file of the expected size and, unless None, md5."""
    # Before reading: a file of the wrong size may be any size
    check_size(str(path), path.stat().st_size, size)
    data = path.read_bytes()
    if md5 is None:
        check_size(str(path), len(data), size)
    else:
        check_content(str(path), data, size, md5)
    return data


def is_stored(path: Path, size: int, md5: str) -> bool:
    """Whether a file is there, whole and unaltered; it is not read into memory at once."""
    if not path.is_file() or path.stat().st_size != size:
        return False
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False))
    return digest.hexdigest() == md5


@contextmanager
def os_errors_as_data_errors() -> Iterator[None]:
    """Turn what the file system refuses into the one line that a user reads."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise DataError(what) from error


@dataclass(frozen=True)
class Entry:
    """A file in a folder or archive: its size, known before it is read, and how to read it."""

    size: int
    read: Callable[[], bytes]


@contextmanager
def open_source(path: Path, names: Collection[str]) -> Iterator[dict[str, Entry]]:
    """Find the files called ``names`` in a folder, one level of folders below it, or a tar archive.

    Nothing is extracted: members are read into memory by name, so an archive cannot write anywhere.
    """
    if path.is_dir():
        yield _folder(path, names)
    elif path.is_file():
        with _archive_errors(path):
            archive = tarfile.open(path)  # noqa: SIM115 (closed below; errors told apart)
        with archive:
            with _archive_errors(path):
                entries = _members(archive, path, names)
            yield entries
    else:
        raise DataError(f"{path}: no such file or folder")


def _folder(path: Path, names: Collection[str]) -> dict[str, Entry]:
    below = sorted(folder for folder in path.iterdir() if folder.is_dir())
    files = [folder / name for folder in [*below, path] for name in names]
    # A file in the folder itself comes last and so wins over one below it
    return {f.name: Entry(f.stat().st_size, f.read_bytes) for f in files if f.is_file()}


def _members(archive: tarfile.TarFile, path: Path, names: Collection[str]) -> dict[str, Entry]:
    def read(member: tarfile.TarInfo) -> bytes:
        with _archive_errors(path):
            file = archive.extractfile(member)
            assert file is not None  # only links and devices have no content
            return file.read()

    entries = {}
    for member in archive:
        where = PurePosixPath(member.name)
        outside = where.is_absolute() or ".." in where.parts
        if member.isreg() and where.name in names and not outside:
            entries[where.name] = Entry(member.size, partial(read, member))
    return entries


@contextmanager
def _archive_errors(path: Path) -> Iterator[None]:
    try:
        yield
    # A damaged archive fails as an OSError, EOFError, zlib.error, TarError, ValueError, ...
    except Exception as error:
        raise DataError(f"{path}: expected a tar archive, got a damaged one or none") from error


def download(url: str, path: Path, progress: Progress = silent) -> None:
    """Stream ``url`` into ``path``, going on where an earlier attempt stopped if the server can.

    A download that breaks off keeps what it got, for the next attempt, and raises DataError.
    """
    try:
        _download(url, path, progress)
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(f"{url}: {reason}") from error


def _download(url: str, path: Path, progress: Progress) -> None:
    have = path.stat().st_size if path.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "torchpact"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        with error:
            if error.code != 416 or not have:
                raise
            # Nothing after what we have: it is the whole file already, or never was part of it
            if error.headers.get("Content-Range") == f"bytes */{have}":
                return
        path.unlink()
        return _download(url, path, progress)

    with response:
        start = response.headers.get("Content-Range", "").removeprefix("bytes ").split("-")[0]
        resumed = response.status == 206
        if resumed and start != str(have):
            raise DataError(f"{url}: asked for byte {have} and on, got {start or 'no'} and on")
        done = have if resumed else 0
        total = None if response.length is None else done + response.length
        description = f"downloading {PurePosixPath(url).name}"
        with path.open("ab" if resumed else "wb") as file:
            progress(description, done, total)
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
                done += len(chunk)
                progress(description, done, total)
    # A connection that is closed early is no error to http.client
    if total is not None:
        check_size(url, done, total)
