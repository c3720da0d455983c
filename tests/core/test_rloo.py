"""rloo_loss against enumeration over every outcome of two runs."""

import itertools

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.problems import Stack

TAU = 0.2


def run_of(path):
    """The nll and the ponder of a run that took a path, as a block in discrete mode gives them."""
    _, probability, nll, counts = path
    total = sum(counts).view(1, 1)
    steps = torch.ones(1, 1, dtype=torch.long)
    return nll.view(1), tp.Ponder(
        total.detach().unsqueeze(0), steps, total, total, probability.log().view(1, 1)
    )


def moments(model, count, loss_of, graph):
    """Mean and total variance of a gradient over all outcomes of `count` independent runs, enumerated."""
    paths = model.paths()
    mean, square = torch.zeros((), dtype=torch.double), torch.zeros((), dtype=torch.double)
    for chosen in itertools.product(paths, repeat=count):
        probability = torch.stack([path[1] for path in chosen]).prod().item()
        runs = [run_of(path) for path in chosen]
        loss = loss_of([nll for nll, _ in runs], [ponder for _, ponder in runs])
        gradients = torch.autograd.grad(loss, graph, allow_unused=True, retain_graph=True)
        pairs = zip(gradients, graph, strict=True)
        gradient = torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])
        mean, square = mean + probability * gradient, square + probability * gradient.square().sum()
    return mean, (square - mean.square().sum()).item()


def rloo(nll, ponders):
    return tp.rloo_loss(nll, ponders, TAU)


def plain(nll, ponders):
    """The mean over the same runs of REINFORCE without a baseline."""
    return sum(tp.reinforce_loss(*run, TAU) for run in zip(nll, ponders, strict=True)) / len(nll)


@pytest.mark.parametrize(("runs", "max_steps"), [(2, 2), (2, 3), (3, 3), (2, 5)])
def test_rloo_is_unbiased_over_all_outcomes_of_its_runs(runs, max_steps):
    model = Stack(max_steps=max_steps)
    mean, variance = moments(model, runs, rloo, list(model.parameters()))
    torch.testing.assert_close(mean, model.gradient(model.exact(TAU)), rtol=1e-9, atol=1e-9)
    assert variance > 0


def test_for_two_blocks_it_neglects_just_what_reinforce_neglects():
    model = Stack(blocks=2, max_steps=2)
    mean, _ = moments(model, 2, rloo, list(model.parameters()))
    neglecting = model.gradient(model.exact(TAU, neglect=True))
    torch.testing.assert_close(mean, neglecting, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_its_variance_is_below_that_of_reinforce_with_the_same_runs(seed):
    """A likelihood far from 0, as a loss is early in training: where a baseline matters."""
    model = Stack(seed=seed)
    (block,) = model.blocks
    assert isinstance(block, tp.AdaptiveBlock)
    heads = [*block.halting.parameters()]
    _, ours = moments(model, 2, lambda n, p: rloo([each + 3 for each in n], p), heads)
    _, others = moments(model, 2, lambda n, p: plain([each + 3 for each in n], p), heads)
    assert ours < others / 2


def test_a_constant_in_the_loss_of_an_example_has_no_effect():
    """No baseline that is shared by examples can do that."""
    log_q = torch.tensor([[-0.1], [-0.7], [-0.4], [-0.2]], requires_grad=True)
    steps = torch.ones(4, 1, dtype=torch.long)
    ponder = tp.Ponder(steps.float().unsqueeze(0), steps, steps.float(), steps.float(), log_q)
    nll = torch.tensor([[1.0, 5.0], [2.0, 5.0]])
    gradients = [
        torch.autograd.grad(tp.rloo_loss(nll + shift, ponder, TAU), log_q, retain_graph=True)[0]
        for shift in (torch.zeros(2), torch.tensor([0.0, 40.0]))
    ]
    # −(reward − that of the other run)/4, and rewards are −nll
    torch.testing.assert_close(gradients[0], torch.tensor([[-0.25], [0.0], [0.25], [0.0]]))
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_stacked_pass_is_a_list_of_runs():
    torch.manual_seed(0)
    block = tp.AdaptiveBlock(nn.Linear(2, 2), nn.Linear(2, 1), max_steps=3, mode="discrete")
    output, ponder = block(torch.randn(4, 2).repeat(3, 1), weights=torch.ones(12, 1))
    nll = output.square().sum(1).view(3, 4)
    runs = [
        tp.Ponder(
            ponder.probs[:, rows], ponder.steps[rows], ponder.expected_steps[rows], ponder.cost[rows],
            ponder.log_prob[rows], ponder.weights[rows],
        )
        for rows in (slice(0, 4), slice(4, 8), slice(8, 12))
    ]  # fmt: skip
    stacked = tp.rloo_loss(nll, ponder, TAU)
    for listed in (tp.rloo_loss(list(nll), runs, TAU), tp.rloo_loss(list(nll), [[r] for r in runs], [TAU])):
        torch.testing.assert_close(stacked, listed)
        for one, other in zip(
            torch.autograd.grad(stacked, list(block.parameters()), retain_graph=True),
            torch.autograd.grad(listed, list(block.parameters()), retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(one, other)


def test_an_empty_batch_costs_nothing():
    block = tp.AdaptiveBlock(nn.Linear(2, 2), nn.Linear(2, 1), max_steps=3, mode="discrete")
    output, ponder = block(torch.empty(0, 2))
    loss = tp.rloo_loss(output.sum(1).view(2, 0), ponder, TAU)
    assert loss.item() == 0
    loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in block.parameters())


def ponder_of(count, sampled=True):
    steps = torch.ones(count, 1, dtype=torch.long)
    ones = torch.ones(count, 1)
    return tp.Ponder(ones.unsqueeze(0), steps, ones, ones, -ones if sampled else None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tp.rloo_loss([torch.rand(3)], [ponder_of(3)], 0.1), "expected at least 2 runs.*got 1"),
        (lambda: tp.rloo_loss(torch.rand(1, 3), ponder_of(3), 0.1), "expected at least 2 runs.*got 1"),
        (lambda: tp.rloo_loss([], [], 0.1), "expected at least 2 runs.*got 0"),
        (lambda: tp.rloo_loss(torch.rand(3), ponder_of(3), 0.1), r"nll of shape \(runs, batch\), got \(3,\)"),
        (
            lambda: tp.rloo_loss([torch.rand(3)] * 2, [ponder_of(3)] * 3, 0.1),
            "expected the ponders of 2 runs, as many as in nll; got those of 3",
        ),
        (
            lambda: tp.rloo_loss([torch.rand(3)] * 2, ponder_of(3), 0.1),
            "expected the ponders of 2 runs, as many as in nll; got one Ponder",
        ),
        (
            lambda: tp.rloo_loss([torch.rand(3), torch.rand(2)], [ponder_of(3), ponder_of(2)], 0.1),
            "expected runs of one batch, got 3, 2 examples",
        ),
        (
            lambda: tp.rloo_loss(torch.rand(2, 3), ponder_of(6, sampled=False), 0.1),
            "expected ponders of blocks in Discrete mode, got no log_prob in block 0",
        ),
        (
            lambda: tp.rloo_loss(torch.rand(2, 3), ponder_of(3), 0.1),
            "expected positions of 6 examples, as in nll",
        ),
        (lambda: tp.rloo_loss(torch.rand(2, 3), ponder_of(6), -0.1), r"expected tau in \[0, inf\), got -0.1"),
    ],
)
def test_wrong_use_is_told_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
