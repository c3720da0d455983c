"""torchpact report: one page about one or more runs."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

import torchpact
from torchpact_recipes.commands.common import Device, load_test, pick_device
from torchpact_recipes.outputs import check_file
from torchpact_recipes.report import gallery, measure, read_run, write_page

MOST_GALLERIES = 6


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, finished or not.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    data: Annotated[
        Path, typer.Option(help="Folder of CIFAR-10, or 'sample', whose test images are bundled.")
    ] = Path("sample"),
    timing: Annotated[bool, typer.Option(help="Whether to measure times, on this machine.")] = True,
    device: Device = "cpu",
) -> None:
    """Write one self-contained page: numbers, trade-offs, training curves, and where networks compute.

    Of runs whose weights are there it measures times and looks at test images; of others it shows the
    numbers. A run that is still training, or was interrupted, is shown as far as it has come.

    [dim]Example: torchpact report runs/plain runs/psact -o report.html[/dim]
    """
    place = pick_device(device)
    check_file(output)
    found = [read_run(run) for run in runs]
    test = load_test(data, place)
    galleries: list[dict[str, Any]] = []
    with Console(stderr=True).status("") as status:
        for index, one in enumerate(found):
            if one.model is None:
                continue
            model = one.model.to(place)
            if timing and one.values["results"]:
                status.update(f"measuring {escape(str(runs[index]))}")
                one.values["timing"] = measure(model, test, one.values["results"])
            if model.config.adaptive and len(galleries) < MOST_GALLERIES:
                status.update(f"looking into {escape(str(runs[index]))}")
                # a network that does not decide has no threshold to pass
                mode = "discrete" if one.values["method"] == "random" else None
                galleries.append(gallery(model, test, mode) | {"run": index})
    images = f"Hardest and easiest of {len(test)} test images of CIFAR-10."
    print(write_page(output, [one.values for one in found], galleries, made_by(images)))


def made_by(more: str) -> str:
    """The last line of a page."""
    versions = f"torchpact {torchpact.__version__}, torch {torch.__version__}"
    return f"Made by {versions}, {datetime.now():%Y-%m-%d %H:%M}. {more}"
