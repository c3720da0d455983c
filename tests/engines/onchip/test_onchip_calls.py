"""How the engine ``onchip`` is built, tuned and called; and on a GPU, if there is one."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import torchpact as tp
from tests.engines.networks import lively, relative
from tests.engines.onchip.emulation import H200, engine, needs_compiler, reference, spec_of, tame
from torchpact.engines import Unsupported, deploy
from torchpact.engines.conv.onchip import ONCHIP, OnChipNetwork
from torchpact.engines.conv.onchip import kernels as onchip_kernels
from torchpact.engines.graphs import Graphed
from torchpact.engines.sequential import Whole


@needs_compiler
def test_takes_the_plans_that_are_fastest_and_all_give_the_same(monkeypatch):
    """The last of each block, here; on a device so small that images are many for it."""
    model = tame(lively(2, units=3)).half()
    images = torch.randn(3, 3, 8, 8).half()
    fast = engine(model, made=OnChipNetwork, device=replace(H200, multiprocessors=1))
    logits, ponders = fast(images)
    tried = []

    def measured(calls, **_):
        tried.append(list(calls))
        return {name: -float(name) for name in calls}

    monkeypatch.setattr(onchip_kernels, "interleaved", measured)
    fast.tune(images)
    found = fast.kernels.candidates(8, 8, 3)
    assert [plan for plan, _ in fast.kernels.prepare(8, 8, 3)] == [plans[-1] for plans in found]
    assert [len(names) for names in tried] == [len(plans) for plans in found if len(plans) > 1] != []
    again, others = fast(images)
    assert torch.equal(logits, again)
    for ponder, other in zip(ponders, others, strict=True):
        assert torch.equal(ponder.steps, other.steps)
        assert torch.allclose(ponder.probs, other.probs, atol=1e-4)  # terms of logits are rounded by groups


def test_few_kernels_need_no_graph_but_drawing_samples_does():
    model = lively(units=2).half()
    assert engine(model).skip_cuda_graph
    assert not engine(model, tp.Discrete()).skip_cuda_graph
    assert engine(lively(units=2, adaptive=False).half(), tp.Discrete()).skip_cuda_graph


def test_plans_that_cannot_be_loaded_leave_the_rest():
    model = lively(units=2).half()

    def load(plan):
        if plan.cluster > 1:
            raise Unsupported("onchip: no room for clusters")
        return lambda args, ctas: None

    images = torch.zeros(1, 3, 32, 32).half()
    for way in ("__call__", "tune"):
        fast = OnChipNetwork(spec_of(model), load, H200)
        assert any(plan.cluster > 1 for plans in fast.kernels.candidates(32, 32, 1) for plan in plans)
        getattr(fast, way)(images)
        assert [plan.cluster for plan, _ in fast.kernels.kernels[32, 32, 1]] == [1, 1, 1]


@needs_compiler
@pytest.mark.parametrize(("settings", "batch"), [({}, 2), ({"per": "image", "halting_bias": -0.4}, 5)])
def test_thresholds_of_each_head_of_each_block(settings, batch):
    model, images = tame(lively(2, units=3, **settings)).half(), torch.randn(batch, 3, 8, 8).half()
    never, always = tp.Thresholds.NEVER, tp.Thresholds.ALWAYS
    fast, names = engine(model), [f"blocks.{k}" for k in range(3)]
    exact = lively(2, units=3, **settings)
    exact.load_state_dict(model.float().state_dict())
    for each in (
        [(0.2, -0.1), (never, 0.0), (0.1, 0.1)],
        [(never, never), (always, never), (never, always)],
    ):
        logits, ponders = fast(images, dict(zip(names, each, strict=True)))
        with torch.no_grad(), tp.use_thresholds(exact, tp.Thresholds(each)):
            expected, references = exact(images.float())
        for ponder, wanted in zip(ponders, references, strict=True):
            assert torch.equal(ponder.steps, wanted.steps)
            assert relative(ponder.probs, wanted.probs) < 3e-3
        assert relative(logits, expected) < 3e-3


@needs_compiler
def test_what_was_returned_stays_as_it_is():
    fast = engine(lively(units=2).half())
    images = torch.randn(2, 3, 8, 8).half()
    logits, ponders = fast(images)
    before = [x.clone() for x in (logits, *(x for ponder in ponders for x in ponder[:4]))]
    fast(torch.randn(2, 3, 8, 8).half())
    after = [logits, *(x for ponder in ponders for x in ponder[:4])]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@needs_compiler
def test_details_and_nans_are_each_block_s_and_each_call_s_own():
    model = tame(lively(2, units=2)).half()
    model.blocks[0].details = False
    model.blocks[1].mode, model.blocks[1].details = tp.Discrete(), False
    fast, images = engine(model), torch.randn(2, 3, 8, 8).half()
    _, before = fast(images)
    fast(images)[1][0].probs[0, 0, 0, 0, 0].zero_()
    _, after = fast(images)
    for ponders in (before, after):
        assert [bool(ponder.probs.isnan().any()) for ponder in ponders] == [True, False, False]
        assert ponders[0].probs.isnan().all()
        assert ponders[0].expected_steps.isnan().all()


@needs_compiler
def test_outputs_share_memory_by_kind_but_not_with_maps_nor_with_each_other_s_places():
    """What a caller keeps must not hold more than it is: logits alone, decisions, details."""
    images = torch.randn(3, 3, 8, 12).half()
    for details in (True, False):
        model = lively(units=2).half()
        with tp.use_mode(model, "thresholded", details=details):
            logits, ponders = engine(model)(images)
        pixels = 3 * (8 * 12 + 4 * 6 + 2 * 3)
        assert logits.untyped_storage().nbytes() == logits.nbytes
        assert ponders[0].steps.untyped_storage().nbytes() <= 12 * pixels + 64 + 3 * 32
        for ponder in ponders:
            for each in (ponder.steps, ponder.cost):
                assert each.is_contiguous()
        places = [x for ponder in ponders for x in (ponder.steps, ponder.cost)]
        if details:
            places += [x for ponder in ponders for x in (ponder.probs, ponder.expected_steps)]
        spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in places)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(x.data_ptr() % 16 == 0 for x in places)


@needs_compiler
def test_images_of_one_size_in_several_layouts():
    fast, images = engine(lively(units=2).half()), torch.randn(2, 3, 8, 8).half()
    expected, _ = fast(images)
    wide = torch.zeros(2, 3, 8, 16).half()
    wide[..., ::2] = images
    for other in (images.contiguous(memory_format=torch.channels_last), wide[..., ::2], images):
        assert torch.equal(fast(other)[0], expected)


def _counting(model, monkeypatch, fails=lambda plan: False):
    """An engine on a device so small that batches of all sizes have the same plans; what it loads; pools."""
    loaded, pools = [], []

    class Pool(ThreadPoolExecutor):
        def __init__(self, *args):
            pools.append(args)
            super().__init__(*args)

    def load(plan):
        loaded.append(plan)
        if fails(plan):
            raise Unsupported("onchip: NVRTC failed")
        return lambda args, ctas: None

    monkeypatch.setattr(onchip_kernels, "ThreadPoolExecutor", Pool)
    return OnChipNetwork(spec_of(model), load, replace(H200, multiprocessors=1)), loaded, pools


def test_kernels_are_loaded_once_for_all_batches(monkeypatch):
    fast, loaded, pools = _counting(lively(units=2).half(), monkeypatch)
    sizes = [(8, 8, batch) for batch in (1024, 2048, 4096)]
    assert len({tuple(plans[0] for plans in fast.kernels.candidates(*size)) for size in sizes}) == 1
    for size in sizes:
        fast.kernels.prepare(*size)
    assert len(loaded) == 3
    assert len(pools) == 1


def test_threads_that_come_at_once_load_a_kernel_once(monkeypatch):
    fast, loaded, _ = _counting(lively(units=2).half(), monkeypatch)
    with ThreadPoolExecutor(4) as pool:
        assert len({tuple(each) for each in pool.map(lambda _: fast.kernels.prepare(8, 8, 4), range(8))}) == 1
    assert len(loaded) == 3


def test_what_does_not_compile_is_not_compiled_again(monkeypatch):
    fast, loaded, _ = _counting(lively(units=2).half(), monkeypatch, lambda plan: plan.last)
    for batch in (4, 4):
        with pytest.raises(Unsupported, match="onchip: NVRTC failed"):
            fast(torch.zeros(batch, 3, 8, 8).half())
    assert len(loaded) == len({*loaded}) == 4  # of the last block, both ways


@pytest.mark.parametrize(
    ("settings", "dtype", "mode", "line"),
    [
        ({}, torch.float32, None, "half precision"),
        ({"group": 2}, torch.float16, None, "for every pixel or image, got one for 2×2 pixels"),
        ({"halting_norm": True}, torch.float16, None, "heads without batch norm"),
        ({"halting_norm": True, "per": "image"}, torch.float16, None, "heads without batch norm"),
        ({}, torch.float16, tp.ACT(), "thresholded or discrete"),
        ({}, torch.float16, None, "a network on a GPU, got one on cpu"),
    ],
)
def test_says_what_it_cannot_run(settings, dtype, mode, line):
    model = lively(**settings).to(dtype)
    with pytest.raises(Unsupported, match=line):
        ONCHIP.build(spec_of(model, mode))


def test_deploy_falls_back_with_a_line():
    model = lively(units=2)
    fast = deploy(model, torch.randn(1, 3, 8, 8), engines=["dense", "onchip"])
    assert "onchip: expected a network in half precision" in fast.explain()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("details", [True, False])
def test_deployed_on_a_gpu_it_runs_without_a_graph_and_in_one_of_the_caller(details):
    model = tame(lively(units=3)).half().cuda()
    batches = [torch.randn(3 + i % 2, 3, 32, 32).half().cuda() for i in range(12)]
    fast = deploy(model, batches[0], engines=["onchip"], details=details)
    assert isinstance(fast.network, Whole)
    assert fast.network.skip_cuda_graph
    assert isinstance(fast.network.otherwise, Graphed)
    expected = [fast(images) for images in batches]
    assert all(ponder.probs.isnan().all() != details for _, ponders in expected for ponder in ponders)

    def run(images):
        with torch.cuda.stream(torch.cuda.Stream()):
            logits, ponders = fast(images)
            torch.cuda.current_stream().synchronize()
        return logits, ponders

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        for (logits, ponders), (wanted, others) in zip(pool.map(run, batches), expected, strict=True):
            assert torch.equal(logits, wanted)
            assert all(torch.equal(a.steps, b.steps) for a, b in zip(ponders, others, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits, ponders = fast(batches[0])
    graph.replay()
    assert torch.equal(logits, expected[0][0])
    assert torch.equal(ponders[0].steps, expected[0][1][0].steps)
    odd = [torch.randn(2, 3, 18, 18).half().cuda() for _ in range(3)]
    for images, (logits, ponders) in zip(odd, map(fast, odd), strict=True):  # the blocks, then in a graph
        wanted, references = reference(model.cpu(), images.cpu())
        assert relative(logits.cpu(), wanted) < 1e-2
        for ponder, other in zip(ponders, references, strict=True):
            assert (ponder.steps.cpu() == other.steps).double().mean() > 0.95  # of 50 or more


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("batch", [0, 1, 7, 12, 40, 1000])  # by clusters of 8, of 4 and of 2
def test_on_a_gpu(batch):
    model = tame(lively(units=5)).half().cuda()
    images = torch.randn(batch, 3, 32, 32).half().cuda()
    fast = ONCHIP.build(spec_of(model))
    logits, ponders = fast(images)
    expected, references = reference(model.cpu(), images.cpu())
    again, _ = fast(images)
    assert torch.equal(logits, again)
    assert logits.shape == (batch, 10)
    if batch:
        assert relative(logits.cpu(), expected) < 1e-2
        same = [(a.steps.cpu() == b.steps).double() for a, b in zip(ponders, references, strict=True)]
        assert torch.cat([each.flatten() for each in same]).mean() > 0.999
        assert all(each.mean() > 0.99 for each in same)  # of few pixels, one may be near the bound


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_blocks_that_overlap_give_what_others_do_and_a_fresh_thread_may_call():
    model = tame(lively(units=5)).half().cuda()
    for batch in (1, 3, 700):
        images = torch.randn(batch, 3, 32, 32).half().cuda()
        ways = [ONCHIP.build(spec_of(model)) for _ in range(2)]
        found = [plans[0] for plans in ways[0].kernels.candidates(32, 32, batch)]
        assert [plan.overlap for plan in found] == [False] + [
            torch.cuda.get_device_capability() >= (9, 0)
        ] * 2
        apart = [replace(plan, overlap=False) for plan in found]
        ways[1].kernels.kernels[32, 32, batch] = ways[1].kernels.with_kernels(apart)
        (logits, ponders), (expected, references) = (way(images) for way in ways)
        assert torch.equal(logits, expected)
        torch.cuda.synchronize()
        with ThreadPoolExecutor(1) as pool:  # which has no context of the device
            again, _ = pool.submit(ways[0], images).result()
        for _ in range(20):
            assert torch.equal(ways[0](images)[0], expected)
        assert torch.equal(again, expected)
        for ponder, wanted in zip(ponders, references, strict=True):
            assert torch.equal(ponder.steps, wanted.steps)
            assert torch.equal(ponder.probs, wanted.probs)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("batch", [1, 40, 600])
def test_on_a_gpu_images_decide_as_in_single_precision(batch):
    model = tame(lively(1, units=4, per="image", halting_bias=-0.4)).half().cuda()
    images = torch.randn(batch, 3, 32, 32).half().cuda()
    with torch.no_grad():
        expected, references = deepcopy(model).float()(images.float())
    fast = deploy(model, images, engines=["onchip"])
    logits, ponders = fast(images)
    same = torch.stack(
        [ponder.steps == wanted.steps for ponder, wanted in zip(ponders, references, strict=True)]
    ).all(0)
    assert same.double().mean() > 0.9  # some images come close to the bound
    assert relative(logits[same.flatten()], expected[same.flatten()]) < 5e-3


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_all_plans_give_the_same():
    """Also those by which several multiprocessors share an image, whose sums are in another order."""
    model = tame(lively(units=5)).half().cuda()
    for batch in (1, 5, 16, 300):
        images = torch.randn(batch, 3, 32, 32).half().cuda()
        fast = ONCHIP.build(spec_of(model))
        found = fast.kernels.candidates(32, 32, batch)
        outputs = []
        for number in range(max(map(len, found))):
            chosen = [plans[min(number, len(plans) - 1)] for plans in found]
            fast.kernels.kernels[32, 32, batch] = fast.kernels.with_kernels(chosen)
            fast.kernels.calls.clear()
            outputs.append(fast(images))
            for _ in range(20):
                again, ponders = fast(images)
                assert torch.equal(again, outputs[-1][0])
                for ponder, wanted in zip(ponders, outputs[-1][1], strict=True):
                    assert torch.equal(ponder.probs, wanted.probs)
        for logits, ponders in outputs[1:]:
            assert relative(logits, outputs[0][0]) < 1e-2
            for ponder, wanted in zip(ponders, outputs[0][1], strict=True):
                assert (ponder.steps == wanted.steps).double().mean() > 0.999


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_ten_thousand_calls_leave_nothing_behind():
    model = tame(lively(units=2)).half().cuda()
    sizes = [torch.randn(batch, 3, 32, 32).half().cuda() for batch in (1, 7, 300)]
    fast = deploy(model, sizes[-1], engines=["onchip"])

    def held():
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        return torch.cuda.memory_allocated(), free

    for call in range(10_000):
        fast(sizes[call % 3])
        if call == 100:
            before = held()
    allocated, free = held()
    assert allocated == before[0]
    assert free >= before[1] - 64 * 2**20  # others may use the device, too
