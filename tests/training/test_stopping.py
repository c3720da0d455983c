"""Ctrl-C and SIGTERM: training stops after the iteration, saves, and goes on as if nothing had been."""

import json
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.training.small import config
from tests.training.test_trainer import assert_same, tensors, trainer
from torchpact_recipes.training import load_checkpoint, train_together
from torchpact_recipes.training.run_files import TrainingError
from torchpact_recipes.training.stopping import SIGNALS, Stopped, on_signals


def signalled(run, iteration, number=signal.SIGINT):
    """Have the run receive a signal in the midst of an iteration."""
    advance = run.learner.advance

    def interrupted():
        if run.learner.iteration + 1 == iteration:
            signal.raise_signal(number)
        advance()

    run.learner.advance = interrupted
    return run


def events(folder):
    kept = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [(event["kind"], event["iteration"]) for event in kept]


# of iterations 1…12 some are logged, validated or saved after, and the last is all of these
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("iteration", [1, 3, 4, 5, 6, 11])
def test_a_signal_keeps_what_was_learned(tmp_path, iteration, number):
    trainer(tmp_path / "straight").run()
    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(Stopped, match=f"stopped; kept: stopped at iteration {iteration}$"):
        signalled(trainer(tmp_path / "stopped"), iteration, number).run()
    assert [signal.getsignal(each) for each in SIGNALS] == before
    second = trainer(tmp_path / "stopped", resume=True)
    assert second.learner.iteration == iteration
    second.run()
    for name in ("last", "best"):
        assert_same(tensors(tmp_path / "straight", name), tensors(tmp_path / "stopped", name))
    assert events(tmp_path / "stopped") == events(tmp_path / "straight")


def test_after_the_last_iteration_it_is_told_all_the_same(tmp_path):
    """A sweep has more to train."""
    run = signalled(trainer(tmp_path / "stopped"), 12)
    with pytest.raises(Stopped, match=r"stopped; all had finished$"):
        run.run()
    assert run.results == trainer(tmp_path / "straight").run()
    assert json.loads((tmp_path / "stopped" / "run.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("number", SIGNALS)
def test_the_program_says_what_it_kept(tmp_path, number):
    command = [
        sys.executable,
        "-m",
        "torchpact",
        "train",
        "images",
        str(tmp_path / "run"),
        "--data",
        "sample",
    ]
    options = ["--preset", "smoke", "--network", "2", "--images", "8", "--batch", "2"]
    options += ["--iterations", "99999", "--validate-every", "99999"]
    program = subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    history = tmp_path / "run" / "history.jsonl"
    while not (history.exists() and history.read_text()):  # it has begun to learn
        assert program.poll() is None
        time.sleep(0.1)
    program.send_signal(number)
    _, said = program.communicate(timeout=60)
    assert program.returncode == 128 + number
    assert "stopping after this iteration; once more to stop at once" in said
    last = " ".join(said.split("torchpact: ")[-1].split())
    found = re.fullmatch(
        r"stopped; kept: run at iteration (\d+); the same command with --resume goes on", last
    )
    assert found is not None
    assert load_checkpoint(tmp_path / "run" / "last.safetensors").info["iteration"] == int(found[1])


def test_all_that_train_together_are_kept(tmp_path):
    runs = [trainer(tmp_path / name, config(seed=seed)) for seed, name in enumerate("ab")]
    signalled(runs[0], 5)
    with pytest.raises(Stopped, match=r"kept: a at iteration 5, b at iteration 5$"):
        train_together(runs)
    again = [trainer(tmp_path / name, config(seed=seed), resume=True) for seed, name in enumerate("ab")]
    assert [run.learner.iteration for run in again] == [5, 5]


def test_what_cannot_be_kept_is_told(tmp_path, monkeypatch):
    run = signalled(trainer(tmp_path / "a"), 5)

    def full():
        raise TrainingError("no space left")

    monkeypatch.setattr(run, "keep", full)
    with pytest.raises(Stopped, match=r"^stopped; not kept: a \(no space left\)$"):
        run.run()


def test_a_second_signal_acts_at_once():
    with pytest.raises(KeyboardInterrupt), on_signals() as stop:  # noqa: PT012 — which of the two, is the point
        assert not stop.asked
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        signal.raise_signal(signal.SIGINT)


def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with on_signals() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.asked
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_train_without():
    entered = []

    def work():
        with on_signals() as stop:
            entered.append(stop.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [False]
