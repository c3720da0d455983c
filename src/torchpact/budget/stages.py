"""The stages of a distillation: exits, then heads. An update depends on its number and the weights only."""

import copy
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchpact.budget import training_state
from torchpact.budget.budget import Budget
from torchpact.budget.discrepancy import DistillLoss, Losses, losses_of
from torchpact.budget.exit_outputs import Exit, exit_outputs
from torchpact.budget.progress import Progress, Report
from torchpact.checks import check_count, check_number
from torchpact.core.call_args import CallArgs, call_args, first_tensor, tensors_in
from torchpact.core.collect import collect
from torchpact.core.halting_module import halting_modules
from torchpact.core.overrides import use_mode, use_thresholds
from torchpact.core.thresholds import Thresholds
from torchpact.flops.count import evaluating
from torchpact.specs.call_capture import batch_size

_KEPT = 2**27
"""Up to so many numbers of the teacher's outputs are kept; otherwise it runs again."""


@dataclass(frozen=True)
class DistillConfig:
    """How long and how fast :func:`torchpact.distill` trains.

    Args:
        exit_updates: Updates of all weights, so that exits are useful.
        head_updates: Updates of the heads.
        lr: The learning rate of the weights, by AdamW with a linear warm-up and a cosine.
        head_lr: That of the heads, by plain Adam.
        exits_an_update: How many exits are trained in an update, the last one always among them; None is all
            of networks with one block, and 3 of others.
        exit_shares: How many of the tokens or pixels halt after each step, at random, while exits are trained
            (of networks with one block, whose loss is of positions); equal shares by default. Exits of share
            0 are not trained, in any network.
        clip: The largest norm of gradients.
        held_out: The share of batches that is held out, where none are given.
        check_every: After how many updates of the exits the held-out loss is measured.
        patience: After how many such checks without a better one the stage ends.
        save_every: After how many updates the state is written, if there is a checkpoint.
        seed: Of the order of batches, and of all that is drawn.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> DistillConfig(lr=3e-4).head_updates
        400

    """

    exit_updates: int = 800
    head_updates: int = 400
    lr: float = 1e-4
    head_lr: float = 1e-2
    exits_an_update: int | None = None
    exit_shares: tuple[float, ...] | None = None
    clip: float = 1.0
    held_out: float = 0.2
    check_every: int = 50
    patience: int = 6
    save_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("exit_updates", "head_updates"):
            check_count(name, getattr(self, name), 0)
        for name in ("check_every", "patience", "save_every"):
            check_count(name, getattr(self, name))
        if self.exits_an_update is not None:
            check_count("exits_an_update", self.exits_an_update)
        for name in ("lr", "head_lr", "clip"):
            check_number(name, getattr(self, name), 0, open_low=True, open_high=True)
        check_number("held_out", self.held_out, 0, 1, open_low=True, open_high=True)


class Item(NamedTuple):
    """A batch."""

    number: int
    batch: Any
    inputs: Any
    given: CallArgs


class Distillation:
    """What the stages share: the student, the teacher, batches, the budget and the state on disk.

    Args:
        ada: The student, adaptive.
        teacher: The network to learn from.
        batches: To train on.
        held_out: To check and calibrate on; None takes some of the batches.
        budget: What the deployed student may cost.
        loss: Of output, teacher's output and batch.
        inputs: Takes what the network is called with out of a batch.
        logits: Whether outputs are class logits.
        frozen: Whether only heads are trained.
        config: How to train.
        folder: Of the checkpoint.
        report: Is told of progress.

    """

    def __init__(
        self,
        ada: Any,
        teacher: nn.Module,
        batches: Iterable[Any],
        held_out: Iterable[Any] | None,
        budget: Budget | float,
        loss: DistillLoss | None,
        inputs: Callable[[Any], Any] | None,
        logits: bool | None,
        frozen: bool,
        config: DistillConfig,
        folder: Path | None,
        report: Report,
    ) -> None:
        self.ada, self.teacher, self.config, self.report = ada, teacher, config, report
        self.loss, self.logits, self.frozen, self.folder = loss, logits, frozen, folder
        self.blocks = halting_modules(ada)
        self.most = max(block.max_steps for block in self.blocks.values())
        shares = config.exit_shares
        if shares is not None and (len(shares) != self.most or abs(sum(shares) - 1) > 1e-6):
            raise ValueError(
                f"expected exit_shares of {self.most} steps that sum to 1, got {len(shares)} of sum "
                f"{sum(shares):g}"
            )
        self.heads = {id(p): p for block in self.blocks.values() for p in block.all_heads.parameters()}
        trained = {id(p): p for p in ada.parameters() if p.requires_grad and id(p) not in self.heads}
        self.weights = [] if frozen else [*trained.values()]
        self.train, self.held = _split(batches, held_out, inputs, config.held_out)
        self._real: dict[int, Tensor | None] = {}
        self._targets: dict[int, Any] = {}
        self._kept = 0
        self.asked = budget
        self.budget = copy.deepcopy(budget) if isinstance(budget, Budget) else Budget(budget)
        if self.budget.ms is None and self.budget.target is None:
            raise ValueError("expected a budget for all blocks together, got one for each")
        self.goal = {"ms": self.budget.ms, "flops": self.budget.target}
        self.budget.bind(ada, self.held[0].inputs)
        self.stage, self.done = "exits", 0
        self.saved = self._loaded()

    def exits(self, steps: Iterable[int]) -> list[Exit]:
        """Return exits at which all blocks halt after a step, or after their last."""
        return [{name: min(step, block.max_steps) for name, block in self.blocks.items()} for step in steps]

    def drawn_exits(self, draw: random.Random) -> list[Exit]:
        """Return the exits to train in an update: the last one, and some others or all."""
        several, shares = len(self.blocks) > 1, self.config.exit_shares
        count = self.config.exits_an_update or (3 if several else self.most)
        last = self.exits([self.most])
        if several:
            names = [*self.blocks]
            return last + [
                {name: draw.randint(1, self.blocks[name].max_steps) for name in names}
                for _ in range(count - 1)
            ]
        early = [step for step in range(1, self.most) if shares is None or shares[step - 1]]
        steps = draw.sample(early, min(count - 1, len(early)))
        return self.exits(sorted(steps)) + last

    def target(self, item: Item) -> Any:
        """Return what the teacher returns."""
        if item.number in self._targets:
            return self._targets[item.number]
        with evaluating(self.teacher):
            if halting_modules(self.teacher):
                with use_mode(self.teacher, "thresholded"), use_thresholds(self.teacher, Thresholds("never")):
                    found = item.given.call(self.teacher)
            else:
                found = item.given.call(self.teacher)
        if getattr(found, "past_key_values", None) is not None:
            found.past_key_values = None
        size = sum(x.numel() for x in tensors_in([found]))
        if self._kept + size <= _KEPT:
            self._kept += size
            self._targets[item.number] = found
        return found

    def losses(self, item: Item, exits: list[Exit]) -> tuple[list[Losses], Any]:
        """Return the losses at some exits, and the ponders of the run in which nothing halts."""
        found = exit_outputs(self.ada, item.given, exits)
        self._real[item.number] = found.real
        return [self.loss_of(output, item) for output in found.outputs], found.ponders

    def losses_among_halted(self, item: Item, exits: list[Exit]) -> list[Losses]:
        """Return the losses at some exits, of positions that get there while others halt at random.

        Where examples decide, or losses are of examples, nothing halts.
        """
        shares = self.config.exit_shares or (1 / self.most,) * self.most
        if len(self.blocks) > 1 or not self.by_position:
            return self.losses(item, exits)[0]
        found = exit_outputs(self.ada, item.given, exits, shares)
        self._real[item.number] = found.real
        (name,) = self.blocks
        steps = found.ponders[0].steps.flatten(1)
        each = []
        for exit, output in zip(exits, found.outputs, strict=True):
            own = self.loss_of(output, item)
            there = (steps >= exit[name])[:, : own.values.size(1)]
            each.append(own._replace(weights=own.weights * there))
        return each

    @cached_property
    def by_position(self) -> bool:
        """Whether each position decides and has a loss."""
        with evaluating(self.ada):
            (found,), ponders = self.losses(self.held[0], self.exits([self.most]))
        steps = ponders[0].steps
        flat = steps.flatten(1).size(1)
        return found.values.dim() == 2 and flat > 1 and found.values.size(1) <= flat == steps.size(1)

    def loss_of(self, output: Any, item: Item) -> Losses:
        """Return the losses of an output for a batch."""
        examples = batch_size(self.ada, item.given)
        real = self._real.get(item.number)
        return losses_of(output, self.target(item), item.batch, self.loss, self.logits, real, examples)

    def score(self, output: Any, item: Item) -> Tensor:
        """Return minus the loss of each example."""
        if item.number not in self._real:
            with torch.no_grad():
                self.losses(item, [])
        return -self.loss_of(output, item).by_example

    def held_out_losses(self) -> Tensor:
        """Return the mean held-out losses of all exits, (L,)."""
        exits, total, count = self.exits(range(1, self.most + 1)), torch.zeros(self.most), 0.0
        with evaluating(self.ada):
            for item in self.held:
                found, _ = self.losses(item, exits)
                weight = float(found[0].weights.sum())
                total += weight * torch.stack([each.mean.cpu() for each in found])
                count += weight
        return total / max(count, 1e-12)

    def held_out_loss(self) -> float:
        """Return the mean held-out loss of the exits that are trained."""
        shares = self.config.exit_shares or (1.0,) * self.most
        trained = torch.tensor([bool(share) or step + 1 == self.most for step, share in enumerate(shares)])
        return float(self.held_out_losses()[trained].mean())

    def save(self, extra: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write the state of a stage."""
        if self.folder is None:
            return
        record = {"identity": self.identity, "stage": self.stage, "done": self.done, **extra}
        own = {f"net.{name}": x for name, x in self.ada.state_dict().items()}
        training_state.save(self.folder, record, {**own, **tensors})

    def _loaded(self) -> training_state.Saved | None:
        """Return the state of a training that was interrupted, and put its weights into the student."""
        if self.folder is None:
            return None
        self.identity = self._identity()
        saved = training_state.load(self.folder)
        if saved is None:
            return None
        if saved.record.get("identity") != self.identity:
            raise ValueError(
                f"expected a checkpoint of the same network, batches, budget and config in {self.folder}, "
                "got one of another training: name another folder, or remove it"
            )
        self.ada.load_state_dict(part(saved.tensors, "net"))
        self.stage, self.done = saved.record["stage"], saved.record["done"]
        return saved

    def _identity(self) -> str:
        """Return a digest of all that the result depends on."""
        digest = hashlib.sha256()
        settings = [asdict(self.config), self.goal, self.logits, self.frozen, self.loss is None]
        digest.update(json.dumps(settings, sort_keys=True).encode())
        for net in (self.ada, self.teacher):
            for name, x in net.state_dict().items():
                digest.update(name.encode())
                digest.update(_bytes(x))
        for item in [*self.train, *self.held]:
            for x in tensors_in([item.batch, item.inputs]):
                digest.update(_bytes(x))
        return digest.hexdigest()


def train_exits(work: Distillation) -> None:
    """Train all weights on the mean loss of exits, and keep those that were best on held-out batches.

    Args:
        work: The distillation; nothing is trained if it is frozen or past this stage.

    """
    config, ada = work.config, work.ada
    if work.stage != "exits" or not work.weights or not config.exit_updates:
        work.stage, work.done = ("heads", 0) if work.stage == "exits" else (work.stage, work.done)
        return
    optimizer = torch.optim.AdamW(work.weights, lr=config.lr, weight_decay=0.01)
    best, best_loss, waited = _copied(ada), math.inf, 0
    if work.saved is not None:
        best, best_loss = part(work.saved.tensors, "best"), work.saved.record["best_loss"]
        waited = work.saved.record["waited"]
        training_state.load_optimizer(optimizer, part(work.saved.tensors, "optimizer"))
    else:
        best_loss = work.held_out_loss()
    values: dict[str, float] = {}
    while work.done < config.exit_updates and waited < config.patience:
        for group in optimizer.param_groups:
            group["lr"] = config.lr * _schedule(work.done, config.exit_updates)
        item, draw = _drawn(work, "exits")
        with _fixed(ada, config.seed, work.done), _located(work):
            losses = work.losses_among_halted(item, work.drawn_exits(draw))
            loss = torch.stack([each.mean for each in losses]).mean()
            _update(optimizer, loss, work.weights, config.clip)
        work.done += 1
        values["loss"] = float(loss.detach())
        if work.done % config.check_every == 0 or work.done == config.exit_updates:
            with _located(work):
                held = work.held_out_loss()
            waited = 0 if held < best_loss else waited + 1
            if held < best_loss:
                best, best_loss = _copied(ada), held
            values["held out"] = held
        work.report(Progress("exits", work.done, config.exit_updates, values))
        if work.done % config.save_every == 0:
            tensors = _named("best", best) | _named("optimizer", training_state.optimizer_tensors(optimizer))
            work.save({"best_loss": best_loss, "waited": waited}, tensors)
    ada.load_state_dict(best)
    work.stage, work.done, work.saved = "heads", 0, None


def train_heads(work: Distillation) -> None:
    """Train the heads at a price of a step that moves until the budget is met; weights stay.

    By the advantage of halting, where a network has one block and a loss for whatever decides; otherwise by
    the relaxed objective.

    Args:
        work: The distillation; nothing is trained if heads have no parameters.

    """
    config, ada = work.config, work.ada
    heads = [p for p in work.heads.values()]  # noqa: C416
    if not heads or not config.head_updates:
        return
    before = [(p, p.requires_grad) for p in ada.parameters()]
    ada.requires_grad_(False)
    for head in heads:
        head.requires_grad_(True)
    optimizer = torch.optim.Adam(heads, lr=config.head_lr)
    saved = work.saved
    price = (
        {}
        if isinstance(work.asked, Budget)
        else _price_range(work)
        if saved is None
        else saved.record["price"]
    )
    if price:
        prices, targets = work.budget.prices, work.budget.targets
        work.budget = Budget(targets, **price)
        work.budget.prices = prices
    if saved is not None:
        training_state.load_optimizer(optimizer, part(saved.tensors, "optimizer"))
        work.budget.load_state_dict(saved.record["budget"])
        work.budget.targets = dict(saved.record["targets"])
    exits = work.exits(range(1, work.most + 1))
    values: dict[str, float] = {}
    while work.done < config.head_updates:
        item, _ = _drawn(work, "heads")
        with _fixed(ada, config.seed + 1, work.done), _located(work):
            loss = _head_objective(work, item, exits)
            _update(optimizer, loss, heads, config.clip)
        work.budget.step()
        work.done += 1
        values = {"loss": float(loss.detach()), "cost": work.budget.log["relaxed"], "tau": work.budget.tau}
        work.report(Progress("heads", work.done, config.head_updates, values))
        if work.done % config.save_every == 0 or work.done == config.head_updates:
            state = {"budget": work.budget.state_dict(), "targets": work.budget.targets, "price": price}
            work.save(state, _named("optimizer", training_state.optimizer_tensors(optimizer)))
    for p, needed in before:
        p.requires_grad_(needed)


def _head_objective(work: Distillation, item: Item, exits: list[Exit]) -> Tensor:
    """Return the objective of the heads for a batch."""
    if len(work.blocks) == 1:
        losses, ponders = work.losses(item, exits)
        (ponder,) = ponders
        fitted = _by_decision(losses, ponder.steps)
        if fitted is not None:
            values, weights = fitted
            return work.budget.loss(values, ponder._replace(weights=weights), "advantage")
    with use_mode(work.ada, "relaxed"), collect(work.ada) as ponders:
        output = item.given.call(work.ada)
    return work.budget.loss(work.loss_of(output, item).by_example, ponders, "relaxed")


def _by_decision(losses: list[Losses], steps: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the losses of whatever decides, (L, batch, …), and its weights; None where there are none."""
    batch = len(steps)
    if steps.numel() == batch:
        values = torch.stack([each.by_example for each in losses])
        return values.view(len(losses), *steps.shape), torch.ones_like(steps, dtype=values.dtype)
    if losses[0].values.dim() == 1 or steps.shape[1:2].numel() * batch != steps.numel():
        return None
    short = steps.size(1) - losses[0].values.size(1)  # as of the next token, which the last one has not
    if short < 0:
        return None
    values = nn.functional.pad(torch.stack([each.values for each in losses]), (0, short))
    weights = nn.functional.pad(losses[0].weights, (0, short))
    return values.view(len(losses), *steps.shape), weights.view(steps.shape)


def _price_range(work: Distillation) -> dict[str, float]:
    """Return a start, a floor and a ceiling of the price: what a step is worth, by the held-out losses."""
    held = work.held_out_losses()
    worth = max(float(held.max() - held.min()) / max(len(held) - 1, 1), 1e-8)
    return {"start": worth / 4, "floor": worth / 400, "ceiling": worth * 100}


def _update(optimizer: torch.optim.Optimizer, loss: Tensor, parameters: list[Any], clip: float) -> None:
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(parameters, clip)
    if not bool(norm.isfinite()):
        raise ValueError(f"expected finite gradients, got a norm of {float(norm)}: lower the learning rate")
    optimizer.step()


def _drawn(work: Distillation, stage: str) -> tuple[Item, random.Random]:
    """Return the batch of the present update: batches are drawn without replacement, epoch by epoch."""
    count, seed = len(work.train), work.config.seed
    order = random.Random(f"{seed} {stage} {work.done // count}").sample(range(count), count)
    return work.train[order[work.done % count]], random.Random(f"{seed} {stage} update {work.done}")


@contextmanager
def _fixed(ada: nn.Module, seed: int, update: int) -> Iterator[None]:
    """Let draws of an update depend on its number only; dropout and batch norm rest, as in evaluation."""
    devices = [*{p.device for p in ada.parameters() if p.is_cuda}]
    ada.eval()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed * 1_000_003 + update)
        yield


@contextmanager
def _located(work: Distillation) -> Iterator[None]:
    """Say in errors where training was."""
    try:
        yield
    except ValueError as error:
        where = f" (in update {work.done + 1} of the {work.stage})"
        raise ValueError(f"{error}{where}") from None


def _schedule(update: int, updates: int) -> float:
    """Return the learning rate of an update as a share of the largest: a linear warm-up, then a cosine."""
    warm = max(1, min(100, updates // 20))
    return min((update + 1) / warm, 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * update / updates)))


def _split(
    batches: Iterable[Any],
    held_out: Iterable[Any] | None,
    inputs: Callable[[Any], Any] | None,
    share: float,
) -> tuple[list[Item], list[Item]]:
    """Return the batches to train on, and those that are held out."""
    given = [*batches]
    held = [] if held_out is None else [*held_out]
    if held_out is None and len(given) > 1:
        cut = len(given) - max(1, round(share * len(given)))
        given, held = given[:cut], given[cut:]
    if not given or not held:
        raise ValueError(
            f"expected batches to train on and to hold out, got {len(given)} and {len(held)}: at least two"
        )
    items = []
    for number, batch in enumerate([*given, *held]):
        taken = batch if inputs is None else inputs(batch)
        call = call_args(taken)
        if not len(first_tensor(call)):
            raise ValueError(f"expected batches with examples, got none in batch {number + 1}")
        items.append(Item(number, batch, taken, call))
    return items[: len(given)], items[len(given) :]


def _copied(net: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in net.state_dict().items()}


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": x for name, x in tensors.items()}


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors below a prefix, by the rest of their names."""
    return {name[len(prefix) + 1 :]: x for name, x in tensors.items() if name.startswith(f"{prefix}.")}


def _bytes(x: Tensor) -> bytes:
    flat = x.detach().cpu().contiguous().flatten()
    return f"{x.dtype}{tuple(x.shape)}".encode() + bytes(
        flat.view(torch.uint8).numpy().data if x.numel() else b""
    )
