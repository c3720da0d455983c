"""deploy: the same network, or block, with halted work skipped."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple, overload

import torch
from torch import Tensor, nn

from torchpact.block import AdaptiveBlock, Ponder
from torchpact.engines import dense
from torchpact.engines.checking import check_block, check_layers
from torchpact.engines.deployed import BlockByBlock, Deployed, DeployedBlock, OneBlock, Whole
from torchpact.engines.folding import FoldedBlock, Runner
from torchpact.engines.graphs import Graphed
from torchpact.engines.registry import (
    ENGINES,
    NETWORK_ENGINES,
    Network,
    Notes,
    built,
    joined,
    measured,
    names_among,
    tuned,
)
from torchpact.engines.report import Measurement, Report
from torchpact.engines.timing import interleaved
from torchpact.flops import _block_flops, _plain_flops, _uncompiled, flops_from_ponders
from torchpact.models.resnet import ResNet
from torchpact.modes import Mode, as_mode


@overload
def deploy(  # type: ignore[overload-overlap]  # a block is a module, too
    model: AdaptiveBlock,
    example: Tensor,
    *,
    mode: Mode | str | None = None,
    engines: Iterable[str] | None = None,
    details: bool | None = None,
) -> DeployedBlock: ...


@overload
def deploy(
    model: nn.Module,
    example: Tensor,
    *,
    mode: Mode | str | None = None,
    engines: Iterable[str] | None = None,
    details: bool | None = None,
) -> Deployed: ...


def deploy(
    model: nn.Module,
    example: Tensor,
    *,
    mode: Mode | str | None = None,
    engines: Iterable[str] | None = None,
    details: bool | None = None,
) -> Deployed | DeployedBlock:
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

    In a network of your own, deploy its blocks: adaptive blocks of :class:`~torchpact.models.ResidualUnit`
    or :class:`~torchpact.models.Bottleneck`, with heads of :class:`~torchpact.models.HaltingHead`. What is
    returned takes and gives what the block does; the ``example`` are maps such as will come.

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
        kind = "maps" if isinstance(model, AdaptiveBlock) else "images"
        raise TypeError(f"expected a tensor of {kind} as the example, got {type(example).__name__}")
    net = _uncompiled(model)
    mode = None if mode is None else as_mode(mode)
    if isinstance(net, AdaptiveBlock):
        return _deploy_block(net, example, mode, engines, details)
    if isinstance(net, ResNet):
        return _deploy_network(net, example, mode, engines, details)
    raise TypeError(
        f"expected a torchpact ResNet or an adaptive block, got {type(net).__name__}; in a network of your "
        "own, deploy its blocks"
    )


def _deploy_network(
    net: ResNet, example: Tensor, mode: Mode | None, engines: Iterable[str] | None, details: bool | None
) -> Deployed:
    names = names_among(ENGINES | NETWORK_ENGINES, engines, example.device.type)
    for each in net.blocks:
        check_layers(each)
    blocks = [FoldedBlock(block, mode, details) for block in net.blocks]
    details_kept = [block.details for block in blocks]
    in_turn = BlockByBlock(net, [], details_kept)
    plain = BlockByBlock(net, [dense.build_plain(block) for block in blocks], details_kept)
    fast = Deployed(net, in_turn)
    _check(fast, example)

    notes: Notes = {}  # in order, each once
    generators = _generators(blocks)
    chosen: list[_Choice] = []
    refused: list[Notes] = []
    with _running(example):
        builders = {n: partial(NETWORK_ENGINES[n], net, blocks) for n in names if n in NETWORK_ENGINES}
        whole = built({n: partial(tuned, build, example, run=True) for n, build in builders.items()}, notes)
        by_block = [name for name in names if name in ENGINES and name not in whole]
        u = in_turn.stem(example)
        for block in blocks:
            refused.append({})
            run, choice, (u, _) = _choose(block, by_block, u, generators, refused[-1])
            in_turn.runners.append(run)
            chosen.append(choice)
        notes |= joined(refused)
        _, ponders = in_turn(example)
        networks: dict[str, Whole | BlockByBlock] = {
            **{n: _whole(network, in_turn, example, generators) for n, network in whole.items()},
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


def _deploy_block(
    block: AdaptiveBlock,
    example: Tensor,
    mode: Mode | None,
    engines: Iterable[str] | None,
    details: bool | None,
) -> DeployedBlock:
    check_block(block)
    names = names_among(ENGINES, engines, example.device.type)
    folded = FoldedBlock(block, mode, details)
    fast = DeployedBlock(folded, OneBlock(dense.build(folded), folded.details))
    _check(fast, example)
    notes: Notes = {}
    generators = _generators([folded])
    with _running(example):
        example = example.contiguous(memory_format=torch.channels_last)
        run, choice, (output, ponder) = _choose(folded, names, example, generators, notes)
        assert ponder is not None  # there are heads
        fast.network, problem = _as_called(OneBlock(run, folded.details), example, generators)
        if problem is not None:
            notes[problem] = None
    size = output.shape[2:]
    flops = float(_block_flops(folded, ponder.steps, *size).double().mean())
    active = float(ponder.steps.double().mean()) / block.max_steps
    row = Measurement(
        "1", _shape(output.shape), choice.engine, active, choice.seconds, flops, _plain_flops(folded, *size)
    )
    fast.report = Report(len(example), [row], [*notes])
    if choice.engine == "dense":
        _warn_if_dense([folded], names, notes)
    return fast


class _Choice(NamedTuple):
    """What was found for a block, or for the network, which has no output shape."""

    engine: str
    seconds: dict[str, float]
    shape: torch.Size | None


def _choose(
    block: FoldedBlock,
    names: Sequence[str],
    u: Tensor,
    generators: Sequence[torch.Generator],
    notes: Notes,
) -> tuple[Runner, _Choice, tuple[Tensor, Ponder | None]]:
    """Return the fastest of the engines that can run a block, what was measured, and what it makes of u."""
    runners = built({n: partial(tuned, partial(ENGINES[n], block), u) for n in names}, notes)
    runners = runners or {"dense": dense.build(block)}
    seconds = measured(runners | {"plain": dense.build_plain(block)}, u, generators)
    best = min(runners, key=seconds.__getitem__)
    outputs = runners[best](u)
    return runners[best], _Choice(best, seconds, outputs[0].shape), outputs


def _check(fast: Deployed | DeployedBlock, example: Tensor) -> None:
    fast.check(example)
    if not len(example):
        raise ValueError("expected an example of at least one image, got none")


@contextmanager
def _running(example: Tensor) -> Iterator[None]:
    """Measure as what is deployed will run: without gradients, on the example's device, in its precision."""
    current = torch.cuda.device(example.device) if example.device.type == "cuda" else nullcontext()
    with torch.no_grad(), torch.autocast(example.device.type, enabled=False), current:
        yield


def _whole(
    network: Network, in_turn: BlockByBlock, example: Tensor, generators: Sequence[torch.Generator]
) -> Whole:
    """Return the network as a whole, and by blocks for sizes that it does not know."""
    whole = Whole(network, in_turn)
    if whole.direct and example.device.type == "cuda" and not in_turn.waits:
        whole.in_turn = Graphed(in_turn, generators)  # of sizes that are yet to come
    return whole


def _as_called(
    network: Whole | BlockByBlock | OneBlock, example: Tensor, generators: Sequence[torch.Generator]
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
            stacklevel=4,
        )
    elif "dense" not in names:
        warnings.warn(
            f"expected engines that can run it, got {', '.join(names) or 'none'}: the dense engine "
            f"runs. {'; '.join(notes)}",
            stacklevel=4,
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
        plain = _plain_flops(net.blocks[k], shape[2], shape[3])
        plain_total += plain
        rows.append(Measurement(str(k + 1), _shape(shape), best, active[k], seconds, flops[k], plain))
    mean = sum(active) / len(active)
    best, seconds, _ = chosen[-1]
    whole = Measurement("all", "", best, mean, seconds, sum(flops) + count.rest, plain_total + count.rest)
    return [*rows, whole]


def _shape(shape: Sequence[int]) -> str:
    return "×".join(str(size) for size in shape[1:])
