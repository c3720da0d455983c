"""torchpact maps."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from tests.viz.networks import write_checkpoint
from torchpact.models import ResNetConfig
from torchpact_recipes import zoo
from torchpact_recipes.data import load_sample
from torchpact_recipes.outputs import check_folder
from torchpact_recipes.training import TrainConfig
from torchpact_recipes.training.checkpoint import load_model, save_checkpoint
from torchpact_recipes.viz import ponder_maps


@pytest.fixture
def run(run):
    return partial(run, "maps")


def checkpoint(folder, method="relaxed", **settings):
    network = ResNetConfig(**({"units": 2, "adaptive": method != "plain"} | settings))
    return write_checkpoint(folder / f"{method}.safetensors", TrainConfig(method=method, network=network))


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_networks_are_compared_on_random_test_images(run, tmp_path):
    sact, psact = checkpoint(tmp_path, "act"), checkpoint(tmp_path, "relaxed", group=4)
    out = tmp_path / "out"
    code, printed, err = run(
        "--model", sact, "--model", psact, "--count", 3, "--seed", 2, "-o", out, "--json"
    )
    assert (code, err) == (0, "")
    found = json.loads(printed)
    kinds = ("maps", "maps-blocks-1", "maps-blocks-2")
    assert names(out) == {f"{name}.{suffix}" for name in kinds for suffix in ("png", "pdf")}
    assert {str(out / name) for name in names(out)} == set(found["files"])
    assert [one["quantity"] for one in found["networks"]] == ["ponder cost", "expected units"]
    chosen = load_sample("test").random(3, seed=2)
    maps = ponder_maps(load_model(psact)[0], chosen.images, seed=2)
    one = found["networks"][1]
    assert one["blocks"] == pytest.approx([float(block.mean()) for block in maps.blocks])
    assert one["total"] == pytest.approx(sum(one["blocks"]))
    assert [image["blocks"] for image in one["images"]] == maps.means()


def test_files_are_drawn_and_what_is_none_is_told(run, tmp_path):
    model = checkpoint(tmp_path)
    Image.new("L", (100, 50), 9).save(tmp_path / "grey.jpg")
    (tmp_path / "text.png").write_text("not an image")
    files = [tmp_path / name for name in ("text.png", "grey.jpg", "missing.png")]
    code, printed, err = run(*files, "--model", model, "--mode", "thresholded", "-o", tmp_path / "out")
    assert code == 2
    assert "PSACT, τ = 0.01: units run by block 2.00 2.00 2.00, sum 6.00" in printed
    assert err.splitlines() == [
        f"torchpact: {files[0]}: not an image",
        f"torchpact: {files[2]}: no such file; the others are drawn",
    ]
    assert names(tmp_path / "out") == {f"maps{part}.{s}" for part in ("", "-blocks") for s in ("png", "pdf")}


def test_without_a_network_named_it_is_one_of_the_zoo(run, tmp_path):
    code, printed, _ = run("--count", 1, "-o", tmp_path, "--json")
    assert code == 0
    (one,) = json.loads(printed)["networks"]
    assert (one["model"], one["title"]) == ("resnet110-tau0.005", "PSACT, τ = 0.005")
    maps = ponder_maps(zoo.load("resnet110-tau0.005"), load_sample("test").random(1, seed=0).images, seed=0)
    assert one["blocks"] == pytest.approx([float(block.mean()) for block in maps.blocks])


def test_without_any_image_that_can_be_read_nothing_is_drawn(run, tmp_path):
    model = checkpoint(tmp_path)
    code, printed, err = run(tmp_path / "missing.png", "--model", model, "-o", tmp_path / "out")
    assert (code, printed, err) == (2, "", f"torchpact: {tmp_path / 'missing.png'}: no such file\n")
    assert not (tmp_path / "out").exists()


def test_names_of_images_that_cannot_be_printed_are_escaped_in_every_line(run, tmp_path):
    code, printed, err = run(tmp_path / "a\udcff", tmp_path / "b")
    assert (code, printed) == (2, "")
    assert err == f"torchpact: {tmp_path}/a\\udcff: no such file\ntorchpact: {tmp_path}/b: no such file\n"


def test_titles_differ_where_networks_do(run, tmp_path):
    small, deep = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", units=3)
    other = checkpoint(tmp_path / "c")
    for models, titles in (
        ((small, deep), ["ResNet-14, PSACT, τ = 0.01", "ResNet-20, PSACT, τ = 0.01"]),
        ((small, other), ["PSACT, τ = 0.01, a", "PSACT, τ = 0.01, c"]),
        ((small, small), ["PSACT, τ = 0.01, a (1)", "PSACT, τ = 0.01, a (2)"]),
    ):
        chosen = [part for model in models for part in ("--model", model)]
        _, printed, _ = run(*chosen, "--count", 1, "-o", tmp_path / "out", "--json")
        assert [one["title"] for one in json.loads(printed)["networks"]] == titles


def test_a_network_evaluated_as_another_kind_is_said_to_be(run, tmp_path):
    psact, sact = checkpoint(tmp_path), checkpoint(tmp_path, "act")
    for mode, titles in {
        "act": ["PSACT, τ = 0.01, evaluated as ACT", "SACT, τ = 0.01"],
        "relaxed": ["PSACT, τ = 0.01", "SACT, τ = 0.01, evaluated relaxed"],
    }.items():
        arguments = ("--model", psact, "--model", sact, "--mode", mode, "--count", 1, "-o", tmp_path / "out")
        _, printed, _ = run(*arguments, "--json")
        assert [one["title"] for one in json.loads(printed)["networks"]] == titles


def test_a_file_given_twice_is_drawn_twice(run, tmp_path):
    model, file = checkpoint(tmp_path), tmp_path / "grey.jpg"
    Image.new("L", (50, 50), 9).save(file)
    _, printed, _ = run(file, file, "--model", model, "-o", tmp_path / "out", "--json")
    (one,) = json.loads(printed)["networks"]
    assert [image["image"] for image in one["images"]] == [str(file)] * 2


def test_where_nothing_can_be_written_is_told_before_anything_is_computed(run, tmp_path, monkeypatch):
    def no_maps(*_, **__):
        raise AssertionError("computed before it was refused")

    monkeypatch.setattr("torchpact_recipes.commands.maps.ponder_maps", no_maps)
    model, file = checkpoint(tmp_path), tmp_path / "file"
    file.touch()
    for output in (file, file / "below"):
        code, printed, err = run("--model", model, "--count", 1, "-o", output)
        assert (code, printed) == (2, "")
        assert err == f"torchpact: {output}: expected a folder for the results, got a file ({file})\n"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that nobody can write in: /proc")
def test_a_folder_that_nobody_can_write_in_is_told_before_anything_is_read(run, monkeypatch):
    monkeypatch.setattr(
        "torchpact_recipes.commands.maps.find_network", lambda name: pytest.fail("read before")
    )
    for output in ("/proc/x", "/proc/x/y", "/proc"):
        code, printed, err = run("-o", output)
        assert (code, printed) == (2, "")
        told = f"torchpact: {output}: expected a folder that can be written in, got /proc ("
        assert err.startswith(told)
        assert err.count("\n") == 1


def test_a_protected_folder_is_told(run, tmp_path):
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("needs a user whom permissions bind")
    _, _, err = run("-o", tmp_path / "new")
    assert err == (
        f"torchpact: {tmp_path / 'new'}: expected a folder that can be written in, "
        f"got {tmp_path} (Permission denied)\n"
    )


def test_to_look_whether_a_folder_can_be_written_in_leaves_nothing(tmp_path):
    check_folder(tmp_path)
    check_folder(tmp_path / "new" / "one")
    assert not names(tmp_path)


def test_random_takes_another_seed_every_time_and_tells_it(run, tmp_path):
    model = checkpoint(tmp_path)
    arguments = ("--model", model, "--count", 1, "--random", "-o", tmp_path / "out")
    seeds = [run(*arguments)[1].splitlines()[-1] for _ in range(2)]
    assert all(line.startswith("seed ") for line in seeds)
    assert seeds[0] != seeds[1]


def test_mistakes_are_told_in_one_line(run, tmp_path):
    plain, psact = checkpoint(tmp_path, "plain"), checkpoint(tmp_path)
    small = checkpoint(tmp_path / "small", image_size=16)
    sequences = tmp_path / "parity.safetensors"
    save_checkpoint(sequences, {}, {"config": {"task": "parity"}})
    text = tmp_path / "text.safetensors"
    text.write_text("not a checkpoint")
    for arguments, message in (
        (("--model", tmp_path / "none"), "none: no such checkpoint"),
        (("--model", text), "text.safetensors: not a readable checkpoint"),
        (("--model", sequences), "expected a network for images, got one for sequences"),
        (("--model", plain), "plain.safetensors: expected an adaptive network, got a plain one"),
        (("--model", psact, "--model", small), "expected a network for images of 32 pixels, as"),
        (("--model", psact, "--mode", "eager"), "got 'eager'"),
        (("--model", psact, "--count", 0), "expected a count of 1 to 60, got 0"),
        (("--model", psact, "--seed", -1), "expected seed to be an integer of at least 0, got -1"),
        (("--model", psact, "--data", tmp_path), "test_batch.bin: no such file"),
        ((*["a.png"] * 61, "--model", psact), "expected at most 60 images, got 61"),
    ):
        code, printed, err = run(*arguments, "-o", tmp_path / "out")
        assert (code, printed) == (2, "")
        assert message in err
        assert err.startswith("torchpact: ")
        assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_it_has_help_with_an_example(run):
    code, printed, _ = run("--help")
    assert code == 0
    assert "Example: torchpact maps photo.jpg" in printed
