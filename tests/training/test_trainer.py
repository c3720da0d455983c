import errno
import json
import multiprocessing
import os
import random
import signal

import pytest
import torch

from tests.training.small import METHODS, burst, config, images
from torchpact_recipes import training
from torchpact_recipes.training import (
    Trainer,
    TrainingError,
    evaluate,
    load_checkpoint,
    load_model,
    train_together,
)
from torchpact_recipes.training.state import derived_seed

TEST = images("test", 40)


def trainer(folder, settings=None, **options):
    return Trainer(settings or config(), folder, images(), TEST, **options)


def tensors(folder, name="last"):
    return load_checkpoint(folder / f"{name}.safetensors").tensors


def assert_same(one, two):
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def assert_alike(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name, **tolerance)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_leaves_its_files(tmp_path, method):
    results = trainer(tmp_path, config(method)).run()
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["results"] == results
    assert record["config"] == json.loads(json.dumps(config(method).to_dict()))
    events = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [(e["kind"], e["iteration"]) for e in events] == [
        ("train", 4),
        ("validate", 6),
        ("train", 8),
        ("train", 12),
        ("validate", 12),
    ]
    assert {p.name for p in tmp_path.iterdir()} == {
        "run.json",
        "history.jsonl",
        "last.safetensors",
        "previous.safetensors",
        "best.safetensors",
    }
    # what the checkpoint holds is what was validated last
    model, _ = load_model(tmp_path / "last.safetensors")
    mode = {"plain": "plain", "random": "discrete"}.get(method, "thresholded")
    seed = derived_seed(config(method).seed, "validation")
    again = evaluate(model, TEST, None if method == "plain" else mode, seed=seed)
    assert again.accuracy == results[mode]["accuracy"]
    assert again.flops == results[mode]["flops"]


def test_resuming_gives_the_same_weights_and_history(tmp_path):
    trainer(tmp_path / "straight").run()
    first = trainer(tmp_path / "broken")
    burst(first)  # iteration 3: a checkpoint
    burst(first)  # iteration 4: logged, but not saved
    second = trainer(tmp_path / "broken", resume=True)
    assert second.learner.iteration == 3
    second.run()
    assert_same(tensors(tmp_path / "straight"), tensors(tmp_path / "broken"))
    assert_same(tensors(tmp_path / "straight", "best"), tensors(tmp_path / "broken", "best"))
    kept = [json.loads(line) for line in (tmp_path / "broken" / "history.jsonl").read_text().splitlines()]
    assert [(e["kind"], e["iteration"]) for e in kept] == [
        ("train", 4),
        ("validate", 6),
        ("train", 8),
        ("train", 12),
        ("validate", 12),
    ]


LONGER = config(iterations=45, log_every=10, validate_every=20)


def _train_in_child(folder):
    torch.set_num_threads(1)
    trainer(folder, LONGER, resume=True).run()


@pytest.mark.slow
def test_killed_at_twenty_random_points_a_run_ends_with_identical_weights(tmp_path):
    trainer(tmp_path / "straight", LONGER).run()
    generator = random.Random(0)
    context = multiprocessing.get_context("fork")
    kills, finished, folder = 0, 0, tmp_path / "killed0"
    while kills < 20 or finished == 0:
        child = context.Process(target=_train_in_child, args=(folder,))
        child.start()
        child.join(generator.uniform(0.02, 0.5) if kills < 20 else None)
        if child.is_alive():
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            kills += 1
            continue
        assert child.exitcode == 0
        assert_same(tensors(tmp_path / "straight"), tensors(folder))
        finished += 1
        folder = tmp_path / f"killed{finished}"


def test_a_run_stopped_before_its_first_checkpoint_starts_again(tmp_path):
    trainer(tmp_path / "straight").run()
    trainer(tmp_path / "stopped")
    second = trainer(tmp_path / "stopped", resume=True)
    assert second.learner.iteration == 0
    second.run()
    assert_same(tensors(tmp_path / "straight"), tensors(tmp_path / "stopped"))


def test_a_damaged_checkpoint_is_told_and_the_one_before_used(tmp_path):
    trainer(tmp_path / "straight").run()
    first = trainer(tmp_path / "damaged")
    while first.learner.iteration < 9:
        burst(first)
    last = tmp_path / "damaged" / "last.safetensors"
    data = bytearray(last.read_bytes())
    data[-5] ^= 8
    last.write_bytes(data)
    second = trainer(tmp_path / "damaged", resume=True)
    assert second.learner.iteration == 6
    assert len(second.notes) == 1
    assert "went back to the checkpoint before" in second.notes[0]
    second.run()
    assert_same(tensors(tmp_path / "straight"), tensors(tmp_path / "damaged"))


def test_an_exploding_loss_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    run = trainer(tmp_path)
    while run.learner.iteration < 3:
        burst(run)
    before = (tmp_path / "last.safetensors").read_bytes()
    with torch.no_grad():
        run.learner.model.classifier.weight.fill_(float("nan"))
    with pytest.raises(
        TrainingError, match="loss is nan at iteration 4; the last good checkpoint is"
    ) as error:
        run.run()
    assert "\n" not in str(error.value)
    assert (tmp_path / "last.safetensors").read_bytes() == before


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    run = trainer(tmp_path, config(log_every=100, checkpoint_every=2))
    with torch.no_grad():
        run.learner.model.classifier.bias.fill_(float("inf"))
    with pytest.raises(TrainingError, match="is not finite at iteration 2; no checkpoint yet"):
        run.run()
    assert not (tmp_path / "last.safetensors").exists()


def test_a_full_disk_stops_with_the_last_checkpoint_in_place(tmp_path, monkeypatch):
    run = trainer(tmp_path)
    while run.learner.iteration < 3:
        burst(run)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run.run()
    monkeypatch.undo()
    assert trainer(tmp_path, resume=True).learner.iteration == 3


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        trainer(tmp_path / "file" / "run")


def test_a_finished_run_is_not_overwritten(tmp_path):
    trainer(tmp_path).run()
    with pytest.raises(TrainingError, match=r"holds a run already; resume it \(--resume\) or choose another"):
        trainer(tmp_path)
    again = trainer(tmp_path, resume=True)
    assert again.done
    assert again.run() == json.loads((tmp_path / "run.json").read_text())["results"]


def test_trained_together_each_is_as_if_alone(tmp_path):
    settings = [config(), config("act", seed=1), config("plain", iterations=7)]
    for number, each in enumerate(settings):
        trainer(tmp_path / f"alone{number}", each).run()
    train_together([trainer(tmp_path / f"together{n}", each) for n, each in enumerate(settings)])
    for number in range(3):
        assert_same(tensors(tmp_path / f"alone{number}"), tensors(tmp_path / f"together{number}"))


def test_a_warm_start_takes_all_but_the_heads(tmp_path):
    trainer(tmp_path / "plain", config("plain")).run()
    warm = trainer(tmp_path / "warm", initial=tmp_path / "plain" / "last.safetensors")
    plain, _ = load_model(tmp_path / "plain" / "last.safetensors")
    state = warm.learner.model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value)
    assert warm.learner.iteration == 0
    assert json.loads((tmp_path / "warm" / "run.json").read_text())["warm_start"].endswith("last.safetensors")


def test_one_of_several_that_fails_leaves_the_others_alone(tmp_path):
    runs = [trainer(tmp_path / name, config(seed=seed)) for seed, name in enumerate(("good", "bad", "other"))]
    with torch.no_grad():
        runs[1].learner.model.classifier.bias.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"^bad: .* is not finite at iteration 3; no checkpoint yet$"):
        train_together(runs)
    assert [run.done for run in runs] == [True, False, True]


def test_a_network_that_is_not_finite_is_not_the_best(tmp_path):
    run = trainer(tmp_path, config(log_every=100, validate_every=2, checkpoint_every=100))
    burst(run)
    before = (tmp_path / "best.safetensors").read_bytes()
    with torch.no_grad():
        run.learner.model.classifier.bias.fill_(float("nan"))
    run.best = -1.0  # any accuracy would be better
    with pytest.raises(TrainingError, match="is not finite at iteration 4; no checkpoint yet"):
        run.run()
    assert (tmp_path / "best.safetensors").read_bytes() == before
    assert "NaN" not in (tmp_path / "history.jsonl").read_text()


def test_a_validation_that_is_not_finite_is_told(tmp_path):
    run = trainer(tmp_path)
    run.validate = lambda: {"modes": {"relaxed": {"accuracy": 0.5, "nll": float("inf")}}}
    with pytest.raises(
        TrainingError, match=r"what was found \(validate\) is not finite at iteration 6; the last"
    ):
        run.run()
    assert "Infinity" not in (tmp_path / "history.jsonl").read_text()
    assert not (tmp_path / "best.safetensors").exists()


def test_a_full_disk_names_the_history(tmp_path):
    run = trainer(tmp_path)
    path = tmp_path / "history.jsonl"
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*history\.jsonl'"):
        run.run()


def test_the_old_name_of_a_run_warns():
    with pytest.warns(DeprecationWarning, match="TrainingLoop is now TrainingRun"):
        assert training.TrainingLoop is training.TrainingRun
    with pytest.raises(AttributeError, match="no attribute 'TrainingLoops'"):
        _ = training.TrainingLoops
