"""What ponders show, and what they tell of a training in eval()."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn

import torchpact as tp


def network():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return tp.adapt(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))


def collected(net, exits=False):
    with tp.collect(net, exits=exits) as ponders:
        output = net(torch.randn(4, 5, 8))
    return output.square().mean((1, 2)), ponders


@pytest.mark.parametrize("of_a_budget", [False, True])
def test_training_in_eval_is_warned_of(of_a_budget):
    nll, ponders = collected(network().eval())
    loss = tp.Budget(0.7).loss if of_a_budget else partial(tp.map_loss, tau=0.1)
    with pytest.warns(UserWarning, match=r"^expected a network in train\(\), got a thresholded one"):
        loss(nll, ponders)


def test_evaluation_and_what_is_meant_are_not_warned_of():
    net = network()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nll, ponders = collected(net.train())
        tp.map_loss(nll, ponders, 0.1)
        with torch.no_grad():
            nll, ponders = collected(net.eval())
            tp.map_loss(nll, ponders, 0.1)
        for mode in ("discrete", "thresholded"):
            with tp.use_mode(net, mode):
                nll, ponders = collected(net)
                tp.map_loss(nll, ponders, 0.1)
        with tp.use_mode(net, "discrete"):
            nll, ponders = collected(net)
            tp.reinforce_loss(nll, ponders, 0.1)


def test_ponders_print_as_a_line_with_shapes_and_mean_steps():
    net = network().eval()
    with tp.use_thresholds(net, tp.Thresholds([["never", "always"]])), torch.no_grad():
        _, ponders = collected(net)
        _, exits = collected(net, exits=True)
    assert str(ponders) == "Ponders(layers: 2 of 3 steps)"
    line = "Ponder(name='layers', max_steps=3, positions=(4, 5, 1), mean_steps=2"
    assert str(ponders[0]) == f"{line})"
    assert str(exits[0]) == f"{line}, with exits)"
    with tp.collect(net) as nothing:
        assert str(nothing) == "Ponders()"


def test_mean_steps_leave_padding_out():
    block = tp.AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=3, mode="thresholded", price=2.0)
    steps = torch.tensor([[[1], [3]], [[2], [3]]])
    _, ponder = block(torch.randn(2, 2, 8))
    weights = torch.tensor([[[1.0], [0.0]], [[1.0], [1.0]]])
    ponder = ponder._replace(steps=steps, weights=weights)  # (1 + (2 + 3) / 2) / 2
    assert "mean_steps=1.75, price=2, with weights" in str(ponder)


def test_training_at_no_price_in_eval_is_not_warned_of():
    loss, ponders = collected(network().eval())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tp.map_loss(loss, ponders, tau=0.0).backward()
    loss, ponders = collected(network().eval())
    with pytest.warns(UserWarning, match="train"):
        tp.map_loss(loss, ponders, tau=0.1)
