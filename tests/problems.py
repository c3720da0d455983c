"""Small problems with exact answers, worked out by enumeration and independently of the code under test.

Every statistical comparison goes through `assert_mean_is`, which states its false-alarm rate.
"""

import itertools
import math

import torch
from torch import Tensor, nn

import torchpact as tp

SIGMAS = 5.5
"""A normal variable strays this far once in 26 million draws; a test compares fewer than 100 numbers."""


def assert_mean_is(samples: Tensor, expected: Tensor, sigmas: float = SIGMAS) -> None:
    """Fail if the mean over dim 0 is further than `sigmas` standard errors from what is expected."""
    error = samples.std(0) / math.sqrt(len(samples))
    distance = (samples.mean(0) - expected).abs() / (error + 1e-12)
    assert distance.max() < sigmas, f"{distance.max():.1f} standard errors away"


class Stack(nn.Module):
    """One or more adaptive blocks of plain steps on vectors of two, in double precision; f is smooth."""

    def __init__(self, blocks: int = 1, max_steps: int = 3, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.blocks = nn.ModuleList(
            tp.AdaptiveBlock(
                [nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(max_steps)],
                [nn.Linear(2, 1) for _ in range(max_steps - 1)],
            )
            for _ in range(blocks)
        )
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.double))
        self.x = torch.tensor([0.7, -0.3], dtype=torch.double)

    def forward(self, u: Tensor) -> tuple[Tensor, list[tp.Ponder]]:
        ponders = []
        for block in self.blocks:
            u, ponder = block(u)
            ponders.append(ponder)
        return self.nll(u), ponders

    def copies(self, count: int) -> tuple[Tensor, list[tp.Ponder]]:
        """Run `count` independent copies of the one input."""
        nll, ponders = self(self.x.expand(count, 2))
        return nll, ponders

    @staticmethod
    def nll(u: Tensor) -> Tensor:
        return 2 * (u[..., 0] - 0.5) ** 2 + torch.sin(3 * u[..., 1])

    def paths(self) -> list[tuple[list[int], Tensor, Tensor, list[Tensor]]]:
        """Every choice of z: the choice, its probability, its nll, and N of each block on the way."""
        return list(self._walk(0, self.x, torch.ones((), dtype=torch.double), [], []))

    def _walk(self, k, u, probability, choice, counts):
        if k == len(self.blocks):
            yield choice, probability, self.nll(u), counts
            return
        block = self.blocks[k]
        states, halts = [], []
        for l, step in enumerate(block.steps):
            u = step(u)
            states.append(u)
            last = l == len(block.steps) - 1
            halts.append(torch.ones((), dtype=torch.double) if last else block.halting[l](u).sigmoid()[0])
        q = []
        for l, h in enumerate(halts):
            for earlier in halts[:l]:
                h = h * (1 - earlier)
            q.append(h)
        expected = sum((l + 1) * p for l, p in enumerate(q))
        for l, (state, p) in enumerate(zip(states, q, strict=True)):
            yield from self._walk(k + 1, state, probability * p, [*choice, l + 1], [*counts, expected])

    def exact(self, tau: float, *, neglect: bool = False) -> Tensor:
        """E[nll + τ Σ N_k]; with `neglect`, as eq. 26 has it, N_k is not held against earlier decisions."""
        total = torch.zeros((), dtype=torch.double)
        for _, probability, nll, counts in self.paths():
            weight = probability.detach() if neglect else probability
            total = total + probability * nll + weight * tau * sum(counts)
        return total

    def gradient(self, loss: Tensor) -> Tensor:
        """The gradient with respect to all parameters, as one vector."""
        grads = torch.autograd.grad(loss, list(self.parameters()), allow_unused=True)
        return torch.cat(
            [
                (torch.zeros_like(p) if g is None else g).flatten()
                for p, g in zip(self.parameters(), grads, strict=True)
            ]
        )


def binary_vectors(length: int) -> Tensor:
    """All 2^length of them, one a row."""
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=length)), dtype=torch.double)


def quadratic_binary(length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A random quadratic function of binary variables: its matrix, and its exact maximiser."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(length, length, generator=generator).triu()
    codes = torch.arange(2**length)
    best, argmax = -math.inf, torch.zeros(length)
    for chunk in codes.split(2**16):
        z = ((chunk.unsqueeze(1) >> torch.arange(length)) & 1).float()
        values = ((z @ matrix) * z).sum(-1)
        top = int(values.argmax())
        if values[top] > best:
            best, argmax = values[top].item(), z[top]
    return matrix, argmax
