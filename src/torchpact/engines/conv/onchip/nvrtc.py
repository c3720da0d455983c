"""Compiling the kernel of the engine ``onchip`` with NVRTC; needs no GPU.

By NVIDIA's ``cuda.core`` where that is installed (``pip install ".[cuda]"``), else by the library that
comes with PyTorch for CUDA. The user's cache keeps what was compiled.
"""

import ctypes
import hashlib
import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_char_p, c_size_t, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import Any

from torchpact.engines.base import Unsupported
from torchpact.engines.build_cache import compiled_file
from torchpact.engines.conv.onchip.plan import Plan

SOURCE = Path(__file__).with_name("kernel.cu")
STANDARD = "c++17"


def compile_block(plan: Plan, arch: str, **macros: int) -> bytes:
    """Return the machine code of a block for an architecture such as sm_90, with more ``macros`` if given."""
    parts = [path.read_text(encoding="utf-8") for path in sorted(SOURCE.parent.glob("*.cuh"))]
    return compiled("onchip", SOURCE.read_text(encoding="utf-8"), plan.macros | macros, arch, parts)


def compiled(name: str, source: str, macros: dict[str, int], arch: str, parts: Sequence[str] = ()) -> bytes:
    """Return the machine code of a source, which includes ``parts``; from the cache if it is there."""
    route, version = compiler()
    key = repr((source, parts, sorted(macros.items()), arch, STANDARD, version)).encode()
    known = f"{name}-{hashlib.sha256(key).hexdigest()[:16]}"
    return compiled_file(known, ".cubin", lambda: route(source, macros, arch)).read_bytes()


Route = Callable[[str, dict[str, int], str], bytes]

_finding = threading.Lock()


def compiler() -> tuple[Route, str]:
    """Return a way to compile, and its name and version."""
    with _finding:  # threads that import cuda.core at once see a part of it
        return _compiler()


@cache
def _compiler() -> tuple[Route, str]:
    if importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.core") is not None:
        try:
            from cuda.bindings import nvrtc
            from cuda.core import Program, ProgramOptions

            _, major, minor = nvrtc.nvrtcVersion()
            return partial(_by_cuda_core, Program, ProgramOptions), f"cuda.core, NVRTC {major}.{minor}"
        except (ImportError, RuntimeError):  # without NVRTC itself
            pass
    library = _library()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(byref(major), byref(minor))
    return _by_library, f"NVRTC {major.value}.{minor.value}"


def _by_cuda_core(program: Any, options_of: Any, source: str, macros: dict[str, int], arch: str) -> bytes:
    defined = [f"{name}={value}" for name, value in macros.items()]
    options = options_of(std=STANDARD, arch=arch, define_macro=defined, include_path=str(SOURCE.parent))
    try:
        return bytes(program(source, "c++", options).compile("cubin").code)
    except Exception as error:  # of a class of its own, which moved between versions
        raise Unsupported(f"onchip: NVRTC failed for {arch} ({_first_error(str(error))})") from error


def _by_library(source: str, macros: dict[str, int], arch: str) -> bytes:
    library, program = _library(), c_void_p()
    options = [f"--gpu-architecture={arch}", f"--std={STANDARD}", f"--include-path={SOURCE.parent}"]
    options += [f"-D{name}={value}" for name, value in macros.items()]
    library.nvrtcCreateProgram(byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        array = (c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), array):
            log = _read(program, library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog)
            raise Unsupported(
                f"onchip: NVRTC failed for {arch} ({_first_error(log.decode(errors='replace'))})"
            )
        return _read(program, library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN)
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _read(program: c_void_p, size_of: Callable[..., int], read: Callable[..., int]) -> bytes:
    size = c_size_t()
    size_of(program, byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    read(program, buffer)
    return buffer.raw


def _first_error(log: str) -> str:
    lines = [line.strip("\0 ") for line in log.splitlines() if line.strip("\0 ")]
    return next((line for line in lines if "error" in line), " ".join(lines[:1]))[:300]


@cache
def _library() -> ctypes.CDLL:
    problems = []
    for path in _candidates():
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            problems.append(str(error))
    raise Unsupported(
        f'onchip: expected NVRTC, as pip install ".[cuda]" brings it, found none ({problems[-1]})'
    )


def _candidates() -> Iterator[str]:
    """Where NVRTC may be: in NVIDIA's packages, newest first, then wherever the system looks."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    found = [path for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*")]
    for path in sorted(found, key=lambda path: path.name, reverse=True):
        # the library does not look for its other half beside itself
        for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        yield str(path)
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
