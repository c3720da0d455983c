"""Held-out batches of a network, run with any thresholds: what every example costs, and how good it is."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchpact.budget.batches import listed
from torchpact.budget.block_names import named_by_place
from torchpact.budget.exit_outputs import Exit, ExitRun, exit_run
from torchpact.budget.scores import Score, agreement, checked_score, similarity
from torchpact.budget.search import Record
from torchpact.core.call_args import CallArgs, call_args, first_tensor, tensors_in
from torchpact.core.callables import uncompiled
from torchpact.core.collect import collect
from torchpact.core.halting_module import adaptive_blocks
from torchpact.core.overrides import use_mode, use_thresholds
from torchpact.core.thresholds import Thresholds
from torchpact.flops.blocks import BlockCost, Meter
from torchpact.flops.count import evaluating
from torchpact.specs.call_capture import Call, batch_size

_KEPT = 2**26
"""Up to so many numbers of full outputs are kept; otherwise the full network runs again for each score."""


class Outcome(NamedTuple):
    """What a run of all batches gave, one number an example."""

    costs: Tensor
    """FLOPs, as a share of the original network's in the mean."""
    scores: Tensor
    wholes: Tensor
    """The costs where nothing halts."""

    @property
    def cost(self) -> float:
        """The mean cost."""
        return float(self.costs.mean())

    @property
    def score(self) -> float:
        """The mean score."""
        return float(self.scores.mean())

    def upper(self, confidence: float) -> float:
        """Return an upper confidence bound of the cost of new examples, by the normal approximation.

        The cost is a ratio of means, so that long and short examples alone make no error.

        Args:
            confidence: Of the bound, in (0.5, 1).

        Example:
            >>> costs, nothing = torch.tensor([0.4, 0.6] * 50, dtype=torch.double), torch.zeros(100)
            >>> outcome = Outcome(costs, nothing, torch.ones(100))
            >>> round(outcome.cost, 4), round(outcome.upper(0.975), 4)  # 0.5 + 1.96 · 0.1 / √99
            (0.5, 0.5197)
            >>> Outcome(costs, nothing, 2 * costs).upper(0.975)
            0.5

        """
        if len(self.costs) < 2:
            return self.cost
        rest = self.costs - self.costs.mean() / self.wholes.mean() * self.wholes
        return self.cost + NormalDist().inv_cdf(confidence) * float(rest.std()) / math.sqrt(len(rest))


class HeldOut:
    """Runs a network on held-out batches, thresholded.

    Args:
        net: A network with adaptive blocks.
        batches: What it is called with, each a mapping by name, a tuple by position, or the only argument.
        score: A function of output and batch, or the name of one of the outputs of the full network:
            "similarity" or "agreement".
        inputs: Takes what the network is called with out of a batch; by default the batch itself.

    Raises:
        TypeError: The batches are a single one.
        ValueError: There are no examples, or no adaptive blocks.

    """

    def __init__(
        self,
        net: nn.Module,
        batches: Iterable[Any],
        score: Score | str = "similarity",
        inputs: Callable[[Any], Any] | None = None,
    ) -> None:
        self.net, self.score = uncompiled(net), score
        self.blocks = adaptive_blocks(self.net)
        self.batches = listed(batches)
        self.given: list[CallArgs] = [
            call_args(each if inputs is None else inputs(each)) for each in self.batches
        ]
        kept = [i for i, given in enumerate(self.given) if len(first_tensor(given))]
        if not kept:
            raise ValueError(
                f"expected held-out batches with examples, got {len(self.given)} batches without"
            )
        self.batches, self.given = [self.batches[i] for i in kept], [self.given[i] for i in kept]
        self.sizes = [batch_size(self.net, given) for given in self.given]
        self.logits: dict[str, list[Tensor]] = {name: [] for name in self.blocks}
        """The halting logits of all blocks where nothing halts, for each batch, (L − 1, positions)."""
        self.real: dict[str, list[Tensor]] = {name: [] for name in self.blocks}
        """False for padding, for each batch, (positions,)."""
        self.weights: list[Tensor | None] = []
        self._wholes: list[Tensor] = []
        self._fulls: list[Any] = []
        self._meters: list[Meter] = []
        self.runs = 0
        self.per_example = len(self.blocks) == 1
        self._look()

    def _look(self) -> None:
        """Run everything once without halting, to meter steps and to see logits and outputs."""
        kept, plain = 0, 0.0
        self._metered: dict[Any, Meter] = {}  # FLOPs are those of shapes
        self._never = Thresholds("never")
        with evaluating(self.net), use_mode(self.net, "thresholded"), use_thresholds(self.net, self._never):
            for given, size in zip(self.given, self.sizes, strict=True):
                shapes = tuple((x.shape, x.dtype) for x in tensors_in(given.values))
                meter = self._metered[shapes] = Meter(self.net, given, self._metered.get(shapes))
                with named_by_place(self.blocks), collect(self.net, exits=True) as ponders:
                    run = meter.run()
                self._meters.append(meter)
                self._wholes.append(_flops(meter, run.costs, size))
                plain += size * (run.rest + sum(cost.plain for cost in run.costs.values()))
                for ponder in ponders:
                    assert ponder.exits is not None
                    self._keep(ponder.name, ponder.exits.logits[:-1], ponder.weights)
                    self.per_example &= ponder.steps.numel() == size
                self.per_example &= len(ponders) == 1
                self.weights.append(ponders[0].weights if ponders else None)
                kept += sum(x.numel() for x in tensors_in([run.output]))
                self._fulls.append(run.output if self.score in ("similarity", "agreement") else None)
                if kept > _KEPT:
                    self._fulls[-1] = None
        self.plain = plain / sum(self.sizes)

    def _keep(self, name: str, logits: Tensor, weights: Tensor | None) -> None:
        self.logits[name].append(logits.float().flatten(1).cpu())
        real = torch.ones(logits.shape[1:], dtype=torch.bool)
        if weights is not None:
            real = (weights > 0).expand(logits.shape[1:]).cpu()
        self.real[name].append(real.flatten())

    def __len__(self) -> int:
        return sum(self.sizes)

    def run(self, thresholds: Thresholds, part: Sequence[int] | None = None) -> Outcome:
        """Run all batches with some thresholds.

        Args:
            thresholds: Of all blocks.
            part: The numbers of the batches to run, if not all.

        Raises:
            ValueError: The score is not one finite number an example.

        """
        self.runs += 1
        costs, scores = [], []
        chosen = range(len(self._meters)) if part is None else part
        with evaluating(self.net), use_mode(self.net, "thresholded"), use_thresholds(self.net, thresholds):
            for index in chosen:
                run = self._meters[index].run()
                costs.append(self._shares(index, run.costs))
                scores.append(self._score(index, run.output))
        wholes = torch.cat([self._wholes[index] for index in chosen]) / self.plain
        return Outcome(torch.cat(costs), torch.cat(scores), wholes)

    def costs_at(self, index: int, run: ExitRun, exit: Exit) -> Tensor:
        """Return what each example of a batch costs if all positions leave at an exit, as a share.

        Args:
            index: The number of the batch.
            run: A run of the network on it in which nothing halts.
            exit: After which step each block halts.

        """
        calls = {name: [_left(call, exit.get(name)) for call in own] for name, own in run.calls.items()}
        return self._shares(index, self._meters[index].costs_of(calls))

    def _shares(self, index: int, costs: Mapping[str, BlockCost]) -> Tensor:
        """Return what each example of a batch costs, as a share."""
        return _flops(self._meters[index], costs, self.sizes[index]) / self.plain

    def _score(self, index: int, output: Any) -> Tensor:
        if callable(self.score):
            found = self.score(output, self.batches[index])
        else:
            full = self._fulls[index]
            if full is None:
                with use_thresholds(self.net, self._never):
                    full = self.given[index].call(self.net)
            function = similarity if self.score == "similarity" else agreement
            found = function(output, full, self.weights[index])
        return checked_score(found, self.sizes[index])

    def record(self) -> Record:
        """Return what each example gives at every exit, of a network with one decision an example.

        All exits are those of one run; what comes after the block runs for each of them.
        """
        ((name, block),) = self.blocks.items()
        exits = [{name: step} for step in range(1, block.max_steps + 1)]
        costs, scores = [], []
        self.runs += 1
        with evaluating(self.net), use_mode(self.net, "thresholded"):
            for index, given in enumerate(self.given):
                run = exit_run(self.net, given)
                costs.append(torch.stack([self.costs_at(index, run, exit) for exit in exits]))
                scores.append(torch.stack([self._score(index, run.output_at(exit)) for exit in exits]))
        return Record(torch.cat(self.logits[name], 1), torch.cat(costs, 1), torch.cat(scores, 1))


def _left(call: Call, step: int | None) -> Call:
    """Return a call whose positions left after a step; None leaves it as it is."""
    if step is None or call.ponder is None:
        return call
    return call._replace(ponder=call.ponder._replace(steps=torch.full_like(call.ponder.steps, step)))


def _flops(meter: Meter, costs: Mapping[str, BlockCost], size: int) -> Tensor:
    """Return what a run cost each example, in double precision."""
    flops = sum((cost.flops for cost in costs.values()), torch.zeros(())) + meter.rest
    return flops.double().cpu().expand(size)
