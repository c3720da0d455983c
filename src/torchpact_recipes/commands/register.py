"""How the commands of the recipes get onto the command line of torchpact: by an entry point."""

import inspect
import re
from collections.abc import Callable
from typing import Any

from torchpact_recipes.commands.adapt import adapt
from torchpact_recipes.commands.bench import bench
from torchpact_recipes.commands.data import app as data
from torchpact_recipes.commands.demo import demo
from torchpact_recipes.commands.diagnose import diagnose
from torchpact_recipes.commands.evaluate import evaluate
from torchpact_recipes.commands.maps import maps
from torchpact_recipes.commands.report import report
from torchpact_recipes.commands.reproduce import reproduce
from torchpact_recipes.commands.train import app as train
from torchpact_recipes.commands.zoo import app as zoo


def register(app: Any) -> None:
    """Add all commands to a Typer application."""
    for command in (demo, diagnose, adapt, evaluate, maps, bench, report, reproduce):
        app.command(help=_paragraphs(command))(command)
    app.add_typer(train, name="train")
    app.add_typer(data, name="data")
    app.add_typer(zoo, name="zoo")


def _paragraphs(command: Callable[..., None]) -> str:
    """Its documentation with each paragraph in one line, to be broken where the terminal ends."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")
