"""torchpact bench: deployed networks beside the best dense alternative of the same run."""

import csv
import io
import json
import os
import platform
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from torchpact.checks import check_count, check_number
from torchpact.files import write_whole
from torchpact.models import ResNetConfig
from torchpact_recipes.bench.blobs import with_blobs
from torchpact_recipes.bench.dense import plain_config
from torchpact_recipes.bench.figure import draw
from torchpact_recipes.bench.rows import BlockBench, BottleneckBench, NetworkBench, Row, Setting
from torchpact_recipes.commands.common import Device, Interrupted, Network, find_network, pick_device
from torchpact_recipes.data import load_sample, standardize
from torchpact_recipes.outputs import check_folder

NETWORKS = {"resnet32": 5, "resnet110": 18, "resnet50": 0}
"""The units of a block; that of bottlenecks, for images of 224 pixels, has its own."""
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARES = [0.1, 0.25, 0.5, 0.75, 1.0]
QUICK_SHARES = [0.25, 0.5, 1.0]
# what a device is used for: blocks of a CIFAR ResNet, and wider ones on larger maps
PLANS = {
    ("cpu", True): {"block": ["16x32", "64x8"], "batch": [1, 16], "network": ["resnet32"]},
    ("cpu", False): {
        "block": ["16x32", "32x16", "64x8", "64x56", "128x28", "256x14"],
        "batch": [1, 64],
        "network": ["resnet32", "resnet110"],
    },
    ("cuda", True): {"block": ["64x56", "128x28", "256x14"], "batch": [64], "network": ["resnet32"]},
    ("cuda", False): {
        "block": ["16x32", "32x16", "64x8", "64x56", "128x28", "256x14", "512x7"],
        "batch": [1, 64, 1024],
        "network": ["resnet32", "resnet110", "resnet50"],
    },
}


def bench(
    block: Annotated[
        list[str] | None,
        typer.Option(help="Blocks of channels x size of the maps, such as 64x56, or none; repeated."),
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(help="resnet32, resnet110, resnet50 or none; repeated."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Networks, named as for evaluate, which decide on the bundled test images; repeated."
        ),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch sizes; repeated.")] = None,
    active: Annotated[list[float] | None, typer.Option(help="Shares of active pixels; repeated.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16; without it bf16 on a GPU, else fp32.")
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Try torch.compile; by default unless --quick."),
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Of measuring, for each row.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few rows: about a minute on a CPU.")] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the results.")] = Path("bench"),
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Measure what deploy gains: blocks and networks, deployed, beside the best dense alternative.

    Active pixels are blobs of the given share, after the first unit of each block. Networks return logits
    and steps, without the probabilities that a dense one has not (deploy with details=False). "of theory"
    is the measured speed-up divided by what FLOPs promise. Writes bench.csv as it goes on and then, of what
    was measured with blobs, bench.png and bench.pdf; of --model alone nothing is drawn.

    [dim]Example: torchpact bench --quick -o out[/dim]
    """
    place = pick_device(device)
    plan: dict[str, Any] = PLANS[place.type, quick]
    shares = [check_number("active", share, 0, 1, open_low=True) for share in active or []]
    shares = shares or (QUICK_SHARES if quick else SHARES)
    batches = [check_count("batch", size) for size in batch or plan["batch"]]
    blocks = _blocks(plan["block"] if block is None and not model else block or [])
    networks = _networks(plan["network"] if network is None and not model else network or [])
    if not (blocks or networks or model):
        raise ValueError("expected a block, a network or a model to measure, got none of them")
    check_folder(output)
    trained = [(name, find_network(name)) for name in model or []]
    precision = precision or ("bf16" if place.type == "cuda" else "fp32")
    if precision not in PRECISIONS:
        raise ValueError(f"expected a precision of {', '.join(PRECISIONS)}; got {precision!r}")
    setting = Setting(
        place,
        PRECISIONS[precision],
        check_number("seconds", seconds or (0.5 if quick else 5.0), 0, open_low=True),
        not quick if compiled is None else compiled,
    )
    rows: list[Row] = []
    title = f"{_name(place)}, {precision}"
    console = Console(stderr=True)
    if place.type == "cpu" and _busy():
        title += ", while other programs ran"
        console.print("other programs keep this machine busy: what is measured now means little")
    with console.status("measuring"):
        try:
            for row in _measure(setting, blocks, networks, trained, batches, shares):
                rows.append({**row, "precision": precision})
                console.print(_line(row), markup=False, highlight=False)
                _write_csv(output / "bench.csv", rows)
        except KeyboardInterrupt:
            kept = f"{output / 'bench.csv'} has {len(rows)} rows" if rows else "no row was measured"
            raise Interrupted(f"stopped; {kept}", signal.SIGINT) from None
    files = [str(output / "bench.csv"), *map(str, _draw(rows, output, title, console))]
    if as_json:
        print(json.dumps({"device": title, "rows": rows, "files": files}, indent=2))
        return
    print("\n".join([title, _table(rows), *files]))


def _measure(
    setting: Setting,
    blocks: Sequence[tuple[int, int]],
    networks: Sequence[int],
    trained: Sequence[tuple[str, Network]],
    batches: Sequence[int],
    shares: Sequence[float],
) -> Iterator[Row]:
    """Measure row by row; dense alternatives are made once for all rows of a shape."""
    known: dict[object, NetworkBench] = {}

    def of(config: ResNetConfig, images: torch.Tensor) -> NetworkBench:
        key = plain_config(config), images.shape
        if key not in known:
            known[key] = NetworkBench(setting, config, images)
        return known[key]

    for batch in batches:
        known.clear()
        for channels, size in blocks:
            one = BlockBench(setting, channels, size, batch)
            yield from (one.row(share) for share in shares)
        for units in networks:
            if not units:
                large = BottleneckBench(setting, batch)
                yield from (large.row(share) for share in shares)
                continue
            config = ResNetConfig(units=units)
            whole = of(config, torch.zeros(batch, 3, 32, 32))
            for share in shares:
                yield whole.row(f"blobs {share:.0%}", *with_blobs(config, batch, share))
        for name, network in trained:
            model, mode = network.model, network.mode("thresholded")
            images = standardize(load_sample("test").images).repeat(-(-batch // 500), 1, 1, 1)[:batch]
            if model.config.image_size != images.size(2):
                raise ValueError(f"{name}: expected a network for images of {images.size(2)} pixels")
            yield of(model.config, images).row(f"trained, {network.recipe}", model, images, mode=mode)


def _draw(rows: Sequence[Row], folder: Path, title: str, console: Console) -> list[Path]:
    if not any("blobs" in row["masks"] for row in rows):
        return []
    try:
        return draw(rows, folder, title)
    except ValueError as error:  # matplotlib is an extra
        console.print(f"no figure: {error}", markup=False, highlight=False, soft_wrap=True)
        return []


def _blocks(names: Sequence[str]) -> list[tuple[int, int]]:
    return [_block(name) for name in names if name != "none"]


def _block(name: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9][0-9]{0,8})[x×]([1-9][0-9]{0,8})", name)
    if found is None:
        raise ValueError(f"expected a block as channels x size, such as 64x56, or none; got {name!r}")
    return int(found[1]), int(found[2])


def _networks(names: Sequence[str]) -> list[int]:
    for name in names:
        if name not in (*NETWORKS, "none"):
            raise ValueError(f"expected networks among {', '.join(NETWORKS)} and none; got {name!r}")
    return [NETWORKS[name] for name in names if name != "none"]


def _busy() -> bool:
    """Whether others have been using more than half a core of late, where the system tells."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.processor() or platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"


def _line(row: Row) -> str:
    return (
        f"{row['work']}, batch {row['batch']}, {row['masks']}: {row['speedup']} × by {row['engine']}, "
        f"{row['of_theory']} of theory"
    )


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.getvalue().encode(errors="backslashreplace"))


def _table(rows: Sequence[Row]) -> str:
    """Return a line for every row; what is slower than dense is marked."""
    columns = {
        "work": "work",
        "batch": "batch",
        "masks": "masks",
        "engine": "engine",
        "best_dense": "best dense",
        "best_dense_ms": "ms",
        "deployed_ms": "deployed ms",
        "speedup": "faster",
        "flops_speedup": "by FLOPs",
        "of_theory": "of theory",
        "deployed_MiB": "deployed MiB",
        "plain_MiB": "plain MiB",
    }
    lines = [[*columns.values()], *([str(row.get(key, "")) for key in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    marks = ["", *("  slower" if row["speedup"] < 0.97 else "" for row in rows)]
    return "\n".join((text + mark).rstrip() for text, mark in zip(texts, marks, strict=True))
