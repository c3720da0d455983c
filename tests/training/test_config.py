import json
import math

import pytest

import torchpact as tp
from tests.training.small import METHODS, config
from torchpact.models import ResNetConfig
from torchpact_recipes.training import PRESETS, SequenceTrainConfig, TrainConfig, preset, sequence_preset


@pytest.mark.parametrize("method", METHODS)
def test_a_configuration_survives_json(method):
    original = config(method, seed=3, validate_modes=None)
    assert TrainConfig.from_dict(json.loads(json.dumps(original.to_dict()))) == original


def test_tuples_survive_json_in_configurations_of_both_kinds():
    images = config("random", milestones=(0.5, 0.8), validate_modes=("discrete",))
    sequences = sequence_preset("parity", "tiny", milestones=(0.5, 0.8))
    for original in (images, sequences):
        found = type(original).from_dict(json.loads(json.dumps(original.to_dict())))
        assert found == original
        assert found.milestones == (0.5, 0.8)


def test_a_configuration_without_what_has_no_default_is_refused():
    values = sequence_preset("parity", "tiny").to_dict()
    del values["network"]
    with pytest.raises(TypeError, match="network"):
        SequenceTrainConfig.from_dict(values)


def test_the_paper_preset_is_the_supplements_protocol():
    paper = preset("paper", method="relaxed")
    assert (paper.iterations, paper.batch, paper.momentum, paper.weight_decay) == (100_000, 128, 0.9, 2e-4)
    assert (paper.temperature, paper.clip) == (2 / 3, 0.01)
    rates = [paper.learning_rate(i) for i in (0, 59_999, 60_000, 74_999, 75_000, 89_999, 90_000, 99_999)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3, 1e-4, 1e-4])


def test_the_fast_preset_has_the_same_shape_in_16000_iterations():
    fast = preset("fast", method="act")
    assert fast.iterations == 16_000
    rates = [fast.learning_rate(i) for i in (9599, 9600, 11_999, 12_000, 14_399, 14_400)]
    assert rates == pytest.approx([0.1, 0.01, 0.01, 1e-3, 1e-3, 1e-4])


def test_reinforce_gets_adam_and_every_method_its_mode():
    assert (preset("fast", method="reinforce").optimizer, preset("fast", method="reinforce").lr) == (
        "adam",
        1e-3,
    )
    assert preset("fast", method="reinforce").training_mode() == tp.Discrete()
    assert preset("fast", method="relaxed", temperature=0.5).training_mode() == tp.Relaxed(0.5)
    assert preset("fast", method="act").training_mode() == tp.ACT()
    assert preset("fast", method="plain").training_mode() is None


def test_presets_are_named():
    assert set(PRESETS) == {"paper", "fast", "strong", "smoke"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: config(tau=-0.1), r"expected tau in \[0, inf\), got -0.1"),
        (lambda: config(batch=0), "expected batch to be an integer of at least 1, got 0"),
        (lambda: config(iterations=0), "expected iterations to be an integer of at least 1"),
        (lambda: config(lr=0), r"expected lr in \(0, inf\), got 0"),
        (lambda: config(lr=math.nan), "expected lr in .* got nan"),
        (lambda: config(temperature=0), r"expected temperature in \(0, inf\), got 0"),
        (lambda: config(precision="fp8"), "expected precision to be one of fp32, bf16; got 'fp8'"),
        (lambda: config(seed=-1), "expected seed to be an integer of at least 0, got -1"),
        (lambda: config(milestones=(0.5, 1.5)), r"expected milestones in \[0, 1\], got 1.5"),
        (lambda: config(validate_modes=("soft",)), "expected modes among relaxed, .*; got 'soft'"),
        (lambda: config(network={"group": 5}), "expected a group that divides the maps .* got 5"),
        (lambda: TrainConfig(method="sarsa"), "expected method to be one of plain, .*; got 'sarsa'"),  # type: ignore[arg-type]
        (lambda: TrainConfig(method="plain"), "expected a plain network for the method plain"),
        (lambda: TrainConfig(network=ResNetConfig(adaptive=False)), "expected an adaptive network"),
        (lambda: TrainConfig(optimizer="lion"), "expected optimizer to be sgd or adam, got 'lion'"),  # type: ignore[arg-type]
        (lambda: preset("quick"), "expected a preset among paper, fast, strong, smoke; got 'quick'"),
        (lambda: TrainConfig.from_dict({"speed": 3}), "expected settings among .*; got speed"),
        (lambda: SequenceTrainConfig.from_dict({"speed": 3}), "expected settings among .*; got speed"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_cosine_falls_from_the_learning_rate_to_nothing():
    strong = preset("strong", method="relaxed")
    rates = [strong.learning_rate(i) for i in (0, 10_000, 20_000, 30_000, 40_000)]
    half = math.sqrt(0.5)
    assert rates == pytest.approx([0.1, 0.05 * (1 + half), 0.05, 0.05 * (1 - half), 0], abs=1e-9)


def test_the_price_of_a_step_rises_as_long_as_it_is_ramped():
    ramped = preset("fast", tau=0.02, tau_ramp=0.5)
    assert [ramped.price(i) for i in (0, 4000, 8000, 15_999)] == pytest.approx([0, 0.01, 0.02, 0.02])
    assert preset("fast", tau=0.02).price(0) == 0.02


@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_have_the_strong_recipe(method):
    settings = {"random_steps": (2.0, 2.0, 2.0)} if method == "random" else {}
    network = ResNetConfig(adaptive=method != "plain")
    strong = preset("strong", method=method, network=network, **settings)
    assert strong.nesterov == (method != "reinforce")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"schedule": "linear"}, "expected schedule to be steps or cosine, got 'linear'"),
        ({"tau_ramp": 1.5}, "expected tau_ramp .*1.5"),
        ({"label_smoothing": 1.0}, "expected label_smoothing .*1.0"),
        ({"pad": -1}, "expected pad .*-1"),
        ({"nesterov": True, "momentum": 0.0}, "expected sgd with momentum for nesterov"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_said_in_a_line(wrong, message):
    with pytest.raises(ValueError, match=message):
        preset("fast", **wrong)
