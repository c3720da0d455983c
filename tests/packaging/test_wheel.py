"""What is in the distributions."""

import email
import tomllib
import zipfile
from pathlib import Path

import torchpact as tp
from tests.packaging.conftest import ROOT, build
from torchpact.engines.conv.onchip import nvrtc

KINDS = {".py", ".typed", ".cpp", ".hpp", ".cu", ".cuh"}


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_is_small_and_holds_the_library_only(wheel):
    assert wheel.stat().st_size < 1_000_000
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == {"torchpact", "torchpact_command.py"}
    assert {Path(name).suffix for name in names} <= KINDS
    assert "torchpact/py.typed" in names
    source = ROOT / "src" / "torchpact"
    wanted = [path for path in source.rglob("*") if path.suffix in KINDS]
    library = sorted(f"torchpact/{path.relative_to(source).as_posix()}" for path in wanted)
    assert sorted(names) == [*library, "torchpact_command.py"]
    assert Path(nvrtc.__file__).with_name("kernel.cu") in wanted, "kernels are read from files beside"


def test_the_wheel_needs_torch_and_safetensors(wheel):
    needed = [line for line in metadata(wheel).get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(line.split(">")[0] for line in needed) == ["safetensors", "torch"]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("entry_points.txt"))
        points = archive.read(name).decode()
    assert points.split("\n\n") == ["[console_scripts]\ntorchpact = torchpact_command:main\n"]


def test_versions_agree(wheel):
    recipes = tomllib.loads((ROOT / "src" / "torchpact_recipes" / "pyproject.toml").read_text())["project"]
    assert metadata(wheel)["Version"] == tp.__version__ == recipes["version"]
    assert f"torchpact[cli]=={tp.__version__}" in recipes["dependencies"]


def test_the_source_distribution_leaves_the_recipes_out(tmp_path):
    made = build(ROOT, tmp_path, "sdist")
    assert made.stat().st_size < 1_000_000


def test_the_wheel_of_the_recipes_holds_weights_and_sample_but_not_the_library(tmp_path):
    made = build(ROOT / "src" / "torchpact_recipes", tmp_path)
    with zipfile.ZipFile(made) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        (points,) = (each for each in archive.namelist() if each.endswith("entry_points.txt"))
        groups = archive.read(points).decode()
    assert {name.split("/")[0] for name in names} == {"torchpact_recipes"}
    assert "torchpact_recipes/weights/resnet32-tau0.01.safetensors" in names
    assert "torchpact_recipes/data/sample/test.webp" in names
    assert "torchpact_recipes/report/page.html" in names
    assert not any(name.endswith("pyproject.toml") or "__pycache__" in name for name in names)
    assert "[torchpact.commands]" in groups
    assert "[torchpact.weights]" in groups
    assert metadata(made)["Version"] == tp.__version__
