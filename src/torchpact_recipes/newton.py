"""A first example: an iteration that learns when to stop, and the exact answer to compare with.

Newton's iteration for the square root, u ← (u + x/u)/2 from u = 1, doubles its digits at every turn once
it is close, and merely halves its guess before: how many turns an input needs depends on it.
Nothing of that is told to the halting head. It sees the state, is charged ``tau`` a turn, and learns to
stop. Because the iteration itself has no parameters the best z for each input, the MAP solution, can be
found by trying them all.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchpact import AdaptiveBlock, map_loss

MAX_STEPS = 10
TAU = 0.3


def newton(u: Tensor) -> Tensor:
    """One iteration, on the state (log of the guess, log of the root, log of how far the guess moved)."""
    guess, root, _ = u.unbind(-1)
    better = torch.logaddexp(guess, 2 * root - guess) - math.log(2)
    return torch.stack([better, root, ((better - guess).abs() + 1e-6).log()], -1)


def nll(u: Tensor) -> Tensor:
    """The price of an error: nothing much below one percent, then growing with its logarithm."""
    return torch.log1p(((u[..., 0] - u[..., 1]) / 0.01) ** 2)


def make_block() -> AdaptiveBlock:
    """The iteration, with a small head that all turns share."""
    head = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
    return AdaptiveBlock(newton, head, max_steps=MAX_STEPS)


def states(log_x: Tensor) -> Tensor:
    """The state to start from: a guess of 1 for the root of each x."""
    return torch.stack([torch.zeros_like(log_x), log_x / 2, torch.zeros_like(log_x)], -1)


def draw(count: int) -> Tensor:
    """Inputs from 1/10,000 to 10,000, uniform on the log scale; returns log x."""
    return torch.empty(count).uniform_(-math.log(1e4), math.log(1e4))


def train(
    block: AdaptiveBlock,
    iterations: int = 500,
    tau: float = TAU,
    progress: Callable[[int, float], None] = lambda iteration, steps: None,
) -> None:
    """Minimise the MAP objective in relaxed mode."""
    optimizer = torch.optim.Adam(block.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    for iteration in range(iterations):
        output, ponder = block(states(draw(256)))
        loss = map_loss(nll(output), ponder, tau)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress(iteration + 1, ponder.expected_steps.mean().item())


@dataclass(frozen=True)
class Comparison:
    """The learned stopping rule beside the exact MAP solution, on inputs not trained on."""

    log_x: Tensor
    steps: Tensor
    """Turns the thresholded block takes."""
    map_steps: Tensor
    """Turns that minimise nll + τ z, by trying all."""
    objective: dict[str, float]
    """Mean of nll + τ z: by mode, for the MAP solution, and for the best fixed number of turns."""
    mean_steps: dict[str, float]
    fixed_steps: int
    """The best fixed number of turns."""

    @property
    def agreement(self) -> float:
        """The share of inputs where the learned rule stops exactly at the MAP solution."""
        return (self.steps == self.map_steps).double().mean().item()


@torch.no_grad()
def compare(block: AdaptiveBlock, count: int = 10_000, tau: float = TAU) -> Comparison:
    """Run a trained block in three modes, and every number of turns by hand."""
    log_x = draw(count)
    u = states(log_x)
    objective: dict[str, float] = {}
    mean_steps: dict[str, float] = {}
    for mode in ("relaxed", "discrete", "thresholded"):
        output, ponder = block(u, mode=mode)
        objective[mode] = map_loss(nll(output), ponder, tau).item()
        mean_steps[mode] = ponder.cost.double().mean().item()
    steps = ponder.steps.flatten()

    price = []
    for turn in range(1, MAX_STEPS + 1):
        u = newton(u)
        price.append(nll(u) + tau * turn)
    prices = torch.stack(price)
    map_price, map_index = prices.min(0)
    fixed_price, fixed_index = prices.mean(1).min(0)
    objective |= {"map": map_price.mean().item(), "fixed": fixed_price.item()}
    mean_steps |= {"map": (map_index + 1).double().mean().item(), "fixed": fixed_index.item() + 1}
    return Comparison(log_x, steps, map_index + 1, objective, mean_steps, int(fixed_index) + 1)
