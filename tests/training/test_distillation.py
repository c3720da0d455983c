"""Learning from a teacher: what it adds to the loss, and what it leaves alone."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from tests.engines.networks import relative
from tests.engines.onchip.emulation import engine, needs_compiler
from tests.training.small import METHODS, burst, config, images
from tests.training.test_trainer import assert_same, tensors, trainer
from torchpact.core.objective import map_loss
from torchpact.engines import ENGINES, Unsupported
from torchpact.nn.resnet import build
from torchpact_recipes.data import standardize
from torchpact_recipes.training import Learner, TrainingError, distillation
from torchpact_recipes.training.distillation import divergence


def teacher(seed=5):
    torch.manual_seed(seed)
    model = build(config("plain").network)
    model(standardize(images().images))  # running statistics of its own
    return model


def test_divergence_is_that_of_softened_distributions():
    own, given, temperature = torch.randn(6, 10), torch.randn(6, 10), 3.0
    p, q = ((x / temperature).softmax(1) for x in (given, own))
    expected = (p * (p / q).log()).sum(1) * temperature**2
    torch.testing.assert_close(divergence(own, given, temperature), expected)


@pytest.mark.parametrize("method", ["plain", "relaxed", "act"])
@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_the_loss_is_that_of_labels_and_teacher(method, weight):
    data, known = images(), teacher()
    learner = Learner(config(method, distill=weight, distill_temperature=2.0), data, teacher=known)
    batch, labels = learner.batch()
    torch.manual_seed(0)
    loss, report = learner.objective(batch, labels)
    torch.manual_seed(0)
    logits, ponders = learner.model(standardize(batch))
    by_labels = F.cross_entropy(logits, labels, reduction="none")
    with torch.no_grad():
        by_teacher = divergence(logits, known.eval()(standardize(batch))[0], 2.0)
    expected = map_loss((1 - weight) * by_labels + weight * by_teacher, ponders, learner.config.tau)
    torch.testing.assert_close(loss, expected)
    # what is reported beside it is the likelihood of the labels
    torch.testing.assert_close(report[1].float(), by_labels.mean())


def test_a_student_that_is_its_teacher_has_nothing_to_learn():
    known = teacher()
    learner = Learner(config("plain", distill=1.0), images(), teacher=known)
    learner.model.load_state_dict(known.state_dict())
    learner.model.eval()
    loss, _ = learner.objective(*learner.batch())
    assert loss.item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_the_teacher_does_not_change_and_is_not_saved(method):
    known = teacher()
    before = {name: value.clone() for name, value in known.state_dict().items()}
    learner = Learner(config(method, distill=0.5), images(), teacher=known)
    alone = Learner(config(method), images())
    for one in (learner, alone):
        for _ in range(3):
            one.advance()
    assert_same(known.state_dict(), before)
    assert not known.training
    assert learner.state().keys() == alone.state().keys()
    assert any(not torch.equal(value, alone.state()[name]) for name, value in learner.state().items())


def test_it_needs_a_plain_teacher_where_and_only_where_it_counts():
    with pytest.raises(ValueError, match=r"expected a teacher where distill is not 0, .* it is 0\.5$"):
        Learner(config(distill=0.5), images())
    with pytest.raises(ValueError, match=r"and only there; it is 0$"):
        Learner(config(), images(), teacher=teacher())
    with pytest.raises(ValueError, match="expected a plain network as teacher, got an adaptive one"):
        Learner(config(distill=0.5), images(), teacher=build(config().network, "thresholded"))


def test_the_network_it_starts_from_teaches_unless_there_is_another(tmp_path):
    trainer(tmp_path / "small", config("plain")).run()
    trainer(tmp_path / "other", config("plain", seed=1)).run()
    start, other = (tmp_path / name / "last.safetensors" for name in ("small", "other"))
    for folder, options in (("own", {}), ("another", {"teacher": other})):
        trainer(tmp_path / folder, config(distill=0.5), initial=start, **options).run()
        record = json.loads((tmp_path / folder / "run.json").read_text())
        wanted = "other" if options else "small"
        assert (record["warm_start"], record["teacher"]) == (
            "small/last.safetensors",
            f"{wanted}/last.safetensors",
        )
    one, two = (tensors(tmp_path / folder) for folder in ("own", "another"))
    assert any(not torch.equal(one[name], two[name]) for name in one)


def test_resuming_with_a_teacher_gives_the_same_weights(tmp_path):
    trainer(tmp_path / "plain", config("plain")).run()
    given = {"initial": tmp_path / "plain" / "last.safetensors"}
    taught = config(distill=0.5)
    trainer(tmp_path / "straight", taught, **given).run()
    burst(trainer(tmp_path / "broken", taught, **given))
    second = trainer(tmp_path / "broken", taught, resume=True, **given)
    assert second.learner.iteration == 3
    second.run()
    assert_same(tensors(tmp_path / "straight"), tensors(tmp_path / "broken"))
    trainer(tmp_path / "other", config("plain", seed=1)).run()
    with pytest.raises(
        TrainingError, match=r"expected the teacher that it began with, plain/last.*; got other/"
    ):
        trainer(
            tmp_path / "broken", taught, resume=True, teacher=tmp_path / "other" / "last.safetensors", **given
        )


@needs_compiler
def test_a_teacher_on_the_chip_says_what_its_layers_say(monkeypatch):
    chip = SimpleNamespace(build=lambda spec, call: engine(spec.module))
    monkeypatch.setitem(ENGINES, "onchip", chip)
    known, shown = teacher(), images().images[:3]
    on_chip = distillation.Teacher(known, torch.device("cpu"), "bf16")
    assert on_chip.on_chip is not None
    with torch.no_grad():
        exact = known(standardize(shown))[0]
    assert relative(on_chip(shown).float(), exact) < 1e-2
    assert on_chip.on_chip is not None
    assert distillation.Teacher(known, torch.device("cpu"), "fp32").on_chip is None


@pytest.mark.parametrize("compile", [False, True])
def test_a_teacher_for_which_there_is_no_room_is_asked_by_layers(monkeypatch, compile):
    def refuse(*given):
        raise Unsupported("onchip: expected fewer images")

    def kept(function):
        asked.append(function)
        return function

    asked: list[object] = []
    monkeypatch.setattr(distillation, "compiled", kept)
    chip = SimpleNamespace(build=lambda spec, call: refuse)  # it is built, but not for so many
    monkeypatch.setitem(ENGINES, "onchip", chip)
    shown, device = images().images[:3], torch.device("cpu")
    known = distillation.Teacher(teacher(), device, "bf16", compile)
    said = known(shown)
    assert known.on_chip is None
    assert torch.equal(said, known.by_layers(shown))
    assert torch.equal(known(shown), said)
    assert len(asked) == compile
    monkeypatch.setitem(ENGINES, "onchip", SimpleNamespace(build=refuse))
    assert distillation.Teacher(teacher(), device, "bf16").on_chip is None
