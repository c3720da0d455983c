"""Draws the figures of the README and the documentation: python docs/figures.py."""

import math
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import torchpact as tp
from torchpact_recipes import newton, zoo
from torchpact_recipes.data import load_sample
from torchpact_recipes.training import TrainConfig
from torchpact_recipes.training.titles import title_of
from torchpact_recipes.viz import compare_maps, ponder_maps

IMAGES = Path(__file__).parent / "images"


def overview() -> None:
    """Left: the paper's figure 2, and PACT's cost beside it. Right: what Newton's iteration learns."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")

    h1 = torch.linspace(0, 1, 4001, dtype=torch.double)
    h = torch.stack([h1, *[torch.full_like(h1, 1 / 3)] * 3])
    rho = tp.act_halting(h).ponder_cost
    rho[1:][rho.diff().abs() > 0.005] = math.nan  # leave the jumps open instead of drawing a slope
    left.plot(h1, rho, color="tab:red", label="ACT: ponder cost ρ = N + R")
    left.plot(h1, tp.expected_steps(h), color="tab:blue", label="PACT: expected steps E[z]")
    left.set(xlabel="halting probability h¹  (h² = h³ = h⁴ = 1/3)", ylabel="what the objective charges")
    left.set_ylim(0.8, 4.9)
    left.legend(frameon=False, fontsize=8, loc="upper right")

    torch.manual_seed(0)
    block = newton.make_block()
    newton.train(block)
    result = newton.compare(block)
    order = result.log_x.argsort()
    x = result.log_x[order].exp()
    right.plot(x, result.map_steps[order], color="0.75", linewidth=6, label="exact MAP solution")
    right.plot(x, result.steps[order], color="tab:blue", linewidth=1.2, label="learned, thresholded")
    right.axhline(result.fixed_steps, color="tab:red", linestyle="--", linewidth=1, label="best fixed number")
    right.set(xscale="log", xlabel="x", ylabel="turns of u ← (u + x/u)/2")
    right.set_ylim(0, 12.9)
    right.legend(frameon=False, fontsize=8, loc="upper center")
    figure.savefig(IMAGES / "overview.png", dpi=150)


def maps() -> None:
    """Where SACT and PSACT compute, ResNet-110 (the paper's figure 6), by networks of the zoo."""
    images = load_sample("test").random(6, seed=0).images
    networks = []
    for name in ("resnet110-sact-tau0.005", "resnet110-tau0.005"):
        title = title_of(TrainConfig.from_dict(zoo.find(name).config))
        networks.append((title, ponder_maps(zoo.load(name), images, seed=0)))
    with compare_maps(images, networks) as figure:
        figure.savefig(IMAGES / "maps-resnet110.png")


if __name__ == "__main__":
    overview()
    maps()
