"""A run of layers that halts, in a network that owns the loop over them: hooks drive the halting loop.

The loop value travels on the hidden tensor itself, from layer to layer. So a layer that activation
checkpointing computes again, in another thread or after the mode has changed, sees what it saw first.
"""

import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchpact.checks import at_least_single
from torchpact.core import state
from torchpact.core.collect import active_collectors, report
from torchpact.core.halting_module import HaltingModule
from torchpact.core.loop import HaltingLoop, advance
from torchpact.core.modes import Mode, Thresholded
from torchpact.core.ponder import Ponder
from torchpact.core.state import State

Per = Literal["token", "example", "pixel"]
_CARRIED = "torchpact_carried"
"""The attribute of a tensor that holds what travels on it."""


class LayerRun(HaltingModule):
    """Layers that a network calls one after the other, each but the last with a halting head.

    It is not called: :class:`LayerHook` on every layer drives its loop. Layers belong to the network; only
    the heads are submodules here.

    Args:
        name: The name of the layers' container in the network, which its ponders carry.
        layers: The modules in the order of the calls; one that is called several times stands there as often.
        layer_names: Their names in the network.
        heads: One module for every layer but the last, called as ``head(u)`` on the hidden state, or as
            ``head(u, weights)`` if it is a :class:`PoolingHead`.
        per: For what decisions are made: tokens, pixels or examples.
        batch_dim: The dimension of the hidden state that is the batch.
        causal: Whether tokens see those before them only, as in decoders, so that a call with a cache has the
            last tokens of a sequence.
        price: What a layer costs, relative to those of other runs.

    """

    mode: Mode | None

    def __init__(
        self,
        name: str,
        layers: Sequence[nn.Module],
        layer_names: Sequence[str],
        heads: Sequence[nn.Module],
        *,
        per: Per = "token",
        batch_dim: int = 0,
        causal: bool = False,
        price: float = 1.0,
    ) -> None:
        super().__init__(len(layers), None, name, price)
        self.heads = nn.ModuleList(heads)
        self.per, self.batch_dim, self.causal = per, batch_dim, causal
        self.layer_names = tuple(layer_names)
        self.__dict__["layers"] = tuple(layers)  # they are submodules of the network, not of this

    layers: tuple[nn.Module, ...]

    def name_within(self, path: str) -> str:
        """Return the name of the layers' container."""
        return self.name

    def extra_repr(self) -> str:
        """Return the settings for ``print``."""
        mode = "train(): relaxed, eval(): thresholded" if self.mode is None else f"{self.mode}"
        return f"{self.name!r}, {self.max_steps} layers, per {self.per}, mode={mode}"

    def halting_logits(self, index: int, u: Tensor, weights: Tensor | None) -> Tensor:
        """Return the logits after the layer at ``index``.

        Args:
            index: From 0.
            u: The hidden state.
            weights: How much each position counts; None where all do.

        """
        head = self.heads[index if len(self.heads) > 1 else 0]
        logits: Tensor = head(u, weights) if isinstance(head, PoolingHead) else head(u)
        return logits

    def finished(self, ponder: Ponder, weights: Tensor | None) -> Ponder:
        """Return a ponder with what the run knows besides: weights, name and price."""
        if self.batch_dim and ponder.steps.dim() == 3:
            ponder = ponder.map(lambda x: x.transpose(x.dim() - 3, x.dim() - 2))
        if weights is not None:
            if self.batch_dim:
                weights = weights.transpose(0, 1)
            if self.per == "example":  # an example counts if any of its positions does
                weights = (weights > 0).flatten(1).any(1).to(weights.dtype).view(-1, 1, 1)
        probs, steps, expected, cost, log_prob, *_ = ponder
        return Ponder(probs, steps, expected, cost, log_prob, weights, self.name, self.price)


class PoolingHead(nn.Module):
    """The base of heads that look at a whole example: called as ``head(u, weights)`` rather than ``head(u)``.

    Weights say how much each position counts, so that a mean can leave padding out; None where all do.
    """


class _Call:
    """One call of a run: what was captured when it was entered. A recomputation uses it again."""

    def __init__(self, run: LayerRun, u: Tensor, weights: Tensor | None) -> None:
        self.run, self.collectors = run, active_collectors()
        self.weights = None if weights is None else _fitted(weights, u, run)
        mode = run.present_mode
        self.loop = HaltingLoop.start(
            mode,
            run.max_steps,
            bounds=run.bounds_of(mode, None),
            interpolated=True,
            may_stop=False,  # hooks cannot keep the network from calling its layers
            keeps_logits=run.details or torch.is_grad_enabled() or not isinstance(mode, Thresholded),
        )
        self.ended = False

    def end(self, ponder: Ponder) -> None:
        """Hand over what the run did, once."""
        if not self.ended:
            self.ended = True
            report(self.run, self.run.finished(ponder, self.weights), self.collectors)
            # ponders hold the graph, which holds the states that this call travels on: no cycle may remain
            self.collectors = ()


class _Carried:
    """What travels on a hidden tensor: the call, its loop after the layers so far, and how to check the next.

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


class _Scope(NamedTuple):
    """A call of a module that is on the way from the network to the layers of runs."""

    hook: "ScopeHook"
    weights: Tensor | None
    """How much each position counts, (batch, length), as far as the arguments tell."""
    crosses: bool
    """Whether the module attends to another sequence, so that padding outside is not that of its own."""
    begun: list[_Call]
    """The calls of runs that began here."""


_SCOPES: ContextVar[tuple[_Scope, ...]] = ContextVar("scopes", default=())
# what torch.compile traces knows no context variables: layers that are compiled see the scopes of all threads
_TRACED_SCOPES: list[_Scope] = []


class ScopeHook:
    """Hooks of a module on the way to runs of layers: within its calls the runs begin; it looks for padding.

    Args:
        runs: The runs whose layers are somewhere below the module.
        mask: The name of the argument that tells padding, and its place among positional arguments; None
            where the module has none.
        padding: Whether the mask is true where there is padding, as torch has it, rather than 0.

    """

    def __init__(
        self, runs: Sequence[LayerRun], mask: tuple[str, int] | None = None, padding: bool = False
    ) -> None:
        self.runs, self.mask, self.padding = tuple(runs), mask, padding

    def enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the scope; a forward pre-hook."""
        outer = self._outer()
        weights, crosses = self._weights(args, kwargs), kwargs.get("encoder_hidden_states") is not None
        if weights is None and outer and outer[-1].crosses == crosses:
            weights = outer[-1].weights
        _set_scopes((*outer, _Scope(self, weights, crosses, [])))

    def leave(self, _module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        """End the scope; a forward hook, called after errors too."""
        scopes, outer = _scopes(), self._outer()
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

    def _outer(self) -> tuple[_Scope, ...]:
        """Return the scopes around this one, which an interrupted call may have left behind."""
        scopes = _scopes()
        for place, scope in enumerate(scopes):
            if scope.hook is self:
                return scopes[:place]
        return scopes

    def _weights(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        if self.mask is None:
            return None
        name, place = self.mask
        given = kwargs.get(name, args[place] if 0 <= place < len(args) else None)
        if not isinstance(given, Tensor) or given.dim() != 2:
            return None
        return (given == 0) if self.padding else (given != 0)


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
        scope = next((scope for scope in reversed(_scopes()) if self.run in scope.hook.runs), None)
        if scope is None and not in_backward():
            return None  # the layer is called by itself
        before = first_state(args, kwargs)
        carried = self._carried(before, scope)
        call, loop = carried.call, carried.loop
        run, index = self.run, loop.taken
        after = first_output(run.name, output)
        if index:
            self._check(carried, before, after, (*args, *kwargs.values()))
            before = before.to(after.dtype)  # under autocast

        def head(u: State) -> Tensor:
            assert isinstance(u, Tensor)
            return run.halting_logits(index, u, call.weights)

        last = index + 1 == run.max_steps
        loop, u = advance(loop, before, after, None if last else head, held=False)
        assert isinstance(u, Tensor)
        rest = () if isinstance(output, Tensor) else output[1:]
        if last:
            result, ponder = loop.result(u)
            assert isinstance(result, Tensor)
            u = result
            call.end(ponder)
        else:
            # a view, since logits hold the state that the head saw: a loop on it would be a reference cycle
            u = u.view_as(u)
            setattr(u, _CARRIED, _Carried(call, loop, u, rest))
        if isinstance(output, Tensor):
            return u
        return [u, *rest] if isinstance(output, list) else (u, *rest)

    def _carried(self, before: Tensor, scope: _Scope | None) -> _Carried:
        """Return what the layer has to go on with.

        Raises:
            ValueError: It is not called with what the layer before it returned.

        """
        carried: _Carried | None = getattr(before, _CARRIED, None)
        if carried is not None and carried.call.run is not self.run:
            carried = None
        taken = 0 if carried is None else carried.loop.taken
        if taken == 0 and self.index in (None, 0) and scope is not None:
            return self._begun(before, scope)
        if carried is not None and self.index in (None, taken):
            if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
                delattr(before, _CARRIED)  # nothing is computed again
            return carried
        if scope is not None:
            raise ValueError(
                f"expected the layers of {self.run.name!r} to be called one after the other, each with what "
                f"the one before it returned; layer {(self.index or 0) + 1} was given another tensor: leave "
                "this run out by where=, or call its layers in turn"
            )
        raise ValueError(
            f"expected the layers of {self.run.name!r} to be computed again with the states they had, got "
            "copies: pass use_reentrant=False to activation checkpointing"
        )

    def _begun(self, before: Tensor, scope: _Scope) -> _Carried:
        """Return the start of a call."""
        call = _Call(self.run, before, scope.weights)
        scope.begun.append(call)
        carried = _Carried(call, call.loop, before)
        if torch.is_grad_enabled() and not isinstance(before, nn.Parameter):
            setattr(before, _CARRIED, carried)  # for activation checkpointing
        return carried

    def _check(self, carried: _Carried, before: Tensor, after: Tensor, given: Sequence[Any]) -> None:
        """Refuse layers whose halted positions could not be kept."""
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


def first_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden state among the arguments of a layer: the first tensor.

    Args:
        args: Its positional arguments.
        kwargs: Its arguments by name.

    Raises:
        TypeError: There is none, or a collection of several stands before it.

    Example:
        >>> first_state((), {"attention_mask": None, "hidden_states": torch.zeros(1)})
        tensor([0.])

    """
    for given in (*args, *kwargs.values()):
        if isinstance(given, Tensor):
            return given
        if isinstance(given, tuple | list | dict) and given:
            break
    raise TypeError(
        "expected a layer that takes one hidden state first, got another: leave its run out by where="
    )


def first_output(name: str, output: Any) -> Tensor:
    """Return the hidden state that a layer returned: the output, or the first of several.

    Args:
        name: The name of the layer's run.
        output: What the layer returned.

    Raises:
        TypeError: It is something else.

    Example:
        >>> first_output("layers", (torch.zeros(1), None))
        tensor([0.])

    """
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(first, Tensor):
        raise TypeError(
            f"expected the layers of {name!r} to return a hidden state, or a tuple that begins with it; got "
            f"a {type(output).__name__}: leave this run out by where="
        )
    return first


def in_backward() -> bool:
    """Whether this thread computes something again for a backward pass, as activation checkpointing does."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _is_as_large(x: Any, u: Tensor) -> bool:
    return isinstance(x, Tensor) and x.dim() == u.dim() and x.shape[:2] == u.shape[:2]


def _scopes() -> tuple[_Scope, ...]:
    return tuple(_TRACED_SCOPES) if torch.compiler.is_compiling() else _SCOPES.get()


def _set_scopes(scopes: tuple[_Scope, ...]) -> None:
    _TRACED_SCOPES[:] = scopes
    if not torch.compiler.is_compiling():
        _SCOPES.set(scopes)


def _fitted(weights: Tensor, u: Tensor, run: LayerRun) -> Tensor | None:
    """Return weights of the positions of a state, given those of all tokens so far; None if they do not fit.

    With a cache the mask covers the tokens before, too; the state has the last ones.
    """
    if u.dim() != 3:
        return None
    batch, length = u.size(run.batch_dim), u.size(1 - run.batch_dim)
    surplus = weights.size(1) - length
    if weights.size(0) != batch or surplus < 0 or (surplus and not run.causal):
        return None
    own = at_least_single(weights[:, weights.size(1) - length :].to(u.dtype)).unsqueeze(2)
    return own.transpose(0, 1) if run.batch_dim else own
