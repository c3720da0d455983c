"""The recurrent kernel in C++ against the loop of AdaptiveRNN, on random weights, shapes and lengths."""

import copy
import gc
import itertools
import math
import threading
import weakref
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import torchpact as tp
from torchpact.core.call_args import CallArgs
from torchpact.engines.base import Unsupported
from torchpact.engines.recurrent import native as recurrent
from torchpact.engines.recurrent.layer import layer_of
from torchpact.models import HaltingUnit, never_halt
from torchpact.specs import block_spec

try:
    recurrent.library()
except Unsupported as error:
    pytest.skip(str(error), allow_module_level=True)

ENGINE = recurrent.NativeRecurrent()
CELLS = [nn.LSTMCell, nn.GRUCell, nn.RNNCell]


def lively(cell=nn.LSTMCell, hidden=32, features=5, max_steps=6, bias=True, halting_bias=0.0, **options):
    """A layer whose examples halt at all steps, since whether a state halts is close to a coin."""
    head = HaltingUnit(hidden, halting_bias)
    nn.init.normal_(head.linear.weight, std=20.0)
    body = cell(features + 1, hidden, bias=bias)
    return tp.AdaptiveRNN(body, max_steps, halting=head, mode="thresholded", **options)


def reason(rnn, x, *args, **named):
    """Why the engine does not take a layer; None if it does."""
    return ENGINE.supports(block_spec(rnn), CallArgs((x, *args), named))


def built(rnn, x, *args, **named):
    """A runner of a layer."""
    assert reason(rnn, x, *args, **named) is None
    return ENGINE.build(block_spec(rnn), CallArgs((x, *args), named))


def both(rnn, x, state=None, **options):
    """What the kernel and the loop make of it; every state is far enough from the threshold."""
    fast = built(rnn, x, state, **options)(x, CallArgs((state,), options))
    with torch.no_grad():
        return fast, rnn(x, state, **options)


def assert_same(fast, slow):
    assert [type(x) for x in fast[2]] == [type(x) for x in slow[2]]
    assert torch.equal(fast[2].steps, slow[2].steps)
    for one, other in zip(flat(fast), flat(slow), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def flat(result):
    output, state, ponder = result
    tensors = [x for x in ponder if isinstance(x, Tensor)]
    return [output, *(state if isinstance(state, tuple) else (state,)), *tensors]


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
    try:
        torch.set_default_dtype(torch.float64)
        wide = built(rnn, x)(x)
        torch.set_default_device("meta")
        kernel = recurrent.RecurrentKernel(layer_of(block_spec(rnn), recurrent.PRECISIONS))
        sequences, state = packed(x, rnn)
        other = kernel(sequences, state, rnn.block.mode.bound)
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


@pytest.mark.parametrize("cell", CELLS)
def test_packed_sequences_come_back_as_they_came(cell):
    torch.manual_seed(0)
    rnn, h = lively(cell), torch.randn(5, 32)
    sequences = pack_padded_sequence(torch.randn(6, 5, 5), [3, 6, 1, 6, 2], enforce_sorted=False)
    (fast, *rest), (slow, *others) = both(rnn, sequences, (h, h.sin()) if cell is nn.LSTMCell else h)
    assert_same((fast.data, *rest), (slow.data, *others))
    assert fast.batch_sizes is sequences.batch_sizes
    assert fast.unsorted_indices is sequences.unsorted_indices


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_name_the_price_and_the_layout_are_those_of_the_layer(batch_first):
    rnn, x = lively(batch_first=batch_first), torch.randn(4, 3, 5)
    rnn.block.name, rnn.block.price = "reader", 3.0
    fast, slow = both(rnn, x)
    assert_same(fast, slow)
    assert [(each[2].name, each[2].price) for each in (fast, slow)] == [("reader", 3.0)] * 2
    assert fast[0].shape == slow[0].shape


# Thresholds of a run


@pytest.mark.parametrize("bound", [-math.inf, -30.0, 0.5, 30.0, math.inf])
@pytest.mark.parametrize("cell", CELLS)
def test_one_threshold_for_all_heads(cell, bound):
    torch.manual_seed(1)
    rnn, x = lively(cell, max_steps=4), torch.randn(7, 20, 5)
    runner, bounds = built(rnn, x), (bound,) * 3
    with torch.no_grad():
        slow = rnn(x, thresholds=tp.Thresholds([bounds]))
    assert_same(runner(x, bounds=bounds), slow)
    assert_same(runner(x, CallArgs((), {"thresholds": tp.Thresholds(bound)})), slow)
    expected = {-math.inf: [1], math.inf: [4]}.get(bound)
    assert expected is None or slow[2].steps.unique().tolist() == expected


@pytest.mark.parametrize("halting", [never_halt, HaltingUnit(16, -math.inf)])
def test_a_threshold_that_all_logits_exceed_halts_even_at_minus_infinity(halting):
    rnn, x = tp.AdaptiveRNN(nn.GRUCell(6, 16), 3, halting=halting, mode="thresholded"), torch.randn(4, 3, 5)
    runner = built(rnn, x)
    assert (runner(x)[2].steps == 3).all()
    with torch.no_grad():
        slow = rnn(x, thresholds=tp.Thresholds("always"))
    assert (slow[2].steps == 1).all()
    assert_same(runner(x, bounds=(-math.inf, -math.inf)), slow)


def test_thresholds_that_were_set_on_the_layer_count():
    rnn, x = lively(max_steps=3), torch.randn(4, 3, 5)
    tp.use_thresholds(rnn, tp.Thresholds("always"))
    fast, slow = both(rnn, x)
    assert_same(fast, slow)
    assert (fast[2].steps == 1).all()


def test_thresholds_that_differ_by_head_are_left_to_the_loop():
    rnn, x = lively(max_steps=3), torch.randn(4, 3, 5)
    runner = built(rnn, x)
    expected = "expected the mode thresholded with one threshold for all heads, got Thresholded"
    with pytest.raises(Unsupported, match=f"^{expected}"):
        runner(x, bounds=(0.0, 1.0))
    named = {"thresholds": tp.Thresholds([[0.0, 1.0]])}
    assert not runner.accepts(x, CallArgs((), named))
    assert reason(rnn, x, **named).startswith(expected)
    assert runner.accepts(x, CallArgs((), {"thresholds": tp.Thresholds([[1.0, 1.0]])}))


def test_a_mode_of_the_call_counts():
    torch.manual_seed(0)
    rnn, x = lively(), torch.randn(7, 20, 5)
    runner = built(rnn, x)
    named = {"mode": tp.Thresholded(0.9)}
    with torch.no_grad():
        assert_same(runner(x, CallArgs((), named)), rnn(x, **named))
    assert runner.accepts(x, CallArgs((), {"mode": None, "lengths": None}))
    assert not runner.accepts(x, CallArgs((), {"mode": "act"}))


def test_threads_may_run_one_layer_at_the_same_time_with_other_thresholds():
    torch.manual_seed(0)
    rnn = lively(hidden=64)
    inputs = [torch.randn(10, 30, 5) for _ in range(4)]
    bounds = [None, (0.5,) * 5, (-math.inf,) * 5, (-8.0,) * 5]
    runner = built(rnn, inputs[0])
    cases = list(itertools.product(inputs, bounds))
    expected = [runner(x, bounds=each) for x, each in cases]
    assert len({tuple(found[2].steps.flatten().tolist()) for found in expected}) > 8
    wrong: list[int] = []

    def run(offset):
        for index in range(40):
            at = (index + 5 * offset) % len(cases)
            x, each = cases[at]
            found = runner(x, bounds=each)
            pairs = zip(flat(found), flat(expected[at]), strict=True)
            if not all(torch.equal(one, other) for one, other in pairs):
                wrong.append(at)

    threads = [threading.Thread(target=run, args=(offset,)) for offset in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Weights


def test_weights_are_laid_out_once_when_the_runner_is_built(monkeypatch):
    torch.manual_seed(2)
    rnn, x = lively(), torch.randn(5, 4, 5)
    runner = built(rnn, x)
    first = runner(x)
    monkeypatch.setattr(recurrent, "RecurrentKernel", lambda *_: pytest.fail("weights were laid out again"))
    with torch.no_grad():
        for parameter in rnn.parameters():
            parameter.add_(0.05)
    assert all(torch.equal(*pair) for pair in zip(flat(runner(x)), flat(first), strict=True))
    monkeypatch.undo()
    second, slow = both(rnn, x)
    assert (first[0] - second[0]).abs().max() > 1e-3
    assert_same(second, slow)


def test_a_head_that_was_replaced_is_seen_when_the_runner_is_built():
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


def test_weights_made_in_inference_mode():
    torch.manual_seed(2)
    with torch.inference_mode():
        rnn, x = lively(hidden=200), torch.randn(5, 4, 5)
        assert_same(*both(rnn, x))


def test_weights_may_be_transposed_in_memory():
    torch.manual_seed(2)
    rnn, x = lively(), torch.randn(5, 4, 5)
    rnn.cell.weight_hh.data = torch.randn(32, 128).t() / 6
    assert_same(*both(rnn, x))


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
    ("unlike", "expected"),
    [
        (
            lambda rnn: rnn.double(),
            r"expected all weights of one device and precision \(float32\), got float64",
        ),
        (lambda rnn: rnn.block.halting[0].half(), "got float16 on cpu, float32 on cpu"),
        (lambda rnn: rnn.cell.register_forward_hook(lambda *_: None), "without forward hooks"),
        (lambda rnn: rnn.register_forward_hook(lambda *_: None), "a layer without hooks"),
        (
            lambda rnn: rnn.block.halting[0].linear.register_forward_pre_hook(lambda *_: None),
            "without forward hooks",
        ),
        (lambda rnn: setattr(rnn.block, "mode", tp.ACT()), "expected the mode thresholded, got ACT"),
        (
            lambda rnn: setattr(rnn.block, "mode", tp.Discrete()),
            "expected the mode thresholded, got Discrete",
        ),
        (
            lambda rnn: nn.utils.parametrizations.weight_norm(rnn.cell, "weight_hh"),
            "got ParametrizedLSTMCell",
        ),
        (
            lambda rnn: rnn.block.halting.__setitem__(0, nn.Linear(32, 1)),
            "expected a HaltingUnit or never_halt",
        ),
    ],
    ids=["double", "half head", "hook", "layer hook", "head hook", "act", "discrete", "parametrized", "head"],
)
def test_layers_that_the_kernel_is_not_there_for_are_refused_with_the_reason(unlike, expected):
    rnn, x = lively(), torch.randn(2, 3, 5)
    assert reason(rnn, x) is None
    unlike(rnn)
    x = x.to(rnn.cell.weight_hh.dtype)
    with pytest.raises(Unsupported, match=expected) as error:
        ENGINE.build(block_spec(rnn), CallArgs((x,)))
    assert str(error.value) == reason(rnn, x)
    assert "\n" not in str(error.value)


def test_other_cells_and_other_nonlinearities_are_refused():
    class Own(nn.LSTMCell):
        pass

    for cell in (nn.RNNCell(6, 16, nonlinearity="relu"), Own(6, 16)):
        rnn = tp.AdaptiveRNN(cell, 3, mode="thresholded")
        assert reason(rnn, torch.randn(2, 3, 5)).startswith(
            "expected an nn.LSTMCell, an nn.GRUCell or an nn.RNN"
        )


class Nothing(TorchDispatchMode):
    """Watches what runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_calls_that_the_kernel_is_not_there_for_are_refused_with_the_reason():
    rnn, x = lively(), torch.randn(2, 3, 5)
    runner, h = built(rnn, x), torch.zeros(3, 32)
    assert runner.accepts(x, CallArgs(((h, h),)))
    assert not runner.accepts(x, CallArgs(((h, h.double()),)))
    with pytest.raises(
        Unsupported, match=r"^expected inputs and states of torch\.float32 on cpu, got torch\.float64"
    ):
        runner(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert reason(rnn, x) == "expected a call without autocast, got one with"
    with Nothing():
        assert not runner.accepts(x, CallArgs())
    assert reason(rnn, x.to("meta")).startswith("expected values that can be read")
    assert runner.accepts(x, CallArgs())


def test_wrong_calls_are_told_as_by_the_layer():
    rnn = lively()
    runner = built(rnn, torch.randn(2, 3, 5))
    with pytest.raises(ValueError, match=r"^expected input of shape \(time, batch, 5\), got \(2, 3, 4\)"):
        runner(torch.randn(2, 3, 4))
    with pytest.raises(
        ValueError, match=r"^expected an initial state of shape \(\(3, 32\), \(3, 32\)\), got"
    ):
        runner(torch.randn(2, 3, 5), CallArgs((torch.zeros(3, 32),)))
    with pytest.raises(ValueError, match=r"^expected lengths of 1 to 2, got 3"):
        runner(torch.randn(2, 3, 5), CallArgs((), {"lengths": [1, 3, 1]}))


def test_nothing_needs_gradients_or_keeps_them():
    rnn, x = lively(), torch.randn(2, 3, 5, requires_grad=True)
    output, state, ponder = built(rnn, x)(x)
    assert not any(part.requires_grad for part in flat((output, state, ponder)))


def test_a_runner_that_is_dropped_leaves_nothing_behind():
    rnn, x = lively(), torch.randn(2, 3, 5)
    runner = built(rnn, x)
    runner(x)
    left = [weakref.ref(rnn.block), weakref.ref(rnn.cell.weight_hh), weakref.ref(runner.kernel.weights)]
    del rnn, runner
    gc.collect()
    assert [each() for each in left] == [None, None, None]


def test_a_layer_that_was_run_can_be_copied():
    rnn, x = lively(), torch.randn(2, 3, 5)
    fast, _ = both(rnn, x)
    again, _ = both(copy.deepcopy(rnn), x)
    assert torch.equal(fast[0], again[0])
