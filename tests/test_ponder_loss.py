import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchpact as tp
from torchpact.core.objective import ponder_loss

LENGTHS = st.integers(1, 6)


def by_enumeration(losses, h, tau, beta):
    """The definition, one example and one iteration at a time, in plain numbers."""
    length, total = len(losses), 0.0
    prior = [math.exp(-tau * (l + 1)) for l in range(length)]
    prior = [p / sum(prior) for p in prior]
    for example in range(len(losses[0])):
        left = 1.0
        for l in range(length):
            q = left * (h[l][example] if l < length - 1 else 1.0)
            left -= q
            total += q * losses[l][example] + beta * (q * math.log(q / prior[l]) if q > 0 else 0.0)
    return total / len(losses[0])


@given(LENGTHS, st.integers(1, 4), st.floats(0, 2), st.floats(0, 3), st.integers(0, 1000))
def test_loss_is_the_expectation_over_iterations_and_the_divergence_from_the_prior(
    length, batch, tau, beta, seed
):
    generator = torch.Generator().manual_seed(seed)
    losses = torch.rand(length, batch, dtype=torch.double, generator=generator)
    logits = 3 * torch.randn(length, batch, dtype=torch.double, generator=generator)
    expected = by_enumeration(losses.tolist(), logits.sigmoid().tolist(), tau, beta)
    assert ponder_loss(losses, logits, tau, beta).item() == pytest.approx(expected)


def test_the_best_halting_is_the_posterior():
    """E_q[loss] + KL(q ‖ p) is least where q is p·exp(−loss), normalised, and is −log of the sum there."""
    losses = torch.tensor([[0.3], [2.0], [0.1], [0.7]], dtype=torch.double)
    posterior = tp.TruncatedGeometric(0.4, 4).probs.double() * (-losses[:, 0]).exp()
    q = posterior / posterior.sum()
    h = q / q.flip(0).cumsum(0).flip(0)
    logits = torch.logit(h).unsqueeze(1)
    logits[-1] = 0
    logits.requires_grad_()
    loss = ponder_loss(losses, logits, tau=0.4, beta=1)
    assert loss.item() == pytest.approx(-math.log(posterior.sum().item()), abs=1e-6)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-6


def test_gradcheck():
    losses = torch.rand(4, 3, dtype=torch.double, requires_grad=True)
    logits = torch.randn(4, 3, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: ponder_loss(a, b, 0.3, 0.7), (losses, logits))


@pytest.mark.parametrize("logit", [50.0, -50.0, 300.0, math.inf, -math.inf])
def test_saturated_logits_give_finite_losses_and_gradients(logit):
    losses = torch.rand(4, 3, requires_grad=True)
    logits = torch.full((4, 3), logit, requires_grad=True)
    loss = ponder_loss(losses, logits, 0.3)
    loss.backward()
    assert loss.isfinite()
    for x in (losses, logits):
        assert x.grad is not None
        assert x.grad.isfinite().all()


def test_an_empty_batch_costs_nothing():
    assert ponder_loss(torch.zeros(3, 0), torch.zeros(3, 0), 0.1).item() == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ponder_loss(torch.zeros(3, 2), torch.zeros(2, 2), 0.1),
            r"expected losses and logits of shape \(iterations, batch\), got \(3, 2\) and \(2, 2\)",
        ),
        (lambda: ponder_loss(torch.zeros(3), torch.zeros(3), 0.1), r"got \(3,\) and \(3,\)"),
        (
            lambda: ponder_loss(torch.zeros(3, 1), torch.zeros(3, 1), -1),
            r"expected tau in \[0, inf\), got -1",
        ),
        (lambda: ponder_loss(torch.zeros(3, 1), torch.zeros(3, 1), 1, -1), r"expected beta in \[0, inf\)"),
    ],
)
def test_wrong_use_is_told_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
