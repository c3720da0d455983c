"""deploy: the same network, with halted work skipped."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from torchpact.block import Ponder
from torchpact.engines import compact, compiled, dense, gpu, native, onchip, sparse
from torchpact.engines.deployed import BlockByBlock, Deployed, Whole
from torchpact.engines.folding import FoldedBlock, Runner, Unsupported
from torchpact.engines.graphs import Graphed, Outputs, repeatable
from torchpact.engines.report import Measurement, Report
from torchpact.engines.timing import interleaved
from torchpact.flops import _uncompiled, flops_from_ponders
from torchpact.models.resnet import ResNet
from torchpact.modes import Mode, as_mode

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

DEVICES = {"native": "cpu", "gpu": "cuda", "onchip": "cuda"}
"""Engines for one kind of device: on others they are not tried unless asked for."""

ON_REQUEST = {"compiled"}
"""Engines that take long to build: they are not tried unless asked for."""

Network = Callable[[Tensor], Outputs]

NETWORK_ENGINES: dict[str, Callable[[ResNet, Sequence[FoldedBlock]], Network]] = {
    "onchip": onchip.build,
}
"""Engines that run a network as a whole, from checked images to logits and ponders; likewise.

For images of a size that it cannot run, such a network raises :class:`Unsupported`, too. It may say that it
is ``direct``: that it starts so little that a CUDA graph would gain nothing; or that it ``waits`` for the
device, which no graph can. Where one runs the network, blocks by themselves are not tried by the engine of
its name.
"""


def deploy(
    model: nn.Module,
    example: Tensor,
    *,
    mode: Mode | str | None = None,
    engines: Iterable[str] | None = None,
    details: bool | None = None,
) -> Deployed:
    """Return a network with the outputs of ``model`` in evaluation, which really skips halted work.

    Batch norms are folded, weights laid out for the device, and every engine that can run a block, or the
    network as a whole, is measured on the ``example``, a batch of images such as will come. The fastest
    stays, be it the dense one, and ``explain()`` says which. Batches of any size run afterwards. ``mode``
    replaces the model's own; in a soft mode nothing can be skipped, and the dense engine runs, with a
    warning. ``engines`` are the names to choose from, by default all but ``compiled``, which takes minutes to
    build; dense is what remains, with a warning if it was not among them. Without ``details`` a thresholded
    network returns ``steps`` and ``cost`` of its ponders, and NaN for ``probs`` and ``expected_steps``, which
    take time to write; by default it is as the model's blocks are, each by itself, see :class:`use_mode`. The
    model stays as it is, and later changes of it do not reach what is deployed.

    >>> model = tp.models.psact_resnet32(mode="thresholded", halting_bias=0.0).eval()
    >>> images = torch.randn(2, 3, 32, 32)
    >>> fast = tp.deploy(model, images)
    >>> logits, ponders = fast(images)
    >>> torch.allclose(logits, model(images)[0], rtol=1e-3, atol=1e-3)
    True
    >>> print(fast.explain())
    block  output    engine ...
    """
    if not isinstance(example, Tensor):
        raise TypeError(f"expected a tensor of images as the example, got {type(example).__name__}")
    net = _uncompiled(model)
    if not isinstance(net, ResNet):
        raise TypeError(
            f"expected a torchpact ResNet, got {type(net).__name__}; for a block of your own with a "
            "decision an example there is torchpact.engines.CompactBlock"
        )
    names = _names(engines, example.device.type)
    blocks = [FoldedBlock(block, None if mode is None else as_mode(mode), details) for block in net.blocks]
    details_kept = [block.details for block in blocks]
    in_turn = BlockByBlock(net, [], details_kept)
    plain = BlockByBlock(net, [dense.build_plain(block) for block in blocks], details_kept)
    fast = Deployed(net, in_turn)
    fast.check(example)
    if not len(example):
        raise ValueError("expected an example of at least one image, got none")

    notes: dict[str, None] = {}  # in order, each once
    generators = _generators(blocks)
    chosen: list[_Choice] = []
    current = torch.cuda.device(example.device) if example.device.type == "cuda" else nullcontext()
    with torch.no_grad(), torch.autocast(example.device.type, enabled=False), current:
        builders = {n: partial(NETWORK_ENGINES[n], net, blocks) for n in names if n in NETWORK_ENGINES}
        built = _build({n: partial(_tuned, build, example, run=True) for n, build in builders.items()}, notes)
        by_block = [name for name in names if name in ENGINES and name not in built]
        u = in_turn.stem(example)
        for block, plain_run in zip(blocks, plain.runners, strict=True):
            runners = _build({n: partial(_tuned, partial(ENGINES[n], block), u) for n in by_block}, notes)
            runners = runners or {"dense": dense.build(block)}
            seconds = _measured(runners | {"plain": plain_run}, u, generators)
            best = min(runners, key=seconds.__getitem__)
            in_turn.runners.append(runners[best])
            u, _ = runners[best](u)
            chosen.append(_Choice(best, seconds, u.shape))
        _, ponders = in_turn(example)
        networks: dict[str, Whole | BlockByBlock] = {
            **{n: _whole(network, in_turn, example, generators) for n, network in built.items()},
            "blocks": in_turn,
            "plain": plain,
        }
        called = {name: _as_called(each, example, generators) for name, each in networks.items()}
        total = interleaved({name: partial(each, example) for name, (each, _) in called.items()})
        best = min((name for name in networks if name != "plain"), key=total.__getitem__)
        fast.network, problem = called[best]
        if problem is not None:
            notes[problem] = None
        if best != "blocks":
            notes[f"{best} runs the network as a whole; by block is what it was compared with"] = None
    chosen.append(_Choice(best, total, None))
    fast.report = Report(len(example), _measurements(net, chosen, ponders, example), [*notes])
    if {choice.engine for choice in chosen} <= {"dense", "blocks"}:
        _warn_if_dense(blocks, names, notes)
    return fast


class _Choice(NamedTuple):
    """What was found for a block, or for the network, which has no output shape."""

    engine: str
    seconds: dict[str, float]
    shape: torch.Size | None


def _names(engines: Iterable[str] | None, device: str) -> list[str]:
    known = ENGINES | NETWORK_ENGINES
    if isinstance(engines, str):
        raise TypeError(f"expected a list of engines, got the string {engines!r}")
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


def _tuned(build: Callable[[], F], example: Tensor, run: bool = False) -> F:
    """Return what an engine makes, after it was given the example, which it may refuse.

    If it has no use for that it is not told, or is ``run`` once, to see whether it can.
    """
    made = build()
    tune = getattr(made, "tune", made if run else None)
    if tune is not None:
        tune(example)
    return made


def _whole(
    network: Network, in_turn: BlockByBlock, example: Tensor, generators: Sequence[torch.Generator]
) -> Whole:
    """Return the network as a whole, and by blocks for sizes that it does not know."""
    whole = Whole(network, in_turn)
    if whole.direct and example.device.type == "cuda" and not in_turn.waits:
        whole.in_turn = Graphed(in_turn, generators)  # of sizes that are yet to come
    return whole


def _build(builders: Mapping[str, Callable[[], T]], notes: dict[str, None]) -> dict[str, T]:
    """Return what the engines made, and note why some made nothing."""
    made: dict[str, T] = {}
    for name, build in builders.items():
        try:
            made[name] = build()
        except Unsupported as reason:
            notes[str(reason)] = None
    return made


def _measured(
    candidates: Mapping[str, Callable[[Tensor], object]], x: Tensor, generators: Sequence[torch.Generator]
) -> dict[str, float]:
    """Return the seconds that each takes; on a GPU in a CUDA graph, as it will run."""
    return interleaved({name: repeatable(run, x, generators) for name, run in candidates.items()})


def _as_called(
    network: Whole | BlockByBlock, example: Tensor, generators: Sequence[torch.Generator]
) -> tuple[Network, str | None]:
    """Return the network as users will call it, in CUDA graphs where those help; or why there are none."""
    if example.device.type != "cuda" or network.direct:
        return network, None
    if network.waits:
        return network, "no CUDA graph: an engine waits for the device to know how much is left"
    graphed = Graphed(network, generators)
    graphed.record(example)
    return (graphed, None) if graphed.problem is None else (network, graphed.problem)


def _generators(blocks: Sequence[FoldedBlock]) -> list[torch.Generator]:
    """Return those that modes draw from, each once."""
    found = [getattr(block.mode, "generator", None) for block in blocks]
    return [*{id(each): each for each in found if each is not None}.values()]


def _warn_if_dense(blocks: Sequence[FoldedBlock], names: Sequence[str], notes: Iterable[str]) -> None:
    """Warn of the dense engine if nobody asked for it, or if a soft mode leaves no other."""
    soft = [block.mode for block in blocks if block.heads and not block.mode.hard]
    if soft:
        warnings.warn(
            f"expected a hard mode, in which halted work can be skipped, got {soft[0]}: the dense engine "
            'runs. deploy(model, example, mode="thresholded") skips',
            stacklevel=3,
        )
    elif "dense" not in names:
        warnings.warn(
            f"expected engines that can run the network, got {', '.join(names) or 'none'}: the dense engine "
            f"runs. {'; '.join(notes)}",
            stacklevel=3,
        )


def _measurements(
    net: ResNet, chosen: Sequence[_Choice], ponders: Sequence[Ponder], example: Tensor
) -> list[Measurement]:
    count = flops_from_ponders(net, ponders, example.shape)
    flops = [*count.blocks.double().mean(0).tolist()]
    active = [float(p.steps.double().mean()) / net.config.units for p in ponders] or [1.0] * len(flops)
    rows, plain_total = [], 0.0
    for k, (best, seconds, shape) in enumerate(chosen):
        if shape is None:
            break
        block: Any = net.blocks[k]
        weights = sum(conv.weight.numel() for unit in block.steps for conv in (unit.conv1, unit.conv2))
        plain = 2.0 * weights * shape[2] * shape[3]
        plain_total += plain
        output = "×".join(str(size) for size in shape[1:])
        rows.append(Measurement(str(k + 1), output, best, active[k], seconds, flops[k], plain))
    mean = sum(active) / len(active)
    best, seconds, _ = chosen[-1]
    whole = Measurement("all", "", best, mean, seconds, sum(flops) + count.rest, plain_total + count.rest)
    return [*rows, whole]
