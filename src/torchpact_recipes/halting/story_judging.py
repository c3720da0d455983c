"""What decoders lose on stories: by heads, by other criteria, at fixed exits, at random, in hindsight."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import torchpact as tp
from torchpact import criteria
from torchpact_recipes.halting.judging import paired
from torchpact_recipes.halting.story_heads import bound_for
from torchpact_recipes.halting.story_runs import StorySettings, ran, states_of, thresholded
from torchpact_recipes.halting.tables import Row, difference, write_csv

CURVE = (3.0, 3.5, 4.0, 4.5, 5.0, 5.5)
READOUT = ["model.norm", "lm_head"]


class Trained(Protocol):
    """Where networks and stories come from."""

    settings: StorySettings
    teacher: Any
    test: Tensor
    validation: Tensor

    @property
    def layers(self) -> int:
        """How many layers the original has."""

    def exits(self, seed: int) -> Any:
        """Return the network whose tokens leave early."""

    def student(self, layers: int, seed: int) -> Any:
        """Return a student of the first layers."""


class Told(NamedTuple):
    """What a network says of the next tokens of stories."""

    losses: Tensor
    """Cross-entropy of each next token, (stories, length − 1)."""
    steps: Tensor
    """Layers of each token, (stories, length − 1); the last token of a story predicts nothing."""

    @property
    def by_story(self) -> Tensor:
        """The mean loss of each story."""
        return self.losses.double().mean(1)

    @property
    def layers(self) -> float:
        """The mean number of layers."""
        return float(self.steps.double().mean())


@torch.no_grad()
def told(net: Any, stories: Tensor, *settings: Any, size: int = 16) -> Told:
    """Return the losses of a decoder on stories, through the states that tokens leave with.

    Args:
        net: The decoder, adapted or not.
        stories: The stories.
        settings: Of an adapted one, such as ``tp.use_thresholds(net, …)``.
        size: Stories of a batch.

    """
    losses, steps = [], []
    adaptive = hasattr(net, "torchpact")
    with ExitStack() as stack:
        for each in settings:
            stack.enter_context(each)
        for tokens in stories.split(size):
            with torch.autocast("cpu", torch.bfloat16), ExitStack() as inner:
                ponders = inner.enter_context(tp.collect(net)) if adaptive else None
                logits = net(input_ids=tokens, use_cache=False).logits[:, :-1].float()
            losses.append(cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none"))
            if ponders is not None:
                steps.append(ponders[0].steps.squeeze(-1)[:, :-1])
    count = net.config.num_hidden_layers
    found = torch.cat(losses)
    return Told(found, torch.cat(steps) if steps else torch.full(found.shape, count))


@torch.no_grad()
def hindsight(net: Any, teacher: Any, stories: Tensor, layers: float) -> Told:
    """Return what tokens lose that choose their exits knowing all losses, at so many layers in the mean.

    Halted tokens are taken not to change what others see: this is a bound, not a run.

    Args:
        net: The adapted decoder.
        teacher: The original.
        stories: The stories.
        layers: The mean number of layers.

    """
    states: list[Tensor] = []
    for tokens in stories.split(16):
        with torch.autocast("cpu", torch.bfloat16):
            found, _ = states_of(ran(net, tokens, *thresholded(net, tp.Thresholds("never"))))
            own = []
            for u in found:
                logits = net.lm_head(net.model.norm(u))[:, :-1].float().transpose(1, 2)
                own.append(cross_entropy(logits, tokens[:, 1:], reduction="none"))
        states.append(torch.stack(own))
    losses = torch.cat(states, 1)
    count = torch.arange(1, len(losses) + 1).view(-1, 1, 1)
    low, high = 0.0, 10.0
    for _ in range(40):
        tau = (low + high) / 2
        steps = (losses + tau * count).argmin(0) + 1
        low, high = (tau, high) if float(steps.double().mean()) > layers else (low, tau)
    steps = (losses + high * count).argmin(0) + 1
    return Told(losses.gather(0, (steps - 1).unsqueeze(0))[0], steps)


def histogram(steps: Tensor, layers: int) -> list[float]:
    """Return the shares of tokens that leave after each layer."""
    counts = torch.bincount(steps.flatten(), minlength=layers + 1)[1:].double()
    shares: list[float] = (counts / counts.sum()).tolist()
    return shares


def share_of(net: Any, stories: Tensor, *settings: Any) -> float:
    """Return the FLOPs of a run as a share of those of the original."""
    with ExitStack() as stack:
        for each in settings:
            stack.enter_context(each)
        return float(tp.count_flops(net, {"input_ids": stories, "use_cache": False}).share)


def judged(work: Trained, seed: int, layers: float, test: Tensor) -> dict[str, tuple[Told, Row]]:
    """Return what the network with exits gives on stories, and other ways to choose exits.

    Args:
        work: The networks.
        seed: Of the training.
        layers: The mean number of layers.
        test: The stories.

    """
    net = work.exits(seed)
    few = test[:16]
    found: dict[str, tuple[Told, Row]] = {}
    for asked in CURVE:
        bounds = tp.Thresholds(bound_for(net, work.validation, asked))
        one = told(net, test, *thresholded(net, bounds))
        name = "heads" if asked == layers else f"heads, {asked:g} layers"
        shares = histogram(one.steps, work.layers)
        row: Row = {"flops": share_of(net, few, *thresholded(net, bounds)), "elsewhere": 1 - max(shares)}
        found[name] = one, row
    shares = histogram(found["heads"][0].steps, work.layers)
    torch.manual_seed(seed)
    random = tp.use_heads(net, criteria.RandomExit(shares)), tp.use_mode(net, "discrete")
    found["random"] = told(net, test, *random), {}
    for step in range(1, work.layers + 1):
        fixed = thresholded(net, tp.exit_thresholds(net, step))
        found[f"all leave after layer {step}"] = (
            told(net, test, *fixed),
            {"flops": share_of(net, few, *fixed)},
        )
    for name, criterion in (
        ("confidence", criteria.Confidence(READOUT)),
        ("patience", criteria.Unchanged(READOUT, steps=1)),
    ):
        with tp.use_heads(net, criterion):
            bounds = tp.Thresholds(
                0.5 if name == "patience" else bound_for(net, work.validation[:32], layers)
            )
            one = told(net, test, *thresholded(net, bounds))
            found[name] = one, {"flops": share_of(net, few, *thresholded(net, bounds))}
    found["oracle"] = hindsight(net, work.teacher, test, layers), {}
    return found


def write(work: Trained, seeds: Sequence[int], out: Path, students: Sequence[int], part: str) -> None:
    """Judge on stories, and write tables.

    Args:
        work: The networks.
        seeds: Of the trainings.
        out: The folder of the tables.
        students: Their numbers of layers.
        part: "test", or "validation", on which bounds are chosen by the number of layers, not by losses.

    """
    stories = work.test if part == "test" else work.validation
    full = told(work.teacher, stories)
    rows: list[Row] = [_row("full", "", full, full, {"flops": 1.0})]
    by_name: dict[str, list[Tensor]] = {}
    for seed in seeds:
        given = judged(work, seed, work.settings.layers, stories)
        for layers in students:
            student = told(work.student(layers, seed), stories)
            given[f"student of {layers} layers"] = student, {}
        for name, (one, extra) in given.items():
            rows.append(_row(name, seed, one, full, extra))
            by_name.setdefault(name, []).append(one.by_story)
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "stories.csv", [{"part": part, **row} for row in rows])
    ours = torch.stack(by_name["heads"])
    differences = [difference("heads", "full", paired(ours, full.by_story), 4)]
    for name, theirs in by_name.items():
        if name != "heads":
            differences.append(difference("heads", name, paired(ours, torch.stack(theirs)), 4))
    write_csv(out / "stories_differences.csv", [{"part": part, **row} for row in differences])


def _row(name: str, seed: Any, one: Told, full: Told, extra: Row) -> Row:
    loss = float(one.by_story.mean())
    return {
        "network": name,
        "seed": seed,
        "loss": round(loss, 4),
        "excess": round(loss - float(full.by_story.mean()), 4),
        "layers": round(one.layers, 3),
        **{key: round(value, 4) for key, value in extra.items()},
    }
