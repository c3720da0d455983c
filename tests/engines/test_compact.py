import pytest
import torch
from torch import nn

import torchpact as tp
from tests.engines.networks import relative
from torchpact.core.call_args import CallArgs
from torchpact.engines import Unsupported
from torchpact.engines.generic.compact import CompactRunner


class Counting(nn.Module):
    """A step that remembers how many examples it was given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.seen = []

    def forward(self, u, shift=0.0):
        self.seen.append(len(u))
        return torch.tanh(self.linear(u)) + shift


def compact(block, u, *context):
    """Run a block with halted examples leaving the batch."""
    return CompactRunner(block)(u, CallArgs(context))


def block_with(mode):
    step = Counting()
    head = nn.Linear(6, 1)
    nn.init.normal_(head.weight, 0, 2)
    return tp.AdaptiveBlock(step, head, max_steps=6, mode=mode), step


@pytest.mark.parametrize("mode", ["thresholded", "act"])
@pytest.mark.parametrize("batch", [0, 1, 40])
def test_outputs_and_ponders_are_those_of_the_block(mode, batch):
    block, _ = block_with(mode)
    u, shift = torch.randn(batch, 6), torch.randn(batch, 6)
    with torch.no_grad():
        expected, ponder = block(u, shift)
    output, got = compact(block, u, shift)
    assert relative(output, expected) < 1e-5
    assert torch.equal(got.steps, ponder.steps)
    for one, other in zip(got[:4], ponder[:4], strict=True):
        assert torch.allclose(one, other, atol=1e-5)


class Damped(tp.Thresholded):
    """A hard mode that has something to say about the gate."""

    def gate(self, remaining):
        return super().gate(remaining) * 0.5


@torch.no_grad()
def test_steps_are_given_the_gate_of_the_mode():
    head = nn.Linear(6, 1)
    nn.init.normal_(head.weight, 0, 2)
    units = [tp.Residual(nn.Linear(6, 6)) for _ in range(4)]
    block = tp.AdaptiveBlock(units, head, mode=Damped())
    u = torch.randn(40, 6)
    expected, ponder = block(u)
    output, got = compact(block, u)
    assert torch.equal(got.steps, ponder.steps)
    assert relative(output, expected) < 1e-5


def test_a_step_is_given_the_active_examples_only():
    block, step = block_with("thresholded")
    _, ponder = compact(block, torch.randn(40, 6))
    assert step.seen == [int(n) for n in ponder.active.flatten(1).sum(1) if n]
    assert step.seen[-1] < 40


def test_states_may_be_tuples():
    cell = nn.LSTMCell(3, 5)
    block = tp.AdaptiveBlock(
        lambda u, x: cell(x, u), lambda u: u[0].sum(1, keepdim=True), max_steps=4, mode="thresholded"
    )
    x, u = torch.randn(30, 3), (torch.randn(30, 5), torch.randn(30, 5))
    with torch.no_grad():
        expected, ponder = block(u, x)
    output, got = compact(block, u, x)
    assert torch.equal(got.steps, ponder.steps)
    assert all(relative(one, other) < 1e-5 for one, other in zip(output, expected, strict=True))


def test_the_input_stays_as_it_was():
    block, _ = block_with("thresholded")
    u = torch.randn(8, 6)
    before = u.clone()
    compact(block, u)
    assert torch.equal(u, before)


def test_a_mode_in_which_nobody_leaves_is_refused():
    block, _ = block_with("relaxed")
    with pytest.raises(Unsupported, match="expected a mode in which examples halt for good, got Relaxed"):
        compact(block, torch.randn(2, 6))


def test_a_decision_for_every_position_is_refused():
    block = tp.AdaptiveBlock(nn.Tanh(), nn.Identity(), max_steps=3, mode="thresholded")
    with pytest.raises(Unsupported, match=r"expected one halting logit an example, got logits of \(2, 6\)"):
        compact(block, torch.randn(2, 6))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6])
def test_a_table_that_all_examples_share_stays_whole(rows):
    """Also when as many examples are left as the table has rows."""

    class Looks(nn.Module):
        def forward(self, u, table, own):
            assert len(table) == rows
            assert len(own) == len(u)
            return torch.tanh(u + table.sum(0) * own)

    torch.manual_seed(rows)
    block = tp.AdaptiveBlock(Looks(), nn.Linear(4, 1), max_steps=6, mode="thresholded")
    u, table, own = torch.randn(5, 4), torch.randn(rows, 4), torch.randn(5, 1)
    with torch.no_grad():
        expected, ponder = block(u, table, own)
    output, got = compact(block, u, table, own)
    assert torch.equal(got.steps, ponder.steps)
    assert relative(output, expected) < 1e-6


def test_act_in_double_precision():
    block = tp.AdaptiveBlock(nn.Linear(3, 3), nn.Linear(3, 1), max_steps=4, mode="act").double()
    u = torch.randn(6, 3, dtype=torch.double)
    with torch.no_grad():
        expected, _ = block(u)
    output, _ = compact(block, u)
    assert output.dtype == torch.double
    assert relative(output, expected) < 1e-12


@pytest.mark.parametrize("batch", [1, 7, 30])
def test_contexts_may_be_tuples(batch):
    class Looks(nn.Module):
        def forward(self, u, pair, table):
            (own, (deep,)), shared = pair, table
            assert len(own) == len(deep) == len(u)
            assert len(shared) == 3
            return torch.tanh(u * own + deep + shared.sum(0))

    block = tp.AdaptiveBlock(Looks(), nn.Linear(4, 1), max_steps=6, mode="thresholded")
    u, own, deep = (torch.randn(batch, 4) for _ in range(3))
    pair, table = (own, (deep,)), torch.randn(3, 4)
    with torch.no_grad():
        expected, ponder = block(u, pair, table)
    output, got = compact(block, u, pair, table)
    assert torch.equal(got.steps, ponder.steps)
    assert relative(output, expected) < 1e-6
