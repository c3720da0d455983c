"""The registry of providers, which tell what a module is: networks register them, engines and FLOPs ask.

A provider is for modules of exactly one class: what a subclass changes only its author knows, who may
register a provider of its own. It returns a spec, or raises a :class:`TypeError` or :class:`ValueError` that
says in a line why there is none, as for a layer with other settings: "expected it to have …". In the spec of
a block, "it" becomes the number of the step or head: "expected step 2 to have …".
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from inspect import getattr_static
from typing import Any, TypeVar

from torch import nn

from torchpact.checks import one_line
from torchpact.core.block import AdaptiveBlock
from torchpact.core.callables import unwrapped
from torchpact.core.criterion import Criterion
from torchpact.core.halting_module import HaltingModule
from torchpact.core.layer_hooks import LayerHook
from torchpact.core.layer_run import LayerRun
from torchpact.core.modes import Thresholded
from torchpact.specs.blocks import BlockSpec, NetworkSpec
from torchpact.specs.heads import CriterionHead, HeadSpec
from torchpact.specs.steps import Opaque, StepSpec

F = TypeVar("F", bound=Callable[..., Any])
_STEPS: dict[Any, Callable[[Any], StepSpec]] = {}
_HEADS: dict[Any, Callable[[Any], HeadSpec]] = {}
_BLOCKS: dict[type[nn.Module], Callable[[Any], BlockSpec]] = {}
_NETWORKS: dict[type[nn.Module], Callable[[Any], NetworkSpec]] = {}
_IDLE_HOOKS: set[str] = set()


def register_step(kind: type[nn.Module] | str) -> Callable[[F], F]:
    """Register what tells the specs of steps of a class; used as a decorator of a function of the module.

    Args:
        kind: The class, or its qualified name ``package.module.Class``, where it is not to be imported.

    Example:
        >>> class Twice(nn.Module):
        ...     def forward(self, u):
        ...         return 2 * u
        >>> @register_step(Twice)
        ... def twice(step):
        ...     return Opaque(step, "nothing is known of it but that it doubles")
        >>> step_spec(Twice()).reason
        'nothing is known of it but that it doubles'

    """
    return _registered(_STEPS, kind)


def register_head(kind: Any) -> Callable[[F], F]:
    """Register what tells the specs of heads: of a class, or a function that is a head itself."""
    return _registered(_HEADS, kind)


def register_block(kind: type[nn.Module]) -> Callable[[F], F]:
    """Register what tells the specs of blocks of a class, other than :class:`~torchpact.AdaptiveBlock`."""
    return _registered(_BLOCKS, kind)


def register_network(kind: type[nn.Module]) -> Callable[[F], F]:
    """Register what tells the specs of networks of a class that engines may run as a whole."""
    return _registered(_NETWORKS, kind)


def _registered(table: dict[Any, Any], kind: Any) -> Callable[[F], F]:
    def register(provider: F) -> F:
        table[kind] = provider
        return provider

    return register


def step_spec(step: nn.Module, name: str = "it", *, hooks: bool = False) -> StepSpec:
    """Return what a step is, as far as is known.

    Args:
        step: A step of a block.
        name: What it is called in reasons.
        hooks: Whether forward hooks of the step, or in it, do not matter: for callers that price the step, or
            run it by calling it.

    Returns:
        A spec, :class:`Opaque` if no more is known than that the step can be called.

    """
    spec: StepSpec = _asked(_STEPS, step, name, hooks)
    return spec


def head_spec(head: nn.Module, name: str = "it", *, hooks: bool = False) -> HeadSpec:
    """Return what a halting head is, as far as is known; see :func:`step_spec`."""
    if isinstance(head, Criterion):
        return CriterionHead(head)
    spec: HeadSpec = _asked(_HEADS, head, name, hooks)
    return spec


def _asked(table: dict[Any, Any], module: nn.Module, name: str, hooks: bool = False) -> Any:
    """Return the spec of a module; of one that is watched or changed only that it can be called."""
    held = unwrapped(module)
    is_function = callable(held) and not isinstance(held, nn.Module)
    qualified = f"{type(held).__module__}.{type(held).__qualname__}"
    provider = table.get(type(held)) or table.get(qualified) or (table.get(held) if is_function else None)
    if provider is None:
        return Opaque(module)
    if not hooks and is_watched(*module.modules()):
        return Opaque(module, "expected units and heads without forward hooks, which engines would not run")
    if any("forward" in vars(each) for each in module.modules()):
        return Opaque(
            module, "expected units and heads as their classes are, got one with a forward of its own"
        )
    try:
        return provider(held)
    except (TypeError, ValueError) as reason:
        return Opaque(module, one_line(reason).replace("expected it ", f"expected {name} ", 1))


def is_watched(*modules: nn.Module) -> bool:
    """Whether any module has forward hooks, which see what it is given, or change what it gives."""
    return any(
        not _only_looks(hook)
        for module in modules
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )


def register_idle_hook(kind: str) -> None:
    """Say that hooks of a class do nothing in evaluation, so that engines need not run them.

    Args:
        kind: The qualified name of the class, ``package.module.Class``.

    """
    _IDLE_HOOKS.add(kind)


def _only_looks(hook: Any) -> bool:
    """Whether a hook drives a run of layers, does nothing in evaluation, or is a capture of transformers."""
    name, module = getattr(hook, "__qualname__", ""), getattr(hook, "__module__", "")
    captures = name.startswith("install_output_") and module.startswith("transformers.")
    is_idle = f"{type(hook).__module__}.{type(hook).__qualname__}" in _IDLE_HOOKS
    return isinstance(hook, LayerHook) or is_idle or captures


def is_changed(block: nn.Module) -> bool:
    """Whether a block does something else than adaptive blocks do."""
    return type(block).forward is not AdaptiveBlock.forward or "forward" in vars(block)


def block_spec(block: nn.Module, name: str = "", *, hooks: bool = False) -> BlockSpec:
    """Return what a block is.

    Args:
        block: An :class:`~torchpact.AdaptiveBlock`, or a module of a class that has a provider.
        name: Its name in the network.
        hooks: Whether forward hooks of steps and heads do not matter, see :func:`step_spec`.

    Raises:
        TypeError: There is no provider for modules of this class.

    Example:
        >>> block = AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=3, mode="thresholded")
        >>> spec = block_spec(block)
        >>> spec.max_steps, spec.shared, len(spec.heads)
        (3, True, 2)

    """
    provider = _block_provider(block)
    if provider is not None:
        return replace(provider(block), name=name)
    if isinstance(block, LayerRun):
        return _run_spec(block, name or block.name, hooks)
    if not isinstance(block, AdaptiveBlock):
        raise TypeError(f"expected an adaptive block, got a {type(block).__name__}")
    count = block.max_steps
    steps = [step_spec(step, f"step {n}", hooks=hooks) for n, step in enumerate(block.steps, start=1)]
    heads = [head_spec(head, f"head {n}", hooks=hooks) for n, head in enumerate(block.halting, start=1)]
    return BlockSpec(
        module=block,
        steps=tuple(steps * count if len(steps) == 1 else steps),
        heads=tuple((heads * count if len(heads) == 1 else heads)[: count - 1]),
        mode=block.present_mode,
        details=block.details,
        bounds=block.bounds if isinstance(block.present_mode, Thresholded) else None,
        shared=len(steps) == 1 and count > 1,
        name=name,
        label=block.name,
        price=block.price,
    )


def _run_spec(run: LayerRun, name: str, hooks: bool) -> BlockSpec:
    count, layers = run.max_steps, {id(layer): layer for layer in run.layers}
    known = {
        key: step_spec(layer, f"layer {n}", hooks=hooks) for n, (key, layer) in enumerate(layers.items(), 1)
    }
    heads = [head_spec(head, f"head {n}", hooks=hooks) for n, head in enumerate(run.heads, start=1)]
    mode = run.present_mode
    return BlockSpec(
        module=run,
        steps=tuple(known[id(layer)] for layer in run.layers),
        heads=tuple((heads * count if len(heads) == 1 else heads)[: count - 1]),
        mode=mode,
        details=run.details,
        bounds=run.bounds if isinstance(mode, Thresholded) else None,
        shared=len(layers) == 1,
        name=name,
        label=run.name,
        price=run.price,
        batch_dim=run.batch_dim,
        hooked=True,
    )


def called_as_a_whole(spec: BlockSpec, net: nn.Module) -> BlockSpec:
    """Return a run of convolutional units as a block, if a module calls its layers and does nothing else.

    Such a module is an ``nn.Sequential`` of them, or of a class that has a provider of blocks.

    Args:
        spec: A run of layers, or any other part.
        net: The network that it is a part of.

    Returns:
        The spec of a block whose ``module`` is that which calls the layers; else the spec as it is.

    Example:
        >>> units = [tp.models.ResidualUnit(16, 16) for _ in range(3)]
        >>> net = tp.adapt(nn.Sequential(nn.Sequential(*units), nn.Flatten())).eval()
        >>> spec = block_spec(net.torchpact.runs[0])
        >>> spec.hooked, called_as_a_whole(spec, net).hooked, called_as_a_whole(spec, net).module is net[0]
        (True, False, True)

    """
    run = spec.module
    if not (spec.hooked and isinstance(run, LayerRun)) or spec.conv_units is None:
        return spec
    caller = next((module for module in net.modules() if _only_calls(module, run, spec)), None)
    return spec if caller is None else replace(spec, module=caller, run=run, hooked=False)


def _only_calls(module: nn.Module, run: LayerRun, spec: BlockSpec) -> bool:
    """Whether a module calls the layers of a run one after the other, and does nothing else."""
    if "forward" in vars(module):
        return False
    if type(module) is nn.Sequential:
        return len(module) == len(run.layers) and all(map(operator.is_, module, run.layers))
    provider = None if isinstance(module, HaltingModule) else _block_provider(module)
    told = None if provider is None else provider(module)
    if told is None or told.heads or told.conv_units is None or spec.conv_units is None:
        return False
    own, units = ([unit.weight.data_ptr() for unit in each.conv_units or ()] for each in (told, spec))
    return own == units


def is_block(module: nn.Module) -> bool:
    """Whether a module is an adaptive part of a network: a block, or of a class that has a provider."""
    return isinstance(module, HaltingModule) or _block_provider(module) is not None


def _block_provider(module: nn.Module) -> Callable[[Any], BlockSpec] | None:
    """Return the provider of a module's class, or of one that it inherits all of its methods from."""
    kinds = type(module).__mro__
    return next((_BLOCKS[kind] for kind in kinds if kind in _BLOCKS and _inherits(type(module), kind)), None)


def _inherits(kind: type, base: type) -> bool:
    """Whether a class has all methods of a base as they are, but for how it is made and printed."""
    own = {
        name: value for name, value in vars(base).items() if callable(value) or isinstance(value, property)
    }
    changed = [name for name, value in own.items() if getattr_static(kind, name) is not value]
    return not {*changed} - {"__init__", "extra_repr"}


def network_spec(net: nn.Module) -> NetworkSpec | None:
    """Return what a network is, if it is of a class that has a provider, and as that makes it."""
    provider = _NETWORKS.get(type(net))
    if provider is None or "forward" in vars(net) or is_watched(net, *net.children()):
        return None
    try:
        return provider(net)
    except (TypeError, ValueError):  # it was changed, and runs as any other network does
        return None
