"""Recurrent layers that halt at all steps, and what there is to compare of them."""

import torch
from torch import nn

import torchpact as tp
from torchpact.models import HaltingUnit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CELLS = [nn.LSTMCell, nn.GRUCell, nn.RNNCell]


def lively(cell=nn.LSTMCell, hidden=8, features=3, max_steps=4, bias=True, **options):
    """A layer whose examples halt at all steps, since whether a state halts is close to a coin."""
    head = HaltingUnit(hidden, 0.0)
    nn.init.normal_(head.linear.weight, std=20.0)
    body = cell(features + 1, hidden, bias=bias)
    return tp.AdaptiveRNN(body, max_steps, halting=head, mode="thresholded", **options).to(DEVICE)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype)


def states(result):
    output, state, _ = result
    return [output, *(state if isinstance(state, tuple) else (state,))]


def decided(ponder, margin=1e-4):
    """Which sequences have no h so close to the threshold that rounding decides."""
    return ((ponder.probs[:-1] - 0.5).abs() > margin).flatten(2).all(0).all(1)
