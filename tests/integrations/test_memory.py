"""The graph of a training pass is freed with its outputs, whether or not there was a backward pass."""

import gc
import weakref

import pytest
import torch
from torch import nn

import torchpact as tp


@pytest.mark.parametrize("backward", [True, False])
def test_a_training_pass_leaves_no_tensor_behind(backward):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    net = tp.adapt(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    states = []
    handle = net.layers[0].register_forward_hook(
        lambda _layer, _args, output: states.append(weakref.ref(output))
    )
    with tp.collect(net) as ponders:
        output = net(torch.randn(2, 5, 16))
    loss = tp.map_loss(output.square().mean(), ponders, tau=0.01)
    if backward:
        loss.backward()
    handle.remove()
    del output, loss, ponders
    gc.collect()
    assert [state() for state in states] == [None]
