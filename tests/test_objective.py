import math

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.problems import Stack


def ponder_of(cost, log_prob=None):
    steps = torch.ones_like(cost, dtype=torch.long)
    return tp.Ponder(cost.detach().unsqueeze(0), steps, cost, cost, log_prob)


def test_map_loss_is_the_mean_over_examples_of_nll_plus_tau_times_mean_cost_over_positions():
    nll = torch.tensor([1.0, 2.0], dtype=torch.double)
    image = torch.rand(2, 1, 3, 4, dtype=torch.double)
    vector = torch.rand(2, 1, dtype=torch.double)
    expected = 0.0
    for b in range(2):
        spatial = sum(image[b, 0, i, j].item() for i in range(3) for j in range(4)) / 12
        expected += (nll[b].item() + 0.5 * spatial + 0.25 * vector[b, 0].item()) / 2
    ponders = [ponder_of(image), ponder_of(vector)]
    assert tp.map_loss(nll, ponders, tau=[0.5, 0.25]).item() == pytest.approx(expected, rel=1e-12)
    tensor = torch.tensor([0.5, 0.25], dtype=torch.double)
    assert tp.map_loss(nll, ponders, tau=tensor).item() == pytest.approx(expected, rel=1e-12)


def test_one_tau_serves_every_block_and_one_ponder_needs_no_list():
    nll, cost = torch.rand(4), torch.rand(4, 1)
    two = tp.map_loss(nll, [ponder_of(cost)] * 2, tau=0.1)
    assert two.item() == pytest.approx((nll.mean() + 0.2 * cost.mean()).item())
    torch.testing.assert_close(
        tp.map_loss(nll, ponder_of(cost), 0.1), tp.map_loss(nll, [ponder_of(cost)], 0.1)
    )
    torch.testing.assert_close(
        tp.map_loss(nll, [ponder_of(cost)] * 2, tau=torch.tensor(0.1)), two, rtol=1e-6, atol=1e-6
    )


def test_a_network_without_blocks_is_charged_nothing():
    nll = torch.rand(4)
    assert tp.map_loss(nll, [], tau=0.1).item() == pytest.approx(nll.mean().item())


def test_act_blocks_are_charged_their_ponder_cost():
    model = Stack()
    with tp.use_mode(model, "act"):
        nll, ponders = model.copies(2)
    rho = tp.act_halting(ponders[0].probs).ponder_cost
    torch.testing.assert_close(tp.map_loss(nll, ponders, 0.1), nll.mean() + 0.1 * rho.mean())


def test_an_empty_batch_costs_nothing_and_has_gradient_zero():
    block = tp.AdaptiveBlock(nn.Linear(2, 2), nn.Linear(2, 1), max_steps=3, mode="discrete")
    output, ponder = block(torch.empty(0, 2))
    for loss in (
        tp.map_loss(output.sum(1), ponder, 0.1),
        tp.reinforce_loss(output.sum(1), ponder, 0.1, tp.EMABaseline()),
    ):
        assert loss.item() == 0
    loss.backward()
    baseline = tp.EMABaseline()
    baseline(torch.empty(0))
    assert baseline(torch.ones(2)).item() == 0, "nothing was seen, so nothing is remembered"
    assert baseline(torch.ones(2)).item() == 1
    assert all(p.grad is not None and not p.grad.any() for p in block.parameters())


def test_reinforce_loss_has_the_gradient_of_equation_26():
    """With log q, nll and N as leaves, the gradient of each can be read off the equation."""
    nll = torch.tensor([1.0, 3.0], requires_grad=True)
    log_q = torch.tensor([[[-0.1, -0.2]], [[-0.3, -0.4]]], requires_grad=True)
    count = torch.tensor([[[2.0, 3.0]], [[1.0, 1.0]]], requires_grad=True)
    tp.reinforce_loss(nll, ponder_of(count, log_q), tau=0.5, baseline=-1.5).backward()
    # the reward is −nll, and we minimise: ∂/∂ log q = −(reward − c)/B = (nll + c)/B
    torch.testing.assert_close(log_q.grad, torch.tensor([[[-0.25, -0.25]], [[0.75, 0.75]]]))
    torch.testing.assert_close(count.grad, torch.full((2, 1, 2), 0.5 / 4))
    torch.testing.assert_close(nll.grad, torch.tensor([0.5, 0.5]))


def test_baseline_is_the_debiased_moving_average_of_earlier_rewards():
    baseline = tp.EMABaseline(decay=0.9)
    rewards = torch.randn(20, 8)
    for t, reward in enumerate(rewards):
        weights = [0.9 ** (t - 1 - i) for i in range(t)]
        expected = sum(w * rewards[i].mean().item() for i, w in enumerate(weights)) / (sum(weights) or 1)
        assert baseline(reward).item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_one_bad_batch_is_not_remembered():
    baseline = tp.EMABaseline()
    baseline(torch.ones(3))
    baseline(torch.tensor([float("nan"), 1.0]))
    baseline(torch.tensor([float("inf"), 1.0]))
    assert baseline(torch.ones(3)).item() == pytest.approx(1)


def test_a_learned_baseline_gets_no_gradient():
    net = nn.Linear(1, 1)
    nll = torch.rand(3, requires_grad=True)
    ponder = ponder_of(torch.rand(3, 1), torch.rand(3, 1).requires_grad_())
    tp.reinforce_loss(nll, ponder, 0.1, lambda reward: net(reward.unsqueeze(1)).squeeze(1)).backward()
    assert net.weight.grad is None
    with pytest.raises(ValueError, match=r"expected a baseline of shape \(\) or \(3,\), got \(3, 1\)"):
        tp.reinforce_loss(nll, ponder, 0.1, lambda reward: net(reward.unsqueeze(1)))


def test_baseline_does_not_learn_in_evaluation():
    baseline = tp.EMABaseline()
    baseline(torch.ones(3))
    baseline.eval()
    baseline(torch.zeros(3))
    assert baseline(torch.zeros(3)).item() == pytest.approx(1)


def test_baseline_saves_and_loads():
    one, two = tp.EMABaseline(), tp.EMABaseline()
    for reward in torch.randn(5, 4):
        one(reward)
    two.load_state_dict(one.state_dict())
    reward = torch.randn(4)
    assert one(reward).item() == two(reward).item()
    assert one(reward).item() == two(reward).item()
    assert repr(one) == "EMABaseline(decay=0.99)"


NLL, PONDER = torch.rand(3), ponder_of(torch.rand(3, 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tp.map_loss(NLL, PONDER, tau=-0.1), r"expected tau in \[0, inf\), got -0.1"),
        (lambda: tp.map_loss(NLL, PONDER, tau=math.nan), "expected tau in .* got nan"),
        (lambda: tp.map_loss(NLL, [PONDER] * 2, tau=[0.1, -1.0]), "got -1.0"),
        (
            lambda: tp.map_loss(NLL, [PONDER], tau=torch.tensor([-0.5])),
            r"expected tau in \[0, inf\), got \[-0.5\]",
        ),
        (lambda: tp.map_loss(NLL, [PONDER], tau=torch.tensor([math.inf])), r"expected tau in \[0, inf\)"),
        (lambda: tp.map_loss(NLL, [PONDER], tau=torch.ones(1, 1)), r"one per block; got shape \(1, 1\)"),
        (lambda: tp.map_loss(NLL, [PONDER] * 3, tau=[0.1, 0.2]), "expected one tau, or 3 .* blocks; got 2"),
        (
            lambda: tp.reinforce_loss(NLL.mean(), PONDER, tau=0.1),
            r"expected one nll per example.*got shape \(\)",
        ),
        (
            lambda: tp.reinforce_loss(NLL, PONDER, tau=0.1),
            "expected ponders of blocks in Discrete mode, got no log_prob in block 0",
        ),
        (
            lambda: tp.reinforce_loss(torch.rand(4), ponder_of(torch.rand(3, 1), torch.rand(3, 1)), 0.1),
            r"expected positions of 4 examples, as in nll; got shape \(3, 1\)",
        ),
        (
            lambda: tp.reinforce_loss(torch.rand(3, 2), PONDER, tau=0.1),
            r"expected one nll per example.*got shape \(3, 2\)",
        ),
        (lambda: tp.map_loss(torch.rand(7), PONDER, tau=0.1), "expected positions of 7 examples, as in nll"),
        (lambda: tp.EMABaseline(decay=1.0), r"expected decay in \[0, 1\), got 1.0"),
    ],
)
def test_wrong_use_is_told_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_baseline_of_the_wrong_kind_is_refused():
    ponder = ponder_of(torch.rand(3, 1), torch.rand(3, 1))
    with pytest.raises(TypeError, match="expected a baseline like EMABaseline"):
        tp.reinforce_loss(NLL, ponder, 0.1, baseline="ema")  # type: ignore[arg-type]


@pytest.mark.parametrize("ponders", [[torch.rand(3)], torch.rand(3)])
def test_what_is_no_ponder_is_refused(ponders):
    with pytest.raises(TypeError, match="expected a Ponder for each block, got Tensor"):
        tp.map_loss(NLL, ponders, tau=0.1)
