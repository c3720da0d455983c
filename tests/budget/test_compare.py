"""What heads, confidence, patience, random exits and an oracle give, and students of fewer layers."""

import itertools

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.budget.networks import Classifier, Tokens
from tests.budget.test_distill import SHORT, encoder, network, states
from torchpact.core.thresholds import Thresholds


def classified(seed):
    torch.manual_seed(seed)
    x = torch.randn(6, 8)
    return [(x, (x[:, 0] > 0).long())]


def by_hand(net, batches):
    """Losses, confidences and predictions of all exits, (L, n)."""
    losses, sure, classes = [], [], []
    for step in range(1, net.block.max_steps + 1):
        at = tp.exit_thresholds(net, step)
        with torch.no_grad(), tp.use_mode(net, "thresholded"), tp.use_thresholds(net, at):
            logits = torch.cat([net(x) for x, _ in batches])
        labels = torch.cat([y for _, y in batches])
        losses.append(nn.functional.cross_entropy(logits, labels, reduction="none"))
        sure.append(logits.softmax(-1).amax(-1))
        classes.append(logits.argmax(-1))
    return torch.stack(losses), torch.stack(sure), torch.stack(classes)


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1], reduction="none")


def compared(net, held, test, budgets):
    return tp.budget.compare(net, held, test, budgets, loss, inputs=lambda batch: batch[0], logits=True)


def test_fixed_exits_confidence_and_patience_are_those_of_an_enumeration():
    net = Classifier(steps=3)
    held, test = classified(1), classified(2)
    rows = compared(net, held, test, [0.8])
    losses, _, _ = by_hand(net, test)
    fixed = {row.criterion: row for row in rows if row.criterion.startswith("layer")}
    for step in (1, 2, 3):
        assert fixed[f"layer {step}"].loss == pytest.approx(float(losses[step - 1].mean()), rel=1e-5)
        at = tp.exit_thresholds(net, step)
        with tp.use_mode(net, "thresholded"), tp.use_thresholds(net, at):
            assert fixed[f"layer {step}"].cost == pytest.approx(float(tp.count_flops(net, test[0][0]).share))
    tail = 2 * 8 * 3  # the read-out
    plain = 2 * 8 * 8 * 4 + tail
    costs = torch.tensor([fixed[f"layer {step}"].cost for step in (1, 2, 3)], dtype=torch.double)
    costs = (costs + torch.arange(3).double() * tail / plain).unsqueeze(1).expand(-1, 6)
    own_losses, own_sure, own_classes = by_hand(net, held)
    chosen = compared(net, held, held, [0.8])  # where several are best, others are as good
    for name, own_values in {"confidence": own_sure, "patience": in_a_row(own_classes)}.items():
        best = min(
            float(own_losses.gather(0, at).mean())
            for bounds in itertools.product(*(bounds_of(row) for row in own_values[:-1]))
            for at in [exits(own_values, bounds)]
            if float(costs.gather(0, at).mean()) <= 0.8 + 1e-9
        )
        (row,) = [row for row in chosen if row.criterion == name]
        assert row.loss == pytest.approx(best, rel=1e-5)
        assert row.cost <= 0.8 + 1e-9


def bounds_of(values):
    found = values.unique()
    return [-1e9, *((found[1:] + found[:-1]) / 2).tolist(), 1e9]


def exits(values, bounds):
    at = torch.full((1, values.size(1)), len(values) - 1)
    for step in reversed(range(len(values) - 1)):
        at = torch.where(values[step] > bounds[step], step, at)
    return at


def in_a_row(classes):
    rows = [torch.zeros(classes.size(1))]
    for step in range(1, len(classes)):
        rows.append((rows[-1] + 1) * (classes[step] == classes[step - 1]))
    return torch.stack(rows)


def test_random_exits_are_those_of_the_heads_dealt_to_all_examples():
    net = Classifier(steps=3)
    held, test = classified(1), classified(2)
    rows = {row.criterion: row for row in compared(net, held, test, [0.8])}
    losses, _, _ = by_hand(net, test)
    bounds = tp.calibrate(net, held, 0.8, lambda out, b: -loss(out, b), inputs=lambda batch: batch[0])
    decided = tp.use_mode(net, "thresholded"), tp.use_thresholds(net, bounds)
    with torch.no_grad(), decided[0], decided[1], tp.collect(net) as ponders:
        output = net(test[0][0])
    steps = ponders[0].steps.flatten()
    assert rows["heads"].loss == pytest.approx(float(loss(output, test[0]).mean()), rel=1e-5)
    dealt = [float(losses[step - 1].mean()) for step in steps.tolist()]
    assert rows["random"].loss == pytest.approx(sum(dealt) / len(dealt), rel=1e-5)
    assert rows["random"].cost == pytest.approx(rows["heads"].cost, rel=1e-6)
    assert rows["oracle"].loss <= rows["heads"].loss + 1e-9


def test_networks_that_decide_for_tokens_or_in_several_blocks_are_refused():
    for net in (tp.adapt(encoder()), tp.adapt(Tokens())):
        with pytest.raises(ValueError, match="expected a network with one block that decides per example"):
            tp.budget.compare(net, states(1), states(1), [0.8])


def test_a_student_of_fewer_layers_begins_as_the_first_layers_and_learns():
    net, given = encoder(4), states(12, 16)
    student = tp.budget.first_layers(net, 2)
    x = given[0]
    torch.testing.assert_close(student(x), net.layers[1](net.layers[0](x)))
    config = tp.budget.DistillConfig(exit_updates=60, head_updates=20, check_every=20, lr=3e-3)
    learned = tp.budget.fewer_layers(net, given[:10], 2, held_out=given[10:], config=config)
    assert [name for name, _ in learned.named_children()] == ["layers"]  # plain again
    with torch.no_grad():
        before, after = ((each(given[-1]) - net(given[-1])).square().mean() for each in (student, learned))
    assert after < 0.5 * before
    assert len(net.layers) == 4


@pytest.mark.parametrize("name", ["encoder", "decoder", "vit"])
def test_students_of_pretrained_networks_run_and_say_how_many_layers_they_have(name):
    student = tp.budget.first_layers(network(name), 2)
    assert student.config.num_hidden_layers == 2


def test_students_that_cannot_be_made_are_refused_in_one_line():
    with pytest.raises(ValueError, match="expected a network with one list of layers, got 2 runs"):
        tp.budget.first_layers(Tokens(), 2)
    with pytest.raises(ValueError, match="layers"):
        tp.budget.fewer_layers(encoder(3), states(), 4, config=SHORT)
    with pytest.raises(ValueError, match="layers"):
        tp.budget.fewer_layers(encoder(3), states(), 1, config=SHORT)


def test_thresholds_stay_as_they_are():
    net = tp.adapt(encoder(), per="example")
    with tp.use_thresholds(net, Thresholds(1.0)):
        tp.budget.compare(net, states(1), states(1), [0.8])
        assert net.torchpact.runs[0].bounds == (1.0, 1.0)
