"""Heads of a decoder on stories, which tell how near an exit is to the original's prediction; their bound."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

import torchpact as tp
from torchpact import criteria
from torchpact_recipes.halting.story_runs import (
    Readout,
    StorySettings,
    divergence,
    ran,
    states_of,
    taught,
    thresholded,
)


def closeness(divergences: Tensor) -> Tensor:
    """Return what heads learn: −log(KL + 0.001).

    >>> closeness(torch.tensor([0.0, 0.999]))
    tensor([6.9078, -0.0000])
    """
    return -(divergences + 1e-3).log()


def asked(net: Any, index: int, states: Tensor) -> Tensor:
    """Return the logits of a head for states, (tokens, features).

    Args:
        net: The adapted decoder.
        index: The layer before the head, from 0.
        states: In single precision.

    """
    logits: Tensor = net.torchpact.runs[0].heads[index](criteria.Exit(states, states, index))
    return logits.float().squeeze(-1)


def learn_closeness(
    net: Any, teacher: Any, stories: Tensor, vocabulary: Tensor, settings: StorySettings, seed: int
) -> None:
    """Train the heads alone, on tokens of a run in which nothing halts.

    The difference to the last exit, whose divergence is small, is what halting loses, so that one bound for
    all heads halts where halting loses little.

    Args:
        net: The decoder; its other weights stay.
        teacher: The original.
        stories: To learn from.
        vocabulary: The tokens that outputs are compared over.
        settings: How long and how fast.
        seed: Of the batches.

    """
    states, losses = recorded(net, teacher, stories, vocabulary)
    heads = net.torchpact.runs[0].heads
    optimizer = torch.optim.Adam(heads.parameters(), lr=settings.head_lr)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.head_updates):
        index = torch.randint(states.size(1), (settings.head_tokens,), generator=generator)
        logits = torch.stack([asked(net, i, states[i, index].float()) for i in range(len(heads))])
        optimizer.zero_grad()
        smooth_l1_loss(logits, closeness(losses[:-1, index])).backward()
        optimizer.step()


@torch.no_grad()
def recorded(
    net: Any, teacher: Any, stories: Tensor, vocabulary: Tensor, size: int = 16
) -> tuple[Tensor, Tensor]:
    """Return the states of all tokens at all exits where nothing halts, and their divergences.

    Args:
        net: The adapted decoder.
        teacher: The original.
        stories: The stories.
        vocabulary: The tokens that outputs are compared over.
        size: Stories of a batch.

    Returns:
        States, (L, tokens, features), in bfloat16, and divergences, (L, tokens).

    """
    states, losses = [], []
    readout, never = Readout(net, vocabulary), tp.Thresholds("never")
    for tokens in stories.split(size):
        with torch.autocast("cpu", torch.bfloat16):
            target = taught(teacher, tokens, vocabulary)
            found, _ = states_of(ran(net, tokens, *thresholded(net, never)))
            losses.append(torch.stack([divergence(target, readout(u)).flatten() for u in found]))
        states.append(torch.stack([u.flatten(0, 1).to(torch.bfloat16) for u in found]))
    return torch.cat(states, 1), torch.cat(losses, 1)


@torch.no_grad()
def mean_layers(net: Any, stories: Tensor, thresholds: tp.Thresholds, size: int = 32) -> float:
    """Return the mean number of layers of a token."""
    steps = []
    for tokens in stories.split(size):
        with torch.autocast("cpu", torch.bfloat16), ExitStack() as stack:
            for each in thresholded(net, thresholds):
                stack.enter_context(each)
            ponders = stack.enter_context(tp.collect(net))
            net.model(input_ids=tokens)
        steps.append(ponders[0].steps.flatten())
    return float(torch.cat(steps).double().mean())


def bound_for(net: Any, stories: Tensor, layers: float, low: float = -12.0, high: float = 12.0) -> float:
    """Return one bound for all heads with which tokens run so many layers in the mean, or a little fewer.

    Args:
        net: The adapted decoder.
        stories: To count on.
        layers: The mean number of layers.
        low: A bound at which there are fewer.
        high: A bound at which there are more.

    """
    for _ in range(9):
        middle = (low + high) / 2
        fewer = mean_layers(net, stories, tp.Thresholds(middle)) <= layers
        low, high = (middle, high) if fewer else (low, middle)
    return low
