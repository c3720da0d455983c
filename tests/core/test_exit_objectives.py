"""exact_loss and advantage_loss against enumeration over every z."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import torchpact as tp
from tests.problems import Stack

OBJECTIVES = (
    tp.exact_loss,
    tp.advantage_loss,
    lambda *a: tp.advantage_loss(*a, continuation="soft", reach=True),
)


def distribution(h):
    """q(z = 1), …, q(z = L) of one position, in plain numbers; h of the last is 1."""
    q, left = [], 1.0
    for each in [*h[:-1], 1.0]:
        q.append(left * each)
        left = left * (1 - each)
    return q


def problem(length, *positions, seed=0):
    generator = torch.Generator().manual_seed(seed)
    losses = torch.rand(length, *positions, dtype=torch.double, generator=generator)
    logits = 2 * torch.randn(length, *positions, dtype=torch.double, generator=generator)
    return losses.requires_grad_(), logits.requires_grad_()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_exact_loss_and_its_gradients_are_those_of_a_sum_over_all_choices_of_all_positions(length):
    """Two examples of three positions: the joint choices are enumerated, though positions factorise."""
    losses, logits = problem(length, 2, 3)
    tau, total = 0.3, torch.zeros((), dtype=torch.double)
    for b in range(2):
        q = [distribution(logits[:, b, t].sigmoid().unbind()) for t in range(3)]
        for choice in itertools.product(range(length), repeat=3):
            probability = math.prod(q[t][z] for t, z in enumerate(choice))
            cost = sum(losses[z, b, t] + tau * (z + 1) for t, z in enumerate(choice)) / 3
            total = total + probability * cost / 2
    value = tp.exact_loss(losses, logits, tau)
    torch.testing.assert_close(value, total)
    for ours, exact in zip(
        torch.autograd.grad(value, (losses, logits), allow_unused=True),
        torch.autograd.grad(total, (losses, logits), allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, torch.zeros_like(logits) if exact is None else exact)


@pytest.mark.parametrize("max_steps", [2, 3, 5])
def test_exact_loss_has_the_gradient_of_the_enumerated_block_for_steps_and_heads(max_steps):
    model = Stack(max_steps=max_steps)
    (block,) = model.blocks
    assert isinstance(block, tp.AdaptiveBlock)
    u, losses, logits = model.x.unsqueeze(0), [], []
    for index, step in enumerate(block.steps):
        u = step(u)
        losses.append(model.nll(u))
        logits.append(block.halting[index](u) if index < max_steps - 1 else torch.full((1, 1), torch.inf))
    loss = tp.exact_loss(torch.stack(losses), torch.stack(logits), 0.2)
    exact = model.exact(0.2)
    torch.testing.assert_close(loss, exact)
    torch.testing.assert_close(model.gradient(loss), model.gradient(exact), rtol=1e-10, atol=1e-10)


def advantages(costs, h, tau):
    """V_l − loss_l by enumeration of z > l, one position, in plain numbers."""
    found = []
    for l in range(len(costs) - 1):
        q = distribution(h[l + 1 :])
        value = sum(p * (costs[l + 1 + k] + tau * (k + 1)) for k, p in enumerate(q))
        found.append(value - costs[l])
    return found


@pytest.mark.parametrize("continuation", ["soft", "hard"])
@pytest.mark.parametrize("reach", [False, True])
@given(length=st.integers(1, 5), tau=st.floats(0, 1), seed=st.integers(0, 1000))
def test_advantage_loss_is_the_weighted_cross_entropy_of_enumerated_advantages(
    continuation, reach, length, tau, seed
):
    losses, logits = problem(length, 2, 2, seed=seed)
    total, gradient = 0.0, torch.zeros_like(logits)
    for b, t in itertools.product(range(2), range(2)):
        h = logits[:, b, t].sigmoid().tolist()
        rule = [float(p > 0.5) for p in h] if continuation == "hard" else h
        for l, a in enumerate(advantages(losses[:, b, t].tolist(), rule, tau)):
            weight = abs(a) * (math.prod(1 - p for p in rule[:l]) if reach else 1.0)
            total -= weight * math.log(h[l] if a > 0 else 1 - h[l]) / 4
            gradient[l, b, t] = weight * (h[l] - float(a > 0)) / 4
    loss = tp.advantage_loss(losses, logits, tau, continuation=continuation, reach=reach)
    assert loss.item() == pytest.approx(total)
    loss.backward()
    assert losses.grad is None, "losses carry no gradient"
    torch.testing.assert_close(logits.grad, gradient)


def test_a_head_that_cannot_tell_examples_apart_settles_at_the_share_of_the_advantage():
    """h = E[a⁺] / E[|a|]: three examples in one state, of advantages 0.5, 0.1 and −0.2, by hand."""
    losses = torch.tensor([[0.0, 0.4, 0.7], [0.4, 0.4, 0.4]], dtype=torch.double)
    logit = torch.zeros((), dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.Adam([logit], lr=0.05)
    for _ in range(500):
        optimizer.zero_grad()
        logits = torch.cat([logit.expand(1, 3), torch.zeros(1, 3)])
        tp.advantage_loss(losses, logits, tau=0.1).backward()
        optimizer.step()
    assert logit.sigmoid().item() == pytest.approx(0.6 / 0.8, abs=1e-3)


def test_the_gradient_of_advantage_stays_where_that_of_the_expectation_vanishes():
    losses, logits = torch.tensor([[0.0], [1.0]]), torch.full((2, 1), -20.0, requires_grad=True)
    exact = torch.autograd.grad(tp.exact_loss(losses, logits, 0.0), logits)[0][0]
    advantage = torch.autograd.grad(tp.advantage_loss(losses, logits, 0.0), logits)[0][0]
    h = 1 / (1 + math.exp(20))
    assert exact.item() == pytest.approx(-h * (1 - h), rel=1e-5)
    assert advantage.item() == pytest.approx(-(1 - h), rel=1e-5)


def test_ties_have_no_gradient():
    losses, logits = torch.ones(3, 2), torch.zeros(3, 2, requires_grad=True)
    tp.advantage_loss(losses, logits, tau=0.0).backward()
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_padding_counts_for_nothing_even_as_nan(objective):
    losses, logits = problem(3, 2, 4)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    value = (
        objective(losses[:, :1, :2], logits[:, :1, :2], 0.1) + objective(losses[:, 1:], logits[:, 1:], 0.1)
    ) / 2
    padded = losses.detach().masked_fill(mask == 0, torch.nan)
    heads = logits.detach().masked_fill(mask == 0, torch.nan).requires_grad_()
    for weights in (mask, mask.bool(), mask.unsqueeze(-1)):
        loss = objective(padded, heads, 0.1, weights)
        torch.testing.assert_close(loss, value)
    (found,) = torch.autograd.grad(loss, heads)
    (expected,) = torch.autograd.grad(value, logits)
    torch.testing.assert_close(found, expected)
    assert objective(padded, heads, 0.1, torch.zeros_like(mask)).item() == 0


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    ("of_losses", "of_logits"),
    [((2, 4), (2, 4, 1)), ((2, 4), (2, 1, 4)), ((2, 4, 1), (2, 4)), ((2,), (2, 1, 1))],
)
def test_positions_match_up_to_dimensions_of_size_1(objective, of_losses, of_logits):
    losses, logits = problem(3, 2, math.prod(of_losses) // 2)
    torch.testing.assert_close(
        objective(losses.view(3, *of_losses), logits.view(3, *of_logits), 0.1),
        objective(losses, logits, 0.1),
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_one_decision_an_example_is_charged_the_mean_of_its_tokens(objective):
    losses, logits = problem(3, 2, 4)[0], problem(3, 2, 1, seed=1)[1]
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    means = torch.stack([losses[:, 0, :2].mean(1), losses[:, 1].mean(1)], 1)
    padded = losses.masked_fill(mask == 0, torch.nan)
    torch.testing.assert_close(objective(padded, logits, 0.1, mask), objective(means, logits, 0.1))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("logit", [50.0, -50.0, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saturated_logits_give_finite_losses_and_gradients_in_single_precision(objective, logit, dtype):
    losses = torch.rand(4, 3, dtype=dtype, requires_grad=True)
    logits = torch.full((4, 3), logit, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = objective(losses, logits, 0.3)
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    loss.backward()
    for x in (losses, logits):
        assert x.grad is None or x.grad.isfinite().all()


def test_the_gradient_of_the_expectation_at_50_has_its_digits():
    losses = torch.tensor([[0.0], [1.0]])
    for logit in (-50.0, 50.0):
        logits = torch.full((2, 1), logit, requires_grad=True)
        tp.exact_loss(losses, logits, 0.0).backward()
        assert logits.grad is not None
        assert logits.grad[0].item() == pytest.approx(-math.exp(-50), rel=1e-4)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_empty_batch_and_a_single_step_have_no_gradient(objective):
    logits = torch.zeros(3, 0, 1, requires_grad=True)
    loss = objective(torch.zeros(3, 0), logits, 0.1)
    assert loss.item() == 0
    loss.backward()
    assert logits.grad is not None
    logits = torch.full((1, 2), math.inf, requires_grad=True)
    objective(torch.ones(1, 2), logits, 0.1).backward()
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_price_may_be_a_tensor(objective):
    losses, logits = problem(3, 2)
    torch.testing.assert_close(objective(losses, logits, torch.tensor(0.25)), objective(losses, logits, 0.25))


def call(losses: tuple[int, ...], logits: tuple[int, ...], tau: float = 0.1, weights: Tensor | None = None):
    return lambda objective: objective(torch.rand(losses), torch.rand(logits), tau, weights)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            call((3, 2), (2, 2)),
            r"expected losses and logits of shape \(L, batch, …\), got \(3, 2\) and \(2, 2\)",
        ),
        (call((3,), (3,)), r"got \(3,\) and \(3,\)"),
        (
            call((3, 2), (3, 2, 4)),
            r"expected a loss of every position that decides.*got losses \(3, 2\) and logits \(3, 2, 4\)",
        ),
        (call((3, 2, 5), (3, 2, 4)), "expected a loss of every position"),
        (
            call((3, 2, 4), (3, 2, 4), weights=torch.ones(3, 4)),
            r"expected weights that broadcast to positions \(2, 4\), got \(3, 4\)",
        ),
        (call((3, 4, 4), (3, 4, 4), weights=torch.ones(4)), r"positions \(4, 4\), got \(4,\)"),
        (call((3, 2), (3, 2), -1.0), r"expected tau in \[0, inf\), got -1.0"),
        (
            lambda f: f(torch.rand(2, 1), torch.full((2, 1), math.nan), 0.1),
            "expected logits without NaN, got 1 NaN",
        ),
    ],
)
def test_wrong_use_is_told_in_one_line(objective, wrong, message):
    with pytest.raises(ValueError, match=message) as error:
        wrong(objective)
    assert "\n" not in str(error.value)


def test_what_is_no_tensor_and_an_unknown_continuation_are_refused():
    logits = torch.zeros(2, 1)
    for objective in OBJECTIVES:
        with pytest.raises(TypeError, match="expected losses to be a tensor, got list"):
            objective([[1.0], [0.0]], logits, 0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected continuation to be one of soft, hard; got 'greedy'"):
        tp.advantage_loss(logits, logits, 0.1, continuation="greedy")
