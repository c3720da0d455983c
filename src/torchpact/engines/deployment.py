"""deploy: the same network, or block, with halted work skipped."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, overload

from torch import Tensor, nn

from torchpact.core.block import AdaptiveBlock
from torchpact.core.modes import Mode, as_mode
from torchpact.core.ponder import Ponder
from torchpact.engines.autotune import (
    Choice,
    as_called,
    check_example,
    choose,
    deploy_block,
    running,
    sizes_of,
)
from torchpact.engines.block_spec import FoldedBlock
from torchpact.engines.deployed import BlockByBlock, Deployed, DeployedBlock, Whole
from torchpact.engines.generic import dense
from torchpact.engines.graphs import Graphed, generators_of
from torchpact.engines.own import DeployedNetwork, deploy_network, of_units
from torchpact.engines.registry import (
    ENGINES,
    NETWORK_ENGINES,
    STEP_ENGINES,
    Network,
    Notes,
    built,
    joined,
    names_among,
    tuned,
)
from torchpact.engines.report import Measurement, Report
from torchpact.engines.timing import Others, interleaved
from torchpact.engines.validation import check_layers, is_changed, is_watched
from torchpact.flops.call_capture import arguments, leading
from torchpact.flops.conv import plain_flops
from torchpact.flops.count import flops_from_ponders, uncompiled
from torchpact.nn.resnet import ResNet


@overload
def deploy(
    model: ResNet,
    example: Tensor,
    *,
    kwargs: Mapping[str, Any] | None = None,
    mode: Mode | str | None = None,
    engines: Iterable[str] | None = None,
    details: bool | None = None,
) -> Deployed: ...


@overload
def deploy(
    model: AdaptiveBlock,
    example: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    mode: Mode | str | None = None,
    engines: Iterable[str] | None = None,
    details: bool | None = None,
) -> DeployedBlock | DeployedNetwork: ...


@overload
def deploy(
    model: nn.Module,
    example: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    mode: Mode | str | None = None,
    engines: Iterable[str] | None = None,
    details: bool | None = None,
) -> DeployedNetwork: ...


def deploy(
    model: nn.Module,
    example: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    mode: Mode | str | None = None,
    engines: Iterable[str] | None = None,
    details: bool | None = None,
) -> Deployed | DeployedBlock | DeployedNetwork:
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

    A network of your own is deployed block by block, and called as it is: a copy of it runs, in evaluation,
    whose adaptive blocks skip what they can. Blocks of :class:`~torchpact.models.ResidualUnit` or
    :class:`~torchpact.models.Bottleneck`, with heads of :class:`~torchpact.models.HaltingHead`, run by the
    engines; from others, examples that have halted leave the batch, or positions, if steps treat them one by
    one; else they run as they are. ``example`` is what it is called with, a tuple being several arguments,
    and ``kwargs`` what it is given by name; the first dimension of the first tensor is the batch. A block can
    be deployed by itself, too.

    >>> model = tp.models.psact_resnet32(mode="thresholded", halting_bias=0.0).eval()
    >>> images = torch.randn(2, 3, 32, 32)
    >>> fast = tp.deploy(model, images)
    >>> logits, ponders = fast(images)
    >>> torch.allclose(logits, model(images)[0], rtol=1e-3, atol=1e-3)
    True
    >>> print(fast.explain())
    block  output    engine ...
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected an nn.Module, got a {type(model).__name__}")
    net = uncompiled(model)
    mode = None if mode is None else as_mode(mode)
    given, takes = arguments(example, kwargs), _takes(net)
    inputs = given.inputs
    if takes and given.named:
        raise TypeError(f"expected {takes} as the example and no kwargs, got {', '.join(given.named)}")
    if takes and not (len(inputs) == 1 and isinstance(inputs[0], Tensor)):
        raise TypeError(f"expected a tensor of {takes} as the example, got {type(example).__name__}")
    device = leading(given).device.type
    known = ENGINES | (NETWORK_ENGINES if takes == "images" else STEP_ENGINES)
    names, others = names_among(known, engines, device), Others()
    fast: Deployed | DeployedBlock | DeployedNetwork
    if isinstance(net, ResNet) and takes:
        fast = _deploy_resnet(net, inputs[0], mode, names, details)
    elif isinstance(net, AdaptiveBlock) and takes:
        fast = deploy_block(net, inputs[0], mode, names, details)
    else:
        fast = deploy_network(net, given, mode, names, details)
    modes = [mode or each.mode for each in net.modules() if isinstance(each, AdaptiveBlock)]
    _warn_of_dense(fast.report, modes, names)
    fast.report = replace(fast.report, busy=device == "cpu" and others.in_the_way())
    return fast


def _takes(net: nn.Module) -> str | None:
    """Return what a network or block that engines know is called with; None if they do not know it."""
    if (
        type(net) is ResNet
        and "forward" not in vars(net)
        and not is_watched(net, *net.children(), *net.blocks)
    ):
        return "images"
    ours = isinstance(net, AdaptiveBlock) and of_units(net) and not is_changed(net) and not is_watched(net)
    return "maps" if ours else None


def _warn_of_dense(report: Report, modes: Sequence[Mode], names: Sequence[str]) -> None:
    """Warn of the dense engine if nobody asked for it, or if a soft mode leaves no other."""
    *_, whole = report.measurements
    if whole.engine != "dense" and not {each.engine for each in report.measurements} <= {"dense", "blocks"}:
        return
    tried = {name for each in report.measurements for name in each.seconds} - {"dense", "blocks", "plain"}
    soft = [mode for mode in modes if not mode.hard]
    if soft and not tried:
        warnings.warn(
            f"expected a hard mode, in which halted work can be skipped, got {soft[0]}: the dense engine "
            'runs. deploy(model, example, mode="thresholded") skips',
            stacklevel=3,
        )
    elif "dense" not in names:
        warnings.warn(
            f"expected engines that can run it, got {', '.join(names) or 'none'}: the dense engine "
            f"runs. {'; '.join(report.notes)}",
            stacklevel=3,
        )


def _deploy_resnet(
    net: ResNet, example: Tensor, mode: Mode | None, names: Sequence[str], details: bool | None
) -> Deployed:
    for each in net.blocks:
        check_layers(each)
    blocks = [FoldedBlock(block, mode, details) for block in net.blocks]
    details_kept = [block.details for block in blocks]
    in_turn = BlockByBlock(net, [], details_kept)
    plain = BlockByBlock(net, [dense.build_plain(block) for block in blocks], details_kept)
    fast = Deployed(net, in_turn)
    check_example(fast, example)

    notes: Notes = {}  # in order, each once
    generators = generators_of(block.mode for block in blocks)
    chosen: list[Choice] = []
    refused: list[Notes] = []
    with running(example):
        builders = {n: partial(NETWORK_ENGINES[n], net, blocks) for n in names if n in NETWORK_ENGINES}
        whole = built({n: partial(tuned, build, example, run=True) for n, build in builders.items()}, notes)
        by_block = [name for name in names if name in ENGINES and name not in whole]
        u = in_turn.stem(example)
        for block in blocks:
            refused.append({})
            run, choice, (u, _) = choose(block, by_block, u, generators, refused[-1])
            in_turn.runners.append(run)
            chosen.append(choice)
        notes |= joined(refused)
        _, ponders = in_turn(example)
        networks: dict[str, Whole | BlockByBlock] = {
            **{n: _whole(network, in_turn, example, generators) for n, network in whole.items()},
            "blocks": in_turn,
            "plain": plain,
        }
        called = {name: as_called(each, example, generators) for name, each in networks.items()}
        total = interleaved({name: partial(each, example) for name, (each, _) in called.items()})
        best = min((name for name in networks if name != "plain"), key=total.__getitem__)
        fast.network, problem = called[best]
        if problem is not None:
            notes[problem] = None
        if best != "blocks":
            notes[f"{best} runs the network as a whole; by block is what it was compared with"] = None
    chosen.append(Choice(best, total, None))
    fast.report = Report(len(example), _measurements(net, chosen, ponders, example), [*notes])
    return fast


def _whole(network: Network, in_turn: BlockByBlock, example: Tensor, generators: Sequence[Any]) -> Whole:
    """Return the network as a whole, and by blocks for sizes that it does not know."""
    whole = Whole(network, in_turn)
    if whole.direct and example.device.type == "cuda" and not in_turn.waits:
        whole.in_turn = Graphed(in_turn, generators)  # of sizes that are yet to come
    return whole


def _measurements(
    net: ResNet, chosen: Sequence[Choice], ponders: Sequence[Ponder], example: Tensor
) -> list[Measurement]:
    count = flops_from_ponders(net, ponders, example.shape)
    flops = [*count.blocks.double().mean(0).tolist()]
    active = [float(p.steps.double().mean()) / net.config.units for p in ponders] or [1.0] * len(flops)
    rows, plain_total = [], 0.0
    for k, (best, seconds, shape) in enumerate(chosen):
        if shape is None:
            break
        plain = plain_flops(net.blocks[k], shape[2], shape[3])
        plain_total += plain
        rows.append(Measurement(str(k + 1), sizes_of(shape), best, active[k], seconds, flops[k], plain))
    mean = sum(active) / len(active)
    best, seconds, _ = chosen[-1]
    whole = Measurement("all", "", best, mean, seconds, sum(flops) + count.rest, plain_total + count.rest)
    return [*rows, whole]
