"""The comparison on reviews, with a tiny encoder and made-up reviews."""

import csv

import pytest
import torch
from transformers import BertConfig, BertModel

import torchpact as tp
from torchpact_recipes.data.polarity import Review, split
from torchpact_recipes.halting import review_crossed, review_judging, reviews
from torchpact_recipes.halting.exit_record import ExitRecord, common_bound, exits_taken, halting_logits
from torchpact_recipes.halting.judging import paired
from torchpact_recipes.halting.networks import ReviewNet, review_batches
from torchpact_recipes.halting.review_criteria import heads_for, oracle
from torchpact_recipes.halting.review_training import ReviewSettings, all_exits, exits_loss

LAYERS = 4


class Tokenizer:
    """Words are numbers."""

    pad_token_id = 0
    model_max_length = 512

    def __call__(self, texts, truncation, max_length):
        return {"input_ids": [[int(word) for word in text.split()][:max_length] for text in texts]}


def encoder():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 20}
    return BertModel(BertConfig(num_hidden_layers=LAYERS, **sizes)), Tokenizer()


def made_up(part):
    generator = torch.Generator().manual_seed(len(part))
    found = []
    for _ in range(160):
        words = torch.randint(
            2, 20, (int(torch.randint(2, 9, (), generator=generator)),), generator=generator
        )
        found.append(Review(" ".join(map(str, words.tolist())), int(words.float().mean() > 10.5)))
    return found


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.setattr(reviews, "HEADS", 40)
    monkeypatch.setattr(review_judging, "BUDGET_LAYERS", 2)
    return reviews.Work(tmp_path / "work", ReviewSettings(updates=6, length=8), encoder, made_up)


def test_a_text_is_of_one_part_however_it_is_spaced_and_cased(tmp_path):
    table = "text,label\n" + "".join(f"text {i},{i % 2}\nTEXT  {i},{i % 2}\n" for i in range(300))
    found = split(table, tmp_path)
    texts = [review.text for part in found.values() for review in part]
    assert len(texts) == len(set(texts)) == 300
    assert 200 < len(found["train"]) < 280
    assert found == split(table, tmp_path)


def test_labels_other_than_0_and_1_are_refused(tmp_path):
    from torchpact_recipes.data import DataError

    with pytest.raises(DataError, match="expected a label of 0 or 1 in line 2, got '3'"):
        split("text,label\na,3\n", tmp_path)


def test_batches_hold_each_review_once_with_its_own_label():
    given = made_up("train")
    seen = []
    for inputs, labels in review_batches(given, Tokenizer(), 8, 16, seed=3):
        for ids, mask, label in zip(inputs["input_ids"], inputs["attention_mask"], labels, strict=True):
            seen.append((" ".join(map(str, ids[mask > 0].tolist())), int(label)))
    assert sorted(seen) == sorted((review.text, review.label) for review in given)


def test_what_criteria_say_on_a_record_is_what_they_say_in_a_run(work):
    net = work.network("exits", 0)
    record = work.exits(0, "validation")
    batch = next(iter(review_batches(made_up("validation"), Tokenizer(), 8, 160)))
    for name, heads in heads_for(net.read, 16, LAYERS).items():
        torch.manual_seed(1)
        for p in (p for head in heads for n, p in head.named_parameters() if "readout" not in n):
            torch.nn.init.normal_(p, std=0.3)
        with torch.no_grad():
            logits = halting_logits(heads, record)
        bound = float(logits[torch.isfinite(logits)].median())
        taken = exits_taken(logits, [bound] * (LAYERS - 1))
        one = heads if len(heads) > 1 else heads[0]
        at = tp.Thresholds(bound)
        with (
            tp.use_heads(net, one),
            tp.use_mode(net, "thresholded"),
            tp.use_thresholds(net, at),
            tp.collect(net) as ponders,
            torch.no_grad(),
        ):
            net(**batch.inputs)
        steps = ponders[0].steps.flatten() - 1
        # records are of bfloat16
        assert (steps == taken).double().mean() > 0.95, name


def test_costs_of_exits_are_those_of_networks_with_as_many_layers(work):
    costs = work.exit_costs(lambda net: tp.criteria.RandomExit([1 / LAYERS] * LAYERS), 8)
    for layers in (1, 3, LAYERS):
        plain = ReviewNet(encoder()[0], layers)
        batch = {"input_ids": torch.ones(1, 5, dtype=torch.long), "attention_mask": torch.ones(1, 5).long()}
        tp.adapt(plain, per="example") if layers > 1 else None
        with tp.use_mode(plain, "thresholded") if layers > 1 else torch.no_grad():
            found = tp.count_flops(plain, batch)
        if layers > 1:
            assert found.plain == float(costs[layers - 1, 5])


def test_a_common_bound_is_the_largest_that_meets_the_budget():
    torch.manual_seed(0)
    logits, costs = torch.randn(3, 50), torch.arange(1.0, 5.0).unsqueeze(1).expand(4, 50).double()
    record_cost = lambda bound: float(costs.gather(0, exits_taken(logits, [bound] * 3).unsqueeze(0)).mean())  # noqa: E731
    bound = common_bound(logits, costs, 2.5)[0]
    assert record_cost(bound) <= 2.5
    above = logits[logits > bound].min().item()
    assert record_cost(above) > 2.5


def test_the_oracle_pays_for_the_cheapest_right_exits_first():
    classes = torch.tensor([[[1.0, 0], [0, 1], [0, 1]], [[1, 0], [1, 0], [0, 1]]])  # (2 exits, 3 examples)
    record = ExitRecord(torch.zeros(2, 3, 1), classes, torch.zeros(3, dtype=torch.long), torch.ones(3))
    costs = torch.tensor([[0.5, 0.5, 0.5], [1.0, 1.0, 1.0]])
    assert oracle(record, costs, 0.5) == pytest.approx(1 / 3)
    assert oracle(record, costs, 0.67) == pytest.approx(2 / 3)
    assert oracle(record, costs, 1.0) == pytest.approx(2 / 3)


def test_intervals_of_paired_differences_cover_as_often_as_they_say():
    torch.manual_seed(0)
    inside = 0
    for _ in range(200):
        a = torch.randn(2, 100)
        b = a - 0.1 + 0.3 * torch.randn(2, 100)
        found = paired(a, b, resamples=200)
        inside += found.low <= 0.1 <= found.high
    assert 0.88 <= inside / 200 <= 0.99  # of 95 %; a false alarm is rarer than 1 in 1000


@pytest.mark.slow
def test_the_whole_comparison_runs_goes_on_and_opens_the_test_only_when_told(work, tmp_path, monkeypatch):
    out = tmp_path / "out"
    review_judging.write(work, [0, 1], ("whole", "1", "2"), out, test=False)
    assert not (out / "reviews_differences.csv").exists()
    assert not [*(tmp_path / "work").glob("*-test.record*")]
    monkeypatch.setattr(reviews, "train", None)  # nothing is trained again
    review_judging.write(work, [0, 1], ("whole", "1", "2"), out, test=True)
    with (out / "reviews.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["part"] for row in rows} == {"validation", "test"}
    whole = [row for row in rows if row["network"] == "whole"]
    assert len(whole) == 4
    assert all(row["cost"] == "1.0" for row in whole)
    with (out / "reviews_means.csv").open() as file:
        means = {row["network"]: row for row in csv.DictReader(file)}
    own = [float(row["accuracy"]) for row in whole if row["part"] == "test"]
    assert float(means["whole"]["accuracy"]) == pytest.approx(sum(own) / 2, abs=1e-4)
    assert {row["part"] for row in means.values()} == {"test"}
    (validated,) = out.glob("reviews_validation_*.csv")
    with validated.open() as file:
        assert {row["part"] for row in csv.DictReader(file)} == {"validation"}
    confident = [row for row in rows if row["network"] == "exits: confidence" and row["part"] == "validation"]
    budget = float(next(row["cost"] for row in rows if row["network"] == "student of 2 layers"))
    assert all(float(row["cost"]) <= budget + 1e-4 for row in confident)


def test_all_exits_of_an_untrained_network_end_at_its_output():
    net = tp.adapt(ReviewNet(encoder()[0], LAYERS).eval(), per="example")
    batch = next(iter(review_batches(made_up("train"), Tokenizer(), 8, 10)))
    with torch.no_grad():
        states = all_exits(net, batch.inputs)
        output = net(**batch.inputs)
    assert len(states) == LAYERS
    assert torch.allclose(net.classes(states[-1], batch.inputs["attention_mask"]), output, atol=1e-6)


def test_crossed_budgets_are_met_and_random_exits_are_means_of_fixed_ones(work, tmp_path):
    work.record("exits", 0, "heads")
    review_crossed.write_crossed(work, [0], tmp_path)
    with (tmp_path / "reviews_crossed.csv").open() as file:
        rows = [*csv.DictReader(file)]
    fixed = [float(row["accuracy"]) for row in rows if row["criterion"].startswith("all")]
    assert len(fixed) == LAYERS
    others = [row for row in rows if row["budget"]]
    assert {row["criterion"].split(",")[0] for row in others} >= {"confidence", "patience", "mlp"}
    for row in others:
        assert min(fixed) - 0.1 <= float(row["random"]) <= max(fixed) + 0.1
        assert (
            float(row["cost"]) < float(row["budget"]) + 0.25
        )  # of 40 examples, judged on others than fitted on
    assert not [*(tmp_path / "work").glob("*validation*")]


def test_exits_taught_by_the_whole_network_learn_from_labels_and_from_its_predictions(work):
    net = work.network("taught", 0)
    whole = work.network("whole", 0)
    assert (work.folder / "taught-0.safetensors").is_file()
    batch = next(iter(review_batches(made_up("train"), Tokenizer(), 8, 10)))
    mask = batch.inputs["attention_mask"]
    with torch.no_grad():
        given = whole(**batch.inputs).softmax(-1)
        logits = [net.classes(state, mask) for state in all_exits(net, batch.inputs)]
        loss = exits_loss(net, batch, whole)
    rows = torch.arange(10)
    expected = sum(
        float(
            (-each.log_softmax(-1)[rows, batch.labels]).mean() - (given * each.log_softmax(-1)).sum(1).mean()
        )
        for each in logits
    )
    assert float(loss) == pytest.approx(expected / LAYERS / 2, rel=1e-4)
