"""advantage_loss is policy iteration: it finds the rule of dynamic programming."""

import itertools

import pytest
import torch
from torch import Tensor

import torchpact as tp


def stopping_problem(length, classes, seed):
    """All paths through random classes: their probabilities, classes (L, paths), and losses (L, paths)."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.rand(classes, generator=generator, dtype=torch.double).softmax(0)
    moves = (3 * torch.randn(length, classes, classes, generator=generator, dtype=torch.double)).softmax(2)
    table = torch.rand(length, classes, generator=generator, dtype=torch.double)
    paths = list(itertools.product(range(classes), repeat=length))
    probabilities = []
    for path in paths:
        p = start[path[0]]
        for l in range(1, length):
            p = p * moves[l, path[l - 1], path[l]]
        probabilities.append(p)
    seen = torch.tensor(paths).T
    return moves, table, torch.stack(probabilities), seen


def optimal_rule(moves, table, tau):
    """By dynamic programming: whether to stop, of every step but the last and every class; and the margin."""
    value = table[-1]
    rule: list[Tensor] = []
    margin: list[Tensor] = []
    for l in reversed(range(len(table) - 1)):
        going_on = tau + moves[l + 1] @ value
        rule.insert(0, table[l] < going_on)
        margin.insert(0, (table[l] - going_on).abs())
        value = torch.minimum(table[l], going_on)
    return torch.stack(rule), torch.stack(margin)


def cost_of(rule, table, probabilities, seen, tau):
    """The expected cost of a rule, path by path."""
    total = 0.0
    for path, p in zip(seen.T.tolist(), probabilities.tolist(), strict=True):
        z = next((l for l in range(len(path) - 1) if rule[l][path[l]]), len(path) - 1)
        total += p * (table[z, path[z]].item() + tau * (z + 1))
    return total


def converged(loss_of, length, classes, seen, probabilities, table, bias, updates=400):
    """Free logits of every step and class, trained on all paths as they are probable."""
    free = torch.full((length - 1, classes), bias, dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.Adam([free], lr=0.1)
    losses = table.gather(1, seen).unsqueeze(1)
    for _ in range(updates):
        logits = torch.cat([free.gather(1, seen[:-1]), torch.full((1, seen.shape[1]), torch.inf)])
        optimizer.zero_grad()
        loss_of(losses, logits.unsqueeze(1), probabilities.unsqueeze(0)).backward()
        optimizer.step()
    return free.detach()


@pytest.mark.parametrize("bias", [-5.0, 0.0])
@pytest.mark.parametrize("seed", range(6))
def test_advantage_converges_to_the_optimal_stopping_rule(seed, bias):
    """Found by dynamic programming, and seen to be the cheapest of all 2⁹ rules by enumeration."""
    length, classes, tau = 4, 3, 0.05
    moves, table, probabilities, seen = stopping_problem(length, classes, seed)
    rule, margin = optimal_rule(moves, table, tau)
    best = cost_of(rule, table, probabilities, seen, tau)
    if bias == 0:
        every = itertools.product([False, True], repeat=(length - 1) * classes)
        grids = (torch.tensor(each).view(length - 1, classes) for each in every)
        assert best == pytest.approx(min(cost_of(grid, table, probabilities, seen, tau) for grid in grids))
    logits = converged(
        lambda *a: tp.advantage_loss(a[0], a[1], tau, a[2]),
        length, classes, seen, probabilities, table, bias,
    )  # fmt: skip
    clear = margin > 1e-3
    assert torch.equal((logits > 0)[clear], rule[clear])
    assert cost_of(logits > 0, table, probabilities, seen, tau) == pytest.approx(best, abs=1e-3)
