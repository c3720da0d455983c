"""Recurrent layers on a GPU, by clusters and in CUDA graphs, as AdaptiveRNN chooses, against its loop."""

import threading

import pytest
import torch

from tests.engines.recurrent_layers import CELLS, decided, lively, random, states
from torchpact.engines.recurrent import cluster as recurrent_cluster
from torchpact.engines.recurrent import gpu as recurrent_gpu
from torchpact.models import StackedRNN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: graphs"),
]


@pytest.fixture
def without_clusters(monkeypatch):
    monkeypatch.setattr(recurrent_gpu, "clusters_for", lambda *_: None)


def have_clusters():
    return torch.cuda.get_device_capability() >= (9, 0)


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
def test_graphs_are_the_loop(cell, hidden, batch, without_clusters):
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


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    ("hidden", "batch"), [(20, 300), (128, 64), (96, 130), (200, 900), (512, 64), (400, 320)]
)
def test_clusters_are_the_loop(cell, hidden, batch):
    if not have_clusters():
        pytest.skip("needs a device with clusters: Hopper or later")
    torch.manual_seed(0)
    rnn = lively(cell, hidden, max_steps=5, batch_first=True)
    for time in (6, 9):
        alike(rnn, random(batch, time, 3))
        alike(rnn, random(batch, time, 3), lengths=torch.randint(1, time + 1, (batch,)))
    alike(rnn, random(1, 7, 3))
    engine = recurrent_gpu._MADE[rnn.block]
    assert engine.problem is None
    assert engine._clusters is not None
    assert not engine._lanes
    x = random(batch, 4, 3)
    with torch.no_grad():
        first, again = rnn(x), rnn(x)
    assert torch.equal(first[0], again[0])


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("hidden", "batch"), [(512, 500), (64, 3300), (200, 1200)])
def test_graphs_begin_a_large_batch_and_clusters_end_it(cell, hidden, batch, monkeypatch):
    if not have_clusters():
        pytest.skip("needs a device with clusters: Hopper or later")
    torch.manual_seed(0)
    left, finish = [], recurrent_cluster.Clusters.finish

    def watched(clusters, *args):
        left.append(args[-1].most)
        finish(clusters, *args)

    monkeypatch.setattr(recurrent_cluster.Clusters, "finish", watched)
    rnn = lively(cell, hidden, max_steps=5, batch_first=True)
    x = random(batch, 9, 3)
    alike(rnn, x, lengths=torch.randint(1, 10, (batch,)))
    assert len(left) == 1
    alike(rnn, x)
    clusters = recurrent_gpu._MADE[rnn.block]._clusters
    assert clusters is not None
    assert 0 < max(left) <= clusters.most_rows


def test_clusters_see_weights_that_change():
    torch.manual_seed(2)
    rnn, x = lively(hidden=64, batch_first=True), random(30, 4, 3)
    first = alike(rnn, x)
    for parameter in rnn.parameters():
        parameter.data.view(-1)[::3] += 0.1
    second = alike(rnn, x)
    assert (first[0] - second[0]).abs().max() > 1e-3


def test_where_there_is_no_compiler_for_clusters_there_are_graphs(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no")

    torch.manual_seed(0)
    monkeypatch.setattr(recurrent_cluster, "_loaded", refuse)
    rnn = lively(hidden=64, batch_first=True)
    alike(rnn, random(30, 4, 3))
    engine = recurrent_gpu._MADE[rnn.block]
    assert engine._clusters is None
    assert engine.without_clusters == ("recurrent: no clusters (no)" if have_clusters() else None)
    assert engine._lanes


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, clusters, monkeypatch):
    torch.manual_seed(0)
    if not clusters:
        monkeypatch.setattr(recurrent_gpu, "clusters_for", lambda *_: None)
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


@pytest.mark.parametrize("clusters", ["all", "rest", "none"])
def test_several_threads_on_streams_of_their_own(clusters, monkeypatch):
    """With other lengths at every call, so that each brings where time steps begin."""
    torch.manual_seed(0)
    if clusters == "none":
        monkeypatch.setattr(recurrent_gpu, "clusters_for", lambda *_: None)
    rnn, inputs = lively(hidden=64, batch_first=True), [random(50, 8, 3) for _ in range(4)]
    if clusters == "rest" and have_clusters():
        alike(rnn, inputs[0])
        used = recurrent_gpu._MADE[rnn.block]._clusters
        assert used is not None
        used.most_rows = 20
    lengths = (8, 5, 7)
    expected = [[alike(rnn, x[:, :time])[0] for time in lengths] for x in inputs]
    found: list[list[torch.Tensor]] = [[] for _ in inputs]

    def read(index):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(5):
                found[index] = [rnn(inputs[index][:, :time])[0] for time in lengths]
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_what_cannot_be_captured_is_started_one_by_one(monkeypatch, without_clusters):
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
