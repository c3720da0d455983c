"""Going on with a run: only with what it began with."""

import json

import pytest
import torch

from tests.training.small import burst, config, images
from tests.training.test_trainer import TEST, assert_same, tensors, trainer
from torchpact_recipes.data import Images
from torchpact_recipes.training import (
    CheckpointError,
    Trainer,
    TrainingError,
    load_checkpoint,
    load_model,
    save_checkpoint,
)


def record(folder):
    return json.loads((folder / "run.json").read_text())


def stopped_after(folder, bursts, **options):
    """A run that was killed after so many bursts; the first ends with a checkpoint."""
    run = trainer(folder, **options)
    for _ in range(bursts):
        burst(run)


def test_a_warm_start_is_remembered_where_a_run_goes_on(tmp_path):
    trainer(tmp_path / "plain", config("plain")).run()
    start = tmp_path / "plain" / "last.safetensors"
    stopped_after(tmp_path / "warm", 1, initial=start)
    trainer(tmp_path / "warm", resume=True).run()
    assert record(tmp_path / "warm")["warm_start"] == "plain/last.safetensors"
    trainer(tmp_path / "straight", initial=start).run()
    assert_same(tensors(tmp_path / "straight"), tensors(tmp_path / "warm"))
    # another one than it had is refused, and so is one where it had none
    other = tmp_path / "plain" / "best.safetensors"
    with pytest.raises(
        TrainingError, match=r"warm start that it began with, plain/last\..*; got plain/best\."
    ):
        trainer(tmp_path / "warm", resume=True, initial=other)
    stopped_after(tmp_path / "cold", 1)
    with pytest.raises(TrainingError, match=r"the warm start that it began with, none; got plain/last\."):
        trainer(tmp_path / "cold", resume=True, initial=start)


def test_killed_before_its_first_checkpoint_a_warm_start_is_asked_for(tmp_path):
    trainer(tmp_path / "plain", config("plain")).run()
    start = tmp_path / "plain" / "last.safetensors"
    stopped_after(tmp_path / "warm", 0, initial=start)
    with pytest.raises(TrainingError, match=r"began with, plain/last\.safetensors; got none$"):
        trainer(tmp_path / "warm", resume=True)
    again = trainer(tmp_path / "warm", resume=True, initial=start)
    plain, _ = load_model(start)
    assert torch.equal(again.learner.model.stem.weight, plain.stem.weight)


def test_what_is_written_of_a_finished_run_stays(tmp_path):
    results = trainer(tmp_path).run()
    assert list(trainer(tmp_path, resume=True).run()) == list(results)  # the modes in their order, too
    written = record(tmp_path) | {"processes": 7, "versions": {"torch": "of then"}}
    (tmp_path / "run.json").write_text(json.dumps(written))
    trainer(tmp_path, resume=True).run()
    assert record(tmp_path) == written
    # killed just before its end was written, it is written now
    (tmp_path / "run.json").write_text(json.dumps(written | {"status": "started"}))
    trainer(tmp_path, resume=True).run()
    assert (record(tmp_path)["status"], record(tmp_path)["processes"]) == ("finished", 1)
    # and where its last checkpoint is lost it is not finished any more
    (tmp_path / "last.safetensors").unlink()
    again = trainer(tmp_path, resume=True)
    assert record(tmp_path)["status"] == "started"
    again.run()
    assert record(tmp_path)["status"] == "finished"


@pytest.mark.parametrize("bursts", [0, 1])
def test_other_images_cannot_resume(tmp_path, bursts):
    stopped_after(tmp_path, bursts)
    data = images()
    swapped = torch.cat([data.labels[1:2], data.labels[:1], data.labels[2:]])
    pixel = data.images.clone()
    pixel[63, 2, 11, 11] ^= 1
    others = {
        "32 images": images(count=32),
        "64 images": Images(data.images, swapped),
        "64 images (": Images(pixel, data.labels),
    }
    for said, other in others.items():
        with pytest.raises(TrainingError) as error:
            Trainer(config(), tmp_path, other, TEST, resume=True)
        text = str(error.value)
        assert f"{tmp_path}: expected the data set that it began with, 64 images (" in text
        assert f"got {said}" in text
    assert trainer(tmp_path, resume=True).learner.iteration == 3 * bursts


def test_a_run_of_before_its_data_were_put_down_goes_on(tmp_path):
    stopped_after(tmp_path, 1)
    checkpoint = load_checkpoint(tmp_path / "last.safetensors")
    assert checkpoint.info["data"] == record(tmp_path)["data"]
    info = {name: value for name, value in checkpoint.info.items() if name != "data"}
    save_checkpoint(tmp_path / "last.safetensors", checkpoint.tensors, info)
    written = {name: value for name, value in record(tmp_path).items() if name not in ("data", "warm_start")}
    (tmp_path / "run.json").write_text(json.dumps(written))
    assert trainer(tmp_path, resume=True).learner.iteration == 3


@pytest.mark.parametrize("bursts", [0, 1])
def test_where_another_configuration_differs_is_told(tmp_path, bursts):
    stopped_after(tmp_path, bursts)
    for other, said in (
        (config(tau=0.7), "tau is 0.05 there, 0.7 here"),
        (config(network={"group": 3}), "network.group is 1 there, 3 here"),
    ):
        advice = "repeat the options that it was begun with, which are in its run.json"
        with pytest.raises(TrainingError, match=f"is of another configuration: {said}; {advice}$"):
            trainer(tmp_path, other, resume=True)


@pytest.mark.parametrize("missing", ["config", "iteration", "best", "results", "seconds"])
def test_a_checkpoint_that_is_not_of_a_run_cannot_resume(tmp_path, missing):
    info = {"config": config().to_dict(), "iteration": 3, "best": None, "results": {}, "seconds": 1.0}
    del info[missing]
    save_checkpoint(tmp_path / "last.safetensors", {"weight": torch.ones(2)}, info)
    with pytest.raises(CheckpointError, match=f"run that can go on, got one without {missing};"):
        trainer(tmp_path, resume=True)


def test_a_checkpoint_of_no_named_values_is_refused(tmp_path):
    save_checkpoint(tmp_path / "last.safetensors", {"weight": torch.ones(2)}, [1, 2])  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"expected values by name in its header, got '\[1, 2\]'"):
        trainer(tmp_path, resume=True)


def _foreign(checkpoint):
    other = config(tau=0.7).to_dict()
    return checkpoint.tensors, checkpoint.info | {"config": other}


def _other_shapes(checkpoint):
    return checkpoint.tensors | {"model.classifier.weight": torch.zeros(10, 3)}, checkpoint.info


def _one_missing(checkpoint):
    tensors = {k: v for k, v in checkpoint.tensors.items() if k != "model.classifier.weight"}
    return tensors, checkpoint.info


@pytest.mark.parametrize(
    ("altered", "said"),
    [
        (_foreign, "is of another configuration: tau is 0.7 there, 0.05 here"),
        (_other_shapes, "expected model.classifier.weight as (10, 64) torch.float32, got (10, 3)"),
        (_one_missing, "expected the tensors of this run, got 1 others or missing"),
    ],
)
def test_a_sound_checkpoint_of_another_run_is_told_and_the_one_before_used(tmp_path, altered, said):
    stopped_after(tmp_path, 3)
    last = tmp_path / "last.safetensors"
    before = load_checkpoint(tmp_path / "previous.safetensors").info["iteration"]
    save_checkpoint(last, *altered(load_checkpoint(last)))
    run = trainer(tmp_path, resume=True)
    assert run.learner.iteration == before
    (note,) = run.notes
    assert note.startswith(f"{last}")
    assert said in note
    assert note.endswith("; went back to the checkpoint before")


def test_what_was_gone_back_to_stays_until_there_are_two_good_ones(tmp_path):
    stopped_after(tmp_path, 3)
    last, previous = tmp_path / "last.safetensors", tmp_path / "previous.safetensors"
    damaged = last.read_bytes()[:1000]
    last.write_bytes(damaged)
    run = trainer(tmp_path, resume=True)
    assert not last.exists()
    assert (tmp_path / "refused.safetensors").read_bytes() == damaged
    good = previous.read_bytes()
    while not last.exists():
        burst(run)
    assert previous.read_bytes() == good
    assert load_checkpoint(last).info["iteration"] == run.learner.iteration
