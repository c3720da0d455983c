"""An iteration of adaptive LSTMs and its gradients, but for products; ``lstm_gpu_kernels`` in torch."""

import torch
from torch import Tensor

from torchpact.core.halting import act_step
from torchpact.core.relaxation import relaxed_bernoulli
from torchpact_recipes.training.ensemble.lstm_tape import ACTS, NEVER, RELAXED, Gradients, Rule, Tape


def forward_step(tape: Tape, t: int, k: int) -> None:
    """Make states and decisions of the products that are in ``tape.gates``."""
    gates = tape.gates[:, t, k]
    gates += tape.x[:, t]
    if k == 0:
        gates += tape.flag.unsqueeze(1)
    i, f, g, o = gates.chunk(4, -1)
    for gate in (i, f, o):
        gate.sigmoid_()
    g.tanh_()
    c = f * tape.c[:, t, k] + i * g
    h = o * c.tanh()
    after = tape.after(t, k)
    if tape.rule.kind != NEVER:
        weight = _decide(tape, t, k, h).unsqueeze(2)
        tape.mean_h.copy_(weight * h + (tape.mean_h if k else 0))
        tape.mean_c.copy_(weight * c + (tape.mean_c if k else 0))
        if k == tape.most - 1:
            h, c = tape.mean_h, tape.mean_c
    tape.h[:, after[0], after[1]] = h
    tape.c[:, after[0], after[1]] = c


def _decide(tape: Tape, t: int, k: int, h: Tensor) -> Tensor:
    """The weight of this iteration in the output."""
    remaining = tape.remaining[:, t, k]
    if k == tape.most - 1:
        return remaining
    logits = (h @ tape.head.unsqueeze(2)).squeeze(2) + tape.head_bias.unsqueeze(1)
    if tape.rule.kind != RELAXED:  # nobody asks those that have halted
        logits = torch.where(remaining > 0, logits, torch.inf)
    tape.logits[:, t, k] = logits
    weight, left = _break(tape.rule, remaining, logits, tape.noise[:, t, k])
    tape.remaining[:, t, k + 1] = left
    return weight


def _break(rule: Rule, remaining: Tensor, logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    if rule.kind == RELAXED:
        fires, stays = relaxed_bernoulli(logits, noise, rule.setting)
        return remaining * fires, remaining * stays
    if rule.kind == ACTS:
        return act_step(remaining, torch.sigmoid(logits), rule.setting)
    weight = torch.where(logits + noise > rule.setting, remaining, 0)
    return weight, remaining - weight


def backward_step(tape: Tape, found: Gradients, t: int, k: int) -> None:
    """Make gradients of the gates, and of the state before, of ``found.h`` and ``found.c``."""
    last = k == tape.most - 1
    i, f, g, o = tape.gates[:, t, k].chunk(4, -1)
    before = tape.c[:, t, k]
    c = f * before + i * g
    tanh = c.tanh()
    if tape.rule.kind == NEVER:
        dh, dc = found.h + (found.outputs[:, t] if last else 0), found.c
    else:
        if last:
            found.whole_h.copy_(found.h + found.outputs[:, t])
            found.whole_c.copy_(found.c)
        dweight = (found.whole_h * o * tanh + found.whole_c * c).sum(-1)
        weight, dlogit = _undecide(tape, found, t, k, dweight)
        dh, dc = weight.unsqueeze(2) * found.whole_h, weight.unsqueeze(2) * found.whole_c
        if dlogit is not None:
            dh = dh + found.h + dlogit.unsqueeze(2) * tape.head.unsqueeze(1)
            dc = dc + found.c
    dc = dc + dh * o * (1 - tanh * tanh)
    found.gates[:, t, k] = torch.cat(
        [
            dc * g * i * (1 - i),
            dc * before * f * (1 - f),
            dc * i * (1 - g * g),
            dh * tanh * o * (1 - o),
        ],
        -1,
    )
    found.c.copy_(dc * f)


def _undecide(tape: Tape, found: Gradients, t: int, k: int, dweight: Tensor) -> tuple[Tensor, Tensor | None]:
    """The weight of this iteration, and the gradient of its logit, if it has one."""
    remaining, dleft = tape.remaining[:, t, k], found.remaining[k + 1]
    if k == tape.most - 1:
        found.remaining[k] = dweight
        return remaining, None
    logits = tape.logits[:, t, k]
    weight, _ = _break(tape.rule, remaining, logits, tape.noise[:, t, k])
    if tape.rule.kind == RELAXED:
        fires, stays = relaxed_bernoulli(logits, tape.noise[:, t, k], tape.rule.setting)
        dlogit = remaining * (dweight - dleft) * fires * stays / tape.rule.setting
        dremaining = fires * dweight + stays * dleft
    else:
        h = torch.sigmoid(logits)
        goes_on = 1 - (remaining - h) < 1 - tape.rule.setting
        dlogit = torch.where(goes_on, dweight - dleft, 0) * h * (1 - h)
        dremaining = torch.where(goes_on, dleft, dweight)
    found.remaining[k] = dremaining
    dlogit = dlogit + found.logits[:, t, k]
    found.head[:, t, k + 1] = dlogit
    return weight, dlogit
