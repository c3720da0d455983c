"""Heads swapped for a while, or for good, and criteria in saved networks."""

import json
from typing import Any

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.adapt.networks import BERT, LLAMA, first, randomize, runs
from tests.core.test_exits import kept
from tests.criteria.cases import CLASSES, block
from torchpact import criteria


def steps_of(net, inputs):
    with tp.collect(net) as ponders, torch.no_grad():
        net(**inputs)
    return ponders[0].steps


def test_heads_are_swapped_within_the_statement_and_come_back():
    net, inputs = randomize(tp.adapt(BERT.build())), BERT.inputs(3, 5)
    before, names = steps_of(net, inputs), [*net.state_dict()]
    heads = runs(net)[0].heads
    with tp.use_heads(net, criteria.LatentChange()) as same:
        assert same is net
        assert [type(head) for head in runs(net)[0].heads] == [criteria.LatentChange]
        assert steps_of(net, inputs).unique().tolist() == [4]  # never
        with tp.use_thresholds(net, tp.Thresholds("always")):
            assert steps_of(net, inputs).unique().tolist() == [1]
        with tp.use_heads(net, lambda layer, width: nn.Linear(width, 1)):
            assert [type(head) for head in runs(net)[0].heads] == [nn.Linear] * 3
            assert runs(net)[0].bounds is None
        assert type(runs(net)[0].heads[0]) is criteria.LatentChange
    assert runs(net)[0].heads is heads
    assert [*net.state_dict()] == names
    assert torch.equal(steps_of(net, inputs), before)


def test_heads_may_be_lists_of_modules_or_go_to_some_blocks_only():
    net: Any = nn.ModuleList([block(nn.Linear(4, 1), length=3), block(nn.Linear(4, 1), length=4)])
    mine = [nn.Linear(4, 1) for _ in range(3)]
    tp.use_heads(net, {"1": mine})
    assert [*net[1].halting] == mine
    assert len(net[0].halting) == 1
    shared = nn.Linear(4, 1)
    tp.use_heads(net, shared)
    assert [*net[0].halting] == [*net[1].halting] == [shared]
    tp.use_heads(net, criteria.Linear(4))
    assert [len(each.halting) for each in net] == [2, 3]
    u = torch.randn(2, 4)
    for each in net:
        assert each(u)[1].probs[:-1].unique().tolist() == [pytest.approx(torch.tensor(-5.0).sigmoid())]


def test_thresholds_of_before_come_back_with_their_heads():
    net, inputs = tp.adapt(BERT.build(), heads=criteria.LatentChange()), BERT.inputs(3, 5)
    tp.use_thresholds(net, tp.Thresholds("always"))
    with tp.use_heads(net, criteria.Unchanged("cls")):
        assert steps_of(net, inputs).unique().tolist() == [4]
    assert steps_of(net, inputs).unique().tolist() == [1]


def test_a_criterion_is_copied_so_that_one_may_serve_several_networks():
    criterion = criteria.Confidence("cls")
    nets = [tp.adapt(BERT.build(), heads=criterion) for _ in range(2)]
    assert criterion.per is None
    for net in nets:
        (head,) = runs(net)[0].heads
        assert head is not criterion
        assert head.readout.modules == (net.cls,)


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        (
            {"nowhere": nn.Linear(16, 1)},
            "expected heads for blocks among 'bert.encoder.layer'; got 'nowhere'",
        ),
        ([nn.Linear(16, 1)] * 2, "expected 3 heads, or one for all, got 2"),
        (lambda layer, width: 3, "expected heads to be modules, or to return a module, got a int"),
        (criteria.Confidence("nothing"), "expected the name of a module of BertForMaskedLM, got 'nothing'"),
    ],
)
def test_heads_that_do_not_fit_are_refused_in_one_line(heads, said):
    net = tp.adapt(BERT.build())
    mine = runs(net)[0].heads
    with pytest.raises((ValueError, TypeError), match=f"^{said}"):
        tp.use_heads(net, heads)
    assert runs(net)[0].heads is mine


def test_functions_on_blocks_and_deployed_networks_are_refused_in_one_line():
    with pytest.raises(TypeError, match=r"^expected a criterion or modules as heads of a block, whose"):
        tp.use_heads(block(nn.Linear(4, 1)), lambda layer, width: nn.Linear(width, 1))
    net = tp.adapt(BERT.build())
    fast = tp.deploy(net, BERT.inputs(2, 3), engines=["attention"])
    with pytest.raises(ValueError, match="deploy the model again, with other heads"):
        tp.use_heads(fast, criteria.LatentChange())


KINDS = {
    "linear": lambda: criteria.Linear(normalize=True),
    "mlp": lambda: criteria.MLP(hidden=7),
    "confidence": lambda: criteria.Confidence(["cls"], "margin"),
    "unchanged": lambda: criteria.Unchanged("cls", 2),
    "divergence": lambda: criteria.Divergence("cls", detach=False),
    "latent change": criteria.LatentChange,
    "random": lambda: criteria.RandomExit([0.1, 0.2, 0.3, 0.4]),
    "learned": lambda: criteria.Combined(
        [criteria.Confidence("cls"), criteria.MLP(hidden=3)], "learned", bounds=[0.5, 0]
    ),
}


@pytest.mark.parametrize("swapped", [False, True], ids=["adapted", "swapped"])
@pytest.mark.parametrize("kind", KINDS)
def test_ready_made_criteria_are_saved_by_name_and_settings(kind, swapped, tmp_path):
    inputs = BERT.inputs(3, 5)
    if swapped:
        net = tp.adapt(BERT.build())
        tp.use_heads(net, KINDS[kind]())
    else:
        net = tp.adapt(BERT.build(), heads=KINDS[kind]())
    for parameter in net.torchpact.parameters():
        nn.init.normal_(parameter, std=0.3)
    tp.use_thresholds(net, tp.Thresholds(-1.0))
    tp.save_pretrained(net, tmp_path)
    again = tp.from_pretrained(tmp_path)
    with tp.collect(net, exits=True) as ponders, tp.collect(again, exits=True) as others, torch.no_grad():
        assert torch.equal(first(net(**inputs)), first(again(**inputs)))
    assert torch.equal(kept(ponders[0]).logits, kept(others[0]).logits)
    assert torch.equal(ponders[0].steps, others[0].steps)
    record = json.loads((tmp_path / "torchpact.json").read_text())
    assert record["adapt"]["criterion"] == criteria.record_of(runs(net)[0].heads[0])
    assert (
        criteria.record_of(criteria.from_record(record["adapt"]["criterion"])) == record["adapt"]["criterion"]
    )


def test_criteria_with_read_outs_of_ones_own_are_asked_for(tmp_path):
    read = nn.Linear(16, CLASSES)
    net = tp.adapt(BERT.build(), heads=criteria.Confidence(read))
    tp.save_pretrained(net, tmp_path)
    with pytest.raises(ValueError, match=r"^expected heads=, .*\(Confidence\)"):
        tp.from_pretrained(tmp_path)
    again = tp.from_pretrained(tmp_path, heads=criteria.Confidence(nn.Linear(16, CLASSES)))
    for mine, theirs in zip(runs(net)[0].heads, runs(again)[0].heads, strict=True):
        assert torch.equal(mine.readout.weight, theirs.readout.weight)


def test_a_checkpoint_of_transformers_tells_the_criterion(tmp_path):
    net = tp.adapt(LLAMA.build(), heads=criteria.Confidence(["model.norm", "lm_head"]))
    net.save_pretrained(tmp_path)
    again = tp.from_pretrained(tmp_path)
    inputs = LLAMA.inputs(2, 4)
    thresholds = tp.Thresholds(0.1)
    with tp.use_thresholds(net, thresholds), tp.use_thresholds(again, thresholds):
        assert torch.equal(steps_of(net, inputs), steps_of(again, inputs))


@pytest.mark.parametrize("damage", [{"kind": "Oracle"}, 3, {"kind": "LatentChange", "unknown": 1}])
def test_a_damaged_record_is_refused_in_one_line(damage, tmp_path):
    tp.save_pretrained(tp.adapt(BERT.build(), heads=criteria.LatentChange()), tmp_path)
    file = tmp_path / "torchpact.json"
    record = json.loads(file.read_text())
    record["adapt"]["criterion"] = damage
    file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"^expected ") as error:
        tp.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def test_the_default_heads_are_saved_as_linear_after_a_criterion_was_tried(tmp_path):
    net = randomize(tp.adapt(BERT.build()))
    with tp.use_heads(net, criteria.LatentChange()):
        pass
    tp.save_pretrained(net, tmp_path)
    assert json.loads((tmp_path / "torchpact.json").read_text())["adapt"]["heads"] == "linear"
    inputs = BERT.inputs(3, 5)
    assert torch.equal(steps_of(tp.from_pretrained(tmp_path), inputs), steps_of(net, inputs))


def test_a_summary_counts_no_flops_of_criteria_that_it_does_not_know():
    text = str(tp.summary(tp.adapt(BERT.build(), heads=criteria.Confidence("cls"))))
    assert "heads cost" not in text
    assert "0 more in halting heads" in text
