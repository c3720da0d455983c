"""The command line: one program, ``torchpact``."""

import inspect
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import torch
import typer

import torchpact
from torchpact.commands.bench import bench
from torchpact.commands.common import Interrupted
from torchpact.commands.data import app as data
from torchpact.commands.demo import demo
from torchpact.commands.evaluate import evaluate
from torchpact.commands.maps import maps
from torchpact.commands.report import report
from torchpact.commands.reproduce import reproduce
from torchpact.commands.train import train
from torchpact.commands.zoo import app as zoo
from torchpact.training import TrainingError

app = typer.Typer(
    help="Networks that decide how much to compute, per input and per position.",
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="rich",
)

# Typer brings its own copy of click, or uses the one installed, depending on its version
_UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main() -> None:
    """Run the program; a user's mistake ends in one line on standard error and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except _UsageError as error:
        _fail(error.format_message())
    except (ValueError, OSError, TrainingError) as error:
        _fail(str(error))
    except Interrupted as stop:
        _fail(str(stop), code=stop.code)
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", code=130)
    raise SystemExit(code)


def _fail(message: str, code: int = 2) -> NoReturn:
    print(f"torchpact: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"torchpact {torchpact.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _paragraphs(command: Callable[..., None]) -> str:
    """Its documentation with each paragraph in one line, to be broken where the terminal ends."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")


for _command in (demo, train, evaluate, maps, bench, report, reproduce):
    app.command(help=_paragraphs(_command))(_command)
app.add_typer(data, name="data")
app.add_typer(zoo, name="zoo")


if __name__ == "__main__":
    main()
