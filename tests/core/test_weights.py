"""What a ponder knows of its block, and how positions weigh in objectives."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchpact as tp
from torchpact.core.ponder import mean_over_positions, without_details


def tokens(
    mode: str = "relaxed", name: str = "", price: float = 1.0
) -> tuple[tp.AdaptiveBlock, torch.Tensor]:
    torch.manual_seed(0)
    step = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    block = tp.AdaptiveBlock(step, nn.Linear(4, 1), max_steps=4, mode=mode, name=name, price=price)
    return block.double(), torch.randn(3, 5, 4, dtype=torch.double)


REAL = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 1]], dtype=torch.double)[:, :, None]


@pytest.mark.parametrize("mode", ["relaxed", "discrete", "thresholded", "act"])
def test_map_loss_averages_over_real_positions_only(mode):
    block, u = tokens(mode)
    _, ponder = block(u, weights=REAL)
    nll = torch.rand(3, dtype=torch.double)
    expected = 0.0
    for b, count in enumerate((5, 3, 1)):
        real = [ponder.cost[b, t, 0].item() for t in range(5) if REAL[b, t, 0]]
        assert len(real) == count
        expected += (nll[b].item() + 0.3 * sum(real) / count) / 3
    assert tp.map_loss(nll, ponder, tau=0.3).item() == pytest.approx(expected, rel=1e-12)
    unweighted = tp.map_loss(nll, ponder._replace(weights=None), tau=0.3).item()
    assert unweighted != pytest.approx(expected, rel=1e-3)


def test_reinforce_loss_reads_decisions_of_real_positions_only():
    """Eq. 26 term by term: the likelihood, the score of the decisions of real positions, and their cost."""
    block, u = tokens("discrete")
    _, ponder = block(u, weights=REAL)
    nll, c, expected = torch.rand(3, dtype=torch.double), -0.25, 0.0
    for b, count in enumerate((5, 3, 1)):
        log_q = cost = 0.0
        for t in range(5):
            if REAL[b, t, 0]:
                log_q += ponder.log_prob[b, t, 0].item()
                cost += ponder.cost[b, t, 0].item() / count
        expected += (nll[b].item() - (-nll[b].item() - c) * log_q + 0.3 * cost) / 3
    loss = tp.reinforce_loss(nll, ponder, tau=0.3, baseline=c)
    assert loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("loss", ["map", "reinforce"])
def test_what_padding_holds_changes_neither_loss_nor_gradients(loss):
    found = []
    for padding in (0.0, 5.0, -100.0):
        block, u = tokens("relaxed" if loss == "map" else "discrete")
        torch.manual_seed(1)
        output, ponder = block(torch.where(REAL > 0, u, padding), weights=REAL)
        nll = (output * REAL).square().sum((1, 2))
        value = tp.map_loss(nll, ponder, 0.3) if loss == "map" else tp.reinforce_loss(nll, ponder, 0.3)
        found.append([value, *torch.autograd.grad(value, list(block.parameters()))])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b)


def test_a_cost_that_is_no_number_does_not_count_where_it_weighs_nothing():
    values = torch.tensor([[1.0, math.nan], [math.inf, 3.0]], requires_grad=True)
    mean = mean_over_positions(values, torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    assert mean.tolist() == [1, 3]
    (gradient,) = torch.autograd.grad(mean.sum(), values)
    assert gradient.tolist() == [[1, 0], [0, 1]]


@given(st.lists(st.lists(st.floats(0, 4), min_size=3, max_size=3), min_size=1, max_size=4))
def test_weights_average_as_repeated_positions_would(rows):
    weights = torch.tensor(rows, dtype=torch.double).round()
    values = torch.arange(weights.numel(), dtype=torch.double).view(weights.shape)
    expected = []
    for row, counts in zip(values.tolist(), weights.tolist(), strict=True):
        repeated = [value for value, count in zip(row, counts, strict=True) for _ in range(int(count))]
        expected.append(sum(repeated) / len(repeated) if repeated else 0.0)
    assert mean_over_positions(values, weights).tolist() == pytest.approx(expected)


def test_weights_broadcast_and_equal_ones_are_as_none():
    block, u = tokens("thresholded")
    nll = torch.rand(3, dtype=torch.double)
    expected = tp.map_loss(nll, block(u)[1], tau=0.3)
    for weights in (torch.ones(1, 1, 1), torch.full((3, 1, 1), 0.5), torch.ones(1, 5, 1, dtype=torch.bool)):
        torch.testing.assert_close(tp.map_loss(nll, block(u, weights=weights)[1], tau=0.3), expected)


def test_weights_change_nothing_but_how_a_run_is_averaged():
    block, u = tokens("thresholded")
    output, ponder = block(u)
    weighed, other = block(u, weights=REAL)
    assert torch.equal(weighed, output)
    assert other.weights is REAL
    for name in ("probs", "steps", "expected_steps", "cost"):
        assert torch.equal(getattr(other, name), getattr(ponder, name))


@pytest.mark.parametrize("details", [True, False])
@torch.no_grad()
def test_a_ponder_knows_name_and_price_of_its_block(details):
    block, u = tokens("thresholded", name="encoder.2", price=2.5)
    block.details = details
    _, ponder = block(u, weights=REAL)
    assert (ponder.name, ponder.price) == ("encoder.2", 2.5)
    for other in (ponder.map(torch.clone), without_details(ponder)):
        assert (other.name, other.price) == ("encoder.2", 2.5)
        assert other.weights is not None
        assert torch.equal(other.weights, REAL)
    assert tokens()[0](u)[1][5:8] == (None, "", 1.0)


def test_prices_do_not_enter_the_objectives():
    nll, results = torch.rand(3, dtype=torch.double), []
    for price in (1.0, 10.0):
        block, u = tokens("thresholded", price=price)
        results.append(tp.map_loss(nll, block(u)[1], tau=0.3))
    assert torch.equal(*results)


def test_a_mean_will_do_for_map_loss_and_not_for_reinforce_loss():
    block, u = tokens("discrete")
    _, ponder = block(u, weights=REAL)
    nll = torch.rand(3, dtype=torch.double)
    assert torch.equal(tp.map_loss(nll.sum() / 3, [ponder] * 2, 0.3), tp.map_loss(nll, [ponder] * 2, 0.3))
    with pytest.raises(ValueError, match=r"^expected one nll per example, .* got shape \(\)$"):
        tp.reinforce_loss(nll.mean(), ponder, 0.3)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda block, u: block(u, weights=torch.ones(3, 5)),
            ValueError,
            r"expected weights that broadcast to the decisions' \(3, 5, 1\) without .*, got \(3, 5\)",
        ),
        (
            lambda block, u: block(u, weights=torch.ones(3, 4, 1)),
            ValueError,
            r"expected weights that broadcast to .*, got \(3, 4, 1\)",
        ),
        (
            lambda block, u: block(u, weights=[1.0]),
            ValueError,
            "expected weights that broadcast to .*, got list",
        ),
        (
            lambda block, u: tp.AdaptiveBlock(nn.Tanh(), nn.Linear(4, 1), max_steps=2, price=0.0),
            ValueError,
            r"expected price in \(0, inf\), got 0.0",
        ),
    ],
)
def test_wrong_use_is_told_in_one_line(call, kind, message):
    with pytest.raises(kind, match=f"^{message}") as error:
        call(*tokens())
    assert "\n" not in str(error.value)
