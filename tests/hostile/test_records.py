"""Damaged and forged records and checkpoints: one short line, and little memory."""

import json
import subprocess
import sys

import pytest
import torch

from torchpact.flops.conv import conv_block_flops
from torchpact.models import ResNetConfig, SequenceNet, build
from torchpact.specs import network_spec
from torchpact_recipes import model_card
from torchpact_recipes.hub_files import FILES, read_network, to_settings
from torchpact_recipes.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    load_model,
    load_sequence_model,
    save_checkpoint,
)
from torchpact_recipes.training.sequence_presets import sequence_preset

DEEP = "[" * 100_000 + "]" * 100_000
CHANGES = {
    "nested": DEEP,
    "infinite iteration": {"iteration": float("inf")},
    "huge iteration": {"iteration": 10**400},
    "results of no mode": {"results": "good"},
    "config a list": {"config": [1, 2]},
    "config a text": {"config": "x" * 1_400_000},
    "network a text": {"config": {"network": "x", "method": "relaxed", "seed": 0, "iterations": 1}},
    "no text": "\x00\xff",
    "a number": "3",
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_damaged_record_of_a_run_is_one_line_in_every_command(
    run_folder, record_of, one_line_of, tmp_path, name
):
    record_of(run_folder, CHANGES[name])
    code, line = one_line_of("report", run_folder, "--no-timing", "-o", tmp_path / "page.html")
    assert code == 2
    assert "run.json: expected what torchpact train writes, got " in line
    # weights, configuration and iteration of an entry of the zoo come from the checkpoint
    if name not in ("infinite iteration", "huge iteration", "results of no mode", "network a text"):
        code, line = one_line_of(
            "zoo", "add", run_folder, "--name", "a", "--into", tmp_path / "zoo", "--data", "sample"
        )
        assert code == 2


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"tau": "cheap"}},
        {"iteration": float("inf")},
        {"iteration": "many"},
        {"iteration": -1},
        {"best": [1]},
        {"best": "good"},
        {"results": 7},
        {"seconds": "long"},
        {"seconds": -1.0},
        {"config": {"network": {"halting_bias": 10**30}}},
    ],
)
def test_a_forged_checkpoint_is_refused_before_a_run_goes_on(run_folder, change):
    from tests.training.small import config, images
    from torchpact_recipes.training import Trainer

    path = run_folder / "last.safetensors"
    checkpoint = load_checkpoint(path)
    (run_folder / "previous.safetensors").unlink()
    save_checkpoint(path, checkpoint.tensors, checkpoint.info | change)
    settings = {"iterations": 4, "batch": 4, "log_every": 2, "validate_every": 4, "checkpoint_every": 2}
    with pytest.raises(CheckpointError) as told:
        Trainer(config("relaxed", **settings), run_folder, images(count=8), images("test", 8), resume=True)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"width": 80}, "of another shape"),
        ({"units": 1000}, "expected weights of 1000 layers"),
        ({"classes": 10**9}, "of another shape"),
        ({"width": 10**20}, "expected width to be an integer of at most"),
        ({"halting_bias": 10**30}, "expected halting_bias in"),
        ({"halting_bias": 1e300}, "expected halting_bias in"),
        ({"units": "five"}, "expected units"),
        ({"image_size": float("nan")}, "expected image_size"),
    ],
)
def test_a_network_that_weights_do_not_fit_is_not_built(small_run, tmp_path, change, told, monkeypatch):
    found = load_checkpoint(small_run / "last.safetensors")
    forged = found.info["config"] | {"network": found.info["config"]["network"] | change}
    path = tmp_path / "forged.safetensors"
    save_checkpoint(path, found.tensors, found.info | {"config": forged})
    sizes = allocations(monkeypatch)
    with pytest.raises(CheckpointError, match=f"holds no network of ours .*{told}") as error:
        load_model(path)
    assert len(str(error.value)) < 800
    assert not sizes, "a network was built, not only described"


def allocations(monkeypatch):
    """Note every network that is built other than on the meta device."""
    from torchpact_recipes.training import checkpoint

    found: list[str] = []

    def noting(made):
        def make(*arguments):
            model = made(*arguments)
            if any(not p.is_meta for p in model.parameters()):
                found.append(made.__name__)
            return model

        return make

    for name in ("build", "SequenceNet"):
        monkeypatch.setattr(checkpoint, name, noting(getattr(checkpoint, name)))
    return found


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden": 100_000}, "of another shape"),
        ({"layers": 10**9}, "expected weights of 1000000000 layers"),
        ({"embedding": 10**8}, "missing|of another shape"),
    ],
)
def test_a_network_for_sequences_likewise(tmp_path, change, told, monkeypatch):
    config = sequence_preset("parity", "tiny", hidden=4)
    model = SequenceNet(config.network)
    values = config.to_dict()
    path = tmp_path / "forged.safetensors"
    weights = {f"model.{k}": v for k, v in model.state_dict().items()}
    save_checkpoint(path, weights, {"config": values})
    assert load_sequence_model(path)[1] == config
    save_checkpoint(path, weights, {"config": values | {"network": values["network"] | change}})
    sizes = allocations(monkeypatch)
    with pytest.raises(CheckpointError, match=told):
        load_sequence_model(path)
    assert not sizes


MEASURED = """
import pathlib, resource, sys
from torchpact_recipes.report import read_run
from torchpact_recipes.training.checkpoint import load_model
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    print(load_model(sys.argv[2]) if sys.argv[1] == "load" else read_run(pathlib.Path(sys.argv[2])).values)
except ValueError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts kilobytes")
@pytest.mark.parametrize("what", ["load", "report"])
def test_small_files_take_little_memory(run_folder, record_of, what):
    """4.5 GB and 2.1 GB before."""
    if what == "load":
        path = run_folder / "last.safetensors"
        found = load_checkpoint(path)
        found.info["config"]["network"]["width"] = 80
        save_checkpoint(path, found.tensors, found.info)
    else:
        path = run_folder
        record = json.loads((run_folder / "run.json").read_text())
        record["config"]["network"]["image_size"] = 10_000
        record_of(run_folder, record)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, what, str(path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split()[-1]) < 100_000


def test_the_flops_of_positions_that_are_alike_are_those_of_all_of_them():
    spec = network_spec(build(ResNetConfig(units=3, halting_bias=0.0)))
    assert spec is not None
    for block, size in zip(spec.blocks, (32, 16, 8), strict=True):
        for steps in (1, 2, 3):
            whole = torch.full((2, 1, 1, 1), steps)
            every = whole.expand(2, 1, size, size)
            assert torch.equal(
                conv_block_flops(block, whole, size, size), conv_block_flops(block, every, size, size)
            )


def test_the_flops_of_a_plain_network_of_large_images_are_found_without_them():
    one, many = (model_card.plain_flops(ResNetConfig(image_size=size)) for size in (32, 32 * 1000))
    classifier = 2 * 64 * 10
    assert many - classifier == (one - classifier) * 10**6


@pytest.mark.parametrize(
    "text", [DEEP, "[]", "{}", '{"units": 1e999}', '{"units": 5, "width": 100000000000}']
)
def test_a_damaged_config_of_a_saved_network_is_one_short_line(tmp_path, text):
    (tmp_path / FILES[0]).write_text(text)
    (tmp_path / FILES[1]).write_bytes(b"\x00" * 8)
    with pytest.raises(ValueError, match="config") as told:
        read_network(tmp_path)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 800


def test_a_saved_network_for_the_hub_takes_no_memory_before_its_weights_fit(tmp_path):
    hub = pytest.importorskip("torchpact_recipes.hub")
    model = hub.HubResNet(units=2)
    model.save_pretrained(tmp_path)
    assert torch.equal(hub.HubResNet.from_pretrained(tmp_path).classifier.weight, model.classifier.weight)
    settings = to_settings(model) | {"width": 100_000}  # 25 TB
    (tmp_path / FILES[0]).write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"expected the weights that config\.json"):
        hub.HubResNet.from_pretrained(tmp_path)


def test_names_of_a_megabyte_do_not_make_an_error_of_a_megabyte(small_run, tmp_path):
    found = load_checkpoint(small_run / "last.safetensors")
    path = tmp_path / "names.safetensors"
    save_checkpoint(path, found.tensors | {f"model.{'x' * 1_000_000}": torch.zeros(1)}, found.info)
    with pytest.raises(CheckpointError) as told:
        load_model(path)
    assert len(str(told.value)) < 800
