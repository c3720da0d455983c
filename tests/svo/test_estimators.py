"""Estimators of ∇ E_q f(z) against exact enumeration or closed forms."""

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Exponential, Independent

import torchpact as tp
from tests.problems import assert_mean_is, binary_vectors
from torchpact import svo

LENGTH = 4


def chain():
    generator = torch.Generator().manual_seed(1)
    q = svo.LinearChain(LENGTH).double()
    with torch.no_grad():
        q.bias.copy_(torch.randn(LENGTH, generator=generator, dtype=torch.double))
        q.weight.copy_(torch.randn(LENGTH, LENGTH, generator=generator, dtype=torch.double))
    return q


def vector():
    q = svo.BernoulliVector(LENGTH).double()
    with torch.no_grad():
        q.logits.copy_(torch.tensor([-1.0, 0.3, 0.8, 2.0], dtype=torch.double))
    return q


def f(z):
    weights = torch.tensor([1.0, -2.0, 0.5, 1.5], dtype=torch.double)
    return torch.sin(z @ weights) + 2 * z[:, 0] * z[:, 2] - (z[:, 1] - 0.3) ** 2


def flat(gradients):
    return torch.cat([g.flatten() for g in gradients])


def exact_gradient(q):
    z = binary_vectors(LENGTH)
    return flat(torch.autograd.grad((q().log_prob(z).exp() * f(z)).sum(), list(q.parameters())))


def naive_log_prob(q, z):
    total = 0.0
    for i in range(LENGTH):
        logit = q.bias[i] + sum(q.weight[i, j] * (2 * z[j] - 1) for j in range(i))
        p = logit.sigmoid()
        total = total + (p if z[i] == 1 else 1 - p).log()
    return total


def test_chain_has_the_product_of_its_conditionals_as_density():
    q = chain()
    z = binary_vectors(LENGTH)
    expected = torch.stack([naive_log_prob(q, row) for row in z])
    torch.testing.assert_close(q().log_prob(z), expected)
    assert q().log_prob(z).exp().sum().item() == pytest.approx(1)


def test_chain_samples_follow_its_density():
    torch.manual_seed(0)
    q = chain()
    samples = q().sample((100_000,))
    for z in binary_vectors(LENGTH):
        assert_mean_is((samples == z).all(-1).double(), q().log_prob(z).exp().detach())


def test_relaxed_chain_rounds_to_the_chain_at_low_temperature():
    torch.manual_seed(0)
    q = chain()
    with torch.no_grad():
        relaxed = q().relaxed_rsample(0.001, (50_000,))
    # no sample of noise lands close enough to zero to matter at this temperature, all but one in a thousand
    hard = relaxed.round()
    for z in binary_vectors(LENGTH):
        probability = q().log_prob(z).exp().item()
        assert (hard == z).all(-1).double().mean().item() == pytest.approx(probability, abs=0.01)


def test_sample_shapes_follow_torch_distributions():
    q = chain()()
    assert q.sample().shape == (LENGTH,)
    assert q.sample((2, 3)).shape == (2, 3, LENGTH)
    assert q.log_prob(q.sample((2, 3))).shape == (2, 3)
    assert q.mode.shape == (LENGTH,)
    assert not q.sample().requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("make", [chain, vector])
@pytest.mark.parametrize("baseline", [None, tp.EMABaseline()])
def test_reinforce_is_unbiased(make, baseline):
    """Compares at most 20 numbers at 5.5 standard errors: a false alarm once in a million."""
    torch.manual_seed(0)
    q = make()
    statistics = svo.gradient_statistics(f, q, svo.Reinforce(baseline), samples=50_000, chunk=500)
    distance = (statistics.mean - exact_gradient(q)).abs() / (statistics.standard_error + 1e-12)
    assert distance.max() < 5.5


@pytest.mark.slow
@pytest.mark.parametrize(("make", "samples"), [(chain, 40_000), (vector, 100_000)])
def test_concrete_bias_shrinks_with_temperature_and_its_variance_is_below_reinforce(make, samples):
    torch.manual_seed(0)
    q = make()
    exact = exact_gradient(q)
    biases, errors = [], []
    for temperature in (2.0, 0.5, 0.1):
        statistics = svo.gradient_statistics(f, q, svo.Concrete(temperature), samples=samples)
        biases.append((statistics.mean - exact).norm().item())
        errors.append(statistics.standard_error.norm().item())
    for warm, cold, error in zip(biases, biases[1:], errors[1:], strict=False):
        assert cold + 3 * error < warm
    relaxed = svo.gradient_statistics(f, q, svo.Concrete(), samples=5000).variance.sum()
    score = svo.gradient_statistics(f, q, svo.Reinforce(), samples=5000).variance.sum()
    assert relaxed < score


def test_reparameterized_normal_has_the_gradient_of_the_closed_form():
    """E Σ a z² under N(m, s²) is Σ a (m² + s²): gradients 2 a m and, for log s, 2 a s²."""
    torch.manual_seed(0)
    q = svo.NormalVector(3, scale=0.5).double()
    a = torch.tensor([1.0, -2.0, 0.5], dtype=torch.double)
    with torch.no_grad():
        q.mean.copy_(torch.tensor([0.3, -1.0, 2.0]))
    expected = torch.cat([2 * a * q.mean, 2 * a * q.log_scale.exp() ** 2]).detach()
    statistics = svo.gradient_statistics(
        lambda z: (a * z**2).sum(-1), q, "reparameterization", samples=20_000
    )
    assert ((statistics.mean - expected).abs() / statistics.standard_error).max() < 5.5


def test_any_rsample_distribution_will_do():
    class Rate(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_rate = nn.Parameter(torch.zeros(2))

        def forward(self):
            return Independent(Exponential(self.log_rate.exp()), 1)

    torch.manual_seed(0)
    statistics = svo.gradient_statistics(lambda z: z.sum(-1), Rate(), "reparameterization", samples=20_000)
    # E z = 1/rate, so d/d log rate = −1/rate = −1
    assert ((statistics.mean + 1).abs() / statistics.standard_error).max() < 5.5


def test_the_default_temperature_is_the_papers():
    assert svo.Concrete() == svo.Concrete(temperature=2 / 3)


def test_gradient_statistics_equal_a_loop_over_samples():
    q = vector()
    torch.manual_seed(3)
    statistics = svo.gradient_statistics(f, q, "concrete", samples=10, chunk=4)
    torch.manual_seed(3)
    rows = []
    for count in (4, 4, 2):
        surrogate = svo.Concrete()(f, q(), count)
        rows += [flat(torch.autograd.grad(s, list(q.parameters()), retain_graph=True)) for s in surrogate]
    torch.testing.assert_close(statistics.mean, torch.stack(rows).mean(0))
    torch.testing.assert_close(statistics.variance, torch.stack(rows).var(0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: svo.Reinforce()(lambda z: z.sum(-1), Bernoulli(torch.full((4,), 0.5)), 4),
            r"expected q.log_prob to give 4 values, got shape \(4, 4\); .*Independent",
        ),
        (
            lambda: svo.gradient_statistics(f, vector(), "concrete", chunk=0),
            "expected chunk to be an integer",
        ),
        (lambda: svo.Concrete(temperature=0), r"expected temperature in \(0, inf\), got 0"),
        (lambda: svo.Concrete()(f, svo.NormalVector(4)(), 2), "expected a q over binary vectors, got"),
        (lambda: svo.Reparameterization()(f, vector()(), 2), "expected a q with rsample.*concrete"),
        (lambda: svo.Reinforce()(lambda z: z, vector()(), 3), r"f to give 3 values .* got shape \(3, 4\)"),
        (lambda: svo.Reinforce()(lambda z: 1.0, vector()(), 3), "f to give 3 values for 3 samples, got 1.0"),  # type: ignore[arg-type,return-value]
        (
            lambda: svo.ChainedBernoulli(lambda z: z, 2).sample((3,)),
            "expected the conditional to give 3 logits",
        ),
        (
            lambda: svo.gradient_statistics(f, vector(), "adam"),
            "reparameterization, reinforce, concrete; got 'adam'",
        ),
    ],
)
def test_wrong_use_is_told_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
