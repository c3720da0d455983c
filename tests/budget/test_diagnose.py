"""Networks of which it is known by construction what halting gains, and pieces against direct formulas."""

import itertools
import json
import math
import re

import pytest
import torch
from torch import nn

import torchpact as tp
from torchpact.budget.diagnosis import BlockView, verdict
from torchpact.budget.executable import Gain
from torchpact.budget.exit_losses import exits_by_block
from torchpact.budget.exit_states import replaced
from torchpact.budget.frontier import cost_at, hull, loss_at, oracle
from torchpact.budget.head_states import rank_correlation
from torchpact.budget.ridge import Predictor, gram, mapped, solved
from torchpact.core.exits import exit_thresholds
from torchpact.core.halting_module import halting_modules

WIDTH, STEPS = 16, 4
Z, P, Q, EASY, OTHER = range(5)
"""What the features of a state are: an answer, two bits whose product it should be, and two bits more."""


GAIN = Gain("linear", 0.6, 0.0, 0.0, -0.1, 0.1, 0.0, (0.0, 0.0), ())


class Step(nn.Module):
    """Costs something, and sets the answer by a function of the state."""

    def __init__(self, answer):
        super().__init__()
        self.work = nn.Sequential(nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH))
        self.answer = answer

    def forward(self, u):
        u = u + 0 * self.work(u)
        return torch.cat([self.answer(u).unsqueeze(1), u[:, 1:]], 1)


class Answers(nn.Module):
    """Class logits ±z of an answer z that the steps set."""

    def __init__(self, answers, head=lambda u: u[:, :1] * 0 - 9):
        super().__init__()
        self.block = tp.AdaptiveBlock([Step(each) for each in answers], [head] * (len(answers) - 1))

    def forward(self, x):
        u, _ = self.block(x)
        return {"logits": torch.stack([u[:, Z], -u[:, Z]], 1)}


class Chaos(nn.Module):
    """A step after which nothing is left of the state that a linear map could use."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, u):
        return torch.sin(40 * self.linear(u))


class Plain(nn.Module):
    """A block of some steps, and nothing after it."""

    def __init__(self, steps, head=lambda u: u[:, :1] * 0 - 9):
        super().__init__()
        self.block = tp.AdaptiveBlock(steps, [head] * (len(steps) - 1))

    def forward(self, x):
        return self.block(x)[0]


def right(u):
    return 8 * u[:, P] * u[:, Q]


def sure_if_easy(u):
    return right(u) * u[:, EASY]


def guessed_unless_easy(u):
    return torch.where(u[:, EASY] > 0, right(u), 8 * u[:, OTHER])


def stay(u):
    return u[:, Z]


def bits(count, batches=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (batches, count, 5), generator=generator).float() * 2 - 1
    x = torch.cat([signs, torch.randn(batches, count, WIDTH - 5, generator=generator)], 2)
    x[:, :, EASY] = (x[:, :, EASY] > 0).float()
    x[:, :, Z] = 0
    return [*x]


def wrong(output, x):
    labels = (x[:, P] * x[:, Q] < 0).long()
    return nn.functional.cross_entropy(output["logits"], labels, reduction="none")


def noise(count, batches=4, seed=0):
    return [*torch.randn(batches, count, WIDTH, generator=torch.Generator().manual_seed(seed))]


def gain_of(found: tp.Diagnosis, name: str) -> Gain:
    (block,) = found.blocks
    return next(gain for gain in block.gains if gain.criterion == name)


def test_nothing_is_promised_where_every_exit_is_far_from_the_last():
    found = tp.diagnose(Plain([Chaos(i) for i in range(STEPS)]), noise(40))
    assert "halting cannot pay here without training the exits" in found.verdict
    assert "even an oracle" in found.verdict
    assert all(row.better == 0 for row in found.rows)
    assert all((row.readout or 0) > 0.5 for row in found.rows[:-1])
    assert all(gain.low < 0.02 for gain in found.blocks[0].gains)


def test_where_all_exits_are_equally_good_fewer_steps_are_advised():
    found = tp.diagnose(Answers([right, stay, stay, stay]), bits(40), wrong)
    assert found.verdict.startswith("Step 1 of 4 is as good as the last for all examples: use fewer steps.")
    assert [row.loss for row in found.rows] == [found.rows[0].loss] * 4
    assert all(gain.saved == pytest.approx(0, abs=1e-6) for gain in found.blocks[0].gains)


def test_what_is_solved_at_the_first_exit_and_seen_in_its_confidence_is_gained():
    batches = bits(60)
    found = tp.diagnose(Answers([sure_if_easy, stay, stay, right]), batches, wrong)
    share = float(torch.cat(batches)[:, EASY].mean())
    gain = gain_of(found, "confidence")
    # easy ones take one step of four, at no loss, where fixed exits need all four
    assert gain.cost == pytest.approx(1 - 0.75 * share, abs=0.01)
    assert gain.saved == pytest.approx(0.75 * share, abs=0.01)
    assert gain.low < gain.saved < gain.high
    assert gain.excess == pytest.approx((0, 0), abs=1e-6)
    assert f"A calibrated confidence exit saves {gain.saved:.0%} of the FLOPs" in found.verdict
    assert "at no measurable loss" in found.verdict
    # of the hard half the first exit is worse, and the easy half loses the same later: none is better
    assert found.rows[0].better == 0
    assert found.rows[0].loss == pytest.approx((1 - share) * math.log(2), abs=1e-5)


def test_what_is_seen_in_the_state_alone_is_gained_by_a_linear_predictor_alone():
    batches = bits(400)

    def error(output, x):  # which read-outs cannot lower by being less sure
        return (output["logits"][:, 0] * x[:, P] * x[:, Q] < 0).float()

    found = tp.diagnose(Answers([guessed_unless_easy, stay, stay, right]), batches, error)
    share = float(torch.cat(batches)[:, EASY].mean())
    assert gain_of(found, "linear").saved == pytest.approx(0.75 * share, abs=0.06)
    assert gain_of(found, "confidence").low < 0.02
    assert "A linear predictor on the state saves" in found.verdict


def test_confidence_that_costs_more_than_it_saves_is_not_advised():
    class Dear(Answers):
        """Its read-out costs as much as forty steps."""

        def __init__(self, answers):
            super().__init__(answers)
            self.last = nn.Linear(WIDTH, 128 * STEPS * 20)

        def forward(self, x):
            u, _ = self.block(x)
            return {"logits": torch.stack([u[:, Z], -u[:, Z]], 1) + 0 * self.last(u)[:, :2]}

    found = tp.diagnose(Dear([sure_if_easy, stay, stay, right]), bits(60), wrong)
    assert gain_of(found, "confidence").saved <= 0
    assert "confidence exit" not in found.verdict


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (lambda u: u[:, :1] * 0 - 9, "gradient"),
        (lambda u: u[:, EASY : EASY + 1] - 2, "bound"),
        (lambda u: 8 * u[:, EASY : EASY + 1] - 4, ""),
        (lambda u: u[:, 5:6] * 0.1 - 2, "order"),
    ],
)
def test_the_reason_of_a_dead_head_is_told(head, reason):
    net = Answers([guessed_unless_easy, stay, stay, right], head)
    found = tp.diagnose(net, bits(60), wrong)
    assert found.heads[0].reason == reason
    assert found.heads[0].dead == bool(reason)
    share = float(torch.cat(bits(60))[:, EASY].mean())
    assert found.heads[0].better == pytest.approx(
        share + (1 - share) / 2, abs=0.1
    )  # half of the guesses are right


def test_trained_heads_have_a_row_of_what_they_save():
    def easy(u):
        return 8 * u[:, EASY : EASY + 1] - 4

    batches = bits(60)
    found = tp.diagnose(Answers([sure_if_easy, stay, stay, right], easy), batches, wrong)
    share, gain = float(torch.cat(batches)[:, EASY].mean()), found.blocks[0].heads
    assert gain is not None
    # the easy ones take one step of four, at no loss, where fixed exits need all four
    assert gain.cost == pytest.approx(1 - 0.75 * share, abs=1e-6)
    assert gain.saved == pytest.approx(0.75 * share, abs=1e-4)
    assert gain.low < gain.saved < gain.high
    assert re.search(rf"^ +heads  {gain.cost:.1%} ", found.table(), flags=re.MULTILINE)
    with tp.use_thresholds(net := Answers([sure_if_easy, right], easy), tp.Thresholds("never")):
        never = tp.diagnose(net, batches, wrong).blocks[0].heads
    assert never is not None
    assert (never.cost, never.saved) == pytest.approx((1, 0), abs=1e-6)


def test_heads_that_have_not_begun_to_learn_have_no_row():
    found = tp.diagnose(Answers([sure_if_easy, right]), bits(20), wrong)
    assert found.blocks[0].heads is None
    assert "heads" not in found.table()


def test_a_head_is_dead_rightly_where_nothing_is_to_be_gained():
    net = Plain([Chaos(i) for i in range(STEPS)], lambda u: u[:, :1] * 0.1 - 9)
    found = tp.diagnose(net, noise(20))
    assert [head.reason for head in found.heads] == ["advantage"] * 3
    assert [head.fires for head in found.heads] == [0, 0, 0]
    assert found.verdict.endswith("Dead heads 1, 2, 3: rightly, there is nothing to gain.")


def test_heads_that_have_not_begun_to_learn_are_not_called_dead_in_the_verdict():
    found = tp.diagnose(Plain([Chaos(i) for i in range(STEPS)]), noise(20))
    assert found.verdict.endswith("Heads are as they began: h is 0.00012 everywhere.")


def test_a_head_that_halts_everything_is_dead_too():
    net = Plain([Chaos(i) for i in range(2)], lambda u: u[:, :1] * 0 + 9)
    (head,) = tp.diagnose(net, noise(20)).heads
    assert (head.fires, head.reason) == (1, "gradient")
    assert tp.diagnose(Plain([nn.Identity(), nn.Identity()], lambda u: u[:, :1] * 0 + 9), noise(20)).heads[
        0
    ].reason == ("advantage")


def test_heads_are_asked_at_the_present_threshold_of_what_gets_there():
    net = Answers([guessed_unless_easy, stay, stay, right], lambda u: u[:, EASY : EASY + 1] - 2)
    batches = bits(60)
    with tp.use_thresholds(net, tp.Thresholds([-1.5])):
        found = tp.diagnose(net, batches, wrong)
    share = float(torch.cat(batches)[:, EASY].mean())
    assert [head.fires for head in found.heads] == pytest.approx([share, 0, 0], abs=1e-6)
    assert found.heads[0].h == pytest.approx(
        share * torch.tensor(-1.0).sigmoid().item() + (1 - share) * torch.tensor(-2.0).sigmoid().item(),
        abs=1e-5,
    )


def test_losses_and_costs_of_exits_are_those_of_pinned_runs():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        Plain([nn.Linear(WIDTH, WIDTH) for _ in range(3)], nn.Linear(WIDTH, 1)),
        nn.Tanh(),
    )
    batches = noise(10, 2)
    found = tp.diagnose(net, batches, lambda output, x: (output - x).square().mean(1))
    x = torch.cat(batches)
    for row in found.rows:
        at = exit_thresholds(net, row.step)
        with tp.use_mode(net, "thresholded"), tp.use_thresholds(net, at), torch.no_grad():
            assert row.loss == pytest.approx(float((net(x) - x).square().mean()), rel=1e-5)
            assert row.cost == pytest.approx(float(tp.count_flops(net, x).share), rel=1e-6)


def test_a_read_out_finds_a_last_step_that_is_linear():
    torch.manual_seed(0)
    found = tp.diagnose(Plain([Chaos(0), nn.Linear(WIDTH, WIDTH)]), noise(100))
    assert found.rows[0].loss > 0.1
    readout = found.rows[0].readout
    assert readout is not None
    assert readout < 1e-3


def test_read_outs_are_judged_on_batches_that_they_were_not_fitted_on():
    # a linear map of 16 features fits 8 examples exactly
    found = tp.diagnose(Plain([Chaos(0), Chaos(1)]), noise(8, 2))
    assert (found.rows[0].readout or 0) > 0.5


@pytest.mark.parametrize("strength", [0.0, 1e-3, 1.0])
def test_ridge_equals_least_squares_with_rows_for_the_penalty(strength):
    torch.manual_seed(0)
    x, y = torch.randn(30, 4, dtype=torch.double) + 1, torch.randn(30, 3, dtype=torch.double)
    scale = math.sqrt(strength * float(x.square().sum()) / 4)
    wide = torch.cat([torch.cat([x, torch.ones(30, 1)], 1), scale * torch.eye(4, 5)]).double()
    expected = torch.linalg.lstsq(wide, torch.cat([y, torch.zeros(4, 3)]).double()).solution
    got = solved(gram(x[:10], y[:10]) + gram(x[10:], y[10:]), strength)
    torch.testing.assert_close(got, expected)


def test_leave_one_out_predictions_are_those_of_fits_without_the_row():
    torch.manual_seed(0)
    x = torch.randn(12, 3, dtype=torch.double)
    target = x @ torch.tensor([1.0, -2.0, 0.5]).double() + 0.1 * torch.randn(12).double()
    predictor = Predictor(x)
    without, (slope, centre) = predictor.fit(target)
    scaled = (x - x.mean(0)) / x.std(0, correction=0)
    # the penalty that gives this slope: it is one of a few, the weakest for so little noise
    strength = 12 * 0.01
    for row in range(12):
        others = torch.arange(12) != row
        ones = torch.cat([scaled[others], torch.ones(11, 1).double()], 1)
        rows = torch.cat([ones, math.sqrt(strength) * torch.eye(3, 4).double()])
        weights = torch.linalg.lstsq(rows, torch.cat([target[others], torch.zeros(3).double()])).solution
        assert float(without[row]) == pytest.approx(float(scaled[row] @ weights[:3] + weights[3]), abs=1e-9)
    torch.testing.assert_close(predictor.predict(x, (slope, centre)), scaled @ slope + centre)


@pytest.mark.parametrize("seed", range(6))
def test_the_oracle_is_the_frontier_of_all_choices(seed):
    generator = torch.Generator().manual_seed(seed)
    costs = torch.rand(3, 5, generator=generator).double().cumsum(0)
    losses = torch.rand(3, 5, generator=generator).double()
    every = torch.tensor([*itertools.product(range(3), repeat=5)])
    place = torch.arange(5)
    outcomes = torch.stack([costs[every, place].mean(1), losses[every, place].mean(1)], 1)
    found = oracle(costs, losses)
    price = torch.rand(200, generator=generator).double() * 3
    # the frontier is as good as the best choice at every price, and its points are choices
    for p in price.tolist():
        best = float((outcomes[:, 1] + p * outcomes[:, 0]).min())
        assert float((found[:, 1] + p * found[:, 0]).min()) == pytest.approx(best, abs=1e-12)
    for point in found:
        assert float((outcomes - point).abs().sum(1).min()) < 1e-12


def test_the_hull_supports_every_price_and_is_read_both_ways():
    generator = torch.Generator().manual_seed(0)
    costs, losses = torch.rand(30, generator=generator), torch.rand(30, generator=generator)
    kept = hull(costs, losses)
    points = torch.stack([costs, losses], 1)[kept]
    for price in (0.01, 0.3, 1.0, 5.0):
        assert int((losses + price * costs).argmin()) in kept
    assert loss_at(points, float(points[0, 0])) == pytest.approx(float(points[0, 1]))
    middle = float(points[:2, 1].mean())
    assert loss_at(points, cost_at(points, middle)) == pytest.approx(middle, rel=1e-5)
    assert cost_at(points, -1.0) == pytest.approx(float(points[-1, 0]))
    assert cost_at(points, 9.0) == pytest.approx(float(points[0, 0]))


def test_rank_correlations_have_mean_ranks_for_ties():
    one, other = torch.tensor([1.0, 1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0, 3.0])
    a, b = torch.tensor([1.5, 1.5, 3, 4]) - 2.5, torch.tensor([1, 2, 3.5, 3.5]) - 2.5
    assert rank_correlation(one, other) == pytest.approx(float(a @ b / (a.norm() * b.norm())), abs=1e-6)
    assert rank_correlation(one, torch.ones(4)) == 0


def encoder(layers=3, shared=False, per="example"):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, batch_first=True, dropout=0.0)
    net = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    if shared:
        net.layers = nn.ModuleList([net.layers[0]] * layers)
    return tp.adapt(net, per=per)


@pytest.mark.parametrize("shared", [False, True])
def test_a_read_out_stands_between_the_last_layer_and_the_rest(shared):
    net = encoder(shared=shared).eval()
    x = torch.randn(3, 5, WIDTH)
    twice = torch.cat([2 * torch.eye(WIDTH), torch.ones(1, WIDTH)])
    (block,) = halting_modules(net).values()
    with tp.use_thresholds(net, exit_thresholds(net, 2)), torch.no_grad():
        plain = net(x)
        with replaced(block, twice):
            torch.testing.assert_close(net(x), 2 * plain + 1)
        assert torch.equal(net(x), plain)


def test_read_outs_of_maps_go_along_the_channels():
    u, weights = torch.randn(2, 3, 4, 5), torch.randn(4, 3)
    expected = torch.einsum("bchw,ck->bkhw", u, weights[:3]) + weights[3].view(1, 3, 1, 1)
    torch.testing.assert_close(mapped(u, weights), expected)


def test_positions_exit_where_the_loss_is_of_positions_and_nan_does_not_count():
    net = encoder(per="token")
    batches = [torch.randn(6, 5, WIDTH) for _ in range(2)]

    def loss(output, x):
        each = (output - x).square().mean(2)[:, :4].clone()
        each[0, 2:] = math.nan
        return each

    found = tp.diagnose(net, batches, loss)
    (exits,) = exits_by_block(net, batches, loss, None, None)
    assert exits.raw.shape == (3, 2 * (6 * 4 - 2))
    assert exits.features.shape == (2, 2 * (6 * 4 - 2), WIDTH)
    assert torch.bincount(exits.examples).tolist() == 2 * [2, 4, 4, 4, 4, 4]
    with torch.no_grad():
        expected = torch.cat([loss(net.eval()(x), x).flatten() for x in batches]).nanmean()
    assert found.rows[-1].loss == pytest.approx(float(expected), rel=1e-5)
    assert found.examples == 12


def test_padding_changes_nothing_but_is_left_out():
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24
    )
    net = tp.adapt(transformers.BertModel(config), per="example").eval()

    def pooled(output, batch):
        mask = batch["attention_mask"].unsqueeze(2)
        return ((output.last_hidden_state * mask).sum(1) / mask.sum(1)).mean(1)

    short = [
        {"input_ids": torch.randint(50, (6, 4)), "attention_mask": torch.ones(6, 4).long()} for _ in range(2)
    ]
    padded = [{name: nn.functional.pad(x, (0, 3)) for name, x in batch.items()} for batch in short]
    one, other = (tp.diagnose(net, each, pooled) for each in (short, padded))
    for a, b in zip(one.rows, other.rows, strict=True):
        assert (a.loss, a.readout, a.cost) == pytest.approx((b.loss, b.readout, b.cost), rel=1e-3, abs=1e-5)


def test_several_blocks_are_diagnosed_one_by_one():
    torch.manual_seed(0)
    net = nn.Sequential(Plain([nn.Identity()] * 2), Plain([Chaos(0), Chaos(1)]))
    found = tp.diagnose(net, noise(30))
    assert [row.block for row in found.rows] == ["0.block", "0.block", "1.block", "1.block"]
    first, second = found.verdict.splitlines()[:2]
    assert first.startswith("0.block: Step 1 of 2 is as good as the last for all examples")
    assert second.startswith("1.block: Every exit before the last of 2 steps loses at least")


def test_a_diagnosis_prints_its_table_and_verdict_and_is_json():
    found = tp.diagnose(Answers([sure_if_easy, right]), bits(20), wrong, unit="nats")
    text = str(found)
    assert text.endswith(found.verdict)
    assert text.startswith(found.table())
    assert "1 of 2" in text
    again = json.loads(found.to_json())
    assert [row["loss"] for row in again["rows"]] == [row.loss for row in found.rows]
    assert again["verdict"] == found.verdict


@pytest.mark.parametrize(("count", "few"), [(7, True), (8, False)])
def test_there_is_no_verdict_on_a_handful_of_examples(count, few):
    found = tp.diagnose(Answers([right, stay, stay, stay]), bits(count), wrong)
    assert found.verdict.startswith(f"{4 * count} examples are too few for a verdict") == few
    assert found.verdict.startswith("Step 1 of 4 is as good as the last") != few


def test_differences_of_rounding_are_no_loss():
    class Rounded(nn.Module):
        """Changes the state in its seventh digit."""

        def forward(self, u):
            return u * (1 + 1e-7 * u.sign().cumsum(1))

    found = tp.diagnose(Plain([Rounded() for _ in range(3)]), noise(20))
    assert max(row.loss for row in found.rows) < 1e-9
    assert found.verdict.startswith("Step 1 of 3 is as good as the last for all examples: use fewer steps.")


def test_an_exit_that_may_be_as_good_is_not_said_to_lose():
    view = BlockView("", "step", 2, (1e-9, 0.0), (0.5, 0.0), (2.0, 0.0), (False, False), 0.6, 1.0, [GAIN])
    said = verdict([view], [], "nats", 100)
    assert said.startswith("No exit before the last of 2 steps is seen to be as good as it (step 1 loses up")
    assert "1e-09" not in said


def test_the_network_is_left_as_it_was():
    net = encoder(per="token").train()
    before = {name: each.clone() for name, each in net.state_dict().items()}
    hooks = sum(len(module._forward_hooks) for module in net.modules())
    tp.diagnose(net, [torch.randn(4, 5, WIDTH) for _ in range(2)])
    assert net.training
    assert hooks == sum(len(module._forward_hooks) for module in net.modules())
    assert all(torch.equal(each, before[name]) for name, each in net.state_dict().items())


@pytest.mark.parametrize(
    ("net", "batches", "loss", "message"),
    [
        (nn.Linear(4, 4), noise(2), None, "expected a network with adaptive blocks, got Linear"),
        (Plain([Chaos(0), Chaos(1)]), noise(2, 1), None, "expected at least two batches"),
        (
            Plain([Chaos(0), Chaos(1)]),
            noise(2),
            lambda output, x: output.mean(),
            "expected a loss of each of 2",
        ),
        (Plain([Chaos(0), Chaos(1)]), noise(2), lambda output, x: output[:, 0] / 0, "expected finite losses"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused_in_one_line(net, batches, loss, message):
    with pytest.raises(ValueError, match=message) as error:
        tp.diagnose(net, batches, loss)
    assert "\n" not in str(error.value)
