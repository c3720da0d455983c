"""The autoencoder's bound against integration over codes, what training makes of it, and what is chosen."""

import json
import math

import pytest
import torch
from torch import nn

from tests.experiments.synthetic import one_run
from torchpact_recipes.experiments import SCALES, vae
from torchpact_recipes.experiments.vae.measure import choose
from torchpact_recipes.experiments.vae.model import DrawingVAE
from torchpact_recipes.experiments.vae.training import VaeConfig, VaeRun, evaluate, fit

FAST = SCALES["fast"]
PIXELS, L = 3, 3
IMAGES = torch.tensor([[(k >> bit) & 1 for bit in range(PIXELS)] for k in range(2**PIXELS)]).double()
GRID = torch.linspace(-8, 8, 16001, dtype=torch.double)
STEP = float(GRID[1] - GRID[0])


def normal(x):
    return torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)


@pytest.fixture
def net():
    """One whose halting depends on v: in thresholded mode it takes 1, 2 and 3 steps."""
    torch.manual_seed(26)
    net = DrawingVAE(PIXELS, latents=1, width=4, encoder=4, max_steps=L, halting_bias=0.0).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=1.0)
    return net


def canvases(net, v):
    """u¹ … u^L for codes, by the formula of the module."""
    step, u, found = net.decoder.step_at(0), v.new_zeros(len(v), net.width), []
    for _ in range(L):
        u = u + step.write(nn.functional.silu(step.read(step.norm(u)) + v @ step.recall.weight.T))
        found.append(u)
    return found


def likelihoods(net, v):
    """log p(x | v, z = l) of every image, (L, codes, images), and h¹ … h^(L − 1), (L − 1, codes)."""
    us = canvases(net, v)
    pixels = torch.distributions.Bernoulli(logits=torch.stack([net.pixels(u) for u in us])[:, :, None])
    h = [head(u).sigmoid()[:, 0] for head, u in zip(net.decoder.halting, us, strict=False)]
    return pixels.log_prob(IMAGES).sum(-1), torch.stack(h[: L - 1])


def halting(h):
    """q(z = 1), q(z = 2) and q(z = 3)."""
    return torch.stack([h[0], (1 - h[0]) * h[1], (1 - h[0]) * (1 - h[1])])


@pytest.mark.parametrize("mode", ["thresholded", "discrete"])
@torch.no_grad()
def test_bound_and_divergence_from_the_posterior_sum_to_the_log_likelihood(net, mode):
    each, h = likelihoods(net, GRID[:, None])
    if mode == "thresholded":
        h = (h > 0.5).double()
        assert set((h.cumsum(0) < 0.5).sum(0).tolist()) == {0, 1, 2}
    given_v = (halting(h)[:, :, None] * each.exp()).sum(0)  # p(x | v)
    p = (normal(GRID)[:, None] * given_v).sum(0) * STEP
    assert float(p.sum()) == pytest.approx(1, abs=1e-6)
    for k, x in enumerate(IMAGES):
        mean, log_sd = (part.squeeze() for part in net.encode(x[None]))
        v = mean + log_sd.exp() * GRID  # where ε is on the grid
        each, h = likelihoods(net, v[:, None])
        if mode == "thresholded":
            bound = net(x.expand(len(GRID), -1), GRID[:, None], mode="thresholded").elbo
            h = (h > 0.5).double()
            log_p = (halting(h) * each[:, :, k]).sum(0)
            posterior = (normal(v) * log_p.exp() / p[k]).log()
            divergence = (normal(GRID) * (normal(GRID).log() - log_sd - posterior)).sum() * STEP
            total = (normal(GRID) * bound).sum() * STEP
            assert float(total + divergence) == pytest.approx(float(p[k].log()), abs=1e-4)
        else:
            torch.manual_seed(k)
            chosen = GRID[::200][20:-20, None]
            kl = torch.distributions.kl_divergence(
                torch.distributions.Normal(mean, log_sd.exp()), torch.distributions.Normal(0.0, 1.0)
            )
            h, some = h[:, ::200][:, 20:-20], each[:, ::200, k][:, 20:-20]
            expected = (halting(h) * some).sum(0) - kl
            draws = torch.stack(
                [net(x.expand(len(chosen), -1), chosen, mode="discrete").elbo for _ in range(400)]
            )
            error = (draws.mean(1) - expected.mean()).std() / 20  # of 400 draws
            # five standard errors: one false alarm in two million
            assert float(draws.mean() - expected.mean()) == pytest.approx(0, abs=5 * float(error))


@torch.no_grad()
def test_a_fixed_number_of_steps_is_what_heads_that_never_fire_take(net):
    for head in net.decoder.halting:
        nn.init.zeros_(head.weight)
        nn.init.constant_(head.bias, -60.0)
    noise = torch.randn(len(IMAGES), 1).double()
    fixed = net(IMAGES, noise, steps=L)
    for mode in ("thresholded", "relaxed"):
        found = net(IMAGES, noise, mode=mode)
        assert torch.allclose(found.elbo, fixed.elbo, atol=1e-9)
        assert found.ponder.steps.flatten().tolist() == [L] * len(IMAGES)


@torch.no_grad()
def test_the_posterior_is_never_wider_than_the_prior(net):
    _, log_sd = net.encode(100 * torch.randn(50, PIXELS).double())
    assert float(log_sd.max()) <= 0


def tiny(method, **settings):
    sizes = {"iterations": 60, "batch": 16, "latents": 2, "width": 8, "encoder": 8, "max_steps": 3}
    return VaeConfig(method, **sizes | settings)


def squares(count=200):
    """Images of 784 pixels that are dark but for one of four quarters."""
    torch.manual_seed(0)
    images = torch.zeros(count, 28, 28, dtype=torch.bool)
    for k, image in enumerate(images):
        row, column = 14 * (k % 2), 14 * (k // 2 % 2)
        image[row : row + 14, column : column + 14] = True
    return images.flatten(1)


@pytest.mark.parametrize("method", ["fixed", "relaxed", "act"])
def test_training_raises_the_bound_and_is_the_same_again(method):
    images, config = squares(), tiny(method, tau=0.1)
    net, history = fit(config, images, images[:20])
    torch.manual_seed(0)
    mode = config.modes[-1]
    before, after = (evaluate(n, config, images, mode) for n in (config.network(), net))
    assert after["elbo"] > before["elbo"] + 100
    assert sum(after["share"]) == pytest.approx(1)
    assert history[-1]["iteration"] == 60
    again, _ = fit(config, images, images[:20])
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


def test_evaluation_leaves_the_random_state_alone():
    config = tiny("relaxed")
    net, images = config.network(), squares(8)
    state = torch.get_rng_state()
    found = [evaluate(net, config, images, mode) for mode in config.modes for _ in range(2)]
    assert torch.equal(state, torch.get_rng_state())
    assert found[0] == found[1]


def test_a_loss_that_is_not_finite_is_said_in_one_line():
    with pytest.raises(ValueError, match="expected a finite loss, got nan in iteration"):
        fit(tiny("fixed", lr=1e30), squares(), squares(8))


def write(archive, bounds):
    """Runs of one seed with these bounds on validation images, and the opposite on test images."""
    runs = []
    for (method, number), bound in bounds.items():
        fixed = method == "fixed"
        config = VaeConfig(method, number if fixed else 8, 0.0 if fixed else number)
        result = {"elbo": bound, "steps": 3.0, "share": [0.0, 0.0, 1.0], "error": 0.1, "kl": 1.0}
        results = {
            "validation": {config.modes[-1]: result},
            "test": {config.modes[-1]: {**result, "elbo": -bound}},
        }
        one_run(archive, VaeRun(config), results)
        runs.append(VaeRun(config))
    return runs


def test_the_highest_price_that_loses_nothing_on_validation_images_is_chosen(archive):
    bounds = {
        ("fixed", 1): -150, ("fixed", 2): -140, ("fixed", 3): -141,
        ("relaxed", 0.3): -138, ("relaxed", 0.6): -140, ("relaxed", 1.2): -140.1,
        ("act", 0.3): -143, ("act", 0.6): -142, ("act", 1.2): -144,
    }  # fmt: skip
    found = choose(write(archive, bounds), archive)
    assert (found.fixed, found.relaxed, found.act) == ("vae-fixed2", "vae-relaxed-tau0.6", "vae-act-tau0.6")


def test_a_method_without_finished_runs_is_said_in_one_line(archive):
    runs = write(archive, {("fixed", 1): -150, ("relaxed", 0.3): -138})
    with pytest.raises(ValueError, match="expected finished runs of method act"):
        choose(runs, archive)


def test_runs_have_a_name_each_and_configurations_come_back(archive):
    found = vae.runs(FAST, [0, 1, 2])
    assert len({run.name for run in found}) == len(found) == 3 * (8 + 2 * 3)
    for run in found:
        assert VaeConfig.from_dict(json.loads(json.dumps(run.config.to_dict()))) == run.config
