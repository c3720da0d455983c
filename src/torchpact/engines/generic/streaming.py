"""The loop of a stream: fill the batch, run a step, gather what has halted."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpact.core.block import AdaptiveBlock
from torchpact.core.call_args import CallArgs
from torchpact.core.modes import Mode
from torchpact.core.ponder import Ponder
from torchpact.core.refill import Finished, joined
from torchpact.core.state import State
from torchpact.core.thresholds import Thresholds
from torchpact.engines.generic.intake import Group, Intake, Unit
from torchpact.engines.generic.lanes import Entering, Lanes
from torchpact.nn.looped import Looped
from torchpact.specs.call_capture import step_call

Rest = tuple[tuple[Any, ...], dict[str, Any]]


class Ends(NamedTuple):
    """What comes before the loop, and after it."""

    embed: Callable[[CallArgs], tuple[State, Rest]]
    readout: Callable[[State], Any]
    whole: Callable[[CallArgs], tuple[Any, Ponder]]
    """All of it at once, for batches without examples."""
    name: str
    price: float

    @classmethod
    def of(
        cls,
        loop: AdaptiveBlock | Looped,
        mode: Mode,
        thresholds: Thresholds | float | None,
        max_steps: int | None,
    ) -> "Ends":
        """Return those of a block, which has none, or of a looped network."""

        def whole(call: CallArgs) -> tuple[Any, Ponder]:
            told = {"mode": mode, "thresholds": thresholds, "max_steps": max_steps}
            found: tuple[Any, Ponder] = loop(*call.args, **call.kwargs, **told)
            return found

        if isinstance(loop, AdaptiveBlock):
            return cls(_of_block, lambda output: output, whole, loop.name, loop.price)

        def embed(call: CallArgs) -> tuple[State, Rest]:
            told = dict(call.kwargs)
            named = {"weights": told.pop("weights")} if "weights" in told else {}
            u, context = loop.begin(*call.args, **told)
            return u, (context, named)

        return cls(embed, loop.read, whole, loop.block.name, loop.block.price)


def _of_block(call: CallArgs) -> tuple[State, Rest]:
    told = dict(call.kwargs)
    named = {"weights": told.pop("weights")} if "weights" in told else {}
    given = step_call(CallArgs(call.args, told))
    return given.args[0], (given.args[1:], {**given.kwargs, **named})


class Streaming:
    """A run of a stream.

    Args:
        lanes: The batch.
        intake: The inputs.
        width: How many examples there are in the batch, at most.
        ends: What comes before the loop and after it.
        ahead: After how many finished examples that wait for an earlier input no more are taken; None hands
            results out as they finish.

    """

    def __init__(self, lanes: Lanes, intake: Intake, width: int, ends: Ends, ahead: int | None) -> None:
        self.lanes, self.intake, self.width, self.ends, self.ahead = lanes, intake, width, ends, ahead
        self.queue: deque[Unit] = deque()
        """Those whose results are still to be handed out, in their order; with ``ahead`` only."""
        self.ready: deque[Unit] = deque()
        self.waiting = 0
        """How many finished examples there are in the queue."""

    def results(self) -> Iterator[Unit]:
        """Yield inputs with their results."""
        live = 0
        while True:
            while self.ready:
                yield self.ready.popleft()
            entering = None
            # results are handed out before more inputs are asked for, which may take long
            if live < self.width and not self._held_up():
                entering = self._entering(self.width - live)
            if entering is not None or live:
                self.lanes.fill(entering, ends=self.intake.ended and self.intake.present is None)
                finished, owners = self.lanes.step()
                if finished is not None:
                    self._gather(finished, owners)
                live = self.lanes.live
            elif self.intake.ended and not self.ready:
                break
        if self.intake.error is not None:
            raise self.intake.error

    def _held_up(self) -> bool:
        if self.ahead is None or not self.queue:
            return False
        return self.waiting - self.queue[0].finished >= self.ahead

    def _entering(self, most: int) -> Entering | None:
        group, units = self.intake.group(most)
        for unit in units:
            if self.ahead is not None:
                self.queue.append(unit)
            if not unit.size:
                with torch.no_grad():
                    unit.output, unit.ponder = self.ends.whole(unit.call)
                self._complete(unit)
        if group is None:
            return None
        return self._embedded(group)

    def _embedded(self, group: Group) -> Entering:
        with torch.no_grad():
            u, rest = self.ends.embed(group.call)
        return Entering(u, rest, group.limits, group.owners)

    def _gather(self, finished: Finished, owners: list[tuple[Unit, int]]) -> None:
        """Give results to the inputs that they belong to."""
        self.waiting += len(owners)
        if not self.intake.batches:
            output, ponder = self._results(finished)
            for place, (unit, _) in enumerate(owners):
                unit.finished = 1
                unit.output, unit.ponder = _row(output, place), _row_of_ponder(ponder, place)
                self._complete(unit)
            return
        by_unit: dict[Unit, list[int]] = {}
        for place, (unit, row) in enumerate(owners):
            by_unit.setdefault(unit, []).append(place)
            unit.rows.append(row)
        for unit, places in by_unit.items():
            mine = finished
            if len(by_unit) > 1:
                mine = finished.take(torch.tensor(places, device=finished.steps.device))
            unit.groups.append(mine)
            unit.finished += len(places)
            if unit.complete:
                order = torch.tensor(unit.rows).argsort().to(finished.steps.device)
                unit.output, unit.ponder = self._results(joined(unit.groups).take(order))
                unit.groups.clear()
                self._complete(unit)

    def _results(self, finished: Finished) -> tuple[Any, Ponder]:
        with torch.inference_mode(False), torch.no_grad():
            loop = self.lanes.loop
            assert loop is not None
            ponder = finished.ponder(loop)._replace(name=self.ends.name, price=self.ends.price)
            return self.ends.readout(finished.output), ponder

    def _complete(self, unit: Unit) -> None:
        if self.ahead is None:
            self.waiting -= unit.size
            self.ready.append(unit)
            return
        while self.queue and self.queue[0].complete:
            done = self.queue.popleft()
            self.waiting -= done.size
            self.ready.append(done)


def _row(value: Any, row: int) -> Any:
    """Return an entry of a batch of results."""
    if isinstance(value, Tensor):
        return value[row]
    if isinstance(value, dict):
        return {key: _row(part, row) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [_row(part, row) for part in value]
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    return value


def _row_of_ponder(ponder: Ponder, row: int) -> Ponder:
    """Return the ponder of one example, with a batch dimension of 1."""
    one = slice(row, row + 1)
    probs, steps, expected, cost, log_prob, weights, name, price, _ = ponder
    own = None if weights is None else weights[one]
    return Ponder(probs[:, one], steps[one], expected[one], cost[one], log_prob, own, name, price)
