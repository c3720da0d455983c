"""The halting loop as a value: what a loop of one's own around any steps gives."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torchpact as tp
from tests.core.blocks import KINDS
from tests.core.modes import NAMES, Median, seeded
from torchpact.core.modes import Mode
from torchpact.core.state import parts

HARD = [name for name in NAMES if seeded(name).hard]


def own_loop(
    block: tp.AdaptiveBlock, u: Any, mode: Mode, stops: bool = True
) -> tuple[Any, tp.Ponder, list[tp.HaltingLoop]]:
    """What a user writes around steps and heads; all values of the loop on the way, too."""
    length, gated = block.max_steps, isinstance(block.steps[0], tp.Residual)
    loop = tp.HaltingLoop.start(mode, length, gated=gated)
    loops = [loop]
    for l in range(length):
        step = block.steps[l % len(block.steps)]
        gate = {"gate": loop.gate} if gated and loop.gate is not None else {}
        head = block.halting[l % len(block.halting)] if l + 1 < length else None
        loop, u = tp.advance(loop, u, step(u, **gate), head)
        loops.append(loop)
        if stops and loop.done:
            loop.draw_the_rest()
            break
    output, ponder = loop.result(u)
    return output, ponder, loops


def assert_same(one: tp.Ponder, other: tp.Ponder) -> None:
    """Fail if two ponders differ in a bit."""
    for name, a, b in zip(tp.Ponder._fields, one, other, strict=True):
        if isinstance(a, Tensor):
            assert isinstance(b, Tensor), name
            assert a.dtype == b.dtype, name
            assert torch.equal(a, b), name
        else:
            assert a == b, name


def gradients(block: tp.AdaptiveBlock, output: Any, ponder: tp.Ponder) -> list[Tensor | None]:
    """Of a loss that every output and every field of the ponder with a gradient is part of."""
    loss = sum(part.square().sum() for part in parts(output)) + ponder.cost.sum()
    loss = loss + ponder.probs.square().sum() + ponder.expected_steps.square().sum()
    if ponder.log_prob is not None:
        loss = loss + ponder.log_prob.sum()
    return list(torch.autograd.grad(loss, list(block.parameters()), allow_unused=True))


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from(NAMES),
    st.integers(1, 5),
    st.integers(0, 10_000),
    st.booleans(),
)
def test_a_loop_of_ones_own_gives_what_the_block_gives_bit_for_bit(kind, name, length, seed, learning):
    if length == 1 and kind == "shared step":
        length = 2  # a head for no decision cannot be told from one for all
    torch.manual_seed(seed)
    block, u = KINDS[kind](length)
    with torch.set_grad_enabled(learning):
        output, ponder = block(u, mode=seeded(name, seed))
        own, found, _ = own_loop(block, u, seeded(name, seed))
    for a, b in zip(parts(output), parts(own), strict=True):
        assert torch.equal(a, b)
    assert_same(ponder, found)
    if learning:
        pairs = zip(gradients(block, output, ponder), gradients(block, own, found), strict=True)
        for one, other in pairs:
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", sorted(KINDS))
@torch.no_grad()
def test_a_loop_that_never_stops_gives_the_same_without_gradients(kind, name):
    torch.manual_seed(1)
    block, u = KINDS[kind](5)
    output, ponder, stopping = own_loop(block, u, seeded(name))
    other, found, running = own_loop(block, u, seeded(name), stops=False)
    assert len(running) == 6 >= len(stopping)
    for a, b in zip(parts(output), parts(other), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(ponder.steps, found.steps)
    assert torch.equal(ponder.cost, found.cost)


@pytest.mark.parametrize("learning", [True, False])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_loops_and_states_stay_as_they_were_when_a_later_one_is_made(kind, name, learning):
    torch.manual_seed(2)
    block, u = KINDS[kind](4)
    mode, gated = seeded(name), "gated" in kind
    known: list[tuple[tp.HaltingLoop, Any, list[Tensor]]] = []

    def tensors(loop: tp.HaltingLoop, state: Any) -> list[Tensor]:
        held = [loop.remaining, loop.gate, loop.steps, *loop.logits, *parts(state)]
        held += parts(loop.output) if loop.output is not None else []
        return [each for each in held if each is not None]

    with torch.set_grad_enabled(learning):
        loop = tp.HaltingLoop.start(mode, 4, gated=gated)
        for l in range(4):
            known.append((loop, u, [each.detach().clone() for each in tensors(loop, u)]))
            gate = {"gate": loop.gate} if gated and loop.gate is not None else {}
            step, head = block.steps[l % len(block.steps)], block.halting[0] if l < 3 else None
            loop, u = tp.advance(loop, u, step(u, **gate), head)
    for taken, (earlier, state, copies) in enumerate(known):
        assert earlier.taken == taken
        assert len(earlier.logits) == taken
        held = tensors(earlier, state)
        assert len(held) == len(copies)
        assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))
    with pytest.raises(AttributeError):
        loop.taken = 0  # type: ignore[misc]


def test_a_loop_can_be_gone_on_with_twice():
    """Two futures of one value know nothing of each other."""
    loop = tp.HaltingLoop.start("thresholded", 3)
    u: Any = torch.zeros(2, 1)
    state: Any
    rest: Any
    output: Any
    loop, u = tp.advance(loop, u, u + 1, torch.tensor([[-1.0], [-1.0]]))
    one, state = tp.advance(loop, u, u + 1, torch.tensor([[1.0], [-1.0]]))
    other, rest = tp.advance(loop, u, u + 10, torch.tensor([[-1.0], [1.0]]))
    one, state = tp.advance(one, state, state + 1, None)
    other, rest = tp.advance(other, rest, rest + 10, None)
    output, ponder = one.result(state)
    assert output.flatten().tolist() == [2, 3]
    assert ponder.steps.flatten().tolist() == [2, 3]
    output, ponder = other.result(rest)
    assert output.flatten().tolist() == [21, 11]
    assert ponder.steps.flatten().tolist() == [3, 2]


@settings(max_examples=60)
@given(st.sampled_from(HARD), st.sampled_from(sorted(KINDS)), st.integers(2, 5), st.integers(0, 10_000))
def test_hard_modes_decide_alike_with_and_without_gradients(name, kind, length, seed):
    torch.manual_seed(seed)
    block, u = KINDS[kind](length)
    trained, learning = block(u, mode=seeded(name, seed))
    with torch.no_grad():
        output, ponder = block(u, mode=seeded(name, seed))
    assert torch.equal(ponder.steps, learning.steps)
    assert (ponder.probs[~ponder.active] == 1).all(), "h of what has halted is not asked for"
    for a, b in zip(parts(output), parts(trained), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_a_hard_mode_that_keeps_a_soft_stick_picks_the_state_at_halting(ends, grad):
    """Three examples go on with probability 0.8, 0.6 and 0.4 at each step: below a half after 4, 2 and 1."""
    going = torch.tensor([[0.8], [0.6], [0.4]])
    block = tp.AdaptiveBlock(lambda u: u + 1, lambda u: torch.logit(1 - going), max_steps=6)
    with torch.set_grad_enabled(grad):
        output, ponder = block(torch.zeros(3, 1), mode=Median(ends=ends))
    assert ponder.steps.flatten().tolist() == [4, 2, 1]
    assert output.flatten().tolist() == [4, 2, 1]


@dataclass(frozen=True)
class Recorded(tp.Discrete):
    """Keeps what it draws."""

    drawn: list[Tensor] = field(default_factory=list)

    def noise(self, like: Tensor) -> Tensor:
        drawn = super().noise(like)
        self.drawn.append(drawn)
        return drawn


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_draws_of_a_second_block_do_not_depend_on_when_the_first_halts(gated, grad):
    def block(bias: float) -> tp.AdaptiveBlock:
        torch.manual_seed(0)
        function = nn.Conv2d(2, 2, 1)
        head = nn.Conv2d(2, 1, 1)
        nn.init.constant_(head.bias, bias)  # type: ignore[arg-type]
        return tp.AdaptiveBlock(tp.Residual(function) if gated else function, head, max_steps=5)

    second, u = block(0.0), torch.randn(3, 2, 4, 4)
    draws, steps, taken = [], [], []
    for bias in (-50.0, -1.0, 1.0, 50.0):
        mode = Recorded(torch.Generator().manual_seed(3))
        with torch.set_grad_enabled(grad):
            _, ponder = block(bias)(u, mode=mode)
            taken.append(ponder.steps.float().mean().item())
            steps.append(second(u, mode=mode)[1].steps)
        draws.append(mode.drawn)
    assert taken[0] == 5 > taken[1] > taken[2] > taken[3] == 1
    assert steps[0].unique().numel() > 2
    for drawn, decided in zip(draws, steps, strict=True):
        assert len(drawn) == 8, "of each block four decisions, made or not"
        assert all(torch.equal(a, b) for a, b in zip(drawn[4:], draws[0][4:], strict=True))
        assert torch.equal(decided, steps[0])


def test_a_context_goes_to_every_step_by_name():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[Any] = []

        def forward(self, u: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            self.told.append(attention_mask)
            return torch.tanh(u if attention_mask is None else u + attention_mask)

    u, mask = torch.randn(4, 3), torch.randn(4, 3)
    for make in (lambda step: step, tp.Residual, lambda step: tp.Residual(step, by_position=True)):
        step = Masked()
        block = tp.AdaptiveBlock(make(step), nn.Linear(3, 1), max_steps=3, mode="thresholded")
        output, ponder = block(u, attention_mask=mask)
        assert len(step.told) == 3
        assert all(each is mask for each in step.told)
        expected, positional = block(u, mask)
        assert torch.equal(output, expected)
        assert_same(ponder, positional)
        assert not torch.equal(output, block(u)[0])
    with pytest.raises(TypeError, match="head_mask"):
        block(u, head_mask=mask)


def test_a_step_may_be_given_named_context_with_its_gate_and_iteration():
    seen = []

    def step(u: Tensor, x: Tensor, *, scale: float, iteration: int, gate: Tensor | None = None) -> Tensor:
        seen.append((scale, iteration, gate is None))
        return u + x * scale

    step.indexed = step.gated = True  # type: ignore[attr-defined]
    block = tp.AdaptiveBlock(step, lambda u: u[:, :1] - 50, max_steps=3, mode="thresholded")
    output, _ = block(torch.zeros(2, 2), torch.ones(2, 2), scale=0.5)
    assert seen == [(0.5, 1, True), (0.5, 2, False), (0.5, 3, False)]
    assert torch.equal(output, torch.full((2, 2), 1.5))


@torch.no_grad()
def test_decisions_alone_have_the_precision_of_the_whole_ponder():
    logits = torch.zeros(2, 1, dtype=torch.double)
    u: Any = logits.clone()
    for keeps in (True, False):
        loop = tp.HaltingLoop.start("thresholded", 2, keeps_logits=keeps)
        loop, u = tp.advance(loop, u, u, logits)
        _, ponder = tp.advance(loop, u, u, None)[0].result(u)
        assert ponder.cost.dtype == ponder.probs.dtype == torch.double
        assert ponder.cost.flatten().tolist() == [2, 2]


def started(taken: int = 1) -> tuple[tp.HaltingLoop, Any]:
    loop = tp.HaltingLoop.start("thresholded", 2)
    u: Any = torch.zeros(2, 1)
    for l in range(taken):
        loop, u = tp.advance(loop, u, u, None if l else u)
    return loop, u


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: tp.HaltingLoop.start("relaxed", 0),
            "expected max_steps to be an integer of at least 1, got 0",
        ),
        (lambda: tp.HaltingLoop.start("lazy", 2), "expected a mode, .*; got 'lazy'"),
        (
            lambda: tp.HaltingLoop.start("act", 2, bounds=[0.0]),
            r"expected the mode thresholded with thresholds, got ACT\(eps=0.01\)",
        ),
        (
            lambda: tp.HaltingLoop.start("thresholded", 4, bounds=[0.0]),
            "expected 3 bounds for max_steps=4, got 1",
        ),
        (
            lambda: tp.advance(*started(2), torch.zeros(2, 1), None),
            "expected at most max_steps=2 steps, got one more",
        ),
        (
            lambda: tp.advance(*started(0), torch.zeros(2, 1), None),
            "expected logits or a head after step 1 of 2, got None",
        ),
    ],
)
def test_wrong_use_is_told_in_one_line(call, message):
    with pytest.raises(ValueError, match=f"^{message}") as error:
        call()
    assert "\n" not in str(error.value)
