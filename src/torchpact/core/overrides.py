"""Settings of blocks for a while: the mode they run in, their thresholds, and their heads."""

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

from torch import nn

from torchpact.core.block import AdaptiveBlock
from torchpact.core.criterion import never_bounds, placed
from torchpact.core.frozen import FrozenModule
from torchpact.core.halting_module import HaltingModule, halting_modules
from torchpact.core.layer_run import LayerRun
from torchpact.core.modes import Mode, as_mode
from torchpact.core.thresholds import Thresholds, as_thresholds

_LOCK = threading.Lock()


class _Setting:
    """What one override has set on a block; it is open between ``__enter__`` and ``__exit__``."""

    def __init__(self, owner: "_Override", values: tuple[Any, ...], entered: bool) -> None:
        self.owner, self.values, self.entered = ref(owner), values, entered

    @property
    def forgotten(self) -> bool:
        """Whether it can end no more, as that of a call without a ``with`` statement."""
        return self.owner() is None

    @property
    def open(self) -> bool:
        return self.entered and not self.forgotten


class _Override:
    """Attributes of blocks, set at once, and put back when a ``with`` statement ends.

    Several may overlap, in threads of their own: whichever ends first, the block is left as it was before
    all of them, and the last to be entered counts. One that is never entered is permanent, but for a ``with``
    statement around it.
    """

    _chains: ClassVar[WeakKeyDictionary[HaltingModule, tuple[tuple[Any, ...], list[_Setting]]]]
    """What each block had before all settings, and these, the latest last."""

    def __init_subclass__(cls) -> None:
        cls._chains = WeakKeyDictionary()

    def __init__(self, model: nn.Module, wanted: Mapping[HaltingModule, tuple[Any, ...]]) -> None:
        self._model, self._wanted = model, dict(wanted)
        self._depth = 0
        with _LOCK:
            self._set(entered=False)

    @staticmethod
    def _read(block: HaltingModule) -> tuple[Any, ...]:
        raise NotImplementedError

    @staticmethod
    def _write(block: HaltingModule, values: tuple[Any, ...]) -> None:
        raise NotImplementedError

    def _set(self, entered: bool) -> None:
        for block, values in self._wanted.items():
            base, settings = self._chain(block)
            others = [each for each in settings if each.owner() is not self]
            self._chains[block] = base, [*others, _Setting(self, values, entered)]
            self._write(block, values)

    def _chain(self, block: HaltingModule) -> tuple[tuple[Any, ...], list[_Setting]]:
        found = self._read(block)
        base, settings = self._chains.get(block, (found, []))
        if settings and not any(each.open for each in settings):
            pairs = zip(found, settings[-1].values, strict=True)
            if not all(a is b for a, b in pairs):  # set by hand since
                return found, []
        # of permanent ones in a row only the last counts
        nexts = [*settings[1:], None]
        settings = [
            one
            for one, after in zip(settings, nexts, strict=False)
            if not one.forgotten or after is None or after.open
        ]
        if settings and settings[0].forgotten:
            base = settings.pop(0).values
        return base, settings

    def __enter__(self) -> nn.Module:
        with _LOCK:
            self._depth += 1
            if self._depth == 1:
                self._set(entered=True)
        return self._model

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with _LOCK:
            self._depth -= 1
            if self._depth == 0:
                for block in self._wanted:
                    self._end(block)

    def _end(self, block: HaltingModule) -> None:
        base, settings = self._chain(block)
        start = next(i for i, each in enumerate(settings) if each.owner() is self)
        end = start + 1
        while end < len(settings) and not settings[end].open:  # permanent ones within
            end += 1
        del settings[start:end]
        if settings:
            self._chains[block] = base, settings
        else:
            del self._chains[block]
        self._write(block, settings[-1].values if settings else base)


class use_mode(_Override):
    """Set the mode of every adaptive block below ``model``; in a ``with`` statement, for its duration.

    Without ``details`` a thresholded run without gradients keeps ``steps`` and ``cost`` of the ponder only:
    the probabilities of all pixels can take more memory than the maps of a network of few channels do.

    Args:
        model: The network.
        mode: A mode, or its name; None for adapted networks, which follow ``train()`` and ``eval()`` then.
        details: Whether probabilities are kept where only decisions count.

    Raises:
        ValueError: The mode is unknown, or the model is a deployed one.

    Example:
        >>> block = tp.AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=3)
        >>> with use_mode(block, "thresholded"):
        ...     block.mode
        Thresholded(threshold=0.5)
        >>> block.mode
        Relaxed(temperature=0.666..., clip=0.01)

    """

    def __init__(self, model: nn.Module, mode: Mode | str | None, *, details: bool = True) -> None:
        blocks = _blocks(model, "deploy the model again, in another mode").values()
        if mode is None and any(isinstance(block, AdaptiveBlock) for block in blocks):
            raise ValueError("expected a mode for adaptive blocks, which do not follow train() and eval()")
        wanted = (None if mode is None else as_mode(mode), details)
        super().__init__(model, dict.fromkeys(blocks, wanted))

    @staticmethod
    def _read(block: HaltingModule) -> tuple[Any, ...]:
        return block.mode, block.details

    @staticmethod
    def _write(block: HaltingModule, values: tuple[Any, ...]) -> None:
        block.mode, block.details = values


class use_thresholds(_Override):
    """Set the thresholds of every adaptive block below ``model``; in a ``with`` statement, for its duration.

    They count in thresholded mode only. Deployed networks take them in the call: ``fast(x, thresholds=…)``.

    Args:
        model: The network.
        thresholds: A number, as ``Thresholded(number)`` takes it, or :class:`~torchpact.Thresholds`; None for
            the threshold of the mode.

    Raises:
        ValueError: They are not for the blocks of this network.

    Example:
        >>> block = tp.AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=3, mode="thresholded")
        >>> with use_thresholds(block, tp.Thresholds("never")), torch.no_grad():
        ...     block(torch.randn(2, 8))[1].steps.flatten()
        tensor([3, 3])

    """

    def __init__(self, model: nn.Module, thresholds: Thresholds | float | None) -> None:
        blocks = _blocks(model, "pass thresholds to the call, as in fast(x, thresholds=0.3)")
        heads = {name: block.max_steps - 1 for name, block in blocks.items()}
        bounds: Mapping[str, tuple[float, ...] | None] = dict.fromkeys(heads)
        if thresholds is not None:
            bounds = as_thresholds(thresholds).for_blocks(heads)
        super().__init__(model, {block: (bounds[name],) for name, block in blocks.items()})

    @staticmethod
    def _read(block: HaltingModule) -> tuple[Any, ...]:
        return (block.bounds,)

    @staticmethod
    def _write(block: HaltingModule, values: tuple[Any, ...]) -> None:
        (block.bounds,) = values


class use_heads(_Override):
    """Put other heads in the place of those of every adaptive block; in a ``with`` statement, for a while.

    Weights of heads that were there are kept and come back. Criteria that are not learned start at the
    threshold *never*, other heads at that of the mode: set thresholds within.

    Args:
        model: The network.
        heads: A criterion (see :mod:`torchpact.criteria`), of which each exit gets a copy if it is learned or
            has parameters of its own; another module, which all exits share; a list of modules, one for each
            step but the last or one for all; a factory ``(layer, width) -> module`` for adapted networks; or
            a mapping of these by the names of blocks, which leaves other blocks as they are.

    Raises:
        TypeError: They are neither modules nor make some.
        ValueError: There are not as many as needed, or they are for blocks that the network does not have.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> net = tp.adapt(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)).eval()
        >>> with use_heads(net, tp.criteria.LatentChange()), use_thresholds(net, tp.Thresholds(-9.0)):
        ...     with tp.collect(net) as ponders, torch.no_grad():
        ...         output = net(torch.randn(2, 5, 16))
        >>> ponders[0].steps.unique()
        tensor([1])

    """

    def __init__(self, model: nn.Module, heads: Any) -> None:
        blocks = _blocks(model, "deploy the model again, with other heads")
        given = heads if isinstance(heads, Mapping) else dict.fromkeys(blocks, heads)
        for name in given:
            if name not in blocks:
                raise ValueError(
                    f"expected heads for blocks among {', '.join(map(repr, blocks))}; got {name!r}"
                )
        wanted: dict[HaltingModule, tuple[Any, ...]] = {}
        for name, own in given.items():
            check_heads(own)
            block = blocks[name]
            if isinstance(block, LayerRun):
                layers: list[nn.Module] = [*block.layers]
                per, width = block.per, block.width or 0
                same = len({id(layer) for layer in layers}) == 1
            elif isinstance(block, AdaptiveBlock):
                layers, per, width, same = [*block.steps], None, 0, False
            else:
                raise TypeError(f"expected a block or layers to put heads on, got a {type(block).__name__}")
            count = 1 if same else block.max_steps - 1
            layers = (layers * block.max_steps)[: max(count, 1)]
            made = nn.ModuleList(placed(model, own, layers, per, width)).train(block.training)
            wanted[block] = (made, never_bounds(made, block.max_steps - 1))
        super().__init__(model, wanted)

    @staticmethod
    def _read(block: HaltingModule) -> tuple[Any, ...]:
        return block.all_heads, block.bounds

    @staticmethod
    def _write(block: HaltingModule, values: tuple[Any, ...]) -> None:
        heads, block.bounds = values
        block.put_heads(heads)


def check_heads(heads: Any) -> None:
    """Refuse what makes no heads.

    Args:
        heads: As a user gave them; None is the default of :func:`torchpact.adapt`.

    Raises:
        TypeError: They are neither modules nor a factory.

    """
    if heads is not None and not callable(heads) and not isinstance(heads, nn.ModuleList | list | tuple):
        raise TypeError(
            f"expected heads to be a criterion, or a function of a layer and its width, got {heads!r:.40}"
        )


def _blocks(model: nn.Module, what: str) -> dict[str, HaltingModule]:
    """Return the adaptive blocks of a model by name."""
    if isinstance(model, nn.Module) and any(isinstance(each, FrozenModule) for each in model.modules()):
        raise ValueError(f"expected a model, got what is deployed: {what}")
    return halting_modules(model)
