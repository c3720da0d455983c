"""Clusters that read recurrent layers, against the loop of AdaptiveRNN.

The kernel runs here as C++ on the CPU, from the very source that a GPU gets; see recurrent_emulator.hpp.
"""

import ctypes
import subprocess
import sys

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.engines.recurrent_emulation import library
from tests.engines.recurrent_layers import CELLS, decided, lively, random, states
from torchpact.engines import recurrent_cluster, recurrent_gpu
from torchpact.engines.folding import Unsupported
from torchpact.engines.onchip import nvrtc
from torchpact.engines.recurrent_cluster import Clusters, shape_of
from torchpact.engines.recurrent_gpu import RecurrentGPU
from torchpact.engines.recurrent_gpu_lane import Lane
from torchpact.models import HaltingUnit, never_halt

CUDA = torch.cuda.is_available()
emulated_only = pytest.mark.skipif(CUDA, reason="the emulator reads the memory of the CPU")


def engine_of(rnn, at_once=2, slots=None, reverse=False):
    """An engine whose clusters are emulated."""
    cell, head = rnn.cell, rnn.block.halting[0]
    shape = shape_of(cell)._replace(**({} if slots is None else {"slots": slots}))
    used = []

    def launch(args, clusters):
        used.append((clusters, args.slots))
        fault = library(shape).emulate(ctypes.byref(args), clusters, int(reverse))
        assert fault is None, fault.decode()

    engine = RecurrentGPU(rnn.block, list(rnn.parameters()))
    engine._clusters = Clusters(cell, head, rnn.max_steps, launch, at_once)
    engine._clusters.shape = shape
    engine._asked_for_clusters = True
    object.__setattr__(engine, "used", used)
    return engine


def assert_alike(rnn, engine, x, state=None, **options):
    """Compare an engine with the loop."""
    object.__setattr__(rnn, "_compiled", lambda *_: engine)
    with torch.no_grad():
        fast = rnn(x, state, **options)
        object.__delattr__(rnn, "_compiled")
        rnn.compact = False
        slow = rnn(x, state, **options)
        rnn.compact = True
    clear = decided(slow[2]) if rnn.max_steps > 1 else slow[2].steps[:, 0] > 0
    assert clear.double().mean() > 0.7
    assert engine.used
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
    assert_alike(rnn, engine_of(rnn), x, state, lengths=lengths)
    assert_alike(rnn, engine_of(rnn, reverse=True), x)


@emulated_only
def test_slots_are_used_again_when_there_are_more_sequences():
    torch.manual_seed(1)
    rnn, x = lively(hidden=96, batch_first=True), random(17, 3, 3)  # units of four CTAs, for three
    engine = engine_of(rnn, at_once=2, slots=3)
    assert_alike(rnn, engine, x, lengths=torch.randint(1, 4, (17,)))
    assert engine.used == [(2, 3)]


@emulated_only
@pytest.mark.parametrize(("batch", "expected"), [(1, (1, 1)), (5, (5, 1)), (9, (5, 2)), (2, (2, 1))])
def test_sequences_are_spread_over_the_clusters_that_run_at_once(batch, expected):
    torch.manual_seed(1)
    rnn = lively(hidden=8, batch_first=True)
    engine = engine_of(rnn, at_once=5)
    assert_alike(rnn, engine, random(batch, 2, 3))
    assert engine.used == [expected]


@emulated_only
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_weights_that_are_too_many_for_registers_are_in_shared_memory(cell):
    torch.manual_seed(0)
    rnn = lively(cell, 290, batch_first=True)
    engine = engine_of(rnn, at_once=1)
    assert engine._clusters.shape.ctas == 16
    assert_alike(rnn, engine, random(5, 2, 3))


@emulated_only
def test_never_halting_repeats_the_cell_without_a_bias():
    rnn = tp.AdaptiveRNN(nn.GRUCell(4, 33, bias=False), 3, halting=never_halt, mode="thresholded")
    assert (assert_alike(rnn, engine_of(rnn), random(2, 3, 3))[2].steps == 3).all()


@emulated_only
def test_one_step_a_threshold_a_head_without_a_bias_and_pieces(monkeypatch):
    torch.manual_seed(0)
    rnn = lively(hidden=8, max_steps=1, batch_first=True)
    assert_alike(rnn, engine_of(rnn), random(3, 2, 3))
    rnn = lively(hidden=8, max_steps=5, batch_first=True)
    rnn.block.mode = tp.Thresholded(0.9)
    rnn.block.halting[0].linear.bias = None
    monkeypatch.setattr(recurrent_gpu, "MOST_INPUTS", 7 * 32)
    engine = engine_of(rnn)
    assert_alike(rnn, engine, random(4, 7, 3), lengths=[3, 7, 1, 6])
    assert len(engine.used) > 1


@emulated_only
@pytest.mark.parametrize(
    ("cell", "dtype"),
    [(nn.LSTMCell, torch.bfloat16), (nn.GRUCell, torch.float16), (nn.RNNCell, torch.bfloat16)],
)
def test_half_precision(cell, dtype):
    torch.manual_seed(1)
    rnn, x = lively(cell, 32, batch_first=True).to(dtype), random(9, 2, 3, dtype=dtype)
    engine = engine_of(rnn)
    object.__setattr__(rnn, "_compiled", lambda *_: engine)
    with torch.no_grad():
        fast = rnn(x)
        rnn.compact = False
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
    engine = engine_of(rnn, at_once=1)
    object.__setattr__(rnn, "_compiled", lambda *_: engine)
    with torch.no_grad():
        output = rnn(x)[0]
    assert output[1:, 1].isnan().all()
    assert output[:, [0, 2, 3]].isfinite().all()


@emulated_only
def test_no_place_outside_of_tensors_and_arrays_is_read_or_written():
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engines.recurrent_fenced"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 8


@pytest.mark.parametrize("hidden", [1, 32, 33, 128, 256, 257, 512])
def test_shared_memory_is_laid_out_as_the_source_does_it(hidden):
    """And fits into 227 KiB."""
    for cell in CELLS if hidden in (128, 512) else CELLS[:1]:
        shape = shape_of(cell(4, hidden))
        assert shape.ctas * 32 >= hidden
        assert shape.shared_bytes <= 227 * 1024
        assert library(shape).shared_bytes() == shape.shared_bytes


@pytest.mark.parametrize("cell", CELLS)
def test_the_kernel_compiles_for_a_device_that_is_not_here(cell, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        nvrtc.compiler()
    except Unsupported as error:
        pytest.skip(str(error))
    for hidden, dtype in [(100, torch.float16), (128, torch.bfloat16), (512, torch.float32)]:
        shape = shape_of(cell(4, hidden).to(dtype))
        code = recurrent_cluster.compile_cell(shape, "sm_90")
        assert code.startswith(b"\x7fELF")
        assert recurrent_cluster.compile_cell(shape, "sm_90") == code


def test_large_batches_are_left_to_cublas():
    rnn = lively(hidden=64)
    engine = engine_of(rnn)
    assert engine._reader(3 << 10) is engine._clusters
    engine._clusters.most_rows = 50
    assert engine._reader(50) is engine._clusters
    assert isinstance(engine._reader(51), Lane)
    assert engine_of(lively(hidden=64).half())._clusters.most_rows == 1 << 10


def test_other_layers_have_no_clusters():
    head = HaltingUnit(8)
    assert recurrent_cluster.clusters_for(nn.LSTMCell(4, 8), head, 3) is None  # on a CPU
    if CUDA:
        assert recurrent_cluster.clusters_for(nn.LSTMCell(4, 8).cuda().double(), head, 3) is None
        assert recurrent_cluster.clusters_for(nn.LSTMCell(4, 513).cuda(), head, 3) is None
