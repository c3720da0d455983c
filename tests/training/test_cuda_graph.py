"""What can be seen on a CPU of iterations that a GPU captures: they wait for no value, and leave no trace."""

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training import small
from tests.training.test_sequence import METHODS, config, network
from tests.training.test_sequence_trainer import TEXTS, settings
from tests.training.test_trainer import assert_same
from torchpact.core.baseline import EMABaseline
from torchpact_recipes.training import Learner, SequenceLearner
from torchpact_recipes.training.ensemble.images import ImageEnsemble
from torchpact_recipes.training.ensemble.sequences import SequenceEnsemble
from torchpact_recipes.training.sequence_config import make_task
from torchpact_recipes.training.sequence_loss import sequence_loss


class Apart(TorchDispatchMode):
    """Refuses to make tensors of numbers, and to take them from one device to another."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        moved = "copy" in str(func) and result.device != args[-1 if "copy_" in str(func) else 0].device
        if moved or "lift_fresh" in str(func):
            raise AssertionError(f"{func} in an iteration to capture")
        return result


def test_tensors_that_move_are_noticed():
    with pytest.raises(AssertionError, match="lift_fresh"), Apart():
        torch.tensor(0.5)
    with pytest.raises(AssertionError, match="copy"), Apart():
        torch.ones(3).to("meta")


@pytest.mark.parametrize(
    ("name", "method"),
    [*itertools.product(["parity", "addition", "sort", "enwik8"], METHODS[:-1]), ("parity", "ponder")],
)
def test_an_iteration_waits_for_no_value(monkeypatch, name, method):
    """On the device "meta" there are none to wait for."""
    chosen = settings(name, method, cell="lstm")
    source = SequenceLearner(chosen, text=TEXTS.train)
    source.next_batch()
    assert source.batch is not None
    inputs, targets, lengths = source.batch
    learner = SequenceLearner(chosen, "meta", TEXTS.train)
    learner.batch = inputs.to("meta"), targets.to("meta"), None if lengths is None else lengths.to("meta")
    learner.capture = True
    # on the device for a captured one, but not on this
    monkeypatch.setattr(learner.optimizer, "step", lambda: None)
    with Apart():
        learner.step()
    assert all(p.grad is not None for p in learner.model.parameters())


class Recorded:
    """As ``CapturedStep``, but what it replays is run again."""

    recorded = False
    on_stream = nullcontext

    def record(self, function, release, warm_up=3):
        for _ in range(warm_up + 1):
            function()
        release()
        self.recorded, self.replay = True, function


def of_images():
    data = small.images()
    return [Learner(small.config("act", seed=seed), data) for seed in range(2)]


def of_text():
    chosen = [settings("enwik8", "act", cell="lstm", seed=seed) for seed in range(2)]
    return [SequenceLearner(each, text=TEXTS.train) for each in chosen]


@pytest.mark.parametrize(("make", "joint"), [(of_images, ImageEnsemble), (of_text, SequenceEnsemble)])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("begun", [0, 2])
def test_recording_leaves_everything_as_it_was(monkeypatch, make, joint, joined, begun):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    found = []
    for recorded in (False, True):
        learners = make()
        for one in learners * begun:
            one.advance()
        moving = [joint(learners)] if joined else learners
        for one in moving:
            one.captured = Recorded() if recorded else None
            one.advance()
            one.advance()
            assert one.captured is None or one.captured.recorded
        found.append([(one.state(), one.metrics()) for one in learners])
    for (state, metrics), (expected, wanted) in zip(*found, strict=True):
        assert_same(state, expected)
        assert metrics == wanted


@pytest.mark.parametrize("method", METHODS[:-1])
@pytest.mark.parametrize("name", ["logic", "addition", "sort"])
def test_padding_that_is_computed_counts_for_nothing(monkeypatch, name, method):
    """Without noise, which differs with the shape, both ways give one loss, report and gradient."""
    monkeypatch.setattr(
        "torchpact.core.modes.logistic_noise", lambda like, generator=None: torch.zeros_like(like)
    )
    torch.manual_seed(0)
    chosen = config(name, method, tau=0.3, halting_bias=-0.5)
    model = network(chosen).double()
    batch = make_task(name, chosen.sizes).sample(30)
    assert batch.lengths.unique().numel() > 1
    found = []
    for packed in (True, False):
        model.zero_grad()
        outcome = sequence_loss(
            model,
            batch.inputs.double(),
            batch.targets,
            chosen,
            lengths=batch.lengths,
            baseline=EMABaseline(),
            packed=packed,
        )
        outcome.loss.backward()
        found.append([outcome.loss, outcome.report, *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
