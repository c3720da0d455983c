import math

import pytest
import torch
from torch.distributions import RelaxedBernoulli

from tests.problems import assert_mean_is
from torchpact.core.relaxation import bernoulli, logistic_noise, relaxed_bernoulli

COUNT = 200_000


def draw(gamma, temperature, seed=0):
    torch.manual_seed(seed)
    logits = torch.logit(torch.tensor(gamma, dtype=torch.double)).expand(COUNT)
    noise = logistic_noise(logits)
    return relaxed_bernoulli(logits, noise, temperature)[0], bernoulli(logits, noise)


@pytest.mark.parametrize("epsilon", [0.001, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("gamma", [0.05, 0.5, 0.8])
@pytest.mark.parametrize("temperature", [0.1, 2 / 3, 2.0])
def test_sample_is_the_papers_formula_for_given_epsilon(epsilon, gamma, temperature):
    l = math.log(gamma / (1 - gamma)) + math.log(epsilon / (1 - epsilon))
    expected = 1 / (1 + math.exp(-l / temperature))
    sample, rest = relaxed_bernoulli(
        torch.logit(torch.tensor(gamma, dtype=torch.double)),
        torch.logit(torch.tensor(epsilon, dtype=torch.double)),
        temperature,
    )
    assert sample.item() == pytest.approx(expected, rel=1e-12)
    assert rest.item() == pytest.approx(1 - expected, rel=1e-9)


@pytest.mark.parametrize("gamma", [0.02, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("temperature", [0.1, 0.5, 2 / 3, 1.0, 3.0])
def test_exceeds_one_half_with_the_bernoulli_probability_at_any_temperature(gamma, temperature):
    relaxed, hard = draw(gamma, temperature)
    assert_mean_is((relaxed > 0.5).double(), torch.tensor(gamma, dtype=torch.double))
    # more than that: the discrete sample of the same noise is the relaxed one, rounded
    assert torch.equal(relaxed > 0.5, hard)


def test_agrees_with_the_density_in_torch_distributions():
    relaxed, _ = draw(0.3, 2 / 3)
    reference = RelaxedBernoulli(torch.tensor(2 / 3), probs=torch.tensor(0.3))
    grid = torch.linspace(0.0005, 0.9995, 1000)
    density = reference.log_prob(grid).exp().double() * 0.001
    for low, high in [(0.05, 0.2), (0.2, 0.5), (0.5, 0.95)]:
        mass = density[(grid > low) & (grid < high)].sum()
        assert_mean_is(((relaxed > low) & (relaxed < high)).double(), mass, sigmas=6)


def test_low_temperature_approaches_bernoulli():
    distances = []
    for temperature in (1.0, 0.3, 0.1, 0.01):
        relaxed, hard = draw(0.3, temperature)
        distances.append((relaxed - hard.double()).abs().mean().item())
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.005


@pytest.mark.parametrize("temperature", [0.4, 2 / 3, 2.0])
def test_extreme_probabilities_approach_a_delta_whatever_the_temperature(temperature):
    for gamma, point in ((1e-12, 0.0), (1 - 1e-12, 1.0)):
        relaxed, _ = draw(gamma, temperature)
        assert (relaxed - point).abs().mean() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_finite_and_standard_logistic(dtype):
    torch.manual_seed(0)
    noise = logistic_noise(torch.empty(COUNT, dtype=dtype)).double()
    assert noise.isfinite().all()
    assert_mean_is(noise, torch.zeros((), dtype=torch.double))
    assert_mean_is(noise**2, torch.tensor(math.pi**2 / 3, dtype=torch.double))


def test_noise_is_finite_at_the_ends_of_the_unit_interval(monkeypatch):
    for end in (0.0, 1.0):
        monkeypatch.setattr(torch, "rand_like", lambda x, end=end: torch.full_like(x, end))
        noise = logistic_noise(torch.empty(3))
        assert noise.isfinite().all()
        assert noise.abs().min() > 15, "the tails reach as far as single precision lets them"


def test_infinite_logits_give_certain_samples_and_no_nan_gradient():
    logits = torch.tensor([-math.inf, -50.0, 50.0, math.inf], requires_grad=True)
    sample, rest = relaxed_bernoulli(logits, logistic_noise(logits), 2 / 3)
    torch.testing.assert_close(sample, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    torch.testing.assert_close(rest, torch.tensor([1.0, 1.0, 0.0, 0.0]))
    (sample + rest**2).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_a_generator_reproduces_the_noise_and_leaves_the_global_one_alone():
    like = torch.empty(5)
    before = torch.get_rng_state()
    one = logistic_noise(like, torch.Generator().manual_seed(3))
    two = logistic_noise(like, torch.Generator().manual_seed(3))
    assert torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), before)
