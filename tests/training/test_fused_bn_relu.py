"""The kernels run in Triton's interpreter here; tests/test_gpu.py has them on a GPU."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton", reason="needs Triton")

from torchpact.models import psact_resnet32
from torchpact_recipes.training.kernels import fused_bn_relu as module
from torchpact_recipes.training.kernels.fused_bn_relu import FusedBatchNormReLU, fits, with_fused_norms

# on a GPU they are tested by tests/test_gpu.py, as compiled kernels want their tensors there
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without GPU"
)


def relative(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


def pair(channels, dtype=torch.float):
    """A batch norm in mid-training, and its double in kernels."""
    plain: Any = nn.BatchNorm2d(channels, eps=1e-3, momentum=0.1).to(dtype)
    for tensor in (plain.weight, plain.bias, plain.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(plain.running_var, 0.5, 2)
    ours = nn.BatchNorm2d(channels, eps=1e-3, momentum=0.1)
    ours.load_state_dict(plain.state_dict())
    ours = with_fused_norms(ours)
    return plain, ours


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((2, 16, 5, 7), 256),
        ((1, 16, 1, 5), 64),
        ((3, 48, 6, 5), 512),
        ((1, 64, 9, 7), 1024),
        ((2, 16, 9, 9), 8192),
    ],
)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_output_gradients_and_statistics_are_those_of_batch_norm(monkeypatch, shape, layout, tile):
    monkeypatch.setattr(module, "TILE", tile)
    monkeypatch.setattr(module, "PROGRAMS", 5)
    plain, ours = pair(shape[1], torch.double)
    x = (3 + 2 * torch.randn(shape)).to(memory_format=layout).requires_grad_()
    dy = torch.randn(shape)
    for turn in range(2):  # tickets are back for the second
        wide = x.detach().double().requires_grad_()
        expected = F.relu(plain(wide))
        y = ours.by_kernels(x)
        found = torch.autograd.grad(y, (x, ours.weight, ours.bias), dy)
        exact = torch.autograd.grad(expected, (wide, plain.weight, plain.bias), dy.double())
        for one, two in zip((y, *found), (expected, *exact), strict=True):
            assert relative(one, two) < 1e-5
        assert ours.ticket == 0
        assert ours.num_batches_tracked == turn + 1
        for name in ("running_mean", "running_var"):
            assert relative(getattr(ours, name), getattr(plain, name)) < 1e-5


@pytest.mark.parametrize(("mean", "deviation"), [(1000.0, 1.0), (300.0, 0.1)])
def test_a_mean_far_from_zero_costs_no_digits(mean, deviation):
    plain, ours = pair(16, torch.double)
    x = mean + deviation * torch.randn(4, 16, 8, 8)
    y, expected = ours.by_kernels(x), F.relu(plain(x.double()))
    # what single precision leaves of x itself
    assert relative(y, expected) < 3e-7 * mean / deviation


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, which runs on numpy
def test_after_an_infinity_it_recovers():
    _, ours = pair(16)
    x = torch.randn(2, 16, 4, 4)
    bad = x.clone()
    bad[0, 3] = torch.inf
    ours.by_kernels(bad)
    assert ours.by_kernels(x).isfinite().all()


def test_only_norms_that_fit_are_taken():
    assert fits(nn.BatchNorm2d(4))
    for other in (
        nn.BatchNorm2d(4, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.BatchNorm2d(4, momentum=None),
        nn.BatchNorm2d(4).double(),
        nn.BatchNorm1d(4),
    ):
        assert not fits(other)


def test_half_precision():
    plain, ours = pair(16)
    x = torch.randn(2, 16, 9, 9).half().requires_grad_()
    y, expected = ours.by_kernels(x), F.relu(plain(x.float()))
    assert y.dtype == torch.half
    torch.testing.assert_close(y.float(), expected, rtol=2e-3, atol=2e-3)
    dy = torch.randn_like(y)
    (found,), (exact,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy.float())
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=1e-2)


def test_a_network_stays_what_it_is():
    model, plain = psact_resnet32(mode="thresholded"), psact_resnet32(mode="thresholded")
    model = with_fused_norms(model)
    assert all(type(m) is FusedBatchNormReLU for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    model.load_state_dict(plain.state_dict())
    assert model.state_dict().keys() == plain.state_dict().keys()
    images = torch.randn(2, 3, 32, 32)
    for net in (model, plain):
        net.train()
    torch.testing.assert_close(model(images)[0], plain(images)[0])
    for net in (model, plain):
        net.eval()
    torch.testing.assert_close(model(images)[0], plain(images)[0])


def test_compiled_it_is_one_graph_and_learns_the_same():
    """The kernels themselves cannot be compiled here: the ops around them can."""
    plain, ours = pair(16)
    x = torch.randn(2, 16, 4, 4, requires_grad=True)
    step = torch.compile(ours.by_kernels, fullgraph=True, backend="aot_eager")
    y, expected = step(x), F.relu(plain(x))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    dy = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, (x, ours.weight), dy),
        torch.autograd.grad(expected, (x, plain.weight), dy),
        rtol=1e-3,
        atol=1e-3,
    )
    torch.testing.assert_close(ours.running_var, plain.running_var)


def test_norms_of_several_networks_are_for_their_share_of_the_batch(monkeypatch):
    monkeypatch.setattr(module, "TILE", 256)
    monkeypatch.setattr(module, "PROGRAMS", 3)
    pairs = [pair(16, torch.double) for _ in range(3)]
    x = (torch.randn(6, 16, 5, 7) * 2 + 1).to(memory_format=torch.channels_last).requires_grad_()
    together: Any = pair(16)[1]
    for name in ("weight", "bias", "running_mean", "running_var"):
        rows = torch.stack([getattr(ours, name).detach() for _, ours in pairs])
        if name in ("weight", "bias"):
            setattr(together, name, nn.Parameter(rows))
        else:
            together.register_buffer(name, rows)
    together.register_buffer("ticket", torch.zeros(3, dtype=torch.int32))
    dy = torch.randn(x.shape)
    for _ in range(2):
        wide = x.detach().double().requires_grad_()
        parts = zip(wide.chunk(3), pairs, strict=True)
        expected = torch.cat([F.relu(plain(part)) for part, (plain, _) in parts])
        y = together.by_kernels(x)
        found = torch.autograd.grad(y, (x, together.weight, together.bias), dy)
        known = [p for name in ("weight", "bias") for plain, _ in pairs for p in [getattr(plain, name)]]
        exact = torch.autograd.grad(expected, (wide, *known), dy.double())
        stacked = (exact[0], torch.stack(exact[1:4]), torch.stack(exact[4:]))
        for one, two in zip((y, *found), (expected, *stacked), strict=True):
            assert relative(one, two) < 1e-5
        for name in ("running_mean", "running_var"):
            rows = torch.stack([getattr(plain, name) for plain, _ in pairs])
            assert relative(getattr(together, name), rows) < 1e-5
