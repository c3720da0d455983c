"""What differs on a GPU: devices of small tensors, compiled and captured training."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.training.small import METHODS, burst, config, images
from tests.training.test_sequence_trainer import TEXTS, settings
from torchpact.models import SequenceNet, build
from torchpact_recipes.data import Images, standardize
from torchpact_recipes.training import (
    Learner,
    SequenceLearner,
    SequenceTrainer,
    Texts,
    evaluate_on_text,
    evaluate_sequences,
    load_sequence_model,
)
from torchpact_recipes.training.ensemble import sequences as sequence_joint
from torchpact_recipes.training.variance import gradient_variance

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
    data = on_gpu(images())
    # Adam makes large steps of small gradients, whatever their sign: rounding would show
    settings = config(method, deterministic=True, optimizer="sgd")
    plain = Learner(settings, data, "cuda", capture=False)
    captured = Learner(settings, data, "cuda", capture=True)
    for learner in (plain, captured):
        for _ in range(6):
            learner.advance()
    torch.cuda.synchronize()
    for name, value in plain.state().items():
        torch.testing.assert_close(captured.state()[name].to(value.dtype), value, rtol=1e-5, atol=1e-6)
    assert captured.metrics().loss == pytest.approx(plain.metrics().loss)


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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deterministic_runs_resume_to_the_same_bits(method, precision):
    data = on_gpu(images())
    settings = config(method, deterministic=True, precision=precision)
    straight = Learner(settings, data, "cuda")
    assert straight.capture
    assert not straight.compile
    for _ in range(5):
        straight.advance()
    torch.cuda.synchronize()
    saved = {name: value.clone() for name, value in straight.state().items()}
    continued = Learner(settings, data, "cuda")
    continued.load_state(saved, 5)
    for learner in (straight, continued):
        for _ in range(20):
            learner.advance()
    torch.cuda.synchronize()
    assert not torch.are_deterministic_algorithms_enabled()
    for name, value in straight.state().items():
        assert torch.equal(continued.state()[name], value), name


def halves(learner, read):
    """What is read after 60 iterations, and after 60 more."""
    found = []
    for _ in range(2):
        for _ in range(60):
            learner.advance()
        found.append(read())
    return found


@pytest.mark.parametrize("method", ["plain", "relaxed", "act"])
def test_joint_networks_learn_each_its_own(method):
    from torchpact_recipes.training.ensemble.images import ImageEnsemble

    data = on_gpu(images())
    settings = [config(method, iterations=200, batch=32, precision="bf16", seed=seed) for seed in range(3)]
    learners = [Learner(each, data, "cuda") for each in settings]
    together = ImageEnsemble(learners)
    if method == "plain":  # without noise, the loss is the sum of theirs
        batch, labels = data.images[:48], data.labels[:48]
        alone = [Learner(each, data, "cuda", compile=False) for each in settings]
        parts = zip(alone, batch.chunk(3), labels.chunk(3), strict=True)
        expected = sum(one.objective(part, truth)[0].item() for one, part, truth in parts)
        assert together.objective(batch, labels)[0].item() == pytest.approx(expected, rel=2e-2)
    counts = [learner.model.get_submodule("norm").get_buffer("num_batches_tracked") for learner in learners]
    before = [count.item() for count in counts]
    losses = halves(together, lambda: [one.metrics().nll for one in learners])
    assert all(after < first for first, after in zip(*losses, strict=True))
    assert len({round(loss, 6) for loss in losses[1]}) == 3
    assert [count.item() - first for count, first in zip(counts, before, strict=True)] == [120] * 3


def test_a_compiled_network_learns_from_a_teacher():
    data = on_gpu(images())
    teacher = Learner(config("plain", iterations=200, batch=32, precision="bf16"), data, "cuda")
    for _ in range(100):
        teacher.advance()
    teacher.wait()
    known = build(teacher.config.network)
    known.load_state_dict(teacher.model.state_dict())
    settings = config("relaxed", iterations=200, batch=32, precision="bf16", distill=1.0, tau=0.0)
    learner = Learner(settings, data, "cuda", teacher=known)
    first, second = halves(learner, lambda: learner.metrics().loss)
    assert second < first


def test_a_teacher_on_the_chip_says_what_its_layers_say():
    from torchpact_recipes.training.distillation import Teacher

    data, device = on_gpu(images()), torch.device("cuda")
    torch.manual_seed(0)
    model = build(config("plain").network).cuda()
    model(standardize(data.images))  # running statistics of its own
    teacher = Teacher(model, device, "bf16")
    if teacher.on_chip is None:
        pytest.skip("needs a compiler for kernels, as torchpact[cuda] brings")
    said, expected = teacher(data.images).float(), teacher.by_layers(data.images).float()
    assert (said - expected).norm() < 1e-2 * expected.norm()
    assert Teacher(model, device, "fp32").on_chip is None


@pytest.mark.parametrize("method", METHODS)
def test_a_compiled_network_learns(method):
    learner = Learner(config(method, iterations=200, batch=32, precision="bf16"), on_gpu(images()), "cuda")
    assert learner.compile
    assert learner.capture
    first, second = halves(learner, lambda: learner.metrics().nll)
    assert second < first


def test_narrow_convolutions_are_convolutions():
    from torchpact_recipes.training.kernels.narrow_conv import narrow_conv

    for shape in ((128, 16, 32, 32), (3, 16, 7, 5), (1, 32, 1, 1), (2, 64, 8, 8)):
        x = torch.randn(shape, device="cuda").bfloat16().requires_grad_()
        weight = (torch.randn(shape[1], shape[1], 3, 3, device="cuda") * 0.1).bfloat16().requires_grad_()
        y = narrow_conv(x, weight)
        dy = torch.randn_like(y)
        found = (y, *torch.autograd.grad(y, (x, weight), dy))
        wide_x, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
        expected = nn.functional.conv2d(wide_x, wide_weight, padding=1)
        exact = (expected, *torch.autograd.grad(expected, (wide_x, wide_weight), dy.double()))
        for one, two in zip(found, exact, strict=True):
            assert (one.double() - two).norm() < 5e-3 * two.norm()


def test_strided_convolutions_of_several_networks_are_convolutions():
    from torchpact_recipes.training.ensemble.conv import strided_conv

    for networks, shape, outputs in (
        (8, (64, 16, 32, 32), 32),
        (3, (3, 32, 7, 5), 64),
        (1, (2, 16, 1, 1), 16),
    ):
        x = torch.randn(shape, device="cuda").bfloat16().requires_grad_()
        weight = torch.randn(networks, outputs, shape[1], 3, 3, device="cuda").mul(0.1).bfloat16()
        weight.requires_grad_()
        y = strided_conv(x, weight)
        dy = torch.randn_like(y)
        wide_x, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
        parts = zip(wide_x.chunk(networks), wide_weight, strict=True)
        expected = torch.cat([nn.functional.conv2d(*part, stride=2, padding=1) for part in parts])
        exact = torch.autograd.grad(expected, (wide_x, wide_weight), dy.double())
        close((y, *torch.autograd.grad(y, (x, weight), dy)), (expected, *exact))


def close(found, exact):
    """Whether gradients are equal but for half precision."""
    assert len(found) == len(exact)
    for one, two in zip(found, exact, strict=True):
        assert (one.double() - two).norm() < 1e-2 * two.norm()


@pytest.mark.parametrize("shape", [(128, 16, 32, 32), (3, 48, 7, 5), (128, 64, 8, 8), (2, 16, 1, 1)])
def test_norms_of_one_kernel_are_batch_norms(shape):
    from torchpact_recipes.training.kernels.fused_bn_relu import with_fused_norms

    norms: list[Any] = [nn.BatchNorm2d(shape[1], eps=1e-3).cuda() for _ in range(2)]
    plain, ours = norms
    for tensor in (plain.weight, plain.bias):
        nn.init.uniform_(tensor, 0.5, 1.5)
    ours.load_state_dict(plain.state_dict())
    plain.double()
    ours = with_fused_norms(ours)
    for step in (ours.by_kernels, torch.compile(ours.by_kernels, fullgraph=True)):
        x = torch.randn(shape, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last)
        x, wide = x.requires_grad_(), x.detach().double().requires_grad_()
        y, expected = step(x), plain(wide).relu()
        dy = torch.randn_like(y)
        found = torch.autograd.grad(y, (x, *ours.parameters()), dy)
        exact = torch.autograd.grad(expected, (wide, *plain.parameters()), dy.double())
        close((y, *found, ours.running_var), (expected, *exact, plain.running_var))
        assert ours.ticket == 0


@pytest.mark.parametrize("shape", [(128, 16, 32, 32), (3, 48, 7, 5), (128, 64, 8, 8), (2, 16, 1, 1)])
def test_heads_of_one_kernel_are_heads(shape):
    from torchpact.nn.conv_units import HaltingHead
    from torchpact_recipes.training.kernels.fused_head import with_fused_heads

    heads: list[Any] = [HaltingHead(shape[1]).cuda() for _ in range(2)]
    plain, ours = (head.to(memory_format=torch.channels_last) for head in heads)
    ours.load_state_dict(plain.state_dict())
    plain.double()
    ours = with_fused_heads(ours)
    for step in (ours.by_kernels, torch.compile(ours.by_kernels, fullgraph=True)):
        u = torch.randn(shape, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last)
        u, wide = u.requires_grad_(), u.detach().double().requires_grad_()
        logits, expected = step(u), plain(wide)
        d = torch.randn_like(logits)
        found = torch.autograd.grad(logits, (u, *ours.parameters()), d)
        exact = torch.autograd.grad(expected, (wide, *plain.parameters()), d.double())
        close((logits, *found), (expected, *exact))
        for gradient, parameter in zip(found[1:], ours.parameters(), strict=True):
            assert gradient.stride() == parameter.stride()


@pytest.mark.parametrize(
    ("name", "method"),
    [("parity", "ponder"), ("parity", "reinforce"), ("addition", "act"), ("enwik8", "relaxed")],
)
def test_sequences_are_trained_continued_and_evaluated(tmp_path, name, method):
    chosen = settings(name, method)
    texts = Texts(TEXTS.train.cuda(), TEXTS.valid.cuda())
    first = SequenceTrainer(chosen, tmp_path, "cuda", texts)
    while first.learner.iteration < 8:
        burst(first)
    second = SequenceTrainer(chosen, tmp_path, "cuda", texts, resume=True)
    assert second.learner.iteration == 6
    results = second.run()
    model, _ = load_sequence_model(tmp_path / "last.safetensors")
    again = evaluate_sequences(model.cuda(), chosen, texts.valid)
    assert again.keys() == results.keys()
    mode = next(iter(again))
    assert again[mode]["nll"] == pytest.approx(results[mode]["nll"], rel=1e-4)


def test_trained_beside_others_each_is_as_if_alone():
    """Deterministic runs, so that any difference is one of noise."""
    data = on_gpu(images())

    def learners():
        return [Learner(config("relaxed", deterministic=True, seed=seed), data, "cuda") for seed in range(3)]

    together, alone = learners(), learners()
    for _ in range(20):
        for learner in together:
            learner.advance()
    for learner in alone:
        for _ in range(20):
            learner.advance()
        learner.wait()
    torch.cuda.synchronize()
    for one, other in zip(together, alone, strict=True):
        for name, value in one.state().items():
            assert torch.equal(value, other.state()[name]), name


def test_the_variance_of_gradients_of_a_compiled_network():
    data = on_gpu(images())
    compiled = Learner(config("relaxed", precision="bf16"), data, "cuda")
    plain = Learner(config("relaxed"), data, "cuda", compile=False, capture=False)
    found = []
    for learner in (compiled, plain):
        for _ in range(3):
            learner.advance()
        before = {name: value.clone() for name, value in learner.state().items()}
        found.append(gradient_variance(learner, 64))
        assert all(torch.equal(value, before[name]) for name, value in learner.state().items())
    for kind, value in found[0].items():
        assert value == pytest.approx(found[1][kind], rel=0.7), kind


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("parity", "reinforce"),
        ("parity", "ponder"),
        ("addition", "act"),
        ("enwik8", "repeat"),
        ("enwik8", "act"),
    ],
)
def test_a_captured_iteration_on_sequences_trains_as_a_plain_one(monkeypatch, name, method):
    monkeypatch.setattr(sequence_joint, "tf32_products", nullcontext)  # products with all digits
    chosen = settings(name, method, cell="lstm", hidden=16)
    plain, captured = (
        SequenceLearner(chosen, "cuda", TEXTS.train, capture=capture) for capture in (False, True)
    )
    for learner in (plain, captured):
        for _ in range(6):
            learner.advance()
        learner.wait()
    if method != "reinforce":  # the noise of a graph is another
        for one, other in zip(plain.model.parameters(), captured.model.parameters(), strict=True):
            # Adam divides by what may be little more than rounding
            torch.testing.assert_close(one, other, rtol=0.1, atol=5e-3)
        assert captured.metrics().loss == pytest.approx(plain.metrics().loss, rel=1e-2)
    assert captured.iteration == 6


def test_captured_noise_on_sequences_is_fresh_and_the_same_again():
    losses = []
    for _ in range(2):
        learner = SequenceLearner(settings("enwik8", "relaxed", lr=1e-9), "cuda", TEXTS.train)
        assert learner.capture
        run = []
        for _ in range(4):
            learner.iteration = 0  # the same window again, and so the same seed
            learner.advance()
            run.append(learner.metrics().loss)
        learner.iteration = 4
        learner.advance()
        losses.append([*run, learner.metrics().loss])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][:4] == pytest.approx([losses[0][0]] * 4, rel=1e-4)
    assert losses[0][4] != pytest.approx(losses[0][0], rel=1e-6)


@pytest.mark.parametrize("mode", ["act", "thresholded"])
def test_a_text_is_read_by_a_graph_as_without(mode):
    chosen = settings("enwik8", "act", cell="lstm", hidden=16)
    model = SequenceNet(chosen.network)
    text = torch.randint(97, 123, (2101,), dtype=torch.uint8)
    expected = evaluate_on_text(model, text, mode, batch=10, window=40)  # five windows, and a rest of ten
    found = evaluate_on_text(model.cuda(), text.cuda(), mode, batch=10, window=40)
    assert found.nll == pytest.approx(expected.nll, rel=1e-4)
    assert found.steps == pytest.approx(expected.steps, rel=1e-3)
    assert found.characters == expected.characters == 2100
