"""Collecting ponders: what the blocks of a network did, beside what the network returns."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchpact.checks import readable
from torchpact.core.ponder import Ponder, mean_over_positions

if TYPE_CHECKING:
    from torchpact.core.halting_module import HaltingModule


class Ponders(list[Ponder]):
    """What the blocks of a network did: a list of :class:`~torchpact.Ponder`, in the order in which they ran.

    Its ``cost``, ``steps`` and ``table()`` treat several calls of a block as one call with more examples, so
    that they are per call; objectives such as :func:`~torchpact.map_loss` add up calls.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), tp.AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=3))
        >>> with tp.collect(net) as ponders:
        ...     output, ponder = net(torch.randn(5, 4))
        >>> len(ponders), ponders[0].name, torch.equal(ponders[0].steps, ponder.steps)
        (1, '1', True)
        >>> with tp.collect(net) as ponders, torch.no_grad(), tp.use_mode(net, "thresholded"):
        ...     with tp.use_thresholds(net, tp.Thresholds("never")):
        ...         output, ponder = net(torch.randn(5, 4))
        >>> ponders
        Ponders(1: 3 of 3 steps)

    """

    thresholded_by_eval = False
    """Whether gradients flow from a network that ``eval()`` made thresholded, to heads by the price only."""

    def __repr__(self) -> str:
        shown = []
        for name, ponders in self.by_block.items():
            calls = f" in {len(ponders)} calls" if len(ponders) > 1 else ""
            mean = f"{float(ponders.steps.detach()):.4g} of " if readable(ponders[0].steps) else ""
            shown.append(f"{name or '-'}: {mean}{len(ponders[0].probs)} steps{calls}")
        return f"Ponders({', '.join(shown)})"

    @property
    def by_block(self) -> dict[str, "Ponders"]:
        """The ponders of each block, by its name."""
        found: dict[str, Ponders] = {}
        for ponder in self:
            found.setdefault(ponder.name, Ponders()).append(ponder)
        return found

    @property
    def cost(self) -> Tensor:
        """The cost of an example in a call, summed over blocks: a differentiable scalar.

        Within an example the cost of a block is averaged over its positions, as they weigh. Of several calls
        of a block it is the mean over their examples, where :func:`~torchpact.map_loss` adds up the calls:
        two calls cost twice as much there.
        """
        return self._sum("cost")

    @property
    def steps(self) -> Tensor:
        """The steps that an example ran, averaged over its positions and summed over blocks: a scalar."""
        return self._sum("steps")

    def _sum(self, field: str) -> Tensor:
        if not self:
            raise ValueError("expected the ponders of at least one call, got none")
        total: Tensor | None = None
        for ponders in self.by_block.values():
            each = torch.cat([_by_example(getattr(ponder, field), ponder) for ponder in ponders])
            mean = each.sum() / max(len(each), 1)
            total = mean if total is None else total + mean
        assert total is not None
        return total

    def table(self) -> str:
        """Return a table with a line for each block: its calls, steps, cost, and how positions are spread.

        Example:
            >>> block = tp.AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=3, mode="thresholded")
            >>> with tp.collect(block) as ponders, torch.no_grad():
            ...     output, ponder = block(torch.zeros(5, 8), thresholds=tp.Thresholds("never"))
            >>> print(ponders.table())
            block  calls  steps  of  cost  positions that halt after step 1, 2, …
            -          1   3.00   3  3.00  0% 0% 100%

        """
        rows = [("block", "calls", "steps", "of", "cost", "positions that halt after step 1, 2, …")]
        for name, ponders in self.by_block.items():
            count = len(ponders[0].probs)
            steps = torch.cat([_by_example(ponder.steps, ponder) for ponder in ponders])
            cost = torch.cat([_by_example(ponder.cost.detach(), ponder) for ponder in ponders])
            shares = " ".join(f"{share:.0%}" for share in _spread(ponders, count))
            mean, price = (float(x.sum() / max(len(x), 1)) for x in (steps, cost))
            rows.append((name or "-", str(len(ponders)), f"{mean:.2f}", str(count), f"{price:.2f}", shares))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
        lines = []
        for row in rows:
            cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:]), row[-1]]
            lines.append("  ".join(cells))
        return "\n".join(lines)


def _by_example(values: Tensor, ponder: Ponder) -> Tensor:
    return mean_over_positions(values.to(torch.promote_types(values.dtype, torch.float32)), ponder.weights)


def _spread(ponders: Ponders, count: int) -> list[float]:
    """Return the share of positions, as they weigh, that ran 1, 2, … steps."""
    total = torch.zeros(count)
    for ponder in ponders:
        weights = 1.0 if ponder.weights is None else ponder.weights
        own = torch.as_tensor(weights, dtype=torch.float32, device=ponder.steps.device)
        index, each = (ponder.steps - 1).flatten().cpu(), own.expand(ponder.steps.shape).flatten().cpu()
        total.index_add_(0, index, each)
    shares: list[float] = (total / total.sum().clamp(min=torch.finfo(total.dtype).tiny)).tolist()
    return shares


class Collector:
    """Gathers the ponders of some blocks while it is active.

    Args:
        names: The blocks, and what they are called where they have no name of their own.
        exits: Whether their ponders have exits.

    """

    def __init__(self, names: Mapping["HaltingModule", str], exits: bool = False) -> None:
        self.names, self.exits, self.ponders = names, exits, Ponders()

    def add(self, block: "HaltingModule", ponder: Ponder) -> None:
        """Add what a block did, if it is one of these."""
        if block in self.names:
            probs, steps, expected, cost, log_prob, weights, name, price, exits = ponder
            name = self.names[block] if block.layers else name or self.names[block]
            if self.exits and exits is None:
                raise ValueError(
                    f"expected blocks and layers, which keep exits, got {name!r}, which keeps none, as "
                    "recurrent layers do not"
                )
            kept = exits if self.exits else None
            if not torch.compiler.is_compiling() and cost.requires_grad and _thresholded_by_eval(block):
                self.ponders.thresholded_by_eval = True
            # not by _replace, which torch.compile of 2.11 cannot trace
            self.ponders.append(Ponder(probs, steps, expected, cost, log_prob, weights, name, price, kept))


def _thresholded_by_eval(block: "HaltingModule") -> bool:
    """Whether a block decides by thresholds for no other reason than ``eval()``."""
    return block.mode is None and not block.training


Collectors = tuple[Collector, ...]
_ACTIVE: ContextVar[Collectors] = ContextVar("collectors", default=())
# torch.compile does not trace context variables: what is compiled sees the collectors of all threads
_OF_ALL_THREADS: list[Collector] = []


def active_collectors() -> Collectors:
    """Return what gathers ponders in this thread now; nothing does in a recomputation during backward."""
    if torch.compiler.is_compiling():
        return tuple(_OF_ALL_THREADS)
    active = _ACTIVE.get()
    # activation checkpointing calls blocks again in backward, and their ponders were gathered already
    return () if active and torch._C._current_graph_task_id() != -1 else active


def wants_exits(block: "HaltingModule", collectors: Collectors | None = None) -> bool:
    """Return whether any collector wants the exits of a block.

    Args:
        block: The block.
        collectors: By default those that are active now.

    """
    active = active_collectors() if collectors is None else collectors
    return any(collector.exits and block in collector.names for collector in active)


def report(block: "HaltingModule", ponder: Ponder, collectors: Collectors | None = None) -> None:
    """Hand over what a block did.

    Args:
        block: The block.
        ponder: What it did.
        collectors: Those that were active when the block was entered; by default those that are active now.

    """
    for collector in active_collectors() if collectors is None else collectors:
        collector.add(block, ponder)


@contextmanager
def uncollected() -> Iterator[None]:
    """Let no collector see the calls that this thread makes within."""
    token = _ACTIVE.set(())
    try:
        yield
    finally:
        _ACTIVE.reset(token)


@contextmanager
def collecting(collector: Collector) -> Iterator[None]:
    """Let a collector see the calls that this thread makes within, besides those that do already."""
    token = _ACTIVE.set((*_ACTIVE.get(), collector))
    try:
        yield
    finally:
        _ACTIVE.reset(token)


class collect:
    """Collect the ponders of the calls of a network: ``with tp.collect(net) as ponders: out = net(x)``.

    It sees the calls that this thread makes within the ``with`` statement, of all adaptive blocks below the
    network: those of an adapted network, :class:`~torchpact.AdaptiveBlock`, recurrent layers, and those of a
    deployed network. Each call of a block adds one ponder when it ends. A block that activation
    checkpointing computes again in backward is not counted twice. Statements may be nested.

    Under ``torch.compile`` a compiled network adds to the collectors of all threads; begin the ``with``
    statement outside of the compiled function.

    With ``exits`` each ponder has the states and logits after all steps, see
    :class:`~torchpact.core.exits.Exits`, in any mode and with gradients if they are enabled. The original
    network's own exits, in one pass::

        with tp.use_mode(net, "thresholded"), tp.use_thresholds(net, tp.Thresholds("never")):
            with tp.collect(net, exits=True) as ponders:
                output = net(x)

    Args:
        model: The network, adaptive or deployed.
        exits: Whether states and logits of all exits are kept; recurrent layers and deployed networks, which
            skip them, have none.

    Raises:
        TypeError: The model is not a module.
        ValueError: It has no adaptive blocks, or exits are wanted of a deployed network.

    Example:
        >>> net = tp.models.psact_resnet32().eval()
        >>> with tp.collect(net) as ponders, torch.no_grad():
        ...     output = net(torch.randn(2, 3, 32, 32))
        >>> [ponder.name for ponder in ponders]
        ['blocks.0', 'blocks.1', 'blocks.2']

    """

    def __init__(self, model: nn.Module, *, exits: bool = False) -> None:
        from torchpact.core.frozen import FrozenModule
        from torchpact.core.halting_module import adaptive_blocks

        found = adaptive_blocks(model)
        if exits and any(isinstance(module, FrozenModule) for module in model.modules()):
            raise ValueError(
                "expected the network itself for its exits, got a deployed one, which skips them"
            )
        self._collector = Collector({block: name for name, block in found.items()}, exits)

    def __enter__(self) -> Ponders:
        self._token = _ACTIVE.set((*_ACTIVE.get(), self._collector))
        _OF_ALL_THREADS.append(self._collector)
        return self._collector.ponders

    def __exit__(self, *_: object) -> None:
        _OF_ALL_THREADS.remove(self._collector)
        _ACTIVE.reset(self._token)
