"""Where results go is seen to before anything is computed, by the very names that will be written."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made or written in; nothing is left of the attempt.

    Args:
        folder: Where files are to be; it need not exist.

    Raises:
        ValueError: It cannot be used; the message says why.

    """
    with _made(folder):
        pass


def check_file(path: Path) -> None:
    """Refuse a file that cannot be written; what is there stays, and nothing is left of the attempt.

    Args:
        path: The file to be written; neither it nor its folder need exist.

    Raises:
        ValueError: It cannot be written; the message says why.

    """
    try:
        real = Path(os.path.realpath(path)) if path.is_symlink() else path  # which is written through
        if real.is_dir():
            raise ValueError(f"{path}: expected the name of a file, got a folder")
        with _made(real.parent):
            if not os.path.lexists(real):
                real.touch(exist_ok=False)
                real.unlink()
    except OSError as error:
        raise ValueError(f"{path}: expected a file that can be written ({error.strerror})") from error


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder, see that files can be written in it, and remove what was made."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise ValueError(f"{folder}: expected a folder for the results, got a file ({there})")
    missing = [path for path in (folder.absolute(), *folder.absolute().parents) if not os.path.lexists(path)]
    made: list[Path] = []
    try:
        try:
            for path in reversed(missing):
                path.mkdir()
                made.append(path)
            # os.access is not enough: it allows writing in /proc, which fails
            with tempfile.TemporaryDirectory(prefix=".torchpact-", dir=folder) as name:
                (Path(name) / "file").touch()
        except OSError as error:
            raise ValueError(
                f"{folder}: expected a folder that can be written in, got {there} ({error.strerror})"
            ) from error
        yield
    finally:
        for path in reversed(made):
            with suppress(OSError):
                path.rmdir()
