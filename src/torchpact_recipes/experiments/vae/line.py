"""The objective along a line in parameter space, and its derivative against the pathwise gradient.

With images, the noise of v and that of decisions fixed, the objective ELBO − τ·cost is a function of the
parameters alone. The reparameterization trick asks it to be continuous: its derivative, averaged over noise,
is then that of the average. PACT's relaxed objective is smooth. ACT's jumps where the number of steps of an
image goes from N to N + 1: the cost ρ = N + R by 1 − h_N, and the output by ε·(u^{N+1} − u^N). The pathwise
gradient does not know of the jumps.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

import torchpact as tp
from torchpact_recipes.experiments.vae.model import DrawingVAE


@dataclass(frozen=True)
class Line:
    """θ + t·d: a direction d in parameter space, as a tensor for each parameter that it changes."""

    name: str
    direction: dict[str, Tensor]


@dataclass(frozen=True)
class Values:
    """What every image has at a place on a line, (batch,) each."""

    objective: Tensor
    slope: Tensor
    """The pathwise derivative of the objective along the line."""
    elbo: Tensor
    elbo_slope: Tensor
    steps: Tensor
    """ACT's N; relaxed, the steps whose weight is above the clip."""


@dataclass(frozen=True)
class Objective:
    """ELBO − τ·cost of images, with all noise fixed.

    ``x`` are rows of zeros and ones, ``noise`` that of v; ``mode`` is "relaxed" or "act".
    """

    net: DrawingVAE
    x: Tensor
    noise: Tensor
    mode: Literal["relaxed", "act"]
    tau: float
    seed: int = 0

    def at(self, line: Line, t: float) -> Values:
        """Return its values at a place on a line, and its pathwise derivatives there."""
        mode = tp.ACT() if self.mode == "act" else tp.Relaxed(generator=_generator(self.seed))
        place = torch.tensor(t, dtype=self.x.dtype)
        # forward mode: the derivative for every image in one pass
        with torch.no_grad(), forward_ad.dual_level():
            dual = forward_ad.make_dual(place, torch.ones_like(place))
            moved = {name: p.detach() for name, p in self.net.named_parameters()}
            moved |= {name: moved[name] + dual * d for name, d in line.direction.items()}
            with torch.enable_grad():  # so that all steps run, and the cost is that of training
                bound = torch.func.functional_call(self.net, moved, (self.x, self.noise), {"mode": mode})
            objective = bound.elbo - self.tau * bound.ponder.cost.flatten()
            value, slope = _with_tangent(objective)
            elbo, elbo_slope = _with_tangent(bound.elbo)
        return Values(value, slope, elbo, elbo_slope, bound.ponder.steps.flatten())


def random_line(net: DrawingVAE, part: str, seed: int) -> Line:
    """Return a random direction of the parameters whose names begin with ``part``.

    Each tensor of it has the norm of the parameter, so that t = 0.01 is a change of 1 %.
    """
    generator, direction = _generator(seed), {}
    for name, p in net.named_parameters():
        if name.startswith(part):
            d = torch.randn(p.shape, generator=generator, dtype=torch.double).to(p.dtype)
            direction[name] = d * (p.detach().norm() / d.norm())
    if not direction:
        raise ValueError(f"expected the beginning of a parameter's name, got {part!r}")
    return Line(part or "all", direction)


def halting_line(net: DrawingVAE) -> Line:
    """Return the direction that adds t to the biases of all halting heads."""
    names = [name for name, _ in net.named_parameters() if name.startswith("decoder.halting.")]
    parameters = dict(net.named_parameters())
    biases = {name: torch.ones_like(parameters[name]) for name in names if name.endswith("bias")}
    return Line("halting biases", biases)


@dataclass(frozen=True)
class Change:
    """The change of the mean objective over an interval, and the integral of its pathwise derivative."""

    line: str
    change: float
    pathwise: float
    elbo_change: float
    elbo_pathwise: float
    gap_error: float
    """The standard error, over images, of ``change`` − ``pathwise``."""
    crossed: float
    """The share of images whose number of steps is another one at the other end."""


def change_over(objective: Objective, line: Line, half: float) -> Change:
    """Compare J(h) − J(−h) with the integral of the pathwise derivative from −h to h.

    They are equal where the objective is continuous. The integral is by Gauss and Legendre with three
    points, exact for polynomials of degree five.
    """
    low, high = objective.at(line, -half), objective.at(line, half)
    nodes = [(-math.sqrt(0.6), 5 / 9), (0.0, 8 / 9), (math.sqrt(0.6), 5 / 9)]
    inner = [(weight * half, objective.at(line, half * node)) for node, weight in nodes]
    change, elbo_change = high.objective - low.objective, high.elbo - low.elbo
    pathwise = torch.stack([weight * values.slope for weight, values in inner]).sum(0)
    elbo_pathwise = torch.stack([weight * values.elbo_slope for weight, values in inner]).sum(0)
    return Change(
        line.name,
        change.mean().item(),
        pathwise.mean().item(),
        elbo_change.mean().item(),
        elbo_pathwise.mean().item(),
        ((change - pathwise).std(correction=0) / len(change) ** 0.5).item(),
        (high.steps != low.steps).double().mean().item(),
    )


@dataclass(frozen=True)
class Jump:
    """Where the objective of an image changes at once, and by how much."""

    t: float
    objective: float
    elbo: float
    steps: tuple[int, int]
    """Before and after."""


def jumps(objective: Objective, line: Line, places: list[float]) -> list[Jump]:
    """Find the jumps of ACT's objective for a single image, by halving intervals in which N changes."""
    if len(objective.x) != 1:
        raise ValueError(f"expected one image, got {len(objective.x)}")
    found, ends = [], [(t, objective.at(line, t)) for t in places]
    for (low, before), (high, after) in pairwise(ends):
        if before.steps.item() == after.steps.item():
            continue
        for _ in range(40):
            middle = (low + high) / 2
            values = objective.at(line, middle)
            if values.steps.item() == before.steps.item():
                low, before = middle, values
            else:
                high, after = middle, values
        found.append(
            Jump(
                high,
                (after.objective - before.objective).item(),
                (after.elbo - before.elbo).item(),
                (int(before.steps), int(after.steps)),
            )
        )
    return found


def _with_tangent(dual: Tensor) -> tuple[Tensor, Tensor]:
    """Return a value and its derivative, which outlive the level that they are of."""
    primal, tangent = forward_ad.unpack_dual(dual)
    return primal.clone(), torch.zeros_like(primal) if tangent is None else tangent.clone()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
