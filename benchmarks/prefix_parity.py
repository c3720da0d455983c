"""Prefix parity with resets, and a looped network that solves it: the problem of benchmarks/objectives.py.

Strings consist of bits and resets; the answer at a position is the parity of the bits since the last reset.
The steps that a position needs grow with its distance from that reset, so that halting early can pay. The
network repeats one residual step of two 1-D convolutions, which sees two positions to each side; the input is
given to every step, and the state is normalised.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

RESET = 2


class Strings(NamedTuple):
    """A batch of strings, all of shape (batch, length)."""

    tokens: Tensor
    """0, 1 or RESET."""
    parity: Tensor
    """The answer."""
    distance: Tensor
    """Positions since the last reset, or the beginning; the difficulty of a position."""


def strings(batch: int, length: int, generator: torch.Generator, resets: float = 0.1) -> Strings:
    """Draw strings with a share of resets."""
    tokens = torch.randint(0, 2, (batch, length), generator=generator)
    tokens[torch.rand(batch, length, generator=generator) < resets] = RESET
    is_reset = tokens == RESET
    place = torch.arange(1, length + 1).expand(batch, length)
    last = torch.where(is_reset, place, 0).cummax(1).values
    ones = (tokens == 1).long().cumsum(1)
    before = torch.cat([torch.zeros(batch, 1, dtype=torch.long), ones], 1).gather(1, last)
    return Strings(tokens, (ones - before) % 2, place - last)


class Loop(nn.Module):
    """One step, repeated, and a read-out that serves every exit."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.recall = nn.Embedding(3, width)
        self.neighbours = nn.Conv1d(width, width, 3, padding=1, bias=False)
        self.into = nn.Conv1d(width, width, 3, padding=1)
        self.out = nn.Conv1d(width, width, 3, padding=1)
        self.readout = nn.Conv1d(width, 2, 1)

    def states(self, tokens: Tensor, steps: int) -> list[Tensor]:
        """Return the state after each of the steps, (batch, width, length)."""
        (u, given), found = self.begin(tokens), []
        for _ in range(steps):
            u = self.step(u, given)
            found.append(u)
        return found

    def begin(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state before the first step, and what every step is told of the input."""
        u = self.recall(tokens).transpose(1, 2)
        return u, self.neighbours(u)

    def step(self, u: Tensor, given: Tensor) -> Tensor:
        """Return the next state."""
        u = u + self.out(gelu(self.into(u) + given))
        normalised: Tensor = u * (u.square().mean(1, keepdim=True) + 1e-6).rsqrt()
        return normalised

    def losses(self, u: Tensor, parity: Tensor) -> Tensor:
        """Return the loss of every position, (batch, length), read from a state."""
        return cross_entropy(self.readout(u), parity, reduction="none")


def train_loop(
    seed: int, *, every_exit: bool, updates: int, length: int = 32, steps: int = 20, batch: int = 16
) -> Loop:
    """Train a loop on the mean loss of all exits, or on that of the last alone."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    net = Loop()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=updates)
    for _ in range(updates):
        given = strings(batch, length, generator)
        states = net.states(given.tokens, steps)
        used = states if every_exit else states[-1:]
        loss = torch.stack([net.losses(u, given.parity).mean() for u in used]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return net
