"""The paper's claim on memory: decisions that are one-hot need no running sum of outputs."""

from functools import partial

import pytest
import torch

import torchpact as tp
from tests.engines.networks import lively
from torchpact.models import ResNetConfig, build
from torchpact_recipes.bench.memory import peak_memory
from torchpact_recipes.data import Images, as_input
from torchpact_recipes.training.evaluate import evaluate


def peak(model, images):
    with torch.no_grad():
        return peak_memory(lambda: model(images))


@pytest.fixture(scope="module", params=[(5, torch.float32), (18, torch.float32), (18, torch.bfloat16)])
def measured(request):
    units, dtype = request.param
    images = torch.randn(4, 3, 32, 32).to(dtype)
    plain = build(ResNetConfig(units=units, adaptive=False)).eval().to(dtype)
    model = lively(units=units).to(dtype)
    peaks = {"plain": peak(plain, images)}
    for mode in ("thresholded", "act"):
        with tp.use_mode(model, mode, details=False):
            peaks[mode] = peak(model, images)
    if dtype == torch.bfloat16:  # in which the kernel does not compute
        return peaks
    fast = tp.deploy(model, images, mode="thresholded", engines=["native"])
    if fast.report.measurements[0].engine == "native":
        peaks["native"] = peak(fast, images)
    return peaks


def test_thresholded_takes_as_much_as_a_plain_network_and_act_more(measured):
    assert measured["thresholded"] <= 1.05 * measured["plain"]
    assert measured["act"] > 1.2 * measured["plain"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_thresholded_takes_as_much_as_a_plain_network_on_a_gpu(dtype, layout):
    images = torch.randn(64, 3, 32, 32, dtype=dtype).cuda().contiguous(memory_format=layout)
    plain = build(ResNetConfig(units=5, adaptive=False)).eval().to("cuda", dtype)
    model = lively(units=5).to("cuda", dtype)
    with torch.no_grad(), tp.use_mode(model, "thresholded", details=False):
        ours, theirs = (peak_memory(partial(net, images), "cuda") for net in (model, plain))
    assert ours <= 1.05 * theirs


def test_deployed_takes_less(measured):
    if "native" not in measured:
        pytest.skip("needs a C++ compiler, and single precision")
    assert measured["native"] < measured["plain"]


def test_without_details_only_decisions_are_kept():
    model = lively()
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad(), tp.use_mode(model, "thresholded"):
        expected, reference = model(images)
        with tp.use_mode(model, "thresholded", details=False):
            logits, ponders = model(images)
    assert model.blocks[0].details
    assert torch.equal(logits, expected)
    for ponder, full in zip(ponders, reference, strict=True):
        assert torch.equal(ponder.steps, full.steps)
        assert torch.equal(ponder.cost, full.cost)
        assert torch.equal(ponder.active, full.active)
        assert ponder.probs.shape == full.probs.shape
        assert ponder.probs.isnan().all()
        assert ponder.probs.untyped_storage().nbytes() == 4


def test_evaluation_without_details_finds_what_a_full_run_does():
    model = lively()
    data = Images(torch.randint(256, (5, 3, 16, 16), dtype=torch.uint8), torch.arange(5))
    found = evaluate(model, data, "thresholded", batch=3)
    with torch.no_grad(), tp.use_mode(model, "thresholded"):
        _, ponders = model(as_input(data.images))
        flops = tp.count_flops(model, as_input(data.images))
    assert found.steps == pytest.approx([float(p.steps.double().mean()) for p in ponders])
    assert found.cost == pytest.approx([float(p.cost.double().mean()) for p in ponders])
    assert found.flops == pytest.approx(float(flops.mean))
    assert model.blocks[0].details


@pytest.mark.parametrize("mode", ["relaxed", "act", "discrete"])
def test_modes_that_need_probabilities_keep_them(mode):
    model = lively(mode=mode)
    tp.use_mode(model, mode, details=False)
    with torch.no_grad():
        _, ponders = model(torch.randn(2, 3, 16, 16))
    assert not any(ponder.probs.isnan().any() for ponder in ponders)


def test_learning_keeps_them_too():
    model = lively()
    tp.use_mode(model, "thresholded", details=False)
    _, ponders = model(torch.randn(2, 3, 16, 16))
    assert all(ponder.expected_steps.requires_grad for ponder in ponders)


def test_a_peak_is_that_of_tensors_alive_at_once():
    x = torch.zeros(256)

    def work():
        for _ in range(5):
            y = x + 1
            del y
        first, second = x * 2, x * 3
        return first.add_(second).view(2, 128)

    assert peak_memory(work) == 2 * 1024


def test_more_steps_than_a_byte_counts():
    block = tp.AdaptiveBlock(torch.nn.Identity(), lambda u: u[:, :1] - 1e4, max_steps=300, mode="thresholded")
    with torch.no_grad():
        _, ponder = block(torch.zeros(2, 3))
    assert ponder.steps.eq(300).all()
