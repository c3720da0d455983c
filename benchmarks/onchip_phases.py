"""Where the time of the on-chip engine's kernels goes: cycles of the phases of a unit, by clocks in them.

    python benchmarks/onchip_phases.py [NETWORK] [--batch 1024] [--data FOLDER] [--tune]
        [--cut BLOCK:FIELD=VALUE]... [--out FILE.csv]

NETWORK is a name of the zoo, a checkpoint or a run's folder. In bfloat16, on images of the bundled sample or
on the test images in FOLDER: for the network, for the same one ``never`` halting, and for the plain one of
equal depth, a row a block. It has microseconds of the kernel (a CUDA graph of it, replayed), what it takes of
a multiprocessor (``ctas`` fit one), the mean steps of a pixel, a digest of the outputs' bits, whether a
second run gave the same, and for every phase the mean cycles of a warp in a unit that was run; ``cycles`` is
their sum. ``…_wait`` is for other warps, at a barrier. What comes before and after the units is left out.

Below, a row for every unit of an adaptive block: the share of CTAs that ran it; in these, the share of active
pixels; the share of CTAs that made new lists of them; and cycles. Only the first ``STAMPED`` CTAs take part,
of a kernel that is compiled with TORCHPACT_STAMPS; the one that is timed is not.

Plans are the likeliest, or with ``--tune`` those that are fastest with these images. ``--cut 3:ahead=3``
changes a field of the plan of the third block of the adaptive networks, for experiments.
"""

import argparse
import ctypes
import hashlib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_timing import called
from onchip import never_halting, on_chip_kernels
from table import write_csv
from torch import Tensor

from torchpact.core.overrides import use_mode
from torchpact.core.ponder import Ponder
from torchpact.engines.conv.onchip.calls import Args, Call, Weights
from torchpact.engines.conv.onchip.driver import LoadedBlock, load
from torchpact.engines.conv.onchip.nvrtc import compile_block
from torchpact.engines.conv.onchip.plan import Plan
from torchpact.engines.graphs import replayed
from torchpact.models import ResNet
from torchpact_recipes.bench.dense import plain_net
from torchpact_recipes.commands.common import find_network, load_test
from torchpact_recipes.data import as_input, load_sample

STAMPS, STAMPED = 12, 528
"""In a unit; CTAs that take them. See ``stamps.cuh``."""

PHASES = (
    *("lists", "lists_wait", "conv1", "conv1_wait", "conv2", "conv2_wait"),
    *("decide", "refresh", "refresh_wait"),
)
"""Between stamps; a unit begins with the first. Heads add with ``conv2``, for who halted with ``conv1``."""


class Cut(NamedTuple):
    """A change of a block's plan."""

    block: int
    field: str
    value: int


def parse_cut(text: str) -> Cut:
    found = re.fullmatch(r"([0-9]+):([a-z_]+)=([0-9]+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected BLOCK:FIELD=VALUE, got {text!r}")
    known = [field.name for field in fields(Plan)]
    if found[2] not in known:
        raise argparse.ArgumentTypeError(f"expected a field of {', '.join(known)}; got {found[2]!r}")
    return Cut(int(found[1]), found[2], int(found[3]))


def cut_plans(plans: Sequence[Plan], cuts: Sequence[Cut]) -> list[Plan]:
    """Return the plans of all blocks, changed."""
    found = list(plans)
    for block, field, value in cuts:
        if not 1 <= block <= len(found):
            raise ValueError(f"expected a block of 1 to {len(found)}, got {block}")
        kind = type(getattr(found[block - 1], field))
        found[block - 1] = replace(found[block - 1], **{field: kind(value)})
    return found


class Phases:
    """Cycles by CTA, unit and phase, and which units were run and which made lists, by CTA.

    ``stamps`` are (ctas, units, STAMPS, warps), 0 where there is none: a phase that was left out takes no
    time, and the next one that was not begins where it would have.
    """

    def __init__(self, stamps: Tensor) -> None:
        self.ran, self.listed = ((stamps[:, :, end] > 0).all(2) for end in (6, 1))
        last, taken = stamps[:, :, 0], []
        for now in stamps.unbind(2)[1 : len(PHASES) + 1]:
            now = torch.where(now > 0, now, last)
            taken.append((now - last).double().mean(2))
            last = now
        self.cycles = torch.stack(taken, 2)

    def mean(self, units: slice = slice(None)) -> dict[str, int]:
        """Return the mean cycles of phases, of all times that these units were run."""
        means = self.cycles[:, units][self.ran[:, units]].mean(0)
        by_name = dict(zip(PHASES, means.tolist(), strict=True))
        by_name["cycles"] = sum(by_name.values())
        return {name: round(value) for name, value in by_name.items()}

    def by_unit(self, steps: Tensor, plan: Plan) -> Iterator[dict[str, Any]]:
        """Return a row for every unit that was run; ``steps`` are those of pixels, by image."""
        ctas, units = self.ran.shape
        cta = torch.arange(len(steps)) // plan.images * plan.cluster
        known, cta = steps[cta < ctas].flatten(1), cta[cta < ctas]
        for unit in range(units):
            ran = self.ran[:, unit]
            if not ran.any():
                return
            row: dict[str, Any] = {"unit": unit + 1, "ran": round(ran.double().mean().item(), 3)}
            row["active"] = round((known[ran[cta]] > unit).double().mean().item(), 3)
            row["listed"] = round((self.listed[:, unit] & ran).double().mean().item(), 3)
            yield row | self.mean(slice(unit, unit + 1))


class StampedArgs(Args):
    """The argument of a kernel with stamps."""

    _fields_ = (("stamps", ctypes.c_void_p),)


def stamped_code(plan: Plan) -> bytes:
    major, minor = torch.cuda.get_device_capability()
    return compile_block(plan, f"sm_{major}{minor}", TORCHPACT_STAMPS=1)


def measure_phases(plan: Plan, code: bytes, weights: Weights, u: Tensor) -> Phases:
    """Run a block with stamps, the second time for good."""
    stamps = torch.zeros(STAMPED, weights.units, STAMPS, plan.warps, dtype=torch.int64, device=u.device)
    kernel = LoadedBlock(plan, code, u.device)

    def run(args: Args, ctas: int) -> None:
        more = StampedArgs(stamps=stamps.data_ptr())
        ctypes.memmove(ctypes.addressof(more), ctypes.addressof(args), ctypes.sizeof(Args))
        kernel(more, ctas)

    call = Call([(plan, run, weights)], u)
    call(u)
    stamps.zero_()
    call(u)
    return Phases(stamps[: -(-len(u) // plan.images) * plan.cluster].cpu())


def digest(output: Tensor, ponders: Sequence[Ponder]) -> str:
    parts = [output.view(torch.int16), *(ponder.steps.to(torch.uint8) for ponder in ponders)]
    data = b"".join(part.contiguous().cpu().numpy().tobytes() for part in parts)
    return hashlib.sha256(data).hexdigest()[:8]


def rows_of(label: str, net: ResNet, images: Tensor, tune: bool, cuts: list[Cut]) -> Iterator[dict[str, Any]]:
    with use_mode(net, "thresholded"):
        engine = on_chip_kernels(net)
    if tune:
        engine.choose(images)
    batch, _, height, width = images.shape
    chosen = [plan for plan, _ in engine.prepare(height, width, batch)]
    plans = cut_plans(chosen, cuts if net.config.adaptive else [])
    with ThreadPoolExecutor(8) as pool:  # each takes seconds to compile
        kernels = list(pool.map(partial(load, device=images.device), plans))
        codes = list(pool.map(stamped_code, plans))
    stages, u = list(zip(plans, kernels, engine.weights, strict=True)), images
    for number, (stage, code) in enumerate(zip(stages, codes, strict=True)):
        plan, kernel, weights = stage
        call = Call([stage], u)
        taken = min(called(replayed(partial(call, u), u.device), seconds=0.1) for _ in range(3))
        (output, ponders), again = call(u), call(u)
        bits, place = digest(output, ponders), {"network": label, "block": number + 1}
        row: dict[str, Any] = place | {"batch": batch, "images_a_cta": plan.images, "warps": plan.warps}
        row |= {"us": round(taken, 1)} | kernel.describe()
        steps = [ponder.steps.double().mean().item() for ponder in ponders]
        row |= {"steps": round(steps[0], 4) if steps else weights.units}
        row |= {"digest": bits, "same": bits == digest(*again)}
        phases = measure_phases(plan, code, weights, u)
        yield row | phases.mean()
        if ponders:
            yield from (place | each for each in phases.by_unit(ponders[0].steps.cpu(), plan))
        u = output
    whole = Call(stages, images)
    taken = min(called(partial(whole, images), seconds=0.1) for _ in range(3))
    yield {"network": label, "block": "all", "batch": batch, "us": round(taken, 1)}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="where the time of the on-chip engine goes")
    parser.add_argument("network", nargs="?", default="resnet110-tau0.005")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tune", action="store_true", help="take the plans that are fastest")
    parser.add_argument("--cut", type=parse_cut, action="append", default=[], metavar="BLOCK:FIELD=VALUE")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    own = find_network(arguments.network).model.eval().cuda().bfloat16()
    if not own.config.adaptive:
        parser.error(f"expected an adaptive network, got a plain one ({arguments.network})")
    cuda = torch.device("cuda")
    data = load_test(arguments.data, cuda) if arguments.data else load_sample("train", cuda)
    chosen = torch.arange(arguments.batch, device=cuda) % len(data)  # again from the first, if there are few
    images = as_input(data.images[chosen]).bfloat16().contiguous(memory_format=torch.channels_last)
    plain = plain_net(own.config).eval().cuda().bfloat16()
    rows: list[dict[str, Any]] = []
    for label, net in {"adaptive": own, "never": never_halting(own), "plain": plain}.items():
        for row in rows_of(label, net, images, arguments.tune, arguments.cut):
            if not rows or row.keys() != rows[-1].keys():
                print(*row, sep="\t")
            print(*row.values(), sep="\t", flush=True)
            rows.append(row)
            if arguments.out:
                write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
