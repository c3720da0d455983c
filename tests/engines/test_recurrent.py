"""The compiled recurrent layers against the loop of AdaptiveRNN, on random weights, shapes and lengths."""

import copy
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import torchpact as tp
from torchpact.engines import Unsupported, recurrent
from torchpact.models import HaltingUnit, never_halt

try:
    recurrent.library()
except Unsupported as error:
    pytest.skip(str(error), allow_module_level=True)

CELLS = [nn.LSTMCell, nn.GRUCell, nn.RNNCell]


def lively(cell=nn.LSTMCell, hidden=32, features=5, max_steps=6, bias=True, halting_bias=0.0, **options):
    """A layer whose examples halt at all steps, since whether a state halts is close to a coin."""
    head = HaltingUnit(hidden, halting_bias)
    nn.init.normal_(head.linear.weight, std=20.0)
    body = cell(features + 1, hidden, bias=bias)
    return tp.AdaptiveRNN(body, max_steps, halting=head, mode="thresholded", **options)


def both(rnn, x, state=None, **options):
    """What the kernel and the loop make of it; every state is far enough from the threshold."""
    with torch.no_grad():
        assert recurrent.kernel_for(rnn.block, rnn.block.mode) is not None
        fast = rnn(x, state, **options)
        rnn.compact = False
        slow = rnn(x, state, **options)
        rnn.compact = True
    return fast, slow


def assert_same(fast, slow):
    assert torch.equal(fast[2].steps, slow[2].steps)
    for one, other in zip(flat(fast), flat(slow), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def flat(result):
    output, state, ponder = result
    return [output, *(state if isinstance(state, tuple) else (state,)), *(x for x in ponder if x is not None)]


@settings(max_examples=40, deadline=None)
@given(
    cell=st.sampled_from(CELLS),
    hidden=st.sampled_from([1, 5, 16, 30, 48]),
    batch=st.integers(1, 40),
    time=st.integers(1, 6),
    max_steps=st.integers(1, 7),
    bias=st.booleans(),
    ragged=st.booleans(),
    started=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_the_kernel_is_the_loop(cell, hidden, batch, time, max_steps, bias, ragged, started, seed):
    torch.manual_seed(seed)
    rnn = lively(cell, hidden, max_steps=max_steps, bias=bias)
    x = torch.randn(time, batch, 5)
    state = None
    if started:
        h = torch.randn(batch, hidden)
        state = (h, h.sin()) if cell is nn.LSTMCell else h
    options = {"lengths": torch.randint(1, time + 1, (batch,))} if ragged else {}
    fast, slow = both(rnn, x, state, **options)
    if max_steps > 1:  # closer to the threshold, rounding decides
        assume((slow[2].probs[:-1] - 0.5).abs().min() > 1e-4)
    assert_same(fast, slow)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("threads", [1, 3])
def test_long_sequences_are_read_in_pieces_and_by_several_threads(monkeypatch, cell, threads):
    torch.manual_seed(0)
    rnn, x = lively(cell, max_steps=4, batch_first=True), torch.randn(9, 20, 5)
    lengths = torch.randint(1, 21, (9,))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole, slow = both(rnn, x, lengths=lengths)
        monkeypatch.setattr(recurrent, "MOST_INPUTS", 3000)
        pieces, _ = both(rnn, x, lengths=lengths)
    finally:
        torch.set_num_threads(before)
    assert len(whole[2].steps.unique()) > 3
    assert_same(whole, slow)
    assert_same(pieces, slow)


def test_an_empty_batch_gives_empty_results():
    fast, slow = both(lively(), torch.zeros(4, 0, 5))
    assert fast[0].shape == (4, 0, 32)
    assert_same(fast, slow)


@pytest.mark.parametrize("threshold", [0.2, 0.9])
def test_any_threshold(threshold):
    torch.manual_seed(1)
    rnn, x = lively(), torch.randn(7, 20, 5)
    fast, slow = both(rnn, x, mode=tp.Thresholded(threshold))
    assert_same(fast, slow)
    assert len(fast[2].steps.unique()) > 2


def test_never_halting_repeats_the_cell():
    rnn = tp.AdaptiveRNN(nn.GRUCell(6, 16), 3, halting=never_halt, mode="thresholded")
    x = torch.randn(4, 3, 5)
    fast, slow = both(rnn, x)
    assert (fast[2].steps == 3).all()
    assert_same(fast, slow)


@pytest.mark.parametrize("change", ["add_", "data"])
def test_weights_that_change_are_seen(change):
    torch.manual_seed(2)
    rnn, x = lively(), torch.randn(5, 4, 5)
    first, _ = both(rnn, x)
    with torch.no_grad():
        weight = rnn.cell.weight_hh if change == "add_" else rnn.cell.weight_hh.data
        weight.add_(0.05)
    second, slow = both(rnn, x)
    assert (first[0] - second[0]).abs().max() > 1e-3
    assert_same(second, slow)


def test_large_and_broken_numbers_come_out_as_from_the_loop():
    torch.manual_seed(3)
    rnn, x = lively(), torch.randn(3, 4, 5)
    x[:, 0] *= 1e4
    x[1, 1] = math.nan
    (fast, _, ponder), (slow, _, expected) = both(rnn, x)
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert torch.equal(ponder.steps, expected.steps)
    assert fast[1:, 1].isnan().all()
    assert fast[:, 2:].isfinite().all()


@pytest.mark.parametrize(
    "unlike",
    [
        lambda rnn: rnn.double(),
        lambda rnn: rnn.cell.register_forward_hook(lambda *_: None),
        lambda rnn: rnn.block.halting[0].linear.register_forward_pre_hook(lambda *_: None),
        lambda rnn: setattr(rnn.block, "mode", tp.ACT()),
        lambda rnn: nn.utils.parametrizations.weight_norm(rnn.cell, "weight_hh"),
    ],
    ids=["double", "hook", "head hook", "act", "parametrized"],
)
def test_what_the_kernel_does_not_do_is_left_to_the_loop(unlike):
    rnn = lively()
    assert recurrent.kernel_for(rnn.block, rnn.block.mode) is not None
    unlike(rnn)
    assert recurrent.kernel_for(rnn.block, rnn.block.mode) is None
    with torch.no_grad():
        rnn(torch.randn(2, 3, 5, dtype=rnn.cell.weight_hh.dtype))


def test_other_cells_and_other_nonlinearities_are_left_to_the_loop():
    class Own(nn.LSTMCell):
        pass

    for cell in (nn.RNNCell(6, 16, nonlinearity="relu"), Own(6, 16)):
        rnn = tp.AdaptiveRNN(cell, 3, mode="thresholded")
        assert recurrent.kernel_for(rnn.block, rnn.block.mode) is None


def test_without_a_compiler_there_is_the_loop(monkeypatch):
    monkeypatch.setattr(recurrent, "_there", lambda: False)
    with torch.no_grad():
        assert lively()(torch.randn(2, 3, 5))[0].shape == (2, 3, 32)


def test_a_layer_that_was_run_can_be_copied():
    rnn, x = lively(), torch.randn(2, 3, 5)
    fast, _ = both(rnn, x)
    again, _ = both(copy.deepcopy(rnn), x)
    assert torch.equal(fast[0], again[0])
