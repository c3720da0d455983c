"""Plain residual networks made adaptive, on the engines of convolutional blocks."""

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.adapt.networks import randomize
from tests.engines.networks import lively
from torchpact.models import Bottleneck, ResidualUnit
from torchpact.specs import ConvHead, block_spec, called_as_a_whole

pytestmark = pytest.mark.usefixtures("no_patience")
PER = pytest.mark.parametrize("per", ["pixel", "example"])


@torch.no_grad()
def adapted(per, seed=0, **options):
    """A plain network whose new heads halt about half of what they are asked about."""
    net = randomize(tp.adapt(lively(seed, adaptive=False), per=per, **options).eval(), scale=0.5)
    with tp.use_thresholds(net, tp.Thresholds("never")), tp.collect(net, exits=True) as ponders:
        net(pictures(7))
    for run, ponder in zip(net.torchpact.runs, ponders, strict=True):
        assert ponder.exits is not None
        for head, logits in zip(run.heads, ponder.exits.logits, strict=False):
            head.bias -= logits.mean()
    return net


def pictures(batch):
    return torch.randn(batch, 3, 12, 12, generator=torch.Generator().manual_seed(batch))


def by_hand(net, images):
    """Units one by one, with halted pixels put back to what they were; and how many units each pixel ran."""
    u, steps = net.stem(images), []
    for block, run in zip(net.blocks, net.torchpact.runs, strict=True):
        u = type(block.steps[0]).forward(block.steps[0], u)
        live = torch.ones(len(u), 1, *u.shape[2:], dtype=torch.bool)
        count = live.long()
        for unit, head in zip(block.steps[1:], run.heads, strict=True):
            pooled = u.mean((2, 3), keepdim=True) if head.per_example else u
            logit = (pooled * head.weight).sum(1, keepdim=True) + head.bias
            live = live & (logit <= 0)
            u = torch.where(live, type(unit).forward(unit, u), u)
            count = count + live
        steps.append(count)
    return net.classifier(torch.relu(net.norm(u)).mean((2, 3))), steps


@PER
@pytest.mark.parametrize("batch", [1, 7])
@torch.no_grad()
def test_an_adapted_plain_resnet_runs_on_the_native_engine_and_returns_what_it_did(per, batch):
    net = adapted(per)
    fast = tp.deploy(net, pictures(3), engines=["native"])
    assert [row.engine for row in fast.report.measurements] == ["native"] * 3 + ["blocks"]
    images = pictures(batch)
    with tp.collect(net) as expected, tp.collect(fast) as found:
        logits, own = net(images)
        fast_logits, fast_own = fast(images)
    torch.testing.assert_close(fast_logits, logits, rtol=1e-4, atol=1e-4)
    assert own == fast_own == []  # as the plain network returns
    by_hand_logits, steps = by_hand(net, images)
    torch.testing.assert_close(fast_logits, by_hand_logits, rtol=1e-4, atol=1e-4)
    for ponder, wanted, count in zip(found, expected, steps, strict=True):
        assert ponder.name == wanted.name
        assert torch.equal(ponder.steps, wanted.steps)
        assert torch.equal(ponder.steps.expand(count.shape), count)
        assert torch.equal(ponder.cost, wanted.cost)
        for index, (probs, those) in enumerate(zip(ponder.probs, wanted.probs, strict=True)):
            asked = wanted.steps > index  # of others engines do not compute them
            torch.testing.assert_close(probs[asked], those[asked], rtol=1e-4, atol=1e-5)
    assert batch == 1 or all(len(ponder.steps.unique()) > 1 for ponder in found)


@PER
@torch.no_grad()
def test_thresholds_of_a_call_are_those_of_the_adapted_network(per):
    net, images = adapted(per), pictures(5)
    fast = tp.deploy(net, images, engines=["native"])
    for thresholds in (0.3, tp.Thresholds([0.4, "never", "always"])):
        with tp.use_thresholds(net, thresholds), tp.collect(net) as expected:
            logits, _ = net(images)
        with tp.collect(fast) as found:
            torch.testing.assert_close(fast(images, thresholds=thresholds)[0], logits, rtol=1e-4, atol=1e-4)
        assert [p.steps.tolist() for p in found] == [p.steps.tolist() for p in expected]
    assert float(found[1].steps.float().mean()) == 3 > float(found[2].steps.float().mean()) == 1


@torch.no_grad()
def test_thresholds_that_are_set_are_deployed_and_draws_are_those_of_the_generator():
    net, images = adapted("pixel"), pictures(4)
    with tp.use_thresholds(net, tp.Thresholds(1.0)):
        fast, (logits, _) = tp.deploy(net, images, engines=["native"]), net(images)
    torch.testing.assert_close(fast(images)[0], logits, rtol=1e-4, atol=1e-4)
    steps = []
    for network in (net, tp.deploy(net, images, mode="discrete", engines=["native"])):
        torch.manual_seed(3)
        with tp.use_mode(net, "discrete"), tp.collect(network) as ponders:
            network(images)
        steps.append([ponder.steps for ponder in ponders])
    assert all(torch.equal(a, b) for a, b in zip(*steps, strict=True))


@PER
@pytest.mark.parametrize("engine", ["sparse", "compact", "dense", "compiled"])
@torch.no_grad()
def test_other_engines_of_blocks_take_it_too(per, engine, monkeypatch):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile_(f, backend="eager", dynamic=False))
    net, images = adapted(per), pictures(4)
    if (per, engine) in (("pixel", "compact"), ("example", "sparse")):
        with pytest.warns(UserWarning, match="expected one decision an image|a decision for every pixel"):
            tp.deploy(net, images, engines=[engine])
        return
    fast = tp.deploy(net, images, engines=[engine])
    assert {row.engine for row in fast.report.measurements[:-1]} == {engine}
    with tp.collect(net) as expected, tp.collect(fast) as found:
        torch.testing.assert_close(fast(images)[0], net(images)[0], rtol=1e-4, atol=1e-4)
    assert all(torch.equal(a.steps, b.steps) for a, b in zip(found, expected, strict=True))


@torch.no_grad()
def test_a_network_adapted_with_its_weights_frozen_runs_on_the_native_engine():
    net, images = adapted("pixel", frozen=True), pictures(2)
    fast = tp.deploy(net, images, engines=["native"])
    assert {row.engine for row in fast.report.measurements[:-1]} == {"native"}
    torch.testing.assert_close(fast(images)[0], net(images)[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_bfloat16_decides_as_single_precision_does_on_its_own_weights():
    net, images = adapted("pixel").bfloat16(), pictures(4).bfloat16()
    fast = tp.deploy(net, images, engines=["native"])
    assert {row.engine for row in fast.report.measurements[:-1]} == {"native"}
    with tp.collect(net) as expected, tp.collect(fast) as found:
        logits, fast_logits = net(images)[0], fast(images)[0]
    assert fast_logits.dtype == logits.dtype == torch.bfloat16
    for ponder, wanted in zip(found, expected, strict=True):
        assert float((ponder.steps == wanted.steps).float().mean()) > 0.9


class Units(nn.Module):
    """Units that a network of the user's own calls, one by one or as a sequence."""

    def __init__(self, kind=ResidualUnit, sequence=True):
        super().__init__()
        units = [kind(64, 64) for _ in range(3)]
        self.units = nn.Sequential(*units) if sequence else nn.ModuleList(units)

    def forward(self, u):
        if isinstance(self.units, nn.Sequential):
            return self.units(u)
        states = [u]
        for unit in self.units:
            states.append(unit(states[-1]))
        return torch.stack(states[1:])


@pytest.mark.parametrize("kind", [ResidualUnit, Bottleneck])
@torch.no_grad()
def test_units_in_a_sequence_are_a_block(kind):
    net, u = randomize(tp.adapt(Units(kind)).eval(), scale=0.5), torch.randn(3, 64, 6, 6)
    fast = tp.deploy(net, u, engines=["native"])
    assert fast.report.measurements[0].engine == "native"
    torch.testing.assert_close(fast(u), net(u), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["native", "sparse", "compiled", None])
@torch.no_grad()
def test_units_whose_states_a_network_keeps_run_one_by_one_with_the_reason(engine):
    net, u = randomize(tp.adapt(Units(sequence=False)).eval(), scale=0.5), torch.randn(3, 64, 6, 6)
    if engine is None:
        fast = tp.deploy(net, u)
    else:
        with pytest.warns(UserWarning, match="that (the|a) network calls one by one"):
            fast = tp.deploy(net, u, engines=[engine])
    assert "expected units in an nn.Sequential of their own, got units that the network" in fast.explain()
    torch.testing.assert_close(fast(u), net(u))


@torch.no_grad()
def test_the_dense_engine_is_no_problem_of_layers_that_a_network_calls():
    net, u = tp.adapt(Units(sequence=False)).eval(), torch.randn(3, 64, 6, 6)
    assert "tuple index" not in tp.deploy(net, u, engines=["dense"]).explain()


@torch.no_grad()
def test_hooks_on_units_and_heads_of_ones_own_keep_units_as_they_are():
    seen = []
    net, u = adapted("pixel"), pictures(2)
    net.blocks[0].steps[1].register_forward_hook(lambda *_: seen.append(1))
    fast = tp.deploy(net, u)
    assert fast.report.measurements[0].engine == "dense"
    seen.clear()
    torch.testing.assert_close(fast(u)[0], net(u)[0], rtol=1e-4, atol=1e-4)
    assert "without forward hooks" in fast.explain()
    assert len(seen) >= 2

    own = tp.adapt(lively(adaptive=False), heads=lambda _, width: nn.Conv2d(width, 1, 3, padding=1)).eval()
    fast = tp.deploy(own, u)
    assert "as tp.adapt makes them by default, got Conv2d" in fast.explain()
    torch.testing.assert_close(fast(u)[0], own(u)[0])


@torch.no_grad()
def test_layers_that_others_call_too_run_as_they_are():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(*(ResidualUnit(16, 16) for _ in range(3)))

        def forward(self, u):
            u = self.first(u)
            for unit in self.first:
                u = unit(u)
            return u

    net, u = randomize(tp.adapt(Twice()).eval(), scale=0.5), torch.randn(2, 16, 6, 6)
    fast = tp.deploy(net, u)
    torch.testing.assert_close(fast(u), net(u))
    assert "called by others" in fast.explain()
    with tp.collect(fast) as ponders:
        fast(u)
    assert len(ponders) == 2


def test_a_head_of_one_tap_is_a_convolution_with_zeros_around_it():
    net = adapted("pixel")
    spec = block_spec(net.torchpact.runs[0])
    head = spec.heads[0]
    assert isinstance(head, ConvHead)
    assert head.kernel is not None
    u = torch.randn(2, 16, 5, 5)
    conv = nn.functional.conv2d(u, head.kernel, head.bias, padding=1)
    torch.testing.assert_close(conv, net.torchpact.runs[0].heads[0](u))
    assert head.mean_weight.tolist() == [[0.0] * 16]
    whole = called_as_a_whole(spec, net)
    assert (whole.module, whole.run, whole.hooked) == (net.blocks[0], net.torchpact.runs[0], False)


@torch.no_grad()
def test_the_zoos_plain_resnet_32_runs_on_the_native_engine():
    net = randomize(tp.adapt(tp.models.resnet32(pretrained="plain")).eval(), scale=0.5)
    images = torch.randn(2, 3, 32, 32)
    fast = tp.deploy(net, images, engines=["native"])
    assert [row.engine for row in fast.report.measurements] == ["native"] * 3 + ["blocks"]
    torch.testing.assert_close(fast(images)[0], net(images)[0], rtol=1e-3, atol=1e-3)
