"""Objectives and their gradients against exact enumeration over every z."""

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.problems import SIGMAS, Stack, assert_mean_is

TAU = 0.2


def gradients(model, mode, loss, repeats=100, batch=1000, seed=0):
    """Gradients of `loss(nll, ponders)` for `repeats` independent batches, one a row."""
    torch.manual_seed(seed)
    with tp.use_mode(model, mode):
        return torch.stack([model.gradient(loss(*model.copies(batch))) for _ in range(repeats)])


@pytest.mark.parametrize("max_steps", [1, 2, 3, 5])
def test_discrete_decisions_follow_the_exact_distribution(max_steps):
    model = Stack(max_steps=max_steps)
    torch.manual_seed(0)
    with tp.use_mode(model, "discrete"):
        _, (ponder,) = model.copies(100_000)
    for (z,), probability, _, _ in model.paths():
        assert_mean_is((ponder.steps == z).double(), probability.detach())


def test_decisions_of_two_stacked_blocks_follow_the_exact_joint_distribution():
    model = Stack(blocks=2)
    torch.manual_seed(0)
    with tp.use_mode(model, "discrete"):
        _, (one, two) = model.copies(100_000)
    paths = model.paths()
    assert len(paths) == 9
    assert sum(p.item() for _, p, _, _ in paths) == pytest.approx(1)
    for (z1, z2), probability, _, _ in paths:
        assert_mean_is(((one.steps == z1) & (two.steps == z2)).double(), probability.detach())


@pytest.mark.parametrize("blocks", [1, 2])
def test_discrete_objective_has_the_exact_expectation(blocks):
    model = Stack(blocks=blocks)
    torch.manual_seed(0)
    with tp.use_mode(model, "discrete"), torch.no_grad():
        exact = model.exact(TAU)
    with tp.use_mode(model, "discrete"):
        losses = torch.stack([tp.map_loss(*model.copies(1000), TAU).detach() for _ in range(200)])
    assert_mean_is(losses, exact)


def test_expected_steps_of_a_single_block_are_exact_whatever_was_sampled():
    model = Stack(max_steps=4)
    with tp.use_mode(model, "discrete"):
        _, (ponder,) = model.copies(50)
    exact = model.paths()[0][3][0]
    torch.testing.assert_close(ponder.expected_steps.flatten(), exact.expand(50))


@pytest.mark.parametrize("baseline", [None, -1.0, "ema"])
def test_reinforce_is_unbiased_for_one_block(baseline):
    """Compares 24 numbers at 5.5 standard errors: a false alarm once in a million such tests."""
    model = Stack()
    exact = model.gradient(model.exact(TAU))
    c = tp.EMABaseline() if baseline == "ema" else baseline
    samples = gradients(model, "discrete", lambda nll, p: tp.reinforce_loss(nll, p, TAU, c))
    assert_mean_is(samples, exact)


def test_the_unbiasedness_test_would_notice_a_missing_score_function():
    model = Stack()
    exact = model.gradient(model.exact(TAU))
    samples = gradients(model, "discrete", lambda nll, p: tp.map_loss(nll, p, TAU))
    error = samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - exact).abs() / (error + 1e-12)).max() > 4 * SIGMAS


def test_reinforce_is_unbiased_for_two_stacked_blocks_without_a_prior():
    model = Stack(blocks=2)
    exact = model.gradient(model.exact(0.0))
    assert_mean_is(
        gradients(model, "discrete", lambda nll, p: tp.reinforce_loss(nll, p, 0.0, tp.EMABaseline())), exact
    )


def test_reinforce_neglects_just_the_dependence_of_later_costs_on_earlier_decisions():
    model = Stack(blocks=2)
    neglecting = model.gradient(model.exact(TAU, neglect=True))
    full = model.gradient(model.exact(TAU))
    assert (neglecting - full).norm() > 1e-3 * full.norm()
    samples = gradients(model, "discrete", lambda nll, p: tp.reinforce_loss(nll, p, TAU, -0.5))
    assert_mean_is(samples, neglecting)


@pytest.mark.parametrize("blocks", [1, 2])
def test_bias_of_the_relaxed_gradient_shrinks_with_the_temperature(blocks):
    model = Stack(blocks=blocks)
    exact = model.gradient(model.exact(TAU))
    biases, errors = [], []
    for temperature in (2.0, 0.5, 0.1):
        samples = gradients(
            model, tp.Relaxed(temperature), lambda nll, p: tp.map_loss(nll, p, TAU), repeats=40, batch=5000
        )
        biases.append((samples.mean(0) - exact).norm().item())
        errors.append(samples.std(0).norm().item() / len(samples) ** 0.5)
    for warm, cold, error in zip(biases, biases[1:], errors[1:], strict=False):
        assert cold + 3 * error < warm


@pytest.mark.parametrize("blocks", [1, 2])
def test_variance_of_the_relaxed_gradient_is_below_that_of_reinforce(blocks):
    model = Stack(blocks=blocks)
    relaxed = gradients(model, tp.Relaxed(), lambda nll, p: tp.map_loss(nll, p, TAU), batch=100)
    for baseline in (None, tp.EMABaseline()):
        score = gradients(
            model, "discrete", lambda nll, p, c=baseline: tp.reinforce_loss(nll, p, TAU, c), batch=100
        )
        assert relaxed.var(0).sum() < score.var(0).sum()


def test_saturated_relaxed_gradient_is_the_exact_one():
    """Where every h is 0 or 1 the relaxation has no gap, at any temperature (section 3)."""
    model = Stack(blocks=2)
    with torch.no_grad():
        for block, signs in zip(model.blocks, ((-1, 1), (-1, -1)), strict=True):
            assert isinstance(block, tp.AdaptiveBlock)
            for head, sign in zip(block.halting, signs, strict=True):
                assert isinstance(head, nn.Linear)
                nn.init.zeros_(head.weight)
                nn.init.constant_(head.bias, 60.0 * sign)
    exact = model.gradient(model.exact(TAU))
    for mode in (tp.Relaxed(2.0), tp.Relaxed(0.1), tp.Discrete(), tp.Thresholded()):
        with tp.use_mode(model, mode):
            torch.testing.assert_close(
                model.gradient(tp.map_loss(*model.copies(3), TAU)), exact, rtol=1e-9, atol=1e-9
            )
