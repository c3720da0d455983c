"""Wheels as users get them, and a Python that has torch, safetensors and one of these, and nothing else."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def build(folder: Path, target: Path, kind: str = "wheel") -> Path:
    """Build a distribution of the project in a folder."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(target)],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    (made,) = target.iterdir()
    return made


def install(wheel: Path, target: Path) -> Path:
    """Install a wheel, without what it depends on, into a folder."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--no-deps", "--no-index", "--no-compile", "--target", str(target), str(wheel)],
        check=True,
        capture_output=True,
    )
    return target


def link(names: list[str], target: Path) -> Path:
    """Put distributions, and all that they depend on, into a folder, by links to what is installed here."""
    target.mkdir()
    found: set[str] = set()
    while names:
        name = names.pop()
        try:
            dist = distribution(name)
        except PackageNotFoundError:
            continue  # for another platform
        if dist.name in found:
            continue
        found.add(dist.name)
        for file in dist.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (target / top).exists():
                (target / top).symlink_to(Path(str(dist.locate_file(top))).resolve())
        for line in dist.requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                names.append(needed.name)
    return target


def runner(path: list[Path], home: Path) -> Run:
    """Return what runs Python with these folders, the standard library, and no other package."""
    home.mkdir()

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            # -S: not the packages that are installed beside this interpreter; the warning is torch's import's
            [sys.executable, "-S", "-W", "ignore:Failed to initialize NumPy:UserWarning", *arguments],
            env={"PYTHONPATH": ":".join(map(str, path)), "HOME": str(home), "PATH": "/usr/bin:/bin"},
            cwd=home,
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run Python with torchpact, torch and safetensors, and what these need."""
    folder = tmp_path_factory.mktemp("alone")
    needed = link(["torch", "safetensors"], folder / "needed")
    return runner([install(wheel, folder / "installed"), needed], folder / "home")


@pytest.fixture(scope="session")
def with_cli(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """As ``alone``, with the packages of the command line."""
    folder = tmp_path_factory.mktemp("cli")
    needed = link(["torch", "safetensors", "typer", "rich"], folder / "needed")
    return runner([install(wheel, folder / "installed"), needed], folder / "home")
