import math

import pytest
import torch
from torch import nn
from torch.distributions import AffineTransform, Independent, Normal, TransformedDistribution

import torchpact as tp
from tests.problems import quadratic_binary
from torchpact import svo


def rastrigin(z):
    """Many local maxima around a single global one, 0 at the origin."""
    return -(z**2 - torch.cos(2 * math.pi * z) + 1).sum(-1)


def test_normal_search_finds_the_global_optimum_among_many_local_ones():
    q = svo.NormalVector(5, scale=2.0)
    with torch.no_grad():
        q.mean.copy_(torch.tensor([2.2, -1.7, 3.1, 0.8, -2.6]))
    result = svo.maximize(rastrigin, q, "reparameterization", iterations=1500, seed=0)
    torch.testing.assert_close(result.argmax, torch.zeros(5), rtol=0, atol=0.02)
    assert result.value > -0.02


@pytest.mark.parametrize("estimator", ["concrete", "reinforce"])
def test_chain_finds_the_optimum_of_twenty_binary_variables(estimator):
    matrix, best = quadratic_binary(20)

    def f(z):
        # multilinear, so that it is smooth on the cube and its maximum lies at a corner
        return ((z @ matrix.triu(1)) * z).sum(-1) + z @ matrix.diagonal()

    result = svo.maximize(f, svo.LinearChain(20), estimator, iterations=600, samples=32, seed=0)
    optimum = f(best.unsqueeze(0)).item()
    assert result.value == pytest.approx(optimum, rel=1e-5)
    assert torch.equal(result.argmax, best)
    # the bound holds for every q, and is tight in the end
    assert (result.bound <= optimum + 1e-4).all()
    assert result.bound[-20:].mean().item() == pytest.approx(optimum, rel=0.02)
    assert result.bound[:20].mean() < result.bound[-20:].mean()


def test_histories_hold_the_gradients_moments():
    """f = w·z under a fixed q: every sample's gradient has the same mean and variance."""
    q = svo.BernoulliVector(3).double()
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.double)

    def f(z):
        return z @ weights

    torch.manual_seed(0)
    wanted = svo.gradient_statistics(f, q, svo.Reinforce(None), samples=20_000)
    result = svo.maximize(f, q, svo.Reinforce(None), iterations=2000, samples=8, lr=0.0, seed=0)
    total = wanted.variance.sum().item()
    assert result.gradient_variance.mean().item() == pytest.approx(total, rel=0.05)
    # E‖mean of 8‖² = ‖mean‖² + variance/8
    square = wanted.mean.square().sum().item() + total / 8
    assert result.gradient_norm.square().mean().item() == pytest.approx(square, rel=0.05)
    # E f = Σ w/2
    assert result.bound.mean().item() == pytest.approx(-0.25, abs=0.05)


def test_a_seed_makes_it_reproducible_and_leaves_the_global_generator_alone():
    def run(seed):
        return svo.maximize(lambda z: z.sum(-1), svo.BernoulliVector(3), "concrete", iterations=5, seed=seed)

    before = torch.get_rng_state()
    one, two, other = run(1), run(1), run(2)
    assert torch.equal(one.bound, two.bound)
    assert not torch.equal(one.bound, other.bound)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_q_without_a_mode_gives_its_best_sample():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(2))

        def forward(self):
            base = Independent(Normal(torch.zeros(2), torch.ones(2)), 1)
            return TransformedDistribution(base, [AffineTransform(self.shift, 0.1)])

    def f(z):
        return -((z - 1) ** 2).sum(-1)

    result = svo.maximize(f, Shifted(), "reparameterization", iterations=200, seed=0)
    torch.testing.assert_close(result.argmax, torch.ones(2), rtol=0, atol=0.1)
    assert result.value == f(result.argmax.unsqueeze(0)).item()


def test_any_optimizer_will_do():
    result = svo.maximize(
        lambda z: z.sum(-1), svo.BernoulliVector(3), "reinforce", optimizer=torch.optim.SGD, lr=1.0, seed=0
    )
    assert torch.equal(result.argmax, torch.ones(3))
    assert "Result(value=3" in repr(result)


def total(z):
    return z.sum(-1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: svo.maximize(total, svo.BernoulliVector(2), "concrete", samples=3),
            ValueError,
            "expected an even number of samples, got 3",
        ),
        (
            lambda: svo.maximize(total, svo.BernoulliVector(2), "concrete", iterations=0),
            ValueError,
            "expected iterations to be an integer of at least 1, got 0",
        ),
        (lambda: svo.maximize(total, nn.Identity(), "concrete"), ValueError, "parameters to learn, got none"),
        (lambda: svo.maximize(total, total, "concrete"), TypeError, "expected q to be an nn.Module"),  # type: ignore[arg-type]
        (
            lambda: svo.maximize(total, svo.BernoulliVector(2), svo.Concrete),  # type: ignore[arg-type]
            TypeError,
            "expected an estimator or its name",
        ),
        (
            lambda: svo.maximize(lambda z: z.sum(-1) / 0, svo.BernoulliVector(2), "concrete"),
            FloatingPointError,
            "f gave NaN or infinity in iteration 0",
        ),
        (lambda: svo.NormalVector(2, scale=0), ValueError, r"expected scale in \(0, inf\), got 0"),
        (lambda: svo.LinearChain(0), ValueError, "expected length to be an integer of at least 1, got 0"),
    ],
)
def test_wrong_use_is_told_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_q_that_gives_no_distribution_is_refused():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.zeros(1))

        def forward(self):
            return self.p

    with pytest.raises(TypeError, match="expected q\\(\\) to give a torch Distribution, got Parameter"):
        svo.maximize(total, Wrong(), "concrete")


def test_the_package_names_its_estimators():
    assert set(tp.svo.ESTIMATORS) == {"reparameterization", "reinforce", "concrete"}
