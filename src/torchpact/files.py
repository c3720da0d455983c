"""Files that are there in full or not at all, and where those live that can be had again."""

import os
import uuid
from pathlib import Path


def user_cache() -> Path:
    """Return the folder of what can be fetched or made again: ~/.cache/torchpact, or in $XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchpact"


def write_whole(path: Path, data: bytes, keep: Path | None = None) -> None:
    """Write a file so that what was there stays until the new one is complete, or is kept as ``keep``."""
    # Not tempfile, whose files only their owner may read: data folders are shared.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            path.replace(keep)
        temporary.replace(path)
    except OSError as error:
        # A full disk does not say by itself which file it was
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
