"""Networks whose positions halt at random."""

import pytest
import torch

from tests.training.small import config, images
from torchpact.models import psact_resnet32, resnet32, warm_start
from torchpact_recipes.training import Trainer
from torchpact_recipes.training.random_halting import halt_at_random, halting_probability


@pytest.mark.parametrize("max_steps", [2, 5, 18])
@pytest.mark.parametrize("share", [0.01, 0.4, 0.99])
def test_the_chance_makes_the_mean(max_steps, share):
    mean = 1 + share * (max_steps - 1)
    h = halting_probability(mean, max_steps)
    steps = sum(step * h * (1 - h) ** (step - 1) for step in range(1, max_steps))
    assert steps + max_steps * (1 - h) ** (max_steps - 1) == pytest.approx(mean)


@pytest.mark.parametrize("mean", [1, 5, 0.5, float("nan")])
def test_a_mean_that_no_chance_makes_is_refused(mean):
    with pytest.raises(ValueError, match="mean_steps"):
        halting_probability(mean, 5)


def test_as_many_steps_are_drawn_whatever_the_image():
    model = psact_resnet32(mode="discrete").eval()
    wanted = (1.5, 3.0, 4.5)
    halt_at_random(model, wanted)
    with torch.no_grad():
        _, ponders = model(torch.randn(8, 3, 32, 32))
    for ponder, mean, tolerance in zip(ponders, wanted, (0.05, 0.1, 0.2), strict=True):
        assert ponder.steps.double().mean().item() == pytest.approx(mean, abs=tolerance)
        first = ponder.probs[0]
        assert torch.equal(first, first.flatten()[0].expand_as(first))


def test_heads_stay_as_they_are_while_units_learn(tmp_path):
    data = images()
    trainer = Trainer(config("random"), tmp_path, data, images("test"))
    before = {name: value.clone() for name, value in trainer.learner.model.named_parameters()}
    results = trainer.run()
    assert results.keys() == {"discrete"}
    for name, value in trainer.learner.model.named_parameters():
        assert torch.equal(value, before[name]) == (".halting." in name), name


def test_a_warm_start_leaves_the_lot_as_it_is():
    model = psact_resnet32()
    halt_at_random(model, (2.0, 3.0, 4.0))
    bias = model.get_parameter("blocks.0.halting.0.linear.bias")
    before = bias.clone()
    warm_start(model, resnet32())
    assert torch.equal(bias, before)


@pytest.mark.parametrize(
    ("method", "steps", "message"),
    [
        ("random", (2.0, 2.0), "expected 3 random_steps for the method random, got 2"),
        ("relaxed", (1.5, 1.5, 1.5), "expected 0 random_steps for the method relaxed, got 3"),
        ("random", (1.5, 1.5, 2.0), "random_steps"),
    ],
)
def test_bad_settings_get_one_line(method, steps, message):
    with pytest.raises(ValueError, match=message):
        config(method, random_steps=steps)
