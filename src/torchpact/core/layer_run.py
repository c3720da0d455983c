"""A run of layers that halts, in a network that owns the loop over them: hooks drive the halting loop.

The loop value travels on the hidden tensor itself, from layer to layer. So a layer that activation
checkpointing computes again, in another thread or after the mode has changed, sees what it saw first.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchpact.checks import at_least_single, readable
from torchpact.core.collect import Collectors, active_collectors, report
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
            ``head(u, weights)`` if it has a true attribute ``pools``.
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
        self.enabled = True

    layers: tuple[nn.Module, ...]
    enabled: bool
    """Whether hooks do anything; without, the network is the original."""

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
        logits: Tensor = head(u, weights) if getattr(head, "pools", False) else head(u)
        return logits

    def finished(self, ponder: Ponder, weights: Tensor | None) -> Ponder:
        """Return a ponder with what the run knows besides: weights, name and price."""
        if self.batch_dim:
            ponder = ponder.map(lambda x: x.transpose(x.dim() - 3, x.dim() - 2))
        if weights is not None:
            if self.batch_dim:
                weights = weights.transpose(0, 1)
            if self.per == "example":  # an example counts if any of its positions does
                weights = (weights > 0).flatten(1).any(1).to(weights.dtype).view(-1, 1, 1)
        probs, steps, expected, cost, log_prob, *_ = ponder
        return Ponder(probs, steps, expected, cost, log_prob, weights, self.name, self.price)


class Executed:
    """What travels on a hidden tensor where an engine runs the layers: hooks leave such a call alone.

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
    def on(u: Tensor, run: LayerRun) -> "Executed | None":
        """Return what travels on a state between the layers of a run, if an engine runs them."""
        found = getattr(u, _CARRIED, None)
        return found if isinstance(found, Executed) and found.run is run else None


class Entry(NamedTuple):
    """What is known where a network enters a run of layers."""

    weights: Tensor | None
    """How much each position counts, of three dimensions; None where all do."""
    mode: Mode
    bounds: tuple[float, ...] | None
    collectors: Collectors


def entry_of(run: LayerRun, u: Tensor) -> Entry | None:
    """Return what is known where a network enters a run; None where its first layer is called by itself.

    Args:
        run: The run.
        u: The state before its first layer.

    """
    owner = _owner_of(run)
    if owner is None:
        return None
    weights = None if owner.weights is None else _fitted(owner.weights, u, run)
    mode = run.present_mode
    return Entry(weights, mode, run.bounds_of(mode, None), active_collectors())


class _Call:
    """One call of a run: what was captured when it was entered. A recomputation uses it again."""

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
        )
        self.reported = False

    def end(self, ponder: Ponder) -> None:
        """Hand over what the run did, once."""
        if not self.reported:
            self.reported = True
            collectors, self.collectors = (
                self.collectors,
                (),
            )  # which would hold the graph, and the graph this
            report(self.run, self.run.finished(ponder, self.weights), collectors)


class _Carried(NamedTuple):
    """What travels on a hidden tensor: the call, and its loop after the layers so far."""

    call: _Call
    loop: HaltingLoop


class _Scope(NamedTuple):
    """A call of a module that is on the way from the network to the layers of runs."""

    weights: Tensor | None
    """How much each position counts, (batch, length), as far as the arguments tell."""
    owned: tuple[LayerRun, ...]
    """The runs whose layers this module calls."""
    learning: bool
    """Whether gradients were enabled where it was entered."""
    latest: list[Tensor]
    """The state that a layer returned last, if it carries a loop."""


_SCOPES: ContextVar[tuple[_Scope, ...]] = ContextVar("scopes", default=())
# what torch.compile traces, which knows no context variables
_TRACED_SCOPES: list[_Scope] = []


class ScopeHook:
    """Hooks of a module on the way to runs of layers: it looks for padding, and begins what it owns.

    Args:
        owned: The runs whose layers the module calls itself.
        mask: The name of the argument that tells padding, and its place among positional arguments; None
            where the module has none.
        padding: Whether the mask is true where there is padding, as torch has it, rather than 0.

    """

    def __init__(
        self, owned: Sequence[LayerRun], mask: tuple[str, int] | None = None, padding: bool = False
    ) -> None:
        self.owned, self.mask, self.padding = tuple(owned), mask, padding

    def enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the scope; a forward pre-hook."""
        outer = _scopes()
        own = self._weights(args, kwargs)
        weights = own if own is not None or not outer else outer[-1].weights
        scope = _Scope(weights, self.owned, torch.is_grad_enabled(), [])
        if torch.compiler.is_compiling():
            _TRACED_SCOPES.append(scope)
        else:
            _SCOPES.set((*outer, scope))

    def leave(self, _module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        """End the scope; a forward hook, called after errors too."""
        if torch.compiler.is_compiling():
            _TRACED_SCOPES.pop()
        else:
            _SCOPES.set(_SCOPES.get()[:-1])

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
        index: The number of the layer, from 0; None for one that all steps of the run share.

    """

    def __init__(self, run: LayerRun, index: int | None) -> None:
        self.run, self.index = run, index

    def __call__(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Return the output of the layer, with halted positions as they were."""
        if not self.run.enabled:
            return None
        if torch.compiler.is_compiling() and not _TRACED_SCOPES:  # the layer is compiled, but not the network
            return _untraced(self, args, kwargs, output)
        return self.advance(args, kwargs, output)

    def advance(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Move the loop on, given a call of the layer and its output; see :meth:`__call__`."""
        before = first_state(args, kwargs)
        after = output if isinstance(output, Tensor) else output[0]
        if Executed.on(after, self.run) is not None:
            return None
        carried = self._carried_on(before)
        began = self.index == 0 or (self.index is None and (carried is None or not carried.loop.taken))
        if began:
            carried = self._begun(before, carried)
        if carried is None:
            if self._owner() is not None:
                raise ValueError(self._broken())
            return None  # the layer is called by itself
        call, loop = carried
        self._check_gradients(loop)
        run, index = self.run, loop.taken
        if self.index not in (None, index):
            raise ValueError(self._broken())
        last = index + 1 == run.max_steps
        if after.shape != before.shape and not began:
            raise ValueError(
                f"expected the layers of {run.name!r} to keep the shape of the state, got "
                f"{tuple(before.shape)} before layer {index + 1} and {tuple(after.shape)} after it"
            )

        def head(u: State) -> Tensor:
            assert isinstance(u, Tensor)
            return run.halting_logits(index, u, call.weights)

        owner = self._owner()
        loop, u = advance(loop, before, after, None if last else head, held=False)
        if last:
            u, ponder = loop.result(u)
            call.end(ponder)
            latest: list[Tensor] = []
        else:
            assert isinstance(u, Tensor)
            u = _renamed(u) if u.requires_grad else u.view_as(u) if u is before else u
            setattr(u, _CARRIED, _Carried(call, loop))
            latest = [u]
        if owner is not None:
            owner.latest[:] = latest
        return u if isinstance(output, Tensor) else (u, *output[1:])

    def _carried_on(self, before: Tensor) -> _Carried | None:
        """Return what travels on a state, or on the tensor that it is another name of."""
        found = getattr(before, _CARRIED, None)
        if found is None and not torch.compiler.is_compiling():
            # FSDP2 hands a layer an alias of what it is given, to hear of the end of its backward pass
            owner = self._owner()
            if owner is not None and owner.latest and _is_alias(before, owner.latest[0]):
                found = getattr(owner.latest[0], _CARRIED, None)
                setattr(before, _CARRIED, found)  # for a recomputation
        return found if isinstance(found, _Carried) and found.call.run is self.run else None

    def _check_gradients(self, loop: HaltingLoop) -> None:
        """Refuse layers that are called without gradients, in a network that is called with them."""
        if torch.is_grad_enabled() or not self.run.training:
            return
        owner = self._owner()
        wanted = loop.rules.learning or (owner is not None and owner.learning)
        if wanted and any(parameter.requires_grad for parameter in self.run.heads.parameters()):
            raise ValueError(
                f"expected the layers of {self.run.name!r} to be called with gradients enabled, as the "
                "network is: their heads would not learn. Reentrant activation checkpointing calls them "
                "without; pass use_reentrant=False"
            )

    def _begun(self, before: Tensor, carried: _Carried | None) -> _Carried | None:
        """Return the start of a call, or that of the call which is computed again."""
        entry = entry_of(self.run, before)
        if entry is None:
            return carried if carried is not None and not carried.loop.taken else None
        call = _Call(self.run, entry)
        started = _Carried(call, call.loop)
        setattr(before, _CARRIED, started)
        return started

    def _owner(self) -> _Scope | None:
        return _owner_of(self.run)

    def _broken(self) -> str:
        return (
            f"expected the layers of {self.run.name!r} to be called one after the other, each with what the "
            f"one before it returned; layer {(self.index or 0) + 1} was given another tensor: leave this run "
            "out by where=, or call its layers in turn"
        )


def first_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden state among the arguments of a layer: the first tensor.

    >>> first_state((), {"attention_mask": None, "hidden_states": torch.zeros(1)})
    tensor([0.])
    """
    for given in (*args, *kwargs.values()):
        if isinstance(given, Tensor):
            return given
    raise TypeError("expected a layer to be given a hidden state, got no tensor")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _untraced(hook: LayerHook, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Move a loop on outside of the graph of a layer that is compiled by itself."""
    return hook.advance(args, kwargs, output)


def _scopes() -> Sequence[_Scope]:
    return _TRACED_SCOPES if torch.compiler.is_compiling() else _SCOPES.get()


def _owner_of(run: LayerRun) -> _Scope | None:
    return next((scope for scope in reversed(_scopes()) if run in scope.owned), None)


class _Alias(torch.autograd.Function):
    """The identity, as another tensor with the same memory that is no view: FSDP2 warns of views."""

    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor) -> Tensor:
        return u.detach()

    @staticmethod
    def setup_context(_ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def jvp(_ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


def _renamed(u: Tensor) -> Tensor:
    """Return another tensor with the same memory and gradient, to carry a loop.

    The graph of the loop saves the state itself: if that carried the loop, neither would ever be freed
    without a backward pass.
    """
    alias: Tensor = u.view_as(u) if torch.compiler.is_compiling() else _Alias.apply(u)
    return alias


def _is_alias(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers in memory.

    >>> u = torch.zeros(2, 3)
    >>> _is_alias(u.view_as(u), u), _is_alias(u.clone(), u), _is_alias(u[:1], u)
    (True, False, False)
    """
    if one.shape != other.shape or one.dtype != other.dtype or not (readable(one) and readable(other)):
        return False
    return one.stride() == other.stride() and one.data_ptr() == other.data_ptr()


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
    own = at_least_single(weights[:, -length:].to(u.dtype)).unsqueeze(2)
    return own.transpose(0, 1) if run.batch_dim else own


@contextmanager
def outside_of_scopes() -> Iterator[None]:
    """Call layers by themselves within, whatever network is running around."""
    token = _SCOPES.set(())
    try:
        yield
    finally:
        _SCOPES.reset(token)
