"""Training of a decoder whose tokens leave early: exits, heads, exits again as heads use them.

The read-out of a vocabulary costs more than all layers, so halting is decided by small heads on the state,
and only the state that a token leaves with is read out. In training, outputs are compared with the original
network's by their KL divergence, over the tokens that occur in the training stories; the rest of the
vocabulary is in evaluation only.

A halted token keeps its state, from which later layers make its keys and values. Exits are therefore trained
in runs in which tokens halt: at random at first, by their heads after that.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import torchpact as tp
from torchpact import criteria
from torchpact_recipes.halting.story_heads import bound_for, learn_to_halt
from torchpact_recipes.halting.story_runs import (
    Readout,
    StorySettings,
    divergence,
    predicted,
    ran,
    states_of,
    taught,
    thresholded,
)


def exits_loss(readout: Readout, ponders: tp.Ponders, target: Tensor, histogram: Sequence[float]) -> Tensor:
    """Return the divergence summed over exits, each of the tokens that got there; a mean over tokens.

    Args:
        readout: Of states.
        ponders: Of a run in which tokens halt.
        target: What the teacher says.
        histogram: Exits of share 0 are left out.

    """
    states, steps = states_of(ponders)
    total = torch.zeros(())
    for index, state in enumerate(states):
        there = steps > index
        if histogram[index] and bool(there.any()):
            found = divergence(target[there], readout(state[there]))
            total = total + found.sum() / steps.numel()
    return total


def last_loss(readout: Readout, ponders: tp.Ponders, target: Tensor) -> Tensor:
    """Return the divergence of the states that tokens left with; a mean over tokens."""
    return divergence(target, readout(states_of(ponders)[0][-1])).mean()


def batches(stories: Tensor, size: int, count: int, seed: int) -> Iterator[Tensor]:
    """Yield batches of stories, each story as often as any other, in an order of the seed."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(count):
        while len(order) < size:
            order += torch.randperm(len(stories), generator=generator).tolist()
        yield stories[order[:size]]
        order = order[size:]


def optimise(
    net: Any,
    stories: Tensor,
    settings: StorySettings,
    seed: int,
    loss: Callable[[int, Tensor], Tensor],
) -> None:
    """Train all weights but those of heads.

    Args:
        net: The decoder.
        stories: To train on.
        settings: How long and how fast.
        seed: Of the order.
        loss: Of the number of the update and a batch.

    """
    weights = [p for name, p in net.named_parameters() if not name.startswith("torchpact")]
    optimizer = torch.optim.AdamW(weights, lr=settings.lr, weight_decay=0.0)
    rising = max(1, round(settings.warm_up * settings.updates))
    for update, tokens in enumerate(batches(stories, settings.size, settings.updates, seed)):
        falling = (settings.updates - update) / max(1, settings.updates - rising)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min((update + 1) / rising, falling)
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(update, tokens)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        if update % 50 == 49:
            print(f"update {update + 1}: loss {float(value.detach()):.3f}", flush=True)


def train_student(net: Any, teacher: Any, stories: Tensor, settings: StorySettings, seed: int) -> None:
    """Distil a decoder without exits, by as many updates.

    Args:
        net: The decoder, of fewer layers.
        teacher: The original.
        stories: To train on.
        settings: How long and how fast.
        seed: Of the order.

    """
    vocabulary = stories.unique()

    def loss(update: int, tokens: Tensor) -> Tensor:
        return divergence(taught(teacher, tokens, vocabulary), predicted(net, tokens, vocabulary)).mean()

    optimise(net, stories, settings, seed, loss)


def train_exits(net: Any, teacher: Any, stories: Tensor, settings: StorySettings, seed: int) -> None:
    """Train a decoder so that tokens can leave early: exits, heads, exits as heads use them, heads.

    Args:
        net: The decoder, adapted per token with learned heads.
        teacher: The original.
        stories: To train on; heads learn from the last eighth of them, which exits do not see.
        settings: How long and how fast.
        seed: Of the order, and of random exits.

    """
    vocabulary = stories.unique()
    readout = Readout(net, vocabulary)
    apart = max(1, len(stories) // 8)
    seen, for_heads = stories[:-apart], stories[-apart:]
    random = criteria.RandomExit(settings.histogram)
    bound: list[tp.Thresholds] = []

    def loss(update: int, tokens: Tensor) -> Tensor:
        target = taught(teacher, tokens, vocabulary)
        if update < settings.updates - settings.own:
            drawn = tp.use_heads(net, random), tp.use_mode(net, "discrete")
            return exits_loss(readout, ran(net, tokens, *drawn), target, settings.histogram)
        if not bound:
            learn_to_halt(net, teacher, for_heads, vocabulary, settings, seed)
            bound.append(bound_for(net, for_heads[:64], settings.layers))
        return last_loss(readout, ran(net, tokens, *thresholded(net, bound[0])), target)

    torch.manual_seed(seed)
    optimise(net, seen, settings, seed, loss)
    learn_to_halt(net, teacher, for_heads, vocabulary, settings, seed)
