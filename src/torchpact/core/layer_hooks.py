"""Hooks by which the layers of a network drive the halting loop of their run.

The loop value travels on the hidden tensor itself, from layer to layer. So a layer that activation
checkpointing computes again, in another thread or after the mode has changed, sees what it saw first.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.core import state
from torchpact.core.aliases import is_alias, renamed
from torchpact.core.collect import report, wants_exits
from torchpact.core.layer_calls import context_of, first_output, first_state
from torchpact.core.layer_run import LayerRun
from torchpact.core.layer_scopes import Entry, Scope, check_batch_first, entry_of, scope_of, scopes_now
from torchpact.core.loop import HaltingLoop, advance
from torchpact.core.modes import Thresholded
from torchpact.core.ponder import Ponder

_CARRIED = "torchpact_carried"
"""The attribute of a tensor that holds what travels on it."""


class _Call:
    """One call of a run: mode, padding and collectors at its start, which a recomputation uses again."""

    def __init__(self, run: LayerRun, entry: Entry) -> None:
        self.run, self.weights, mode = run, entry.weights, entry.mode
        self.collectors = entry.collectors
        self.loop = HaltingLoop.start(
            mode,
            run.max_steps,
            bounds=entry.bounds,
            interpolated=True,
            may_stop=False,  # hooks cannot keep the network from calling its layers
            keeps_logits=run.details or torch.is_grad_enabled() or not isinstance(mode, Thresholded),
            keeps_exits=wants_exits(run, entry.collectors),
        )
        self.ended = False

    def end(self, ponder: Ponder) -> None:
        """Report the ponder of the run, once."""
        if not self.ended:
            self.ended = True
            report(self.run, self.run.finished(ponder, self.weights), self.collectors)
            # ponders hold the graph, which holds the states that this call travels on: no cycle may remain
            self.collectors = ()


class _Carried:
    """The value on a hidden tensor: the call, its loop after the layers so far, and what checks need.

    It is left out when the tensor is copied or pickled.
    """

    def __init__(self, call: _Call, loop: HaltingLoop, u: Tensor, others: Sequence[Any] = ()) -> None:
        self.call, self.loop = call, loop
        self.version = state.versions(u)
        # tensors beside the state that are as large: a second state, if the next layer takes one of them
        self.others = tuple(x for x in others if _is_as_large(x, u))

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class Executed:
    """The value on a hidden tensor while an engine runs the layers: hooks ignore such a call.

    Args:
        run: The run whose layers are called.

    """

    def __init__(self, run: LayerRun) -> None:
        self.run = run

    def mark(self, u: Tensor) -> Tensor:
        """Return a state that carries this."""
        setattr(u, _CARRIED, self)
        return u

    @staticmethod
    def on(u: Any, run: LayerRun) -> "Executed | None":
        """Return the value on a state between the layers of a run, if an engine runs them."""
        found = getattr(u, _CARRIED, None)
        return found if isinstance(found, Executed) and found.run is run else None

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class LayerHook:
    """The forward hook of a layer: it moves the loop of its run on by one step.

    Args:
        run: The run that the layer belongs to.
        index: The number of the layer, from 0; None for one that several steps of the run share.

    """

    def __init__(self, run: LayerRun, index: int | None) -> None:
        self.run, self.index = run, index

    def __call__(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Return the output of the layer, with halted positions as they were."""
        if not self.run.enabled:
            return None
        if torch.compiler.is_compiling() and not scopes_now():  # the layer is compiled, but not the network
            return _untraced(self, args, kwargs, output)
        return self.advance(args, kwargs, output)

    def advance(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Move the loop on, given a call of the layer and its output; see :meth:`__call__`."""
        scope = scope_of(self.run)
        if scope is None and not in_backward():
            return None  # the layer is called by itself
        before = first_state(args, kwargs)
        if Executed.on(before, self.run) is not None or Executed.on(output, self.run) is not None:
            return None
        carried = self._carried(before, scope)
        call, loop = carried.call, carried.loop
        self._check_gradients(loop, scope)
        run, index = self.run, loop.taken
        after = first_output(run.name, output)
        if index:
            self._check(carried, before, after, (*args, *kwargs.values()))
            before = before.to(after.dtype)  # under autocast
        else:
            run.check_state(after)

        last = index + 1 == run.max_steps
        head = None if last else run.head_after(index)
        told = context_of(args, kwargs)
        loop, u = advance(loop, before, after, head, held=False, weights=call.weights, context=told)
        assert isinstance(u, Tensor)
        rest = () if isinstance(output, Tensor) else output[1:]
        if last:
            result, ponder = loop.result(u)
            assert isinstance(result, Tensor)
            u = result
            call.end(ponder)
        else:
            u = renamed(u)
            setattr(u, _CARRIED, _Carried(call, loop, u, rest))
        if scope is not None and not torch.compiler.is_compiling():
            scope.latest[:] = [] if last else [u]
        if isinstance(output, Tensor):
            return u
        return [u, *rest] if isinstance(output, list) else (u, *rest)

    def _carried(self, before: Tensor, scope: Scope | None) -> _Carried:
        """Return the loop that the layer continues.

        Raises:
            ValueError: It is not called with what the layer before it returned.

        """
        carried = self._on(before, scope)
        taken = 0 if carried is None else carried.loop.taken
        if (
            taken == 0
            and not (carried is not None and in_backward())
            and self.index in (None, 0)
            and scope is not None
        ):
            return self._begun(before, scope)
        if carried is not None and self.index in (None, taken):
            if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
                delattr(before, _CARRIED)  # nothing is computed again
            return carried
        if scope is not None:
            raise ValueError(
                f"expected the layers of {self.run.name!r} to be called one after the other, each with what "
                f"the one before it returned; layer {(self.index or 0) + 1} was given another tensor: remove "
                "hooks that replace what a layer takes or returns, or leave this run out by where="
            )
        raise ValueError(
            f"expected the layers of {self.run.name!r} to be computed again with the states they had, got "
            "copies: under FSDP2 checkpoint within the layer's forward; otherwise pass use_reentrant=False "
            "to activation checkpointing"
        )

    def _on(self, before: Tensor, scope: Scope | None) -> _Carried | None:
        """Return the value on a state, or on the tensor that it is an alias of."""
        found = getattr(before, _CARRIED, None)
        if found is None and scope is not None and scope.latest and not torch.compiler.is_compiling():
            # FSDP2 hands a layer an alias of what it is given, to hear of the end of its backward pass
            latest = scope.latest[0]
            if is_alias(before, latest):
                found = getattr(latest, _CARRIED, None)
                setattr(before, _CARRIED, found)  # for a recomputation
        return found if isinstance(found, _Carried) and found.call.run is self.run else None

    def _check_gradients(self, loop: HaltingLoop, scope: Scope | None) -> None:
        """Refuse layers that are called without gradients, in a network that is called with them."""
        if torch.is_grad_enabled() or not self.run.training:
            return
        wanted = loop.rules.learning or (scope is not None and scope.learning)
        if wanted and any(parameter.requires_grad for parameter in self.run.heads.parameters()):
            raise ValueError(
                f"expected the layers of {self.run.name!r} to be called with gradients enabled, as the "
                "network is: their heads would not learn. Reentrant activation checkpointing calls them "
                "without; pass use_reentrant=False"
            )

    def _begun(self, before: Tensor, scope: Scope) -> _Carried:
        """Return the start of a call."""
        if not self.run.known_layout:
            check_batch_first(self.run, before)
        call = _Call(self.run, entry_of(self.run, before, scope))
        scope.begun.append(call)
        carried = _Carried(call, call.loop, before)
        if torch.is_grad_enabled() and not isinstance(before, nn.Parameter):
            setattr(before, _CARRIED, carried)  # for activation checkpointing
        return carried

    def _check(self, carried: _Carried, before: Tensor, after: Tensor, given: Sequence[Any]) -> None:
        """Refuse layers whose halted positions cannot be frozen."""
        name, number = self.run.name, carried.loop.taken + 1
        if after.shape != before.shape:
            raise ValueError(
                f"expected the layers of {name!r} to keep the shape of the state, got {tuple(before.shape)} "
                f"before layer {number} and {tuple(after.shape)} after it"
            )
        if carried.version != state.versions(before):
            raise ValueError(
                f"expected the layers of {name!r} to leave their input as it is, got layer {number} that "
                "changes it in place: make its operations return new tensors, or leave this run out by where="
            )
        if any(x is other for x in given for other in carried.others):
            raise ValueError(
                f"expected the layers of {name!r} to pass one hidden state on, got layer {number} that takes "
                "another result of the layer before it, too: leave this run out by where="
            )


def in_backward() -> bool:
    """Whether this thread computes something again for a backward pass, as activation checkpointing does."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _is_as_large(x: Any, u: Tensor) -> bool:
    return isinstance(x, Tensor) and x.dim() == u.dim() and x.shape[:2] == u.shape[:2]


def _untraced(hook: LayerHook, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Move a loop on outside of the graph of a layer that is compiled by itself."""
    # as a decorator it would import the compiler together with this module
    return torch.compiler.disable(hook.advance)(args, kwargs, output)
