"""The kernels run in Triton's interpreter here; tests/test_gpu.py has them on a GPU."""

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="needs Triton")

from torchpact_recipes.training.ensemble import conv as module
from torchpact_recipes.training.ensemble.conv import by_kernels, strided_conv
from torchpact_recipes.training.ensemble.layers import EnsembleConv2d

# on a GPU they are tested by tests/test_gpu.py, as compiled kernels want their tensors there
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without GPU"
)


def by_turns(x, weight, stride):
    parts = zip(x.chunk(len(weight)), weight, strict=True)
    return torch.cat([F.conv2d(part, kernel, stride=stride, padding=1) for part, kernel in parts])


def ensemble_conv(networks, inputs, outputs, **settings):
    conv = EnsembleConv2d(inputs, outputs, 3, padding=1, bias=False, **settings)
    conv.weight = torch.nn.Parameter(torch.randn(networks, outputs, inputs, 3, 3))
    return conv


@pytest.mark.parametrize("chunk", [(512, 64), (32, 16)])
@pytest.mark.parametrize(
    ("networks", "shape", "outputs"),
    [(2, (4, 16, 8, 8), 32), (3, (3, 32, 5, 7), 64), (1, (2, 16, 1, 1), 16), (2, (2, 16, 9, 2), 16)],
)
def test_output_and_gradients_are_those_of_each_convolution(monkeypatch, networks, shape, outputs, chunk):
    monkeypatch.setattr(module, "CHUNK", chunk[0])
    monkeypatch.setattr(module, "STEP", chunk[1])
    x = torch.randn(shape).to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(networks, outputs, shape[1], 3, 3, requires_grad=True)
    y, expected = strided_conv(x, weight), by_turns(x, weight, 2)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weight), dy)
    for one, two in zip(found, torch.autograd.grad(expected, (x, weight), dy), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("stride", [1, 2])
def test_either_stride_has_its_kernels(stride):
    x, conv = torch.randn(4, 16, 6, 6), ensemble_conv(2, 16, 16, stride=stride)
    found = by_kernels(conv, x)
    assert found is not None
    expected = by_turns(x, conv.weight, stride)
    assert (found.float() - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize(
    ("inputs", "outputs", "settings"),
    [(16, 32, {"stride": 3}), (16, 24, {"stride": 2}), (8, 16, {"stride": 2}), (16, 32, {})],
)
def test_others_have_none(inputs, outputs, settings):
    assert by_kernels(ensemble_conv(2, inputs, outputs, **settings), torch.randn(4, inputs, 6, 6)) is None
