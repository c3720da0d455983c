"""Evaluation of a network on a data set."""

import pytest
import torch

import torchpact as tp
from tests.training.small import images
from torchpact.models import ResNetConfig
from torchpact_recipes.data import standardize
from torchpact_recipes.training import evaluate
from torchpact_recipes.training.random_halting import halt_at_random

TEST = images("test", 40)


@pytest.mark.parametrize("mode", ["relaxed", "discrete", "thresholded", "act"])
def test_evaluation_equals_one_pass_over_everything(mode):
    model = tp.models.build(ResNetConfig(units=2, image_size=12))
    for block in model.blocks:
        for head in block.halting:  # type: ignore[union-attr]
            torch.nn.init.zeros_(head.conv.weight)
            torch.nn.init.zeros_(head.linear.weight)
            torch.nn.init.constant_(head.linear.bias, 60.0)
    seen: list[int] = []
    measured = evaluate(model, TEST, mode, batch=7, seen=seen.append)
    assert seen == [7] * 5 + [5]
    x = standardize(TEST.images)
    model.eval()
    with tp.use_mode(model, mode), torch.no_grad():
        logits, _ = model(x)
    assert measured.accuracy == (logits.argmax(1) == TEST.labels).double().mean().item()
    assert measured.nll == pytest.approx(
        torch.nn.functional.cross_entropy(logits, TEST.labels).item(), rel=1e-5
    )
    assert measured.steps == pytest.approx([1.0, 1.0, 1.0])
    with tp.use_mode(model, mode):
        assert measured.flops == tp.count_flops(model, x).mean.item()
    assert measured.cost == pytest.approx([2.0 if mode == "act" else 1.0] * 3)
    assert measured.objective(0.1) == pytest.approx(measured.nll + (0.6 if mode == "act" else 0.3))


def test_undecided_decisions_are_counted_where_they_are_drawn():
    model = tp.models.ResNet(ResNetConfig(units=3, image_size=12)).eval()
    for h, share in ((0.5, 1.0), (0.05, 0.0), (0.95, 0.0)):
        halt_at_random(model, [sum((1 - h) ** k for k in range(3))] * 3)
        assert evaluate(model, TEST, "discrete").undecided == [share] * 3
    assert evaluate(model, TEST, "thresholded").undecided is None


def test_evaluation_leaves_mode_and_training_flag_alone():
    model = tp.models.build(ResNetConfig(units=2, image_size=12), mode="act").train()
    evaluate(model, TEST, "thresholded")
    assert model.training
    assert all(block.mode == tp.ACT() for block in model.blocks)


def test_flops_of_blocks_have_the_spread_that_images_have():
    model = tp.models.build(ResNetConfig(units=3, image_size=12)).eval()
    halt_at_random(model, [1.5, 2.0, 2.5])
    measured = evaluate(model, TEST, "discrete", batch=len(TEST))
    torch.manual_seed(0)
    with tp.use_mode(model, "discrete"):
        blocks = tp.count_flops(model, standardize(TEST.images)).blocks.double()
    assert measured.block_flops == pytest.approx(blocks.mean(0).tolist())
    assert measured.block_flops_std == pytest.approx(blocks.std(0, correction=0).tolist())
    assert min(measured.block_flops_std or [0]) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "expected batch to be an integer of at least 1, got 0"),
        ({"batch": -5}, "expected batch to be an integer of at least 1, got -5"),
        ({"precision": "fp8"}, "expected precision to be one of fp32, bf16; got 'fp8'"),
    ],
)
def test_evaluation_refuses_what_it_cannot_do(options, message):
    with pytest.raises(ValueError, match=message):
        evaluate(tp.models.build(ResNetConfig(units=2, image_size=12)), TEST, "act", **options)
