"""Cases of adaptive blocks: of all sorts of steps, in every mode, with gradients and without."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import torchpact as tp
from tests.golden.common import MODES, Case, evaluate, fill, flat, flops, learn, uniform, varied
from tests.golden.digest import Fields


class Pair(nn.Module):
    """A step on a tuple of two states."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(9, 5), nn.Linear(9, 4)

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        both = torch.cat(state, 1)
        return torch.tanh(self.one(both)), torch.sigmoid(self.two(both))


class OfFirst(nn.Module):
    """A head that looks at the first part of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)

    def forward(self, state: tuple[Tensor, Tensor]) -> Tensor:
        logits: Tensor = self.linear(state[0])
        return logits


class Pooled(nn.Module):
    """A head for one decision an example about maps, or tokens."""

    def __init__(self, size: int, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.linear, self.dims = nn.Linear(size, 1), dims

    def forward(self, u: Tensor) -> Tensor:
        logits: Tensor = self.linear(u.mean(self.dims))
        return logits.view(len(u), *[1] * (u.dim() - 1))


class Reads(nn.Module):
    """A function that is given a context besides the state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(6, 6), nn.Linear(3, 6)

    def forward(self, u: Tensor, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.linear(u) + scale * self.other(x))


class Indexed(nn.Module):
    """A step that is told which iteration it is."""

    indexed = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, u: Tensor, *, iteration: int) -> Tensor:
        return torch.tanh(self.linear(u) / iteration)


class IndexedGated(Indexed):
    """Such a step that takes the gate, too, and a context."""

    gated = True

    def forward(  # type: ignore[override]
        self, u: Tensor, x: Tensor, gate: Tensor | None = None, *, iteration: int
    ) -> Tensor:
        residual = torch.tanh(self.linear(u) + x / iteration)
        return u + (residual if gate is None else residual * gate)


def tanh(inputs: int, outputs: int | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs or inputs), nn.Tanh())


def conv(inputs: int, outputs: int | None = None) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs or inputs, 3, padding=1), nn.Tanh())


def mlp(size: int) -> nn.Module:
    return nn.Sequential(nn.Linear(size, 8), nn.ReLU(), nn.Linear(8, size))


def pointwise(size: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(size, 8, 1), nn.ReLU(), nn.Conv2d(8, size, 1))


def unit_free(u: Tensor) -> Tensor:
    return u.sin() + u.flip(-1) / 2


HALTING = -0.6
"""The bias of heads, with which some positions halt early and others late."""

Made = tuple[tp.AdaptiveBlock, tuple[Any, ...]]


def shared() -> Made:
    return tp.AdaptiveBlock(tanh(6), nn.Linear(6, 1), max_steps=5), (uniform(7, 6),)


def shared_double() -> Made:
    return tp.AdaptiveBlock(tanh(6), nn.Linear(6, 1), max_steps=4).double(), (uniform(7, 6).double(),)


def separate() -> Made:
    steps = [tanh(6, 8), tanh(8), tanh(8), tanh(8)]
    return tp.AdaptiveBlock(steps, [nn.Linear(8, 1) for _ in steps[1:]]), (uniform(7, 6),)


def separate_shared_head() -> Made:
    return tp.AdaptiveBlock([tanh(6), tanh(6), tanh(6)], nn.Linear(6, 1)), (uniform(7, 6),)


def shared_separate_heads() -> Made:
    heads = [nn.Linear(6, 1) for _ in range(4)]
    return tp.AdaptiveBlock(tanh(6), heads, max_steps=4), (uniform(7, 6),)


def functions() -> Made:
    head = lambda u: 2 * u[:, :1] - 0.3  # noqa: E731
    return tp.AdaptiveBlock(unit_free, head, max_steps=4), (uniform(7, 6),)


def single() -> Made:
    return tp.AdaptiveBlock([tanh(6)], []), (uniform(7, 6),)


def pair() -> Made:
    return tp.AdaptiveBlock(Pair(), OfFirst(), max_steps=4), ((uniform(7, 5), uniform(7, 4, seed=1)),)


def tokens() -> Made:
    return tp.AdaptiveBlock(tanh(6), nn.Linear(6, 1), max_steps=4), (uniform(3, 5, 6),)


def tokens_an_example() -> Made:
    return tp.AdaptiveBlock(tanh(6), Pooled(6, (1,)), max_steps=4), (varied(5, 3, 6),)


def pixels() -> Made:
    steps = [conv(3, 4), conv(4), conv(4)]
    return tp.AdaptiveBlock(steps, nn.Conv2d(4, 1, 3, padding=1)), (uniform(2, 3, 6, 5),)


def pixels_an_example() -> Made:
    return tp.AdaptiveBlock(conv(3), Pooled(3, (2, 3)), max_steps=4), (2 * varied(9, 3, 3, 2, seed=4),)


def residual() -> Made:
    steps = [tanh(5, 6), *[tp.Residual(mlp(6)) for _ in range(3)]]
    return tp.AdaptiveBlock(steps, nn.Linear(6, 1)), (uniform(7, 5),)


def residual_shared() -> Made:
    return tp.AdaptiveBlock(tp.Residual(mlp(6)), nn.Linear(6, 1), max_steps=4), (uniform(7, 6),)


def residual_conv() -> Made:
    steps = [conv(3, 4), *[tp.Residual(conv(4)) for _ in range(3)]]
    return tp.AdaptiveBlock(steps, nn.Conv2d(4, 1, 3, padding=1)), (uniform(2, 3, 6, 5),)


def residual_mixed() -> Made:
    steps = [conv(4), tp.Residual(conv(4)), conv(4), tp.Residual(conv(4))]
    return tp.AdaptiveBlock(steps, nn.Conv2d(4, 1, 1)), (uniform(2, 4, 5, 4),)


def by_position() -> Made:
    steps = [tp.Residual(mlp(6), by_position=True) for _ in range(4)]
    return tp.AdaptiveBlock(steps, nn.Linear(6, 1)), (uniform(3, 5, 6),)


def by_position_pixels() -> Made:
    step = tp.Residual(pointwise(4), by_position=True, features=1)
    return tp.AdaptiveBlock(step, nn.Conv2d(4, 1, 1), max_steps=4), (uniform(2, 4, 5, 4),)


def context() -> Made:
    block = tp.AdaptiveBlock(Reads(), nn.Linear(6, 1), max_steps=4)
    return block, (uniform(7, 6), uniform(7, 3, seed=1), 0.5)


def residual_context() -> Made:
    step = tp.Residual(Reads(), by_position=True)
    return tp.AdaptiveBlock(step, nn.Linear(6, 1), max_steps=4), (uniform(7, 6), uniform(7, 3, seed=1))


def indexed() -> Made:
    return tp.AdaptiveBlock(Indexed(), nn.Linear(6, 1), max_steps=4), (uniform(7, 6),)


def indexed_gated() -> Made:
    block = tp.AdaptiveBlock(IndexedGated(), nn.Linear(6, 1), max_steps=4)
    return block, (uniform(7, 6), uniform(7, 6, seed=1))


MAKERS: list[Callable[[], Made]] = [
    shared,
    shared_double,
    separate,
    separate_shared_head,
    shared_separate_heads,
    functions,
    single,
    pair,
    tokens,
    tokens_an_example,
    pixels,
    pixels_an_example,
    residual,
    residual_shared,
    residual_conv,
    residual_mixed,
    by_position,
    by_position_pixels,
    context,
    residual_context,
    indexed,
    indexed_gated,
]


def in_mode(make: Callable[[], Made], name: str) -> Fields:
    block, inputs = make()
    fill(block, halting=HALTING)
    mode = MODES[name]
    fields = learn(block, inputs, mode) | evaluate(block, inputs, mode)
    return fields | (flops(block, inputs, mode) if name != "discrete" else {})


def settings() -> Fields:
    """Modes with settings of their own, and with generators; the mode given in the call."""
    block, inputs = shared()
    fill(block, halting=HALTING)
    fields: Fields = {}
    for name, mode in {
        "temperature": tp.Relaxed(temperature=0.4, clip=0.2),
        "thresholded": tp.Thresholded(0.5),
        "act": tp.ACT(eps=0.2),
    }.items():
        fields |= {f"{name}.{key}": x for key, x in learn(block, inputs, mode).items()}
    for name in ("relaxed", "discrete"):
        kind = tp.Relaxed if name == "relaxed" else tp.Discrete
        mode = kind(generator=torch.Generator().manual_seed(3))
        fields |= flat(f"{name}.generator", block(*inputs, mode=mode))
    fields |= flat("thresholded.call", block(*inputs, mode="thresholded"))
    with torch.no_grad(), tp.use_mode(block, "thresholded", details=False):
        output, ponder = block(*inputs)
    return fields | flat("decisions", (output, ponder)) | {"decisions.active": ponder.active}


def early() -> Fields:
    """Blocks that everybody leaves at once, and that nobody leaves."""
    fields: Fields = {}
    for bias in (9.0, -9.0):
        for make in (shared, residual_conv, pair):
            block, inputs = make()
            fill(block, halting=bias)
            for name in ("thresholded", "act"):
                given = evaluate(block, inputs, MODES[name], name=f"{make.__name__}.{name}.{bias}")
                fields |= given
    return fields


CASES = [
    Case(f"block-{make.__name__.replace('_', '-')}-{name}", partial(in_mode, make, name))
    for make in MAKERS
    for name in MODES
] + [Case("block-settings", settings), Case("block-early", early)]
