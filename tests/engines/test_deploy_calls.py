"""Deployed networks whose blocks are called by name, with weights, or with thresholds of their own."""

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.engines.networks import relative

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
    thresholds = tp.Thresholds({"rnn": [0.1, "never"], "block": "always"})
    with tp.use_thresholds(net, tp.Thresholds([[0.1, "never"], "always"])):
        _, expected = net(x)
        fast = tp.deploy(net, x)
    for found in (fast(x)[1], tp.deploy(net, x)(x, thresholds=thresholds)[1]):
        assert all(torch.equal(a.steps, b.steps) for a, b in zip(found, expected, strict=True))
    _, usual = net(x)
    assert all(torch.equal(a.steps, b.steps) for a, b in zip(fast(x, thresholds=0.5)[1], usual, strict=True))
