"""What diagnose found: rows for a table, and a verdict in words."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from torchpact.budget.executable import Gain, Points
from torchpact.budget.head_states import HeadState

ENOUGH = 0.02
"""The share of the original's FLOPs that a criterion has to save, by the lower end of its interval."""
UNTRAINED = 1e-9
"""Heads whose h varies no more than this over positions have not learned anything."""
FEW = 30
"""With fewer examples intervals say nothing, and there is no verdict."""
EQUAL = 0.01
"""An exit is as good as the last if it loses no more than this share of what the worst one loses."""


@dataclass(frozen=True)
class ExitRow:
    """An exit of a block: what it costs and loses if all examples leave there."""

    block: str
    step: int
    of: int
    cost: float
    """A share of the original's FLOPs, without a fitted read-out."""
    loss: float
    """Through the network's own read-out."""
    readout: float | None
    """Through a fitted read-out besides; None where states differ in shape."""
    better: float
    """The share of examples for which this exit is better than every later one, in hindsight."""
    by: float
    """By how much for these examples, in the mean."""


class BlockView(NamedTuple):
    """What the verdict on a block needs."""

    block: str
    kind: str
    """"layer" or "step"."""
    steps: int
    excess: tuple[float, ...]
    """The mean loss of each exit above that of the last, through the better of its read-outs."""
    most: tuple[float, ...]
    """The upper ends of their intervals, at 95 %."""
    everywhere: tuple[float, ...]
    """The largest excess over examples."""
    fitted: tuple[bool, ...]
    oracle: float
    """What the oracle costs at the loss of the last exit, and a little more."""
    last: float
    """What the last exit costs."""
    gains: Sequence[Gain]
    noise: float = 0.0
    """Differences of losses up to this are those of rounding."""


@dataclass(frozen=True)
class BlockDiagnosis:
    """Frontiers and gains of a block."""

    block: str
    gains: tuple[Gain, ...]
    oracle: Points
    """Costs and losses of choices made in hindsight, which no criterion reaches."""
    fixed: Points
    """Costs and losses of mixtures of fixed exits, through the better of their read-outs."""
    heads: Gain | None = None
    """What the network's own heads gain as they are; None of heads that are as they began."""


@dataclass(frozen=True)
class Diagnosis:
    """Whether halting pays for a network, and whether its heads are alive; see :func:`torchpact.diagnose`.

    ``print`` shows the table and the verdict.

    Args:
        rows: The exits of all blocks.
        blocks: The frontiers of each block, and what criteria gain.
        heads: The heads of all blocks.
        verdict: What these say, in words.
        examples: How many examples they are of.
        unit: Of the loss, such as "nats".

    Example:
        >>> block = tp.AdaptiveBlock([nn.Identity(), nn.Tanh()], nn.Linear(8, 1))
        >>> found = tp.diagnose(block, [torch.ones(4, 8)] * 2, lambda output, x: output[0].mean(1))
        >>> [row.loss for row in found.rows]
        [1.0, 0.761...]

    """

    rows: tuple[ExitRow, ...]
    blocks: tuple[BlockDiagnosis, ...]
    heads: tuple[HeadState, ...]
    verdict: str
    examples: int
    unit: str = ""

    def table(self) -> str:
        """Return tables of the exits, of the criteria and, if they have been trained, of the heads."""
        several = len(self.blocks) > 1
        first = ["block"] if several else []
        exits = [[*first, "exit", "cost", "loss", "read-out", "better", "by"]]
        for row in self.rows:
            own = [row.block] if several else []
            readout = "-" if row.readout is None else f"{row.readout:.4g}"
            last = row.step == row.of
            better = ["-", "-"] if last else [f"{row.better:.0%}", f"{row.by:.3g}"]
            exits.append(
                [*own, f"{row.step} of {row.of}", f"{row.cost:.1%}", f"{row.loss:.4g}", readout, *better]
            )
        gains = [[*first, "criterion", "cost", "loss", "saved", "95 %"]]
        for block in self.blocks:
            for gain in [*block.gains, *([] if block.heads is None else [block.heads])]:
                own = [block.block] if several else []
                ends = f"{gain.low:+.1%} to {gain.high:+.1%}"
                gains.append(
                    [*own, gain.criterion, f"{gain.cost:.1%}", f"{gain.loss:.4g}", f"{gain.saved:+.1%}", ends]
                )
        heads = [[*first, "head", "h", "spread", "halts", "h(1-h)", "better", "rank", "dead"]]
        for head in [] if are_untrained(self.heads) else self.heads:
            own = [head.block] if several else []
            numbers = [f"{head.h:.3f}", f"{head.spread:.3f}", f"{head.fires:.0%}", f"{head.slope:.4f}"]
            heads.append(
                [
                    *own,
                    str(head.step),
                    *numbers,
                    f"{head.better:.0%}",
                    f"{head.correlation:+.2f}",
                    head.reason or "-",
                ]
            )
        return "\n\n".join(_aligned(each) for each in (exits, gains, heads) if len(each) > 1)

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.verdict}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


def verdict(views: Sequence[BlockView], heads: Sequence[HeadState], unit: str, examples: int) -> str:
    """Return what a user should know, in one or two sentences a block, and one on the heads.

    Of very few examples it is that they are too few.

    Args:
        views: One of each block.
        heads: The heads of all.
        unit: Of the loss.
        examples: How many there are.

    """
    if examples < FEW:
        return (
            f"{examples} example{'s are' if examples > 1 else ' is'} too few for a verdict: pass at least "
            f"{FEW}, better a few hundred."
        )
    found = []
    for view in views:
        where = f"{view.block}: " if len(views) > 1 else ""
        found.append(where + _of_block(view, f" {unit}" if unit else ""))
    return "\n".join([*found, *_of_heads(heads, len(views) > 1)])


def _of_block(view: BlockView, unit: str) -> str:
    if view.steps < 2:
        return f"There is one {view.kind}: nothing can halt."
    span = max(view.excess)
    room = max(EQUAL * span, view.noise)
    enough = next((i for i in range(view.steps - 1) if view.most[i] <= room), None)
    best = max(view.gains, key=lambda gain: gain.low)
    pays = best.low >= ENOUGH
    said = []
    if enough is not None:
        everywhere = view.everywhere[enough] <= room
        of = "for all examples" if everywhere else f"({view.excess[enough]:+.2g}{unit} on average)"
        nearly = "" if everywhere or view.excess[enough] <= 0 else "nearly "
        through = ", through a fitted read-out" if view.fitted[enough] else ""
        which = f"{view.kind.capitalize()} {enough + 1} of {view.steps} is {nearly}as good as the last"
        said.append(f"{which} {of}{through}: use fewer {view.kind}s.")
    if pays:
        lost = _lost(best, unit)
        name = {"confidence": "A calibrated confidence exit", "linear": "A linear predictor on the state"}
        said.append(
            f"{name[best.criterion]} saves {best.saved:.0%} of the FLOPs "
            f"(95 %: {best.low:.0%} to {best.high:.0%}) against the best mixture of fixed "
            f"{view.kind}s at equal loss: it costs {best.cost:.0%}, {lost}."
        )
    if said:
        return " ".join(said)
    near = min(range(view.steps - 1), key=lambda i: view.excess[i])
    through = ", even through a fitted read-out" if view.fitted[near] else ""
    begin = (
        f"Every exit before the last of {view.steps} {view.kind}s loses at least "
        f"{view.excess[near]:.2g}{unit} ({view.kind} {near + 1}{through})"
    )
    if 2 * view.excess[near] - view.most[near] <= room:  # the lower end of its interval
        through += "," if through else ""
        begin = (
            f"No exit before the last of {view.steps} {view.kind}s is seen to be as good as it "
            f"({view.kind} {near + 1}{through} loses up to {view.most[near]:.2g}{unit}, at 95 %)"
        )
    saved = view.last - view.oracle
    if saved < ENOUGH and best.high < ENOUGH:
        return (
            f"{begin}, and even an oracle saves {max(saved, 0):.1%} of the FLOPs "
            "if next to nothing may be lost: halting cannot pay here without training the exits."
        )
    if best.high < ENOUGH:
        return (
            f"{begin}, and no criterion saves more than {max(best.high, 0):.1%} of the FLOPs "
            f"over fixed {view.kind}s: halting cannot pay here without training the exits "
            f"(an oracle would save {saved:.0%})."
        )
    return (
        f"{begin}; no criterion is seen to save {ENOUGH:.0%} of the FLOPs over fixed {view.kind}s (the best, "
        f"{best.criterion}: {best.low:+.0%} to {best.high:+.0%}), where an oracle would save {saved:.0%}: "
        "train the exits, or ask again with more examples."
    )


def _lost(best: Gain, unit: str) -> str:
    low, high = best.excess
    if low <= 0 <= high:
        return f"at no measurable loss (95 %: {low:+.2g} to {high:+.2g}{unit})"
    if high < 0:
        return f"and loses less than all of it ({low:+.2g} to {high:+.2g}{unit})"
    return f"and loses {(low + high) / 2:.2g}{unit} against all of it"


_REASONS = {
    "gradient": "halting is better for some examples, but h(1 − h) is too small for their gradient: train by "
    "tp.advantage_loss",
    "bound": "h orders examples well, but never crosses the threshold: choose thresholds by tp.calibrate",
    "advantage": "rightly, there is nothing to gain",
    "order": "h does not order examples by what they gain: train longer, or let heads see more, such as "
    "tp.criteria.Confidence",
}


def are_untrained(heads: Sequence[HeadState]) -> bool:
    """Return whether h is the same everywhere, as where heads begin.

    Args:
        heads: The heads.

    """
    return all(head.spread < UNTRAINED for head in heads)


def _of_heads(heads: Sequence[HeadState], several: bool) -> list[str]:
    """Return a sentence for each reason that heads are dead for."""
    if heads and are_untrained(heads):
        return [f"Heads are as they began: h is {heads[0].h:.2g} everywhere."]
    said = []
    for reason, words in _REASONS.items():
        names = [
            f"{head.block} {head.step}" if several else str(head.step)
            for head in heads
            if head.reason == reason
        ]
        if names:
            one = len(names) == 1
            said.append(f"Dead head{'' if one else 's'} {', '.join(names)}: {words}.")
    return said
