"""The compiled recurrent layers against the loop of AdaptiveRNN, on random weights, shapes and lengths."""

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence

import torchpact as tp
from torchpact.engines import Unsupported
from torchpact.engines.recurrent import native as recurrent
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


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("bias", [True, False])
def test_the_default_precision_and_device_do_not_matter(cell, bias):
    torch.manual_seed(0)
    rnn, x = lively(cell, bias=bias), torch.randn(4, 3, 5)
    rnn.cell.bias_hh = None  # one bias may be missing alone
    fast, slow = both(rnn, x)
    assert_same(fast, slow)
    twin = copy.deepcopy(rnn)  # its weights have not been laid out yet
    try:
        torch.set_default_dtype(torch.float64)
        wide, _ = both(twin, x)
        torch.set_default_device("meta")
        kernel: Any = recurrent.kernel_for(rnn.block, rnn.block.mode)
        other = kernel(*packed(x, rnn), rnn.block.mode)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert all(torch.equal(one, same) for one, same in zip(flat(wide), flat(fast), strict=True))
    assert torch.equal(other.output.view(4, 3, 32), fast[0])


def packed(x, rnn):
    """Sequences of one length, and zeros to begin with."""
    sizes = torch.full((len(x),), x.size(1), device="cpu")
    zeros = x.new_zeros(x.size(1), rnn.hidden_size)
    state = (zeros, zeros) if type(rnn.cell) is nn.LSTMCell else zeros
    return PackedSequence(x.flatten(0, 1), sizes), state


# Weights that change


def changes(rnn):
    """Ways to change a layer, some of which leave no trace in a tensor's version or address."""
    weight, fresh = rnn.cell.weight_hh, torch.randn_like(rnn.cell.weight_hh) / 6
    return {
        "in place": lambda: weight.add_(0.05),
        "of a view": lambda: weight.detach()[1:9].fill_(0.3),
        "through data": lambda: weight.data.add_(0.05),
        "through numpy": lambda: weight.detach().numpy().fill(0.1),
        "other data": lambda: setattr(weight, "data", fresh),
        "another parameter": lambda: setattr(rnn.cell, "weight_hh", nn.Parameter(fresh)),
        "same memory": lambda: setattr(rnn.cell, "weight_hh", nn.Parameter(weight.data).mul_(2)),
        "loaded": lambda: rnn.load_state_dict(lively(hidden=rnn.hidden_size).state_dict()),
        "optimizer": lambda: step(torch.optim.Adam(rnn.parameters(), 0.05)),
        "fused optimizer": lambda: step(torch.optim.Adam(rnn.parameters(), 0.05, fused=True)),
        "another cell": lambda: setattr(rnn.block.steps[0], "cell", nn.LSTMCell(6, rnn.hidden_size)),
        "one bias less": lambda: setattr(rnn.cell, "bias_hh", None),
        "more steps": lambda: setattr(rnn.block, "max_steps", 9),
    }


def step(optimizer):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("change", changes(lively()))
@pytest.mark.parametrize("hidden", [8, 200])
def test_changes_are_seen(change, hidden):
    torch.manual_seed(2)
    rnn, x = lively(hidden=hidden), torch.randn(5, 4, 5)
    first, _ = both(rnn, x)
    with torch.no_grad():
        changes(rnn)[change]()
    second, slow = both(rnn, x)
    assert (first[0] - second[0]).abs().max() > 1e-3
    assert_same(second, slow)


def test_a_few_numbers_changed_through_data_are_seen_once_told():
    rnn, x = lively(hidden=200), torch.randn(5, 4, 5)
    both(rnn, x)
    rnn.cell.weight_hh.data[3, 7:9] += 9
    recurrent.forget(rnn.block)
    assert_same(*both(rnn, x))


def test_weights_of_a_functional_call_are_those_given():
    torch.manual_seed(2)
    rnn, other, x = lively(), lively(), torch.randn(5, 4, 5)
    own = both(rnn, x)[0][0]
    with torch.no_grad():
        given, _, _ = torch.func.functional_call(rnn, dict(other.named_parameters()), (x,))
        assert torch.equal(given, other(x)[0])
        assert torch.equal(rnn(x)[0], own)


def test_a_head_that_was_replaced_is_seen():
    rnn, x = lively(halting_bias=1e4, max_steps=5), torch.randn(3, 4, 5)
    assert (both(rnn, x)[0][2].steps == 1).all()
    never = tp.AdaptiveRNN(nn.LSTMCell(6, 32), 5, halting=never_halt)
    rnn.block.halting[0] = never.block.halting[0]
    fast, slow = both(rnn, x)
    assert (fast[2].steps == 5).all()
    assert_same(fast, slow)


def test_a_head_without_a_bias():
    torch.manual_seed(0)
    rnn, x = lively(), torch.randn(3, 4, 5)
    rnn.block.halting[0].linear.bias = None
    assert_same(*both(rnn, x))


def test_weights_made_in_inference_mode_may_change():
    torch.manual_seed(2)
    with torch.inference_mode():
        rnn, x = lively(hidden=200), torch.randn(5, 4, 5)
        both(rnn, x)
        rnn.cell.weight_hh[7, 3] += 9
        assert_same(*both(rnn, x))


def test_weights_that_stay_are_laid_out_once_and_not_read_again(monkeypatch):
    rnn = lively(hidden=256)
    kernel = recurrent.kernel_for(rnn.block, rnn.block.mode)
    read, equal = [], torch.equal

    def watched(one, other):
        read.append(one.numel())
        return equal(one, other)

    monkeypatch.setattr(torch, "equal", watched)
    assert recurrent.kernel_for(rnn.block, rnn.block.mode) is kernel
    assert sum(read) < 0.05 * sum(p.numel() for p in rnn.parameters())


def test_tanh_is_right_to_a_few_units_in_the_last_place():
    """An RNNCell of one unit whose only weight is 1 is the function itself."""
    cell = nn.RNNCell(2, 1, bias=False)
    with torch.no_grad():
        cell.weight_ih.copy_(torch.tensor([[1.0, 0.0]]))
    rnn = tp.AdaptiveRNN(cell, 1, mode="thresholded")
    x = torch.logspace(-8, math.log10(20), 20_000)
    x = torch.cat([x, -x]).view(1, -1, 1)
    (output, _, _), _ = both(rnn, x)
    exact = x.double().tanh()
    assert ((output - exact) / exact).abs().max() < 4 * 2**-23
    assert output.abs().max() == 1


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
        lambda rnn: setattr(rnn.cell.weight_hh, "data", torch.randn(32, 128).t()),
    ],
    ids=["double", "hook", "head hook", "act", "parametrized", "transposed"],
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


def test_a_layer_that_was_run_leaves_nothing_behind():
    rnn = lively()
    both(rnn, torch.randn(2, 3, 5))
    left = [weakref.ref(rnn.block), weakref.ref(rnn.cell.weight_hh)]
    del rnn
    gc.collect()
    assert [each() for each in left] == [None, None]


def test_a_layer_that_was_run_can_be_copied():
    rnn, x = lively(), torch.randn(2, 3, 5)
    fast, _ = both(rnn, x)
    again, _ = both(copy.deepcopy(rnn), x)
    assert torch.equal(fast[0], again[0])
