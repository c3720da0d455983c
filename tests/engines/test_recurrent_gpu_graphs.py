"""Recurrent layers on a GPU, by clusters and in CUDA graphs, as the engine chooses, against the loop."""

import math
import threading

import pytest
import torch

import torchpact as tp
from tests.engines.recurrent_layers import CELLS, decided, lively, random, states
from torchpact.core.call_args import CallArgs
from torchpact.engines.recurrent import cluster as recurrent_cluster
from torchpact.engines.recurrent import gpu as recurrent_gpu
from torchpact.engines.recurrent.gpu import GPURecurrent
from torchpact.specs import block_spec

ENGINE = GPURecurrent()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: graphs"),
]


@pytest.fixture
def without_clusters(monkeypatch):
    monkeypatch.setattr(recurrent_gpu, "clusters_for", lambda *_: None)


def have_clusters():
    return torch.cuda.get_device_capability() >= (9, 0)


def built(rnn, x, **options):
    """A runner of a layer for calls like one."""
    example = CallArgs((x,), options)
    assert ENGINE.supports(block_spec(rnn), example) is None
    return ENGINE.build(block_spec(rnn), example)


def alike(rnn, x, runner=None, bounds=None, **options):
    """Compare a runner with the loop, where rounding does not decide; the batch comes first."""
    fast = (runner or built(rnn, x, **options))(x, CallArgs((), options), bounds)
    thresholds = None if bounds is None else tp.Thresholds([bounds])
    with torch.no_grad():
        slow = rnn(x, thresholds=thresholds, **options)
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
    runner = built(rnn, random(batch, 6, 3))
    (lane,) = runner.reader.lanes.values()
    assert list(lane.graphs) == lane.sizes
    for time in (6, 9):
        alike(rnn, random(batch, time, 3), runner)
        alike(rnn, random(batch, time, 3), runner, lengths=torch.randint(1, time + 1, (batch,)))
    assert runner.reader.problem is None
    assert [*runner.reader.lanes.values()] == [lane]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    ("hidden", "batch"), [(20, 300), (128, 64), (96, 130), (200, 900), (512, 64), (400, 320)]
)
def test_clusters_are_the_loop(cell, hidden, batch):
    if not have_clusters():
        pytest.skip("needs a device with clusters: Hopper or later")
    torch.manual_seed(0)
    rnn = lively(cell, hidden, max_steps=5, batch_first=True)
    runner = built(rnn, random(batch, 6, 3))
    for time in (6, 9):
        alike(rnn, random(batch, time, 3), runner)
        alike(rnn, random(batch, time, 3), runner, lengths=torch.randint(1, time + 1, (batch,)))
    alike(rnn, random(1, 7, 3), runner)
    assert runner.reader.problem is None
    assert runner.reader.clusters is not None
    assert not runner.reader.lanes
    x = random(batch, 4, 3)
    assert torch.equal(runner(x)[0], runner(x)[0])


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("bound", [-math.inf, -3.0, 0.5, 3.0, math.inf])
def test_one_threshold_for_all_heads(bound, clusters, monkeypatch):
    torch.manual_seed(1)
    if not clusters:
        monkeypatch.setattr(recurrent_gpu, "clusters_for", lambda *_: None)
    rnn, x = lively(hidden=64, batch_first=True), random(70, 6, 3)
    runner = built(rnn, x)
    with torch.no_grad():
        slow = rnn(x, thresholds=tp.Thresholds(bound))
    fast = runner(x, bounds=(bound,) * 3)
    threshold = torch.sigmoid(torch.tensor(bound)).item()
    clear = (slow[2].probs[:-1] - threshold).abs().amin((0, 2)) > 1e-4
    clear |= math.isinf(bound)  # where rounding decides nothing
    assert clear.double().mean() > 0.7
    assert torch.equal(fast[2].steps[clear], slow[2].steps[clear])
    torch.testing.assert_close(fast[0][clear], slow[0][clear], rtol=1e-4, atol=2e-5)
    expected = {-math.inf: 1, math.inf: 4}.get(bound)
    assert expected is None or (fast[2].steps == expected).all()


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
    runner = built(rnn, x)
    alike(rnn, x, runner, lengths=torch.randint(1, 10, (batch,)))
    assert len(left) == 1
    alike(rnn, x, runner)
    clusters = runner.reader.clusters
    assert clusters is not None
    assert 0 < max(left) <= clusters.most_rows


def test_where_there_is_no_compiler_for_clusters_there_are_graphs(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no")

    torch.manual_seed(0)
    monkeypatch.setattr(recurrent_cluster, "_loaded", refuse)
    rnn = lively(hidden=64, batch_first=True)
    x = random(30, 4, 3)
    runner = built(rnn, x)
    alike(rnn, x, runner)
    assert runner.reader.clusters is None
    assert runner.reader.without_clusters == ("no clusters (no)" if have_clusters() else None)
    assert runner.reader.lanes


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, clusters, monkeypatch):
    torch.manual_seed(0)
    if not clusters:
        monkeypatch.setattr(recurrent_gpu, "clusters_for", lambda *_: None)
    rnn, x = lively(hidden=128).to(dtype), random(5, 64, 3, dtype=dtype)
    fast = built(rnn, x)(x)
    with torch.no_grad():
        slow = rnn.float()(x.float())
    clear = decided(slow[2], 0.4)
    assert clear.any()
    assert torch.equal(fast[2].steps[clear], slow[2].steps[clear])
    assert (fast[0][:, clear] - slow[0][:, clear]).abs().max() < 5e-2


def test_in_inference_mode():
    torch.manual_seed(0)
    rnn, x = lively(hidden=64), random(6, 40, 3)
    with torch.inference_mode():
        runner = built(rnn, x)
        first, again = runner(x)[0], runner(x)[0]
    torch.testing.assert_close(first, again)
    torch.testing.assert_close(runner(x)[0], first)


@pytest.mark.parametrize("clusters", ["all", "rest", "none"])
def test_several_threads_on_streams_of_their_own(clusters, monkeypatch):
    """With other lengths at every call, so that each brings where time steps begin."""
    torch.manual_seed(0)
    if clusters == "none":
        monkeypatch.setattr(recurrent_gpu, "clusters_for", lambda *_: None)
    rnn, inputs = lively(hidden=64, batch_first=True), [random(50, 8, 3) for _ in range(4)]
    runner = built(rnn, inputs[0])
    if clusters == "rest" and have_clusters():
        assert runner.reader.clusters is not None
        runner.reader.clusters.most_rows = 20
    lengths = (8, 5, 7)
    expected = [[alike(rnn, x[:, :time], runner)[0] for time in lengths] for x in inputs]
    found: list[list[torch.Tensor]] = [[] for _ in inputs]

    def read(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(5):
                found[index] = [runner(inputs[index][:, :time])[0] for time in lengths]
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
    x = random(50, 6, 3)
    runner = built(rnn, x)
    alike(rnn, x, runner)
    (lane,) = runner.reader.lanes.values()
    assert not lane.graphs


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("TORCHPACT_NATIVE", "0")
    rnn, example = lively(), CallArgs((random(2, 3, 3),))
    assert ENGINE.supports(block_spec(rnn), example) == "no compiled kernels, as TORCHPACT_NATIVE=0 asks"
    monkeypatch.delenv("TORCHPACT_NATIVE")
    assert ENGINE.supports(block_spec(rnn), example) is None


def test_a_call_that_is_captured_or_elsewhere_is_refused():
    rnn, x = lively(), random(2, 3, 3)
    runner = built(rnn, x)
    assert runner.accepts(x, CallArgs())
    assert not runner.accepts(x.cpu(), CallArgs())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert not runner.accepts(x, CallArgs())
        x.add_(1)
    assert runner.accepts(x, CallArgs())
