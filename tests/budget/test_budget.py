"""The price of a budget, on a block whose optimum at every price is known."""

import json
import math

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.budget.networks import Classifier, Tokens, curves, free_block, optimal_share, with_random_heads
from torchpact.core.exits import exit_thresholds


def trained(objective, target, bias, updates=450, start=0.01, losses=None):
    """Train free logits to a budget; returns the budget and the share that they come to."""
    losses = curves() if losses is None else losses
    free, block = free_block(losses, bias)
    optimizer = torch.optim.Adam(free.parameters(), lr=0.2)
    budget = tp.Budget(flops=target, start=start)
    u = torch.zeros(losses.size(1), 1)
    torch.manual_seed(0)
    trace = []
    for _ in range(updates):
        if objective == "relaxed":
            # the output is the weighted sum of states: a mixture of one-hots weighs losses
            _, ponder = block(u)
            weights = mixture(ponder.probs.squeeze(-1))
            loss = budget.loss((weights * losses).sum(0), ponder)
        else:
            _, ponder = block(u, exits=True)
            loss = budget.loss(losses, ponder, objective=objective)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        budget.step()
        trace.append(budget.log["relaxed"])
    return budget, sum(trace[-50:]) / 50


def mixture(h):
    """Weights of the exits in a relaxed sample of these probabilities."""
    noise = torch.rand_like(h[:-1])
    fires = torch.sigmoid((torch.logit(h[:-1], 1e-6) + torch.logit(noise, 1e-6)) * 1.5)
    fires = torch.cat([fires, torch.ones_like(h[-1:])])
    stays = torch.cat([torch.ones_like(h[-1:]), (1 - fires[:-1]).cumprod(0)])
    return fires * stays


@pytest.mark.parametrize("objective", ["relaxed", "exact", "advantage"])
@pytest.mark.parametrize(("bias", "target"), [(-8, 0.4), (-8, 0.75), (-4, 0.4), (0, 0.4), (0, 0.75)])
def test_training_meets_a_budget_from_every_bias(objective, bias, target):
    budget, share = trained(objective, target, bias)
    assert abs(share - target) < 0.05
    if objective != "relaxed":  # and the price is the one at which that share is the best there is
        low, high = optimal_share(curves(), 1.3 * budget.tau), optimal_share(curves(), budget.tau / 1.3)
        assert low - 0.05 <= target <= high + 0.05


@pytest.mark.parametrize("start", [1e-4, 1.0])
def test_a_budget_is_met_from_above_and_from_below(start):
    _, share = trained("exact", 0.5, -3, updates=1300, start=start)
    assert abs(share - 0.5) < 0.05


def test_a_price_does_not_wind_up_while_heads_do_not_move():
    budget = tp.Budget(flops=0.5, ceiling=1.0)
    _, block = free_block(curves(), -8)
    for _ in range(600):
        budget.loss(curves(), block(torch.zeros(64, 1), exits=True)[1], objective="exact")
        budget.step()
    assert budget.tau == 1.0
    _, block = free_block(curves(), 8)  # all halt at once: the price falls at once, too
    for _ in range(2):
        budget.loss(curves(), block(torch.zeros(64, 1), exits=True)[1], objective="exact")
        budget.step()
    assert budget.tau < 0.5


def test_evaluation_leaves_no_trace():
    budget, losses = tp.Budget(flops=0.5), curves()
    _, block = free_block(losses, -3)
    with torch.no_grad():
        for _ in range(3):
            budget.loss(losses, block(torch.zeros(64, 1), exits=True)[1], objective="exact")
    before = budget.state_dict()
    with pytest.warns(UserWarning, match="tau stays"):
        budget.step()
    assert budget.state_dict() == before


def test_every_objective_is_that_of_its_function():
    torch.manual_seed(0)
    block = tp.AdaptiveBlock(nn.Linear(8, 8), nn.Linear(8, 1), max_steps=4)
    budget, u = tp.Budget(flops=0.5, start=0.3), torch.randn(5, 8)
    nll, losses = torch.rand(5), torch.rand(4, 5)
    _, ponder = block(u, exits=True)
    logits = ponder.exits.logits
    assert torch.equal(budget.loss(nll, ponder), tp.map_loss(nll, ponder, 0.3))
    assert torch.equal(budget.loss(nll.mean(), [ponder]), tp.map_loss(nll.mean(), ponder, 0.3))
    assert torch.equal(budget.loss(losses, ponder, "exact"), tp.exact_loss(losses, logits, 0.3))
    assert torch.equal(budget.loss(losses, ponder, "advantage"), tp.advantage_loss(losses, logits, 0.3))
    assert torch.equal(budget.loss(losses, ponder, "ponder"), tp.ponder_loss(losses, logits.squeeze(-1), 0.3))
    _, ponder = block(u.repeat(2, 1), mode="discrete")
    both = torch.rand(10)
    baseline = tp.EMABaseline()
    assert torch.equal(budget.loss(both, ponder, "reinforce"), tp.reinforce_loss(both, ponder, 0.3, baseline))
    assert torch.equal(
        budget.loss(both.view(2, 5), ponder, "rloo"), tp.rloo_loss(both.view(2, 5), ponder, 0.3)
    )
    runs = [block(u, mode="discrete")[1] for _ in range(3)]
    nlls = [torch.rand(5) for _ in range(3)]
    assert torch.equal(budget.loss(nlls, runs, "rloo"), tp.rloo_loss(nlls, runs, 0.3))


def test_prices_of_blocks_are_relative_to_their_mean():
    torch.manual_seed(0)
    cheap = tp.AdaptiveBlock(nn.Linear(8, 8), nn.Linear(8, 1), max_steps=4, name="cheap")
    dear = tp.AdaptiveBlock(nn.Linear(8, 8), nn.Linear(8, 1), max_steps=2, name="dear", price=3.0)
    ponders = [cheap(torch.randn(5, 8))[1], dear(torch.randn(5, 8))[1]]
    nll = torch.rand(5)
    budget = tp.Budget(flops=0.5, start=0.2)
    loss = budget.loss(nll, ponders)
    assert torch.allclose(loss, tp.map_loss(nll, ponders, [0.2 * 0.5, 0.2 * 1.5]))
    budget.step()
    steps = [each.expected_steps.detach().mean() for each in ponders]
    expected = (steps[0] + 3 * steps[1]) / (4 + 3 * 2)
    assert math.isclose(budget.log["relaxed"], float(expected), rel_tol=1e-5)


def test_the_log_has_the_relaxed_the_sampled_and_the_thresholded_share():
    budget = tp.Budget(flops=0.5)
    logits = torch.tensor([[3.0, -3.0, 0.1], [5.0, 1.0, -1.0]])
    block = tp.AdaptiveBlock(
        [nn.Identity(), Wait(), Wait()], [lambda u, i=i: logits[i].unsqueeze(1) for i in range(2)]
    )
    u = torch.zeros(3, 1, requires_grad=True)
    _, ponder = block(u, mode="discrete")
    budget.loss(torch.zeros(3) + u.sum(), ponder)
    budget.step()
    h = logits.sigmoid()
    expected = (1 + (1 - h[0]) + (1 - h[0]) * (1 - h[1])).mean() / 3
    assert math.isclose(budget.log["relaxed"], float(expected), rel_tol=1e-5)
    assert math.isclose(budget.log["sampled"], float(ponder.steps.float().mean()) / 3, rel_tol=1e-5)
    assert math.isclose(budget.log["thresholded"], (1 + 2 + 1) / 9, rel_tol=1e-5)
    assert math.isclose(budget.log["gap"], budget.log["thresholded"] - budget.log["relaxed"], rel_tol=1e-5)
    assert "relaxed=" in repr(budget)
    assert "\n" not in repr(budget)


class Wait(nn.Module):
    def forward(self, u):
        return u * 1


def test_prices_that_were_measured_give_the_share_that_count_flops_gives():
    net = Classifier()
    x = torch.randn(6, 8)
    budget = tp.Budget(flops=0.6).bind(net, x)
    for step in range(1, 5):
        with tp.use_mode(net, "thresholded"), tp.use_thresholds(net, exit_thresholds(net, step)):
            share = float(tp.count_flops(net, x).share)
        # 2·8·8 each for the first layer and a step, 2·8 for a head, 2·8·3 for the last layer
        by_hand = (128 + 128 * step + 16 * min(step, 3) + 48) / (128 + 4 * 128 + 48)
        prices = budget.prices
        assert prices is not None
        assert math.isclose(share, by_hand, rel_tol=1e-6)
        assert math.isclose(prices.fixed + prices.blocks["block"].by_exit[step - 1], by_hand, rel_tol=1e-6)
    assert prices is not None
    assert math.isclose(prices.least, (128 + 128 + 16 + 48) / 688, rel_tol=1e-6)


def test_plain_blocks_around_adapted_layers_are_a_fixed_cost():
    net = tp.adapt(tp.models.resnet32(), per="example", bias=0.0).eval()
    x = torch.randn(2, 3, 16, 16)
    budget = tp.Budget(flops=0.7).bind(net, x)
    assert budget.prices is not None
    assert [*budget.prices.blocks] == [f"blocks.{i}.steps" for i in range(3)]
    for name, step in (("least", 1), ("most", 5)):
        with tp.use_thresholds(net, tp.exit_thresholds(net, step)):
            share = float(tp.count_flops(net, x).share)
        assert getattr(budget.prices, name) == pytest.approx(share, rel=1e-4)
    with tp.use_mode(net, "relaxed"), tp.collect(net) as ponders:
        losses = net(x)[0].square().mean(1)
    budget.loss(losses, ponders).backward()
    budget.step()
    assert budget.prices.least < budget.log["relaxed"] < budget.prices.most


def test_keys_and_values_are_charged_while_any_token_of_the_example_is_active():
    ada = with_random_heads(Tokens(), std=2.0)
    x = torch.randn(4, 7, 16)
    budget = tp.Budget(flops=0.8).bind(ada, x)
    with tp.use_mode(ada, "thresholded"):
        exact = float(tp.count_flops(ada, x).share)
        with tp.collect(ada) as ponders:
            ada(x)  # with gradients: all probabilities
    budget.loss(torch.zeros(4) + next(ada.parameters()).sum() * 0, ponders)
    budget.step()
    assert abs(budget.log["sampled"] - exact) < 0.002
    assert budget.log["sampled"] < 0.97


def test_a_budget_for_each_block_has_a_price_for_each():
    torch.manual_seed(0)
    ada = with_random_heads(Tokens(), std=0.1, bias=-2.0).train()
    x = torch.randn(8, 7, 16)
    budget = tp.Budget(flops={"first.layers": 0.5, "second.layers": 0.8}, start=0.02).bind(ada, x)
    optimizer = torch.optim.Adam(ada.torchpact.parameters(), lr=0.05)
    with torch.no_grad(), tp.use_mode(ada, "thresholded"), tp.use_thresholds(ada, tp.Thresholds("never")):
        full = ada(x)
    for _ in range(150):
        with tp.collect(ada) as ponders:
            output = ada(x)
        loss = budget.loss((output - full).square().mean((1, 2)), ponders)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        budget.step()
    assert abs(budget.log["first.layers/relaxed"] - 0.5) < 0.1
    assert abs(budget.log["second.layers/relaxed"] - 0.8) < 0.1
    assert set(budget.taus) == {"first.layers", "second.layers"}


def test_training_goes_on_from_a_state_as_if_it_had_not_stopped():
    def run(budget, seeds):
        for seed in seeds:
            torch.manual_seed(seed)
            _, block = free_block(curves(seed=seed), -3 + seed)
            budget.loss(curves(), block(torch.zeros(64, 1), exits=True)[1], objective="exact")
            budget.step()
        return budget

    whole = run(tp.Budget(flops=0.4), range(6))
    state = json.loads(json.dumps(run(tp.Budget(flops=0.4), range(3)).state_dict()))
    resumed = tp.Budget(flops=0.4)
    resumed.load_state_dict(state)
    run(resumed, range(3, 6))
    assert resumed.state_dict() == whole.state_dict()


def test_accumulated_batches_count_together():
    budget, losses = tp.Budget(flops=0.4), curves()
    for bias in (-8.0, 8.0):
        _, block = free_block(losses, bias)
        budget.loss(losses, block(torch.zeros(64, 1), exits=True)[1], objective="exact")
    budget.step()
    assert math.isclose(budget.log["relaxed"], (1 + 1 / 6) / 2, rel_tol=1e-2)


def test_nan_is_refused_and_nothing_is_lost():
    budget, losses = tp.Budget(flops=0.4), curves()
    _, block = free_block(losses, -3)
    _, ponder = block(torch.zeros(64, 1), exits=True)
    budget.loss(losses, ponder, objective="exact")
    bad = losses.clone()
    bad[0, 0] = torch.nan
    with pytest.raises(ValueError, match="expected losses without NaN, got 1 of 384; tau stays"):
        budget.loss(bad, ponder, objective="exact")
    _, broken = free_block(losses, math.nan)
    with pytest.raises(ValueError, match="NaN"):
        budget.loss(losses.mean(), broken(torch.zeros(64, 1))[1])
    other = tp.Budget(flops=0.4)
    other.loss(losses, ponder, objective="exact")
    budget.step()
    other.step()
    assert budget.state_dict() == other.state_dict()


def test_the_mean_over_all_processes_counts(monkeypatch):
    losses, u = curves(), torch.zeros(64, 1)
    ponders = [free_block(losses, bias)[1](u, exits=True)[1] for bias in (-3, 1)]
    alone, sums = tp.Budget(flops=0.4), []
    for ponder in ponders:
        alone.loss(losses, ponder, objective="exact")
    alone.step()

    def gather(own):  # the first process is seen by the second
        sums.append(own.clone())
        own += sums[0] if len(sums) > 1 else 0

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    monkeypatch.setattr(torch.distributed, "all_reduce", gather)
    for ponder in ponders:
        budget = tp.Budget(flops=0.4)
        budget.loss(losses, ponder, objective="exact")
        budget.step()
    assert budget.log["relaxed"] == pytest.approx(alone.log["relaxed"])
    assert budget.tau == pytest.approx(alone.tau)


def test_an_empty_batch_moves_nothing_and_says_so():
    budget = tp.Budget(flops=0.5)
    block = tp.AdaptiveBlock(nn.Linear(8, 8), nn.Linear(8, 1), max_steps=4)
    loss = budget.loss(torch.zeros(0), block(torch.zeros(0, 8))[1])
    loss.backward()
    assert float(loss.detach()) == 0
    with pytest.warns(UserWarning, match="expected a loss of at least one example"):
        budget.step()
    assert budget.tau == 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flops": 0}, r"expected flops in \(0, 1\], got 0"),
        ({"flops": 1.2}, r"expected flops in \(0, 1\], got 1.2"),
        ({"flops": {"block": 2.0}}, r"expected the budget of 'block' in \(0, 1\], got 2"),
        ({"ms": -1.0, "example": 1}, r"expected ms in \(0, inf\), got -1"),
        ({"flops": 0.5, "start": 0.0}, r"expected start in \[0.0001, 10\], got 0"),
    ],
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tp.Budget(**options)


def test_a_budget_below_one_step_is_refused_with_what_can_be_met():
    with pytest.raises(ValueError, match=r"expected a budget of 0\.4651 to 1 of the FLOPs.*got 0\.3"):
        tp.Budget(flops=0.3).bind(Classifier(), torch.randn(2, 8))
    with pytest.raises(ValueError, match=r"one step of 'block'; got 0\.2"):
        tp.Budget(flops={"block": 0.2}).bind(Classifier(), torch.randn(2, 8))


def test_what_does_not_fit_is_refused_in_a_line():
    with pytest.raises(TypeError, match="one of the two"):
        tp.Budget()
    with pytest.raises(TypeError, match="an example with ms"):
        tp.Budget(ms=3.0)
    with pytest.raises(ValueError, match="measured first"):
        tp.Budget(ms=3.0, example=torch.zeros(1, 8)).loss(torch.zeros(1), [])
    block = tp.AdaptiveBlock(nn.Linear(8, 8), nn.Linear(8, 1), max_steps=4)
    _, ponder = block(torch.randn(5, 8))
    budget = tp.Budget(flops=0.5)
    with pytest.raises(ValueError, match="exits=True"):
        budget.loss(torch.rand(4, 5), ponder, objective="exact")
    with pytest.raises(ValueError, match="one of relaxed"):
        budget.loss(torch.rand(5), ponder, objective="best")
    with pytest.raises(ValueError, match="at least one call"):
        budget.loss(torch.rand(5), [])
    with pytest.raises(ValueError, match="got another record"):
        budget.load_state_dict({"tau": 1})
    with pytest.raises(ValueError, match="got one of 'other'"):
        budget.bind(Classifier(), torch.randn(2, 8)).loss(torch.rand(5), ponder._replace(name="other"))
