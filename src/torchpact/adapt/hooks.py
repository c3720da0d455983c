"""Installing and removing the hooks by which a network's own layers drive a halting loop."""

import inspect
import re
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from torchpact.adapt.find import FoundRun, ancestors
from torchpact.core.layer_hooks import LayerHook
from torchpact.core.layer_run import LayerRun
from torchpact.core.layer_scopes import ScopeHook

MASKS = {"attention_mask": False, "src_key_padding_mask": True, "tgt_key_padding_mask": True}
"""Arguments that are padding masks, and whether they are true at padding."""

OTHER_INPUTS = ("pixel_values", "pixel_values_videos", "input_features", "input_values", "tgt")
"""First arguments of modules whose padding is not that of the inputs of the module around them: encoders of
images and sound beside text, and torch's decoders beside encoders."""


def check_free(found: Iterable[FoundRun]) -> None:
    """Refuse layers that are adapted already, as part of another network.

    Args:
        found: The runs that were found.

    Raises:
        ValueError: A layer has the hook of another run.

    """
    for run in found:
        for name, layer in zip(run.layer_names, run.layers, strict=True):
            if any(isinstance(hook, LayerHook) for hook in layer._forward_hooks.values()):
                raise ValueError(
                    f"expected layers that are not adapted yet, got {name!r}, which halts as part of "
                    "another adapted network: tp.unadapt that network first"
                )


def install(
    net: nn.Module, pairs: Iterable[tuple[FoundRun, LayerRun]], around: Iterable[nn.Module] = ()
) -> None:
    """Register the hooks of runs: one on each layer, two on each module from the network to its layers.

    Containers without a ``forward`` get none.

    Args:
        net: The network.
        pairs: The runs that were found, each with the run of heads made for it.
        around: Modules around the network that may call its ``forward`` directly, without its hooks.

    """
    pairs = [*pairs]
    above: dict[str, tuple[nn.Module, list[LayerRun]]] = {}
    owned: dict[int, list[LayerRun]] = {}
    for found, run in pairs:
        caller = net
        for name, module in ancestors(net, found.owner):
            if not isinstance(module, nn.ModuleList | nn.ModuleDict):
                above.setdefault(name, (module, []))[1].append(run)
                caller = module  # the innermost one in the end
        owned.setdefault(id(caller), []).append(run)
        repeated = len({id(layer) for layer in found.layers}) < len(found.layers)
        for index, layer in enumerate({id(layer): layer for layer in found.layers}.values()):
            hook = LayerHook(run, None if repeated else index)
            layer.register_forward_hook(hook, prepend=True, with_kwargs=True)
    for module, runs in above.values():
        names = _arguments(module)
        mask = next(((name, names.index(name)) for name in MASKS if name in names), None)
        padding = mask is not None and MASKS[mask[0]]
        inherits = names[:1] not in [[name] for name in OTHER_INPUTS]
        direct = owned.get(id(module), []) if _calls_forward(module) else []
        scope = ScopeHook(runs, mask, padding, inherits, direct)
        _watch(module, scope)
    for module in around:
        _watch(module, ScopeHook([run for _, run in pairs], ("attention_mask", -1)))


def _watch(module: nn.Module, scope: ScopeHook) -> None:
    module.register_forward_pre_hook(scope.enter, prepend=True, with_kwargs=True)
    module.register_forward_hook(scope.leave, always_call=True)


class FrozenNorm:
    """A forward pre-hook that keeps a batch norm of a frozen network in evaluation after ``train()``."""

    def __init__(self) -> None:
        self.switched = False

    def __call__(self, norm: nn.Module, _args: tuple[Any, ...]) -> None:
        """Switch the norm to evaluation, so that its statistics stay."""
        if norm.training:
            norm.training, self.switched = False, True


def freeze_norms(net: nn.Module) -> None:
    """Keep the running statistics of a network from changing: its batch norms stay in evaluation.

    Args:
        net: The network.

    """
    for module in net.modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            module.register_forward_pre_hook(FrozenNorm(), prepend=True)


def remove(net: nn.Module, runs: Iterable[nn.Module]) -> None:
    """Remove the hooks of runs from a network; frozen norms follow ``train()`` again.

    Args:
        net: The network.
        runs: Its runs; hooks of another adapted network, which may share modules with it, stay.

    """
    own = [*runs]
    for module in net.modules():
        for hooks, extras in (
            (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
            (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
        ):
            for key, hook in [*hooks.items()]:
                if is_ours(hook) and (isinstance(hook, FrozenNorm) or _drives(hook, own)):
                    if isinstance(hook, FrozenNorm) and hook.switched:
                        module.training = net.training
                    del hooks[key]
                    for extra in extras:
                        extra.pop(key, None)


def is_ours(hook: Any) -> bool:
    """Whether a hook is one of those that an adapted network has."""
    return isinstance(hook, LayerHook | FrozenNorm) or isinstance(getattr(hook, "__self__", None), ScopeHook)


def _drives(hook: Any, runs: list[nn.Module]) -> bool:
    """Whether a hook of a layer, or of a module around layers, belongs to one of these runs."""
    driven = (hook.run,) if isinstance(hook, LayerHook) else hook.__self__.runs
    return any(run is each for run in driven for each in runs)


def _calls_forward(module: nn.Module) -> bool:
    """Whether the source of a module's ``forward`` calls that of others directly, without their hooks."""
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return False
    return re.search(r"(?<!super\(\))\.forward\(", source) is not None


def _arguments(module: nn.Module) -> list[str]:
    """Return the names of the arguments of a module; an empty list if it has no readable signature."""
    try:
        return [*inspect.signature(module.forward).parameters]
    except (TypeError, ValueError):
        return []
