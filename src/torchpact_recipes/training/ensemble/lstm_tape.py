"""What adaptive LSTMs of several networks leave behind when they read, for their gradients."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchpact import ACT, Discrete, Mode, Relaxed, Thresholded

NEVER, RELAXED, ACTS, HARD = range(4)
"""How the stick is broken after an iteration; as the kernels know it."""


class Rule(NamedTuple):
    """A mode, in numbers: which it is, and its temperature, ε or the logit of its threshold."""

    kind: int = NEVER
    setting: float = 0.0
    noisy: bool = False


def rule_of(mode: Mode) -> Rule | None:
    """Return the rule of a mode; None of one that is not known here.

    >>> rule_of(tp.ACT(eps=0.25))
    Rule(kind=2, setting=0.25, noisy=False)
    """
    if type(mode) is Relaxed:
        return Rule(RELAXED, mode.temperature, noisy=True)
    if type(mode) is ACT:
        return Rule(ACTS, mode.eps)
    if type(mode) is Thresholded:
        return Rule(HARD, mode.bound)
    return Rule(HARD, 0.0, noisy=True) if type(mode) is Discrete else None


@dataclass
class Tape:
    """What iterations write and gradients read: states *before* iterations, and gates in them."""

    rule: Rule
    x: Tensor
    flag: Tensor
    head: Tensor
    head_bias: Tensor
    noise: Tensor
    gates: Tensor
    """Products before, activations after; (networks, time, L, batch, 4·hidden), as i, f, g, o."""
    h: Tensor
    c: Tensor
    """(networks, time + 1, L, batch, hidden): of the last time step but the first are unused."""
    logits: Tensor
    remaining: Tensor
    mean_h: Tensor
    mean_c: Tensor
    """The output so far, of one time step."""

    @property
    def most(self) -> int:
        """L."""
        return self.gates.size(2)

    def order(self) -> Iterator[tuple[int, int]]:
        """All iterations, as (time step, iteration), one after the other."""
        return ((t, k) for t in range(self.gates.size(1)) for k in range(self.most))

    def after(self, t: int, k: int) -> tuple[int, int]:
        """Where the state after an iteration is put down."""
        return (t, k + 1) if k + 1 < self.most else (t + 1, 0)


@dataclass
class Gradients:
    """What goes back from iteration to iteration, and what is left on the way."""

    outputs: Tensor
    logits: Tensor
    gates: Tensor
    h: Tensor
    c: Tensor
    whole_h: Tensor
    whole_c: Tensor
    """Of the output of a time step, to be divided among its iterations."""
    remaining: Tensor
    """Of the stick before each iteration of a time step, (L + 1, networks, batch)."""
    head: Tensor
    """Of all logits, laid out as the states that they are of."""


def blank_tape(
    x: Tensor,
    flag: Tensor,
    head: Tensor,
    head_bias: Tensor,
    noise: Tensor,
    most: int,
    rule: Rule,
    learning: bool,
) -> Tape:
    """A tape to write on; where nothing is learned, that holds the gates of one iteration only."""
    networks, time, batch, width = x.shape
    kept = (time, most) if learning else (1, 1)
    states = networks, time + 1, most, batch, width // 4
    logits = torch.full_like(noise, -torch.inf)  # of networks that never halt
    logits[:, :, -1] = torch.inf
    return Tape(
        rule,
        x.contiguous(),
        flag.contiguous(),
        head.contiguous(),
        head_bias,
        noise,
        x.new_empty(networks, *kept, batch, width).expand(networks, time, most, batch, width),
        x.new_empty(states),
        x.new_empty(states),
        logits,
        torch.ones_like(noise),
        x.new_zeros(networks, batch, width // 4),
        x.new_zeros(networks, batch, width // 4),
    )


def blank_gradients(tape: Tape, doutputs: Tensor, dlogits: Tensor) -> Gradients:
    """The gradients where going back begins."""
    h, c, whole_h, whole_c = (torch.zeros_like(tape.mean_h) for _ in range(4))
    return Gradients(
        doutputs.contiguous(),
        dlogits.contiguous(),
        torch.empty_like(tape.gates),
        h,
        c,
        whole_h,
        whole_c,
        h.new_zeros(tape.most + 1, *h.shape[:2]),
        torch.zeros_like(tape.noise),
    )
