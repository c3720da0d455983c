"""The cache of compiled code, which loads only what is this user's own and has the digest it was built with.

Code in a cache runs with the rights of the process that loads it. So a folder serves only if nobody but its
owner, this user, can change what is in it: that is asked of the folder and of all that it is in. A file
has to be this user's too, and its name ends in the SHA-256 of its content, so that content and digest come
by one rename: a truncated file, or one that was there before, is built anew. Between check and loading
nobody else can put another file in its place. Where the cache is another's or cannot be written, code is
built once into a private temporary folder, which the process removes when it ends.
"""

import atexit
import getpass
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from torchpact.checks import one_line
from torchpact.engines.base import Unsupported
from torchpact.files import user_cache, write_whole

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def compiled_file(name: str, suffix: str, build: Callable[[], bytes]) -> Path:
    """Return the path of compiled code, which is built if there is no sound copy of it.

    Args:
        name: What it is, with a digest of all that the result depends on.
        suffix: How its file name ends.
        build: Compiles it.

    Returns:
        A path at which nobody else can change the file.

    Raises:
        Unsupported: There is no folder that others cannot change.
        OSError: The code can be stored nowhere.

    """
    folders = [_cache_folder(), *_temporary[-1:]]
    for folder in filter(None, folders):
        for path in sorted(folder.glob(f"{name}-*{suffix}")):
            problem = _file_problem(path)
            if problem is None:
                return path
            _warn(f"compiled anew, since {path} {problem}")
            with suppress(OSError):
                path.unlink()  # a link would be written through
    code = build()
    file = f"{name}-{hashlib.sha256(code).hexdigest()}{suffix}"
    if folders[0] is not None:
        try:
            write_whole(folders[0] / file, code, mode=0o600)
            return folders[0] / file
        except OSError as error:
            _warn(f"compiled for this process only: {one_line(error)}")
    path = temporary_folder() / file
    write_whole(path, code, mode=0o600)
    return path


def folder_problem(folder: Path) -> str | None:
    """Return None if only this user can change what is in a folder, or one line that says who else can.

    Folders that it is in may be root's, and sticky like /tmp. A group of this user alone is nobody else.

    Args:
        folder: An existing folder; links in its path are followed.

    Raises:
        OSError: It cannot be looked at.

    """
    if sys.platform == "win32":  # has no such owners and modes
        return None
    real, user = Path(os.path.realpath(folder)), os.geteuid()
    for path in (real, *real.parents):
        status = path.lstat()
        # who owns the root of the file system can change any program
        owners = {user} if path == real else {user, 0, Path("/").stat().st_uid}
        if status.st_uid not in owners:
            return f"{path} belongs to user {status.st_uid}"
        mode = status.st_mode & OTHERS_WRITE
        if mode & stat.S_IWGRP and _is_own_group(status.st_gid):
            mode &= ~stat.S_IWGRP
        if mode and (path == real or not status.st_mode & stat.S_ISVTX):
            return f"others can write in {path}"
    return None


def temporary_folder() -> Path:
    """Return the folder of this process for code that no cache keeps; removed when the process ends.

    Raises:
        Unsupported: Others can change what is in the temporary folder.

    """
    if not _temporary:
        folder = Path(tempfile.mkdtemp(prefix="torchpact-"))
        problem = folder_problem(folder)
        if problem is not None:
            folder.rmdir()
            raise Unsupported(f"expected a temporary folder that only this user can change, but {problem}")
        _temporary.append(folder)
        atexit.register(_remove, folder, os.getpid())
    return _temporary[-1]


@cache
def protect_compiler_caches() -> None:
    """Have Triton and torch.compile use the temporary folder where others can change what is in their caches.

    They load what they find there without a check. Call it before they compile.
    """
    for variable, default in (
        ("TRITON_CACHE_DIR", _triton_cache),
        ("TORCHINDUCTOR_CACHE_DIR", _inductor_cache),
    ):
        try:
            _own_folder(Path(os.environ.get(variable) or default()))
        except (OSError, RuntimeError, KeyError) as error:  # the last two where there is no home, or no user
            _warn(f"{variable} is a temporary folder for this process: {one_line(error)}")
            os.environ[variable] = str(temporary_folder() / variable.lower())


def _triton_cache() -> Path:
    return Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def _inductor_cache() -> Path:
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}"


_temporary: list[Path] = []


def _cache_folder() -> Path | None:
    """The folder of compiled code in the user's cache, if it can be trusted."""
    try:
        return _own_folder(user_cache() / "compiled")
    except (OSError, RuntimeError) as error:  # the latter where there is no home
        _warn(f"compiled for this process only: {one_line(error)}")
        return None


def _own_folder(folder: Path) -> Path:
    """Make a folder if there is none; return its real path, or raise PermissionError if it is not safe."""
    for path in (*reversed(folder.absolute().parents), folder):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)  # as the XDG specification wants
    problem = folder_problem(folder)
    if problem is not None:
        raise PermissionError(problem)
    return Path(os.path.realpath(folder))  # others may change a link on the way to it


def _file_problem(path: Path) -> str | None:
    """Why a file is not what was built; None if it is."""
    try:
        with open(path, "rb", opener=_open_as_it_is) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return "is no file"
            if sys.platform != "win32" and status.st_uid != os.geteuid():
                return f"belongs to user {status.st_uid}"
            if sys.platform != "win32" and status.st_mode & OTHERS_WRITE:
                return "can be written by others"
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if path.stem.endswith(f"-{digest}") else "was altered since it was built"


def _open_as_it_is(path: str, flags: int) -> int:
    """Open what is there, without following a link or waiting for a pipe."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


@cache
def _is_own_group(number: int) -> bool:
    """Whether a group is the user's private one, as many systems give to each: of that name, alone in it."""
    if sys.platform == "win32":
        return False
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return user.pw_gid == number and group.gr_name == user.pw_name and {*group.gr_mem} <= {user.pw_name}


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a fork leaves it to its parent
        shutil.rmtree(folder, ignore_errors=True)


@cache
def _warn(message: str) -> None:
    """Say something once."""
    warnings.warn(f"torchpact: {message}", RuntimeWarning, stacklevel=2)
