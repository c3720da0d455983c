"""Networks that are trained by the same kernels: each learns what it would have learned alone."""

import json
import math
import signal
from copy import deepcopy

import pytest
import torch

from tests.training.small import config, images
from tests.training.test_trainer import TEST, assert_alike, assert_same, tensors, trainer
from torchpact.nn.conv_units import HaltingHead
from torchpact.nn.resnet import build
from torchpact_recipes.data import Images
from torchpact_recipes.training import Learner, evaluate, load_model, train_together
from torchpact_recipes.training import images as training_images
from torchpact_recipes.training.ensemble import images as joint
from torchpact_recipes.training.ensemble.images import ImageEnsemble, can_form_ensemble, form_ensembles
from torchpact_recipes.training.ensemble.layers import (
    ENSEMBLE_LAYERS,
    EnsembleConv2d,
    EnsembleHead,
    EnsembleNorm,
)
from torchpact_recipes.training.stopping import Stopped
from torchpact_recipes.training.variance import gradient_variance
from torchpact_recipes.training.variance import parameters_that_learn as learning

METHODS = ("plain", "relaxed", "act")


def learners(data, method="plain", count=3, teacher=None, **settings):
    prices = (0.05, 0.2, 0.0)
    configs = [config(method, seed=seed, tau=prices[seed], **settings) for seed in range(count)]
    return [Learner(each, data, teacher=deepcopy(teacher)) for each in configs]


def teacher(seed=0):
    torch.manual_seed(seed)
    return build(config("plain").network)


@pytest.fixture
def without_chance(monkeypatch):
    """Noise and crops that are the same for every image, whatever batch it is in."""

    def noise(like, generator=None):
        return torch.linspace(-2, 2, like[0].numel()).view_as(like[0]).expand_as(like)

    monkeypatch.setattr("torchpact.core.modes.logistic_noise", noise)
    monkeypatch.setattr(training_images, "augment", lambda images, pad: images.roll(pad, -1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("network", [{}, {"group": 3}])
@pytest.mark.parametrize("taught", [False, True])
def test_losses_reports_and_gradients_are_those_of_each(without_chance, method, network, taught):
    data = images(size=12)
    settings = {"label_smoothing": 0.1, "network": network if method != "plain" else {}}
    if taught:
        settings |= {"distill": 0.7, "teacher": teacher()}
    alone = learners(data, method, **settings)
    together = ImageEnsemble(learners(data, method, **settings))
    batch, labels = data.images[:24], data.labels[:24]
    loss, report = together.objective(batch, labels)
    losses, reports, gradients = [], [], []
    for one, part, truth in zip(alone, batch.chunk(3), labels.chunk(3), strict=True):
        own, found = one.objective(part, truth)
        losses.append(own)
        reports.append(found)
        gradients.append(
            dict(zip(learning(one), torch.autograd.grad(own, [*learning(one).values()]), strict=True))
        )
    torch.testing.assert_close(loss, torch.stack(losses).sum())
    torch.testing.assert_close(report.float(), torch.stack(reports).float())
    loss.backward()
    for name, stacked in together.model.named_parameters():
        assert stacked.grad is not None
        expected = torch.stack([own[name] for own in gradients])
        torch.testing.assert_close(stacked.grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without GPU")
def test_kernels_are_given_what_is_theirs(without_chance, monkeypatch):
    """Run in Triton's interpreter, with all digits; tests/test_gpu.py has them on a GPU."""
    pytest.importorskip("triton", reason="needs Triton")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float)
    data, found = images(size=8), []
    for kernels in (False, True):
        others = learners(data, "act", 2)
        for one in others:
            one.use_kernels = kernels
        together = ImageEnsemble(others)
        own = [
            m.kernels
            for m in together.model.modules()
            if isinstance(m, EnsembleNorm | EnsembleConv2d | EnsembleHead)
        ]
        assert all((each is not None) == kernels for each in own)
        # of the first four there is one at the kink of a ReLU, where either side is right
        loss, report = together.objective(data.images[4:8], data.labels[4:8])
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in together.model.named_parameters()}
        found.append({"loss": loss, "report": report} | gradients | dict(together.model.named_buffers()))
    assert_alike(*found, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_what_each_learns_is_what_it_learns_alone(without_chance, method):
    data = images(count=40)  # five batches an epoch
    settings = {"tau_ramp": 0.5, "nesterov": True, "lr": 0.02, "head_lr": 0.5}
    alone, others = learners(data, method, **settings), learners(data, method, **settings)
    together = ImageEnsemble(others)
    for _ in range(8):
        together.advance()
        for one in alone:
            one.advance()
    for one, other in zip(alone, others, strict=True):
        assert other.iteration == one.iteration == 8
        assert_alike(other.state(), one.state(), rtol=2e-3, atol=2e-4)
        found, metrics = other.metrics(), one.metrics()
        assert found.iterations == metrics.iterations == 8
        assert found.loss == pytest.approx(metrics.loss, rel=1e-3)
        assert found.accuracy == pytest.approx(metrics.accuracy, abs=0.02)
        assert found.expected_steps == pytest.approx(metrics.expected_steps, rel=1e-3)


def test_one_advances_all():
    others = learners(images())
    ImageEnsemble(others)
    others[1].advance()
    assert [one.iteration for one in others] == [1, 1, 1]


def advanced(learner, times):
    for _ in range(times):
        learner.advance()
    return learner


def test_states_that_are_loaded_later_are_gone_on_from(without_chance):
    """Within an epoch as elsewhere; with their batches, learning rate and price."""
    data = images(count=40)
    settings = {"lr": 0.02, "tau_ramp": 0.9, "milestones": (0.4,)}
    alone, others = learners(data, **settings), learners(data, **settings)
    for one in alone:
        advanced(one, 3)
    ImageEnsemble(others)
    others[0].advance()
    for one, other in zip(alone, others, strict=True):
        other.load_state(one.state(), one.iteration)
        advanced(one, 4)
    advanced(others[0], 4)
    for one, other in zip(alone, others, strict=True):
        assert other.iteration == 7
        assert_alike(other.state(), one.state(), rtol=2e-3, atol=2e-4)
        assert other.metrics().iterations == 4


def test_one_that_is_ahead_of_the_others_is_told():
    others = learners(images())
    ImageEnsemble(others)
    others[1].load_state(others[1].state(), 5)
    with pytest.raises(
        ValueError, match=r"expected all that have joined at the same iteration, got \[0, 5\]"
    ):
        others[0].advance()


def test_means_go_on_from_before_and_are_asked_of_each(without_chance):
    alone, others = learners(images()), learners(images())
    for one, other in zip(alone, others, strict=True):
        one.advance()
        other.advance()
        other.data = others[0].data
    together = ImageEnsemble(others)
    together.advance()
    for one, other in zip(alone, others, strict=True):
        found, expected = other.metrics(), advanced(one, 1).metrics()
        assert found.iterations == 2
        assert found.loss == pytest.approx(expected.loss, rel=1e-4)
    with pytest.raises(TypeError, match="expected one of the joint learners"):
        together.metrics()


def test_a_network_that_fails_leaves_the_others_as_they_are():
    data = images()
    broken, sound = learners(data, "act"), learners(data, "act")
    broken[1].model.stem.weight.data.fill_(math.nan)
    for group in (broken, sound):
        advanced(ImageEnsemble(group), 3)
    assert math.isnan(broken[1].metrics().loss)
    for number in (0, 2):
        assert_same(broken[number].state(), sound[number].state())


def test_the_variance_of_one_leaves_all_as_they_were():
    data = images()
    others, same = learners(data, "relaxed"), learners(data, "relaxed")
    for group, measured in ((others, True), (same, False)):
        ImageEnsemble(group)
        advanced(group[0], 2)
        if measured:
            assert gradient_variance(group[1], 2)["latents"] > 0
        advanced(group[0], 2)
    for one, other in zip(others, same, strict=True):
        assert_same(one.state(), other.state())


def test_runs_are_validated_saved_and_resumed_one_by_one(tmp_path):
    data = images()
    runs = [trainer(tmp_path / name, config(seed=seed)) for seed, name in enumerate("ab")]
    for run in runs:
        run.learner.data = data
    assert len(form_ensembles([run.learner for run in runs])) == 1
    train_together(runs)
    for run, name in zip(runs, "ab", strict=True):
        assert_same(tensors(tmp_path / name), run.learner.state())
        model, _ = load_model(tmp_path / name / "last.safetensors")
        assert json.loads((tmp_path / name / "run.json").read_text())["joint"] == 2
        found = evaluate(model, TEST, "thresholded")
        assert found.accuracy == run.results["thresholded"]["accuracy"]
        again = trainer(tmp_path / name, run.config, resume=True)
        assert again.done
    one, two = (tensors(tmp_path / name) for name in "ab")
    assert any(not torch.equal(one[key], two[key]) for key in one)


def test_runs_that_are_stopped_have_had_their_turn_once(tmp_path, monkeypatch):
    """One that advances has the other advance: nobody goes further than the iteration it was stopped in."""
    data = images()
    runs = [trainer(tmp_path / name, config(seed=seed)) for seed, name in enumerate("ab")]
    for run in runs:
        run.learner.data = data
    (together,) = form_ensembles([run.learner for run in runs])
    real = together.step

    def stopped_in_the_first():
        if together.iteration == 0:
            signal.raise_signal(signal.SIGINT)
        real()

    monkeypatch.setattr(together, "step", stopped_in_the_first)
    with pytest.raises(Stopped, match="stopped; kept: a at iteration 1, b at iteration 1"):
        train_together(runs)
    again = [trainer(tmp_path / name, run.config, resume=True) for name, run in zip("ab", runs, strict=True)]
    assert [run.learner.iteration for run in again] == [1, 1]
    for run, other in zip(runs, again, strict=True):
        assert_same(run.learner.state(), other.learner.state())


def test_those_of_one_kind_join():
    data = images()
    other = Images(data.images.clone(), data.labels)
    groups = [
        learners(data, "plain", 2),
        learners(data, "relaxed", 3),
        learners(data, "relaxed", 1, batch=4),
        learners(other, "relaxed", 2),
        learners(data, "reinforce", 2),
    ]
    groups += [learners(data, "plain", 2, teacher(seed), distill=0.5) for seed in range(2)]
    joined = form_ensembles([one for group in groups for one in group])
    assert [each.learners for each in joined] == [groups[k] for k in (0, 1, 3, 5, 6)]
    assert all(one.ensemble is None for group in (groups[2], groups[4]) for one in group)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("reinforce", {}),
        ("random", {}),
        ("relaxed", {"network": {"per": "image"}}),
        ("relaxed", {"network": {"halting_norm": True}}),
        ("relaxed", {"optimizer": "adam"}),
        ("relaxed", {"deterministic": True}),
        ("relaxed", {"variance_samples": 2}),
    ],
)
def test_what_cannot_be_joined_is_told(method, settings):
    others = learners(images(), method, 2, **settings)
    assert not can_form_ensemble(others)
    with pytest.raises(ValueError, match="expected learners of one kind"):
        ImageEnsemble(others)


def test_teachers_that_know_the_same_are_compared_once_and_one_is_kept(monkeypatch):
    def counted(one, other):
        compared.append(one is not other)
        return same(one, other)

    compared: list[bool] = []
    same = joint._same
    monkeypatch.setattr(joint, "_same", counted)
    others = learners(images(), teacher=teacher(), distill=0.7)
    first = others[0].teacher
    form_ensembles(others)
    assert all(one.teacher is first for one in others)
    assert sum(compared) == 2


def test_those_that_have_joined_or_are_elsewhere_do_not_join_again():
    data = images()
    one, two, three = learners(data)
    one.advance()
    assert not can_form_ensemble([one, two])
    ImageEnsemble([two, three])
    assert not can_form_ensemble([two, three])


def test_a_copy_that_would_not_learn_is_refused():
    others = learners(images())
    ImageEnsemble(others)
    with pytest.raises(TypeError, match="expected learners to be copied before they join"):
        deepcopy(others[0])
    model = deepcopy(others[0].model)
    others[0].advance()
    assert not torch.equal(model.stem.weight, others[0].model.stem.weight)


def test_compiled_and_others_do_not_join():
    data = images()
    both = [Learner(config(seed=seed), data, compile=bool(seed)) for seed in range(2)]
    assert not can_form_ensemble(both)


def test_stacked_tensors_lie_as_they_did():
    parts = [torch.randn(4, 2, 3, 3).to(memory_format=torch.channels_last) for _ in range(3)]
    stacked = joint._stack(parts)
    assert torch.equal(stacked, torch.stack(parts))
    assert stacked[1].stride() == parts[1].stride()


def test_every_module_with_weights_has_a_joint_one():
    model = Learner(config(), images()).model
    with_weights = {type(m) for m in model.modules() if next(m.parameters(recurse=False), None) is not None}
    assert with_weights < set(ENSEMBLE_LAYERS)
    assert HaltingHead in ENSEMBLE_LAYERS
