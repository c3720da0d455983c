"""Runs of layers that a deployed network calls itself: in each layer's place stands an engine's."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from torchpact.core.call_args import CallArgs
from torchpact.core.collect import Collectors, report
from torchpact.core.layer_calls import first_state
from torchpact.core.layer_hooks import Executed, LayerHook
from torchpact.core.layer_run import LayerRun
from torchpact.core.layer_scopes import Entry, entry_of, scope_of
from torchpact.core.ponder import Ponder
from torchpact.engines.attention.outside import PackedModules
from torchpact.specs import AttentionLayer, BlockSpec, LayerContext
from torchpact.specs.blocks import Bounds


class LayersCall(Protocol):
    """One call of a run of layers by an engine."""

    def layer(self, index: int, u: Tensor, context: LayerContext) -> Tensor:
        """Return the state after a layer; layers are called in order."""

    def ponder(self) -> Ponder:
        """Return what every position did."""


class LayerwiseRunner(Protocol):
    """What an engine makes of a run of layers."""

    def begin(
        self,
        u: Tensor,
        real: Tensor | None = None,
        bounds: Bounds = None,
        cached: bool = False,
        *,
        in_place: bool = False,
    ) -> LayersCall:
        """Return a call of all layers, before the first."""


class _Running(Executed):
    """What travels on the hidden state between layers that an engine runs."""

    def __init__(self, run: LayerRun, call: LayersCall, collectors: Collectors) -> None:
        super().__init__(run)
        self.call, self.collectors, self.taken = call, collectors, 0

    @property
    def ended(self) -> bool:
        """Whether all layers were called."""
        return self.taken == self.run.max_steps


class PatchedLayers:
    """What is called in the place of the layers of a run.

    A call that the engine cannot run (one that asks for attention weights, say) is run by the layers
    themselves, and their hooks freeze what has halted.

    Args:
        spec: What the run is.
        runner: What runs it; None is the layers themselves.
        adaptive: Whether hooks do anything; without, all positions run all layers.

    """

    def __init__(self, spec: BlockSpec, runner: LayerwiseRunner | None, adaptive: bool = True) -> None:
        assert isinstance(spec.module, LayerRun)
        self.spec, self.run, self.runner, self.adaptive = spec, spec.module, runner, adaptive
        self.contiguous = False
        self.outside: PackedModules | None = None
        """Linear layers that run by packed products while the runner stands in the layers' place."""
        steps = [step for step in spec.steps if isinstance(step, AttentionLayer)]
        self.reads = [step.read_call for step in steps if step.read_call is not None]
        layers = {id(layer): layer for layer in self.run.layers}
        self.layers = [*layers.values()]
        self.forwards = {key: _WithHooks(layer, self.run) for key, layer in layers.items()}

    def install(self) -> None:
        """Stand in the place of the layers."""
        self.run.enabled = self.adaptive
        if self.runner is None:
            self.remove()
            self.run.enabled = self.adaptive
            return
        for layer in self.layers:
            layer.forward = _InPlace(self, layer)
            self.forwards[id(layer)].take_hooks()
        if self.outside is not None:
            self.outside.install()

    def remove(self) -> None:
        """Leave the layers as they were."""
        self.run.enabled = True
        for layer in self.layers:
            if isinstance(layer.__dict__.get("forward"), _InPlace):  # a forward of the user's own stays
                del layer.forward
            self.forwards[id(layer)].give_hooks_back()
        if self.outside is not None:
            self.outside.remove()

    def call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a layer returns."""
        u = first_state(args, kwargs)
        running = Executed.on(u, self.run)
        over = isinstance(running, _Running) and running.ended
        if (running is None or over) and layer is self.run.layers[0]:
            running = self._begun(u, CallArgs(args, kwargs))
        if not isinstance(running, _Running):
            return self.forwards[id(layer)](*args, **kwargs)
        index = running.taken
        context = self.reads[index](CallArgs(args, kwargs))
        if context is None:
            raise ValueError(
                f"expected all layers of {self.run.name!r} to be called alike, got another call of layer "
                f"{index + 1}"
            )
        after = running.mark(running.call.layer(index, u, context))
        running.taken += 1
        if running.ended and running.collectors:
            ponder = running.call.ponder()
            report(self.run, ponder, running.collectors)
        return after

    def _begun(self, u: Tensor, given: CallArgs) -> _Running | None:
        scope = scope_of(self.run)
        if scope is None or self.runner is None:
            return None
        entry = entry_of(self.run, u, scope)
        if entry.mode != self.spec.mode:
            return None
        context = self.reads[0](given)
        if context is None or u.dim() != 3 or not u.numel():
            return None
        cached = context.update is not None
        call = self.runner.begin(u, _real(entry), entry.bounds, cached, in_place=not self._watched())
        running = _Running(self.run, call, entry.collectors)
        scope.begun.append(running)
        return running

    def _watched(self) -> bool:
        """Whether hooks of others see the states between layers, which must then be kept."""
        return any(layer._forward_hooks for layer in self.layers)


class _WithHooks:
    """A layer as its class has it, and the hooks of its run, which calls of an engine need not go through."""

    def __init__(self, layer: nn.Module, run: LayerRun) -> None:
        self.layer, self.run = layer, run
        self.forward: Callable[..., Any] = type(layer).forward.__get__(layer)
        self.hooks: dict[int, LayerHook] = {}

    def take_hooks(self) -> None:
        """Take the hooks of the run from the layer."""
        for key, hook in [*self.layer._forward_hooks.items()]:
            if isinstance(hook, LayerHook) and hook.run is self.run:
                self.hooks[key] = hook
                del self.layer._forward_hooks[key]
                self.layer._forward_hooks_with_kwargs.pop(key, None)

    def give_hooks_back(self) -> None:
        """Give them back, to be called before others."""
        for hook in self.hooks.values():
            self.layer.register_forward_hook(hook, prepend=True, with_kwargs=True)
        self.hooks = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.forward(*args, **kwargs)
        for hook in self.hooks.values():
            changed = hook(self.layer, args, kwargs, output)
            output = output if changed is None else changed
        return output


class _InPlace:
    """The forward of one layer of a deployed network."""

    def __init__(self, patched: PatchedLayers, layer: nn.Module) -> None:
        self.patched, self.layer = patched, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.patched.call(self.layer, args, kwargs)


def _real(entry: Entry) -> Tensor | None:
    """Return which tokens are real, (batch, length)."""
    return None if entry.weights is None else entry.weights.squeeze(2) > 0
