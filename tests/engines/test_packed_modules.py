"""Linear layers outside of the runs of a deployed network: as the layers themselves, with packed weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchpact.engines.attention import outside
from torchpact.engines.attention.norms import fused_norm
from torchpact.engines.attention.outside import PackedModules


@pytest.fixture(autouse=True)
def packs_everywhere(monkeypatch):
    monkeypatch.setattr(outside, "packing_pays", lambda _: True)


@settings(max_examples=30, deadline=None)
@given(
    leading=st.lists(st.integers(1, 5), min_size=0, max_size=3),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@torch.no_grad()
def test_linear_layers_give_what_they_gave(leading, sizes, bias, dtype):
    inputs, outputs = sizes
    net = nn.Sequential(nn.Linear(inputs, outputs, bias=bias)).to(dtype)
    x = torch.randn(*leading, sizes[0]).to(dtype)
    expected, modules = net(x), PackedModules(net, ())
    modules.install()
    found = net(x)
    assert modules.names == ("0",)
    assert "forward" in vars(net[0])
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-5 if dtype == torch.float32 else 0.1, rtol=2e-2)
    modules.remove()
    assert torch.equal(net(x), expected)


@settings(max_examples=30, deadline=None)
@given(
    patch=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    maps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    surplus=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    channels=st.integers(1, 3),
)
@torch.no_grad()
def test_convolutions_of_patches_give_what_they_gave(patch, maps, surplus, channels):
    net = nn.Sequential(nn.Conv2d(channels, 5, patch, stride=patch))
    sizes = (m * p + min(s, p - 1) for m, p, s in zip(maps, patch, surplus, strict=True))
    x = torch.randn(2, channels, *sizes)
    expected, modules = net(x), PackedModules(net, ())
    modules.install()
    assert modules.names == ("0",)
    found = net(x)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-5)
    assert found.flatten(2).transpose(1, 2).is_contiguous()  # as transformers take it


@torch.no_grad()
def test_what_is_no_plain_linear_layer_is_left_alone():
    changed = nn.Linear(4, 4)
    changed.__dict__["forward"] = torch.tanh
    others = [
        nn.Conv2d(3, 4, 3, stride=2),
        nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.Conv2d(3, 4, 2, stride=2, padding=1),
        nn.Conv2d(3, 4, 2, stride=2, dilation=2),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        changed,
        nn.Embedding(3, 4),
    ]
    inside = nn.Sequential(nn.Linear(4, 4))
    assert PackedModules(nn.ModuleList([*others, inside]), [inside]).names == ()


@torch.no_grad()
def test_other_precisions_and_empty_batches_go_to_the_layer():
    net = nn.Sequential(nn.Linear(4, 3))
    PackedModules(net, ()).install()
    assert net(torch.zeros(0, 4)).shape == (0, 3)
    with pytest.raises(RuntimeError):
        net(torch.zeros(2, 4, dtype=torch.bfloat16))


class Shifted(nn.Module):
    """A norm that looks like RMSNorm, and multiplies by 1 + weight."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(size)), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(2, 64),
    kind=st.sampled_from([nn.LayerNorm, nn.RMSNorm]),
    eps=st.sampled_from([1e-12, 1e-6, 1e-3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@torch.no_grad()
def test_norms_are_known_by_their_values(size, kind, eps, dtype):
    norm = kind(size, eps=eps)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    norm, found = norm.to(dtype), fused_norm(norm.to(dtype))
    assert found is not None
    assert found.kind == ("layer" if kind is nn.LayerNorm else "rms")
    x = torch.randn(3, size).to(dtype)
    assert torch.allclose(found(x), norm(x), atol=1e-5 if dtype == torch.float32 else 0.05)


def test_norms_of_another_formula_are_not():
    assert fused_norm(Shifted(8)) is None
    assert fused_norm(nn.BatchNorm1d(8).eval()) is None
    assert fused_norm(nn.LayerNorm(8, elementwise_affine=False)) is None
