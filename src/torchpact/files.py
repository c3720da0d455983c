"""Files that are there in full or not at all, and where those live that can be had again."""

import os
import re
import uuid
from pathlib import Path


def user_cache() -> Path:
    """Return the folder of what can be fetched or made again: ~/.cache/torchpact, or in $XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchpact"


def write_whole(path: Path, data: bytes, keep: Path | None = None, mode: int = 0o666) -> None:
    """Write a file so that what was there stays until the new one is complete, or is kept as ``keep``.

    Args:
        path: The file; a symbolic link is written through, and stays.
        data: Its content.
        keep: Where to leave what was there before.
        mode: The permissions of the file, less the umask.

    Raises:
        OSError: It cannot be written; the error names the file.

    """
    # Not tempfile, whose files only their owner may read: data folders are shared.
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    temporary = target.with_name(f".torchpact-{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and target.exists():
            if target is path:
                path.replace(keep)
            else:  # which may be on another file system
                write_whole(keep, target.read_bytes(), mode=mode)
        temporary.replace(target)
    except OSError as error:
        # A full disk does not say by itself which file it was
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files that writers left in a folder when they were killed; none may be at work."""
    for path in folder.glob(".*.tmp"):
        if re.fullmatch(r"\.(torchpact-|.*\.)[0-9a-f]{32}\.tmp", path.name):
            path.unlink(missing_ok=True)
