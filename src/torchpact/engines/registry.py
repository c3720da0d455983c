"""The engines there are, and how they come to be compared: each is built, and measured on an example."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchpact.engines.block_spec import FoldedBlock, Runner, Unsupported
from torchpact.engines.conv import onchip, sparse
from torchpact.engines.conv.native import engine as native
from torchpact.engines.conv.triton import engine as gpu
from torchpact.engines.generic import compact, compiled, dense
from torchpact.engines.generic import independence as apart
from torchpact.engines.graphs import Outputs, repeatable
from torchpact.engines.timing import interleaved
from torchpact.nn.resnet import ResNet

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

ENGINES: dict[str, Callable[[FoldedBlock], Runner]] = {
    "dense": dense.build,
    "compact": compact.build,
    "sparse": sparse.build,
    "native": native.build,
    "gpu": gpu.build,
    "onchip": onchip.build_block,
    "compiled": compiled.build,
}
"""How the active positions of a block get computed; to add an engine, write a file and enter it here.

An engine makes a runner of a folded block, or raises :class:`Unsupported` with a line that says why not. A
runner may have a method ``tune``, which is given the example before it is measured, and may raise that, too.
"""

STEP_ENGINES: dict[str, Callable[..., Callable[..., Any]]] = {
    "compact": apart.compacted,
}
"""Engines for blocks of any steps, likewise: they make a runner of a block and what it is called with."""

DEVICES = {"native": "cpu", "gpu": "cuda", "onchip": "cuda"}
"""Engines for one kind of device: on others they are not tried unless asked for."""

ON_REQUEST = {"compiled"}
"""Engines that take long to build: they are not tried unless asked for."""

Network = Callable[[Tensor], Outputs]

Notes = dict[str, None]
"""Lines for people, in order, each once."""

NETWORK_ENGINES: dict[str, Callable[[ResNet, Sequence[FoldedBlock]], Network]] = {
    "onchip": onchip.build,
}
"""Engines that run a network as a whole, from checked images to logits and ponders; likewise.

For images of a size that it cannot run, such a network raises :class:`Unsupported`, too. It may say that it
is ``direct``: that it starts so little that a CUDA graph would gain nothing; or that it ``waits`` for the
device, which no graph can. Where one runs the network, blocks by themselves are not tried by the engine of
its name.
"""


def names_among(known: Iterable[str], engines: Iterable[str] | None, device: str) -> list[str]:
    """Return the names that were asked for, each known; if none were, those for a kind of device."""
    if isinstance(engines, str):
        raise TypeError(f"expected a list of engines, got the string {engines!r}")
    known = [*known]
    names = default_engines(known, device) if engines is None else [*engines]
    for name in names:
        if name not in known:
            raise ValueError(f"expected engines among {', '.join(known)}; got {name!r}")
    return names


def default_engines(among: Iterable[str], device: str) -> list[str]:
    """Return the names of engines that are tried on a kind of device without being asked for.

    >>> default_engines(["dense", "gpu", "native", "compiled"], "cpu")
    ['dense', 'native']
    """
    return [name for name in among if DEVICES.get(name, device) == device and name not in ON_REQUEST]


def tuned(build: Callable[[], F], example: Tensor, run: bool = False) -> F:
    """Return what an engine makes, after it was given the example, which it may refuse.

    If it has no use for that it is not told, or is ``run`` once, to see whether it can.
    """
    made = build()
    tune = getattr(made, "tune", made if run else None)
    if tune is not None:
        tune(example)
    return made


def built(builders: Mapping[str, Callable[[], T]], notes: Notes) -> dict[str, T]:
    """Return what the engines made, and note why some made nothing."""
    made: dict[str, T] = {}
    for name, build in builders.items():
        try:
            made[name] = build()
        except Unsupported as reason:
            notes[str(reason)] = None
    return made


def joined(by_block: Sequence[Notes]) -> Notes:
    """Return what was noted of all blocks, and what of some, with their numbers.

    >>> [*joined([{"a": None, "b": None}, {"a": None}])]
    ['a', 'b (block 1)']
    """
    lines: Notes = {}
    for note in dict.fromkeys(note for notes in by_block for note in notes):
        where = [str(k) for k, notes in enumerate(by_block, start=1) if note in notes]
        word = "block" if len(where) == 1 else "blocks"
        lines[note if len(where) == len(by_block) else f"{note} ({word} {', '.join(where)})"] = None
    return lines


def measured(
    candidates: Mapping[str, Callable[[Tensor], object]], x: Tensor, generators: Sequence[torch.Generator]
) -> dict[str, float]:
    """Return the seconds that each takes; on a GPU in a CUDA graph, as it will run."""
    return interleaved({name: repeatable(run, x, generators) for name, run in candidates.items()})
