"""compare: trained heads beside what a sceptic would use instead, on examples that nothing was chosen on."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchpact.budget.exit_losses import tail_flops
from torchpact.budget.exit_outputs import exit_run
from torchpact.budget.frontier import loss_at, oracle
from torchpact.budget.heldout import HeldOut
from torchpact.budget.scores import Score, main_tensor
from torchpact.budget.search import Record, best_bounds
from torchpact.flops.count import evaluating

HEADS = "heads"


class Compared(NamedTuple):
    """What a way to halt costs and loses on test examples."""

    criterion: str
    """"heads", "confidence", "patience", "random", "oracle" or "layer l"."""
    budget: float
    """The share of the FLOPs that was asked for; of a fixed layer what it costs."""
    cost: float
    loss: float


class _Exits(NamedTuple):
    """All that n examples give at the L exits."""

    costs: Tensor
    losses: Tensor
    logits: dict[str, Tensor]
    """Of each criterion, (L − 1, n)."""
    extra: Tensor
    """What a criterion that looks at outputs costs besides, (L, 1)."""

    def record(self, name: str) -> Record:
        """Return costs and scores where a criterion decides."""
        costs = self.costs if name == HEADS else self.costs + self.extra
        return Record(self.logits[name], costs, -self.losses)


def compare(
    ada: nn.Module,
    held_out: Iterable[Any],
    test: Iterable[Any],
    budgets: Sequence[float],
    loss: Score | None = None,
    *,
    inputs: Callable[[Any], Any] | None = None,
    logits: bool | None = None,
) -> list[Compared]:
    """Return what trained heads, other criteria and fixed exits cost and lose, at several budgets.

    Thresholds of each criterion are chosen on held-out batches, and judged on test batches. All run on the
    same exits:

    * *heads*: those of the network.
    * *confidence*: the largest probability of the exit's output; its cost includes what comes after the block
      at every exit that was not taken. Only of class logits, as is *patience*: how many exits in a row have
      predicted the same class.
    * *random*: the exits of the heads, dealt to other examples at random, in expectation.
    * *oracle*: each example's exit chosen in hindsight, which nothing reaches.
    * *layer l*: all examples leave after it.

    Args:
        ada: A network with one block that decides per example.
        held_out: Batches to choose thresholds on.
        test: Batches to judge on.
        budgets: Shares of the original's FLOPs.
        loss: A function of output and batch that returns a number for each example, lower is better; by
            default the difference to the output without halting, as of :func:`~torchpact.calibrate`.
        inputs: Takes what the network is called with out of a batch.
        logits: Whether the output is class logits; by default if it has a part of that name.

    Returns:
        A row for each criterion and budget that can be met.

    Raises:
        ValueError: The network has several blocks, or decides for tokens or pixels.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> net = tp.adapt(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), per="example")
        >>> rows = compare(net, [torch.randn(8, 5, 16)], [torch.randn(8, 5, 16)], [0.7])
        >>> [row.criterion for row in rows]
        ['heads', 'random', 'oracle', 'layer 1', 'layer 2', 'layer 3']

    """
    fit, judge = (_exits(ada, batches, loss, inputs, logits) for batches in (held_out, test))
    rows = []
    frontier = oracle(judge.costs, judge.losses)
    for name in fit.logits:
        for budget in budgets:
            bounds = best_bounds(fit.record(name), budget)
            if bounds is None:
                continue
            record = judge.record(name)
            cost, score = record.outcome(bounds)
            rows.append(Compared(name, budget, cost, -score))
            if name != HEADS:
                continue
            shares = torch.bincount(record.exits(bounds), minlength=len(judge.costs)).double()
            shares = (shares / shares.sum()).unsqueeze(1)
            spent, lost = ((shares * x).sum(0).mean() for x in (judge.costs, judge.losses))
            rows.append(Compared("random", budget, float(spent), float(lost)))
            rows.append(Compared("oracle", budget, cost, loss_at(frontier, cost)))
    for step, (costs, losses) in enumerate(zip(judge.costs, judge.losses, strict=True), start=1):
        rows.append(Compared(f"layer {step}", float(costs.mean()), float(costs.mean()), float(losses.mean())))
    return rows


def _exits(
    ada: nn.Module,
    batches: Iterable[Any],
    loss: Score | None,
    inputs: Callable[[Any], Any] | None,
    logits: bool | None,
) -> _Exits:
    score: Any = "similarity" if loss is None else lambda output, batch: -torch.as_tensor(loss(output, batch))
    held = HeldOut(ada, batches, score, inputs)
    if not held.per_example:
        raise ValueError(
            "expected a network with one block that decides per example, got several blocks, tokens or pixels"
        )
    record = held.record()
    ((name, block),) = held.blocks.items()
    found = {HEADS: record.logits}
    sure, same = [], []
    with evaluating(held.net):
        for given, size in zip(held.given, held.sizes, strict=True):
            run = exit_run(held.net, given)
            steps = range(1, block.max_steps + 1)
            outputs = [main_tensor(run.output_at({name: step})) for step in steps]
            if not (outputs[0][1] if logits is None else logits):
                break
            classes = torch.stack([output.float() for output, _ in outputs])
            if classes.dim() != 3:
                break
            sure.append(classes.softmax(-1).amax(-1).logit(1e-6).cpu())
            same.append(_in_a_row(classes.argmax(-1)).cpu())
            assert len(classes[0]) == size
    if sure:
        found["confidence"] = torch.cat(sure, 1)[:-1]
        found["patience"] = torch.cat(same, 1)[:-1]
    each = tail_flops(held.net, held.given[0])[name] / held.plain
    extra = each * torch.arange(block.max_steps, dtype=torch.double).unsqueeze(1)
    return _Exits(record.costs, -record.scores, found, extra)


def _in_a_row(classes: Tensor) -> Tensor:
    """Return how many exits before each have predicted the same class as it, without a break.

    >>> _in_a_row(torch.tensor([[1], [1], [2], [2], [2]])).flatten()
    tensor([0., 1., 0., 1., 2.])
    """
    rows = [torch.zeros(classes.shape[1:])]
    for before, now in pairwise(classes):
        rows.append(torch.where(before == now, rows[-1].to(now.device) + 1, 0.0))
    return torch.stack(rows)
