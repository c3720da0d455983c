"""Heads of a decoder on stories: trained by advantage on a record of exits, and a bound for them."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

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


def learn_to_halt(
    net: Any, teacher: Any, stories: Tensor, vocabulary: Tensor, settings: StorySettings, seed: int
) -> float:
    """Train the heads by the advantage of halting, at a price that meets the mean number of layers.

    Args:
        net: The decoder; its other weights stay.
        teacher: The original.
        stories: To learn from.
        vocabulary: The tokens that outputs are compared over.
        settings: How long and how fast.
        seed: Of the batches.

    Returns:
        The price, in nats.

    """
    states, losses = recorded(net, teacher, stories, vocabulary)
    heads = [head for head in net.torchpact.runs[0].heads]  # noqa: C416
    optimizer = torch.optim.Adam([p for head in heads for p in head.parameters()], lr=settings.head_lr)
    generator = torch.Generator().manual_seed(seed)
    most = len(states)
    price = tp.PriceController(0.03, floor=1e-3, ceiling=1.0, gain=0.5)
    for _ in range(settings.head_updates):
        index = torch.randint(states.size(1), (settings.head_tokens,), generator=generator)
        seen = [states[i, index].float() for i in range(most - 1)]
        logits = torch.stack(
            [head(criteria.Exit(u, u, i)) for i, (head, u) in enumerate(zip(heads, seen, strict=True))]
        )
        whole = torch.cat([logits, torch.zeros_like(logits[:1])])
        found = losses[:, index].unsqueeze(2)
        value = tp.advantage_loss(found, whole, price.tau)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        halted = torch.cat([logits.detach() > 0, torch.ones_like(logits[:1]).bool()])
        steps = float(halted.int().argmax(0).double().mean()) + 1
        price.move(steps, settings.layers, 1.0, most)
    return price.tau


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


def bound_for(
    net: Any, stories: Tensor, layers: float, low: float = -12.0, high: float = 12.0
) -> tp.Thresholds:
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
    return tp.Thresholds(low)
