"""What networks of one's own cost: steps and heads are metered in full, and charged where they ran."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from torchpact.core.block import AdaptiveBlock
from torchpact.flops.attention import attention_flops
from torchpact.flops.call_capture import (
    Call,
    Given,
    Inputs,
    Never,
    Part,
    adaptive_parts,
    batch_of,
    leading,
    one_for_none,
    recorded,
    title,
)
from torchpact.flops.conv import block_flops, plain_flops
from torchpact.nn.conv_units import Bottleneck, HaltingHead, ResidualUnit, join_patches, join_ponder
from torchpact.nn.rnn import AdaptiveRNN
from torchpact.specs import AttentionLayer, price_of, step_spec


class Spent(NamedTuple):
    """What the calls of a block, or of a recurrent layer, cost in a run."""

    flops: Tensor
    """Of each example."""
    plain: float
    """Of one example, in the mean, if all steps run everywhere and nobody decides."""
    active: float
    """The share of steps that positions ran, in the mean."""


class _Prices(NamedTuple):
    """FLOPs of the steps and heads of a call, in the order in which they ran, and of all of it."""

    steps: list[int]
    heads: list[int]
    whole: int


def metered(net: nn.Module, given: Given) -> tuple[dict[str, Spent], int]:
    """Return what each block and recurrent layer cost in a run, and what all else costs an example.

    The network is in evaluation, without gradients. A block of residual units is charged as
    :func:`torchpact.flops.count.flops_from_ponders` does; a step with a registered price as that says,
    which is told who runs it; others for the share of positions that ran a step.
    """
    found, batch = adaptive_parts(net), batch_of(net, given)
    prices, rest = _metered_prices(net, found, given if batch else one_for_none(given))
    each_rest = round(rest / max(batch, 1))
    if not found:
        return {}, each_rest
    with recorded(found) as calls:
        given.to(net)
    spent = {}
    nothing = torch.zeros(batch, dtype=torch.long, device=leading(given).device)
    for name, part in found.items():
        ran, known = calls[name], prices[name]
        if len(ran) != len(known):
            raise ValueError(
                f"expected {title(name)} to be called as often whoever halts, got {len(ran)} calls, and "
                f"{len(known)} where nobody does"
            )
        each = [_spent(part, *pair, batch, name) for pair in zip(ran, known, strict=True)]
        shares = [call.ponder.steps.double().mean() / part.max_steps for call in ran]
        spent[name] = Spent(
            sum((flops for flops, _ in each), nothing),
            sum(plain for _, plain in each),
            float(torch.stack(shares).mean()) if shares else 0.0,
        )
    return spent, each_rest


def _metered_prices(
    net: nn.Module, found: Mapping[str, Part], given: Given
) -> tuple[dict[str, list[_Prices]], int]:
    """Run the network so that nobody halts, and read the counter before and after what matters."""
    prices: dict[str, list[_Prices]] = {name: [] for name in found}
    with _every_product_seen(net), FlopCounterMode(display=False) as counter, _Meters(counter, found, prices):
        given.to(net)
    inside = sum(call.whole for calls in prices.values() for call in calls)
    return prices, int(counter.get_total_flops()) - inside


@contextmanager
def _every_product_seen(net: nn.Module) -> Iterator[None]:
    """Have attention and recurrent layers run by products that torch counts, not by kernels of their own."""
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


class _Meters:
    """Hooks that read a counter around blocks, and around steps and heads while a block runs."""

    def __init__(
        self,
        counter: FlopCounterMode,
        found: Mapping[str, Part],
        prices: dict[str, list[_Prices]],
    ) -> None:
        self.counter, self.found, self.prices = counter, found, prices
        self.running: list[tuple[str, _Prices, int]] = []
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        for name, part in self.found.items():
            self._around(part, name)
            block = part.block if isinstance(part, AdaptiveRNN) else part
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

    def _around(self, part: nn.Module, name: str) -> None:
        def begin(_part: nn.Module, inputs: Inputs, options: dict[str, Any]) -> Any:
            if self.running:
                raise TypeError(
                    f"expected adaptive blocks beside each other, got {title(name)} within "
                    f"{title(self.running[-1][0])}"
                )
            self.running.append((name, _Prices([], [], 0), self._now()))
            return inputs, options | {"mode": Never()}

        def end(*_now: object) -> None:
            _name, prices, before = self.running.pop()
            self.prices[name].append(prices._replace(whole=self._now() - before))

        self.handles.append(part.register_forward_pre_hook(begin, with_kwargs=True))
        self.handles.append(part.register_forward_hook(end))

    def _inside(self, module: nn.Module, name: str, kind: str) -> None:
        before: list[int] = []

        def begin(*_: object) -> None:
            before.append(self._now())

        def end(*_: object) -> None:
            spent = self._now() - before.pop()
            if self.running and self.running[-1][0] == name:  # else it is called from elsewhere, too
                getattr(self.running[-1][1], kind).append(spent)

        self.handles.append(module.register_forward_pre_hook(begin))
        self.handles.append(module.register_forward_hook(end))


def _spent(part: Part, call: Call, prices: _Prices, batch: int, name: str) -> tuple[Tensor, float]:
    """Return what a call cost each example, and what it would have cost one without decisions."""
    steps = call.ponder.steps
    rows = len(steps)
    fits = rows == batch if isinstance(part, AdaptiveRNN) or not batch else rows % batch == 0
    if not fits:
        raise ValueError(
            f"expected {title(name)} to decide for {batch} examples, the first dimension of what the network "
            f"is given; got {rows}"
        )
    if isinstance(part, AdaptiveBlock) and (units := _units(part)) is not None:
        height, width = join_patches(call.output).shape[2:]
        steps = join_ponder(call.ponder).steps
        flops = block_flops(units, steps, height, width).reshape(batch, -1).sum(1)
        return flops, rows / max(batch, 1) * plain_flops(units, height, width)
    if len(prices.steps) % part.max_steps:
        raise TypeError(
            f"expected {title(name)} to run {part.max_steps} steps, got {len(prices.steps)} calls of them"
        )
    steps = steps.reshape(batch, -1) if batch else steps.new_zeros(0, 1)
    # prices are of all examples; a time step of a recurrent layer costs as much as any other, else a price is
    # that of all positions
    shares = max(batch, 1) * (1 if isinstance(part, AdaptiveRNN) else steps.size(1))
    flops = torch.zeros(batch, dtype=torch.double)
    for index, price in enumerate(prices.steps[: part.max_steps]):
        asked = sum(prices.heads[index : index + 1]) if index + 1 < part.max_steps else 0
        said = _said(part, index, call) if batch else None
        if said is not None:
            price = 0
            flops += said.reshape(batch, -1).sum(1).cpu()
        flops += (steps > index).sum(1).cpu() * ((price + asked) / shares)
    each = sum(prices.steps[: part.max_steps])
    ran = int((steps > 0).sum()) / max(batch, 1)  # not what is padding
    return flops.round().long().to(steps.device), each * ran / shares


def says_its_cost(step: Any) -> bool:
    """Whether more is known of what a step costs than its share of all positions."""
    return price_of(step) is not None or isinstance(step_spec(step, hooks=True), AttentionLayer)


def _said(part: Part, index: int, call: Call) -> Tensor | None:
    """Return what a step costs each row, given which positions ran it, if that is known."""
    if isinstance(part, AdaptiveRNN):
        return None
    step, active, shape = part.step_at(index), call.ponder.steps > index, call.output.shape
    price, spec = price_of(step), step_spec(step, hooks=True)
    if price is not None:
        return price(active, shape)
    return attention_flops(spec, active, shape[1]) if isinstance(spec, AttentionLayer) else None


def _units(block: AdaptiveBlock) -> Any:
    """Return units and heads, one for every iteration, of a block that is charged by what units need."""
    steps, heads = [*block.steps], [*block.halting]
    kinds = {type(step) for step in steps}
    if (
        len(kinds) != 1
        or not kinds <= {ResidualUnit, Bottleneck}
        or {type(h) for h in heads} != {HaltingHead}
    ):
        return None
    steps, heads = (each * (block.max_steps if len(each) == 1 else 1) for each in (steps, heads))
    return SimpleNamespace(steps=steps, halting=heads[: block.max_steps - 1])
