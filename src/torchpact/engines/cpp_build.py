"""Shared libraries in C++, built by the machine's own compiler on first use and kept in the user's cache.

The sources have no dependencies but OpenMP, so that a build takes a few seconds. The user's cache is trusted
as far as :mod:`~torchpact.engines.build_cache` says. Where there is no compiler,
and with ``TORCHPACT_NATIVE=0`` in the environment, engines that need a library are not available.
"""

import ctypes
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch

from torchpact.checks import one_line
from torchpact.engines.base import Unsupported
from torchpact.engines.build_cache import compiled_file
from torchpact.engines.threads import watch

FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared")
MAX_THREADS = 55  # as in team.hpp
TEAM = Path(__file__).with_name("team.hpp")
"""How threads share work: a part of every source."""
PATIENCE = 180.0
"""Seconds that a compiler may take, which needs about five."""
SINGLE: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
"""What libraries read and write, whatever the defaults of torch are."""


def switched_off() -> bool:
    """Return whether the user allows no compiled kernels: ``TORCHPACT_NATIVE=0``."""
    return os.environ.get("TORCHPACT_NATIVE") == "0"


def load_library(source: Path) -> ctypes.CDLL:
    """Load the library of a source file, compiled for this machine if it has not been.

    Args:
        source: A file ``name.cpp``; headers ``name_*.hpp`` beside it are a part of it.

    Returns:
        The library.

    Raises:
        Unsupported: It cannot be compiled or loaded, or compiled kernels are switched off.

    """
    try:
        library = ctypes.CDLL(str(build_library(source)))
    except OSError as error:
        raise Unsupported(f"no library ({one_line(error)})") from error
    if hasattr(library, "torchpact_is_busy"):
        watch(library)
    return library


def build_library(source: Path) -> Path:
    """Compile a source file, unless the cache of compiled code has its library already.

    Args:
        source: As of :func:`load_library`.

    Returns:
        The path of the shared library.

    Raises:
        Unsupported: There is no compiler, it failed or took too long, or compiled kernels are switched off.
        OSError: The library can be stored nowhere.

    """
    if switched_off():
        raise Unsupported("no compiled kernels, as TORCHPACT_NATIVE=0 asks")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None:
        raise Unsupported("expected a C++ compiler (c++, g++, clang++ or $CXX), found none")
    headers = sorted(source.parent.glob(f"{source.stem}_*.hpp"))
    text = b"".join(path.read_bytes() for path in (source, *headers, TEAM))
    key = hashlib.sha256(text + " ".join(FLAGS).encode() + _target(compiler)).hexdigest()[:16]
    return compiled_file(f"{source.stem}-{key}", ".so", lambda: _compile(compiler, source))


@cache
def _target(compiler: str) -> bytes:
    """What a compiler and -march=native mean on this machine: a shared home may serve unlike machines."""
    with tempfile.TemporaryDirectory(prefix="torchpact-") as folder:
        return _run(compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull, folder=Path(folder))


def _compile(compiler: str, source: Path) -> bytes:
    with tempfile.TemporaryDirectory(prefix="torchpact-") as folder:
        built = Path(folder) / "library.so"
        _run(compiler, *FLAGS, f"-I{TEAM.parent}", str(source), "-o", str(built), folder=Path(folder))
        return built.read_bytes()


_hanging: set[str] = set()


def _give_up(compiler: str, group: int) -> None:
    _hanging.add(compiler)
    os.killpg(group, signal.SIGKILL)


def _run(compiler: str, *arguments: str, folder: Path) -> bytes:
    """Run a compiler, which leaves its temporary files in ``folder``; return what it prints."""
    name = Path(compiler).name
    if compiler in _hanging:  # it would again
        raise Unsupported(f"{name} took more than {PATIENCE:g} s")
    with (folder / "out").open("w+b") as out, (folder / "err").open("w+b") as err:
        # a session of its own: a compiler is several processes, which have to end together
        process = subprocess.Popen(
            (compiler, *arguments),
            stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            env=os.environ | {"TMPDIR": str(folder)}, start_new_session=True,
        )  # fmt: skip
        # not wait(timeout), which looks every 50 ms only
        timer = threading.Timer(PATIENCE, _give_up, (compiler, process.pid))
        timer.start()
        try:
            code = process.wait()
        except BaseException:  # as Ctrl-C, which a session of its own does not get
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            timer.cancel()
        if compiler in _hanging:
            raise Unsupported(f"{name} took more than {PATIENCE:g} s")
        for file in (out, err):
            file.seek(0)
        if code:
            problem = err.read().decode(errors="replace").strip().splitlines()[-1:]
            raise Unsupported(f"{name} failed ({' '.join(problem)})")
        return out.read()
