"""The record of a run of a block: decisions, their probabilities, and what the objective charges for."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchpact.checks import readable
from torchpact.core.exits import Exits
from torchpact.core.halting import iteration_index, steps_from_survival
from torchpact.core.modes import Mode


class Ponder(NamedTuple):
    """What a block did, and what the objective needs to know of it.

    Positions have the shape of the halting logits; their first dimension is the batch.

    With gradients enabled all L iterations run, in every mode, since N needs every h. Without them
    a mode that can be done early skips what it can: ``probs`` of an iteration that a position did
    not run then hold 1, ``expected_steps`` counts no further than the iterations that were run, which
    makes it a lower bound of N, and ``cost`` of the hard modes is z, which is what the prior charges for
    the decisions taken.

    Where steps take the gate, h after halting is that of a frozen state, so that N is the paper's eq. 24
    given the masks that were drawn; it is E[z] exactly for plain steps only.

    With ``exits`` all L iterations run, without gradients too, and ``probs`` holds every h.

    A block that keeps no ``details`` (see :class:`use_mode`) has NaN in ``probs`` and ``expected_steps``
    then; a single number is stored for all of them.

    ``log_prob`` is None outside Discrete mode, which ``torch.func.vmap`` cannot return: let the function
    under it return the fields it needs. Heads that give NaN are not refused; NaN shows in ``probs``.

    ``print`` shows the shape of the positions and their mean steps, as they weigh.

    Example:
        >>> block = tp.AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=3, mode="thresholded")
        >>> block(torch.zeros(2, 8), thresholds=tp.Thresholds("always"))[1]
        Ponder(name='', max_steps=3, positions=(2, 1), mean_steps=1)

    """

    probs: Tensor
    """The halting probabilities h, L of them along dim 0; the last is 1."""
    steps: Tensor
    """The iterations run per position: z, or ACT's N; relaxed, those with r > clip. Integer."""
    expected_steps: Tensor
    """N, the expected number of iterations under q (eq. 24); differentiable."""
    cost: Tensor
    """What the objective penalises: N, or ACT's ρ = N + R, differentiable; z where N is unknown."""
    log_prob: Tensor | None
    """In Discrete mode log q(z) of the decisions taken (eq. 15), per position; elsewhere None."""
    weights: Tensor | None = None
    """How much each position counts, of a shape that broadcasts to ``steps``; padding counts 0. None is 1."""
    name: str = ""
    """The name of the block."""
    price: float = 1.0
    """What a step of the block costs, relative to those of other blocks; for budgets."""
    exits: Exits | None = None
    """The states and logits after all steps, if they were asked for: ``collect(net, exits=True)``."""

    def __repr__(self) -> str:
        if not isinstance(self.steps, Tensor):  # what torch's trees are mapped to, such as names
            return tuple.__repr__(self)
        shape, shown = tuple(self.steps.shape), [f"name={self.name!r}", f"max_steps={len(self.probs)}"]
        shown.append(f"positions={shape}")
        if readable(self.steps):
            mean = float(mean_over_batch(self.steps.detach().double(), self.weights))
            shown.append(f"mean_steps={mean:.4g}")
        shown += [f"price={self.price:g}"] if self.price != 1 else []
        shown += ["with weights"] if self.weights is not None else []
        shown += ["with exits"] if self.exits is not None else []
        return f"Ponder({', '.join(shown)})"

    @property
    def active(self) -> Tensor:
        """Which positions ran which iteration: L booleans along dim 0; the first row is all true."""
        return iteration_index(len(self.probs), self.steps) <= self.steps

    def map(self, function: Callable[[Tensor], Tensor]) -> "Ponder":
        """Return the ponder with each of its tensors changed by a function; states of exits stay as they are.

        Args:
            function: What maps a tensor of positions to another; ``probs`` has one dimension more, the first.

        Returns:
            A new ponder; this one stays as it is.

        Example:
            >>> block = tp.AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=3)
            >>> _, ponder = block(torch.randn(4, 8))
            >>> ponder.map(lambda x: x.squeeze(-1)).steps.shape
            torch.Size([4])

        """
        # a list, since torch.compile of 2.11 fails on a generator here
        found = Ponder._make([function(x) if isinstance(x, Tensor) else x for x in self])
        return found if self.exits is None else found.with_exits(self.exits.map_logits(function))

    def with_exits(self, exits: Exits | None) -> "Ponder":
        """Return the ponder with these exits, or without."""
        # not by _replace, which torch.compile of 2.11 cannot trace
        probs, steps, expected, cost, log_prob, weights, name, price, _ = self
        return Ponder(probs, steps, expected, cost, log_prob, weights, name, price, exits)


def mean_over_positions(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean of each example over its positions, as they weigh.

    Args:
        values: One number for each position, of shape (batch, …).
        weights: None for equal weights, or numbers that broadcast to ``values``. What weighs 0 may be NaN.

    Returns:
        One number an example; 0 where all weights are 0.

    Example:
        >>> mean_over_positions(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 0.0]]))
        tensor([1.])

    """
    if weights is None:
        rows = values.unsqueeze(-1).flatten(1)
        return rows.sum(1) / max(rows.size(1), 1)
    weights = weights.expand(values.shape).to(values.dtype)
    weighed = torch.where(weights != 0, values * weights, torch.zeros_like(values))
    total = weighed.unsqueeze(-1).flatten(1).sum(1)
    whole = weights.unsqueeze(-1).flatten(1).sum(1)
    return total / torch.where(whole > 0, whole, torch.ones_like(whole))


def mean_over_batch(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean over examples of the mean over their positions, as they weigh; 0 for an empty batch.

    Args:
        values: One number for each position, of shape (batch, …).
        weights: As for :func:`mean_over_positions`.

    Returns:
        A scalar.

    Example:
        >>> mean_over_batch(torch.tensor([[1.0, 3.0], [4.0, 4.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor(2.5000)

    """
    if weights is not None:
        values = mean_over_positions(values, weights)
    return values.sum() / max(values.numel(), 1)  # one rank of a distributed run may be handed no example


def ponder_of_logits(
    logits: Sequence[Tensor],
    max_steps: int,
    steps: Tensor,
    mode: Mode,
    every_h: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Ponder:
    """Return the ponder of a run, given the logits of h after each iteration.

    Args:
        logits: Those of the iterations that were run, +∞ for positions that had halted; the others are +∞.
        max_steps: L.
        steps: The iterations that each position ran.
        mode: The mode of the run.
        every_h: Whether all logits are known, as in training, so that hard modes can charge for N.
        dtype: The type of the probabilities.

    Returns:
        A ponder without weights.

    Example:
        >>> ponder_of_logits([torch.tensor([0.0, 2.0])], 3, torch.tensor([3, 1]), tp.Thresholded()).probs
        tensor([[0.5000, 0.8808],
                [1.0000, 1.0000],
                [1.0000, 1.0000]])

    """
    always = torch.full(steps.shape, torch.inf, dtype=dtype, device=steps.device)
    stacked = torch.stack([*logits] + [always] * (max_steps - len(logits)))
    probs = torch.sigmoid(stacked)
    # no position goes on after a logit of +∞
    expected = steps_from_survival(torch.sigmoid(-stacked[: min(len(logits), max_steps - 1)]), 0)
    known = every_h or not mode.hard
    return Ponder(
        probs=probs,
        steps=steps,
        expected_steps=expected,
        cost=mode.cost(probs, steps, expected) if known else steps.to(expected.dtype),
        log_prob=mode.log_prob(stacked, steps),
    )


def unknown(device: torch.device) -> Tensor:
    """Return a NaN to stand for what a run has not kept; a new one, for callers may write to it."""
    return torch.full((), torch.nan, dtype=torch.float32, device=device)


def is_unknown(x: Tensor) -> bool:
    """Return whether a tensor is a single number in many places.

    >>> is_unknown(unknown(torch.device("cpu")).expand(2, 3)), is_unknown(torch.full((2, 3), torch.nan))
    (True, False)
    """
    steps = [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1]
    return bool(steps) and not any(steps)


def decisions_only(max_steps: int, steps: Tensor, cost: Tensor, nan: Tensor | None = None) -> Ponder:
    """Return a ponder of decisions alone; all other fields are views of one NaN, which must not be shared.

    >>> ponder = decisions_only(3, torch.tensor([1, 1]), torch.ones(2))
    >>> ponder.probs.isnan().all(), ponder.steps
    (tensor(True), tensor([1, 1]))
    """
    if nan is None:
        nan = torch.full((), torch.nan, dtype=cost.dtype, device=steps.device)
    return Ponder(nan.expand(max_steps, *steps.shape), steps, nan.expand(steps.shape), cost, None)


def without_details(ponder: Ponder, nan: Tensor | None = None) -> Ponder:
    """Return the decisions of a thresholded run alone."""
    brief = decisions_only(len(ponder.probs), ponder.steps, ponder.cost, nan)
    return brief._replace(weights=ponder.weights, name=ponder.name, price=ponder.price)
