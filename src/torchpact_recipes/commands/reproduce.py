"""torchpact reproduce: the figures and tables of the paper."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torchpact_recipes.commands.common import DataRoot, Device, load_data, pick_device
from torchpact_recipes.commands.progress import TrainingProgress
from torchpact_recipes.commands.train_sequences import load_texts
from torchpact_recipes.data import Images
from torchpact_recipes.experiments import (
    EXPERIMENTS,
    FIRST,
    SCALES,
    AnyRun,
    Archive,
    Run,
    Scale,
    make,
    missing,
)
from torchpact_recipes.experiments.rnn_runs import SequenceRun
from torchpact_recipes.outputs import check_folder
from torchpact_recipes.training import TrainingError


def reproduce(
    what: Annotated[list[str], typer.Argument(help=f"{', '.join(EXPERIMENTS)}; or all.")],
    scale_name: Annotated[str, typer.Option("--scale", help="smoke, fast or paper.")] = "fast",
    seed: Annotated[
        list[int] | None,
        typer.Option("--seed", "--seeds", help="Instead of the scale's; several, if given so."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Train only runs with such names, and what they start from: '*relaxed-tau0.01*'; repeated."
        ),
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results"),
    work: Annotated[Path, typer.Option(help="Folder of unfinished runs, and of weights.")] = Path("runs"),
    together: Annotated[int, typer.Option(help="How many networks to train at once.")] = 10,
    data: DataRoot = None,
    device: Device = "auto",
    list_only: Annotated[
        bool, typer.Option("--list", help="Only list the runs, and which are missing.")
    ] = False,
    draw_only: Annotated[
        bool, typer.Option("--draw-only", help="Train nothing: draw from the runs that are finished.")
    ] = False,
) -> None:
    """Reproduce figures and tables of the paper: train what is missing, then draw.

    Runs are made once: what is in the results folder is used, and what was begun goes on.

    [dim]Example: torchpact reproduce fig5 --scale smoke[/dim]
    """
    if scale_name not in SCALES:
        raise ValueError(f"expected a scale among {', '.join(SCALES)}; got {scale_name!r}")
    names = [*dict.fromkeys([*FIRST, *EXPERIMENTS])] if "all" in what else what
    for name in names:
        if name not in EXPERIMENTS:
            raise ValueError(f"expected experiments among {', '.join(EXPERIMENTS)}, or all; got {name!r}")
    scale = SCALES[scale_name]
    archive = Archive(results / scale.name, work / scale.name)
    seeds = {name: seed or EXPERIMENTS[name].seeds(scale) for name in names}
    groups = [[*EXPERIMENTS[name].runs(scale, seeds[name])] for name in names]
    if only:
        groups = _named(groups, only)
    runs = [run for group in groups for run in group]
    todo = missing(runs, archive)
    if list_only:
        undone = {run.name for run in todo}
        for run_name, run in {run.name: run for run in runs + todo}.items():
            lacking = "missing" if archive.record(run) is None else "no weights"  # which others start from
            print(f"{lacking if run_name in undone else 'finished':10}  {run_name}")
        return
    check_folder(results / scale.name / "figures")
    if todo and not draw_only:
        check_folder(work / scale.name)
    archive.recover(runs)
    problems: list[str] = []
    if not draw_only:
        problems += _make_all(names, groups, archive, scale, data, device, together)
    made: list[Path] = []
    for name in names:
        _say_what_is_missing(name, EXPERIMENTS[name].runs(scale, seeds[name]), archive)
        try:
            paths = EXPERIMENTS[name].draw(archive, scale, seeds[name], results / scale.name / "figures")
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        made += paths
        for path in paths:
            print(path)
    wanted = {run.name: run for run in runs}.values()
    finished = sum(archive.record(run) is not None for run in wanted)
    # tables have no runs of their own: they are made from whatever there is
    _say(f"{len(made)} files" + (f", from {finished} of {len(wanted)} runs" if wanted else ""))
    for problem in problems[:-1]:
        _say(problem)
    if problems:
        raise TrainingError(f"{problems[-1]}; all else is made and kept" if made else problems[-1])


def _make_all(
    names: Sequence[str],
    groups: Sequence[Sequence[AnyRun]],
    archive: Archive,
    scale: Scale,
    root: Path | None,
    device: str,
    together: int,
) -> list[str]:
    """Make what is missing, by the trainers or by what an experiment has; return what went wrong."""
    problems = []
    own = {name: make for name in names if (make := EXPERIMENTS[name].make) is not None}
    others = [group for name, group in zip(names, groups, strict=True) if name not in own]
    if todo := missing([run for group in others for run in group], archive):
        problems += _train(others, todo, archive, scale, root, device, together)
    for name, group in zip(names, groups, strict=True):
        if name in own and group:
            try:
                own[name](group, archive, scale, root, _say)
            except (ValueError, OSError) as error:
                problems.append(f"{name}: {error}")
    return problems


def _say_what_is_missing(name: str, runs: Sequence[AnyRun], archive: Archive) -> None:
    """In a line, of what is drawn from some of its runs only."""
    wanted = dict.fromkeys(run.name for run in runs)
    lacking = [*dict.fromkeys(run.name for run in runs if archive.record(run) is None)]
    if lacking and len(lacking) < len(wanted):
        few = ", ".join(lacking[:3]) + (", …" if len(lacking) > 3 else "")
        _say(f"{name}: {len(wanted) - len(lacking)} of {len(wanted)} runs; missing: {few}")


def _say(line: str) -> None:
    """Beside what is printed for others to read."""
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def _named(groups: Sequence[Sequence[AnyRun]], patterns: Sequence[str]) -> list[list[AnyRun]]:
    """Return the runs whose names match one of the patterns; every pattern has to match a run."""
    for pattern in patterns:
        if not any(fnmatchcase(run.name, pattern) for group in groups for run in group):
            raise ValueError(f"expected --only to match a name that --list shows, got {pattern!r}")
    return [
        [run for run in group if any(fnmatchcase(run.name, pattern) for pattern in patterns)]
        for group in groups
    ]


def _train(
    groups: Sequence[Sequence[AnyRun]],
    todo: Sequence[AnyRun],
    archive: Archive,
    scale: Scale,
    root: Path | None,
    device: str,
    together: int,
) -> list[str]:
    """Train the missing runs; return what went wrong."""
    if scale.images and root is None:
        root = Path("sample")
    place, train, test, texts = pick_device(device), None, None, None
    if any(isinstance(run, Run) for run in todo):
        # results of a scale are those of its own images: none are to be had from the sample instead
        train, test = load_data(root, place, or_sample=False)
        if scale.images:
            train, test = (Images(d.images[: scale.images], d.labels[: scale.images]) for d in (train, test))
    if any(isinstance(run, SequenceRun) and run.config.is_text for run in todo):
        texts = load_texts(root, place)
    iterations = sum(run.config.iterations for run in todo)
    with TrainingProgress(iterations, goes_on="the same command goes on") as progress:
        return make(
            groups, archive, train, test,
            texts=texts, device=place, together=together, train_all=progress.train,
        )  # fmt: skip
