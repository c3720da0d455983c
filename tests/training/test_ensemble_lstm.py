"""Several LSTMs that read in few kernels: what they compute is what each computes alone, step by step."""

import pytest
import torch

import torchpact as tp
from tests.engines.elsewhere import compiled_elsewhere
from tests.training.test_sequence import config, network
from torchpact_recipes.training.ensemble import lstm as ensemble_lstm
from torchpact_recipes.training.ensemble.lstm_tape import HARD, Rule, rule_of
from torchpact_recipes.training.ensemble.text import can_read, read_single, read_text
from torchpact_recipes.training.sequence_loss import sequence_loss

NETWORKS, BATCH, TIME, HIDDEN = 2, 3, 3, 9
CASES = [
    ("plain", 1, 1), ("repeat", 3, 1), ("relaxed", 1, 1), ("relaxed", 3, 1), ("relaxed", 2, 2),
    ("act", 2, 1), ("act", 4, 1), ("act", 2, 2),
]  # fmt: skip
needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs run the kernels themselves")


def settings(method="relaxed", steps=3, layers=1, **others):
    small = {"cell": "lstm", "hidden": HIDDEN, "embedding": 6, "tau": 0.3, "halting_bias": 0.02}
    return config("enwik8", method, max_steps=steps, layers=layers, **(small | others))


@pytest.fixture
def known_noise(monkeypatch):
    """Noise that differs from example to example only."""

    def step_by_step(like, generator=None):
        return torch.linspace(-2, 2, len(like), dtype=like.dtype, device=like.device).view_as(like)

    def at_once(like, generator=None):
        rows = torch.linspace(-2, 2, like.size(3), dtype=like.dtype, device=like.device)
        return rows.expand_as(like).contiguous()

    monkeypatch.setattr("torchpact.core.modes.logistic_noise", step_by_step)
    monkeypatch.setattr(ensemble_lstm, "logistic_noise", at_once)


@pytest.fixture(params=["torch", pytest.param("kernels", marks=needs_interpreter)])
def exact(request, monkeypatch):
    """How exact it is to be, by either way; and in which precision."""
    if request.param == "torch":
        return torch.double, {}
    pytest.importorskip("triton", reason="needs Triton")
    from torchpact_recipes.training.ensemble import lstm_gpu_kernels as ensemble_lstm_gpu_kernels

    monkeypatch.setattr(ensemble_lstm, "_steps", lambda like: ensemble_lstm_gpu_kernels)
    return torch.float, {"rtol": 1e-4, "atol": 1e-5}


def problem(chosen, dtype):
    torch.manual_seed(5)
    models = [network(chosen).to(dtype) for _ in range(NETWORKS)]
    with torch.no_grad():  # so that decisions differ
        for model in models:
            for layer in model.rnn.layers:
                for parameter in layer.block.halting.parameters():
                    parameter.mul_(20)
    layers = chosen.network.layers
    states = [tuple(torch.randn(NETWORKS, BATCH, HIDDEN, dtype=dtype) for _ in "hc") for _ in range(layers)]
    return models, torch.randint(256, (BATCH, TIME)), states


def stacked(models):
    own = [dict(model.named_parameters()) for model in models]
    return {name: torch.stack([each[name].detach() for each in own]).requires_grad_() for name in own[0]}


def of_one(states, number):
    return [tuple(part[number] for part in state) for state in states]


@pytest.mark.parametrize(("method", "steps", "layers"), CASES)
def test_losses_states_and_gradients_are_those_of_each(known_noise, exact, method, steps, layers):
    dtype, tolerance = exact
    chosen = settings(method, steps, layers)
    models, symbols, states = problem(chosen, dtype)
    targets = torch.randint(256, (BATCH, TIME, 1))
    weights = stacked(models)
    logits, after, ponderings = read_text(models[0], weights, symbols, states)
    wanted = targets.transpose(0, 1).expand(NETWORKS, -1, -1, -1)
    losses = -logits.log_softmax(-1).gather(-1, wanted).mean((1, 2, 3))
    for pondering in ponderings:
        losses = losses + chosen.tau * pondering.cost.mean((1, 2))
    losses.sum().backward()
    for number, model in enumerate(models):
        outcome = sequence_loss(model, symbols, targets, chosen, states=of_one(states, number))
        outcome.loss.backward()
        torch.testing.assert_close(losses[number], outcome.loss, **tolerance)
        mean = torch.stack([each.expected_steps[number].mean() for each in ponderings]).double()
        torch.testing.assert_close(mean, outcome.report[3:], check_dtype=False, **tolerance)
        assert outcome.states is not None
        for found, expected in zip(of_one(after, number), outcome.states, strict=True):
            torch.testing.assert_close(found, expected, **tolerance)
        for name, parameter in model.named_parameters():
            gradient = weights[name].grad
            assert gradient is not None
            # of a single iteration nobody asks the head
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(gradient[number], own, **tolerance)


@pytest.mark.parametrize("mode", [tp.Relaxed(0.5), tp.ACT(0.2), tp.Discrete(), tp.Thresholded(0.4)], ids=repr)
def test_one_that_reads_without_gradients_answers_and_steps_as_ever(known_noise, exact, mode):
    dtype, tolerance = exact
    models, symbols, states = problem(settings(layers=2), dtype)
    model, own = models[1], of_one(states, 1)
    with torch.no_grad(), tp.use_mode(model, mode):
        logits, after, steps = read_single(model, symbols, own)
        expected, finals, ponders = model(symbols, own)
    torch.testing.assert_close(logits, expected.squeeze(2), **tolerance)
    torch.testing.assert_close(after, finals, **tolerance)
    assert torch.equal(steps, ponders[0].steps + ponders[1].steps)
    assert steps.unique().numel() > 1


def test_decisions_are_drawn_as_the_mode_draws_them():
    count, mode = 20_000, tp.Relaxed()
    x, state = torch.zeros(1, 1, count, 3), (torch.zeros(1, count, 4), torch.zeros(1, count, 4))
    shapes = {"input": (16, 3), "flag": (16,), "recurrent": (16, 4), "bias": (16,), "head": (4,)}
    nothing = {name: torch.zeros(1, *shape) for name, shape in shapes.items()}
    weights = ensemble_lstm.Weights(**nothing, head_bias=torch.tensor([0.8]))
    rule = rule_of(mode)
    assert rule is not None
    with torch.no_grad():
        left = ensemble_lstm.read_window(x, weights, state, 2, rule).remaining[0, 0, 1]
    _, expected = mode.halt(torch.ones(count), torch.full((count,), 0.8))
    assert left.mean().item() == pytest.approx(expected.mean().item(), abs=0.01)
    assert left.std().item() == pytest.approx(expected.std().item(), abs=0.01)


def test_what_cannot_be_read_is_told():
    assert can_read(network(settings()))
    assert can_read(network(settings("repeat")))
    assert not can_read(network(settings(cell="gru")))
    assert not can_read(network(settings()).bfloat16())
    assert not can_read(network(settings(dropout=0.5, layers=2)))
    assert can_read(network(settings(dropout=0.5, layers=2)).eval())
    assert not can_read(network(config("parity", "relaxed", cell="lstm")))


def test_modes_have_rules_and_hard_ones_no_gradients():
    assert rule_of(tp.Thresholded(0.5)) == Rule(HARD, 0.0)
    assert rule_of(tp.Discrete()) == Rule(HARD, 0.0, noisy=True)

    class Other(tp.Relaxed):
        pass

    assert rule_of(Other()) is None
    models, symbols, states = problem(settings(), torch.float)
    with tp.use_mode(models[0], "thresholded"), pytest.raises(ValueError, match="expected a soft mode"):
        read_text(models[0], stacked(models), symbols, states)


def test_kernels_compile_for_a_gpu(tmp_path):
    pytest.importorskip("triton", reason="needs Triton")
    found = compiled_elsewhere("tests.training.compile_ensemble_lstm", tmp_path)
    assert [name for name, *_ in found] == ["_forward"] * 4 + ["_backward"] * 3
