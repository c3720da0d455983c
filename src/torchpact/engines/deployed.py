"""What deploy returns: a network, or a block, that runs with halted work skipped, and does not change."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.core.call_args import CallArgs, call_args, channels_last
from torchpact.core.collect import active_collectors, report, uncollected
from torchpact.core.frozen import FrozenModule
from torchpact.core.halting_module import HaltingModule, halting_modules
from torchpact.core.modes import Thresholded
from torchpact.core.thresholds import Thresholds, as_thresholds, run_bounds
from torchpact.engines.base import NetworkRunner
from torchpact.engines.graphs import MOST_SIZES
from torchpact.engines.inputs import InputCheck
from torchpact.engines.patching import Patches, patch, unpatch
from torchpact.engines.report import Report


class Deployed(FrozenModule):
    """A network made by :func:`deploy`: called like the one it was made of, by several threads if need be.

    It runs without gradients, on the device and in the precision that it was deployed in. ``thresholds`` of a
    call are a number, as ``Thresholded(number)`` takes it, or :class:`~torchpact.Thresholds`; nothing is
    built again for them.

    Args:
        own: A copy of the network.
        like: A tensor on its device.
        check: What its only input must be; None where anything may be given.

    """

    network: Any
    blocks: Mapping[str, HaltingModule]

    def __init__(self, own: nn.Module, like: Tensor, check: InputCheck | None = None) -> None:
        floating = (p for p in own.parameters() if p.is_floating_point())
        super().__init__(
            next(floating, like) if check is None else check.like, check.kind if check else "network"
        )
        self.report = Report(0, [])
        self.tune: Callable[[CallArgs], None] | None = None
        self.patches: Patches = {}
        """What stands in the place of its parts."""
        self.channels_last = False
        self.check = check
        self.__dict__["blocks"] = halting_modules(own)
        self._fitting: set[torch.Size] = set()  # that came before
        if hasattr(own, "config"):
            self.config = own.config
        self.run_by(own)
        self.eval()  # as it runs, whatever the model is in

    def run_by(self, network: Callable[..., Any]) -> None:
        """Run by this from now on."""
        # even a module: it has no children, for nothing may change them
        self.__dict__["network"] = network

    def explain(self) -> str:
        """Return a table of what runs each part, and how fast it was on the example, for ``print``."""
        return str(self.report)

    def retune(self, example: Any, *, kwargs: Mapping[str, Any] | None = None) -> str:
        """Measure the engines again, on another example or at a quieter time, and choose again.

        The network computes the same afterwards. No other thread may call it meanwhile. If it fails, what
        was chosen before stays.

        Args:
            example: As of :func:`~torchpact.deploy`: what it will be called with.
            kwargs: Keyword arguments besides.

        Returns:
            What :meth:`explain` returns from now on.

        Raises:
            ValueError: The example is empty or does not fit.

        Example:
            >>> model = tp.models.psact_resnet32(mode="thresholded", halting_bias=0.0).eval()
            >>> fast = tp.deploy(model, torch.randn(2, 3, 32, 32))
            >>> print(fast.retune(torch.randn(1, 3, 32, 32)))  # single images will come
            block     output    engine ...

        """
        assert self.tune is not None  # as deploy has seen to
        before = self.network, self.patches, self.report, self.channels_last
        unpatch(self.patches)
        self.patches = {}
        try:
            self.tune(call_args(example, kwargs))
        except BaseException:
            network, self.patches, self.report, self.channels_last = before
            self.run_by(network)
            patch(self.patches)
            raise
        return self.explain()

    def extra_repr(self) -> str:
        """Return what runs each part for ``print``."""
        rows = [
            f"{m.name}: {m.engine}" + (f" ({m.output})" if m.output else "") for m in self.report.measurements
        ]
        name = type(self.network).__name__ if isinstance(self.network, nn.Module) else self.kind
        return f"{name}, {', '.join(rows)}"

    def forward(self, *args: Any, thresholds: Thresholds | float | None = None, **kwargs: Any) -> Any:
        """Return what the network returns.

        Args:
            args: What the network takes.
            thresholds: What halts in this call, in thresholded mode; by default as deployed.
            kwargs: What the network takes by name.

        Raises:
            ValueError: The input does not fit, or the thresholds are not for its blocks.

        """
        # a small network takes less time than checks that were made before would
        if self.check is not None and not self._came_before(args, kwargs):
            self.refuse_misfits(CallArgs(args, kwargs))
        if self.channels_last:
            args, kwargs = tuple(map(channels_last, args)), {n: channels_last(x) for n, x in kwargs.items()}
        bounds = None if thresholds is None else self._bounds_of(thresholds)
        return self._on_device(lambda: self._run(args, kwargs, bounds))

    def generate(self, *args: Any, thresholds: Thresholds | float | None = None, **kwargs: Any) -> Any:
        """Return what the network generates, by its own ``generate``.

        Args:
            args: What its ``generate`` takes.
            thresholds: What halts in this call, in thresholded mode; by default as deployed.
            kwargs: What its ``generate`` takes by name.

        Raises:
            TypeError: The network has no ``generate``.
            ValueError: The thresholds are not for its blocks.

        """
        make = getattr(self.network, "generate", None)
        if make is None:
            kind = type(self.network).__name__
            raise TypeError(f"expected a network that has generate, got {kind}, which has none")
        bounds = None if thresholds is None else self._bounds_of(thresholds)
        return self._on_device(lambda: self._within(bounds, make, args, kwargs))

    def _on_device(self, work: Callable[[], Any]) -> Any:
        device = self.device
        if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
            with torch.cuda.device(device):  # where Triton starts kernels
                return self._as_measured(work)
        return self._as_measured(work)

    def _as_measured(self, work: Callable[[], Any]) -> Any:
        """Run without gradients and autocast; to enter what need not be changed would take time, too."""
        cast = torch.is_autocast_enabled(self.device.type)
        if not (cast or torch.is_grad_enabled()):
            return work()
        with torch.no_grad():
            if not cast:
                return work()
            with torch.autocast(self.device.type, enabled=False):
                return work()

    def _came_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the only argument is a tensor like one that was checked."""
        if len(args) != 1 or kwargs:
            return False
        x = args[0]
        return (
            isinstance(x, Tensor)
            and x.shape in self._fitting
            and x.dtype == self.dtype
            and x.device == self.device
            and not x.requires_grad
        )

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], bounds: Mapping[str, tuple[float, ...]] | None
    ) -> Any:
        if isinstance(self.network, NetworkRunner):
            return self._run_as_a_whole(self.network, args[0], bounds)
        return self._within(bounds, self.network, args, kwargs)

    def _within(
        self,
        bounds: Mapping[str, tuple[float, ...]] | None,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a function with the thresholds of a run."""
        if bounds is None:
            return call(*args, **kwargs)
        with run_bounds({self.blocks[name]: each for name, each in bounds.items()}):
            return call(*args, **kwargs)

    def _run_as_a_whole(
        self, network: NetworkRunner, images: Tensor, bounds: Mapping[str, tuple[float, ...]] | None
    ) -> Any:
        collectors = active_collectors()
        if not collectors:
            return network(images, bounds)
        with uncollected():  # blocks that run as they are would tell, too
            logits, ponders = network(images, bounds)
        for block, ponder in zip(self.blocks.values(), ponders, strict=True):
            report(block, ponder, collectors)
        return logits, ponders

    def _bounds_of(self, thresholds: Thresholds | float) -> dict[str, tuple[float, ...]]:
        """Return the bounds of all blocks in a call, by name."""
        modes = [block.present_mode for block in self.blocks.values()]
        if modes and not any(isinstance(mode, Thresholded) for mode in modes):
            raise ValueError(f"expected the mode thresholded with thresholds, got {modes[0]}")
        heads = {name: block.max_steps - 1 for name, block in self.blocks.items()}
        return as_thresholds(thresholds).for_blocks(heads)

    def refuse_misfits(self, given: CallArgs) -> None:
        """Refuse arguments that are not what the network takes, where that is known."""
        if self.check is None:
            return
        kind, takes, check, like = self.check
        x = given.args[0] if given.args else None
        if kind == "block" and (len(given.values) > 1 or not isinstance(x, Tensor)):
            return  # steps that take a context
        if len(given.values) != 1 or not isinstance(x, Tensor):
            got = ", ".join(type(value).__name__ for value in given.values) or "nothing"
            raise TypeError(f"expected a tensor of {takes} and nothing else, got {got}")
        if x.requires_grad and torch.is_grad_enabled() and kind == "block":
            warnings.warn(
                "expected maps that need no gradients, which end at a deployed block: call it within "
                "torch.no_grad(), and train the block that it was made of",
                stacklevel=5,
            )
        if x.shape in self._fitting and x.dtype == self.dtype and x.device == self.device:
            return
        check(x)
        if x.dtype != like.dtype or x.device != like.device:
            raise ValueError(
                f"expected {takes} of {like.dtype} on {like.device}, as the {kind} was when deployed; got "
                f"{x.dtype} on {x.device}"
            )
        if len(self._fitting) >= MOST_SIZES:
            self._fitting.clear()
        self._fitting.add(x.shape)
