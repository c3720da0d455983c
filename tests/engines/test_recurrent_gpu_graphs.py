"""Recurrent layers in CUDA graphs, as AdaptiveRNN chooses them, against its loop."""

import threading

import pytest
import torch

from tests.engines.recurrent_layers import CELLS, decided, lively, random, states
from torchpact.engines import recurrent_gpu
from torchpact.models import StackedRNN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: graphs"),
]


def alike(rnn, x, **options):
    """Compare a layer's own choice with the loop, where rounding does not decide; the batch comes first."""
    with torch.no_grad():
        fast = rnn(x, **options)
        rnn.compact = False
        slow = rnn(x, **options)
        rnn.compact = True
    clear = decided(slow[2])
    assert clear.double().mean() > 0.9
    assert torch.equal(fast[2].steps[clear], slow[2].steps[clear])
    for one, other in zip(fast[2][:4], slow[2][:4], strict=True):
        at = (slice(None), clear) if one.dim() == 3 else clear
        torch.testing.assert_close(one[at], other[at], rtol=1e-3, atol=1e-3)
    for one, other in zip(states(fast), states(slow), strict=True):
        torch.testing.assert_close(one[clear], other[clear], rtol=1e-4, atol=2e-5)
    return fast


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("hidden", "batch"), [(128, 1), (100, 64), (512, 700), (1500, 130), (37, 3000)])
def test_graphs_are_the_loop(cell, hidden, batch):
    torch.manual_seed(0)
    rnn = lively(cell, hidden, max_steps=5, batch_first=True)
    for time in (6, 9):
        alike(rnn, random(batch, time, 3))
        alike(rnn, random(batch, time, 3), lengths=torch.randint(1, time + 1, (batch,)))
    engine = recurrent_gpu._MADE[rnn.block]
    assert engine.problem is None
    (lane,) = engine._lanes.values()
    assert list(lane.graphs) == lane.sizes
    recurrent_gpu.forget(rnn.block)
    alike(rnn, random(batch, 2, 3))
    assert recurrent_gpu._MADE[rnn.block] is not engine


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_graphs_in_half_precision(dtype):
    torch.manual_seed(0)
    rnn, x = lively(hidden=128).to(dtype), random(5, 64, 3, dtype=dtype)
    with torch.no_grad():
        fast = rnn(x)
        assert recurrent_gpu._MADE[rnn.block].problem is None
        exact = rnn.float()
        exact.compact = False
        slow = exact(x.float())
    clear = decided(slow[2], 0.4)
    assert clear.any()
    assert torch.equal(fast[2].steps[clear], slow[2].steps[clear])
    assert (fast[0][:, clear] - slow[0][:, clear]).abs().max() < 5e-2


def test_layers_upon_layers_in_inference_mode():
    torch.manual_seed(0)
    layers = [lively(hidden=64), lively(hidden=32, features=64)]
    stacked, x = StackedRNN(layers), random(6, 40, 3)
    with torch.inference_mode():
        first, again = stacked(x)[0], stacked(x)[0]
    torch.testing.assert_close(first, again)
    assert all(recurrent_gpu._MADE[layer.block].problem is None for layer in layers)
    with torch.no_grad():
        torch.testing.assert_close(stacked(x)[0], first)


def test_several_threads_on_streams_of_their_own():
    torch.manual_seed(0)
    rnn, inputs = lively(hidden=64, batch_first=True), [random(50, 8, 3) for _ in range(4)]
    expected = [alike(rnn, x)[0] for x in inputs]
    found = [None] * len(inputs)

    def read(index):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(5):
                found[index] = rnn(inputs[index])[0]
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_what_cannot_be_captured_is_started_one_by_one(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no")

    torch.manual_seed(0)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refuse)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", refuse)
    rnn = lively(hidden=64, batch_first=True)
    alike(rnn, random(50, 6, 3))
    (lane,) = recurrent_gpu._MADE[rnn.block]._lanes.values()
    assert not lane.graphs


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("TORCHPACT_NATIVE", "0")
    rnn, x = lively(), random(2, 3, 3)
    assert recurrent_gpu.kernel_for(rnn.block, rnn.block.mode, x, 3) is None
    monkeypatch.delenv("TORCHPACT_NATIVE")
    assert recurrent_gpu.kernel_for(rnn.block, rnn.block.mode, x, 3) is not None
