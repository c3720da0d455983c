"""Loops that freeze halted positions of any step themselves, against the formula u + a·(step(u) − u)."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchpact as tp
from tests.core.modes import NAMES, seeded
from torchpact.core.modes import Mode
from torchpact.core.state import parts

LENGTH = 5


def by_hand(steps: Any, heads: Any, u: Tensor, mode: Mode) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the weights of all iterations, and the gates of all but the first; no code of the loop."""
    u = steps[0](u)
    remaining = torch.ones_like(heads[0](u))
    weights, gates, states = [], [], [u]
    for step, head in zip(steps[1:], heads, strict=True):
        logits = head(u)
        if isinstance(mode, tp.Relaxed | tp.Discrete):
            uniform = torch.rand(logits.shape, dtype=logits.dtype, generator=mode.generator)
            logits = logits + (uniform / (1 - uniform)).log()
        if isinstance(mode, tp.Relaxed):
            weight = remaining * torch.sigmoid(logits / mode.temperature)
            remaining = remaining - weight
            gate = remaining * (remaining > mode.clip)
        elif isinstance(mode, tp.ACT):
            goes_on = remaining - logits.sigmoid() > mode.eps
            weight = torch.where(goes_on, logits.sigmoid(), remaining)
            remaining = remaining - weight
            gate = goes_on.to(u.dtype)
        else:
            bound = 0.45 if isinstance(mode, tp.Thresholded) else 0.5
            weight = remaining * (logits.sigmoid() > bound)
            remaining = gate = remaining - weight
        weights.append(weight)
        gates.append(gate)
        u = u + gate * (step(u) - u)
        states.append(u)
    weights.append(remaining)
    output = sum((w * s for w, s in zip(weights, states, strict=True)), torch.zeros_like(u))
    return output, torch.stack(weights), torch.stack(gates)


def by_loop(steps: Any, heads: Any, u: Any, mode: Mode, stops: bool = True) -> tuple[Any, tp.Ponder]:
    loop = tp.HaltingLoop.start(mode, len(steps), interpolated=True)
    for step, head in zip(steps, [*heads, None], strict=True):
        loop, u = tp.advance(loop, u, step(u), head)
        if stops and loop.done:
            loop.draw_the_rest()
            break
    return loop.result(u)


def network(kind: str) -> tuple[list[nn.Module], list[nn.Module], Tensor]:
    """Post-norm layers that are no residuals: one decision an example, or one a position."""
    torch.manual_seed(4)
    if kind == "examples":
        steps = [nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(LENGTH)]
        heads: list[nn.Module] = [nn.Linear(3, 1) for _ in range(LENGTH - 1)]
        u = torch.randn(8, 3, dtype=torch.double)
    else:
        steps = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()) for _ in range(LENGTH)]
        heads = [nn.Conv2d(3, 1, 3, padding=1) for _ in range(LENGTH - 1)]
        u = torch.randn(2, 3, 4, 5, dtype=torch.double)
    modules = nn.ModuleList([*steps, *heads]).double()
    return list(modules[:LENGTH]), list(modules[LENGTH:]), u


@pytest.mark.parametrize("name", ["relaxed", "discrete", "thresholded", "act"])
@pytest.mark.parametrize("kind", ["examples", "pixels"])
def test_output_and_gradients_are_those_of_the_formula(kind, name):
    steps, heads, u = network(kind)
    output, ponder = by_loop(steps, heads, u, seeded(name))
    expected, weights, gates = by_hand(steps, heads, u, seeded(name))
    torch.testing.assert_close(output, expected)
    assert torch.equal(ponder.steps, 1 + (gates > 0).sum(0))
    assert ponder.steps.unique().numel() > 1, "all halt at once: the comparison is empty"
    if name in ("discrete", "thresholded"):
        assert torch.equal(ponder.steps, 1 + weights.argmax(0))
    weights_of = [p for module in (*steps, *heads) for p in module.parameters()]
    probe = torch.randn_like(output)
    got = torch.autograd.grad((output * probe).sum(), weights_of, allow_unused=True)
    wanted = torch.autograd.grad((expected * probe).sum(), weights_of, allow_unused=True)
    for one, other in zip(got, wanted, strict=True):
        nothing = torch.zeros((), dtype=torch.double)  # heads have no gradient where decisions are hard
        pair = [nothing if each is None else each for each in (one, other)]
        torch.testing.assert_close(*torch.broadcast_tensors(*pair))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["examples", "pixels"])
def test_gradients_or_not_and_stopping_or_not_change_nothing(kind, name):
    steps, heads, u = network(kind)
    output, ponder = by_loop(steps, heads, u, seeded(name))
    with torch.no_grad():
        for stops in (True, False):
            other, found = by_loop(steps, heads, u, seeded(name), stops)
            torch.testing.assert_close(other, output)
            assert torch.equal(found.steps, ponder.steps)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["discrete", "thresholded", "median"])
def test_a_network_that_never_halts_is_the_network_bit_for_bit(name, grad):
    steps, _, u = network("pixels")
    expected = u
    for step in steps:
        expected = step(expected)
    with torch.set_grad_enabled(grad):
        output, ponder = by_loop(steps, [lambda u: torch.full_like(u[:, :1], -50.0)] * 4, u, seeded(name))
    assert torch.equal(output, expected)
    assert (ponder.steps == LENGTH).all()


@pytest.mark.parametrize("name", ["discrete", "thresholded", "median"])
def test_halted_positions_keep_their_state_even_where_the_step_gives_no_number(name):
    """0·NaN is NaN: in the hard modes the state is one or the other."""

    def step(u: Tensor) -> Tensor:
        return torch.where(u == 1, torch.nan, u + 1)

    head = [lambda u: torch.where(u == 1, 50.0, -50.0)] * 2
    output, ponder = by_loop([lambda u: u, step, step], head, torch.tensor([[1.0], [5.0]]), seeded(name))
    assert output.flatten().tolist() == [1, 7]
    assert ponder.steps.flatten().tolist() == [1, 3]


@pytest.mark.parametrize("name", ["relaxed", "discrete", "thresholded", "act", "dithering"])
def test_the_tensors_of_a_tuple_are_frozen_as_one(name):
    steps, heads, u = network("examples")
    both = [lambda state, step=step: (step(state[0]), step(state[1])) for step in steps]
    first = [lambda state, head=head: head(state[0]) for head in heads]
    other = torch.randn_like(u)
    output, ponder = by_loop(both, first, (u, other), seeded(name))
    alone, expected = by_loop(steps, heads, u, seeded(name))
    assert torch.equal(parts(output)[0], alone)
    assert torch.equal(ponder.steps, expected.steps)
    given = iter(ponder.probs[:-1].logit())
    again, _ = by_loop(steps, [lambda u: next(given)] * 4, other, seeded(name))
    torch.testing.assert_close(parts(output)[1], again)
