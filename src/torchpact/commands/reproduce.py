"""torchpact reproduce: the figures and tables of the paper."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torchpact.commands.common import DataRoot, Device, load_data, pick_device
from torchpact.commands.progress import TrainingProgress
from torchpact.data import Images
from torchpact.experiments import EXPERIMENTS, SCALES, Archive, make, missing
from torchpact.training import TrainingError


def reproduce(
    what: Annotated[list[str], typer.Argument(help=f"{', '.join(EXPERIMENTS)}; or all.")],
    scale_name: Annotated[str, typer.Option("--scale", help="smoke, fast or paper.")] = "fast",
    seed: Annotated[
        list[int] | None, typer.Option(help="Instead of the scale's; several, if given so.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results"),
    work: Annotated[Path, typer.Option(help="Folder of unfinished runs, and of weights.")] = Path("runs"),
    together: Annotated[int, typer.Option(help="How many networks to train at once.")] = 10,
    data: DataRoot = None,
    device: Device = "auto",
    list_only: Annotated[
        bool, typer.Option("--list", help="Only list the runs, and which are missing.")
    ] = False,
) -> None:
    """Reproduce figures and tables of the paper: train what is missing, then draw.

    Runs are made once: what is in the results folder is used, and what was begun goes on.

    [dim]Example: torchpact reproduce fig5 --scale smoke[/dim]
    """
    if scale_name not in SCALES:
        raise ValueError(f"expected a scale among {', '.join(SCALES)}; got {scale_name!r}")
    names = list(EXPERIMENTS) if what == ["all"] else what
    for name in names:
        if name not in EXPERIMENTS:
            raise ValueError(f"expected experiments among {', '.join(EXPERIMENTS)}, or all; got {name!r}")
    scale = SCALES[scale_name]
    archive = Archive(results / scale.name, work / scale.name)
    seeds = seed or list(range(scale.seeds))
    runs = [run for name in names for run in EXPERIMENTS[name].runs(scale, seeds)]
    todo = missing(runs, archive)
    if list_only:
        for run in {run.name: run for run in runs + todo}.values():
            print(f"{'missing ' if run in todo else 'finished'}  {run.name}")
        return
    if todo:
        root = Path("sample") if scale.images and data is None else data
        train, test = load_data(root, pick_device(device))
        if scale.images:
            train, test = (Images(d.images[: scale.images], d.labels[: scale.images]) for d in (train, test))
        with TrainingProgress(sum(run.config.iterations for run in todo)) as progress:
            problems = make(runs, archive, train, test, together=together, train_all=progress.train)
        for problem in problems:
            Console(stderr=True).print(problem, highlight=False)
        if problems:
            raise TrainingError(f"{len(problems)} of the runs could not be made; the others are kept")
    for name in names:
        for path in EXPERIMENTS[name].draw(archive, scale, seeds, results / scale.name):
            print(path)
