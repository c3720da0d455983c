"""CUDA graphs of deployed networks; which sizes are captured is tested without a device."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

import torchpact as tp
from tests.engines.networks import lively, relative
from torchpact.core.ponder import is_unknown, without_details
from torchpact.engines import autotune, graphs, whole
from torchpact.engines.graphs import MOST_GRAPHS, Graphed
from torchpact.engines.timing import interleaved

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def gpu(test):
    for mark in needs_gpu:
        test = mark(test)
    return test


@pytest.fixture(autouse=True)
def _quick_and_exact(monkeypatch):
    for module in (autotune, whole):
        monkeypatch.setattr(module, "interleaved", partial(interleaved, seconds=0, least=1))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def images_of(batch, size=16, seed=0, device="cuda"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, size, size, generator=generator).to(device)


def deployed(engine, mode="thresholded", example=4):
    model = lively(mode=mode).cuda()
    return model, tp.deploy(model, images_of(example), engines=[engine])


@torch.no_grad()
def agree(fast, model, images):
    logits, ponders = fast(images)
    expected, reference = model(images)
    assert relative(logits, expected) < 1e-5
    return all(torch.equal(one.steps, other.steps) for one, other in zip(ponders, reference, strict=True))


class _Recorded:
    """In place of a graph."""

    made = 0

    def __init__(self, function, example, *_, **__):
        type(self).made += 1
        self.function = function


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(graphs, "Recording", _Recorded)
    monkeypatch.setattr(Graphed, "_replay", lambda self, recording, x: ("graph", len(x)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(_Recorded, "made", 0)
    network: Any = lambda x: ("run", len(x))  # noqa: E731
    return Graphed(network)


def test_a_size_is_captured_when_it_returns(recorded):
    assert [recorded(torch.ones(n)) for n in (3, 5, 3, 3, 5)] == [
        ("run", 3),
        ("run", 5),
        ("graph", 3),
        ("graph", 3),
        ("graph", 5),
    ]
    assert _Recorded.made == 2


def test_as_many_sizes_are_captured_as_there_is_room_for_and_all_others_run(recorded):
    for _ in range(3):
        kinds = [recorded(torch.ones(n))[0] for n in range(1, 2 * MOST_GRAPHS)]
    assert kinds == ["graph"] * MOST_GRAPHS + ["run"] * (MOST_GRAPHS - 1)
    assert _Recorded.made == MOST_GRAPHS


def test_what_fails_once_is_not_tried_again(recorded, monkeypatch):
    def fail(*_, **__):
        _Recorded.made += 1
        raise tp.engines.Unsupported("no CUDA graph: no room")

    monkeypatch.setattr(graphs, "Recording", fail)
    assert {recorded(torch.ones(2)) for _ in range(4)} == {("run", 2)}
    assert (_Recorded.made, recorded.problem) == (1, "no CUDA graph: no room")


def test_no_images_are_never_captured(recorded):
    assert {recorded(torch.ones(0)) for _ in range(3)} == {("run", 0)}


def test_copies_are_new_and_what_is_unknown_is_a_nan_of_their_own():
    ponder = tp.Ponder(torch.rand(3, 2), torch.ones(2).long(), torch.rand(2), torch.rand(2), None)
    brief = without_details(ponder)
    logits, (whole, decisions, last) = graphs._copied(torch.ones(2, 4), [ponder, brief, brief])
    assert torch.equal(logits, torch.ones(2, 4))
    for copy, original in zip(whole[:4], ponder[:4], strict=True):
        assert torch.equal(copy, original)
        assert copy.data_ptr() != original.data_ptr()
    assert decisions.steps is whole.steps
    for copy, original in zip(decisions[:4], brief[:4], strict=True):
        assert torch.equal(copy, original) or copy.isnan().all()
        assert copy.shape == original.shape
        assert copy.data_ptr() != original.data_ptr()
    assert decisions.probs.untyped_storage().nbytes() == 4
    assert decisions.probs.data_ptr() == last.probs.data_ptr() == last.expected_steps.data_ptr()


@pytest.mark.parametrize("shape", [(3, 1, 1, 1), (1, 1, 4, 5), (2, 1, 1, 1), (1, 1, 1, 1)])
def test_what_is_unknown_is_told_by_its_layout(shape):
    steps = torch.ones(shape, dtype=torch.long)
    ponder = tp.Ponder(torch.rand(3, *shape), steps, torch.rand(shape), torch.ones(shape), None)
    assert not is_unknown(ponder.probs)
    brief = without_details(ponder)
    assert is_unknown(brief.probs)
    _, (copy,) = graphs._copied(torch.ones(1, 2), [brief])
    assert copy.probs.isnan().all()
    assert copy.expected_steps.isnan().all()
    assert torch.equal(copy.steps, steps)


@gpu
@pytest.mark.parametrize("engine", ["dense", "gpu"])
def test_outputs_are_those_of_the_model_for_any_batch(engine):
    model, fast = deployed(engine)
    assert isinstance(fast.network, Graphed)
    for batch in (4, 0, 1, 7, 7, 7, 4, 1, 1):
        assert agree(fast, model, images_of(batch, seed=batch)) or not batch
    wide = images_of(4, size=24)
    for _ in range(3):
        assert agree(fast, model, wide[:, :, ::2, :16])


@gpu
@pytest.mark.parametrize("engine", ["dense", "gpu"])
def test_what_was_returned_stays_as_it_is(engine):
    _, fast = deployed(engine)
    logits, ponders = fast(images_of(4))
    before = [logits.clone(), *(ponder.probs.clone() for ponder in ponders)]
    fast(images_of(4, seed=1))
    fast(images_of(5, seed=2))
    assert all(torch.equal(a, b) for a, b in zip(before, [logits, *(p.probs for p in ponders)], strict=True))


@gpu
def test_threads_on_streams_of_their_own_get_what_is_theirs():
    model, fast = deployed("gpu")
    batches = [images_of(3 + i % 3, seed=i) for i in range(24)]
    with torch.no_grad():
        expected = [model(images)[0] for images in batches]
    torch.cuda.synchronize()

    def run(images):
        with torch.cuda.stream(torch.cuda.Stream()):
            logits, _ = fast(images)
            torch.cuda.current_stream().synchronize()
        return logits

    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for logits, right in zip(pool.map(run, batches), expected, strict=True):
                assert relative(logits, right) < 1e-5


@gpu
@pytest.mark.parametrize("engine", ["dense", "gpu"])
@pytest.mark.parametrize("own", [True, False])
def test_every_replay_draws_anew_and_the_same_from_the_same_seed(engine, own):
    generator = torch.Generator("cuda") if own else torch.cuda.default_generators[0]
    model = lively().cuda()
    mode = tp.Discrete(generator if own else None)
    fast = tp.deploy(model, images_of(4), mode=mode, engines=[engine])
    assert isinstance(fast.network, Graphed)

    def runs():
        generator.manual_seed(7)
        return [torch.cat([p.steps.flatten() for p in fast(images_of(4))[1]]) for _ in range(3)]

    one, two = runs(), runs()
    assert not torch.equal(one[0], one[1])
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@contextmanager
def _no_waiting():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@gpu
@pytest.mark.parametrize("captured", [True, False])
def test_the_host_never_waits(captured):
    _, fast = deployed("gpu")
    network = fast.network if captured else fast.network.network
    images = images_of(4)
    with torch.no_grad():
        network(images)
        with _no_waiting():
            for _ in range(2):
                network(images)


@gpu
def test_an_engine_that_waits_is_not_captured_and_that_is_said():
    model = lively(per="image").cuda()
    fast = tp.deploy(model, images_of(4), engines=["compact"])
    assert not isinstance(fast.network, Graphed)
    assert fast.explain().splitlines()[-1].startswith("no CUDA graph: an engine waits")
    assert agree(fast, model, images_of(5))


@gpu
def test_inference_mode_and_graphs_of_the_caller_do_no_harm():
    model, fast = deployed("gpu")
    images = images_of(6)
    with torch.inference_mode():
        for _ in range(3):
            fast(images)
    assert agree(fast, model, images)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits, _ = fast(images)
    graph.replay()
    with torch.no_grad():
        assert relative(logits, model(images)[0]) < 1e-5
