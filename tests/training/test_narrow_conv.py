"""The kernels run in Triton's interpreter here; tests/test_gpu.py has them on a GPU."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton", reason="needs Triton")

from torchpact.models import resnet32
from torchpact_recipes.training.kernels import narrow_conv as module
from torchpact_recipes.training.kernels.narrow_conv import NarrowConv2d, fits, narrow_conv, with_narrow_convs

# on a GPU they are tested by tests/test_gpu.py, as compiled kernels want their tensors there
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without GPU"
)


@pytest.mark.parametrize(
    "shape", [(2, 16, 5, 7), (1, 16, 1, 1), (3, 32, 8, 8), (1, 16, 20, 33), (5, 16, 1, 9), (1, 64, 4, 5)]
)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_output_and_gradients_are_those_of_a_convolution(shape, layout):
    x = torch.randn(shape).to(memory_format=layout).requires_grad_()
    weight = torch.randn(shape[1], shape[1], 3, 3, requires_grad=True)
    y = narrow_conv(x, weight)
    expected = F.conv2d(x, weight, padding=1)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weight), dy)
    exact = torch.autograd.grad(expected, (x, weight), dy)
    for one, two in zip(found, exact, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-4)


def test_kernels_of_several_networks_are_for_their_share_of_the_batch():
    x = torch.randn(6, 16, 5, 7).to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(3, 16, 3, 3, 16).permute(0, 1, 4, 2, 3).requires_grad_()
    y = narrow_conv(x, weight)
    parts = zip(x.chunk(3), weight, strict=True)
    expected = torch.cat([F.conv2d(part, kernel, padding=1) for part, kernel in parts])
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weight), dy)
    for one, two in zip(found, torch.autograd.grad(expected, (x, weight), dy), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-4)
    assert found[1].stride() == weight.stride()


def test_chunks_of_pixels_end_anywhere(monkeypatch):
    """Settings that other GPUs may want do not change the result."""
    x, weight = torch.randn(2, 16, 6, 7), torch.randn(16, 16, 3, 3)
    dy = torch.randn_like(x)
    expected = narrow_conv(x, weight), module._weight_gradient(x, dy)[0]
    monkeypatch.setitem(module.TILES, 16, (16, 1))
    monkeypatch.setitem(module.CHUNKS, 16, (32, 16, 1))
    torch.testing.assert_close(narrow_conv(x, weight), expected[0])
    torch.testing.assert_close(module._weight_gradient(x, dy)[0], expected[1], rtol=1e-5, atol=1e-4)


def test_only_convolutions_that_fit_are_taken():
    for channels in ((16, 16), (32, 32), (64, 64), (3, 16)):
        assert fits(nn.Conv2d(*channels, 3, padding=1, bias=False))
    for other in (
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Conv2d(16, 16, 3, bias=False),
        nn.Conv2d(16, 16, 3, padding=1, stride=2, bias=False),
        nn.Conv2d(16, 16, 3, padding=2, dilation=2, bias=False),
        nn.Conv2d(16, 16, 3, padding=1, groups=2, bias=False),
        nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect", bias=False),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.Conv2d(128, 128, 3, padding=1, bias=False),
        nn.Conv2d(16, 16, 1, bias=False),
    ):
        assert not fits(other)


def test_a_network_keeps_its_names_and_on_a_cpu_its_outputs():
    model = resnet32().eval()
    images = torch.randn(2, 3, 32, 32)
    names, expected = list(model.state_dict()), model(images)[0]
    model = with_narrow_convs(model)
    assert sum(isinstance(m, NarrowConv2d) for m in model.modules()) == 1 + 10 + 9 + 9
    assert list(model.state_dict()) == names
    assert torch.equal(model(images)[0], expected)


def test_a_stem_is_padded():
    """On a CPU autocast is another's: what the layer would do on a GPU is called here as it would be."""
    conv: Any = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    x = torch.randn(2, 3, 6, 6)
    expected = conv(x)
    gradient = torch.autograd.grad(expected.square().sum(), conv.weight)[0]
    conv = with_narrow_convs(conv)
    y = conv.by_kernels(x, torch.float)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    (found,) = torch.autograd.grad(y.square().sum(), conv.weight)
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-3)
