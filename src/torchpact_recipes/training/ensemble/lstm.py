"""Adaptive LSTM layers of several networks that read a window, forward and backward, in few large kernels.

Step by step, autograd takes some fifty small kernels for one iteration of a cell. Here it is a product and
one kernel for all else, forward as well as backward: inputs of all time steps are multiplied beforehand,
gradients of weights afterwards, each in one product. The networks are the first dimension of everything.
"""

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchpact.core.relaxation import logistic_noise
from torchpact.engines.build_cache import protect_compiler_caches
from torchpact_recipes.training.ensemble import lstm_steps
from torchpact_recipes.training.ensemble.lstm_tape import HARD, NEVER, Rule, blank_gradients, blank_tape


class Weights(NamedTuple):
    """Of a layer of each network, (networks, …); heads of networks that never halt are None."""

    input: Tensor
    """(networks, 4·hidden, features)."""
    flag: Tensor
    """(networks, 4·hidden): what the first iteration of a time step adds."""
    recurrent: Tensor
    """(networks, 4·hidden, hidden)."""
    bias: Tensor
    """(networks, 4·hidden)."""
    head: Tensor | None = None
    """(networks, hidden)."""
    head_bias: Tensor | None = None
    """(networks,)."""


class Reading(NamedTuple):
    """What came of reading a window."""

    outputs: Tensor
    """(networks, time, batch, hidden)."""
    logits: Tensor
    """Of halting after each iteration, (networks, time, L, batch); the last are +∞, as after halting."""
    remaining: Tensor
    """The stick before each iteration, of the same shape; without gradient."""
    state: tuple[Tensor, Tensor]
    """h and c in the end, (networks, batch, hidden); without gradient."""


def read_window(
    x: Tensor,
    weights: Weights,
    state: tuple[Tensor, Tensor],
    max_steps: int,
    rule: Rule,
    generator: torch.Generator | None = None,
) -> Reading:
    """Let a layer of each network read x of shape (networks, time, batch, features) from a state on.

    Gradients go to ``x`` and the weights, not to the state; the hard modes have none.
    """
    learning = torch.is_grad_enabled()
    if learning and rule.kind == HARD:
        raise ValueError("expected a soft mode where there are gradients, got a hard one")
    networks, time, batch, _ = x.shape
    bias = weights.bias.unsqueeze(1)
    entered = torch.baddbmm(bias, x.flatten(1, 2), weights.input.transpose(1, 2)).unflatten(1, (time, batch))
    noise = x.new_zeros(networks, time, max_steps, batch)
    if rule.noisy:
        noise = logistic_noise(noise, generator)
    head, head_bias = weights.head, weights.head_bias
    if head is None or head_bias is None:
        head, head_bias = x.new_zeros(networks, state[0].size(2)), x.new_zeros(networks)
    found = _Read.apply(
        entered, weights.flag, weights.recurrent, head, head_bias, *state, noise, max_steps, rule, learning
    )
    outputs, logits, remaining, h, c = found
    return Reading(outputs, logits, remaining, (h, c))


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        flag: Tensor,
        recurrent: Tensor,
        head: Tensor,
        head_bias: Tensor,
        h: Tensor,
        c: Tensor,
        noise: Tensor,
        max_steps: int,
        rule: Rule,
        learning: bool,
    ) -> tuple[Tensor, ...]:
        tape = blank_tape(x, flag, head, head_bias, noise, max_steps, rule, learning)
        tape.h[:, 0, 0], tape.c[:, 0, 0] = h, c
        step, to_gates = _steps(x).forward_step, recurrent.transpose(1, 2)
        for t, k in tape.order():
            torch.bmm(tape.h[:, t, k], to_gates, out=tape.gates[:, t, k])
            step(tape, t, k)
        if learning:
            ctx.tape, ctx.recurrent = tape, recurrent
        time = x.size(1)
        final = tape.h[:, time, 0].clone(), tape.c[:, time, 0].clone()
        ctx.mark_non_differentiable(tape.remaining, *final)
        return tape.h[:, 1:, 0].contiguous(), tape.logits.clone(), tape.remaining, *final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, doutputs: Tensor, dlogits: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        tape, recurrent = ctx.tape, ctx.recurrent
        found = blank_gradients(tape, doutputs, dlogits)
        step = _steps(tape.x).backward_step
        for t, k in reversed([*tape.order()]):
            step(tape, found, t, k)
            if (t, k) != (0, 0):
                torch.bmm(found.gates[:, t, k], recurrent, out=found.h)
        h, gates = tape.h[:, :-1].flatten(1, 3), found.gates.flatten(1, 3)
        of_head: tuple[Tensor | None, Tensor | None] = None, None
        if tape.rule.kind != NEVER:
            of_head = (found.head.flatten(1).unsqueeze(1) @ h).squeeze(1), found.head.sum((1, 2, 3))
        return (
            found.gates.sum(2) if tape.most > 1 else found.gates.squeeze(2),
            found.gates[:, :, 0].sum((1, 2)),
            gates.transpose(1, 2) @ h,
            *of_head,
            *[None] * 6,
        )


def _steps(like: Tensor) -> ModuleType:
    if not like.is_cuda:
        return lstm_steps
    # they need Triton, which comes with torch for CUDA but not for CPUs
    from torchpact_recipes.training.ensemble import lstm_gpu_kernels

    protect_compiler_caches()

    return lstm_gpu_kernels
