"""A distillation that is killed at any moment goes on to the same weights, bit by bit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import torchpact as tp
from tests.budget.test_distill import encoder, states
from torchpact.budget import training_state

CONFIG = tp.budget.DistillConfig(
    exit_updates=8, head_updates=6, check_every=2, save_every=3, lr=1e-3, patience=3
)
PROGRAM = """
import os, signal, sys
from pathlib import Path
import torch, torchpact as tp
from safetensors.torch import save_file
from tests.budget.test_distill_resume import CONFIG, encoder, states

folder, *moments = sys.argv[1:]

def killed(moment):
    stage, number = moment.split(":")
    if stage == "write":  # the n-th file is complete, but not in its place yet
        renames, rename = [], Path.replace
        def replace(self, target):
            renames.append(target)
            if len(renames) == int(number):
                os.kill(os.getpid(), signal.SIGKILL)
            return rename(self, target)
        Path.replace = replace
        return None
    return lambda p: p.stage == stage and p.done == int(number) and os.kill(os.getpid(), signal.SIGKILL)

for moment in moments:  # each in a process of its own, forked before torch has threads
    if os.fork() == 0:
        tp.distill(encoder(), states(), 0.7, config=CONFIG, checkpoint=folder, progress=killed(moment))
        os._exit(0)
    _, status = os.wait()
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (moment, status)
ada = tp.distill(encoder(), states(), 0.7, config=CONFIG, checkpoint=folder)
weights = {name: x.contiguous() for name, x in ada.state_dict().items()}
save_file(weights, folder + "/result.safetensors", {"bounds": str(ada.torchpact.runs[0].bounds)})
"""


def uninterrupted():
    ada = tp.distill(encoder(), states(), 0.7, config=CONFIG)
    return ada.state_dict(), ada.torchpact.runs[0].bounds


def killed_and_resumed(folder, *moments):
    """Return the weights of a training that was killed at some moments, one after the other."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *moments],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return load_file(folder / "result.safetensors")


@pytest.mark.skipif(not hasattr(os, "fork") or not hasattr(signal, "SIGKILL"), reason="needs fork")
@pytest.mark.parametrize(
    "moments",
    [
        ("exits:4", "write:1", "heads:2", "heads:5"),
        pytest.param(
            ("exits:1", "exits:2", "exits:7", "exits:8", "heads:1", "heads:6"), marks=pytest.mark.slow
        ),
        pytest.param(("write:1", "write:2", "write:2", "write:1"), marks=pytest.mark.slow),
    ],
)
def test_a_killed_training_goes_on_to_the_same_weights(tmp_path, moments):
    found = killed_and_resumed(tmp_path, *moments)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected, _ = uninterrupted()
    finally:
        torch.set_num_threads(threads)
    assert found.keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in found.items())
    assert not [*Path(tmp_path).glob(".*.tmp")]  # what a killed writer left


class Stop(Exception):
    """Ends a training."""


def stopped_at(stage, done):
    def stop(progress):
        if (progress.stage, progress.done) == (stage, done):
            raise Stop

    return stop


@pytest.mark.parametrize("moment", [("exits", 5), ("heads", 4)])
def test_a_training_that_raised_goes_on_without_what_it_has_done(tmp_path, moment):
    with pytest.raises(Stop):
        tp.distill(encoder(), states(), 0.7, config=CONFIG, checkpoint=tmp_path, progress=stopped_at(*moment))
    seen: list[tp.budget.Progress] = []
    ada = tp.distill(encoder(), states(), 0.7, config=CONFIG, checkpoint=tmp_path, progress=seen.append)
    assert (seen[0].stage, seen[0].done) == (moment[0], 4)
    weights, bounds = uninterrupted()
    assert all(torch.equal(x, weights[name]) for name, x in ada.state_dict().items())
    assert ada.torchpact.runs[0].bounds == bounds


def test_a_training_that_ended_is_not_done_again(tmp_path):
    tp.distill(encoder(), states(), 0.7, config=CONFIG, checkpoint=tmp_path)
    seen: list[tp.budget.Progress] = []
    ada = tp.distill(encoder(), states(), 0.7, config=CONFIG, checkpoint=tmp_path, progress=seen.append)
    assert {each.stage for each in seen} == {"calibration"}
    weights, bounds = uninterrupted()
    assert all(torch.equal(x, weights[name]) for name, x in ada.state_dict().items())
    assert ada.torchpact.runs[0].bounds == bounds


@pytest.mark.parametrize(
    "change",
    [
        {"batches": states(seed=1)},
        {"budget": 0.8},
        {"config": tp.budget.DistillConfig(**{**CONFIG.__dict__, "lr": 2e-3})},
        {"frozen": True},
    ],
)
def test_a_checkpoint_of_another_training_is_refused(tmp_path, change):
    given = {"batches": states(), "budget": 0.7, "config": CONFIG}
    tp.distill(encoder(), *list(given.values())[:2], config=CONFIG, checkpoint=tmp_path)
    before = (tmp_path / training_state.FILE).read_bytes()
    changed = {**given, **change}
    with pytest.raises(ValueError, match="expected a checkpoint of the same network, batches") as caught:
        tp.distill(encoder(), changed.pop("batches"), changed.pop("budget"), checkpoint=tmp_path, **changed)
    assert "\n" not in str(caught.value)
    assert (tmp_path / training_state.FILE).read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", bytes(64)])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, content):
    (tmp_path / training_state.FILE).write_bytes(content)
    with pytest.raises(ValueError, match="expected the state of a distillation in"):
        tp.distill(encoder(), states(), 0.7, config=CONFIG, checkpoint=tmp_path)
