"""A pretrained encoder of sentences made adaptive in minutes: what ``torchpact demo --text`` does.

The network is its own teacher: an adaptive copy has to give the embeddings of the original, and pays for the
layers that its tokens take. No labels are needed. In the last quarter heads stay as they are and decide by
threshold, as they will in use, and layers get used to what was decided.
"""

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchpact as tp
from torchpact.engines import Deployed
from torchpact.engines.timing import CpuContention, interleaved

BIAS = -3.0
"""That of the heads at the start; at −5 they hardly move in so few updates."""
SCALE = 50.0
"""What 1 − cosine is multiplied with, beside the price."""
HEAD_RATE, RATE = 0.02, 3e-4
"""The learning rates of heads and of layers."""
RAMP, SETTLED = 0.5, 0.75
"""The shares of training over which τ rises, and after which heads stay as they are."""
BATCH, LENGTH = 12, 48
"""Texts in an update, and tokens of a text at most."""


class Step(NamedTuple):
    """What training tells of an update."""

    done: int
    cosine: float
    """The mean over the batch."""
    layers: float
    """The expected number of layers of a token."""
    seconds: float


class Word(NamedTuple):
    """A word of a text, with what follows it, and the layers of the piece of it that took most."""

    text: str
    layers: int


class Quality(NamedTuple):
    """How an adaptive network compares with the original on held-out texts."""

    cosine: float
    """The mean over texts of the cosine of the embeddings."""
    worst: float
    layers: float
    """Of a token, padding excluded."""
    flops: float
    """The FLOPs of the adaptive network."""
    full: float
    """Those of the same network with all layers for all tokens."""


class Times(NamedTuple):
    """Milliseconds for a batch of texts, medians of interleaved calls."""

    original: float
    deployed: float
    full: float
    """Of the deployed network, where no token halts: what engines give a network that is not adaptive."""
    texts: int
    tokens: int
    """The length of the longest text."""
    contended: bool
    """Whether other programs used the processor meanwhile."""


def adapt(net: Any) -> Any:
    """Return an adaptive copy of an encoder, whose word embeddings stay; dropout is off."""
    ada = tp.adapt(copy.deepcopy(net), per="token", bias=BIAS)
    ada.get_input_embeddings().requires_grad_(False)
    for module in ada.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return ada


def encode(tokenizer: Any, texts: Sequence[str]) -> dict[str, Tensor]:
    """Return texts as what the network is called with."""
    options = {"padding": True, "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
    return dict(tokenizer(list(texts), **options))


def embed(net: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return embeddings of sentences: means of the last states over the tokens that are real."""
    states = net(**batch).last_hidden_state
    real = batch["attention_mask"].unsqueeze(2).to(states.dtype)
    mean: Tensor = (states * real).sum(1) / real.sum(1)
    return mean


def train(
    ada: Any,
    teacher: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    updates: int,
    tau: float,
    seed: int,
    report: Callable[[Step], None] = lambda step: None,
) -> None:
    """Teach an adaptive encoder to give its teacher's embeddings, at τ a layer of a token.

    Args:
        ada: What :func:`adapt` returned; it is in evaluation at the end.
        teacher: The original.
        tokenizer: That of both.
        texts: Any texts; labels are not needed.
        updates: How many updates.
        tau: The price in the end; it rises from 0.
        seed: Of the order of the texts, and of halting.
        report: Told about each update.

    """
    torch.manual_seed(seed)
    heads = [*ada.torchpact.parameters()]
    own = {id(p) for p in heads}
    body = [p for p in ada.parameters() if p.requires_grad and id(p) not in own]
    optimizer = torch.optim.AdamW([{"params": heads}, {"params": body}], weight_decay=0.0)
    started = time.monotonic()
    for done, chosen in enumerate(itertools.islice(_batches(texts, seed), updates)):
        share = done / updates
        settled = share >= SETTLED
        ada.train(not settled)
        for group, rate in zip(optimizer.param_groups, rates(share), strict=True):
            group["lr"] = rate
        batch = encode(tokenizer, chosen)
        with torch.no_grad():
            wanted = embed(teacher, batch)
        with tp.collect(ada) as ponders:
            got = embed(ada, batch)
        cosine = F.cosine_similarity(got, wanted)
        price = 0.0 if settled else tau * min(1.0, share / RAMP)
        optimizer.zero_grad()
        tp.map_loss(SCALE * (1 - cosine), ponders, tau=price).backward()
        nn.utils.clip_grad_norm_(body, 1.0)
        optimizer.step()
        layers = float(ponders.cost.detach())
        report(Step(done + 1, float(cosine.mean().detach()), layers, time.monotonic() - started))
    ada.eval()


def rates(share: float) -> tuple[float, float]:
    """Return the learning rates of heads and of layers, after a share of training.

    >>> rates(0.05), rates(0.9)[0]
    ((0.01, 0.0003), 0.0)
    """
    heads = 0.0 if share >= SETTLED else HEAD_RATE * min(1.0, 10 * share)
    return heads, RATE * min(1.0, 20 * share, 2 * (1 - share))


@torch.no_grad()
def compare(ada: Any, teacher: Any, tokenizer: Any, texts: Sequence[str], batch: int = 50) -> Quality:
    """Return how an adaptive network, thresholded, compares with the original on texts."""
    cosines, steps, weights, flops, full = [], 0.0, 0.0, 0.0, 0.0
    for start in range(0, len(texts), batch):
        inputs = encode(tokenizer, texts[start : start + batch])
        with tp.collect(ada) as ponders:
            got = embed(ada, inputs)
        cosines.append(F.cosine_similarity(got, embed(teacher, inputs)))
        real = inputs["attention_mask"]
        steps += float((ponders[0].steps.squeeze(2) * real).sum())
        weights += float(real.sum())
        flops += float(tp.count_flops(ada, inputs).total.sum())
        with tp.use_thresholds(ada, tp.Thresholds("never")):
            full += float(tp.count_flops(ada, inputs).total.sum())
    cosine = torch.cat(cosines)
    number = len(texts)
    return Quality(float(cosine.mean()), float(cosine.min()), steps / weights, flops / number, full / number)


@torch.no_grad()
def time_them(
    fast: Deployed, teacher: Any, tokenizer: Any, texts: Sequence[str], seconds: float = 3.0
) -> Times:
    """Return the times of the original and of the deployed network, taken in turns."""
    others, inputs = CpuContention(), encode(tokenizer, texts)
    never = tp.Thresholds("never")
    found = interleaved(
        {
            "original": lambda: teacher(**inputs),
            "deployed": lambda: fast(**inputs),
            "full": lambda: fast(**inputs, thresholds=never),
        },
        seconds=seconds,
    )
    number, length = inputs["attention_mask"].shape
    times = {name: 1000 * seconds for name, seconds in found.items()}
    return Times(times["original"], times["deployed"], times["full"], number, length, others.is_high())


@torch.no_grad()
def words(net: Any, tokenizer: Any, texts: Sequence[str]) -> list[list[Word]]:
    """Return the words of texts, with the number of layers that each took.

    Args:
        net: An adaptive encoder in evaluation, or a deployed one.
        tokenizer: Its tokenizer.
        texts: The texts; what is cut off has 0 layers.

    """
    coded = tokenizer(list(texts), padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
    with tp.collect(net) as ponders:
        net(**coded)
    steps = ponders[0].steps.squeeze(2).int().tolist()
    return [_words(coded, row, text, steps[row]) for row, text in enumerate(texts)]


def _words(coded: Any, row: int, text: str, steps: list[int]) -> list[Word]:
    taken: dict[int, int] = {}
    for number, layers in zip(coded.word_ids(row), steps, strict=True):
        if number is not None:
            taken[number] = max(layers, taken.get(number, 0))
    places = [coded.word_to_chars(row, number) for number in taken]
    starts = [place.start for place in places]
    ends = [*starts[1:], len(text)]
    cut = places[-1].end if places else 0
    found = [
        Word(text[start:end], layers) for start, end, layers in zip(starts, ends, taken.values(), strict=True)
    ]
    if found and (rest := text[cut:]).strip():
        found[-1:] = [Word(found[-1].text.removesuffix(rest), found[-1].layers), Word(rest, 0)]
    return found


def _batches(texts: Sequence[str], seed: int) -> Iterator[list[str]]:
    """Yield batches of different texts of about the same length, so that little is padding."""
    generator = torch.Generator().manual_seed(seed)
    pool = min(8 * BATCH, len(texts))
    while True:
        order = torch.randperm(len(texts), generator=generator).tolist()
        for start in range(0, len(order) - pool + 1, pool):
            some = sorted((texts[index] for index in order[start : start + pool]), key=len)
            batches = [some[first : first + BATCH] for first in range(0, pool, BATCH)]
            for chosen in torch.randperm(len(batches), generator=generator).tolist():
                yield batches[chosen]
