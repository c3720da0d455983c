"""What steps and heads cost in a run in which nothing halts, by a counter of operations."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchpact.core.block import AdaptiveBlock
from torchpact.core.call_args import CallArgs
from torchpact.core.layer_run import LayerRun
from torchpact.core.modes import NeverHalt
from torchpact.core.overrides import use_mode
from torchpact.specs.call_capture import title

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode


class Prices(NamedTuple):
    """FLOPs of the steps and heads of a call of a part, in the order in which they ran, and of all of it."""

    steps: list[int]
    heads: list[int]
    whole: int


def metered_prices(
    net: nn.Module, found: Mapping[str, nn.Module], given: CallArgs
) -> tuple[dict[str, list[Prices]], int]:
    """Run a network so that nothing halts, and count what its adaptive parts cost.

    Args:
        net: The network, in evaluation, without gradients.
        found: Its adaptive parts by name.
        given: What it is called with.

    Returns:
        The prices of each call of each part, and the FLOPs of all else.

    Raises:
        TypeError: One part is within another.

    """
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton, where there is one

    prices: dict[str, list[Prices]] = {name: [] for name in found}
    counter = FlopCounterMode(display=False)
    runs = [part for part in found.values() if isinstance(part, LayerRun)]
    with _every_product_seen(net), counter, _Meters(counter, found, prices), ExitStack() as stack:
        for run in runs:
            stack.enter_context(use_mode(run, NeverHalt()))
        given.call(net)
    for name, part in found.items():
        if isinstance(part, LayerRun):  # which is not called: its calls are its layers' and heads'
            prices[name] = [each._replace(whole=sum(each.steps) + sum(each.heads)) for each in prices[name]]
    inside = sum(call.whole for calls in prices.values() for call in calls)
    return prices, int(counter.get_total_flops()) - inside


@contextmanager
def _every_product_seen(net: nn.Module) -> Iterator[None]:
    """Run attention and recurrent layers by products that torch counts, not by fused kernels."""
    fast = torch.backends.mha.get_fastpath_enabled()
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # of settings that come with these
        if any(isinstance(module, nn.RNNBase) for module in net.modules()):
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


def loop_of(part: nn.Module) -> AdaptiveBlock | None:
    """Return the adaptive block that runs the steps of a part: itself, or that of a recurrent layer."""
    return next((module for module in part.modules() if isinstance(module, AdaptiveBlock)), None)


class _Meters:
    """Hooks that read a counter around parts, and around steps and heads while a part runs."""

    def __init__(
        self, counter: "FlopCounterMode", found: Mapping[str, nn.Module], prices: dict[str, list[Prices]]
    ) -> None:
        self.counter, self.found, self.prices = counter, found, prices
        self.running: list[tuple[str, Prices, int]] = []
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        for name, part in self.found.items():
            if isinstance(part, LayerRun):
                self._along(part, name)
                continue
            block = loop_of(part)
            self._around(part, name, adaptive=block is not None)
            if block is None:
                continue
            # a list may hold a step more than once, and its hooks are called each time
            for module in {id(m): m for m in block.steps}.values():
                self._inside(module, name, "steps")
            for module in {id(m): m for m in block.halting}.values():
                self._inside(module, name, "heads")

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _now(self) -> int:
        return int(self.counter.get_total_flops())

    def _around(self, part: nn.Module, name: str, adaptive: bool) -> None:
        def begin(_part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.running:
                raise TypeError(
                    f"expected adaptive blocks beside each other, got {title(name)} within "
                    f"{title(self.running[-1][0])}"
                )
            self.running.append((name, Prices([], [], 0), self._now()))
            # thresholds are for another mode
            told = {key: value for key, value in kwargs.items() if key != "thresholds"}
            return args, told | {"mode": NeverHalt()} if adaptive else told

        def end(*_now: object) -> None:
            _name, prices, before = self.running.pop()
            self.prices[name].append(prices._replace(whole=self._now() - before))

        self.handles.append(part.register_forward_pre_hook(begin, with_kwargs=True))
        self.handles.append(part.register_forward_hook(end))

    def _along(self, run: LayerRun, name: str) -> None:
        """Read the counter around the layers of a run, and around its heads, which run after them."""
        calls, before = self.prices[name], []

        def begin(*_: object) -> None:
            before.append(self._now())

        def end_layer(*_: object) -> None:
            spent = self._now() - before.pop()
            if not calls or len(calls[-1].steps) == run.max_steps:
                calls.append(Prices([], [], 0))
            calls[-1].steps.append(spent)

        def end_head(*_: object) -> None:
            calls[-1].heads.append(self._now() - before.pop())

        for layer in {id(layer): layer for layer in run.layers}.values():
            self.handles.append(layer.register_forward_pre_hook(begin))
            # before the hook of the run, which calls the head
            self.handles.append(layer.register_forward_hook(end_layer, prepend=True))
        for head in {id(head): head for head in run.heads}.values():
            self.handles.append(head.register_forward_pre_hook(begin))
            self.handles.append(head.register_forward_hook(end_head))

    def _inside(self, module: nn.Module, name: str, kind: str) -> None:
        before: list[int] = []

        def begin(*_: object) -> None:
            before.append(self._now())

        def end(*_: object) -> None:
            spent = self._now() - before.pop()
            if self.running and self.running[-1][0] == name:  # else it is called from elsewhere, too
                prices = self.running[-1][1]
                (prices.steps if kind == "steps" else prices.heads).append(spent)

        self.handles.append(module.register_forward_pre_hook(begin))
        self.handles.append(module.register_forward_hook(end))
