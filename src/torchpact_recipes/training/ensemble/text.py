"""Networks that read text, several at once and in few kernels; what they compute is what each would alone."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchpact import AdaptiveRNN, Mode
from torchpact.core.halting import steps_from_survival
from torchpact.core.state import State
from torchpact.models import HaltingUnit, SequenceNet
from torchpact_recipes.training.ensemble.lstm import Reading, Weights, read_window
from torchpact_recipes.training.ensemble.lstm_tape import Rule, rule_of

LSTMState = tuple[Tensor, Tensor]


class Pondering(NamedTuple):
    """What a layer of each network did, (networks, time, batch); as in :class:`~torchpact.Ponder`."""

    steps: Tensor
    expected_steps: Tensor
    cost: Tensor


def can_read(model: SequenceNet) -> bool:
    """Whether it is for networks like this: LSTMs for symbols, in modes of ours.

    >>> settings = dict(features=256, classes=256, symbols=True, embedding=16)
    >>> [can_read(SequenceNet(tp.models.SequenceConfig(**settings, cell=cell))) for cell in ("lstm", "gru")]
    [True, False]
    """
    config = model.config
    return (
        config.symbols
        and config.outputs == 1
        and model.readout.weight.dtype in (torch.float, torch.double)
        and not (config.dropout and model.training)
        and all(isinstance(layer, AdaptiveRNN) and _fits(layer) for layer in model.rnn.layers)
    )


def _fits(layer: AdaptiveRNN) -> bool:
    known = layer.never_halts or (
        type(layer.block.halting[0]) is HaltingUnit and rule_of(layer.block.mode) is not None
    )
    return known and type(layer.cell) is nn.LSTMCell and layer.cell.bias


def read_text(
    model: SequenceNet, weights: Mapping[str, Tensor], symbols: Tensor, states: Sequence[LSTMState]
) -> tuple[Tensor, list[LSTMState], list[Pondering]]:
    """Let networks that are like ``model`` read symbols of shape (batch, time), each from states of its own.

    ``weights`` are those of all networks, by the names of the model's parameters; of these and of states
    the first dimension is the networks'. The logits are of shape (networks, time, batch, classes).
    """
    count, features = len(weights["readout.weight"]), model.config.features
    batch, time = symbols.shape
    table = weights["entry.weight"]
    # a product: looking rows up is less work, but its gradient is a sort of all symbols
    hot = (symbols.t().reshape(-1, 1) == torch.arange(features, device=symbols.device)).to(table.dtype)
    x = torch.bmm(hot.expand(count, -1, -1), table).unflatten(1, (time, batch))
    finals, ponderings = [], []
    for index, (layer, state) in enumerate(zip(model.rnn.layers, states, strict=True)):
        assert isinstance(layer, AdaptiveRNN)
        mode = layer.block.mode
        rule = None if layer.never_halts else rule_of(mode)
        found = read_window(
            x,
            _weights(weights, f"rnn.layers.{index}.block", repeats=layer.never_halts),
            state,
            layer.max_steps,
            rule or Rule(),
            getattr(mode, "generator", None),
        )
        x = found.outputs
        finals.append(found.state)
        ponderings.append(_pondering(found, mode))
    readout = weights["readout.weight"].transpose(1, 2)
    logits = torch.baddbmm(weights["readout.bias"].unsqueeze(1), x.flatten(1, 2), readout)
    return logits.unflatten(1, (time, batch)), finals, ponderings


def read_single(
    model: SequenceNet, symbols: Tensor, states: Sequence[State]
) -> tuple[Tensor, list[LSTMState], Tensor]:
    """Let one network read; return logits of shape (batch, time, classes), its states, and steps."""
    weights = {name: parameter.unsqueeze(0) for name, parameter in model.named_parameters()}
    logits, finals, ponderings = read_text(
        model, weights, symbols, [(state[0].unsqueeze(0), state[1].unsqueeze(0)) for state in states]
    )
    steps = torch.stack([pondering.steps[0] for pondering in ponderings]).sum(0)
    return logits[0].transpose(0, 1), [(h[0], c[0]) for h, c in finals], steps.t()


def _weights(weights: Mapping[str, Tensor], block: str, repeats: bool) -> Weights:
    cell = f"{block}.steps.0.cell"
    entering = weights[f"{cell}.weight_ih"]
    head = None if repeats else weights[f"{block}.halting.0.linear.weight"].squeeze(1)
    bias = None if repeats else weights[f"{block}.halting.0.linear.bias"].squeeze(1)
    return Weights(
        # in rows of their own, which lie as products want them
        entering[:, :, :-1].contiguous(),
        entering[:, :, -1],
        weights[f"{cell}.weight_hh"],
        weights[f"{cell}.bias_ih"] + weights[f"{cell}.bias_hh"],
        head,
        bias,
    )


def _pondering(found: Reading, mode: Mode) -> Pondering:
    logits = found.logits.movedim(2, 0)
    expected = steps_from_survival(torch.sigmoid(-logits[:-1]), 0)
    steps = 1 + (mode.gate(found.remaining[:, :, 1:]) > 0).sum(2)
    return Pondering(steps, expected, mode.cost(torch.sigmoid(logits), steps, expected))
