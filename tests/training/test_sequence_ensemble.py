"""Networks that read a text by the same kernels: each learns what it would have learned alone."""

import json
import math
from contextlib import nullcontext

import pytest
import torch

from tests.training.test_cuda_graph import Apart
from tests.training.test_ensemble_lstm import known_noise  # noqa: F401 (a fixture)
from tests.training.test_sequence_trainer import TEXTS, settings
from tests.training.test_trainer import assert_alike, assert_same, tensors
from torchpact_recipes.experiments import Archive, make
from torchpact_recipes.experiments.enwik8 import runs as enwik8_runs
from torchpact_recipes.experiments.runs import SCALES
from torchpact_recipes.training import (
    SequenceLearner,
    SequenceTrainer,
    Texts,
    evaluate_on_text,
    load_sequence_model,
    train_together,
)
from torchpact_recipes.training.ensemble import sequences as sequence_ensemble
from torchpact_recipes.training.ensemble.sequences import (
    SequenceEnsemble,
    can_form_sequence_ensemble,
    form_sequence_ensembles,
    tf32_products,
)

METHODS = ("plain", "repeat", "relaxed", "act")
FREE = (0.0, 0.5, 0.0)
PRICES = (0.05, 0.4, 0.0)


def lstm(method="relaxed", **others):
    chosen = {"cell": "lstm", "lr": 0.01, "milestones": (0.6,), "clip_norm": 0.1} | others
    return settings("enwik8", method, **chosen)


def learners(method="relaxed", count=3, device="cpu", **others):
    text = TEXTS.train.to(device)
    return [
        SequenceLearner(lstm(method, seed=n, tau=PRICES[n], free=FREE[n], **others), device, text)
        for n in range(count)
    ]


@pytest.mark.parametrize("method", METHODS)
def test_what_each_learns_is_what_it_learns_alone(known_noise, method):  # noqa: F811
    """Over all windows and back to the first, where steps cease to be free, and past a milestone."""
    alone, others = learners(method), learners(method)
    together = SequenceEnsemble(others)
    for _ in range(9):
        together.advance()
        for one in alone:
            one.advance()
    for one, other in zip(alone, others, strict=True):
        assert other.iteration == one.iteration == 9
        # Adam divides by what may be little more than rounding
        assert_alike(other.state(), one.state(), rtol=2e-3, atol=2e-4)
        found, metrics = other.metrics(), one.metrics()
        assert found.iterations == metrics.iterations == 9
        assert found.loss == pytest.approx(metrics.loss, rel=1e-4)
        assert found.nll == pytest.approx(metrics.nll, rel=1e-4)
        assert found.accuracy == pytest.approx(metrics.accuracy, abs=0.01)
        assert found.expected_steps == pytest.approx(metrics.expected_steps, rel=1e-4)


def test_one_advances_all():
    others = learners()
    SequenceEnsemble(others)
    others[1].advance()
    assert [one.iteration for one in others] == [1, 1, 1]


def test_states_that_are_loaded_later_are_gone_on_from():
    straight, others = learners("act"), learners("act")
    for group in (straight, others):
        SequenceEnsemble(group)
        for _ in range(3):
            group[0].advance()
    before = [{name: value.clone() for name, value in one.state().items()} for one in others]
    others[0].advance()
    for one, state in zip(others, before, strict=True):
        one.load_state(state, 3)
    others[2].advance()
    straight[0].advance()
    for one, other in zip(straight, others, strict=True):
        assert other.iteration == 4
        assert_same(one.state(), other.state())


def test_a_precision_that_the_program_chose_is_left_to_it():
    """Which torch does not let one ask for by the older name then."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with tf32_products():
            assert matmul.fp32_precision == "tf32"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
    assert torch.get_float32_matmul_precision() == "highest"


def trainers(folder, method="act", device="cpu", **options):
    texts = Texts(TEXTS.train.to(device), TEXTS.valid.to(device))
    return [
        SequenceTrainer(lstm(method, seed=n, tau=PRICES[n]), folder / name, device, texts, **options)
        for n, name in enumerate("abc")
    ]


def go_on(runs, until):
    """Train those that have joined at least so far."""
    while runs[0].learner.iteration < until:
        runs[0].learner.advance()
        for run in runs:
            run.after_iteration()


def test_runs_are_validated_saved_and_resumed_one_by_one(tmp_path):
    """And go on together as they would have without the break; ACT draws nothing."""
    for folder, broken in ((tmp_path / "straight", False), (tmp_path / "broken", True)):
        runs = trainers(folder)
        assert len(form_sequence_ensembles([run.learner for run in runs])) == 1
        if broken:
            go_on(runs, 8)
            runs = trainers(folder, resume=True)
            assert [run.learner.iteration for run in runs] == [6, 6, 6]
            assert len(form_sequence_ensembles([run.learner for run in runs])) == 1
        train_together(runs)
        for run in runs:
            saved = tensors(run.files.folder)
            assert_same(saved, run.learner.state())
            record = json.loads(run.files.run.read_text())
            assert record["status"] == "finished"
            model, stored = load_sequence_model(run.files.last)
            assert stored == run.config
            found = evaluate_on_text(model, TEXTS.valid[: stored.examples + 1], "thresholded")
            assert found.nll == pytest.approx(record["results"]["thresholded"]["nll"], rel=1e-6)
    for name in "abc":
        assert_same(tensors(tmp_path / "straight" / name), tensors(tmp_path / "broken" / name))
    one, two = (tensors(tmp_path / "straight" / name) for name in "ab")
    assert any(not torch.equal(one[key], two[key]) for key in one)


def test_a_run_begun_together_can_go_on_alone(tmp_path):
    runs = trainers(tmp_path)
    form_sequence_ensembles([run.learner for run in runs])
    go_on(runs, 6)
    alone = trainers(tmp_path, resume=True)[1]
    assert_same(alone.learner.state(), runs[1].learner.state())
    for _ in range(3):
        alone.learner.advance()
        runs[1].learner.advance()
    assert_alike(alone.learner.state(), runs[1].learner.state(), rtol=2e-3, atol=2e-4)


def test_those_of_one_kind_join():
    other = TEXTS.train.clone()
    groups = [
        learners("plain", 2),
        learners("relaxed", 3),
        learners("relaxed", 1, batch=4),
        [SequenceLearner(lstm("relaxed"), text=other)],
        learners("reinforce", 2),
        learners("act", 2, cell="gru"),
        [SequenceLearner(settings("parity", "act", cell="lstm"))],
    ]
    joined = form_sequence_ensembles([one for group in groups for one in group])
    assert [each.learners for each in joined] == groups[:4]
    assert all(one.ensemble is None for group in groups[4:] for one in group)


def test_those_at_another_iteration_or_joined_already_do_not_join():
    one, two, three = learners()
    one.advance()
    assert not can_form_sequence_ensemble([one, two])
    SequenceEnsemble([two, three])
    assert not can_form_sequence_ensemble([two])
    with pytest.raises(ValueError, match="expected LSTMs of one kind that read one text"):
        SequenceEnsemble([two, three])


def test_a_network_that_fails_leaves_the_others_as_they_are():
    broken, sound = learners("act"), learners("act")
    with torch.no_grad():
        broken[1].model.readout.bias.fill_(float("nan"))
    for group in (broken, sound):
        together = SequenceEnsemble(group)
        for _ in range(3):
            together.advance()
    assert math.isnan(broken[1].metrics().loss)
    for number in (0, 2):
        assert_same(broken[number].state(), sound[number].state())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_kernels_train_as_a_cpu_does(known_noise, monkeypatch, method, count):  # noqa: F811
    """With all digits in products."""
    monkeypatch.setattr(sequence_ensemble, "tf32_products", nullcontext)
    here, there = learners(method, count), learners(method, count, "cuda")
    SequenceEnsemble(here)
    form_sequence_ensembles(there)
    for _ in range(6):
        here[0].advance()
        there[0].advance()
    for one, other in zip(here, there, strict=True):
        other.wait()
        assert other.iteration == 6
        assert other.metrics().loss == pytest.approx(one.metrics().loss, rel=1e-3)
        found = {name: value.cpu() for name, value in other.state().items()}
        # Adam divides by what may be little more than rounding
        assert_alike(found, one.state(), rtol=0.1, atol=5e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_runs_on_a_gpu_are_resumed_one_by_one(tmp_path):
    runs = trainers(tmp_path, device="cuda")
    form_sequence_ensembles([run.learner for run in runs])
    go_on(runs, 8)
    runs = trainers(tmp_path, device="cuda", resume=True)
    assert [run.learner.iteration for run in runs] == [6, 6, 6]
    before = [{name: value.clone() for name, value in run.learner.state().items()} for run in runs]
    form_sequence_ensembles([run.learner for run in runs])
    for run, state in zip(runs, before, strict=True):
        assert_same(run.learner.state(), state)
    train_together(runs)
    assert all(run.done and run.results for run in runs)


@pytest.mark.parametrize("method", METHODS)
def test_an_iteration_waits_for_no_value(monkeypatch, method):
    """On the device "meta" there are none to wait for."""
    others = learners(method, device="meta")
    together = SequenceEnsemble(others)
    # on the device for a captured one, but not on this
    monkeypatch.setattr(together.optimizer, "step", lambda: None)
    with Apart():
        together.step()
    assert all(weight.grad is not None for weight in together.weights.values())


def test_the_experiment_is_five_groups():
    runs = enwik8_runs(SCALES["fast"], [0, 1, 2])
    kinds = [repr(run.kind) for run in runs]
    assert sorted(kinds.count(kind) for kind in set(kinds)) == [3, 3, 3, 9, 9]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_sweep_on_a_gpu_is_made_in_groups(tmp_path, monkeypatch):
    made: list[int] = []
    real = sequence_ensemble.SequenceEnsemble.__init__

    def spy(self, learners):
        made.append(len(learners))
        real(self, learners)

    monkeypatch.setattr(sequence_ensemble.SequenceEnsemble, "__init__", spy)
    texts = Texts(TEXTS.train.cuda(), TEXTS.valid.cuda())
    archive = Archive(tmp_path / "results", tmp_path / "work")
    runs = enwik8_runs(SCALES["smoke"], [0, 1])
    assert make([runs], archive, texts=texts, device=torch.device("cuda"), together=99) == []
    assert sorted(made) == [2, 2, 4, 4]
    assert all(archive.record(run) for run in runs)
