"""Compiles the kernel of clusters as plain C++, from the very source that a GPU gets.

What a GPU has and C++ has not is in recurrent_emulator.hpp.
"""

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from torchpact.engines.recurrent import cluster as recurrent_cluster

FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unknown-pragmas")
BOUNDS = ("-fsanitize=bounds", "-fsanitize-undefined-trap-on-error")
"""With these an index outside of an array ends the process."""


@cache
def library(shape, flags=()):
    """The kernel for a shape."""
    here, macros = Path(__file__).parent, [f"-D{name}={value}" for name, value in shape.macros.items()]
    folders = [f"-I{folder}" for folder in (here, recurrent_cluster.SOURCE.parent)]
    with tempfile.TemporaryDirectory() as folder:
        built = f"{folder}/recurrent.so"
        source = str(here / "recurrent_emulated.cpp")
        subprocess.run(["g++", *FLAGS, *flags, *macros, *folders, source, "-o", built], check=True)
        made = ctypes.CDLL(built)
    made.emulate.restype = ctypes.c_char_p
    return made
