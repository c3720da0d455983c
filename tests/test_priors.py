import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchpact as tp
from tests.problems import assert_mean_is


@given(st.floats(1e-3, 5), st.integers(1, 12))
def test_density_is_the_papers_closed_form(tau, max_steps):
    prior = tp.TruncatedGeometric(torch.tensor(tau, dtype=torch.double), max_steps)
    for z in range(1, max_steps + 1):
        density = (math.exp(tau) - 1) / (1 - math.exp(-tau * max_steps)) * math.exp(-tau * z)
        assert prior.log_prob(torch.tensor(z)).item() == pytest.approx(math.log(density), abs=1e-9)


@pytest.mark.parametrize("tau", [0.0, 1e-30, 1e-8, 0.01, 1.0, 50.0, 1000.0])
@pytest.mark.parametrize("max_steps", [1, 2, 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalised_with_exact_moments_from_tiny_to_huge_tau(tau, max_steps, dtype):
    prior = tp.TruncatedGeometric(torch.tensor(tau, dtype=dtype), max_steps)
    # Python's doubles, with the smallest exponent factored out
    weights = [math.exp(-tau * l) for l in range(max_steps)]
    p = [w / sum(weights) for w in weights]
    mean = sum(l * q for l, q in enumerate(p, 1))
    variance = sum(q * (l - mean) ** 2 for l, q in enumerate(p, 1))
    entropy = -sum(q * math.log(q) for q in p if q > 0)
    rel, absolute = (1e-5, 1e-6) if dtype == torch.float32 else (1e-12, 1e-13)
    assert prior.log_prob(prior.enumerate_support()).exp().sum().item() == pytest.approx(
        1, rel=rel, abs=absolute
    )
    assert prior.mean.item() == pytest.approx(mean, rel=rel, abs=absolute)
    assert prior.variance.item() == pytest.approx(variance, rel=rel, abs=absolute)
    assert prior.stddev.item() == pytest.approx(math.sqrt(variance), rel=1e-4, abs=1e-3)
    assert prior.entropy().item() == pytest.approx(entropy, rel=rel, abs=absolute)
    assert prior.mode.item() == 1


def test_zero_tau_is_uniform_and_differentiable():
    tau = torch.zeros((), dtype=torch.double, requires_grad=True)
    prior = tp.TruncatedGeometric(tau, 4)
    torch.testing.assert_close(prior.probs.detach(), torch.full((4,), 0.25, dtype=torch.double))
    prior.log_prob(torch.tensor(4.0)).backward()
    # d/dτ (−τ z + const) at τ = 0 is −(z − E z) = −(4 − 2.5)
    assert tau.grad is not None
    assert tau.grad.item() == pytest.approx(-1.5)


def test_samples_follow_the_density():
    torch.manual_seed(0)
    prior = tp.TruncatedGeometric(torch.tensor([0.1, 1.0], dtype=torch.double), 5)
    samples = prior.sample((100_000,))
    assert samples.shape == (100_000, 2)
    assert prior.support.check(samples).all()
    for z in range(1, 6):
        assert_mean_is((samples == z).double(), prior.log_prob(torch.tensor(float(z))).exp())


def test_expand_shares_storage_and_keeps_the_density():
    prior = tp.TruncatedGeometric(torch.tensor([[0.1], [0.2]]), 3)
    wide = prior.expand((2, 5))
    assert wide.batch_shape == (2, 5)
    assert wide.tau.data_ptr() == prior.tau.data_ptr()
    z = torch.tensor(2.0)
    torch.testing.assert_close(wide.log_prob(z), prior.log_prob(z).expand(2, 5))
    assert wide.sample((7,)).shape == (7, 2, 5)
    assert wide.sample().dtype == prior.tau.dtype
    checked = tp.TruncatedGeometric(torch.tensor([0.1]), 3, validate_args=True).expand((4,))
    with pytest.raises(ValueError, match="within the support"):
        checked.log_prob(torch.tensor(0.0))
    assert wide.enumerate_support().shape == (3, 2, 5)
    assert wide.enumerate_support(expand=False).shape == (3, 1, 1)
    assert wide.mean.shape == wide.variance.shape == wide.entropy().shape == (2, 5)


def test_expected_log_prior_is_minus_tau_times_expected_steps_up_to_a_constant():
    """Eq. 24: what map_loss charges is the log-prior, whatever the halting probabilities are."""
    tau = 0.3
    prior = tp.TruncatedGeometric(torch.tensor(tau, dtype=torch.double), 6)
    h = torch.rand(6, 50, dtype=torch.double)
    log_prior = (tp.stick_breaking(h) * prior.log_prob(prior.enumerate_support()).unsqueeze(1)).sum(0)
    constant = log_prior + tau * tp.expected_steps(h)
    torch.testing.assert_close(constant, constant[:1].expand(50))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tp.TruncatedGeometric(-0.1, 3), r"expected tau in \[0, inf\), got -0.1"),
        (lambda: tp.TruncatedGeometric(torch.tensor([0.1, math.nan]), 3), "expected tau in .* got nan"),
        (lambda: tp.TruncatedGeometric(math.inf, 3), "expected tau in .* got inf"),
        (lambda: tp.TruncatedGeometric(0.1, 0), "expected max_steps to be an integer of at least 1, got 0"),
        (lambda: tp.TruncatedGeometric(0.1, 2.5), "expected max_steps to be an integer"),  # type: ignore[arg-type]
        (
            lambda: tp.TruncatedGeometric(0.1, 3, validate_args=True).log_prob(torch.tensor(4.0)),
            "within the support",
        ),
        (
            lambda: tp.TruncatedGeometric(0.1, 3, validate_args=True).log_prob(torch.tensor(1.5)),
            "within the support",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
