"""Cases of what ``tp.deploy`` returns: outputs, and the decisions that were taken."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import torchpact as tp
from tests.golden.blocks import Pooled, mlp, tanh
from tests.golden.common import Case, fill, flat, varied
from tests.golden.digest import Fields
from tests.golden.networks import bottlenecks, images, images_for, resnet

MODE = tp.Thresholded(0.4)


def units() -> tp.AdaptiveBlock:
    steps = [tp.models.ResidualUnit(16, 32, stride=2), *[tp.models.ResidualUnit(32, 32) for _ in range(3)]]
    return fill(tp.AdaptiveBlock(steps, [tp.models.HaltingHead(32) for _ in steps[1:]]))


class Own(nn.Module):
    """A network with a block that examples leave, one that tokens leave, and one of another's steps."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 6)
        self.examples = tp.AdaptiveBlock(tanh(6), Pooled(6, (1,)), max_steps=4)
        self.tokens = tp.AdaptiveBlock(tanh(6), nn.Linear(6, 1), max_steps=5)
        steps = [tp.Residual(mlp(6), by_position=True) for _ in range(3)]
        self.residual = tp.AdaptiveBlock(steps, nn.Linear(6, 1))
        self.answer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, list[tp.Ponder]]:
        u, ponders = self.entry(x), []
        for block in (self.examples, self.tokens, self.residual):
            u, ponder = block(u)
            ponders.append(ponder)
        return self.answer(u.mean(1)), ponders


class Large(nn.Module):
    """Blocks that most examples, and tokens, leave early, of steps so large that compact is the fastest."""

    def __init__(self) -> None:
        super().__init__()
        steps = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh())
        self.tokens = tp.AdaptiveBlock(steps, nn.Linear(64, 1), max_steps=12)
        self.examples = tp.AdaptiveBlock(tanh(64), Pooled(64, (1,)), max_steps=12)

    def forward(self, x: Tensor) -> tuple[Tensor, list[tp.Ponder]]:
        u, ponder = self.tokens(x)
        u, other = self.examples(u)
        return u, [ponder, other]


class Maps(nn.Module):
    """A network of one's own whose block is made of units."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.block = units()
        self.answer = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, tp.Ponder]:
        u, ponder = self.block(self.stem(x))
        return self.answer(u.mean((2, 3))), ponder


def own() -> tuple[nn.Module, Tensor]:
    return fill(Own(), halting=-0.4), varied(6, 5, 4)


def large() -> tuple[nn.Module, Tensor]:
    model = fill(Large(), halting=0.5)
    fill(model.examples, seed=1, halting=-0.4)
    return model, varied(12, 64, 64)


def maps() -> tuple[nn.Module, Tensor]:
    return fill(Maps(), seed=1, halting=-4.0), images()


def one_block() -> tuple[nn.Module, Tensor]:
    return units(), varied(3, 16, 9, 8)


def bottleneck_block() -> tuple[nn.Module, Tensor]:
    return bottlenecks(), varied(3, 16, 9, 8)


def network(config: str) -> tuple[nn.Module, Tensor]:
    return resnet(config), images_for(config)


def decisions(name: str, ponders: Any) -> Fields:
    """Return what is known of ponders in every engine."""
    several = [ponders] if isinstance(ponders, tp.Ponder) else ponders
    fields: Fields = {}
    for index, ponder in enumerate(several):
        fields |= {f"{name}.{index}.steps": ponder.steps, f"{name}.{index}.cost": ponder.cost}
    return fields


def deployed(make: Callable[[], tuple[nn.Module, Tensor]], engine: str, details: bool | None) -> Fields:
    model, x = make()
    # as a whole, a network of one's own may be faster as it is, which is the same but must be allowed
    among = ["dense", engine] if isinstance(model, Own | Large | Maps) else [engine]
    fast = tp.deploy(model.eval(), x, mode=MODE, engines=among, details=details)
    other = torch.cat([x[1:], x]) / 2
    output, ponders = fast(x)
    fields = flat("output", output) | decisions("ponder", ponders)
    if details is None:
        fields |= flat("details", [ponders] if isinstance(ponders, tp.Ponder) else ponders)
    again, ponders = fast(other)
    return fields | flat("again.output", again) | decisions("again.ponder", ponders)


NETWORKS = ("pixel", "image", "group4", "norm", "image-norm", "deep", "plain")
MAKERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]]
MAKERS = {f"resnet-{config}": partial(network, config) for config in NETWORKS}
MAKERS |= {"units": one_block, "bottlenecks": bottleneck_block, "maps": maps, "own": own, "large": large}


def fits(engine: str, name: str) -> bool:
    """Whether an engine runs a network, or a block of it."""
    if engine == "compact":
        return name in ("resnet-image", "resnet-image-norm", "own", "large")
    if engine == "sparse":
        return not name.endswith(("image", "norm", "plain", "group4", "own", "large"))
    return engine == "dense" or name not in ("own", "large")


CASES = [
    *[
        Case(f"deploy-{name}-{engine}", partial(deployed, make, engine, None), compiled=engine == "native")
        for name, make in MAKERS.items()
        for engine in ("dense", "compact", "sparse", "native")
        if fits(engine, name)
    ],
    *[
        Case(f"deploy-decisions-{engine}", partial(deployed, one_block, engine, False), engine == "native")
        for engine in ("dense", "native")
    ],
]
