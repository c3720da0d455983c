"""Halting on stories: stories15M, per token, trained on stories that it tells itself.

    python -m torchpact_recipes.halting.stories [--seeds 3] [--out results/halting] [--work FOLDER] [--test]

For each seed: all weights of the network are trained so that tokens can leave early, with heads on the state,
and students of 4 and 5 layers are distilled by as many updates. The original is *full*. One bound for all
heads is chosen on validation stories, for each mean number of layers. Weights stay in ``--work``, and what is
there is not made again. With ``--test`` the test stories are opened, and two files written:

    stories.csv              loss (nats a token), layers and FLOPs of everything, on the test stories
    stories_differences.csv  paired differences, with 95 % intervals, of the mean over seeds

FLOPs are shares of the original's, with its read-out and, for confidence and patience, the read-out of every
exit that they look at.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

import torchpact as tp
from torchpact import criteria
from torchpact_recipes.data.files import data_folder
from torchpact_recipes.data.stories import told_stories
from torchpact_recipes.halting.judging import paired
from torchpact_recipes.halting.story_training import (
    StorySettings,
    bound_for,
    ran,
    states_of,
    thresholded,
    train_exits,
    train_student,
)
from torchpact_recipes.halting.tables import Row, difference, save_tensors, write_csv
from torchpact_recipes.pretrained import stories15m

STUDENTS = (4, 5)
LENGTH, VALIDATION, TEST = 128, 96, 192
CURVE = (3.0, 3.5, 4.0, 4.5, 5.0, 5.5)
READOUT = ["model.norm", "lm_head"]


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


class Stories:
    """Networks of a seed, made once and kept in a folder, and the stories.

    Args:
        folder: The folder.
        settings: Of the training.
        told: How many stories there are to train on.
        source: Returns the original network and its tokenizer.
        tell: Returns stories: of the network, how many, and how long.

    """

    def __init__(
        self,
        folder: Path,
        settings: StorySettings,
        told: int,
        source: Callable[[], tuple[Any, Any]] = stories15m,
        tell: Callable[[Any, int, int], Tensor] = told_stories,
    ) -> None:
        self.folder, self.settings, self.source = folder, settings, source
        self.teacher = source()[0].eval()
        stories = tell(self.teacher, TEST + VALIDATION + told, LENGTH)
        self.test, self.validation, self.train = stories.split([TEST, VALIDATION, told])
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def layers(self) -> int:
        """How many layers the original has."""
        return int(self.teacher.config.num_hidden_layers)

    def exits(self, seed: int) -> Any:
        """Return the network whose tokens leave early."""
        torch.manual_seed(seed)
        head = criteria.MLP(hidden=self.settings.hidden, normalize=True, bias=-1.0)
        net = tp.adapt(self.source()[0], per="token", heads=head)
        path = self.folder / f"exits-{seed}.safetensors"
        if not path.is_file():
            train_exits(net.train(), self.teacher, self.train, self.settings, seed)
            save_tensors(_untied(net), path)
            print(f"trained exits, seed {seed}", flush=True)
        net.load_state_dict(load_file(path), strict=False)
        return net.eval()

    def student(self, layers: int, seed: int) -> Any:
        """Return a student of the first layers."""
        net = self.source()[0]
        net.model.layers = net.model.layers[:layers]
        net.config.num_hidden_layers = layers
        path = self.folder / f"{layers}-{seed}.safetensors"
        if not path.is_file():
            train_student(net.train(), self.teacher, self.train, self.settings, seed)
            save_tensors(_untied(net), path)
            print(f"trained {layers} layers, seed {seed}", flush=True)
        net.load_state_dict(load_file(path), strict=False)
        return net.eval()


def _untied(net: Any) -> dict[str, Tensor]:
    """Return all weights, the embeddings that the read-out shares once."""
    return {name: x for name, x in net.state_dict().items() if name != "lm_head.weight"}


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


def judged(work: Stories, seed: int, layers: float) -> dict[str, tuple[Told, Row]]:
    """Return what the network with exits gives on the test stories, and other ways to choose exits.

    Args:
        work: The networks.
        seed: Of the training.
        layers: The mean number of layers.

    """
    net, test = work.exits(seed), work.test
    few = test[:16]
    found: dict[str, tuple[Told, Row]] = {}
    for asked in CURVE:
        bounds = bound_for(net, work.validation, asked)
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
            bounds = (
                tp.Thresholds(0.5) if name == "patience" else bound_for(net, work.validation[:32], layers)
            )
            one = told(net, test, *thresholded(net, bounds))
            found[name] = one, {"flops": share_of(net, few, *thresholded(net, bounds))}
    found["oracle"] = hindsight(net, work.teacher, test, layers), {}
    return found


def write(work: Stories, seeds: Sequence[int], out: Path, students: Sequence[int] = STUDENTS) -> None:
    """Judge on the test stories, and write tables."""
    full = told(work.teacher, work.test)
    rows: list[Row] = [_row("full", "", full, full, {"flops": 1.0})]
    by_name: dict[str, list[Tensor]] = {}
    for seed in seeds:
        given = judged(work, seed, work.settings.layers)
        for layers in students:
            student = told(work.student(layers, seed), work.test)
            given[f"student of {layers} layers"] = student, {}
        for name, (one, extra) in given.items():
            rows.append(_row(name, seed, one, full, extra))
            by_name.setdefault(name, []).append(one.by_story)
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "stories.csv", rows)
    ours = torch.stack(by_name["heads"])
    differences = [difference("heads", "full", paired(ours, full.by_story), 4)]
    for name, theirs in by_name.items():
        if name != "heads":
            differences.append(difference("heads", name, paired(ours, torch.stack(theirs)), 4))
    write_csv(out / "stories_differences.csv", differences)


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


def validated(work: Stories, seed: int) -> None:
    """Print what the network with exits loses on validation stories."""
    net, full = work.exits(seed), told(work.teacher, work.validation)
    bounds = bound_for(net, work.validation, work.settings.layers)
    one = told(net, work.validation, *thresholded(net, bounds))
    above = float((one.by_story - full.by_story).mean())
    print(f"seed {seed}, validation: {one.layers:.2f} layers, {above:+.4f} nats")
    for step in range(1, work.layers + 1):
        fixed = told(net, work.validation, *thresholded(net, tp.exit_thresholds(net, step)))
        print(
            f"    all leave after layer {step}: {float((fixed.by_story - full.by_story).mean()):+.4f}",
            flush=True,
        )


def main() -> None:
    """Train and, if asked to, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=StorySettings.updates)
    parser.add_argument("--told", type=int, default=1760, help="stories to train on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=data_folder("halting-stories"))
    parser.add_argument("--out", type=Path, default=Path("results/halting"))
    parser.add_argument("--test", action="store_true", help="open the test stories")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = StorySettings(updates=options.updates, own=options.updates // 3)
    work = Stories(options.work, settings, options.told)
    for seed in range(options.seeds):
        validated(work, seed)
    for seed in range(options.seeds):
        for layers in STUDENTS:
            work.student(layers, seed)
    if options.test:
        write(work, [*range(options.seeds)], options.out)


if __name__ == "__main__":
    main()
