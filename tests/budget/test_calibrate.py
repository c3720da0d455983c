"""Thresholds of whole networks: within the budget when they run, and the best where that is known."""

import json
from itertools import product

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.budget.networks import Classifier, Tokens, with_random_heads
from torchpact.budget.heldout import HeldOut
from torchpact.budget.levels import LevelSearch
from torchpact.budget.search import candidates


def share(net, batches, thresholds):
    """The cost as the counter of FLOPs has it."""
    with tp.use_mode(net, "thresholded"), tp.use_thresholds(net, thresholds):
        counts = [tp.count_flops(net, batch) for batch in batches]
    whole = sum(float(count.total.double().sum()) for count in counts)
    plain = sum(count.plain * len(count.total) for count in counts)
    return whole / plain


def accuracy(output, batch):
    return output.argmax(1) == (batch[:, 0] > 0).long()


def test_the_thresholds_of_a_small_network_are_those_of_an_exhaustive_search():
    net, batches = Classifier(steps=3), [torch.randn(3, 8), torch.randn(2, 8)]
    held = HeldOut(net, batches, accuracy)
    options = [candidates(row) for row in torch.cat(held.logits["block"], 1)]
    tried = [held.run(tp.Thresholds([bounds])) for bounds in product(*options)]
    for budget in (0.7, 0.8, 0.9):
        best = max(each.score for each in tried if each.cost <= budget)
        thresholds = tp.calibrate(net, batches, budget, accuracy)
        found = held.run(thresholds)
        assert share(net, batches, thresholds) == pytest.approx(found.cost)
        assert found.cost <= budget
        assert found.score == pytest.approx(best)


@pytest.mark.parametrize("make", [Classifier, lambda: tp.adapt(padded_encoder(), per="example")])
def test_the_record_of_all_exits_is_that_of_runs_that_are_pinned_there(make):
    net = make().eval()
    given = inputs_of(net)
    held = HeldOut(net, given)
    record = held.record()
    (block,) = held.blocks.values()
    for step in range(1, block.max_steps + 1):
        ran = held.run(tp.exit_thresholds(net, step))
        torch.testing.assert_close(record.costs[step - 1], ran.costs, rtol=0, atol=1e-12)
        torch.testing.assert_close(record.scores[step - 1], ran.scores, rtol=0, atol=1e-6)


def padded_encoder():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(vocab_size=30, **sizes))


def inputs_of(net):
    generator = torch.Generator().manual_seed(0)
    if isinstance(net, Classifier):
        return [torch.randn(8, 8, generator=generator) for _ in range(2)]
    masks = [torch.arange(7) < torch.randint(1, 8, (6, 1), generator=generator) for _ in range(2)]
    ids = [torch.randint(30, (6, 7), generator=generator) for _ in masks]
    return [{"input_ids": x, "attention_mask": mask.long()} for x, mask in zip(ids, masks, strict=True)]


def test_moves_of_heads_are_tried_on_a_part_of_many_examples(monkeypatch):
    ada = with_random_heads(Tokens())
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(32, 4, 16, generator=generator) for _ in range(16)]
    held = HeldOut(ada, batches)
    search = LevelSearch(held, 24)
    sizes, run = [], held.run

    def counted(thresholds, part=None):
        sizes.append(16 if part is None else len(part))
        return run(thresholds, part)

    monkeypatch.setattr(held, "run", counted)
    found = search.best(0.6)
    plain = LevelSearch(HeldOut(ada, batches), 0).best(0.6)
    assert found is not None
    assert plain is not None
    assert found.cost <= 0.6
    assert found.score >= plain.score
    assert min(sizes) == 4  # a quarter of the batches
    assert sum(sizes) < 24 * 16


def test_calibration_reports_what_it_has_run():
    net = with_random_heads(Tokens())
    seen: list[tp.budget.Progress] = []
    tp.calibrate(net, [torch.randn(4, 4, 16)], 0.6, runs=4, progress=seen.append)
    assert [each.done for each in seen] == sorted({each.done for each in seen})
    assert {each.stage for each in seen} == {"calibration"}
    assert seen[-1].values["cost"] > 0


def test_calibration_at_a_quality_reports_its_candidates_and_tests():
    seen: list[tp.budget.Progress] = []
    batches = [torch.randn(100, 8) for _ in range(2)]
    tp.calibrate(Classifier(), batches, quality=0.3, confidence=0.8, progress=seen.append)
    assert [each.done for each in seen if each.stage == "candidates"] == [*range(1, 21)]
    tests = [each for each in seen if each.stage == "tests"]
    assert [each.done for each in tests] == [*range(1, len(tests) + 1)]
    assert tests[0].values["p"] <= 0.2  # the safest first: of these at least one passes


def test_more_budget_is_never_worse_and_every_budget_is_met():
    net, batches = Classifier(steps=5), [torch.randn(40, 8) for _ in range(3)]
    budgets = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    table = tp.calibrate(net, batches, budgets)
    for row in table.rows:
        assert share(net, batches, row.thresholds) == pytest.approx(row.cost, abs=1e-6)
        assert row.cost <= row.budget
    scores = [row.score for row in table.rows]
    assert scores == sorted(scores)
    assert table.rows[0].cost > 0.45  # what there is, is used: outputs are nearer to the full ones


def test_networks_of_two_runs_of_layers_meet_their_budgets_with_tokens():
    ada = with_random_heads(Tokens(), std=1.0)
    batches = [torch.randn(6, 9, 16) for _ in range(2)]
    table = tp.calibrate(ada, batches, [0.55, 0.7, 0.85], runs=6)
    for row in table.rows:
        assert share(ada, batches, row.thresholds) == pytest.approx(row.cost, abs=1e-6)
        assert 0.9 * row.budget <= row.cost <= row.budget
    scores = [row.score for row in table.rows]
    assert scores == sorted(scores)


def test_a_network_with_plain_blocks_beside_the_adaptive_one_meets_its_budget():
    torch.manual_seed(0)
    net = tp.adapt(tp.models.resnet32(), per="example", where=["blocks.1.steps"]).eval()
    batches = [torch.randn(3, 3, 16, 16) for _ in range(2)]
    thresholds = tp.calibrate(net, batches, 0.9)
    assert 0.7 < share(net, batches, thresholds) <= 0.9 * (1 + 1e-9)


def test_moving_single_heads_does_not_make_it_worse():
    """Only the last head of the first run matters: the second run of layers does nothing."""
    ada = with_random_heads(Tokens(), std=1.0)
    for layer in ada.second.layers:
        nn.init.zeros_(layer.linear2.weight), nn.init.zeros_(layer.linear2.bias)
        nn.init.zeros_(layer.self_attn.out_proj.weight), nn.init.zeros_(layer.self_attn.out_proj.bias)
    batches = [torch.randn(8, 9, 16)]
    held = HeldOut(ada, batches)
    by_runs = [held.run(tp.calibrate(ada, batches, 0.7, runs=runs)).score for runs in (0, 30)]
    assert by_runs[1] >= by_runs[0]
    assert by_runs[1] > 0.9 * by_runs[0]  # scores are negative: a tenth of the distance is gained


def test_every_criterion_that_gives_logits_is_calibrated():
    class Norm(nn.Module):
        def forward(self, u):
            return u.norm(dim=1, keepdim=True) * 100  # far from any logit of a probability

    torch.manual_seed(0)
    block = tp.AdaptiveBlock([nn.Linear(8, 8) for _ in range(4)], Norm())
    batches = [torch.randn(50, 8)]
    thresholds = tp.calibrate(block, batches, 0.6)
    assert 0.5 < share(block, batches, thresholds) <= 0.6


@pytest.mark.parametrize(
    "make",
    [
        tp.criteria.LatentChange,
        lambda: tp.criteria.Unchanged(nn.Linear(8, 3), steps=1),
        lambda: tp.criteria.Confidence(nn.Linear(8, 3)),
    ],
    ids=["latent change", "unchanged", "confidence"],
)
def test_ready_made_criteria_are_calibrated(make):
    torch.manual_seed(0)
    criterion = make()
    block = tp.AdaptiveBlock([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)], criterion)
    batches = [torch.randn(50, 8)]
    first = share(block, batches, tp.exit_thresholds(block, 1))
    for budget in (first + 0.1, first + 0.4):  # read-outs count
        assert share(block, batches, tp.calibrate(block, batches, budget)) <= budget


def test_labels_come_with_batches_where_inputs_are_taken_out_of_them():
    net = Classifier()
    batches = [(torch.randn(20, 8), torch.randint(3, (20,))) for _ in range(2)]

    def score(output, batch):
        return -nn.functional.cross_entropy(output, batch[1], reduction="none")

    thresholds = tp.calibrate(net, batches, 0.7, score, inputs=lambda batch: batch[0])
    assert share(net, [x for x, _ in batches], thresholds) <= 0.7


def test_calibration_leaves_the_network_as_it_was():
    net = Classifier().train()
    before = {name: x.clone() for name, x in net.state_dict().items()}
    tp.calibrate(net, [torch.randn(10, 8)], 0.7)
    assert net.training
    assert net.block.mode == tp.Relaxed()
    assert net.block.bounds is None
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())


def test_thresholds_of_a_table_are_switched_at_run_time():
    net, batches = Classifier().eval(), [torch.randn(64, 8)]
    table = tp.calibrate(net, batches, [0.6, 0.9])
    fast = tp.deploy(net, batches[0], mode="thresholded")
    for budget in (0.6, 0.9):
        with tp.use_mode(net, "thresholded"), tp.use_thresholds(net, table.at(budget)), torch.no_grad():
            expected = net(batches[0])
        assert torch.allclose(fast(batches[0], thresholds=table.at(budget)), expected, atol=1e-5)


def test_a_table_goes_through_json_and_files(tmp_path):
    table = tp.calibrate(Classifier(), [torch.randn(30, 8)], [0.6, 0.8, tp.Budget(flops=0.95)])
    again = tp.ThresholdTable.from_json(json.dumps(json.loads(table.to_json())))
    assert again == table
    table.save(tmp_path / "table.json")
    assert tp.ThresholdTable.load(tmp_path / "table.json") == table
    assert [*again] == [0.6, 0.8, 0.95]
    assert table.at(0.94) == table[0.8]
    assert len(table.table().splitlines()) == 4
    with pytest.raises(ValueError, match=r"at least 0.6, the least here, got 0.5"):
        table.at(0.5)
    with pytest.raises(ValueError, match="expected the JSON of a threshold table"):
        tp.ThresholdTable.from_json('{"rows": []}')


def test_thresholds_that_were_set_are_saved_with_the_network(tmp_path):
    ada = with_random_heads(Tokens())
    x = torch.randn(4, 9, 16)
    tp.use_thresholds(ada, tp.calibrate(ada, [x], 0.7, runs=0))
    tp.save_pretrained(ada, tmp_path)
    again = tp.from_pretrained(tmp_path, net=Tokens())
    assert torch.equal(again(x), ada(x))
    assert float(tp.count_flops(again, x).share) <= 0.7


@pytest.mark.parametrize("make", [Classifier, lambda: with_random_heads(Tokens())])
def test_a_budget_that_cannot_be_met_says_what_can(make):
    net = make()
    x = torch.randn(8, 8) if isinstance(net, Classifier) else torch.randn(4, 9, 16)
    with pytest.raises(ValueError, match=r"expected a budget of 0\.\d+ to 1 of the FLOPs.*got 0\.1"):
        tp.calibrate(net, [x], 0.1)
    with pytest.raises(ValueError, match="to 1 of the FLOPs"):
        tp.calibrate(net, [x], [0.1, 0.9])


def test_what_does_not_fit_is_refused_in_a_line():
    net, x = Classifier(), torch.randn(8, 8)
    with pytest.raises(TypeError, match="expected a budget or a quality"):
        tp.calibrate(net, [x])
    with pytest.raises(ValueError, match="expected held-out batches with examples, got 0 batches"):
        tp.calibrate(net, [], 0.7)
    with pytest.raises(ValueError, match="expected held-out batches with examples, got 1 batches"):
        tp.calibrate(net, [x[:0]], 0.7)
    with pytest.raises(ValueError, match="one for each"):
        tp.calibrate(net, [x], tp.Budget(flops={"block": 0.5}))
    with pytest.raises(ValueError, match="of each of 8 examples, got shape"):
        tp.calibrate(net, [x], 0.7, lambda output, batch: output)
    with pytest.raises(ValueError, match="8 of 8 that are not"):
        tp.calibrate(net, [x], 0.7, lambda output, batch: output[:, 0] * torch.nan)
    with pytest.raises(ValueError, match="at least two batches"):
        tp.calibrate(net, [x], quality=0.1)
    with pytest.raises(ValueError, match="without any"):
        tp.calibrate(nn.Linear(8, 8), [x], 0.7)


def test_empty_batches_among_others_are_left_out():
    net, x = Classifier(), torch.randn(20, 8)
    assert tp.calibrate(net, [x, x[:0]], 0.7) == tp.calibrate(net, [x], 0.7)


class Halves(nn.Module):
    """A network whose first exit is wrong on a share of examples, which a head knows in part.

    The input has what is right in column 0, whether the first exit is wrong in column 1, and what the head
    sees in column 2.
    """

    def __init__(self):
        super().__init__()
        wrong = Column(lambda u: torch.where(u[:, 1:2] > 0, 1 - u[:, :1], u[:, :1]))
        right = Column(lambda u: u[:, 4:5])
        self.block = tp.AdaptiveBlock([wrong, right], lambda u: u[:, 2:3])

    def forward(self, x):
        u, _ = self.block(torch.cat([x, torch.zeros_like(x[:, :1]), x[:, :1]], 1))
        return torch.cat([1 - u[:, :1], u[:, :1]], 1)


class Column(nn.Module):
    """Replaces the first column of the state, at the price of a product."""

    eye: torch.Tensor

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("eye", torch.eye(5))

    def forward(self, u):
        return torch.cat([self.function(u), u[:, 1:]], 1) @ self.eye


def examples(count, generator):
    right = (torch.rand(count, 1, generator=generator) < 0.5).float()
    wrong = (torch.rand(count, 1, generator=generator) < 0.2).float()
    seen = torch.randn(count, 1, generator=generator) - 3 * wrong
    return torch.cat([right, wrong, seen], 1)


def test_the_quality_holds_on_new_data_as_often_as_promised():
    net, generator = Halves(), torch.Generator().manual_seed(0)
    fresh = examples(100_000, generator)
    quality, confidence, trials, violated, saved = 0.05, 0.9, 60, 0, 0
    for _ in range(trials):
        batches = [examples(300, generator) for _ in range(2)]
        thresholds = tp.calibrate(net, batches, quality=quality, confidence=confidence)
        (bound,) = thresholds.for_block(0, "block", 1)
        halted = fresh[:, 2] > bound
        violated += float((halted & (fresh[:, 1] > 0)).float().mean()) > quality
        saved += float(halted.float().mean()) > 0.1
    # at a rate of 0.1 this many of 60 trials or more have a probability of 1e-3
    assert violated < 15
    assert saved > 40


def test_too_few_examples_for_a_quality_give_never_and_say_how_many_it_takes():
    generator = torch.Generator().manual_seed(0)
    batches = [examples(20, generator) for _ in range(2)]
    with pytest.warns(UserWarning, match=r"none on 20 test examples \(299 without a loss would show it\)"):
        thresholds = tp.calibrate(Halves(), batches, quality=0.01)
    assert thresholds == tp.Thresholds("never")


def costs_of(net, batch, thresholds):
    """What each example costs, as a share of the network without halting."""
    with tp.use_mode(net, "thresholded"), tp.use_thresholds(net, thresholds):
        count = tp.count_flops(net, batch)
    return count.total.double() / count.plain


@pytest.mark.parametrize("per", ["example", "token"])
def test_with_a_confidence_an_upper_bound_of_the_mean_cost_is_within_the_budget(per):
    net = Classifier(steps=5) if per == "example" else with_random_heads(Tokens(), std=1.0)
    batch = torch.randn(120, 8) if per == "example" else torch.randn(60, 9, 16)
    sure = tp.calibrate(net, [batch], 0.7, within=0.95, runs=4)
    costs = costs_of(net, batch, sure)
    upper = float(costs.mean() + 1.6449 * costs.std() / len(costs) ** 0.5)
    assert 0.66 < upper <= 0.7001  # all examples cost the same where nothing halts
    usual = costs_of(net, batch, tp.calibrate(net, [batch], 0.7, runs=4)).mean()
    assert float(costs.mean()) < float(usual) <= 0.7


def test_budgets_with_a_confidence_are_seldom_overrun_by_new_examples():
    """Each of 20 is overrun with probability 0.05: more than 4 of them would be with probability 0.003."""
    net, new = Classifier(steps=4), torch.randn(20_000, 8)
    over = {None: 0, 0.95: 0}
    for _ in range(20):
        held = torch.randn(100, 8)
        for within in over:
            found = tp.calibrate(net, [held], 0.65, within=within)
            over[within] += float(costs_of(net, new, found).mean()) > 0.65
    assert over[0.95] <= 4
    assert over[None] > over[0.95]


@pytest.mark.parametrize("within", [0.5, 1.0, -1])
def test_a_confidence_of_a_budget_is_a_number_between_a_half_and_one(within):
    with pytest.raises(ValueError, match="expected within"):
        tp.calibrate(Classifier(), [torch.randn(4, 8)], 0.7, within=within)
