"""A batch of examples at different steps: halted ones leave, and others take their rows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchpact.core import state
from torchpact.core.block import AdaptiveBlock
from torchpact.core.call_args import CallArgs, tensors_in
from torchpact.core.callables import is_gated, is_indexed
from torchpact.core.criterion import map_memory
from torchpact.core.halting_module import HaltingModule
from torchpact.core.loop import HaltingLoop, Rules, advance
from torchpact.core.modes import Mode
from torchpact.core.refill import Finished, finished_rows, renew_rows, start_rolling, take_rows
from torchpact.core.rolling import Rolling
from torchpact.core.state import State
from torchpact.engines.build_cache import protect_compiler_caches
from torchpact.engines.generic.per_example import combined, is_tensor, rows
from torchpact.specs.blocks import Bounds

Owner = tuple[Any, int]
"""What an example belongs to, and its number there."""
Values = tuple[Any, ...]
"""The tensors of a loop that change from step to step."""


class Entering(NamedTuple):
    """Examples that are to enter, with one row each."""

    u: State
    rest: tuple[tuple[Any, ...], dict[str, Any]]
    """What steps are given besides; ``weights`` by name are for criteria and ponders."""
    limits: list[int]
    """At most how many steps each takes."""
    owners: list[Owner]


def problem_of(block: AdaptiveBlock, mode: Mode) -> str | None:
    """Return why examples of a block cannot be at different steps, in a line; None if they can."""
    if len(block.steps) > 1:
        return f"expected one step that all iterations share, got a list of {len(block.steps)}"
    if len(block.halting) > 1:
        return f"expected one head that all iterations share, got a list of {len(block.halting)}"
    if is_indexed(block.steps[0]):
        return "expected a step that does the same in every iteration, got one that is told their number"
    if not mode.can_exit_early or type(mode).noise is not Mode.noise:
        return f"expected a mode in which examples halt for good and that draws nothing, got {mode}"
    return None


class Lanes:
    """Runs the shared step and the head of a block on a batch whose examples are at different steps.

    Args:
        block: The block; its steps and heads treat examples independently.
        mode: What decides.
        bounds: What logits must exceed, for each of the L − 1 decisions; None is the mode's own threshold.
        max_steps: L, at most how many steps any example takes.
        keeps_logits: Without, ponders have decisions only.
        per_example: Which parts of ``rest`` have an entry for each example; None is all tensors.
        width: How many rows there are always; None where there are as many as examples.
        compiled: Whether a step of a batch of that width is compiled.

    """

    def __init__(
        self,
        block: AdaptiveBlock,
        mode: Mode,
        bounds: Bounds,
        max_steps: int,
        *,
        keeps_logits: bool,
        per_example: Any = None,
        width: int | None = None,
        compiled: bool = False,
    ) -> None:
        self.block, self.mode, self.bounds, self.max_steps = block, mode, bounds, max_steps
        self.keeps_logits, self.per_example, self.width = keeps_logits, per_example, width
        self.gated = is_gated(block.steps[0])
        self.foreign = {_address(x) for x in (*block.parameters(), *block.buffers())}
        self.owners: list[Owner | None] = []
        """Whose example each row holds; None where it is free."""
        self.live = 0
        """How many examples are under way."""
        self.u: Any = None
        self.rest: Any = ((), {})
        self.loop: HaltingLoop | None = None
        self._compiled = compiled_step(block) if compiled else None

    def fill(self, entering: Entering | None, ends: bool = False) -> None:
        """Put examples into rows that are free; rows are added for more, and free ones that are left go.

        Args:
            entering: Those that enter, if there are any.
            ends: Whether there will be no more: a batch of constant width narrows once half of it is free.

        """
        with _without_gradients():
            if entering is not None:
                if self.loop is None or self.loop.remaining is None or not self.live:
                    self._start(entering)
                else:
                    self._enter(entering)
                self.live += len(entering.owners)
            if self.width is not None and ends and self.live <= self.width // 2:
                self.width = None
            if self.width is None and self.live < len(self.owners):
                self._select([row for row, owner in enumerate(self.owners) if owner is not None])

    def _start(self, entering: Entering) -> None:
        u, rest, limits, owners = entering
        if self.per_example is None:
            self.per_example = is_tensor(rest)
        count, width = len(owners), max(self.width or 0, len(owners))
        spare = width - count  # copies of the first example, which take one step
        index = torch.tensor([*range(count)] + [0] * spare, device=state.parts(u)[0].device)
        self.u = state.rows_of(u, index)  # copies: rows are written to later
        self.rest = rows(rest, self.per_example, index)
        self.owners = [*owners] + [None] * spare
        self.loop = start_rolling(
            self.mode,
            self.max_steps,
            torch.tensor([*limits] + [1] * spare, device=index.device),
            bounds=self.bounds,
            gated=self.gated,
            keeps_logits=self.keeps_logits,
        )

    def _enter(self, entering: Entering) -> None:
        u, rest, limits, owners = entering
        free = [row for row, owner in enumerate(self.owners) if owner is None]
        more = len(owners) - len(free)
        if more > 0:
            self._select([*range(len(self.owners))] + [0] * more)
            free += range(len(self.owners) - more, len(self.owners))
        free = free[: len(owners)]
        for row, owner in zip(free, owners, strict=True):
            self.owners[row] = owner
        assert self.loop is not None
        index = torch.tensor(free, device=state.parts(self.u)[0].device)
        shared = self.foreign | {_address(x) for x in tensors_in(self.rest)}

        def put(part: Tensor, new: Tensor) -> Tensor:
            if part.shape[1:] != new.shape[1:] or part.is_floating_point() != new.is_floating_point():
                raise ValueError(
                    f"expected examples of shape {tuple(part.shape[1:])} and {part.dtype}, got "
                    f"{tuple(new.shape[1:])} and {new.dtype}"
                )
            new = new.to(part.dtype)  # under autocast
            if _address(part) in shared or part.is_inference():  # a step returned what is not its own
                return part.index_copy(0, index, new)
            return part.index_copy_(0, index, new)

        self.u = state.map_state(put, self.u, u)
        shared = set()
        self.rest = combined([self.rest, rest], self.per_example, lambda pair: put(*pair))
        self.loop = renew_rows(self.loop, index, torch.tensor(limits, device=index.device))

    def _select(self, keep: Sequence[int]) -> None:
        assert self.loop is not None
        count = len(self.owners)
        self.owners = [self.owners[row] if n < count else None for n, row in enumerate(keep)]
        if not keep:
            return
        index = torch.tensor([*keep], device=state.parts(self.u)[0].device)
        self.u = state.rows_of(self.u, index)
        self.rest = rows(self.rest, self.per_example, index)
        self.loop = take_rows(self.loop, index)

    def step(self) -> tuple[Finished | None, list[Owner]]:
        """Run a step of all examples.

        Returns:
            The results of those that have halted, and whose they are; their rows are free.

        """
        with _without_gradients():
            loop = self.loop
            assert loop is not None
            if self._compiled is None or self.width is None or loop.remaining is None:
                self.u, self.loop, closed = advanced(self.block, self.u, self.rest, loop)
            else:
                if loop.gate is loop.remaining:  # one tensor or two would be two graphs
                    loop = loop._replace(gate=loop.remaining.clone())
                given = (loop.rules, loop.frozen, _values_of(loop))
                self.u, values, closed = self._compiled(self.block, self.u, self.rest, *given)
                if closed.is_cuda:  # in a CUDA graph, which will write there again
                    self.u = state.map_state(torch.clone, self.u)
                    values = tuple(map_memory(torch.clone, value) for value in values)
                self.loop = _with_values(*given[:2], values)
            where = closed.nonzero().squeeze(1)
            places = where.tolist()
            found = [(row, owner) for row in places if (owner := self.owners[row]) is not None]
            if not found:
                return None, []
            if len(found) < len(places):
                where = torch.tensor([row for row, _ in found], device=where.device)
            for row, _ in found:
                self.owners[row] = None
            self.live -= len(found)
            weights = self.rest[1].get("weights")
            done = finished_rows(self.loop, self.u, where)
            if weights is not None:
                done = done._replace(weights=weights.index_select(0, where))
            return done, [owner for _, owner in found]


def advanced(
    block: AdaptiveBlock, u: State, rest: Any, loop: HaltingLoop
) -> tuple[State, HaltingLoop, Tensor]:
    """Run a step of a block on examples that have not halted.

    Args:
        block: The block.
        u: Their state.
        rest: What steps are given besides, and ``weights`` by name.
        loop: The loop before the step.

    Returns:
        The state and the loop after it, and which examples have halted at all positions.

    """
    args, told = rest
    named = {name: x for name, x in told.items() if name != "weights"}
    weights, head = told.get("weights"), block.halting[0] if len(block.halting) else None
    after = block.run_step(1, u, loop.gate, args, named)
    # halted examples leave before the next step; of those that stay, positions that have halted are held by
    # steps that take the gate, as in the block
    loop, u = advance(loop, u, after, head, held=True, weights=weights, context=CallArgs(args, named))
    assert loop.gate is not None
    if weights is not None:
        HaltingModule.checked_weights(weights, loop.gate)
    return u, loop, ~(loop.gate > 0).flatten(1).any(1)


_COMPILED: WeakKeyDictionary[AdaptiveBlock, Callable[..., Any]] = WeakKeyDictionary()


def compiled_step(block: AdaptiveBlock) -> Callable[..., Any]:
    """Return a step of a loop as tensors, by torch.compile; once for each block.

    Args:
        block: The block, which the function is given again.

    """
    if block not in _COMPILED:
        protect_compiler_caches()
        kind = next((x.device.type for x in block.parameters()), "cpu")
        # in a CUDA graph, where there is one
        options = "reduce-overhead" if kind == "cuda" else None
        _COMPILED[block] = torch.compile(_moved, dynamic=False, mode=options)
    return _COMPILED[block]


def _moved(
    block: AdaptiveBlock, u: State, rest: Any, rules: Rules, frozen: bool, values: Values
) -> tuple[State, Values, Tensor]:
    u, loop, closed = advanced(block, u, rest, _with_values(rules, frozen, values))
    return u, _values_of(loop), closed


def _with_values(rules: Rules, frozen: bool, values: Values) -> HaltingLoop:
    remaining, gate, steps, output, memory, *rolling = values
    return HaltingLoop(rules, 0, remaining, gate, steps, (), output, frozen, memory, (), Rolling(*rolling))


def _values_of(loop: HaltingLoop) -> Values:
    assert loop.rolling is not None
    return (loop.remaining, loop.gate, loop.steps, loop.output, loop.memory, *loop.rolling)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@contextmanager
def _without_gradients() -> Iterator[None]:
    """Compute without gradients, and not in inference mode, whose tensors cannot be written to elsewhere."""
    with torch.inference_mode(False), torch.no_grad():
        yield
