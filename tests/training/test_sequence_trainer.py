import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.training.small import burst
from tests.training.test_sequence import METHODS, config
from tests.training.test_trainer import assert_same, tensors
from torchpact.models import SequenceNet
from torchpact_recipes.data import load_sample_text
from torchpact_recipes.training import (
    CheckpointError,
    SequenceLearner,
    SequenceTrainConfig,
    SequenceTrainer,
    Texts,
    TrainingError,
    evaluate_sequences,
    load_model,
    load_sequence_model,
    sequence_preset,
    train_together,
)
from torchpact_recipes.training.sequence_config import make_task
from torchpact_recipes.training.sequence_presets import PRESETS

# four windows of eight for each of eight streams
TEXTS = Texts(load_sample_text("train")[:257], load_sample_text("valid")[:300])
RHYTHM = {"iterations": 12, "batch": 8, "log_every": 4, "validate_every": 6, "checkpoint_every": 3}


def settings(name="parity", method="relaxed", **others):
    if name == "enwik8":
        others = {"embedding": 4, "window": 8, "examples": 250} | others
    return config(name, method, **({"examples": 200} | RHYTHM | others))


def trainer(folder, chosen=None, **options):
    return SequenceTrainer(chosen or settings(), folder, texts=TEXTS, **options)


@pytest.mark.parametrize(
    ("name", "method"),
    [*(("parity", method) for method in METHODS), ("addition", "relaxed"), ("enwik8", "act")],
)
def test_a_run_leaves_its_files(tmp_path, name, method):
    chosen = settings(name, method)
    results = trainer(tmp_path, chosen).run()
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["results"] == results
    assert SequenceTrainConfig.from_dict(record["config"]) == chosen
    events = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [(e["kind"], e["iteration"]) for e in events] == [
        ("train", 4),
        ("validate", 6),
        ("train", 8),
        ("train", 12),
        ("validate", 12),
    ]
    model, stored = load_sequence_model(tmp_path / "last.safetensors")
    assert stored == chosen
    assert not model.training
    assert evaluate_sequences(model, chosen, TEXTS.valid) == results
    with pytest.raises(CheckpointError, match="holds no network of ours"):
        load_model(tmp_path / "last.safetensors")


@pytest.mark.parametrize(
    ("name", "method"), [("parity", "reinforce"), ("sort", "relaxed"), ("enwik8", "relaxed")]
)
def test_resuming_gives_the_same_weights(tmp_path, name, method):
    # of enwik8 there are four windows: the run is cut within the second pass over them
    chosen = settings(name, method)
    trainer(tmp_path / "straight", chosen).run()
    first = trainer(tmp_path / "broken", chosen)
    while first.learner.iteration < 8:
        burst(first)
    second = trainer(tmp_path / "broken", chosen, resume=True)
    assert second.learner.iteration == 6
    torch.manual_seed(99)
    second.run()
    assert_same(tensors(tmp_path / "straight"), tensors(tmp_path / "broken"))
    assert_same(tensors(tmp_path / "straight", "best"), tensors(tmp_path / "broken", "best"))


def test_goes_on_with_the_same_text_only(tmp_path):
    chosen = settings("enwik8", "plain")
    first = trainer(tmp_path, chosen)
    while first.learner.iteration < 8:
        burst(first)
    others = Texts(TEXTS.train.flip(0), TEXTS.valid)
    with pytest.raises(TrainingError, match="the data set that it began with, 257 characters"):
        SequenceTrainer(chosen, tmp_path, texts=others, resume=True)
    assert trainer(tmp_path, chosen, resume=True).learner.iteration == 6


def test_a_text_is_read_on_from_window_to_window_and_anew_at_its_end():
    learner = SequenceLearner(settings("enwik8", "repeat"), text=TEXTS.train)
    assert learner.streams is not None
    assert len(learner.streams) == 4
    seen = []
    forward = learner.model.forward

    def spy(input, states=None, **options):
        seen.append([state.clone() for state in states])
        return forward(input, states, **options)

    learner.model.forward = spy  # type: ignore[method-assign]
    after = []
    for _ in range(6):
        learner.advance()
        after.append([state.clone() for state in learner.states if isinstance(state, torch.Tensor)])
    starts = [all((state == 0).all() for state in states) for states in seen]
    assert starts == [True, False, False, False, True, False]
    assert all(torch.equal(a, b) for a, b in zip(after[0], seen[1], strict=True))
    assert all(state.grad_fn is None for states in after for state in states)


def test_trained_together_each_is_as_if_alone(tmp_path):
    all_settings = [settings(), settings("logic", "act", seed=1)]
    for number, each in enumerate(all_settings):
        trainer(tmp_path / f"alone{number}", each).run()
    train_together([trainer(tmp_path / f"together{n}", each) for n, each in enumerate(all_settings)])
    for number in range(2):
        assert_same(tensors(tmp_path / f"alone{number}"), tensors(tmp_path / f"together{number}"))


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    run = trainer(tmp_path)
    burst(run)
    with torch.no_grad():
        run.learner.model.readout.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="loss is nan at iteration 4; the last good checkpoint is"):
        run.run()
    assert trainer(tmp_path, resume=True).learner.iteration == 3


def test_another_configuration_cannot_resume(tmp_path):
    trainer(tmp_path).run()
    with pytest.raises(TrainingError, match="its run is of another configuration"):
        trainer(tmp_path, settings(tau=0.7), resume=True)


def test_transfer_is_validated_and_never_trained_on(tmp_path):
    plain, transferring = settings(high=3), settings(high=3, transfer={"size": 8, "low": 4})
    one, two = trainer(tmp_path / "one", plain), trainer(tmp_path / "two", transferring)
    results = [run.run() for run in (one, two)]
    assert_same(one.learner.state(), two.learner.state())
    far = results[1]["relaxed"].pop("transfer")
    assert results[0]["relaxed"] == results[1]["relaxed"]
    assert list(far["steps_by_difficulty"]) == ["4", "5", "6", "7", "8"]


def test_the_learning_rate_falls_at_milestones():
    learner = SequenceLearner(settings(lr=0.1, milestones=(0.5,)))
    seen = []
    for _ in range(8):
        learner.advance()
        seen.append(learner.optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx([0.1] * 6 + [0.01] * 2)


def test_steps_cost_nothing_while_they_are_free():
    chosen = settings(method="act", tau=0.5, free=0.5)
    assert [chosen.price(iteration) for iteration in (0, 5, 6, 11)] == [0.0, 0.0, 0.5, 0.5]
    learner = SequenceLearner(chosen)
    differences = []
    for _ in range(8):
        learner.advance()
        metrics = learner.metrics()
        differences.append(metrics.loss - metrics.nll)
    assert differences[:6] == pytest.approx([0.0] * 6, abs=1e-6)
    # ACT's cost is at least one step and what remained
    assert all(difference > 0.5 for difference in differences[6:])


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("size", ["tiny", "small", "paper"])
def test_every_preset_makes_a_network_of_every_method(name, size):
    for method in METHODS if name == "parity" else METHODS[:-1]:
        chosen = sequence_preset(name, size, method=method)
        assert SequenceTrainConfig.from_dict(json.loads(json.dumps(chosen.to_dict()))) == chosen


@pytest.mark.parametrize(
    ("name", "cell", "hidden", "features", "outputs", "classes"),
    [
        ("parity", nn.RNNCell, 128, 64, 1, 2),
        ("logic", nn.LSTMCell, 128, 2 + 10 * 10, 1, 2),
        ("addition", nn.LSTMCell, 512, 5 * 10, 6, 11),
        ("sort", nn.LSTMCell, 512, 2, 1, 15),
        ("enwik8", nn.LSTMCell, 1500, 256, 1, 256),
    ],
)
def test_presets_of_the_paper_are_in_the_sizes_of_graves(name, cell, hidden, features, outputs, classes):
    chosen = sequence_preset(name, "paper", method="act", batch=2)
    model = SequenceNet(chosen.network, chosen.training_mode())
    (layer,) = model.rnn.layers
    assert isinstance(layer.cell, cell)
    assert layer.hidden_size == hidden
    assert model.config.features == features
    if name == "enwik8":
        inputs = torch.zeros(2, 3, dtype=torch.long)
    else:
        inputs = make_task(name, chosen.sizes).sample(2).inputs
    with torch.no_grad():
        logits, _, ponders = model(inputs)
    assert logits.shape == (2, inputs.size(1), outputs, classes)
    assert ponders[0].steps.max() <= chosen.network.max_steps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "guess"}, "expected method to be one of plain, repeat"),
        ({"lr": 0}, r"expected lr in \(0, inf\), got 0"),
        ({"task": "chess"}, "expected task to be one of parity"),
        (
            {"sizes": {"size": 9}},
            "expected a network with features=9 for parity by the method relaxed, got 8",
        ),
        ({"sizes": {"width": 9}}, "expected sizes of parity among size, low, high; got width"),
        ({"method": "plain"}, "expected a network with adaptive=False"),
        ({"transfer": {"size": 9}}, "expected to transfer to a task of the same inputs"),
        ({"iterations": 0}, "expected iterations to be an integer of at least 1"),
    ],
)
def test_wrong_settings_are_told_in_one_line(change, message):
    with pytest.raises(ValueError, match=message):
        replace(settings(), **change)


def test_methods_and_data_that_do_not_fit_are_told():
    with pytest.raises(
        ValueError, match=r"expected a task of one time step .* for the method ponder, got sort"
    ):
        settings("sort", "ponder")
    with pytest.raises(ValueError, match="expected a text to learn enwik8 from, got none"):
        SequenceLearner(settings("enwik8"))
    with pytest.raises(ValueError, match="expected no sizes of enwik8, got size"):
        settings("enwik8", size=3)
    with pytest.raises(ValueError, match="expected a preset among tiny, small, paper; got 'huge'"):
        sequence_preset("sort", "huge")
