import errno
import json
import os
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.training.small import config, images
from torchpact_recipes.training import CheckpointError, Learner, load_checkpoint, load_model, save_checkpoint
from torchpact_recipes.training.checkpoint import load_latest


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint of a real learner, and its bytes."""
    path = tmp_path_factory.mktemp("good") / "last.safetensors"
    learner = Learner(config(), images())
    learner.advance()
    save_checkpoint(path, learner.state(), {"config": learner.config.to_dict(), "iteration": 1})
    return path, path.read_bytes()


def test_a_checkpoint_returns_what_was_saved(tmp_path):
    tensors = {
        "a": torch.randn(3, 2),
        "b": torch.tensor(7),
        "c": torch.zeros(0),
        "d": torch.randn(2).bfloat16(),
    }
    save_checkpoint(tmp_path / "x", tensors, {"iteration": 5, "nested": {"list": [1, 2.5, None]}})
    loaded = load_checkpoint(tmp_path / "x")
    assert loaded.info == {"iteration": 5, "nested": {"list": [1, 2.5, None]}}
    assert all(torch.equal(loaded.tensors[name], value) for name, value in tensors.items())


def test_a_model_comes_back_whole(good):
    path, _ = good
    model, restored = load_model(path)
    assert restored == config()
    assert not model.training
    assert torch.equal(model.stem.weight, load_checkpoint(path).tensors["model.stem.weight"])


def test_a_path_may_be_a_string(good):
    path, _ = good
    model, restored = load_model(str(path))
    assert restored == config()
    assert torch.equal(model.stem.weight, load_checkpoint(str(path)).tensors["model.stem.weight"])
    with pytest.raises(CheckpointError, match="nowhere: no such checkpoint"):
        load_model("nowhere")


def corruptions(data):
    """A hundred each of flipped bits and truncations, anywhere in the file, header and tensors alike."""
    generator = random.Random(0)
    header = int.from_bytes(data[:8], "little") + 8
    for number in range(100):
        at = generator.randrange(header if number % 2 else len(data))
        bit = 1 << generator.randrange(8)
        yield data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
    for _ in range(100):
        yield data[: generator.randrange(len(data))]


def test_two_hundred_corrupted_checkpoints_give_two_hundred_clear_errors(good, tmp_path):
    _, data = good
    path = tmp_path / "last.safetensors"
    count = 0
    for damaged in corruptions(data):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"last\.safetensors") as error:
            load_checkpoint(path)
        assert "\n" not in str(error.value)
        count += 1
    assert count == 200


def test_swapped_tensors_are_noticed(tmp_path):
    """The same bytes under other names: everything about the file is in order but for the digest."""
    path = tmp_path / "swapped.safetensors"
    save_checkpoint(path, {"one": torch.ones(3), "two": torch.zeros(3)}, {"iteration": 1})
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    one, two = header["one"], header["two"]
    one["data_offsets"], two["data_offsets"] = two["data_offsets"], one["data_offsets"]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    assert load_file(path)["one"].eq(0).all()
    with pytest.raises(CheckpointError, match="altered since it was written"):
        load_checkpoint(path)


def test_a_foreign_safetensors_file_is_refused(tmp_path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(
        CheckpointError, match="expected the format 'torchpact checkpoint 1', got 'a file without"
    ):
        load_checkpoint(tmp_path / "foreign.safetensors")


def test_a_good_checkpoint_of_something_else_is_refused_as_a_model(tmp_path):
    save_checkpoint(tmp_path / "x", {"model.weight": torch.zeros(2)}, {"config": config().to_dict()})
    with pytest.raises(CheckpointError, match="holds no network of ours") as error:
        load_model(tmp_path / "x")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["missing", "."])
def test_no_file_is_told(tmp_path, name):
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        load_checkpoint(tmp_path / name)


def test_the_one_before_is_kept_and_used_when_the_newest_is_damaged(tmp_path):
    last, previous = tmp_path / "last.safetensors", tmp_path / "previous.safetensors"
    for iteration in (1, 2):
        save_checkpoint(last, {"a": torch.zeros(1)}, {"iteration": iteration}, keep=previous)
    assert load_latest(tmp_path)[0].info["iteration"] == 2
    last.write_bytes(last.read_bytes()[:-1])
    checkpoint, problems = load_latest(tmp_path)
    assert checkpoint.info["iteration"] == 1
    assert len(problems) == 1
    assert "last.safetensors" in problems[0]
    previous.unlink()
    with pytest.raises(CheckpointError, match=r"last\.safetensors.*previous\.safetensors"):
        load_latest(tmp_path)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    last, previous = tmp_path / "last.safetensors", tmp_path / "previous.safetensors"
    save_checkpoint(last, {"a": torch.zeros(1)}, {"iteration": 1}, keep=previous)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(last, {"a": torch.ones(1)}, {"iteration": 2}, keep=previous)
    assert load_checkpoint(last).info["iteration"] == 1
    assert os.listdir(tmp_path) == ["last.safetensors"]
