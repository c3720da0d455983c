"""Shared libraries in C++, built by the machine's own compiler on first use and kept in the user's cache.

The sources have no dependencies but OpenMP, so that a build takes a few seconds. Where there is no compiler,
and with ``TORCHPACT_NATIVE=0`` in the environment, engines that need a library are not available.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from torchpact.engines.base import Unsupported
from torchpact.files import user_cache, write_whole

FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared")
MAX_THREADS = 64  # as in the sources
SINGLE: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
"""What libraries read and write, whatever the defaults of torch are."""


def switched_off() -> bool:
    """Return whether the user allows no compiled kernels: ``TORCHPACT_NATIVE=0``."""
    return os.environ.get("TORCHPACT_NATIVE") == "0"


def build_library(source: Path) -> Path:
    """Compile a source file, unless the user's cache has its library already.

    Args:
        source: A file ``name.cpp``; headers ``name_*.hpp`` beside it are a part of it.

    Returns:
        The path of the shared library.

    Raises:
        Unsupported: There is no compiler, it failed, or compiled kernels are switched off.
        OSError: The cache cannot be written.
        RuntimeError: The user has no home for a cache.

    """
    if switched_off():
        raise Unsupported("no compiled kernels, as TORCHPACT_NATIVE=0 asks")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None:
        raise Unsupported("expected a C++ compiler (c++, g++, clang++ or $CXX), found none")
    # what the compiler and -march=native mean on this machine, so that a shared home serves unlike machines
    target = _run(compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull)
    headers = sorted(source.parent.glob(f"{source.stem}_*.hpp"))
    text = b"".join(path.read_bytes() for path in (source, *headers))
    key = hashlib.sha256(text + " ".join(FLAGS).encode() + target).hexdigest()[:16]
    path = user_cache() / f"{source.stem}-{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / path.name
            _run(compiler, *FLAGS, str(source), "-o", str(built))
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, built.read_bytes())
    return path


def _run(*command: str) -> bytes:
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        problem = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise Unsupported(f"{Path(command[0]).name} failed ({' '.join(problem)})")
    return done.stdout
