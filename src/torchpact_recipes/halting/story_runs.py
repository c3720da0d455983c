"""Runs of decoders on stories: settings, read-outs, what the teacher says, and the states of all exits."""

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import torchpact as tp


@dataclass(frozen=True)
class StorySettings:
    """How long and how fast to train."""

    updates: int = 1500
    """Of all weights."""
    size: int = 8
    """Stories of an update."""
    lr: float = 1e-4
    warm_up: float = 0.02
    decay: float = 0.7
    """The last share of the updates, in which the learning rate falls to 0."""
    first: float = 5.7
    """The mean number of layers of a token at the beginning."""
    layers: float = 4.5
    """The mean number of layers of a token in the end."""
    ramp: float = 0.3
    """The share of updates in which the one becomes the other."""
    going_on: float = 0.3
    """The weight of the exits that tokens do not take, in the loss."""
    sample: int = 128
    """How many tokens of an update are read out at each exit that they do not take."""
    others: int = 2000
    """How many words that do not occur in the stories outputs are compared over."""
    head_updates: int = 300
    head_lr: float = 3e-3
    head_tokens: int = 2048
    """Tokens of an update of the heads alone."""
    hidden: int = 64
    """Features of the hidden layer of a head."""


class Readout:
    """The read-out of states between layers of a decoder of Hugging Face, over some of its vocabulary.

    Args:
        net: The decoder.
        vocabulary: The tokens, or None for all.

    """

    def __init__(self, net: Any, vocabulary: Tensor | None = None) -> None:
        self.net, self.vocabulary = net, vocabulary

    def __call__(self, states: Tensor) -> Tensor:
        """Return the log-probabilities of the next token, for states of any shape (…, features)."""
        weight = self.net.lm_head.weight
        weight = weight if self.vocabulary is None else weight[self.vocabulary]
        return linear(self.net.model.norm(states), weight).float().log_softmax(-1)


def divergence(target: Tensor, ours: Tensor) -> Tensor:
    """Return KL(target ‖ ours) of log-probabilities along the last dimension."""
    return (target.exp() * (target - ours)).sum(-1)


def predicted(net: Any, tokens: Tensor, vocabulary: Tensor | None = None) -> Tensor:
    """Return the log-probabilities of the next token that a decoder gives, over some of its vocabulary."""
    weight = net.lm_head.weight
    weight = weight if vocabulary is None else weight[vocabulary]
    # the last state of a decoder of Hugging Face has had its norm
    return linear(net.model(input_ids=tokens).last_hidden_state, weight).float().log_softmax(-1)


@torch.no_grad()
def taught(teacher: Any, tokens: Tensor, vocabulary: Tensor | None = None) -> Tensor:
    """Return the log-probabilities of the next token by the original network."""
    return predicted(teacher, tokens, vocabulary)


def ran(net: Any, tokens: Tensor, *settings: AbstractContextManager[Any]) -> tp.Ponders:
    """Return what the layers of an adapted decoder did, exits included, in some settings.

    Args:
        net: The decoder.
        tokens: Of the stories.
        settings: Such as ``tp.use_mode(net, "discrete")``.

    """
    with ExitStack() as stack:
        for each in settings:
            stack.enter_context(each)
        ponders = stack.enter_context(tp.collect(net, exits=True))
        net.model(input_ids=tokens)
    return ponders


def thresholded(net: Any, thresholds: tp.Thresholds) -> tuple[AbstractContextManager[Any], ...]:
    """Return settings of a run with thresholds."""
    return tp.use_mode(net, "thresholded"), tp.use_thresholds(net, thresholds)


def states_of(ponders: tp.Ponders) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the states after all layers, and the layer that each token left after."""
    exits = ponders[0].exits
    assert exits is not None
    return tuple(x for x in exits.states if isinstance(x, Tensor)), ponders[0].steps.squeeze(-1)
