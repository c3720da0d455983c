"""One batch in the place of several is refused, rather than taken apart."""

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.budget.networks import Classifier

CALLS = {
    "calibrate": lambda net, batches: tp.calibrate(net, batches, 0.7),
    "calibrate at a quality": lambda net, batches: tp.calibrate(net, batches, quality=0.1),
    "diagnose": tp.diagnose,
    "distill": lambda net, batches: tp.distill(net, batches, 0.7),
    "distill, held out": lambda net, batches: tp.distill(net, [torch.randn(2, 8)], 0.7, held_out=batches),
    "compare": lambda net, batches: tp.budget.compare(net, batches, batches, [0.7]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ({"x": torch.randn(4, 8)}, r"got one batch, a dict: pass \[batch\]"),
        (torch.randn(4, 8), r"got one batch, a Tensor: pass \[batch\]"),
        ("texts.txt", "got the string 'texts.txt'"),
    ],
    ids=["dict", "tensor", "string"],
)
def test_a_single_batch_is_refused_in_one_line(call, batches, message):
    with pytest.raises(TypeError, match=f"expected an iterable of batches, {message}$"):
        call(Classifier(), batches)


@pytest.mark.parametrize(
    "call", [lambda net, x: tp.Budget(0.5).bind(net, x), lambda net, x: tp.calibrate(net, [x], 0.5)]
)
def test_a_network_without_blocks_is_refused_with_a_way_out(call):
    with pytest.raises(ValueError, match=r"got Linear without any: tp\.adapt makes its layers adaptive$"):
        call(nn.Linear(4, 4), torch.randn(2, 4))
