"""diagnose: whether halting can pay for a network, before it is trained, and why heads are dead, after."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.budget.diagnosis import (
    EQUAL,
    BlockDiagnosis,
    BlockView,
    Diagnosis,
    ExitRow,
    are_untrained,
    verdict,
)
from torchpact.budget.executable import Served, gain_of_heads, gains, points, served
from torchpact.budget.exit_losses import BlockExits, exits_by_block
from torchpact.budget.frontier import cost_at, oracle
from torchpact.budget.head_states import head_states
from torchpact.budget.unit_losses import Loss
from torchpact.checks import check_number
from torchpact.core.halting_module import halting_modules
from torchpact.core.layer_run import LayerRun

ROUNDING = 1e-6
"""Differences of losses up to this share of the largest are those of rounding."""
_SHOWN = 60
"""How many points of the oracle's frontier are kept."""


def diagnose(
    net: nn.Module,
    batches: Iterable[Any],
    loss: Loss | None = None,
    *,
    inputs: Callable[[Any], Any] | None = None,
    logits: bool | None = None,
    tau: float = 0.0,
    unit: str | None = None,
    seed: int = 0,
) -> Diagnosis:
    """Measure whether halting can pay for a network, and why heads that are dead are.

    Before training, for each exit of each block, all other blocks running all steps: what it costs if all
    examples halt there; the mean loss through the network's own read-out, and through an affine map to the
    last state before it, fitted by ridge regression on half of the batches for the other half; and for which
    share of examples it is better than every later exit. Then what can be *executed*: thresholds on the
    confidence of the exit's output (where there are class logits; its cost includes the evaluation of the
    read-out at every exit before), and a linear predictor, on the mean state, of the advantage of halting.
    Both are fitted on one half, judged on the other, and compared with the best mixture of fixed exits, which
    is chosen in hindsight. The oracle, which chooses each example's exit in hindsight, is shown, and is no
    yardstick.

    After training, for each head: h, what it halts at its present threshold, h(1 − h), how h ranks examples,
    and if it is dead, for which reason: see :class:`~torchpact.budget.HeadState`.

    Args:
        net: A network with adaptive blocks, such as :func:`torchpact.adapt` makes; its weights stay.
        batches: At least two, each what the network is called with: a mapping by name, a tuple by position,
            or the only argument. A few hundred examples.
        loss: A function of output and batch that returns a number for each example, (batch,), lower is
            better; or for each of its positions, (batch, length), NaN where there is none, as for the next
            token: then positions exit, as if the exits of others did not matter, and the bootstrap draws
            examples.
            By default the difference to the output of the network without halting (the KL divergence of
            ``logits``, else the relative squared distance).
        inputs: Takes what the network is called with out of a batch, as where a batch has labels besides.
        logits: Whether the output is class logits; by default if it has a part of that name.
        tau: The price of a step, in units of the loss; for the advantages of heads.
        unit: Of the loss, for the verdict.
        seed: Of the bootstrap.

    Returns:
        The rows, frontiers and heads, with ``.table()``, ``.verdict`` and ``.to_json()``.

    Raises:
        TypeError: A single batch is given instead of several.
        ValueError: The network has no adaptive blocks, there are fewer than two batches, or losses are not
            finite numbers of examples or positions.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> net = tp.adapt(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), per="example")
        >>> found = tp.diagnose(net, [torch.randn(20, 5, 16) for _ in range(2)])
        >>> [f"{row.step} of {row.of}" for row in found.rows], found.rows[2].loss
        (['1 of 3', '2 of 3', '3 of 3'], 0.0)

    """
    check_number("tau", tau, 0, open_high=True)
    found = exits_by_block(net, batches, loss, inputs, logits)
    if unit is None:
        named = found[0].raw_sure is not None
        unit = "" if loss is not None else "nats" if named else "of the squared output"
    blocks = halting_modules(net)
    heads, rows, parts, views = [], [], [], []
    for exits in found:
        give = served(exits)
        states = head_states(exits, tau)
        heads += states
        rows += _rows(exits, give)
        own = gains(exits, seed)
        by_heads = None if are_untrained(states) else gain_of_heads(exits, seed)
        ideal = oracle(give.costs, give.losses)
        fixed = points(give.costs.double().mean(1), give.losses.double().mean(1))
        kept = torch.linspace(0, len(ideal) - 1, min(_SHOWN, len(ideal))).round().long()
        parts.append(BlockDiagnosis(exits.name, tuple(own), _pairs(ideal[kept]), _pairs(fixed), by_heads))
        kind = "layer" if isinstance(blocks.get(exits.name), LayerRun) else "step"
        # of differences to the full output the largest may be noise itself
        noise = ROUNDING * max(1.0 if loss is None else 0.0, float(give.losses.abs().max()))
        views.append(_view(exits, give, kind, ideal, parts[-1])._replace(noise=noise))
    examples = int(found[0].examples.max()) + 1
    said = verdict(views, heads, unit, examples)
    return Diagnosis(tuple(rows), tuple(parts), tuple(heads), said, examples, unit)


def _rows(exits: BlockExits, give: Served) -> list[ExitRow]:
    costs, raw = exits.costs.double().mean(1).tolist(), exits.raw.double().mean(1).tolist()
    readout = None if exits.readout is None else exits.readout.double().mean(1).tolist()
    rows = []
    for step in range(exits.steps):
        better, by = 0.0, 0.0
        if step + 1 < exits.steps:
            ahead = (give.losses[step + 1 :].amin(0) - give.losses[step]).double()
            ahead = ahead[ahead > ROUNDING * float(give.losses.abs().max())]
            better = len(ahead) / give.losses.size(1)
            by = float(ahead.mean()) if len(ahead) else 0.0
        fitted = None if readout is None else readout[step]
        rows.append(ExitRow(exits.name, step + 1, exits.steps, costs[step], raw[step], fitted, better, by))
    return rows


def _view(exits: BlockExits, give: Served, kind: str, ideal: Tensor, part: BlockDiagnosis) -> BlockView:
    excess = (give.losses - give.losses[-1]).double()
    count = int(exits.examples.max()) + 1
    sums = torch.zeros(len(excess), count, dtype=torch.double).index_add_(1, exits.examples, excess)
    sizes = torch.bincount(exits.examples, minlength=count).double()
    mean = excess.mean(1)
    # of a ratio of sums over examples
    error = (sums - mean.unsqueeze(1) * sizes).square().sum(1).sqrt() / sizes.sum()
    return BlockView(
        exits.name,
        kind,
        exits.steps,
        tuple(mean.tolist()),
        tuple((mean + 1.96 * error).tolist()),
        tuple(excess.amax(1).tolist()),
        tuple(give.fitted.tolist()),
        cost_at(ideal, float(give.losses[-1].double().mean() + EQUAL * mean.max().clamp(min=0))),
        float(give.costs[-1].double().mean()),
        part.gains,
    )


def _pairs(points: Tensor) -> tuple[tuple[float, float], ...]:
    return tuple((float(cost), float(loss)) for cost, loss in points)
