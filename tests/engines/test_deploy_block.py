"""Blocks of networks that are not ours, deployed by themselves."""

import re
import threading
import warnings

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.engines.networks import (
    block_of,
    bottlenecks_of,
    halt_outside,
    lively,
    relative,
    tell_heads,
    undecided,
)
from torchpact.engines import registry
from torchpact.models import Bottleneck, HaltingHead, ResidualUnit

ENGINES = [None, "dense", "sparse", "native"]


pytestmark = pytest.mark.usefixtures("no_patience")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [block_of, bottlenecks_of])
@pytest.mark.parametrize("stride", [1, 2])
@torch.no_grad()
def test_a_deployed_block_does_what_the_block_does(make, stride, engine):
    block, u = make(64, 7, 6, 3, stride=stride)
    fast = tp.deploy(block, u[:2], engines=None if engine is None else [engine])
    for part in (u, u[:1], u[:0], u[:, :, :4, :6].clone()):  # any batch and size afterwards
        (output, ponder), (expected, reference) = fast(part), block(part)
        assert output.shape == expected.shape
        assert not undecided(reference)
        assert torch.equal(ponder.steps, reference.steps)
        if len(part):
            assert relative(output, expected) < 1e-5
            assert relative(ponder.probs, reference.probs) < 1e-5


@torch.no_grad()
def test_it_takes_the_place_of_the_block_in_a_network_of_ones_own():
    class Mine(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.stem, self.block, self.readout = nn.Conv2d(3, 64, 1), block, nn.Linear(64, 2)

        def forward(self, images):
            u, ponder = self.block(self.stem(images))
            return self.readout(u.mean((2, 3))), [ponder]

    torch.manual_seed(0)
    block, _ = bottlenecks_of(64, 8, 8, 1)
    net, images = Mine(block).eval(), torch.randn(4, 3, 8, 8)
    expected, [reference] = net(images)
    net.block = tp.deploy(block, net.stem(images))
    logits, [ponder] = net(images)
    assert relative(logits, expected) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)


@torch.no_grad()
def test_explain_says_what_runs_it_and_what_flops_promise():
    block, u = bottlenecks_of(64, 8, 8, 2)
    halt_outside(block, u, torch.arange(64).view(8, 8).expand(2, 8, 8) < 16)  # two rows of eight
    fast = tp.deploy(block, u)
    row, _ = fast.report.measurements
    assert row.output == "64×8×8"
    assert row.active == pytest.approx((16 * 3 + 48) / 64 / 3)
    assert row.engine in registry.ENGINES
    assert {"dense", "plain"} <= set(row.seconds)
    first, second, third = 64 * 16, 9 * 16 * 16, 16 * 64  # multiply-adds of the convolutions
    plain = 3 * 64 * (first + second + third)
    heads = (64 + 16) * 9 * 64 + 2 * 64
    sparse = 64 * (first + second + third) + 2 * (24 * first + 16 * (second + third)) + heads
    assert row.flops_speedup == pytest.approx(plain / sparse)
    assert fast.explain().startswith("block  output")


@pytest.mark.parametrize("mode", ["thresholded", "discrete"])
@torch.no_grad()
def test_the_mode_may_be_given_and_details_left_out(mode):
    block, u = block_of(32, 6, 5, 2, mode="relaxed")
    fast = tp.deploy(block, u, mode=mode, details=False)
    _, ponder = fast(u)
    assert isinstance(block.mode, tp.Relaxed)  # which stays as it is
    assert (ponder.log_prob is not None) == (mode == "discrete")
    assert ponder.probs.isnan().all() == (mode == "thresholded")
    _, expected = block(u, mode="thresholded")
    if mode == "thresholded":
        assert torch.equal(ponder.steps, expected.steps)
        assert torch.equal(ponder.cost, expected.steps.float())


@torch.no_grad()
def test_steps_and_heads_may_be_shared():
    torch.manual_seed(0)
    shared = tp.AdaptiveBlock(
        ResidualUnit(32, 32), HaltingHead(32, bias=0.0), max_steps=4, mode="thresholded"
    ).eval()
    u = torch.randn(2, 32, 7, 5)
    expected, reference = shared(u)
    assert 1 < reference.steps.double().mean() < 4
    assert not undecided(reference)
    for engine in ENGINES:
        output, ponder = tp.deploy(shared, u, engines=engine and [engine])(u)
        assert relative(output, expected) < 1e-5
        assert torch.equal(ponder.steps, reference.steps)


@torch.no_grad()
def test_a_head_after_the_last_step_is_not_asked():
    torch.manual_seed(0)
    steps, heads = [ResidualUnit(16, 16) for _ in range(3)], [HaltingHead(16, bias=0.0) for _ in range(3)]
    block, u = tp.AdaptiveBlock(steps, heads, mode="thresholded").eval(), torch.randn(2, 16, 6, 6)
    expected, reference = block(u)
    output, ponder = tp.deploy(block, u)(u)
    assert relative(output, expected) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)
    assert ponder.probs.shape == reference.probs.shape


@torch.no_grad()
def test_threads_may_share_it():
    block, u = bottlenecks_of(64, 9, 8, 4)
    fast = tp.deploy(block, u)
    expected, _ = block(u)
    wrong: list[float] = []

    def work():
        for _ in range(10):
            distance = relative(fast(u)[0], expected)
            if distance > 1e-5:
                wrong.append(distance)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_soft_mode_is_told_and_runs_densely():
    block, u = block_of(16, 5, 5, 2, mode="relaxed")
    with pytest.warns(UserWarning, match="expected a hard mode"):
        fast = tp.deploy(tell_heads(block, 0.0), u)
    assert fast.report.measurements[0].engine == "dense"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            tp.AdaptiveBlock(
                [ResidualUnit(64, 64), Bottleneck(64, 64)], [HaltingHead(64)], mode="thresholded"
            ),
            "expected a block whose steps are all ResidualUnit or all Bottleneck, got Bottleneck, Res",
        ),
        (
            tp.AdaptiveBlock([ResidualUnit(64, 64)] * 2, [nn.Conv2d(64, 1, 1)], mode="thresholded"),
            "expected halting heads of torchpact.models.HaltingHead, got Conv2d",
        ),
        (
            tp.AdaptiveBlock([ResidualUnit(64, 64)], [HaltingHead(64)], mode="thresholded"),
            "expected a block of at least two units, got 1",
        ),
    ],
)
@torch.no_grad()
def test_blocks_that_engines_do_not_know_run_as_they_are_and_the_table_says_why(block, message):
    block.eval()
    u = torch.randn(2, 64, 4, 4)
    fast = tp.deploy(block, u)
    (output, ponder), (expected, reference) = fast(u), block(u)
    assert relative(output, expected) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)
    assert any(line.startswith(f"sparse, native: {message}") for line in fast.explain().splitlines())


@torch.no_grad()
def test_blocks_that_decide_for_patches_return_what_the_block_returns():
    torch.manual_seed(0)
    units = [ResidualUnit(64, 64, group=2) for _ in range(3)]
    heads = [HaltingHead(64, group=2, bias=0.0) for _ in units[1:]]
    block, u = tp.AdaptiveBlock(units, heads, mode="thresholded").eval(), torch.randn(3, 64, 4, 6)
    expected, reference = block(u)
    for engine in ("dense", "native"):
        output, ponder = tp.deploy(block, u, engines=[engine])(u)
        assert output.shape == expected.shape
        assert relative(output, expected) < 1e-5
        assert torch.equal(ponder.steps, reference.steps)


@pytest.mark.parametrize(
    ("name", "layer", "message"),
    [
        ("conv1", nn.Conv2d(16, 16, 3, padding=1), r"Conv2d\(16, .*bias=False\), got Conv2d\(16, "),
        (
            "conv2",
            nn.Conv2d(16, 16, 3, padding=2, dilation=2, bias=False),
            r"got Conv2d\(.*dilation=\(2, 2\)",
        ),
        ("conv2", nn.Conv2d(16, 16, 5, padding=2, bias=False), r"got .*kernel_size=\(5, 5\)"),
        ("norm1", nn.GroupNorm(4, 16), r"BatchNorm2d\(16, .*, got GroupNorm\(4, 16"),
        ("norm2", nn.BatchNorm2d(16, affine=False), "got BatchNorm2d.*affine=False"),
        ("norm2", nn.Identity(), r"got Identity\(\)"),
    ],
)
@torch.no_grad()
def test_units_that_were_changed_run_as_they_are_also_in_networks(name, layer, message):
    block, u = block_of(16, 4, 4, 2)
    setattr(block.steps[1], name, layer)
    model = lively()
    setattr(model.blocks[0].steps[1], name, layer)
    for changed, example in ((block.eval(), u), (model.eval(), torch.randn(2, 3, 8, 8))):
        fast = tp.deploy(changed, example)
        assert relative(fast(example)[0], changed(example)[0]) < 1e-5
        assert re.search(f"expected step 2 to have .*{message}", fast.explain())


@torch.no_grad()
def test_units_with_hooks_run_as_they_are_and_norms_with_other_settings_by_engines():
    block, u = block_of(16, 4, 4, 1)
    block.steps[1].norm1 = nn.BatchNorm2d(16, eps=0.1, momentum=None).eval()
    fast = tp.deploy(block, u)
    assert relative(fast(u)[0], block(u)[0]) < 1e-5
    assert "native" in fast.report.measurements[0].seconds
    block.steps[1].register_forward_hook(lambda module, args, output: output * 2)
    fast = tp.deploy(block, u)
    assert relative(fast(u)[0], block(u)[0]) < 1e-5
    assert "expected units and heads without forward hooks" in fast.explain()


@pytest.mark.parametrize("first", [ResidualUnit(64, 32), ResidualUnit(64, 32, stride=2), Bottleneck(256, 64)])
@torch.no_grad()
def test_a_first_unit_may_make_fewer_channels(first):
    torch.manual_seed(0)
    channels = 64 if isinstance(first, Bottleneck) else 32
    steps, heads = [first, type(first)(channels, channels)], [HaltingHead(channels, bias=0.0)]
    block = tp.AdaptiveBlock(steps, heads, mode="thresholded").eval()
    u = torch.randn(2, first.conv1.in_channels, 8, 6)
    fast = tp.deploy(block, u)
    assert relative(fast(u)[0], block(u)[0]) < 1e-5
    assert "native: expected a first unit that makes no fewer channels" in fast.explain()


def test_warnings_point_at_who_called():
    block, u = block_of(16, 4, 4, 1, mode="relaxed")
    with pytest.warns(UserWarning, match="expected a hard mode") as found:
        tp.deploy(block, u)
    with pytest.warns(UserWarning, match="expected a hard mode") as more:
        tp.deploy(lively(mode="relaxed"), torch.randn(1, 3, 8, 8))
    assert {each.filename for each in (*found, *more)} == {__file__}


def test_gradients_that_would_end_are_told_of():
    block, u = block_of(16, 4, 4, 1)
    fast = tp.deploy(block, u)
    with pytest.warns(UserWarning, match="expected maps that need no gradients"):
        fast(u.requires_grad_())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(u)


@torch.no_grad()
def test_maps_that_do_not_fit_are_refused_in_a_line():
    block, u = block_of(16, 4, 4, 1)
    with pytest.raises(ValueError, match="expected an example of at least one input, got none"):
        tp.deploy(block, u[:0])
    fast = tp.deploy(block, u)
    with pytest.raises(
        ValueError, match=r"expected maps of shape \(batch, 16, height, width\), got \(1, 3, 4, 4\)"
    ):
        fast(torch.randn(1, 3, 4, 4))
    with pytest.raises(ValueError, match=r"expected maps of torch.float32 on cpu.*got torch.float64 on cpu"):
        fast(u.double())
    with pytest.raises(TypeError, match="neither copied nor saved"):
        fast.state_dict()
    with pytest.raises(TypeError, match="a deployed block can be neither copied nor saved"):
        fast.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"a deployed block stays .* deploy again"):
        fast.half()
    assert fast.to("cpu").float() is fast  # which changes nothing
    assert "16×4×4" in repr(fast)


@pytest.mark.filterwarnings("ignore:expected engines that can run it")
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("engine", [None, "dense", "rows", "compact"])
@torch.no_grad()
def test_collect_sees_each_call_of_a_deployed_block_once(engine, wrapped):
    torch.manual_seed(0)
    steps = [tp.Residual(nn.Linear(8, 8), by_position=True) for _ in range(4)]
    block = tp.AdaptiveBlock(steps, nn.Linear(8, 1), mode="thresholded")
    net = nn.Sequential(nn.Linear(8, 8), block) if wrapped else block
    u = torch.randn(6, 8)
    fast = tp.deploy(net, u, engines=None if engine is None else [engine])
    _, expected = net(u)
    with tp.collect(fast) as ponders:
        fast(u)
        fast(u, thresholds=tp.Thresholds("never"))
    assert [ponder.steps.flatten().tolist() for ponder in ponders] == [
        expected.steps.flatten().tolist(),
        [4] * 6,
    ]
    assert len(ponders.by_block) == 1
