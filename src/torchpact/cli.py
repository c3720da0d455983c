"""The command line: one program, ``torchpact``, whose commands other distributions register.

A distribution adds commands by an entry point of the group ``torchpact.commands``: a function that is given
the Typer application. torchpact-recipes has ``train``, ``evaluate``, ``demo`` and others.
"""

import sys
from typing import Annotated, Any, NoReturn

import torch

import torchpact
from torchpact.plugins import RECIPES, CommandError, plugins

try:
    import typer
except ImportError:  # the command line is an extra
    typer = None  # type: ignore[assignment]


def main() -> None:
    """Run the program; a user's mistake ends in one line on standard error and exit code 2."""
    if typer is None:
        _fail("expected the packages of the command line to be installed: pip install 'torchpact[cli]'")
    app = make_app()
    # Typer brings its own copy of click, or uses the one installed, depending on its version
    usage: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    try:
        code = app(standalone_mode=False)
    except usage as error:
        hint = (
            "" if plugins("torchpact.commands") else f"; commands come with another distribution: {RECIPES}"
        )
        _fail(error.format_message() + hint)
    except CommandError as error:
        _fail(str(error), code=error.code)
    except (ValueError, OSError) as error:
        _fail(str(error))
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", code=130)
    raise SystemExit(code)


def make_app() -> Any:
    """Return the Typer application with the commands of all installed distributions."""
    app = typer.Typer(
        help="Networks that decide how much to compute, per input and per position.",
        pretty_exceptions_enable=False,
        invoke_without_command=True,
        add_completion=False,
        rich_markup_mode="rich",
    )
    registered = plugins("torchpact.commands")

    @app.callback()
    def options(
        context: typer.Context,
        version: Annotated[
            bool,
            typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit."),
        ] = False,
    ) -> None:
        if context.invoked_subcommand is not None:
            return
        if not registered:
            raise CommandError(f"expected a distribution with commands, found none: {RECIPES}")
        print(context.get_help())

    for register in registered:
        register(app)
    return app


def _fail(message: str, code: int = 2) -> NoReturn:
    print(f"torchpact: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"torchpact {torchpact.__version__}, torch {torch.__version__}")
        raise typer.Exit


if __name__ == "__main__":
    main()
