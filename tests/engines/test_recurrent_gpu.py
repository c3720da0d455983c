"""Recurrent layers for GPUs against the loop of AdaptiveRNN; the kernels run in Triton's interpreter here."""

import gc
import math
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import torchpact as tp
from tests.engines.elsewhere import compiled_elsewhere
from tests.engines.recurrent_layers import CELLS, DEVICE, decided, lively, random, states
from torchpact.core.call_args import CallArgs
from torchpact.engines.base import Unsupported
from torchpact.engines.recurrent import gpu as recurrent_gpu
from torchpact.engines.recurrent import gpu_call as recurrent_gpu_call
from torchpact.engines.recurrent import gpu_lane as recurrent_gpu_lane
from torchpact.engines.recurrent.gpu import GPURecurrent, GPURunner, Reader, fitting_layer
from torchpact.engines.recurrent.runner import call_of, kernel_refusal
from torchpact.models import never_halt
from torchpact.specs import block_spec

pytest.importorskip("triton", reason="needs Triton")

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # by NumPy


def runner_of(rnn):
    """A runner, on whatever device."""
    return GPURunner(block_spec(rnn))


def reader_of(rnn):
    return Reader(fitting_layer(block_spec(rnn)))


def reason(rnn, x):
    """Why the kernels are not for a layer or a call, whatever the device; None if they are."""
    try:
        return kernel_refusal(fitting_layer(block_spec(rnn)), call_of(rnn, x, CallArgs()))
    except Unsupported as found:
        return str(found)


def both(rnn, x, state=None, runner=None, thresholds=None, **options):
    """What the kernels and the loop make of it."""
    assert reason(rnn, x) is None
    bounds = None if thresholds is None else rnn.block.bounds_of(rnn.block.mode, thresholds)
    fast = (runner or runner_of(rnn))(x, CallArgs((state,), options), bounds)
    with torch.no_grad():
        return fast, rnn(x, state, thresholds=thresholds, **options)


def assert_same(fast, slow):
    assert torch.equal(fast[2].steps, slow[2].steps)
    assert fast[2].log_prob is slow[2].log_prob is None
    # each is of one type, which it checks; the weights of heads are large
    torch.testing.assert_close(states(fast), states(slow), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fast[2][:4], slow[2][:4], rtol=1e-4, atol=1e-4)
    assert fast[2][6:] == slow[2][6:]
    assert (fast[2].weights is None) == (slow[2].weights is None)
    if slow[2].weights is not None:
        assert torch.equal(fast[2].weights, slow[2].weights)


@settings(max_examples=12, deadline=None)
@given(
    cell=st.sampled_from(CELLS),
    hidden=st.sampled_from([1, 5, 16, 30]),
    batch=st.integers(1, 7),
    time=st.integers(1, 3),
    max_steps=st.integers(1, 4),
    bias=st.booleans(),
    ragged=st.booleans(),
    started=st.booleans(),
    threshold=st.sampled_from([0.2, 0.5, 0.9]),
    seed=st.integers(0, 10**6),
)
def test_the_kernels_are_the_loop(
    cell, hidden, batch, time, max_steps, bias, ragged, started, threshold, seed
):
    torch.manual_seed(seed)
    rnn = lively(cell, hidden, max_steps=max_steps, bias=bias, batch_first=True)
    rnn.block.mode = tp.Thresholded(threshold)
    x = random(batch, time, 3)
    state = None
    if started:
        h = random(batch, hidden)
        state = (h, h.sin()) if cell is nn.LSTMCell else h
    options = {"lengths": torch.randint(1, time + 1, (batch,))} if ragged else {}
    fast, slow = both(rnn, x, state, **options)
    if max_steps > 1:  # closer to the threshold, rounding decides
        assume((slow[2].probs[:-1] - threshold).abs().min() > 1e-4)
    assert_same(fast, slow)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cell", CELLS)
def test_half_precision(cell, dtype):
    torch.manual_seed(1)
    rnn, x = lively(cell, 16).to(dtype), random(2, 6, 3, dtype=dtype)
    fast, slow = both(rnn, x)
    clear = decided(slow[2], 0.1)
    assert clear.any()
    assert torch.equal(fast[2].steps[clear], slow[2].steps[clear])
    assert fast[0].dtype == dtype
    assert fast[2].probs.dtype == slow[2].probs.dtype == torch.float32
    torch.testing.assert_close(fast[0][:, clear], slow[0][:, clear], rtol=0, atol=2e-2)


def test_products_have_fewer_rows_when_sequences_end(monkeypatch):
    torch.manual_seed(0)
    rnn, x = lively(nn.GRUCell, 4, max_steps=2), random(9, 20, 3)
    sizes, iterate = [], recurrent_gpu_lane.Lane._iterate

    def watched(lane, rows):
        sizes.append(rows)
        iterate(lane, rows)

    monkeypatch.setattr(recurrent_gpu_lane, "LEAST_ROWS", 2)
    monkeypatch.setattr(recurrent_gpu_lane.Lane, "_iterate", watched)
    fast, slow = both(rnn, x, lengths=[9, 8, 5, *[1] * 16, 2])
    assert_same(fast, slow)
    if not CUDA:  # there they are in graphs
        assert sizes[0] == 24
        assert sizes[1:] == sorted(sizes[1:], reverse=True)
        assert sizes[1] <= 4


@pytest.mark.skipif(CUDA, reason="with a CUDA device it is what all other tests do")
def test_graphs_that_run_in_vain_in_the_end_change_nothing(monkeypatch):
    """The host's loop, which looks one graph late."""
    torch.manual_seed(0)
    started: list[int] = []
    iterate, event = recurrent_gpu_lane.Lane._iterate, SimpleNamespace(synchronize=lambda: None)

    def read(lane, inputs, piece, result, bound):
        lane._begin(inputs, piece, result, bound)
        lane._run_to_the_end(lane._size_for(piece.batch))

    def late(lane, rows):
        """As if the host read what the graph before has left."""
        left = lane.counts[0, 0].clone()
        iterate(lane, rows)
        lane.left.fill_(left)
        started.append(rows)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(record_event=lambda: event))
    monkeypatch.setattr(recurrent_gpu_lane.Lane, "read", read)
    monkeypatch.setattr(recurrent_gpu_lane.Lane, "_iterate", late)
    monkeypatch.setattr(recurrent_gpu_lane, "LEAST_ROWS", 2)
    rnn = lively(nn.RNNCell, 4, max_steps=2)
    fast, slow = both(rnn, random(9, 6, 3), lengths=[9, 8, 1, 1, 2, 1])
    assert_same(fast, slow)
    ran = -(-int(slow[2].steps.sum(1).max()) // recurrent_gpu_lane.ITERATIONS)
    assert len(started) == ran + 1
    assert started == sorted(started, reverse=True)
    assert started[0] == 6
    assert started[-1] == 2


@pytest.mark.parametrize("hidden", [512, 520])
def test_rows_are_counted_anew_in_every_gathering(hidden):
    torch.manual_seed(0)
    rnn = lively(nn.RNNCell, hidden, max_steps=3)
    runner, x = runner_of(rnn), random(3, 5, 3)
    runner.reader.asked_for_clusters = True  # and found none
    assert_same(*both(rnn, x, runner=runner, lengths=[3, 1, 2, 3, 1]))
    (lane,) = runner.reader.lanes.values()
    assert lane.counts[:, 0].max() == 0  # after the end, and never more than there were
    final = (torch.zeros(5, hidden, device=DEVICE),)
    result = recurrent_gpu_call.Result(x.flatten(0, 1), None, final, 3)
    piece = recurrent_gpu_call.Piece(slice(0, 15), torch.tensor([0, 5, 10, 15, 15]), 5)
    inputs = torch.zeros(15, hidden, device=DEVICE)  # of which the lane has but the address
    lane._begin(inputs, piece, result, math.inf)
    for left in (5, 5, 0):  # nobody halts before the third of three iterations, nine in all
        lane._iterate(6)
        assert lane.counts[0, 0] == left


def test_with_deterministic_algorithms_all_products_are_of_one_size():
    rnn = lively()
    try:
        torch.use_deterministic_algorithms(True)
        assert reader_of(rnn).lane(100).sizes == [128]
    finally:
        torch.use_deterministic_algorithms(False)
    assert reader_of(rnn).lane(100).sizes == [128, 96, 64, 48, 32]
    assert reader_of(rnn.half()).lane(100).sizes == [128, 96, 64, 48, 32, 24, 16]


def test_places_on_the_device_are_kept_for_one_stream(monkeypatch):
    stream, rnn = 1, lively()
    lane = reader_of(rnn).lane(3)
    inputs: Any = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: stream, raising=False)
    (piece,), (other,) = (recurrent_gpu_call.pieces_of(torch.tensor([3] * time), 100) for time in (2, 4))
    for places in (recurrent_gpu_call.Places(), lane.places):
        first = places.of(piece, inputs)
        assert first.tolist() == [0, 3, 6, 6]
        assert first.dtype == torch.int32
        assert places.of(piece, inputs) is first
        stream = 2
        second = places.of(piece, inputs)
        assert second is not first
        assert torch.equal(second, first)
        assert places.of(other, inputs).tolist() == [0, 3, 6, 9, 12, 12]
        stream = 1


def test_long_sequences_are_read_in_pieces(monkeypatch):
    torch.manual_seed(0)
    rnn, x = lively(max_steps=3), random(7, 4, 3)
    monkeypatch.setattr(recurrent_gpu, "MOST_INPUTS", 7 * 32)
    assert_same(*both(rnn, x, lengths=[3, 7, 1, 6]))
    assert_same(*both(rnn, x))


@pytest.mark.parametrize("batch_first", [False, True])
def test_whole_sequences_come_back_laid_out_as_from_the_loop(batch_first):
    torch.manual_seed(0)
    rnn, x = lively(batch_first=batch_first), random(3, 5, 3)
    (fast, _, ponder), (slow, _, expected) = both(rnn, x)
    assert fast.shape == slow.shape
    for one, other in zip(ponder[:4], expected[:4], strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize("cell", CELLS)
def test_an_empty_batch_gives_empty_results(cell):
    fast, slow = both(lively(cell), random(4, 0, 3))
    assert fast[0].shape == (4, 0, 8)
    assert_same(fast, slow)


def test_never_halting_repeats_the_cell():
    rnn = tp.AdaptiveRNN(nn.GRUCell(4, 16), 3, halting=never_halt, mode="thresholded").to(DEVICE)
    fast, slow = both(rnn, random(2, 3, 3))
    assert (fast[2].steps == 3).all()
    assert_same(fast, slow)


def test_biases_may_be_missing():
    torch.manual_seed(0)
    rnn, x = lively(), random(2, 4, 3)
    rnn.cell.bias_hh = None
    rnn.block.halting[0].linear.bias = None
    assert_same(*both(rnn, x))


def test_large_and_broken_numbers_come_out_as_from_the_loop():
    torch.manual_seed(3)
    rnn, x = lively(), random(3, 4, 3)
    x[:, 0] *= 1e4
    x[1, 1] = math.nan
    (fast, _, ponder), (slow, _, expected) = both(rnn, x)
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5, equal_nan=True)
    for one, other in zip(ponder[:4], expected[:4], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert fast[1:, 1].isnan().all()
    assert fast[:, 2:].isfinite().all()


def test_results_are_the_callers_own():
    torch.manual_seed(0)
    rnn = lively()
    runner, state = runner_of(rnn), (random(3, 8), random(3, 8))
    before = [part.clone() for part in state]
    first, slow = both(rnn, random(2, 3, 3), state, runner)
    both(rnn, random(2, 3, 3), state, runner)
    assert_same(first, slow)
    assert all(torch.equal(part, old) for part, old in zip(state, before, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda rnn: [parameter.data.view(-1)[::3].add_(0.5) for parameter in rnn.parameters()],
        lambda rnn: setattr(rnn.cell.weight_hh, "data", torch.randn_like(rnn.cell.weight_hh)),
        lambda rnn: setattr(rnn.cell, "weight_hh", nn.Parameter(torch.randn_like(rnn.cell.weight_hh))),
        lambda rnn: setattr(rnn.block.steps[0], "cell", nn.LSTMCell(4, 8).to(DEVICE)),
        lambda rnn: setattr(rnn.cell, "bias_hh", None),
        lambda rnn: setattr(rnn.block, "max_steps", 9),
        lambda rnn: setattr(rnn.cell.weight_hh, "data", torch.randn(8, 32, device=DEVICE).t()),
    ],
    ids=["values", "data", "parameter", "cell", "bias", "steps", "transposed"],
)
def test_a_runner_is_of_the_layer_as_it_is_when_it_is_built(change):
    torch.manual_seed(2)
    rnn, x = lively(), random(3, 4, 3)
    first, _ = both(rnn, x)
    with torch.no_grad():
        change(rnn)
    second, slow = both(rnn, x)
    assert (first[0] - second[0]).abs().max() > 1e-3
    assert_same(second, slow)


@pytest.mark.parametrize("bound", [-math.inf, -30.0, 0.5, 30.0, math.inf])
@pytest.mark.parametrize("whole", [True, False])
def test_one_threshold_for_all_heads(bound, whole):
    torch.manual_seed(1)
    rnn, x = lively(), random(3, 6, 3)
    lengths = None if whole else [3, 1, 2, 3, 1, 2]
    fast, slow = both(rnn, x, thresholds=tp.Thresholds([[bound] * 3]), lengths=lengths)
    assert_same(fast, slow)
    expected = {-math.inf: 1, math.inf: 4}.get(bound)
    assert expected is None or slow[2].steps.max() == slow[2].steps[slow[2].steps > 0].min() == expected


def test_a_threshold_that_all_logits_exceed_halts_even_at_minus_infinity():
    rnn = tp.AdaptiveRNN(nn.GRUCell(4, 16), 3, halting=never_halt, mode="thresholded").to(DEVICE)
    fast, slow = both(rnn, random(2, 3, 3), thresholds=tp.Thresholds("always"))
    assert (fast[2].steps == 1).all()
    assert_same(fast, slow)


def test_thresholds_that_differ_by_head_are_left_to_the_loop():
    rnn, x = lively(max_steps=3), random(2, 3, 3)
    with pytest.raises(Unsupported, match=r"^expected the mode thresholded with one threshold for all heads"):
        runner_of(rnn)(x, bounds=(0.0, 1.0))


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_name_and_the_price_are_those_of_the_layer(batch_first):
    rnn = lively(batch_first=batch_first)
    rnn.block.name, rnn.block.price = "reader", 3.0
    for options in ({}, {"lengths": [2, 1, 2]}):
        fast, slow = both(rnn, random(3, 3, 3), **options)
        assert_same(fast, slow)
        assert (fast[2].name, fast[2].price) == ("reader", 3.0)


def test_wrong_calls_are_told_as_by_the_layer():
    runner = runner_of(lively())
    with pytest.raises(ValueError, match=r"^expected input of shape \(time, batch, 3\), got \(2, 3, 4\)"):
        runner(random(2, 3, 4))
    with pytest.raises(ValueError, match=r"^expected an initial state of shape \(\(3, 8\), \(3, 8\)\), got"):
        runner(random(2, 3, 3), CallArgs((random(3, 8),)))


def test_the_last_few_sizes_of_batches_are_kept():
    rnn = lively()
    reader = reader_of(rnn)
    lanes = [reader.lane(batch) for batch in (1, 2, 3, 4)]
    assert reader.lane(1) is lanes[0]
    assert reader.lane(5) is reader.lane(6)
    assert reader.lane(2) is not lanes[1]
    assert reader.lane(1) is lanes[0]
    assert len(reader.lanes) == recurrent_gpu.MOST_LANES


@pytest.mark.parametrize(
    ("unlike", "expected"),
    [
        (
            lambda rnn: rnn.double(),
            "expected all weights of one device and precision (float32, bfloat16, float16",
        ),
        (
            lambda rnn: rnn.cell.register_forward_hook(lambda *_: None),
            "expected units and heads without forward",
        ),
        (lambda rnn: rnn.block.halting[0].half(), "expected all weights of one device and precision"),
        (lambda rnn: setattr(rnn.block, "mode", tp.ACT()), "expected the mode thresholded, got ACT"),
        (
            lambda rnn: setattr(rnn.block, "mode", tp.Discrete()),
            "expected the mode thresholded, got Discrete",
        ),
        (
            lambda rnn: nn.utils.parametrizations.weight_norm(rnn.cell, "weight_hh"),
            "expected an nn.LSTMCell, an nn.GRUCell or an nn.RNNCell with tanh, got Param",
        ),
        (
            lambda rnn: setattr(
                rnn.block.steps[0], "cell", nn.RNNCell(4, 8, nonlinearity="relu", device=DEVICE)
            ),
            "expected an nn.LSTMCell, an nn.GRUCell or an nn.RNNCell with tanh, got RNNCell",
        ),
        (
            lambda rnn: setattr(rnn.block.steps[0], "cell", nn.RNNCell(4, 5000, device=DEVICE)),
            "expected at most 4096",
        ),
    ],
    ids=["double", "hook", "half head", "act", "discrete", "parametrized", "relu", "large"],
)
def test_layers_that_the_kernels_are_not_there_for_are_refused_with_the_reason(unlike, expected):
    rnn = lively()
    x = random(2, 3, 3)
    assert reason(rnn, x) is None
    unlike(rnn)
    found = reason(rnn, x.to(rnn.cell.weight_hh.dtype))
    assert found.startswith(expected)
    assert "\n" not in found


def test_calls_that_the_kernels_are_not_there_for_are_refused_with_the_reason():
    rnn, x = lively(), random(2, 3, 3)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert reason(rnn, x) == "expected a call without autocast, got one with"
    assert reason(rnn, x.half()).startswith("expected inputs and states of torch.float32 on ")
    assert not runner_of(rnn).accepts(x, CallArgs(((random(3, 8), random(3, 8).half()),)))


@pytest.mark.skipif(CUDA, reason="with a CUDA device that is the device")
def test_layers_on_other_devices_are_refused():
    rnn, x = lively(), random(2, 3, 3)
    expected = "expected a layer on a CUDA device, got one on cpu"
    assert GPURecurrent().supports(block_spec(rnn), CallArgs((x,))) == expected
    with pytest.raises(Unsupported, match=f"^{expected}$"):
        GPURecurrent().build(block_spec(rnn), CallArgs((x,)))


def test_where_kernels_cannot_be_made_calls_are_refused_with_the_reason(monkeypatch):
    tried = []

    def fail(*_):
        tried.append(1)
        raise OSError("no\ncompiler")

    rnn, x = lively(), random(2, 3, 3)
    monkeypatch.setattr(recurrent_gpu, "clusters_for", lambda *_: None)
    monkeypatch.setattr(recurrent_gpu, "Lane", fail)
    runner = runner_of(rnn)
    for _ in range(2):
        with pytest.raises(Unsupported, match=r"^no kernels \(no compiler\)$"):
            runner(x)
    assert len(tried) == 1
    with pytest.raises(Unsupported, match=r"^no kernels \(no compiler\)$"):
        runner.prepare(call_of(rnn, x, CallArgs()))


def test_where_there_is_no_room_for_clusters_they_are_asked_for_again(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("full")

    reader = reader_of(lively())
    monkeypatch.setattr(recurrent_gpu, "clusters_for", full)
    with pytest.raises(Unsupported, match=r"^no memory for its buffers \(full\)$"):
        reader.for_batch(3)
    assert reader.problem is None
    clusters = SimpleNamespace(most_rows=3)
    monkeypatch.setattr(recurrent_gpu, "clusters_for", lambda *_: clusters)
    assert reader.for_batch(3) is clusters


def test_where_clusters_cannot_be_made_there_are_graphs_and_the_reason(monkeypatch):
    def refuse(*_):
        raise Unsupported("no clusters")

    reader = reader_of(lively())
    monkeypatch.setattr(recurrent_gpu, "clusters_for", refuse)
    assert reader.for_batch(3) is reader.lane(3)
    assert reader.problem is None
    assert reader.without_clusters == "no clusters"


def test_a_runner_that_is_dropped_leaves_nothing_behind():
    rnn = lively()
    runner = runner_of(rnn)
    both(rnn, random(1, 2, 3), runner=runner)
    left = [weakref.ref(rnn.block), weakref.ref(rnn.cell.weight_hh), weakref.ref(runner.reader)]
    del rnn, runner
    gc.collect()
    assert [each() for each in left] == [None, None, None]


@pytest.mark.slow
def test_kernels_compile_for_a_device_that_is_not_here(tmp_path):
    """What the interpreter runs the compiler may refuse."""
    found = compiled_elsewhere("tests.engines.compile_recurrent", tmp_path)
    assert [name for name, *_ in found] == ["begin", "move", "move", "move"] * 3 + ["move"] * 2
    # rows of 512 and 1500 units are loaded four numbers at a time, those of 5 are not
    assert [int(wide) > 0 for *_, wide in found] == [True] * 13 + [False]
