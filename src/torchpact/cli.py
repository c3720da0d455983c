"""The command line: one program, ``torchpact``, whose commands other distributions register.

A distribution adds commands by an entry point of the group ``torchpact.commands``: a function that is given
the Typer application. torchpact-recipes has ``train``, ``evaluate``, ``demo`` and others.
"""

import codecs
import io
import os
import sys
import traceback
from typing import Annotated, Any, NoReturn

import torch

import torchpact
from torchpact.checks import one_line
from torchpact.plugins import RECIPES, CommandError, plugins

try:
    import typer
except ImportError:  # the command line is an extra
    typer = None  # type: ignore[assignment]

INTERRUPTED = 128 + 2
TRACEBACK = "--traceback"
PLAIN = {"±": "+-", "×": "x", "−": "-", "…": "...", "τ": "tau", "←": "<-"}
"""What stands for characters where a terminal cannot show them."""


def main() -> None:
    """Run the program; a mistake, or whatever else ends it, is one line on standard error.

    The exit status is 2 for a mistake of the user's, 1 for an unexpected error, and 128 plus the
    number of a signal. With ``--traceback`` or TORCHPACT_TRACEBACK=1 the line comes after a traceback.
    """
    prepare_terminal()
    if typer is None:
        _fail("expected the packages of the command line to be installed: pip install 'torchpact[cli]'")
    # Typer brings its own copy of click, or uses the one installed, depending on its version
    usage: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    arguments = [each for each in sys.argv[1:] if each != TRACEBACK]  # wherever it stands
    in_full = len(arguments) < len(sys.argv) - 1 or os.environ.get("TORCHPACT_TRACEBACK", "0") != "0"
    code: Any = 0
    try:
        code = make_app()(arguments, standalone_mode=False)
        sys.stdout.flush()
    except Exception as error:
        if in_full:
            traceback.print_exc()
        if isinstance(error, usage):
            missing = "" if plugins("torchpact.commands") else f"; commands come with others: {RECIPES}"
            _fail(f"{error.format_message()}{missing}")
        _end(error)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:  # Typer returns it without a word
        _fail("interrupted; what was being written is not there, or as it was before", code=INTERRUPTED)
    raise SystemExit(code)


def prepare_terminal() -> None:
    """Let nothing that is printed fail: what a stream cannot encode is escaped, file names pass as bytes."""
    codecs.register_error("torchpact", _encode)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="torchpact")
    columns = os.environ.get("COLUMNS", "80")
    if not (columns.isascii() and columns.isdecimal() and len(columns) < 6 and int(columns)):
        del os.environ["COLUMNS"]  # of none, nothing would be shown


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
        traceback: Annotated[
            bool, typer.Option(TRACEBACK, help="Show the traceback of an error, too; stands anywhere.")
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


def _end(error: Exception) -> NoReturn:
    """End the program for an error."""
    if isinstance(error, CommandError):
        _fail(str(error), code=error.code)
    if isinstance(error, typer.Abort):
        _fail("aborted")
    if isinstance(error, BrokenPipeError):  # a pager was closed: no one reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + 13)
    if isinstance(error, (ValueError, OSError)):
        _fail(str(error))
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)):
        _fail(f"expected sizes for which there is memory: {one_line(error)}")
    _fail(f"{type(error).__name__}: {one_line(error)}", code=1, more=f" ({TRACEBACK} shows where)")


def _fail(message: str, code: int = 2, more: str = "") -> NoReturn:
    print(f"torchpact: {one_line(message)}{more}", file=sys.stderr)
    raise SystemExit(code)


def _encode(error: UnicodeError) -> tuple[str | bytes, int]:
    """What is written for characters that a stream cannot encode."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff":  # a byte of a file name, as Python reads it
        return bytes([ord(character) - 0xDC00]), error.start + 1
    return PLAIN.get(character) or character.encode("unicode_escape").decode(), error.start + 1


def _version(wanted: bool) -> None:
    if wanted:
        print(f"torchpact {torchpact.__version__}, torch {torch.__version__}")
        raise typer.Exit


if __name__ == "__main__":
    main()
