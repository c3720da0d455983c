"""The kernels run in Triton's interpreter here; tests/test_gpu.py has them on a GPU."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from torchpact.models import psact_resnet32
from torchpact.nn.conv_units import HaltingHead, split_patches
from torchpact_recipes.training.kernels import fused_head as module
from torchpact_recipes.training.kernels.fused_head import FusedHead, with_fused_heads

# on a GPU they are tested by tests/test_gpu.py, as compiled kernels want their tensors there
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without GPU"
)


def with_double(head):
    double = HaltingHead(head.conv.in_channels, group=head.group)
    double.load_state_dict(head.state_dict())
    return double.double()


@pytest.mark.parametrize(
    "shape", [(2, 16, 5, 7), (1, 16, 1, 1), (3, 48, 8, 8), (1, 64, 9, 11), (5, 16, 1, 9), (2, 8, 6, 6)]
)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("tile", [256, 4096])
def test_logits_and_gradients_are_those_of_the_head(monkeypatch, shape, layout, tile):
    monkeypatch.setattr(module, "TILE", tile)
    head: Any = HaltingHead(shape[1])
    wide_head = with_double(head)
    head = with_fused_heads(head)
    u = torch.randn(shape).to(memory_format=layout).requires_grad_()
    wide = u.detach().double().requires_grad_()
    found, expected = head.by_kernels(u), wide_head(wide)
    dlogits = torch.randn(found.shape)
    ours = torch.autograd.grad(found, (u, *head.parameters()), dlogits)
    exact = torch.autograd.grad(expected, (wide, *wide_head.parameters()), dlogits.double())
    for one, two in zip((found, *ours), (expected, *exact), strict=True):
        assert (one.double() - two).norm() < 1e-5 * two.norm()


def test_patches_have_the_mean_of_their_logits():
    head: Any = HaltingHead(16, group=2)
    wide_head = with_double(head)
    head = with_fused_heads(head)
    u = split_patches(torch.randn(2, 16, 6, 4), 2)
    torch.testing.assert_close(head.by_kernels(u).double(), wide_head(u.double()), rtol=1e-4, atol=1e-4)


def test_half_precision_keeps_single_logits():
    head: Any = HaltingHead(16)
    wide_head = with_double(head)
    head = with_fused_heads(head)
    u = torch.randn(2, 16, 6, 6).half().requires_grad_()
    found = head.by_kernels(u)
    assert found.dtype == torch.float
    wide = u.detach().double().requires_grad_()
    expected = wide_head(wide)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)
    (one,), (two,) = torch.autograd.grad(found.sum(), u), torch.autograd.grad(expected.sum(), wide)
    torch.testing.assert_close(one.double(), two, rtol=1e-2, atol=1e-2)


def test_heads_of_other_kinds_stay_what_they_are():
    for settings, changed in (({}, True), ({"per": "image"}, False), ({"halting_norm": True}, False)):
        model = psact_resnet32(**settings)
        model = with_fused_heads(model)
        heads = [m for m in model.modules() if isinstance(m, HaltingHead)]
        assert {type(head) is FusedHead for head in heads} == {changed}


def test_a_gradient_lies_in_memory_as_its_parameter():
    """Or the optimizer would be given a copy, made by a kernel more for each."""
    u = torch.randn(2, 16, 6, 6).to(memory_format=torch.channels_last)
    heads: list[Any] = [HaltingHead(16), HaltingHead(16)]
    head, ours = (h.to(memory_format=torch.channels_last) for h in heads)
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    ours = with_fused_heads(ours)
    for parameters, logits in ((head.parameters(), compiled(u)), (ours.parameters(), ours.by_kernels(u))):
        known = list(parameters)
        for gradient, parameter in zip(torch.autograd.grad(logits.sum(), known), known, strict=True):
            assert gradient.stride() == parameter.stride()


def test_heads_of_several_networks_are_for_their_share_of_the_batch():
    u = torch.randn(6, 16, 5, 7).to(memory_format=torch.channels_last).requires_grad_()
    rows, bias = torch.randn(3, 10, 16, requires_grad=True), torch.randn(3, requires_grad=True)
    found = module.halting_logits(u, rows, bias)
    parts = zip(u.chunk(3), rows, bias, strict=True)
    expected = torch.cat([module.halting_logits(part, own, b.view(1)) for part, own, b in parts])
    torch.testing.assert_close(found, expected)
    dlogits = torch.randn(found.shape)
    ours = torch.autograd.grad(found, (u, rows, bias), dlogits)
    for one, two in zip(ours, torch.autograd.grad(expected, (u, rows, bias), dlogits), strict=True):
        torch.testing.assert_close(one, two)
