"""A block by itself, run by the kernel's source on the CPU; see emulator.hpp."""

import pytest
import torch

import torchpact as tp
from tests.engines.networks import block_of, bottlenecks_of, halt_outside, lively, relative, tell_heads
from tests.engines.onchip.emulation import H200, emulated, needs_compiler, tame
from torchpact.engines import Unsupported, deploy, registry
from torchpact.engines.base import NO_CONTEXT
from torchpact.engines.conv.onchip import ONCHIP, OnChip, OnChipBlock
from torchpact.engines.conv.onchip.engine import block_problem
from torchpact.engines.conv.onchip.plan import Device
from torchpact.engines.generic.dense import DENSE
from torchpact.engines.graphs import repeatable
from torchpact.models import HaltingHead, ResidualUnit
from torchpact.specs import NetworkSpec, block_spec

CUDA = torch.cuda.is_available()
SMALL = Device(227 * 1024, multiprocessors=2, clusters=False)


def on_chip(block, device=H200, **how):
    spec = block_spec(block)
    assert block_problem(spec) is None
    return OnChipBlock(spec, lambda plan: emulated(plan, **how), device)


@needs_compiler
@pytest.mark.parametrize(
    ("channels", "size", "batch", "stride", "how"),
    [
        (16, (32, 32), 2, 1, {}),
        (16, (8, 8), 5, 1, {"device": SMALL, "watched": True}),
        (32, (9, 7), 3, 1, {"reverse": True}),
        (64, (4, 8), 5, 1, {"device": SMALL}),  # two images a CTA, the last of which is not full
        (32, (6, 5), 3, 2, {"device": SMALL}),
        (64, (8, 8), 2, 2, {"watched": True}),
    ],
)
def test_equals_the_dense_block_in_single_precision(channels, size, batch, stride, how):
    block, u = block_of(channels, size[0], size[1], batch, seed=2, stride=stride)
    block, u = tame(block), u.half()
    with torch.no_grad():
        expected, reference = block.half().float()(u.float())
    output, ponder = on_chip(block.half(), **how)(u)
    assert output.dtype == torch.float16
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert 1 < reference.steps.double().mean() < block.max_steps
    assert ponder.steps.shape == reference.steps.shape
    same = alike(ponder, reference)
    assert relative(output[same], expected[same]) < 2e-3
    assert relative(ponder.probs[:, same], reference.probs[:, same]) < 2e-3


def alike(ponder, reference):
    """Images that decide alike; in others a pixel came close to the bound."""
    agree = ponder.steps == reference.steps
    assert agree.double().mean() > 0.995
    same = agree.flatten(1).all(1)
    assert same.any()
    return same


@needs_compiler
def test_a_plain_block_has_no_ponder():
    block = tame(lively(2, units=2, adaptive=False)).blocks[0]
    u = torch.randn(2, 16, 8, 8).half()
    with torch.no_grad():
        expected, _ = DENSE.build(block_spec(block.half().float()))(u.float())
    output, ponder = on_chip(block.half())(u)
    assert ponder is None
    assert relative(output, expected) < 1e-3


@needs_compiler
def test_maps_may_lie_anyhow_and_be_none():
    block, u = block_of(16, 8, 12, 3)
    run, u = on_chip(tame(block).half()), u.half()
    expected, _ = run(u)
    odd = torch.empty(u.numel() + 1, dtype=u.dtype)[1:].view(3, 8, 12, 16).copy_(u.permute(0, 2, 3, 1))
    assert odd.data_ptr() % 16
    for same in (u.contiguous(memory_format=torch.channels_last), odd.permute(0, 3, 1, 2)):
        output, _ = run(same)
        assert torch.equal(output, expected)
    output, ponder = run(u[:0])
    assert output.shape == (0, 16, 8, 12)
    assert ponder.steps.shape == (0, 1, 8, 12)


def test_maps_that_do_not_fit_are_left_to_the_dense_engine():
    block, u = block_of(16, 4, 40, 2)
    run, u = on_chip(block.half()), u.half()
    for way in (run.tune, run):
        with pytest.raises(Unsupported, match="up to 255 pixels high and 32 wide, got 4×40 of 16 channels"):
            way(u)


@needs_compiler
@pytest.mark.parametrize("details", [True, False])
@pytest.mark.parametrize(
    "bounds", [(0.2, -0.1), (tp.Thresholds.NEVER, 0.1), (tp.Thresholds.ALWAYS, 0.1), (0.3, 0.3)]
)
def test_thresholds_of_each_head(bounds, details):
    block, u = block_of(16, 8, 8, 3, seed=2)
    block, u = tame(block), u.half()
    block.details = details
    thresholds = tp.Thresholds([bounds])
    with torch.no_grad():
        expected, reference = block.half().float()(u.float(), thresholds=thresholds)
    output, ponder = on_chip(block.half())(u, bounds=bounds)
    same = alike(ponder, reference)
    assert relative(output[same], expected[same]) < 2e-3
    assert ponder.probs.isnan().all() != details
    if details:
        assert relative(ponder.probs[:, same], reference.probs[:, same]) < 2e-3
    with pytest.raises(ValueError, match="expected 2 thresholds for as many heads, got 1"):
        on_chip(block.half())(u, bounds=(0.0,))


@needs_compiler
@pytest.mark.parametrize("details", [True, False])
@pytest.mark.parametrize("logit", [-torch.inf, torch.inf])
def test_never_and_always_hold_for_infinite_logits_too(logit, details):
    """Whether one number tells what halts, or one for each pixel."""
    block, u = block_of(16, 4, 8, 2)
    tell_heads(block, logit)
    block.details = details
    never, always = tp.Thresholds.NEVER, tp.Thresholds.ALWAYS
    for bounds, steps in (((never,) * 2, 3), ((always,) * 2, 1), ((never, always), 2), ((always, never), 1)):
        _, ponder = on_chip(block.half())(u.half(), bounds=bounds)
        assert ponder.steps.eq(steps).all()


def two(first):
    channels = first.conv2.out_channels
    return tp.AdaptiveBlock(
        [first, ResidualUnit(channels, channels)], [HaltingHead(channels)], mode="thresholded"
    )


def refuse(block):
    ONCHIP.build(block_spec(block))


def test_says_what_it_cannot_run():
    block = two(ResidualUnit(16, 32)).half()
    with pytest.raises(Unsupported, match="got stride 1 from 16 to 32"):
        refuse(block)
    with pytest.raises(Unsupported, match="got bottlenecks"):
        refuse(bottlenecks_of(64, 4, 4, 1)[0].half())
    with pytest.raises(Unsupported, match="got stride 2 from 8 to 16"):
        refuse(two(ResidualUnit(8, 16, stride=2)).half())
    with pytest.raises(Unsupported, match="expected channels among 16, 32, 64, 128, 256; got 24"):
        refuse(two(ResidualUnit(24, 24)).half())
    with pytest.raises(Unsupported, match="half precision"):
        refuse(lively().blocks[0])
    with pytest.raises(Unsupported, match="a network on a GPU, got one on cpu"):
        refuse(lively().half().blocks[0])
    block, u = block_of(32, 4, 4, 1, stride=2)
    with pytest.raises(Unsupported, match="even sizes before a stride of 2, got 7×8"):
        on_chip(block.half()).tune(u.half()[:, :, :7])


class Emulated(OnChip):
    """The engine with its kernels as C++: for blocks, on the CPU."""

    devices = ("cpu",)

    def supports(self, spec, example):
        return "onchip: too wide" if isinstance(spec, NetworkSpec) else block_problem(spec)

    def build(self, spec, example=NO_CONTEXT):
        return OnChipBlock(spec, emulated, SMALL)


@needs_compiler
def test_deploy_runs_those_blocks_of_a_network_that_fit(monkeypatch):
    """Images are too wide for the first block, and so for the network as a whole."""
    monkeypatch.setitem(registry.ENGINES, "onchip", Emulated())
    model = tame(lively(2, units=2)).half()
    images = torch.randn(1, 3, 8, 36).half()
    fast = deploy(model, images, engines=["onchip"])
    assert [each.engine for each in fast.report.measurements] == ["dense", "onchip", "onchip", "blocks"]
    assert "onchip: expected maps up to 255 pixels high and 32 wide, got 8×36 of 16" in fast.explain()
    logits, ponders = fast(images)
    with torch.no_grad():
        expected, references = model.float()(images.float())
    assert relative(logits, expected) < 5e-3
    assert all(torch.equal(a.steps, b.steps) for a, b in zip(ponders, references, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("channels", "size", "batch"), [(16, 32, 1), (16, 32, 64), (32, 16, 300), (64, 8, 64), (64, 8, 1000)]
)
@torch.no_grad()
def test_on_a_gpu_single_blocks_equal_dense_ones_in_graphs_too(channels, size, batch, stride):
    if stride == 2 and channels == 16:
        pytest.skip("no block has 8 channels before it")
    block, u = block_of(channels, size, size, batch, stride=stride)
    mask = torch.rand(batch, *u.shape[2:]) < 0.3
    block, u = (block, u) if stride == 2 else halt_outside(block, u, mask)
    block, u = tame(block).half().cuda(), u.half().cuda()
    expected, reference = block.float()(u.float())
    run = ONCHIP.build(block_spec(block.half()))
    run.tune(u)
    for call in (lambda: run(u), repeatable(run, u)):
        for _ in range(3):
            output, ponder = call()
            assert ponder is not None
            same = alike(ponder, reference)
            assert relative(output[same], expected[same]) < 2e-3
