import math

import pytest
import torch

import torchpact as tp
from torchpact.models import SequenceNet
from torchpact.nn.sequence import sequence_nll
from torchpact_recipes.data import Parity, TaskBatch, task
from torchpact_recipes.training import SequenceLearner, evaluate_on_task, evaluate_on_text, sequence_preset
from torchpact_recipes.training.sequence_loss import lengths_of, sequence_loss
from torchpact_recipes.training.text import Streams

METHODS = ["plain", "repeat", "act", "relaxed", "reinforce", "ponder"]


def config(name="parity", method="relaxed", **settings):
    small = {"hidden": 8, "max_steps": 3, "cell": "gru"}
    return sequence_preset(name, "tiny", method=method, **(small | settings))


def network(settings):
    return SequenceNet(settings.network, settings.training_mode())


def loss_of(model, batch, settings, **options):
    return sequence_loss(
        model, batch.inputs, batch.targets, settings, lengths=lengths_of(batch), **options
    ).loss


@pytest.mark.parametrize("name", ["parity", "logic", "addition", "sort"])
@pytest.mark.parametrize("method", METHODS[:-1])
def test_every_method_answers_every_task_and_all_parameters_learn(name, method):
    problem = task(name, "tiny")
    settings = config(name, method, layers=2, embedding=5)
    model, batch = network(settings), problem.sample(20)
    logits, states, ponders = model(batch.inputs, lengths=batch.lengths)
    assert logits.shape == (*batch.targets.shape, problem.classes)
    assert len(states) == len(ponders) == 2
    most = 1 if method == "plain" else 3
    if method in ("plain", "repeat"):
        assert (ponders[0].steps == most * (batch.difficulty > 0)).all()
    loss_of(model, batch, settings, baseline=tp.EMABaseline()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_objective_of_a_padded_batch_is_in_proportion_that_of_its_sequences_alone():
    settings = config("addition", "act", max_steps=4, tau=0.3)
    model = network(settings)
    batch = task("addition", "tiny").sample(6, torch.Generator().manual_seed(3))
    whole = loss_of(model, batch, settings)
    total = 0.0
    for i, length in enumerate(batch.lengths.tolist()):
        fields = (batch.inputs, batch.targets, batch.difficulty)
        inputs, targets, difficulty = (field[i : i + 1, :length] for field in fields)
        alone = TaskBatch(inputs, targets, batch.lengths[i : i + 1], difficulty)
        total += loss_of(model, alone, settings).item() * length
    assert batch.lengths.unique().numel() > 1
    assert whole.item() == pytest.approx(total / (6 * batch.inputs.size(1)), rel=1e-5)


def test_what_is_reported_leaves_padding_out():
    settings = config("addition", "repeat")
    model, batch = network(settings), task("addition", "tiny").sample(50)
    outcome = sequence_loss(model, batch.inputs, batch.targets, settings, lengths=batch.lengths)
    logits, _, _ = model(batch.inputs, lengths=batch.lengths)
    asked = batch.targets != -100
    right = (logits.argmax(-1) == batch.targets)[asked].double().mean()
    assert outcome.report[2].item() == pytest.approx(right.item(), rel=1e-6)
    assert outcome.report[3].item() == pytest.approx(3.0)


def test_ponder_loss_of_a_network_is_its_discrete_expectation():
    """With beta 0, the expected nll: what many samples of the discrete mode have in the mean."""
    torch.manual_seed(0)
    settings = config(method="ponder", max_steps=4, halting_bias=-0.5, beta=0.0)
    model, batch = network(settings), Parity(8).sample(1)
    outcome = sequence_loss(model, batch.inputs, batch.targets, settings)
    with torch.no_grad():
        logits, _, ponders = model(batch.inputs.expand(20_000, -1, -1))
        nll = sequence_nll(logits, batch.targets.expand(20_000, -1, -1))
        right = (logits.argmax(-1)[:, 0, 0] == batch.targets[0, 0, 0]).double()
        assert ponders[0].steps.unique().tolist() == [1, 2, 3, 4]
    assert abs(nll.mean() - outcome.loss) < 5 * nll.std() / 20_000**0.5
    assert outcome.report[1] == outcome.report[0]
    # the other two have sampling errors of at most 0.5 and 1.5 divided by the root of 20,000
    assert outcome.report[2].item() == pytest.approx(right.mean().item(), abs=5 * 0.5 / 141)
    assert outcome.report[3].item() == pytest.approx(
        ponders[0].steps.double().mean().item(), abs=5 * 1.5 / 141
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_the_parity_of_two(method):
    learner = SequenceLearner(
        config(method=method, size=2, hidden=16, tau=0.001, iterations=100, batch=64, lr=0.02)
    )
    for _ in range(100):
        learner.advance()
    mode = {"act": "act", "plain": None, "repeat": None}.get(method, "thresholded")
    learned = evaluate_on_task(learner.model, Parity(2), mode, count=512)
    assert learned.accuracy > 0.95
    assert learned.sequence_accuracy == learned.accuracy


def test_evaluation_tells_steps_and_accuracy_by_difficulty():
    problem = task("addition", "small")
    model = network(sequence_preset("addition", "small", hidden=8, max_steps=3)).train()
    seen = evaluate_on_task(model, problem, "thresholded", count=300, batch=128)
    again = evaluate_on_task(model, problem, "thresholded", count=300, batch=128)
    assert seen == again
    assert model.training
    assert isinstance(model.rnn.layers[0].block.mode, tp.Relaxed)
    assert list(seen.steps_by_difficulty) == [1, 2, 3]
    assert 1 <= seen.steps <= 3
    assert seen.sequence_accuracy <= seen.accuracy
    assert seen.to_dict()["steps_by_difficulty"]["2"] == seen.steps_by_difficulty[2]


def test_streams_follow_the_text_and_each_other():
    text = torch.arange(100, dtype=torch.uint8)
    streams = Streams(text, batch=3, window=10)
    assert (streams.length, len(streams)) == (33, 3)
    for number in range(3):
        inputs, targets = streams[number]
        assert inputs.tolist() == [list(range(s + 10 * number, s + 10 * number + 10)) for s in (0, 33, 66)]
        assert (targets == inputs + 1).all()
    whole = torch.cat([inputs for inputs, _ in streams.whole()], 1)
    assert sorted(whole.flatten().tolist()) == list(range(99))
    with pytest.raises(ValueError, match="expected a text of more than 120 characters for 4 streams"):
        Streams(text, batch=4, window=30)


def test_bits_per_character_are_those_of_one_pass():
    torch.manual_seed(0)
    text = torch.randint(97, 123, (301,), dtype=torch.uint8)
    text[::7] = 32
    settings = config("enwik8", "repeat", embedding=4)
    model = network(settings).eval()
    # three streams of a hundred, in windows of 40, 40 and 20
    found = evaluate_on_text(model, text, batch=3, window=40)
    rows = text[:300].view(3, 100).long()
    targets = text[1:301].view(3, 100).long()
    with torch.no_grad():
        logits, _, _ = model(rows)
    nll = torch.nn.functional.cross_entropy(logits.view(-1, 256), targets.flatten()).item()
    assert found.nll == pytest.approx(nll, rel=1e-5)
    assert found.bits_per_character == pytest.approx(nll / math.log(2), rel=1e-5)
    assert found.characters == 300
    assert found.steps_by_kind == {"letter": 3.0, "space": 3.0}
    assert len(found.passage) == len(found.passage_steps) == len(found.passage_bits) == 240
    assert found.passage[7] == " "
