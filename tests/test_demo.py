"""What the demo does to a network; tests/test_cli.py runs it as a whole."""

import pytest
import torch
from torch import nn

from tests.training.small import images
from tests.viz.networks import network
from torchpact import demo


@pytest.fixture(scope="module")
def trained():
    teacher = network(adaptive=False, units=2, image_size=12)
    config = demo.configure(0.1, 5, 0, teacher.config)
    model = demo.make_adaptive(teacher, config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    events: list[dict[str, object]] = []
    demo.train(model, teacher, images(count=40), config, events.append)
    return teacher, model, before, events


def test_it_starts_from_the_teachers_weights():
    teacher = network(adaptive=False, units=2)
    model = demo.make_adaptive(teacher, demo.configure(0.1, 1, 0, teacher.config))
    own = model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in teacher.state_dict().items())
    assert {name for name in own if name not in teacher.state_dict()} == {n for n in own if ".halting." in n}


def test_only_the_heads_learn_statistics_of_so_few_images(trained):
    _, model, before, _ = trained
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            moved = not torch.equal(module.running_mean, before[f"{name}.running_mean"])
            assert moved == (".halting." in name), name


def test_heads_and_units_learn_and_the_teacher_does_not(trained):
    teacher, model, before, events = trained
    for name, value in model.named_parameters():
        assert not torch.equal(value, before[name]), name
    fresh = network(adaptive=False, units=2, image_size=12)
    assert all(torch.equal(a, b) for a, b in zip(teacher.parameters(), fresh.parameters(), strict=True))
    assert [event["iteration"] for event in events] == [5]
    assert not model.training


def test_heads_stay_as_they_are_once_settled():
    assert demo.learning_rates(demo.SETTLED, 0.1)[0] == 0
    assert demo.learning_rates(1.0, 0.1) == (0, 0)
    assert demo.learning_rates(0.22, 0.1) == (demo.HEAD_RATE, 0.1)
