"""Training of a decoder whose tokens leave early: fewer and fewer layers, from the whole network on.

The read-out of a vocabulary costs more than all layers, so halting is decided by small heads on the state,
and only the state that a token leaves with is read out. In training, outputs are compared with the original
network's by their KL divergence, over the tokens that occur in the training stories and some others; the rest
of the vocabulary is in evaluation only.

A halted token keeps its state, from which later layers make its keys and values. So all weights are trained
in runs in which tokens halt by their heads. Heads tell how far an exit is from the original's prediction; the
bound that they share is moved so that the mean number of layers falls slowly, the easiest tokens first.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

import torchpact as tp
from torchpact_recipes.halting.story_heads import asked, bound_for, closeness, learn_closeness
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

GAIN = 0.5
"""How far the bound moves for a layer too many."""


def words(stories: Tensor, settings: StorySettings, count: int, seed: int) -> Tensor:
    """Return the tokens that outputs are compared over: those of the stories, and some others.

    Args:
        stories: The stories.
        settings: How many others.
        count: The size of the vocabulary.
        seed: Of the others.

    """
    known = stories.unique()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    others = order[~torch.isin(order, known)][: settings.others]
    return torch.cat([known, others])


def exits_loss(
    net: Any, readout: Readout, ponders: tp.Ponders, target: Tensor, settings: StorySettings
) -> tuple[Tensor, Tensor]:
    """Return the losses of the network and of its heads in a run in which tokens halt; means over tokens.

    The loss of the network is the divergence where tokens left, and, for some of those that went on, that of
    the exit before, KL / (KL + ½) with the denominator held fixed: exits learn where they are nearly right.
    Heads learn to tell the closeness of both.

    Args:
        net: The decoder.
        readout: Of states.
        ponders: Of the run, with exits.
        target: What the teacher says.
        settings: The weight and the number of exits that are not taken.

    """
    states, steps = states_of(ponders)
    taken = divergence(target, readout(states[-1]))
    total, heads = taken.mean(), torch.zeros(())
    for index, state in enumerate(states[:-1]):
        left = steps == index + 1
        going = (steps > index + 1).nonzero()
        going = going[torch.randperm(len(going))[: settings.sample]]
        there = going[:, 0], going[:, 1]
        found = divergence(target[there], readout(state[there]))
        if len(going):
            total = total + settings.going_on / len(states) * (found / (found.detach() + 0.5)).mean()
        seen = torch.cat([state[there], state[left]]).detach().float()
        known = torch.cat([found, taken[left]]).detach().float()
        if len(known):
            heads = heads + smooth_l1_loss(asked(net, index, seen), closeness(known))
    return total, heads


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
    """Train all weights, and heads at a rate of their own.

    Args:
        net: The decoder.
        stories: To train on.
        settings: How long and how fast.
        seed: Of the order.
        loss: Of the number of the update and a batch.

    """
    named = [*net.named_parameters()]
    weights = [p for name, p in named if not name.startswith("torchpact")]
    heads = [p for name, p in named if name.startswith("torchpact")]
    groups = [(weights, settings.lr), (heads, settings.head_lr / 3)]
    optimizer = torch.optim.AdamW(
        [{"params": each, "lr": lr} for each, lr in groups if each], weight_decay=0.0, betas=(0.9, 0.98)
    )
    rising, falling = (max(1, round(x * settings.updates)) for x in (settings.warm_up, settings.decay))
    for update, tokens in enumerate(batches(stories, settings.size, settings.updates, seed)):
        share = min(1.0, (update + 1) / rising, (settings.updates - update) / falling)
        for group, (_, lr) in zip(optimizer.param_groups, groups, strict=False):
            group["lr"] = lr * share
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
    vocabulary = words(stories, settings, net.config.vocab_size, seed)

    def loss(update: int, tokens: Tensor) -> Tensor:
        return divergence(taught(teacher, tokens, vocabulary), predicted(net, tokens, vocabulary)).mean()

    optimise(net, stories, settings, seed, loss)


def train_exits(net: Any, teacher: Any, stories: Tensor, settings: StorySettings, seed: int) -> None:
    """Train a decoder so that tokens can leave early, the easiest ones first.

    Args:
        net: The decoder, adapted per token with learned heads.
        teacher: The original.
        stories: To train on; heads begin with the last of them, which the weights do not see.
        settings: How long and how fast.
        seed: Of the order.

    """
    torch.manual_seed(seed)
    vocabulary = words(stories, settings, net.config.vocab_size, seed)
    readout = Readout(net, vocabulary)
    apart = max(1, min(64, len(stories) // 8))
    seen, for_heads = stories[:-apart], stories[-apart:]
    learn_closeness(net, teacher, for_heads, vocabulary, settings, seed)
    bound = bound_for(net, for_heads[:32], settings.first)

    def loss(update: int, tokens: Tensor) -> Tensor:
        nonlocal bound
        target = taught(teacher, tokens, vocabulary)
        ponders = ran(net, tokens, *thresholded(net, tp.Thresholds(bound)))
        network, heads = exits_loss(net, readout, ponders, target, settings)
        done = min(1.0, update / max(1, round(settings.ramp * settings.updates)))
        wanted = settings.first + done * (settings.layers - settings.first)
        bound += GAIN * (wanted - float(states_of(ponders)[1].double().mean()))
        return network + heads

    optimise(net, seen, settings, seed, loss)
