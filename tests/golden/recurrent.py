"""Cases of recurrent layers that ponder, stacks of them, and networks for sequences."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import torchpact as tp
from tests.golden.common import (
    MODES,
    Case,
    evaluate,
    fill,
    flat,
    flops,
    nll_of,
    objective,
    parameters,
    uniform,
)
from tests.golden.digest import Fields

CELLS: dict[str, Callable[[int, int], nn.Module]] = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "rnn": nn.RNNCell,
}
LENGTHS = [4, 1, 5, 2]


def rnn(cell: str = "lstm", inputs: int = 3, seed: int = 0, **options: Any) -> tp.AdaptiveRNN:
    layer = tp.AdaptiveRNN(CELLS[cell](inputs + 1, 6), 4, batch_first=True, **options)
    return fill(layer, seed, halting=-0.8)


def initial(cell: str) -> Any:
    h, c = uniform(4, 6, seed=3, size=0.5), uniform(4, 6, seed=4, size=0.5)
    return (h, c) if cell == "lstm" else h


def learn(model: nn.Module, inputs: tuple[Any, ...], mode: Any, **options: Any) -> Fields:
    torch.manual_seed(1)
    model.zero_grad()
    with tp.use_mode(model, mode):
        output, state, ponder = model(*inputs, **options)
    fields = flat("learn.output", output) | flat("learn.final", state) | flat("learn.ponder", ponder)
    if getattr(model, "batch_first", True) is False:
        output = output.transpose(0, 1)
    return fields | objective(nll_of(output), ponder, 0.1) | parameters(model)


def run(model: nn.Module, inputs: tuple[Any, ...], name: str, **options: Any) -> Fields:
    mode = MODES[name]
    fields = learn(model, inputs, mode, **options)
    if name == "discrete":  # without gradients what is drawn depends on who has halted
        return fields
    return fields | evaluate(model, inputs, mode, **options)


def cells(cell: str, name: str) -> Fields:
    model, x = rnn(cell), uniform(4, 5, 3)
    fields = run(model, (x, initial(cell)), name)
    return fields | (flops(model, x, MODES[name]) if name != "discrete" else {})


def lengths(cell: str, name: str) -> Fields:
    model, x = rnn(cell), uniform(4, 5, 3)
    fields = run(model, (x, initial(cell)), name, lengths=LENGTHS)
    if name == "discrete":
        return fields
    return fields | flops(model, x, MODES[name], kwargs={"lengths": torch.tensor(LENGTHS)})


def packed(cell: str, name: str) -> Fields:
    x = pack_padded_sequence(uniform(4, 5, 3), torch.tensor(LENGTHS), True, enforce_sorted=False)
    return run(rnn(cell), (x,), name)


def not_compact(cell: str, name: str) -> Fields:
    return run(rnn(cell), (uniform(4, 5, 3),), name)


def time_first(name: str) -> Fields:
    layer = fill(tp.AdaptiveRNN(nn.GRUCell(4, 6), 4), halting=-0.8)
    return run(layer, (uniform(5, 4, 3),), name)


def never(cell: str) -> Fields:
    model, x = rnn(cell, halting=tp.models.never_halt), uniform(4, 5, 3)
    fields = run(model, (x,), "thresholded", lengths=LENGTHS)
    return fields | flops(model, x, MODES["thresholded"])


def unroll(cell: str) -> Fields:
    model = rnn(cell)
    outputs, logits = model.unroll(uniform(4, 3), initial(cell))
    losses = (outputs - 0.5).square().mean(2)
    loss = tp.ponder_loss(losses, logits, tau=0.2, beta=0.05)
    loss.backward()
    return {"outputs": outputs, "logits": logits, "loss": loss} | parameters(model)


def stacked(name: str) -> Fields:
    layers = [rnn("gru"), rnn("lstm", inputs=6, seed=1)]
    model, x = tp.models.StackedRNN(layers), uniform(4, 5, 3)
    fields = run(model, (x, [initial("gru"), initial("lstm")]), name, lengths=LENGTHS)
    return fields | (flops(model, x, MODES[name]) if name != "discrete" else {})


SEQUENCES: dict[str, dict[str, Any]] = {
    "floats": {"features": 3, "outputs": 2, "classes": 3},
    "embedded": {"features": 3, "embedding": 5, "cell": "gru", "layers": 2},
    "symbols": {"features": 7, "symbols": True, "embedding": 5, "cell": "rnn", "classes": 7},
    "repeated": {"features": 3, "adaptive": False, "max_steps": 3},
}


def sequence_net(kind: str) -> tuple[tp.models.SequenceNet, Tensor]:
    config = tp.models.SequenceConfig(**({"hidden": 6, "max_steps": 4} | SEQUENCES[kind]))
    x = uniform(4, 5, 3)
    if config.symbols:
        x = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(0))
    return fill(tp.models.SequenceNet(config), halting=-1.2), x


def sequences(kind: str, name: str) -> Fields:
    model, x = sequence_net(kind)
    mode = MODES[name]
    torch.manual_seed(1)
    # a network that repeats has a mode of its own
    if model.config.adaptive:
        tp.use_mode(model, mode)
    logits, states, ponders = model(x, lengths=LENGTHS)
    fields = flat("learn.logits", logits) | flat("learn.final", states) | flat("learn.ponders", ponders)
    targets = torch.arange(logits[..., 0].numel()) % logits.size(-1)
    nll = F.cross_entropy(logits.flatten(0, 2), targets, reduction="none").view(4, -1).mean(1)
    fields |= objective(nll, ponders, 0.1) | parameters(model)
    if name == "discrete":
        return fields
    torch.manual_seed(2)
    with torch.no_grad():
        _, states, _ = read = model(x, model.zero_states(4))
        fields |= flat("run", read) | flat("more", model(x, states))
    torch.manual_seed(2)
    count = tp.count_flops(model, x)
    fields |= {"flops.total": count.total, "flops.blocks": count.blocks, "flops.rest": count.rest}
    if kind in ("floats", "symbols"):
        fields |= flat("unroll", model.unroll(x[:, :1]))
    return fields


CASES = [
    *[Case(f"rnn-{cell}-{name}", partial(cells, cell, name)) for cell in CELLS for name in MODES],
    *[
        Case(f"rnn-lengths-{cell}-{name}", partial(lengths, cell, name))
        for cell in ("lstm", "gru")
        for name in MODES
    ],
    *[Case(f"rnn-packed-{name}", partial(packed, "lstm", name)) for name in MODES],
    *[Case(f"rnn-not-compact-{name}", partial(not_compact, "lstm", name)) for name in MODES],
    *[Case(f"rnn-time-first-{name}", partial(time_first, name)) for name in MODES],
    *[Case(f"rnn-never-halt-{cell}", partial(never, cell)) for cell in CELLS],
    *[Case(f"rnn-unroll-{cell}", partial(unroll, cell)) for cell in CELLS],
    *[Case(f"rnn-stacked-{name}", partial(stacked, name)) for name in MODES],
    *[
        Case(f"sequence-{kind}-{name}", partial(sequences, kind, name))
        for kind in SEQUENCES
        for name in (MODES if kind != "repeated" else ["thresholded"])
    ],
]
