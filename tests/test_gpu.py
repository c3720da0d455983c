"""What differs on a GPU: devices of small tensors, compiled and captured training."""

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.training.small import METHODS, config, images
from torchpact.data import Images
from torchpact.training import Learner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("mode", ["relaxed", "discrete", "thresholded", "act"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_block_runs_on_the_gpu(mode, grad):
    units = [tp.Residual(nn.Conv2d(4, 4, 3, padding=1)) for _ in range(4)]
    block = tp.AdaptiveBlock(units, nn.Conv2d(4, 1, 3, padding=1), mode=mode).cuda()
    with torch.set_grad_enabled(grad):
        output, ponder = block(torch.randn(2, 4, 8, 8, device="cuda"))
    assert {t.device.type for t in (output, ponder.probs, ponder.steps, ponder.cost, ponder.active)} == {
        "cuda"
    }


def test_deterministic_modes_agree_with_the_cpu():
    block = tp.AdaptiveBlock([nn.Linear(3, 3) for _ in range(4)], nn.Linear(3, 1)).double()
    u = torch.randn(64, 3, dtype=torch.double)
    for mode in (tp.Thresholded(), tp.ACT()):
        expected, ponder = block.cpu()(u, mode=mode)
        output, on_gpu = block.cuda()(u.cuda(), mode=mode)
        torch.testing.assert_close(output.cpu(), expected)
        assert torch.equal(on_gpu.steps.cpu(), ponder.steps)


def test_reinforce_moves_its_baseline():
    q = tp.svo.BernoulliVector(3).cuda()
    result = tp.svo.maximize(lambda z: z.sum(-1), q, "reinforce", iterations=200, lr=0.1, seed=0)
    assert result.value == 3


def on_gpu(data):
    return Images(data.images.cuda(), data.labels.cuda())


@pytest.mark.parametrize("method", METHODS)
def test_a_captured_iteration_trains_as_a_plain_one(method):
    """Compiled noise is its own, so only networks without noise can be compared number by number."""
    data = on_gpu(images())
    plain = Learner(config(method), data, "cuda", compile=False, capture=False)
    captured = Learner(config(method), data, "cuda", compile=False, capture=True)
    for learner in (plain, captured):
        for _ in range(6):
            learner.advance()
    torch.cuda.synchronize()
    if method in ("plain", "act"):
        for name, value in plain.state().items():
            torch.testing.assert_close(captured.state()[name], value, rtol=1e-3, atol=1e-4)
    assert captured.metrics().loss == pytest.approx(plain.metrics().loss, rel=0.2)


def test_captured_noise_is_fresh_in_every_iteration_and_the_same_again():
    data = on_gpu(images())
    losses = []
    for _ in range(2):
        learner = Learner(config("relaxed", lr=1e-9), data, "cuda", capture=True, compile=False)
        run = []
        for _ in range(4):
            learner.advance()
            run.append(learner.metrics().loss)
        losses.append(run)
    assert len(set(losses[0])) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_continuing_from_a_saved_state_goes_on_as_if_nothing_had_happened():
    data = on_gpu(images())
    straight = Learner(config("act"), data, "cuda", compile=False)
    for _ in range(3):
        straight.advance()
    torch.cuda.synchronize()
    saved = {name: value.clone() for name, value in straight.state().items()}
    continued = Learner(config("act"), data, "cuda", compile=False)
    continued.load_state(saved, 3)
    for learner in (straight, continued):
        for _ in range(3):
            learner.advance()
    torch.cuda.synchronize()
    for name, value in straight.state().items():
        torch.testing.assert_close(continued.state()[name], value, rtol=1e-3, atol=1e-4)
