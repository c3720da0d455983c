"""Settings of blocks for a while: the mode they run in, and their thresholds."""

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

from torch import nn

from torchpact.core.block import AdaptiveBlock
from torchpact.core.frozen import FrozenModule
from torchpact.core.modes import Mode, as_mode
from torchpact.core.thresholds import Thresholds, as_thresholds

_LOCK = threading.Lock()


class _Override:
    """Attributes of blocks, set at once, and put back when a ``with`` statement ends.

    Several may overlap, in threads of their own: whichever ends first, the block is left as it was before
    all of them.
    """

    _open: ClassVar[WeakKeyDictionary[AdaptiveBlock, list["ref[_Override]"]]]

    def __init_subclass__(cls) -> None:
        cls._open = WeakKeyDictionary()

    def __init__(self, model: nn.Module, wanted: Mapping[AdaptiveBlock, tuple[Any, ...]]) -> None:
        self._model, self._wanted = model, dict(wanted)
        self._before: dict[AdaptiveBlock, tuple[Any, ...]] = {}
        self._set()

    @staticmethod
    def _read(block: AdaptiveBlock) -> tuple[Any, ...]:
        raise NotImplementedError

    @staticmethod
    def _write(block: AdaptiveBlock, values: tuple[Any, ...]) -> None:
        raise NotImplementedError

    def _set(self) -> None:
        with _LOCK:
            for block, values in self._wanted.items():
                self._before[block] = self._read(block)
                self._write(block, values)
                self._others(block).append(ref(self))

    def _others(self, block: AdaptiveBlock) -> list["ref[_Override]"]:
        """Return those that have not ended, the latest last."""
        alive = [each for each in self._open.get(block, []) if each() not in (None, self)]
        self._open[block] = alive
        return alive

    def __enter__(self) -> nn.Module:
        if not self._before:  # entered again
            self._set()
        return self._model

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with _LOCK:
            for block, before in self._before.items():
                later = [each() for each in self._open.get(block, [])]
                later = later[later.index(self) + 1 :] if self in later else []
                self._others(block)
                following = next((each for each in later if each is not None), None)
                if following is None:
                    self._write(block, before)
                else:
                    following._before[block] = before
            self._before = {}


class use_mode(_Override):
    """Set the mode of every adaptive block below ``model``; in a ``with`` statement, for its duration.

    Without ``details`` a thresholded run without gradients keeps ``steps`` and ``cost`` of the ponder only:
    the probabilities of all pixels can take more memory than the maps of a network of few channels do.

    Args:
        model: The network.
        mode: A mode, or its name.
        details: Whether probabilities are kept where only decisions count.

    Raises:
        ValueError: The mode is unknown, or the model is a deployed one.

    Example:
        >>> block = AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=3)
        >>> with use_mode(block, "thresholded"):
        ...     block.mode
        Thresholded(threshold=0.5)
        >>> block.mode
        Relaxed(temperature=0.666..., clip=0.01)

    """

    def __init__(self, model: nn.Module, mode: Mode | str, *, details: bool = True) -> None:
        wanted = (as_mode(mode), details)
        super().__init__(model, dict.fromkeys(_blocks(model, "in another mode").values(), wanted))

    @staticmethod
    def _read(block: AdaptiveBlock) -> tuple[Any, ...]:
        return block.mode, block.details

    @staticmethod
    def _write(block: AdaptiveBlock, values: tuple[Any, ...]) -> None:
        block.mode, block.details = values


class use_thresholds(_Override):
    """Set the thresholds of every adaptive block below ``model``; in a ``with`` statement, for its duration.

    They count in thresholded mode only. Deployed networks take them in the call: ``fast(x, thresholds=…)``.

    Args:
        model: The network.
        thresholds: A number, as ``Thresholded(number)`` takes it, or :class:`~torchpact.Thresholds`.

    Raises:
        ValueError: They are not for the blocks of this network.

    Example:
        >>> block = AdaptiveBlock(nn.Tanh(), nn.Linear(8, 1), max_steps=3, mode="thresholded")
        >>> with use_thresholds(block, tp.Thresholds("never")), torch.no_grad():
        ...     block(torch.randn(2, 8))[1].steps.flatten()
        tensor([3, 3])

    """

    def __init__(self, model: nn.Module, thresholds: Thresholds | float) -> None:
        blocks = _blocks(model, "and pass thresholds to the call")
        heads = {name: block.max_steps - 1 for name, block in blocks.items()}
        bounds = as_thresholds(thresholds).for_blocks(heads)
        super().__init__(model, {block: (bounds[name],) for name, block in blocks.items()})

    @staticmethod
    def _read(block: AdaptiveBlock) -> tuple[Any, ...]:
        return (block.bounds,)

    @staticmethod
    def _write(block: AdaptiveBlock, values: tuple[Any, ...]) -> None:
        (block.bounds,) = values


def _blocks(model: nn.Module, what: str) -> dict[str, AdaptiveBlock]:
    """Return the adaptive blocks of a model by name."""
    if any(isinstance(module, FrozenModule) for module in model.modules()):
        raise ValueError(f"expected a model, got what is deployed: deploy the model again, {what}")
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptiveBlock)}
