"""An iteration of adaptive LSTMs on a GPU, but for the products: one kernel, and one for its gradients.

A program has an example of a network, all of its units, so that halting is its own affair. The formulas are
those of ``lstm_steps``. Where the first or the last iteration of a time step differs from others it
does so by masks, of ``first`` and ``last`` units: one compiled kernel serves all.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from torchpact_recipes.training.ensemble.lstm_tape import ACTS, Gradients, Tape


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit(do_not_specialize=["first", "last"])  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    gates, x, flag, c, h_after, c_after, mean_h, mean_c, head, head_bias, noise, logits, remaining, left,
    gates_stride, x_stride, state_stride, row_stride, batch, first, last, setting, H,
    RULE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    network, example = (row // batch).to(tl.int64), row % batch
    j = tl.arange(0, WIDE)
    used = j < H
    gates += network * gates_stride + example * 4 * H + j
    x += network * x_stride + example * 4 * H + j
    flag += network * 4 * H + j
    at = network * state_stride + example * H + j
    begins = j < first
    i = tl.load(gates, mask=used, other=0) + tl.load(x, mask=used, other=0)
    f = tl.load(gates + H, mask=used, other=0) + tl.load(x + H, mask=used, other=0)
    g = tl.load(gates + 2 * H, mask=used, other=0) + tl.load(x + 2 * H, mask=used, other=0)
    o = tl.load(gates + 3 * H, mask=used, other=0) + tl.load(x + 3 * H, mask=used, other=0)
    i = tl.sigmoid(i + tl.load(flag, mask=begins, other=0))
    f = tl.sigmoid(f + tl.load(flag + H, mask=begins, other=0))
    g = _tanh(g + tl.load(flag + 2 * H, mask=begins, other=0))
    o = tl.sigmoid(o + tl.load(flag + 3 * H, mask=begins, other=0))
    tl.store(gates, i, mask=used)
    tl.store(gates + H, f, mask=used)
    tl.store(gates + 2 * H, g, mask=used)
    tl.store(gates + 3 * H, o, mask=used)
    cell = f * tl.load(c + at, mask=used, other=0) + i * g
    output = o * _tanh(cell)
    if RULE != 0:
        one = network * row_stride + example
        stick = tl.load(remaining + one)
        weights = tl.load(head + network * H + j, mask=used, other=0)
        logit = tl.sum(output * weights, 0) + tl.load(head_bias + network)
        if RULE == 1:
            relaxed = (logit + tl.load(noise + one)) / setting
            weight, rest = stick * tl.sigmoid(relaxed), stick * tl.sigmoid(-relaxed)
        elif RULE == 2:
            h = tl.sigmoid(logit)
            goes_on = 1 - (stick - h) < setting
            weight, rest = tl.where(goes_on, h, stick), tl.where(goes_on, stick - h, 0.0)
        else:
            fires = logit + tl.load(noise + one) > setting
            weight, rest = tl.where(fires, stick, 0.0), tl.where(fires, 0.0, stick)
        if RULE != 1:
            logit = tl.where(stick > 0, logit, float("inf"))
        tl.store(logits + one, logit, mask=last == 0)
        tl.store(left + one, rest, mask=last == 0)
        weight = tl.where(last != 0, stick, weight)
        own = row.to(tl.int64) * H + j
        so_far = used & (j >= first)
        whole_h = tl.load(mean_h + own, mask=so_far, other=0) + weight * output
        whole_c = tl.load(mean_c + own, mask=so_far, other=0) + weight * cell
        tl.store(mean_h + own, whole_h, mask=used & (j >= last))
        tl.store(mean_c + own, whole_c, mask=used & (j >= last))
        output, cell = tl.where(last != 0, whole_h, output), tl.where(last != 0, whole_c, cell)
    tl.store(h_after + at, output, mask=used)
    tl.store(c_after + at, cell, mask=used)


@triton.jit(do_not_specialize=["last"])  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    gates, c, head, noise, logits, remaining,
    dgates, doutputs, dlogits, dh, dc, whole_h, whole_c, dleft, dremaining, dhead,
    gates_stride, state_stride, output_stride, row_stride, batch, last, setting, H,
    RULE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    network, example = (row // batch).to(tl.int64), row % batch
    j = tl.arange(0, WIDE)
    used = j < H
    to_gates = network * gates_stride + example * 4 * H + j
    gates += to_gates
    dgates += to_gates
    own = row.to(tl.int64) * H + j
    at_end = j < last
    i, f = tl.load(gates, mask=used, other=0), tl.load(gates + H, mask=used, other=0)
    g, o = tl.load(gates + 2 * H, mask=used, other=0), tl.load(gates + 3 * H, mask=used, other=0)
    before = tl.load(c + network * state_stride + example * H + j, mask=used, other=0)
    cell = f * before + i * g
    tanh = _tanh(cell)
    of_h, of_c = tl.load(dh + own, mask=used, other=0), tl.load(dc + own, mask=used, other=0)
    given = tl.load(doutputs + network * output_stride + example * H + j, mask=at_end, other=0)
    if RULE == 0:
        of_h += given
    else:
        inner = used & (j >= last)
        of_mean_h = tl.where(last != 0, of_h + given, tl.load(whole_h + own, mask=inner, other=0))
        of_mean_c = tl.where(last != 0, of_c, tl.load(whole_c + own, mask=inner, other=0))
        tl.store(whole_h + own, of_mean_h, mask=at_end)
        tl.store(whole_c + own, of_mean_c, mask=at_end)
        dweight = tl.sum(of_mean_h * o * tanh + of_mean_c * cell, 0)
        one = network * row_stride + example
        stick, logit = tl.load(remaining + one), tl.load(logits + one)
        of_rest = tl.load(dleft + row, mask=last == 0, other=0)
        if RULE == 1:
            relaxed = (logit + tl.load(noise + one)) / setting
            fires, stays = tl.sigmoid(relaxed), tl.sigmoid(-relaxed)
            weight = stick * fires
            dlogit = stick * (dweight - of_rest) * fires * stays / setting
            dstick = fires * dweight + stays * of_rest
        else:
            h = tl.sigmoid(logit)
            goes_on = 1 - (stick - h) < setting
            weight = tl.where(goes_on, h, stick)
            dlogit = tl.where(goes_on, dweight - of_rest, 0.0) * h * (1 - h)
            dstick = tl.where(goes_on, of_rest, dweight)
        weight = tl.where(last != 0, stick, weight)
        dlogit = tl.where(last != 0, 0.0, dlogit + tl.load(dlogits + one))
        tl.store(dremaining + row, tl.where(last != 0, dweight, dstick))
        tl.store(dhead + one, dlogit, mask=last == 0)
        weights = tl.load(head + network * H + j, mask=used, other=0)
        of_h = weight * of_mean_h + tl.where(last != 0, 0.0, of_h + dlogit * weights)
        of_c = weight * of_mean_c + tl.where(last != 0, 0.0, of_c)
    of_c += of_h * o * (1 - tanh * tanh)
    tl.store(dgates, of_c * g * i * (1 - i), mask=used)
    tl.store(dgates + H, of_c * before * f * (1 - f), mask=used)
    tl.store(dgates + 2 * H, of_c * i * (1 - g * g), mask=used)
    tl.store(dgates + 3 * H, of_h * tanh * o * (1 - o), mask=used)
    tl.store(dc + own, of_c * f, mask=used)


def forward_step(tape: Tape, t: int, k: int) -> None:
    """Make states and decisions of the products that are in ``tape.gates``."""
    gates, x, c = tape.gates[:, t, k], tape.x[:, t], tape.c[:, t, k]
    after = tape.after(t, k)
    rest = min(k + 1, tape.most - 1)  # of the last nothing is left
    remaining = tape.remaining[:, t, k]
    _forward[_grid(c)](
        gates, x, tape.flag, c, tape.h[:, after[0], after[1]], tape.c[:, after[0], after[1]],
        tape.mean_h, tape.mean_c, tape.head, tape.head_bias,
        tape.noise[:, t, k], tape.logits[:, t, k], remaining, tape.remaining[:, t, rest],
        gates.stride(0), x.stride(0), c.stride(0), remaining.stride(0),
        c.size(1), c.size(2) * (k == 0), c.size(2) * (k == tape.most - 1), _setting(tape), c.size(2),
        **_shape(tape, c),
    )  # fmt: skip


def backward_step(tape: Tape, found: Gradients, t: int, k: int) -> None:
    """Make gradients of the gates, and of the state before, of ``found.h`` and ``found.c``."""
    gates, c, remaining = tape.gates[:, t, k], tape.c[:, t, k], tape.remaining[:, t, k]
    outputs = found.outputs[:, t]
    _backward[_grid(c)](
        gates, c, tape.head, tape.noise[:, t, k], tape.logits[:, t, k], remaining,
        found.gates[:, t, k], outputs, found.logits[:, t, k], found.h, found.c, found.whole_h, found.whole_c,
        # apart, as warps of a program do not wait for each other
        found.remaining[k + 1], found.remaining[k], found.head[:, t, min(k + 1, tape.most - 1)],
        gates.stride(0), c.stride(0), outputs.stride(0), remaining.stride(0),
        c.size(1), c.size(2) * (k == tape.most - 1), _setting(tape), c.size(2), **_shape(tape, c),
    )  # fmt: skip


def _grid(c: Tensor) -> tuple[int]:
    return (c.size(0) * c.size(1),)


def _setting(tape: Tape) -> float:
    kind, setting, _ = tape.rule
    return 1 - setting if kind == ACTS else setting


def _shape(tape: Tape, c: Tensor) -> dict[str, Any]:
    wide = triton.next_power_of_2(c.size(2))
    return {"RULE": tape.rule.kind, "WIDE": wide, "num_warps": min(max(wide // 128, 1), 8)}
