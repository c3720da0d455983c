"""Training of a decoder whose tokens leave early: exits, heads, exits again as heads use them.

The read-out of a vocabulary costs more than all layers, so halting is decided by small heads on the state,
and only the state that a token leaves with is read out. In training, outputs are compared with the original
network's by their KL divergence, over the tokens that occur in the training stories; the rest of the
vocabulary is in evaluation only.

A halted token keeps its state, from which later layers make its keys and values. Exits are therefore trained
in runs in which tokens halt: at random at first, by their heads after that.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import torchpact as tp
from torchpact import criteria


@dataclass(frozen=True)
class StorySettings:
    """How long and how fast to train."""

    updates: int = 300
    """Of all weights, the last ``own`` of them with tokens that halt by their heads."""
    own: int = 100
    size: int = 8
    """Stories of an update."""
    lr: float = 3e-4
    warm_up: float = 0.05
    histogram: tuple[float, ...] = (0.0, 0.0, 0.2, 0.2, 0.2, 0.4)
    """The shares of tokens that leave after each layer, where they do at random; 0 is not trained."""
    head_updates: int = 300
    head_lr: float = 3e-3
    head_tokens: int = 2048
    """Tokens of an update of the heads."""
    hidden: int = 64
    """Features of the hidden layer of a head."""
    layers: float = 4.5
    """The mean number of layers of a token."""


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
