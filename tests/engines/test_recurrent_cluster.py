"""Clusters that read recurrent layers, against the loop of AdaptiveRNN.

The kernel runs here as C++ on the CPU, from the very source that a GPU gets; see recurrent_emulator.hpp.
"""

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.engines.recurrent_emulation import library
from tests.engines.recurrent_layers import CELLS, decided, lively, random, states
from torchpact.core.call_args import CallArgs
from torchpact.engines.base import Unsupported
from torchpact.engines.conv.onchip import nvrtc
from torchpact.engines.recurrent import cluster as recurrent_cluster
from torchpact.engines.recurrent import gpu as recurrent_gpu
from torchpact.engines.recurrent import gpu_call as recurrent_gpu_call
from torchpact.engines.recurrent.cluster import Clusters, shape_of
from torchpact.engines.recurrent.gpu import GPURunner, fitting_layer
from torchpact.engines.recurrent.gpu_lane import Lane
from torchpact.engines.recurrent.layer import Layer, layer_of
from torchpact.models import never_halt
from torchpact.specs import block_spec

CUDA = torch.cuda.is_available()
emulated_only = pytest.mark.skipif(CUDA, reason="the emulator reads the memory of the CPU")


def runner_of(rnn, at_once=2, slots=None, reverse=False):
    """A runner whose clusters are emulated, and a list of how many were started, with how many slots."""
    layer = fitting_layer(block_spec(rnn))
    shape = shape_of(layer)._replace(**({} if slots is None else {"slots": slots}))
    used: list[tuple[int, int]] = []

    def launch(args, clusters):
        used.append((clusters, args.slots))
        fault = library(shape).emulate(ctypes.byref(args), clusters, int(reverse))
        assert fault is None, fault.decode()

    runner = GPURunner(block_spec(rnn))
    runner.reader.clusters = Clusters(layer, launch, at_once)
    runner.reader.clusters.shape = shape
    runner.reader.asked_for_clusters = True
    return runner, used


def assert_alike(rnn, made, x, state=None, thresholds=None, **options):
    """Compare a runner with the loop."""
    runner, used = made
    named = options | {"thresholds": thresholds}
    fast = runner(x, CallArgs((state,), named))
    with torch.no_grad():
        slow = rnn(x, state, **named)
    clear = decided(slow[2]) if rnn.max_steps > 1 else slow[2].steps[:, 0] > 0
    assert clear.double().mean() > 0.7
    assert used
    assert torch.equal(fast[2].steps[clear], slow[2].steps[clear])
    for one, other in zip(fast[2][:4], slow[2][:4], strict=True):
        at = (slice(None), clear) if one.dim() == 3 else clear
        torch.testing.assert_close(one[at], other[at], rtol=1e-4, atol=1e-4)
    for one, other in zip(states(fast), states(slow), strict=True):
        at = clear if rnn.batch_first or one.dim() == 2 else (slice(None), clear)
        torch.testing.assert_close(one[at], other[at], rtol=1e-4, atol=1e-5)
    return fast


@emulated_only
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("hidden", "batch"), [(5, 21), (37, 6)])
def test_clusters_are_the_loop(cell, hidden, batch):
    torch.manual_seed(0)
    rnn, x = lively(cell, hidden, batch_first=True), random(batch, 4, 3)
    h = random(batch, hidden)
    state = (h, h.sin()) if cell is nn.LSTMCell else h
    lengths = torch.randint(1, 5, (batch,))
    assert_alike(rnn, runner_of(rnn), x, state, lengths=lengths)
    assert_alike(rnn, runner_of(rnn, reverse=True), x)


@emulated_only
def test_slots_are_used_again_when_there_are_more_sequences():
    torch.manual_seed(1)
    rnn, x = lively(hidden=96, batch_first=True), random(17, 3, 3)  # units of four CTAs, for three
    made = runner_of(rnn, at_once=2, slots=3)
    assert_alike(rnn, made, x, lengths=torch.randint(1, 4, (17,)))
    assert made[1] == [(2, 3)]


@emulated_only
@pytest.mark.parametrize(("batch", "expected"), [(1, (1, 1)), (5, (5, 1)), (9, (5, 2)), (2, (2, 1))])
def test_sequences_are_spread_over_the_clusters_that_run_at_once(batch, expected):
    torch.manual_seed(1)
    rnn = lively(hidden=8, batch_first=True)
    made = runner_of(rnn, at_once=5)
    assert_alike(rnn, made, random(batch, 2, 3))
    assert made[1] == [expected]


@emulated_only
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_weights_that_are_too_many_for_registers_are_in_shared_memory(cell):
    torch.manual_seed(0)
    rnn = lively(cell, 290, batch_first=True)
    made = runner_of(rnn, at_once=1)
    assert made[0].reader.clusters.shape.ctas == 16
    assert_alike(rnn, made, random(5, 2, 3))


@emulated_only
def test_never_halting_repeats_the_cell_without_a_bias():
    rnn = tp.AdaptiveRNN(nn.GRUCell(4, 33, bias=False), 3, halting=never_halt, mode="thresholded")
    assert (assert_alike(rnn, runner_of(rnn), random(2, 3, 3))[2].steps == 3).all()


@emulated_only
def test_one_step_a_threshold_a_head_without_a_bias_and_pieces(monkeypatch):
    torch.manual_seed(0)
    rnn = lively(hidden=8, max_steps=1, batch_first=True)
    assert_alike(rnn, runner_of(rnn), random(3, 2, 3))
    rnn = lively(hidden=8, max_steps=5, batch_first=True)
    rnn.block.mode = tp.Thresholded(0.9)
    rnn.block.halting[0].linear.bias = None
    monkeypatch.setattr(recurrent_gpu, "MOST_INPUTS", 7 * 32)
    made = runner_of(rnn)
    assert_alike(rnn, made, random(4, 7, 3), lengths=[3, 7, 1, 6])
    assert len(made[1]) > 1
    used = len(made[1])
    assert_alike(rnn, made, random(4, 7, 3))
    assert len(made[1]) == used + 7  # whole sequences too


@emulated_only
@pytest.mark.parametrize("halting", [None, never_halt])
def test_thresholds_of_a_run(halting):
    torch.manual_seed(0)
    rnn = lively(hidden=8, max_steps=3, batch_first=True)
    if halting is not None:
        rnn = tp.AdaptiveRNN(rnn.cell, 3, halting=halting, mode="thresholded", batch_first=True)
    made, x = runner_of(rnn), random(4, 3, 3)
    for bound, steps in (("always", [1]), ("never", [3]), (12.0, None)):
        found = assert_alike(rnn, made, x, thresholds=tp.Thresholds(bound))[2].steps
        assert steps is None or found.unique().tolist() == steps


@pytest.mark.slow
@emulated_only
@pytest.mark.parametrize(
    ("cell", "hidden", "at_once", "slots"),
    [*((cell, 5, 2, 2) for cell in CELLS), (nn.LSTMCell, 37, 1, 4)],
)
def test_clusters_read_the_rest_of_a_batch_that_others_began(cell, hidden, at_once, slots):
    pytest.importorskip("triton", reason="needs Triton, for those who begin")
    torch.manual_seed(0)
    rnn, x = lively(cell, hidden, batch_first=True), random(17, 4, 3)
    lengths = torch.randint(1, 5, (17,))
    made = runner_of(rnn, at_once, slots)
    made[0].reader.clusters.most_rows = 9
    assert_alike(rnn, made, x, lengths=lengths)
    assert_alike(rnn, made, x)
    assert len(made[1]) == 2
    (lane,) = made[0].reader.lanes.values()
    assert lane.counts[0, 0] > 0  # it did not go on


@emulated_only
def test_rows_that_are_under_way_go_on_where_they_are(monkeypatch):
    """In one piece and in two, and where clusters find nobody left."""
    pytest.importorskip("triton", reason="needs Triton, for those who begin")
    rnn = tp.AdaptiveRNN(nn.GRUCell(4, 8), 7, halting=never_halt, mode="thresholded", batch_first=True)
    made = runner_of(rnn)
    reader, used = made[0].reader, made[1]
    reader.clusters.most_rows = 3
    x, lengths = random(6, 4, 3), [4, 1, 1, 1, 1, 2]
    found = assert_alike(rnn, made, x, lengths=lengths)
    assert (found[2].steps.amax(1) == 7).all()
    assert used == [(2, 1)]
    with monkeypatch.context() as patched:
        patched.setattr(recurrent_gpu, "MOST_INPUTS", 8 * 24)
        assert_alike(rnn, made, x, lengths=lengths)
    assert used[1:] == [(2, 1), (1, 1)]
    (lane,) = reader.lanes.values()
    lane.counts.zero_()
    h, c, notes, odds = lane._known(0)
    under_way = recurrent_gpu_call.UnderWay(h, c, notes, odds, lane.counts[0], 3)
    final = torch.full((6, 8), torch.nan)
    result = recurrent_gpu_call.Result(random(24, 3), None, final, 7)
    (piece,) = recurrent_gpu.whole_pieces(4, 6, 100)
    reader.clusters.finish(random(24, 24), piece, result, 0.0, under_way)
    assert final.isnan().all()


def test_what_is_deterministic_is_not_handed_on():
    rnn = lively(hidden=64)
    reader = runner_of(rnn)[0].reader
    reader.clusters.most_rows = 50
    assert reader.lane(100).clusters is reader.clusters
    assert reader.lane(100).sizes == [128, 96, 64, 48]
    torch.use_deterministic_algorithms(True)
    try:
        assert reader.lane(100).clusters is None
    finally:
        torch.use_deterministic_algorithms(False)


@emulated_only
@pytest.mark.parametrize(
    ("cell", "dtype"),
    [(nn.LSTMCell, torch.bfloat16), (nn.GRUCell, torch.float16), (nn.RNNCell, torch.bfloat16)],
)
def test_half_precision(cell, dtype):
    torch.manual_seed(1)
    rnn, x = lively(cell, 32, batch_first=True).to(dtype), random(9, 2, 3, dtype=dtype)
    fast = runner_of(rnn)[0](x)
    with torch.no_grad():
        slow = rnn(x)
    clear = decided(slow[2], 0.1)
    assert clear.double().mean() > 0.3
    assert torch.equal(fast[2].steps[clear], slow[2].steps[clear])
    assert all(part.dtype == dtype for part in states(fast))
    for one, other in zip(states(fast), states(slow), strict=True):
        torch.testing.assert_close(one[clear], other[clear], rtol=0, atol=2e-2)


@emulated_only
def test_broken_numbers_stay_in_their_sequence():
    torch.manual_seed(3)
    rnn, x = lively(), random(3, 4, 3)
    x[1, 1] = torch.nan
    output = runner_of(rnn, at_once=1)[0](x)[0]
    assert output[1:, 1].isnan().all()
    assert output[:, [0, 2, 3]].isfinite().all()


@pytest.mark.slow
@emulated_only
def test_no_place_outside_of_tensors_and_arrays_is_read_or_written():
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engines.recurrent_fenced"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 10


def layer_for(cell: Any) -> Layer:
    """What the kernels know of a layer of a cell."""
    rnn = tp.AdaptiveRNN(cell, 3, halting=never_halt, mode="thresholded")
    return layer_of(block_spec(rnn), [cell.weight_hh.dtype])


@pytest.mark.parametrize("hidden", [1, 32, 33, 128, 256, 257, 512])
def test_shared_memory_is_laid_out_as_the_source_does_it(hidden):
    """And fits into 227 KiB."""
    for cell in CELLS if hidden in (128, 512) else CELLS[:1]:
        shape = shape_of(layer_for(cell(4, hidden)))
        assert shape.ctas * 32 >= hidden
        assert shape.shared_bytes <= 227 * 1024
        assert library(shape).shared_bytes() == shape.shared_bytes


@pytest.mark.parametrize("cell", CELLS)
def test_the_kernel_compiles_for_a_device_that_is_not_here(cell, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        nvrtc.compiler()
    except ValueError as error:
        pytest.skip(str(error))
    for hidden, dtype in [(100, torch.float16), (128, torch.bfloat16), (512, torch.float32)]:
        shape = shape_of(layer_for(cell(4, hidden).to(dtype)))
        code = recurrent_cluster.compile_cell(shape, "sm_90")
        assert code.startswith(b"\x7fELF")
        assert recurrent_cluster.compile_cell(shape, "sm_90") == code


def test_large_batches_are_left_to_cublas():
    rnn = lively(hidden=64)
    reader = runner_of(rnn)[0].reader
    assert reader.for_batch(3 << 10) is reader.clusters
    reader.clusters.most_rows = 50
    assert reader.for_batch(50) is reader.clusters
    assert isinstance(reader.for_batch(51), Lane)
    assert runner_of(lively(hidden=64).half())[0].reader.clusters.most_rows == 1 << 10


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ImportError("no module"), Unsupported),
        (OSError("no library"), Unsupported),
        (RuntimeError("no such clusters"), Unsupported),
        (ValueError("no NVRTC"), Unsupported),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError),
    ],
)
def test_why_there_are_no_clusters_is_told_unless_there_is_no_room_now(error, expected, monkeypatch):
    def fail(*_):
        raise error

    weight = SimpleNamespace(is_cuda=True, dtype=torch.float32, device="cuda", data_ptr=lambda: 0)
    layer = cast(Layer, SimpleNamespace(weight_hh=weight, size=8))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(recurrent_cluster, "shape_of", lambda _: None)
    monkeypatch.setattr(recurrent_cluster, "_loaded", fail)
    with pytest.raises(expected, match=str(error)):
        recurrent_cluster.clusters_for(layer)


def test_other_layers_have_no_clusters():
    assert recurrent_cluster.clusters_for(layer_for(nn.LSTMCell(4, 8))) is None  # on a CPU
    if CUDA:
        assert recurrent_cluster.clusters_for(layer_for(nn.LSTMCell(4, 8).cuda().double())) is None
        assert recurrent_cluster.clusters_for(layer_for(nn.LSTMCell(4, 513).cuda())) is None
