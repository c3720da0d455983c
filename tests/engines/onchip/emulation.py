"""The engine ``onchip``, whose kernel runs on the CPU as plain C++; see emulator.hpp."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import torchpact as tp
from torchpact.engines.conv import onchip
from torchpact.engines.conv.onchip import OnChipNetwork
from torchpact.engines.conv.onchip.engine import network_problem
from torchpact.engines.conv.onchip.plan import Device, candidates
from torchpact.specs import network_spec

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

H200 = Device(227 * 1024, 132)

HERE, KERNEL = Path(__file__).parent, Path(onchip.__file__).parent
FLAGS = [
    "-std=c++17",
    "-O1",
    "-U_FORTIFY_SOURCE",  # which would not let one stack jump to another
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-Wno-unused-parameter",
]


def plans(channels, height, width, classes, half, adaptive=True, batch=1024, device=H200):
    """Return the likeliest plan for every block of a network for images of this size."""
    return [each[0] for each in candidates(channels, height, width, classes, half, adaptive, batch, device)]


@cache
def sources():
    """What kernels are compiled of, and where they are kept for other processes and the next time."""
    files = sorted([*HERE.glob("*.?pp"), *KERNEL.glob("*.cu*")])
    kept = Path(tempfile.gettempdir()) / f"torchpact-emulator-{os.getuid()}"
    kept.mkdir(mode=0o700, exist_ok=True)
    assert kept.stat().st_uid == os.getuid(), f"{kept} is somebody else's"
    return b"".join(file.read_bytes() for file in files), kept


@cache
def compiling(plan, watched):
    """Start to compile the kernel for a plan, unless it is there; several go on at once."""
    macros = [f"-D{name}={value}" for name, value in plan.macros.items()] + ["-DWATCHED"] * watched
    command = ["g++", *FLAGS, *macros, f"-I{HERE}", f"-I{KERNEL}", str(HERE / "emulated.cpp")]
    texts, kept = sources()
    built = kept / f"{hashlib.sha256(repr(command).encode() + texts).hexdigest()[:24]}.so"
    if built.exists():
        return built, built, None
    making = built.with_suffix(f".{os.getpid()}")
    return built, making, subprocess.Popen([*command, "-o", str(making)])


@cache
def library(plan, watched):
    """Return the compiled kernel for a plan."""
    built, making, compiler = compiling(plan, watched)
    if compiler is not None:
        assert compiler.wait() == 0
        making.replace(built)
    made = ctypes.CDLL(str(built))
    made.emulate.restype = ctypes.c_char_p
    return made


def counted(plan):
    """Return what a kernel did since the last time: reads of eight rows, the cycles they took, products."""
    counts = [ctypes.c_longlong() for _ in range(3)]
    library(plan, False).count(*(ctypes.byref(count) for count in counts))
    return [count.value for count in counts]


def emulated(plan, reverse=False, watched=False):
    """Return a kernel as the engine calls it."""
    compiling(plan, watched)

    def run(args, ctas):
        fault = library(plan, watched).emulate(ctypes.byref(args), ctas, int(reverse))
        if fault:
            raise AssertionError(fault.decode())

    return run


class AsForMany(OnChipNetwork):
    """With the plans for a large batch, where a CTA has several images."""

    def __init__(self, *args):
        super().__init__(*args)
        kernels: Any = self.kernels
        prepare = kernels.prepare
        kernels.prepare = lambda height, width, _: prepare(height, width, 1024)


def spec_of(model, mode=None):
    spec = network_spec(model)
    assert spec is not None
    blocks = [replace(block, mode=mode or block.mode) for block in spec.blocks]
    return replace(spec, blocks=tuple(blocks))


def engine(model, mode=None, made=AsForMany, device=H200, **how):
    return built(spec_of(model, mode), made, device, **how)


def built(spec, made=AsForMany, device=H200, **how):
    """Return what the engine makes of a network, with its kernels as C++."""
    assert network_problem(spec) is None
    return made(spec, lambda plan: emulated(plan, **how), device)


def take(monkeypatch, found, cuts):
    """Let the engine take these plans, each cut so."""
    made = [[replace(plan, **cut)] for plan, cut in zip(found, cuts, strict=True)]
    monkeypatch.setattr("torchpact.engines.conv.onchip.network.candidates", lambda *_: made)


def shared_by(*clusters):
    """Cuts by which so many CTAs share an image, block by block."""
    cut = {"n_tiles": 2, "m_tiles": 1, "warps": 8, "hold": True, "bordered": True}
    return [cut | {"cluster": cluster} for cluster in clusters]


def tame(model):
    """Keep the residual stream in the range where half precision has digits to compare."""
    for name, parameter in model.named_parameters():
        if "conv2" in name:
            parameter.data.mul_(0.25)
    return model


def reference(model, images, mode=None):
    """The same network and images in single precision."""
    exact = tp.models.build(model.config, mode or "thresholded").eval()
    exact.load_state_dict(model.float().state_dict())
    with torch.no_grad():
        return exact(images.float())
