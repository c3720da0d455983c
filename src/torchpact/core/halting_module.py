"""The base of what halts: modules with heads, a mode, thresholds, a name and a price."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torchpact.checks import check_number
from torchpact.core import state
from torchpact.core.frozen import FrozenModule
from torchpact.core.modes import Mode, Relaxed, Thresholded
from torchpact.core.thresholds import Thresholds, as_thresholds, run_bounds_of


class HaltingModule(nn.Module):
    """A part of a network that decides when its positions halt: it has heads, and drives a halting loop.

    :class:`~torchpact.use_mode`, :class:`~torchpact.use_thresholds`, :class:`~torchpact.collect`,
    :func:`~torchpact.count_flops` and :func:`~torchpact.deploy` find the modules of this class in a network.

    Args:
        max_steps: L.
        mode: What decides; None follows ``train()`` and ``eval()``: relaxed and thresholded.
        name: What it is called in ponders and errors.
        price: What a step costs, relative to those of other blocks.

    Raises:
        ValueError: The price is not a positive number.

    """

    mode: Any
    """What turns halting probabilities into decisions; None follows ``train()`` and ``eval()``."""
    details: bool
    """Whether probabilities are kept where only decisions count; see :class:`~torchpact.use_mode`."""
    bounds: tuple[float, ...] | None
    """What logits must exceed in thresholded mode, if not its threshold; see
    :class:`~torchpact.use_thresholds`."""
    layers: tuple[nn.Module, ...] = ()
    """The layers that it is a run of, which belong to the network; none of other modules."""

    def __init__(self, max_steps: int, mode: Mode | None, name: str = "", price: float = 1.0) -> None:
        super().__init__()
        self.max_steps, self.mode = max_steps, mode
        self.details, self.bounds = True, None
        self.name, self.price = name, check_number("price", price, 0, open_low=True, open_high=True)

    @property
    def present_mode(self) -> Mode:
        """The mode of a run that begins now."""
        if self.mode is not None:
            return self.mode  # type: ignore[no-any-return]
        return Relaxed() if self.training else Thresholded()

    @property
    def all_heads(self) -> nn.ModuleList:
        """Its heads: one for each decision, or one for all."""
        raise NotImplementedError

    def put_heads(self, heads: nn.ModuleList) -> None:
        """Put other heads in their place."""
        raise NotImplementedError

    def place_within(self, path: str) -> tuple[str | None, str]:
        """Return which network names it, and its name there.

        Args:
            path: Its own path in a larger network.

        Returns:
            The path of the adapted network that it is a run of, and its name in that network; None and its
            path for other modules.

        """
        return None, path

    def bounds_of(
        self, mode: Mode, thresholds: Thresholds | float | None, max_steps: int | None = None
    ) -> tuple[float, ...] | None:
        """Return what logits must exceed in a run: as given or as set; None is the mode's own threshold.

        Args:
            mode: The mode of the run.
            thresholds: Those of the run; None where they are as set.
            max_steps: L of the run, if not that of the module: there are L − 1 bounds then, the first of
                those that there are, or these and the last one again.

        """
        count = self.max_steps if max_steps is None else max_steps
        found = self._bounds_of(mode, thresholds, one_at_least=count > 1)
        if found is None or len(found) == count - 1:
            return found
        return (*found, *found[-1:] * (count - 1 - len(found)))[: count - 1] or None

    def _bounds_of(
        self, mode: Mode, thresholds: Thresholds | float | None, one_at_least: bool
    ) -> tuple[float, ...] | None:
        if thresholds is not None:
            if not isinstance(mode, Thresholded):
                raise ValueError(f"expected the mode thresholded with thresholds, got {mode}")
            given = as_thresholds(thresholds)
            named = isinstance(given.logits, Mapping) and self.name in given.logits
            key = self.name if named else ""
            return given.for_blocks({key: max(self.max_steps - 1, int(one_at_least))})[key]
        if not isinstance(mode, Thresholded):
            return None
        of_run = run_bounds_of(self)
        return self.bounds if of_run is None else of_run

    @staticmethod
    def checked_weights(weights: Tensor, steps: Tensor) -> Tensor:
        """Return weights, once they are seen to broadcast to the decisions."""
        if not isinstance(weights, Tensor) or not state.broadcasts(weights, steps):
            raise ValueError(
                f"expected weights that broadcast to the decisions' {tuple(steps.shape)} without adding "
                f"dimensions, got {state.shape_of(weights)}"
            )
        return weights


def halting_modules(model: nn.Module) -> dict[str, HaltingModule]:
    """Return the adaptive parts of a network, or of a deployed one, by name.

    The name is that in ``named_modules``; of a run of layers that was made adaptive it is the name of the
    layers in the adapted network. Where a model holds several adapted networks, the path of each goes before.

    Args:
        model: Any network.

    Raises:
        TypeError: It is not a module.
        ValueError: It has a copy of heads, which layers do not know.

    Example:
        >>> [*halting_modules(tp.models.psact_resnet32())]
        ['blocks.0', 'blocks.1', 'blocks.2']

    """
    check_module(model)
    places: list[tuple[str | None, str]] = []
    found: list[HaltingModule] = []
    runs: list[HaltingModule] = []
    for path, module in model.named_modules():
        if isinstance(module, HaltingModule):
            places.append(module.place_within(path))
            found.append(module)
            runs += [module] if module.layers else []
        elif isinstance(module, FrozenModule):
            for own, each in module.blocks.items():
                places.append((path, own) if each.layers else (None, _joined(path, own)))
                found.append(each)
    _check_copies(model, runs)
    return dict(zip(names_of(places), found, strict=True))


def adaptive_blocks(model: nn.Module) -> dict[str, HaltingModule]:
    """Return the adaptive parts of a network, as :func:`halting_modules` does, at least one.

    Args:
        model: Any network.

    Raises:
        TypeError: It is not a module.
        ValueError: It has none.

    Example:
        >>> adaptive_blocks(nn.Tanh())
        Traceback (most recent call last):
        ValueError: expected a network with adaptive blocks, got Tanh without any: tp.adapt makes ...

    """
    found = halting_modules(model)
    if not found:
        raise ValueError(
            f"expected a network with adaptive blocks, got {type(model).__name__} without any: "
            "tp.adapt makes its layers adaptive"
        )
    return found


def _check_copies(model: nn.Module, runs: Sequence[HaltingModule]) -> None:
    """Refuse a model with heads and a copy of them, which no layer asks: they would not be trained."""
    if len({run.name for run in runs}) == len(runs):
        return
    modules = {id(module) for module in model.modules()}
    own = {run.name for run in runs if id(run.layers[0]) in modules}
    for run in runs:
        if id(run.layers[0]) not in modules and run.name in own:
            raise ValueError(
                f"expected the heads of {run.name!r} once, got a copy of them that no layer asks, as "
                "modules_to_save of peft makes it: call net.torchpact.requires_grad_(True) instead"
            )


def names_of(places: Iterable[tuple[str | None, str]]) -> Iterator[str]:
    """Yield the names of adaptive parts in a model.

    Args:
        places: As :meth:`HaltingModule.place_within` returns them.

    Example:
        >>> [*names_of([("", "layers"), (None, "block")])]
        ['layers', 'block']
        >>> [*names_of([("net.a", "layers"), ("net.b", "layers")])]
        ['a.layers', 'b.layers']

    """
    places = [*places]
    networks = [*{holder: holder.split(".") for holder, _ in places if holder is not None}.values()]
    # of modules around all of them, such as DistributedDataParallel, names do not depend
    common = 0
    for parts in zip(*networks, strict=False):
        if len({*parts}) > 1:
            break
        common += 1
    several = len(networks) > 1
    for holder, own in places:
        before = holder.split(".")[common:] if several and holder is not None else []
        yield _joined(*before, own)


def check_module(model: Any) -> None:
    """Refuse what is no module.

    Args:
        model: What was given as a network.

    Raises:
        TypeError: It is something else.

    """
    if isinstance(model, nn.Module):
        return
    inner = ": pass its attribute model" if isinstance(getattr(model, "model", None), nn.Module) else ""
    raise TypeError(f"expected an nn.Module, got a {type(model).__name__}{inner}")


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)
