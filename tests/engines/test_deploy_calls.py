"""Deployed networks whose blocks are called by name, with weights, or with thresholds of their own."""

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.engines.networks import block_of, relative

pytestmark = pytest.mark.usefixtures("no_patience")


class Tokens(nn.Module):
    """A transformer over padded tokens, whose padding weighs nothing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = [tp.models.TransformerUnit(16, heads=2) for _ in range(4)]
        heads = [nn.Linear(16, 1) for _ in layers[1:]]
        self.block = tp.AdaptiveBlock(layers, heads, mode="thresholded")

    def forward(self, tokens, padding):
        return self.block(tokens, padding, weights=~padding.unsqueeze(-1))


@torch.no_grad()
def test_weights_are_not_given_to_steps_and_come_back():
    net, tokens = Tokens().eval(), torch.randn(3, 7, 16)
    padding = torch.arange(7) >= torch.tensor([[7], [4], [2]])
    fast = tp.deploy(net, (tokens, padding), engines=["rows"])
    assert fast.report.measurements[0].engine == "rows"
    (output, ponder), (expected, reference) = fast(tokens, padding), net(tokens, padding)
    assert relative(output, expected) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)
    assert torch.equal(ponder.weights, reference.weights)


class ByName(nn.Module):
    """Calls its parts by the names of their arguments."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn = tp.AdaptiveRNN(nn.GRUCell(5, 8), 3, batch_first=True, mode="thresholded", halting_bias=0.0)
        self.block = tp.AdaptiveBlock(nn.Linear(8, 8), nn.Linear(8, 1), max_steps=4, mode="thresholded")

    def forward(self, x):
        output, _, first = self.rnn(input=x)
        output, second = self.block(u=output[:, -1])
        return output, [first, second]


@torch.no_grad()
def test_parts_may_be_called_by_name():
    net, x = ByName().eval(), torch.randn(6, 5, 4)
    for engines in (None, ["recurrent_compact", "compact"], ["dense"]):
        fast = tp.deploy(net, x, engines=engines)
        (output, ponders), (expected, references) = fast(x), net(x)
        assert relative(output, expected) < 1e-5
        for ponder, reference in zip(ponders, references, strict=True):
            assert torch.equal(ponder.steps, reference.steps)
    alone = tp.deploy(net.block, {"u": torch.randn(6, 8)})
    u = torch.randn(3, 8)
    assert relative(alone(u=u)[0], net.block(u)[0]) < 1e-5


@torch.no_grad()
def test_thresholds_set_before_deployment_are_kept_and_those_of_a_call_go_before():
    net, x = ByName().eval(), torch.randn(6, 5, 4)
    thresholds = tp.Thresholds({"rnn.block": [0.1, "never"], "block": "always"})
    with tp.use_thresholds(net, tp.Thresholds([[0.1, "never"], "always"])):
        _, expected = net(x)
        fast = tp.deploy(net, x)
    for found in (fast(x)[1], tp.deploy(net, x)(x, thresholds=thresholds)[1]):
        assert all(torch.equal(a.steps, b.steps) for a, b in zip(found, expected, strict=True))
    _, usual = net(x)
    assert all(torch.equal(a.steps, b.steps) for a, b in zip(fast(x, thresholds=0.5)[1], usual, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
def test_on_a_gpu_states_of_any_rank_are_captured(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    net, tokens = Tokens().eval().cuda(), torch.randn(3, 7, 16, device="cuda")
    padding = (torch.arange(7) >= torch.tensor([[7], [4], [2]])).cuda()
    (output, ponder), (expected, reference) = (
        tp.deploy(net, (tokens, padding))(tokens, padding),
        net(tokens, padding),
    )
    assert relative(output, expected) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)
    other, x = ByName().eval().cuda(), torch.randn(6, 5, 4, device="cuda")
    for engines in (None, ["dense"], ["recurrent_compact", "compact"], ["recurrent_gpu", "dense"]):
        fast = tp.deploy(other, x, engines=engines)
        for _ in range(3):  # a graph replays
            (output, ponders), (expected, references) = fast(x), other(x)
            assert relative(output, expected) < 1e-5
            assert all(torch.equal(a.steps, b.steps) for a, b in zip(ponders, references, strict=True))
    block = tp.AdaptiveBlock(
        tp.Residual(nn.Linear(16, 16), by_position=True), nn.Linear(16, 1), max_steps=4, mode="thresholded"
    ).cuda()
    for engines in (None, ["dense"], ["rows"]):
        assert relative(tp.deploy(block, tokens, engines=engines)(tokens)[0], block(tokens)[0]) < 1e-5


class Doubles(tp.AdaptiveBlock):
    """A block that does something before."""

    def forward(self, u, *context, **named):
        return super().forward(2 * u, *context, **named)


class Mine(tp.AdaptiveRNN):
    """A recurrent layer by another name."""


def layers(kind):
    torch.manual_seed(0)
    if kind == "block":
        return Doubles(nn.Linear(8, 8), nn.Linear(8, 1), max_steps=4, mode="thresholded"), torch.randn(6, 8)
    return Mine(nn.GRUCell(9, 8), 4, batch_first=True, mode="thresholded", halting_bias=0.0), torch.randn(
        6, 3, 8
    )


@pytest.mark.parametrize("kind", ["block", "rnn"])
@torch.no_grad()
def test_thresholds_of_a_call_reach_parts_of_classes_of_ones_own(kind):
    part, x = layers(kind)
    fast = tp.deploy(part, x)
    for thresholds, steps in ((tp.Thresholds("never"), 4), (tp.Thresholds("always"), 1)):
        assert fast(x, thresholds=thresholds)[-1].steps.unique().tolist() == [steps]
    with tp.use_thresholds(part, tp.Thresholds("never")):
        assert part(x)[-1].steps.unique().tolist() == [4]


@torch.no_grad()
def test_thresholds_concern_thresholded_blocks_only():
    torch.manual_seed(0)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = tp.AdaptiveBlock(nn.Linear(8, 8), nn.Linear(8, 1), max_steps=4, mode="thresholded")
            self.other = tp.AdaptiveBlock(nn.Linear(8, 8), nn.Linear(8, 1), max_steps=4, mode="act")

        def forward(self, x):
            u, first = self.one(x)
            u, second = self.other(u)
            return u, [first, second]

    net, x = Two().eval(), torch.randn(6, 8)
    with tp.use_thresholds(net, 0.3):
        fast, (expected, references) = tp.deploy(net, x), net(x)
        output, ponders = fast(x)
    for got in ((output, ponders), tp.deploy(net, x)(x, thresholds=0.3)):
        assert relative(got[0], expected) < 1e-5
        assert all(torch.equal(a.steps, b.steps) for a, b in zip(got[1], references, strict=True))
    other = tp.deploy(net.other, x, engines=["compact"])
    with pytest.raises(ValueError, match=r"^expected the mode thresholded with thresholds, got ACT"):
        other(x, thresholds=0.3)


@torch.no_grad()
def test_a_named_block_keeps_its_name_and_takes_none_as_context():
    def step(u, mask):
        return torch.tanh(u) if mask is None else u * mask

    torch.manual_seed(0)
    block = tp.AdaptiveBlock(step, nn.Linear(8, 1), max_steps=4, mode="thresholded", name="thinker")

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = block

        def forward(self, x):
            return self.inner(x, mask=None)

    x = torch.randn(6, 8)
    for net in (Around(), block):
        fast = tp.deploy(net, x) if net is not block else tp.deploy(net, (x, None))
        (output, ponder), (expected, reference) = (
            (fast(x), net(x)) if net is not block else (fast(x, None), net(x, None))
        )
        assert relative(output, expected) < 1e-6
        assert ponder.name == reference.name == "thinker"


@torch.no_grad()
def test_modes_that_are_made_of_thresholded_decide_as_they_say():
    class Never(tp.Thresholded):
        def halt(self, remaining, logits, bound=None):
            return torch.zeros_like(remaining), remaining

    block, u = block_of(16, 6, 6, 2)
    tp.use_mode(block, Never())
    assert tp.deploy(block, u)(u)[1].steps.unique().tolist() == [block.max_steps]
