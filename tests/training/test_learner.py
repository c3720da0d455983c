import pytest
import torch

from tests.training.small import METHODS, config, images
from torchpact_recipes.data import augment, standardize
from torchpact_recipes.training import Learner
from torchpact_recipes.training.state import derived_seed
from torchpact_recipes.training.variance import gradients_of, undisturbed


def same(one, two):
    assert one.keys() == two.keys()
    return all(torch.equal(value, two[name]) for name, value in one.items())


def copy_state(learner):
    return {name: value.clone() for name, value in learner.state().items()}


@pytest.mark.parametrize("method", METHODS)
def test_overfits_64_images(method):
    lr = {"lr": 0.003} if method == "reinforce" else {"lr": 0.1}
    learner = Learner(config(method, iterations=200, batch=64, tau=0.001, **lr), images(count=64))
    found = 0.0
    while found <= 0.9 and learner.iteration < 200:
        for _ in range(20):
            learner.advance()
        found = learner.metrics().accuracy
    assert found > 0.9


@pytest.mark.parametrize("method", METHODS)
def test_continuing_from_a_saved_state_is_bit_identical(method):
    data = images()
    straight = Learner(config(method), data)
    for _ in range(5):
        straight.advance()
    saved = copy_state(straight)
    for _ in range(7):
        straight.advance()
    continued = Learner(config(method), data)
    continued.load_state(saved, iteration=5)
    for _ in range(7):
        continued.advance()
    assert same(straight.state(), continued.state())


def test_the_global_generator_does_not_matter():
    data, states = images(), []
    for disturbance in (0, 17):
        learner = Learner(config(), data)
        for _ in range(3):
            torch.manual_seed(disturbance)
            torch.rand(disturbance)
            learner.advance()
        states.append(copy_state(learner))
    assert same(*states)


def test_seeds_differ():
    data = images()
    one, two = (Learner(config(seed=seed), data) for seed in (0, 1))
    assert not torch.equal(one.model.stem.weight, two.model.stem.weight)
    assert not torch.equal(one.order.indices(0), two.order.indices(0))
    assert len({derived_seed(0, "iteration", i) for i in range(10_000)}) == 10_000


def test_one_iteration_of_plain_sgd_is_what_the_formulas_say():
    """Momentum from zero, weight decay on weights of convolutions and linear layers only."""
    learner = Learner(config("plain"), images())
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    index = learner.order.indices(0)
    torch.manual_seed(derived_seed(0, "iteration", 0))
    x = standardize(augment(learner.data.images[index]))
    logits, _ = learner.model(x)
    loss = torch.nn.functional.cross_entropy(logits, learner.data.labels[index])
    gradients = dict(zip(before, torch.autograd.grad(loss, list(learner.model.parameters())), strict=True))
    # the forward pass above has moved the running statistics; they do not enter training
    learner.advance()
    for name, parameter in learner.model.named_parameters():
        decay = 2e-4 if parameter.dim() > 1 else 0.0
        expected = before[name] - 0.1 * (gradients[name] + decay * before[name])
        torch.testing.assert_close(parameter.detach(), expected)


def test_heads_learn_at_a_rate_of_their_own():
    usual, slow, still = (
        Learner(config("relaxed", iterations=10, milestones=(0.2,), head_lr=times), images())
        for times in (1.0, 0.25, 0.0)
    )
    before = {name: p.detach().clone() for name, p in usual.model.named_parameters()}
    for learner in (usual, slow, still):
        learner.advance()
    for name, start in before.items():
        moved, less, none = (one.model.get_parameter(name) - start for one in (usual, slow, still))
        assert moved.any()
        times = 0.25 if "halting" in name else 1.0
        torch.testing.assert_close(less, times * moved, rtol=1e-3, atol=1e-7)
        assert "halting" not in name or not none.any()
    for _ in range(2):
        slow.advance()
    rates = {group["times"]: group["lr"] for group in slow.optimizer.param_groups}
    assert rates == pytest.approx({1.0: 0.01, 0.25: 0.0025})


def test_the_learning_rate_follows_the_schedule():
    learner = Learner(config("plain", iterations=10, milestones=(0.2, 0.5)), images())
    seen = []
    for _ in range(7):
        learner.advance()
        seen.append(learner.optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.01, 0.001, 0.001])


def test_the_learning_rate_is_right_after_continuing():
    settings = {"iterations": 10, "milestones": (0.2, 0.5)}
    first = Learner(config("plain", **settings), images())
    for _ in range(4):
        first.advance()
    second = Learner(config("plain", **settings), images())
    second.load_state(copy_state(first), iteration=4)
    second.advance()
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_metrics_are_means_since_the_last_reading():
    learner = Learner(config(), images())
    for _ in range(3):
        learner.advance()
    first = learner.metrics()
    assert first.iterations == 3
    assert len(first.expected_steps) == 3
    assert all(1 <= steps <= 2 for steps in first.expected_steps)
    assert first.loss == pytest.approx(first.nll + 0.05 * sum(first.expected_steps), rel=1e-5)
    learner.advance()
    assert learner.metrics().iterations == 1


def test_bf16_trains_and_keeps_weights_in_single_precision():
    learner = Learner(config(precision="bf16"), images())
    learner.advance()
    assert all(p.dtype == torch.float32 for p in learner.model.parameters())
    assert learner.metrics().loss > 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.pop("model.stem.weight"), "expected the tensors of this run, got 1 others or missing"),
        (lambda s: s.update(extra=torch.zeros(1)), "others or missing, as extra"),
        (
            lambda s: s.update({"model.stem.weight": torch.zeros(1)}),
            r"expected model.stem.weight as \(16, 3, 3, 3\)",
        ),
    ],
)
def test_a_state_of_another_run_is_refused_and_changes_nothing(damage, message):
    learner = Learner(config(), images())
    learner.advance()
    before, state = copy_state(learner), copy_state(learner)
    state["model.classifier.bias"] += 1
    damage(state)
    with pytest.raises(ValueError, match=message):
        learner.load_state(state, 1)
    assert same(before, learner.state())


def test_a_deterministic_run_leaves_the_settings_of_torch_alone():
    plain, deterministic = (Learner(config(deterministic=d), images()) for d in (False, True))
    for learner in (plain, deterministic):
        learner.advance()
    assert not torch.are_deterministic_algorithms_enabled()
    assert same(plain.state(), deterministic.state())
    with pytest.raises(ValueError, match="expected no compile in a deterministic run"):
        Learner(config(deterministic=True), images(), compile=True)


def test_a_ramped_price_and_a_cosine_continue_from_where_they_were():
    settings = config(tau=0.5, tau_ramp=0.5, schedule="cosine", nesterov=True, label_smoothing=0.1, pad=1)
    data = images()
    straight, continued = Learner(settings, data), Learner(settings, data)
    for _ in range(4):
        straight.advance()
    assert straight.tau.item() == pytest.approx(0.25)  # of iteration 3, of 6 to ramp over
    continued.load_state(copy_state(straight), iteration=4)
    for learner in (straight, continued):
        for _ in range(4):
            learner.advance()
    assert straight.tau.item() == 0.5
    assert straight.optimizer.param_groups[0]["lr"] == pytest.approx(settings.learning_rate(7))
    assert same(straight.state(), continued.state())


def test_warnings_instead_of_errors_stay_warnings():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        Learner(config(deterministic=True), images()).advance()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_fails_undisturbed_leaves_training_as_it_was():
    learner = Learner(config(), images())
    learner.advance()
    before = copy_state(learner)

    def fail():
        with undisturbed(learner):
            gradients_of(learner, *learner.batch())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert same(learner.state(), before)


def test_smoothed_labels_are_not_in_the_reported_nll():
    losses = []
    for smoothing in (0.0, 0.3):
        learner = Learner(config("plain", label_smoothing=smoothing), images())
        learner.advance()
        losses.append(learner.metrics())
    assert losses[0].nll == pytest.approx(losses[1].nll)
    assert losses[0].loss != pytest.approx(losses[1].loss)
