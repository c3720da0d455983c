"""What is minimised on sequences, by every method of the comparison."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchpact import Ponder, expected_steps, map_loss, ponder_loss, reinforce_loss
from torchpact.core.state import State
from torchpact.models import SequenceNet
from torchpact.nn.sequence import sequence_nll
from torchpact_recipes.data.tasks import UNASKED, TaskBatch
from torchpact_recipes.training.sequence_config import SequenceTrainConfig


@dataclass(frozen=True)
class Outcome:
    """The loss of a batch, what to report of it, and the states after it."""

    loss: Tensor
    report: Tensor
    """Objective, nll and accuracy, then the expected steps of a time step in each layer."""
    states: list[State] | None = None


def lengths_of(batch: TaskBatch) -> Tensor | None:
    """The lengths of sequences, unless all have one time step, where there is nothing to tell."""
    return batch.lengths if batch.inputs.size(1) > 1 else None


def sequence_loss(
    model: SequenceNet,
    inputs: Tensor,
    targets: Tensor,
    config: SequenceTrainConfig,
    *,
    states: Sequence[State] | None = None,
    lengths: Tensor | None = None,
    baseline: Callable[[Tensor], Tensor] | None = None,
    tau: float | Tensor | None = None,
    packed: bool = True,
) -> Outcome:
    """Return the loss of a batch by the method of the configuration; the baseline is REINFORCE's.

    ``tau`` is the price of a step at this iteration, if not that of the configuration. Unless ``packed``,
    padding is computed and then left out, to the same loss: all batches are of one shape then, and nobody
    has to look at the lengths.

    >>> from torchpact_recipes.data import Parity
    >>> from torchpact_recipes.training.sequence_presets import sequence_preset
    >>> config = sequence_preset("parity", "tiny")
    >>> batch, model = Parity(8).sample(16), tp.models.SequenceNet(config.network, "relaxed")
    >>> sequence_loss(model, batch.inputs, batch.targets, config).loss.backward()
    """
    if config.method == "ponder":
        return _expected(model, inputs, targets, config)
    logits, after, ponders = model(inputs, states, lengths=lengths if packed else None)
    if lengths is not None and not packed:
        ponders = [without_padding(ponder, lengths) for ponder in ponders]
    # both this nll and the costs are sums over real time steps, divided by the time of the longest sequence
    ponders = [ponder._replace(weights=None) for ponder in ponders]
    nll = sequence_nll(logits, targets)
    price = config.tau if tau is None else tau
    if config.method == "reinforce":
        loss = reinforce_loss(nll, ponders, price, baseline)
    else:
        loss = map_loss(nll, ponders, price)
    with torch.no_grad():
        reported = map_loss(nll, ponders, price) if config.method == "reinforce" else loss
        positions = inputs.size(0) * inputs.size(1) if lengths is None else lengths.sum()
        steps = [ponder.expected_steps.sum() / positions for ponder in ponders]
        report = torch.stack([reported, nll.mean(), accuracy(logits, targets), *steps]).double()
    return Outcome(loss, report, after)


def without_padding(ponder: Ponder, lengths: Tensor) -> Ponder:
    """Let what a layer did after the end of sequences count for nothing.

    >>> from torchpact.models import never_halt
    >>> rnn = tp.AdaptiveRNN(nn.GRUCell(9, 16), 3, halting=never_halt, mode="thresholded")
    >>> without_padding(rnn(torch.randn(5, 2, 8))[2], torch.tensor([5, 2])).steps
    tensor([[3, 3, 3, 3, 3],
            [3, 3, 0, 0, 0]])
    """
    over = torch.arange(ponder.steps.size(1), device=lengths.device) >= lengths.unsqueeze(1)
    return Ponder(
        probs=ponder.probs.masked_fill(over, 1.0),
        steps=ponder.steps.masked_fill(over, 0),
        expected_steps=ponder.expected_steps.masked_fill(over, 0.0),
        cost=ponder.cost.masked_fill(over, 0.0),
        log_prob=None if ponder.log_prob is None else ponder.log_prob.masked_fill(over, 0.0),
    )


def _expected(model: SequenceNet, inputs: Tensor, targets: Tensor, config: SequenceTrainConfig) -> Outcome:
    """PonderNet's: the mean over the number of steps, of which all are computed."""
    logits, halting = model.unroll(inputs)
    losses = torch.stack([sequence_nll(each, targets) for each in logits])
    loss = ponder_loss(losses, halting, config.tau, config.beta)
    with torch.no_grad():
        nll = ponder_loss(losses, halting, config.tau, beta=0.0)
        right = torch.stack([accuracy(each, targets, mean=False) for each in logits])
        share = ponder_loss(right, halting, config.tau, beta=0.0)
        steps = expected_steps(halting.sigmoid()).mean()
        report = torch.stack([loss, nll, share, steps]).double()
    return Outcome(loss, report)


def accuracy(logits: Tensor, targets: Tensor, mean: bool = True) -> Tensor:
    """The share of answers that are right, of all or of each sequence.

    >>> accuracy(torch.zeros(1, 3, 1, 2), torch.tensor([[[0], [1], [-100]]]))
    tensor(0.5000)
    """
    asked = targets != UNASKED
    right = ((logits.argmax(-1) == targets) & asked).float()
    if mean:
        return right.sum() / asked.sum().clamp(min=1)
    return right.flatten(1).sum(1) / asked.flatten(1).sum(1).clamp(min=1)
