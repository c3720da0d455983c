"""What the stages of a distillation share: the student, the teacher, batches, and losses at exits."""

import copy
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchpact.budget import training_state
from torchpact.budget.batches import listed
from torchpact.budget.budget import Budget
from torchpact.budget.discrepancy import DistillLoss, Losses, losses_of
from torchpact.budget.exit_outputs import Exit, exit_run
from torchpact.budget.progress import Report
from torchpact.budget.stages import DistillConfig
from torchpact.core.call_args import CallArgs, call_args, first_tensor, tensors_in
from torchpact.core.halting_module import halting_modules
from torchpact.core.overrides import use_mode, use_thresholds
from torchpact.core.thresholds import Thresholds
from torchpact.flops.count import evaluating
from torchpact.specs.call_capture import batch_size

_KEPT = 2**27
"""Up to so many numbers of the teacher's outputs are kept; otherwise it runs again."""


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
        run = exit_run(self.ada, item.given)
        self._real[item.number] = run.real
        return [self.loss_of(run.output_at(exit), item) for exit in exits], run.ponders

    def losses_among_halted(self, item: Item, exits: list[Exit]) -> list[Losses]:
        """Return the losses at some exits, of positions that get there while others halt at random.

        Where examples decide, or losses are of examples, nothing halts.
        """
        shares = self.config.exit_shares or (1 / self.most,) * self.most
        if len(self.blocks) > 1 or not self.by_position:
            return self.losses(item, exits)[0]
        run = exit_run(self.ada, item.given, shares)
        self._real[item.number] = run.real
        (name,) = self.blocks
        steps = run.ponders[0].steps.flatten(1)
        each = []
        for exit in exits:
            own = self.loss_of(run.output_at(exit), item)
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
        own = training_state.prefixed("net", self.ada.state_dict())
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
        self.ada.load_state_dict(training_state.part(saved.tensors, "net"))
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


def _split(
    batches: Iterable[Any],
    held_out: Iterable[Any] | None,
    inputs: Callable[[Any], Any] | None,
    share: float,
) -> tuple[list[Item], list[Item]]:
    """Return the batches to train on, and those that are held out."""
    given = listed(batches)
    held = [] if held_out is None else listed(held_out)
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


def _bytes(x: Tensor) -> bytes:
    flat = x.detach().cpu().contiguous().flatten()
    return f"{x.dtype}{tuple(x.shape)}".encode() + bytes(
        flat.view(torch.uint8).numpy().data if x.numel() else b""
    )
