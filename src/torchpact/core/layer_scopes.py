"""Scopes: the calls of modules that are on the way from a network to its runs of layers.

They say whether a layer is called by its network or by itself, and which positions are padding, which only
the arguments of the network tell.
"""

import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchpact.checks import at_least_single
from torchpact.core.collect import Collectors, active_collectors
from torchpact.core.layer_run import LayerRun
from torchpact.core.modes import Mode


class Scope(NamedTuple):
    """A call of a module that is on the way from the network to the layers of runs."""

    hook: "ScopeHook"
    weights: Tensor | None
    """How much each position counts, (batch, length), as far as the arguments tell."""
    past: int | Tensor | None
    """How many tokens are in the cache, before those of this call; None without a cache."""
    crosses: bool
    """Whether the module attends to another sequence, so that padding outside is not that of its own."""
    begun: list[Any]
    """The calls of runs that began here: each has ``run``, and ``ended`` once all layers were called."""
    learning: bool
    """Whether gradients were enabled where it was entered."""
    latest: list[Tensor]
    """The state that a layer returned last, if a loop travels on it."""
    given: tuple[int, ...]
    """The shape of the first tensor that the module was called with; () where there is none."""


_SCOPES: ContextVar[tuple[Scope, ...]] = ContextVar("scopes", default=())
# what torch.compile traces knows no context variables: layers that are compiled see the scopes of all threads
_TRACED_SCOPES: list[Scope] = []


class ScopeHook:
    """Hooks of a module on the way to runs of layers: within its calls the runs begin; it looks for padding.

    Args:
        runs: The runs whose layers are somewhere below the module.
        mask: The name of the argument that tells padding, and its place among positional arguments; None
            where the module has none.
        padding: Whether the mask is true where there is padding, as torch has it, rather than 0.
        inherits: Whether the padding is that of the module around it, where its own arguments tell none.
        direct: Those of the runs whose layers' ``forward`` the module may call directly: hooks, which do not
            run then, cannot make them halt.

    """

    def __init__(
        self,
        runs: Sequence[LayerRun],
        mask: tuple[str, int] | None = None,
        padding: bool = False,
        inherits: bool = True,
        direct: Sequence[LayerRun] = (),
    ) -> None:
        self.direct = tuple(direct)
        self.runs, self.mask, self.padding, self.inherits = tuple(runs), mask, padding, inherits

    def enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the scope; a forward pre-hook."""
        outer = self._outer()
        weights, crosses = self._weights(args, kwargs), kwargs.get("encoder_hidden_states") is not None
        past = None if weights is None else _cached_tokens(kwargs.get("past_key_values"))
        if weights is None and self.inherits and outer and outer[-1].crosses == crosses:
            weights, past = outer[-1].weights, outer[-1].past
        _set_scopes(
            (
                *outer,
                Scope(self, weights, past, crosses, [], torch.is_grad_enabled(), [], _shape(args, kwargs)),
            )
        )

    def leave(self, module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        """End the scope; a forward hook, called after errors too."""
        scopes, outer = scopes_now(), self._outer()
        _set_scopes(outer)
        if torch.compiler.is_compiling() or len(scopes) == len(outer) or sys.exc_info()[0] is not None:
            return
        for call in scopes[len(outer)].begun:
            if not call.ended:
                raise ValueError(
                    f"expected all {call.run.max_steps} layers of {call.run.name!r} to be called one after "
                    "the other, got a call that left some out: leave this run out by where=, or set "
                    "layerdrop to 0"
                )
        for run in self.direct:
            if run.enabled and not any(call.run is run for call in scopes[len(outer)].begun):
                raise ValueError(
                    f"expected the layers of {run.name!r} to be called as modules, got a "
                    f"{type(module).__name__} that calls their forward, so that none of them can halt: leave "
                    "this run out by where=, or have it call layer(…) instead of layer.forward(…)"
                )

    def _outer(self) -> tuple[Scope, ...]:
        """Return the scopes around this one, which an interrupted call may have left behind."""
        scopes = scopes_now()
        for place, scope in enumerate(scopes):
            if scope.hook is self:
                return scopes[:place]
        return scopes

    def _weights(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        if self.mask is None:
            return None
        name, place = self.mask
        given = kwargs.get(name, args[place] if 0 <= place < len(args) else None)
        if given is None and args and isinstance(args[0], Mapping):  # as a SentenceTransformer is called
            given = args[0].get(name)
        if not isinstance(given, Tensor) or given.dim() != 2:
            return None
        return (given == 0) if self.padding else (given != 0)


class Entry(NamedTuple):
    """What is known where a network enters a run of layers."""

    weights: Tensor | None
    """How much each position counts, of three dimensions; None where all do."""
    mode: Mode
    bounds: tuple[float, ...] | None
    """What logits must exceed in thresholded mode; None is the mode's own threshold."""
    collectors: Collectors


def scope_of(run: LayerRun) -> Scope | None:
    """Return the innermost scope that a run is below of; None where its layers are called by themselves.

    Args:
        run: The run.

    """
    return next((scope for scope in reversed(scopes_now()) if run in scope.hook.runs), None)


def entry_of(run: LayerRun, u: Tensor, scope: Scope) -> Entry:
    """Return what is known where a network enters a run.

    Args:
        run: The run.
        u: The state before its first layer.
        scope: The innermost scope that it is below of.

    """
    weights = None if scope.weights is None else _fitted(scope.weights, scope.past, u, run)
    mode = run.present_mode
    return Entry(weights, mode, run.bounds_of(mode, None), active_collectors())


def check_batch_first(run: LayerRun, u: Tensor) -> None:
    """Refuse a state whose batch is not its first dimension, as far as calls of the modules around tell.

    The innermost module that was called with something else than a state tells it: what has the batch as its
    first dimension, such as token ids, images, or the state of a network whose batch is first.

    Args:
        run: The run, whose layers are of no known family.
        u: The state before its first layer.

    Raises:
        ValueError: The batch is its second dimension.

    """
    if torch.compiler.is_compiling() or u.dim() < 3:
        return
    for scope in reversed(scopes_now()):
        given = scope.given
        if run not in scope.hook.runs or len(given) < 2 or given[:2] == tuple(u.shape[:2]):
            continue
        if given[0] > 1 and given[0] == u.size(1) != u.size(0):
            raise ValueError(
                f"expected states with the batch as their first dimension in the layers of {run.name!r}, got "
                f"{tuple(u.shape)} in a network that is given {given}: register a family with batch_dim=, or "
                "leave this run out by where="
            )
        return


def scopes_now() -> tuple[Scope, ...]:
    """Return the scopes that this thread is in, the outermost first."""
    return tuple(_TRACED_SCOPES) if torch.compiler.is_compiling() else _SCOPES.get()


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    if torch.compiler.is_compiling():
        return ()
    found = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    return () if found is None else tuple(found.shape)


def _set_scopes(scopes: tuple[Scope, ...]) -> None:
    _TRACED_SCOPES[:] = scopes
    if not torch.compiler.is_compiling():
        _SCOPES.set(scopes)


def _cached_tokens(cache: Any) -> int | Tensor | None:
    """Return how many tokens a cache of transformers holds now, a static one as a tensor."""
    if not hasattr(cache, "get_seq_length"):
        return None
    length: int | Tensor = cache.get_seq_length()
    return length.clone() if isinstance(length, Tensor) else length  # layers move it on in place


def _fitted(weights: Tensor, past: int | Tensor | None, u: Tensor, run: LayerRun) -> Tensor | None:
    """Return weights of the positions of a state, given those of all tokens so far; None if they do not fit.

    With a cache the mask covers the tokens before, too, and with a static one perhaps those to come; without
    one the state has the last tokens.
    """
    if u.dim() != 3:
        return None
    batch, length = u.size(run.batch_dim), u.size(1 - run.batch_dim)
    surplus = weights.size(1) - length
    if weights.size(0) != batch or surplus < 0 or (surplus and not run.causal):
        return None
    if isinstance(past, Tensor):  # by its value on the device
        places = torch.arange(length, device=weights.device) + past.to(weights.device).clamp(max=surplus)
        weights = weights.index_select(1, places)
    else:
        begin = surplus if past is None else min(past, surplus)
        weights = weights[:, begin : begin + length]
    own = at_least_single(weights.to(u.dtype)).unsqueeze(2)
    return own.transpose(0, 1) if run.batch_dim else own
