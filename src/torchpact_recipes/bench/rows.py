"""One row of the benchmark: a block or a network, deployed and dense, in turns."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchpact import Mode, count_flops, use_mode
from torchpact.core.call_args import CallArgs
from torchpact.engines import ENGINES, Deployed, Runner, Unsupported, deploy
from torchpact.engines.conv.folded import folded_units
from torchpact.engines.graphs import Graphed, repeatable
from torchpact.engines.registry import names_among
from torchpact.engines.timing import in_turns, interleaved
from torchpact.flops import flops_from_ponders, max_flops
from torchpact.flops.conv import conv_block_flops, plain_conv_flops
from torchpact.models import ResNet, ResNetConfig
from torchpact.specs import block_spec
from torchpact_recipes.bench.blobs import block_with_blobs
from torchpact_recipes.bench.bottleneck import PlainBottlenecks, bottlenecks_with_blobs
from torchpact_recipes.bench.dense import FoldedNet, dense_alternatives, plain_net
from torchpact_recipes.bench.memory import peak_memory

Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Where and how long to measure."""

    device: torch.device
    dtype: torch.dtype
    seconds: float
    compiling: bool


class BlockBench:
    """A block of five units with a decision for every pixel, at any share of active pixels."""

    def __init__(self, setting: Setting, channels: int, size: int, batch: int) -> None:
        self.setting, self.shape = setting, (channels, size, batch)
        block, u = self._make(1.0)
        spec = block_spec(block)
        plain, folded = nn.Sequential(*block.steps), nn.Sequential(*folded_units(spec))
        self.dense = dense_alternatives(plain, folded, u, setting.compiling)
        self.flops = plain_conv_flops(spec, size, size)

    def _make(self, active: float) -> Any:
        block, u = block_with_blobs(*self.shape, active)
        return block.to(self.setting.device, self.setting.dtype), u.to(
            self.setting.device, self.setting.dtype
        )

    @torch.no_grad()
    def row(self, active: float) -> Row:
        """Measure at a share of active pixels."""
        channels, size, batch = self.shape
        block, u = self._make(active)
        runners = runners_of(block, u, self.setting.compiling)
        engines = {name: repeatable(run, u, host_sync=run.host_sync) for name, run in runners.items()}
        seconds = interleaved(engines, seconds=self.setting.seconds / 4)
        best = min(engines, key=seconds.__getitem__)
        calls = {**self.dense, "deployed": engines[best]}
        times = in_turns(calls, seconds=self.setting.seconds, least=5, most=400)
        _, ponder = block(u)
        flops = float(conv_block_flops(block_spec(block), ponder.steps, size, size).double().mean())
        row = {"work": f"{channels}×{size}×{size}", "batch": batch, "masks": f"blobs {active:.0%}"}
        row |= {"active": round(float(ponder.steps.double().mean()) / block.max_steps, 3), "engine": best}
        return row | _speeds(times, [*self.dense], self.flops / flops, batch)


class NetworkBench:
    """A ResNet, and its plain alternatives."""

    def __init__(self, setting: Setting, config: ResNetConfig, example: Tensor) -> None:
        self.setting = setting
        plain = plain_net(config).to(setting.device, setting.dtype)
        self.plain_flops = max_flops(plain, example.shape)
        self.given = self._images(example).clone()
        self.dense = dense_alternatives(plain, FoldedNet(plain), self.given, setting.compiling, called=True)
        self.plain = plain

    def _images(self, images: Tensor) -> Tensor:
        images = images.to(self.setting.device, self.setting.dtype)
        return images.contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def row(
        self,
        masks: str,
        model: ResNet,
        images: Tensor,
        engines: Sequence[str] = (),
        memory: bool = True,
        mode: Mode | str = "thresholded",
    ) -> Row:
        """Measure a network deployed in thresholded mode; ``engines`` are timed by themselves, too."""
        model, images = model.to(self.setting.device, self.setting.dtype), self._images(images)
        self.given.copy_(images)  # to the dense ones
        # details would be what a plain network has not: logits, steps and costs are returned
        fast = deploy(model, images, mode=mode, details=False)
        ours: dict[str, Callable[[], object]] = {"deployed": partial(fast, images)}
        for name in engines:
            only = deploy(model, images, mode=mode, engines=[name], details=False)
            if {each.engine for each in only.report.measurements} == {name, "blocks"}:
                ours[name] = partial(only, images)
        times = in_turns({**self.dense, **ours}, seconds=self.setting.seconds, least=5, most=400)
        _, ponders = fast(images)
        flops = float(flops_from_ponders(model, ponders, images.shape).mean)
        used = dict.fromkeys(each.engine for each in fast.report.measurements[:-1])
        whole = fast.report.measurements[-1]
        row = {"work": f"ResNet-{model.config.layers}", "batch": len(images), "masks": masks}
        row |= {"active": round(whole.active, 3)}
        row |= {"engine": "+".join(used) if whole.engine == "blocks" else whole.engine}
        row |= _speeds(times, [*self.dense], self.plain_flops / flops, len(images))
        row |= {f"{name}_ms": _ms(times[name]) if name in times else "" for name in engines}
        return row | (self._memory(model, fast, images) if memory else {})

    def _memory(self, model: ResNet, fast: Deployed, images: Tensor) -> Row:
        """Peaks of the plain network, of the adaptive one by mode, and of the deployed one, in MiB."""
        device = self.setting.device
        # a graph holds its memory from the start: what runs in it is looked at
        network = fast.network.network if isinstance(fast.network, Graphed) else fast.network
        peaks = {"plain": peak_memory(lambda: self.plain(images), device)}
        for mode in ("thresholded", "act"):
            with use_mode(model, mode, details=False):
                peaks[mode] = peak_memory(lambda: model(images), device)
        peaks["deployed"] = peak_memory(lambda: network(images), device)
        return {f"{name}_MiB": round(peak / 2**20, 2) for name, peak in peaks.items()}


class BottleneckBench:
    """A network much like ResNet-50 for large images, run block by block by the fastest engines.

    ``settings`` are those of :func:`bottlenecks_with_blobs`.
    """

    def __init__(self, setting: Setting, batch: int, **settings: Any) -> None:
        self.setting, self.batch, self.settings = setting, batch, settings
        net, images = self._make(1.0)
        plain, folded = PlainBottlenecks(net, folded=False), PlainBottlenecks(net, folded=True)
        self.flops = float(count_flops(plain, images[:1]).mean)
        self.dense = dense_alternatives(plain, folded, images, setting.compiling)
        # before and after the blocks, where nothing adapts; weights are those of every network that is made
        self.enter: Callable[[Tensor], Tensor] = plain.enter
        self.leave: Callable[[Tensor], Tensor] = plain.leave
        if setting.compiling:
            self.enter, self.leave = (
                torch.compile(part, mode="max-autotune-no-cudagraphs" if images.is_cuda else None)
                for part in (plain.enter, plain.leave)
            )

    def _make(self, active: float) -> Any:
        net, images = bottlenecks_with_blobs(self.batch, active, **self.settings)
        images = images.to(self.setting.device, self.setting.dtype)
        net = net.to(self.setting.device, self.setting.dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
        return net, images.contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def row(self, active: float) -> Row:
        """Measure at a share of active pixels."""
        net, images = self._make(active)
        u = self.enter(images)
        chosen: dict[int, tuple[str, Runner]] = {}
        _, ponders = net(images)
        ran = [float(p.steps.double().mean()) / b.max_steps for p, b in zip(ponders, net.blocks, strict=True)]
        for index, block in enumerate(net.blocks):
            runners = runners_of(block, u)  # compiling four blocks would take minutes
            calls = {name: repeatable(run, u, host_sync=run.host_sync) for name, run in runners.items()}
            seconds = interleaved(calls, seconds=self.setting.seconds / 8)
            best = min(calls, key=seconds.__getitem__)
            chosen[index] = best, runners[best]
            u, _ = block(u)

        def deployed(images: Tensor) -> Tensor:
            u: Any = self.enter(images)
            for _, run in chosen.values():
                u, _ = run(u)
            return self.leave(u)

        waits = any(run.host_sync for _, run in chosen.values())
        calls = {**self.dense, "deployed": repeatable(deployed, images, host_sync=waits)}
        times = in_turns(calls, seconds=self.setting.seconds, least=5, most=400)
        row: Row = {"work": "ResNet-50-like", "batch": self.batch, "masks": f"blobs {active:.0%}"}
        row |= {"active": round(statistics.mean(ran), 3)}
        row |= {"engine": "+".join(dict.fromkeys(name for name, _ in chosen.values()))}
        theory = self.flops / float(count_flops(net, images).mean)
        return row | _speeds(times, [*self.dense], theory, self.batch)


def runners_of(block: nn.Module, u: Tensor, compiling: bool = False) -> dict[str, Runner]:
    """Return what can run a block, by engine, and if ``compiling`` those that take long to build, too."""
    found: dict[str, Runner] = {}
    spec, call = block_spec(block), CallArgs((u,))
    asked = [name for name, engine in ENGINES.items() if engine.on_request] if compiling else []
    for name in [*names_among(None, u.device.type), *asked]:
        if ENGINES[name].supports(spec, call) is not None:
            continue
        try:
            runner = ENGINES[name].build(spec, call)
            runner.tune(u, CallArgs())
        except Unsupported:
            continue
        found[name] = runner
    return found


def _speeds(times: Mapping[str, list[float]], dense: Sequence[str], theory: float, batch: int) -> Row:
    """Return how fast what is deployed is beside the best dense one, and percentiles for single images."""
    ours = times["deployed"]
    best = min(dense, key=lambda name: statistics.median(times[name]))
    speedup = statistics.median(times[best]) / statistics.median(ours)
    row: Row = {
        "best_dense": best,
        "best_dense_ms": _ms(times[best]),
        "deployed_ms": _ms(ours),
        "speedup": round(speedup, 2),
        "flops_speedup": round(theory, 2),
        "of_theory": round(speedup / theory, 2),
    }
    for percent in (50, 90, 99):
        row[f"p{percent}_ms"] = round(1e3 * percentile(ours, percent), 3) if batch == 1 else ""
    return row


def _ms(times: Sequence[float]) -> float:
    return round(1e3 * statistics.median(times), 3)


def percentile(times: Sequence[float], percent: int) -> float:
    """Return the least time that so many percent do not exceed.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 50)
    2.0
    """
    return sorted(times)[max(0, -(-len(times) * percent // 100) - 1)]
