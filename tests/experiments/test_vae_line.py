"""Objectives on lines in parameter space: slopes against autograd, jumps against the formula of ACT."""

import pytest
import torch
from torch import nn

import torchpact as tp
from torchpact_recipes.experiments.vae.line import Objective, change_over, halting_line, jumps, random_line
from torchpact_recipes.experiments.vae.model import DrawingVAE

TAU = 0.3


def objective(mode, images=6):
    torch.manual_seed(0)
    net = DrawingVAE(5, latents=2, width=6, encoder=4, max_steps=5, halting_bias=-1.0).double()
    for name, p in net.named_parameters():
        if name.startswith("decoder.halting.") and name.endswith("weight"):
            nn.init.normal_(p, std=0.3)
    x = torch.randint(2, (images, 5)).double()
    return Objective(net, x, torch.randn(images, 2).double(), mode, TAU)


@pytest.mark.parametrize("mode", ["relaxed", "act"])
def test_slopes_are_gradients_times_the_direction(mode):
    one = objective(mode)
    line = random_line(one.net, "", 1)
    drawn = tp.ACT() if mode == "act" else tp.Relaxed(generator=torch.Generator().manual_seed(one.seed))
    bound = one.net(one.x, one.noise, mode=drawn)
    total = (bound.elbo - TAU * bound.ponder.cost.flatten()).sum()
    found = one.at(line, 0.0)
    for value, slope, wanted in (
        (total, found.slope, found.objective),
        (bound.elbo.sum(), found.elbo_slope, found.elbo),
    ):
        one.net.zero_grad()
        value.backward(retain_graph=True)
        by_backward = sum((p.grad * line.direction[name]).sum() for name, p in one.net.named_parameters())
        assert float(wanted.sum()) == pytest.approx(value.item())
        assert float(slope.sum()) == pytest.approx(float(by_backward))


@pytest.mark.parametrize("part", ["", "encoder.", "decoder.halting."])
def test_pact_changes_by_what_its_pathwise_derivative_adds_up_to(part):
    one = objective("relaxed")
    found = change_over(one, random_line(one.net, part, 1), 0.02)
    assert abs(found.change) > 1e-4
    assert found.pathwise == pytest.approx(found.change, rel=1e-6)
    assert found.elbo_pathwise == pytest.approx(found.elbo_change, rel=1e-6)


def test_act_changes_by_that_and_by_its_jumps():
    one = objective("act", images=1)
    line = halting_line(one.net)
    middle = jumps(one, line, [k / 10 for k in range(-20, 21)])[0].t
    for name, p in one.net.named_parameters():  # so that the jump is at 0
        if name in line.direction:
            p.data += (middle + 0.01) * line.direction[name]
    (jump,) = jumps(one, line, [-0.1, 0.1])
    found = change_over(one, line, 0.1)
    assert abs(jump.objective) > 0.1
    assert found.crossed == 1
    # 1e-4 is what three points miss of a derivative that has a step there
    assert found.change - found.pathwise == pytest.approx(jump.objective, abs=1e-2)


def test_jumps_of_act_are_of_the_size_that_its_formula_gives():
    one = objective("act", images=1)
    line = halting_line(one.net)
    found = jumps(one, line, [k / 10 for k in range(-20, 31)])
    assert len(found) >= 2
    for jump in found:
        before, after = jump.steps
        assert after == before - 1  # heads that are more likely to fire
        # h_N of the smaller number of steps, at the jump
        net = objective("act", images=1).net
        for name, p in net.named_parameters():
            if name in line.direction:
                p.data += jump.t * line.direction[name]
        h = net(one.x, one.noise, mode="act").ponder.probs.detach().flatten()
        assert float(h[:after].sum()) == pytest.approx(1 - 0.01, abs=1e-6)
        # ρ = N + R falls by 1 − h_N
        assert jump.objective - jump.elbo == pytest.approx(TAU * (1 - float(h[after - 1])), abs=1e-5)


def test_a_part_without_parameters_is_refused():
    with pytest.raises(ValueError, match="expected the beginning of a parameter's name, got 'tail'"):
        random_line(objective("act").net, "tail", 0)


def test_jumps_are_asked_of_one_image():
    one = objective("act", images=2)
    with pytest.raises(ValueError, match="expected one image, got 2"):
        jumps(one, halting_line(one.net), [0.0, 1.0])
