"""torchpact zoo: the pretrained networks, and how more of them are made."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from torchpact_recipes import zoo
from torchpact_recipes.commands.common import DataRoot, Device, load_test, pick_device
from torchpact_recipes.model_card import markdown
from torchpact_recipes.outputs import check_folder
from torchpact_recipes.publishing import add_entry

app = typer.Typer(invoke_without_command=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


@app.callback()
def entries(context: typer.Context, as_json: AsJson = False) -> None:
    """List the pretrained networks that come with the package, and what was measured of them.

    A name can stand wherever a checkpoint can.

    [dim]Example: torchpact zoo, then torchpact evaluate resnet32-tau0.01[/dim]
    """
    if context.invoked_subcommand is not None:
        return
    found = zoo.entries()
    if as_json:
        print(json.dumps([{"name": e.name, "config": e.config, **e.card} for e in found], indent=2))
        return
    images = sorted({m["images"] for entry in found for m in entry.card["results"].values()})
    measured = f"measured on {' or '.join(f'{n:,}' for n in images)} test images of CIFAR-10"
    table = Table(caption=f"{measured}; torchpact zoo show NAME prints the card")
    for name in ("name", "mode", "accuracy", "MFLOPs", "size"):
        table.add_column(name, justify="left" if name in ("name", "mode") else "right", no_wrap=True)
    for entry in found:
        name, size = entry.name, f"{entry.path.stat().st_size / 1e6:.1f} MB"
        for mode, m in entry.card["results"].items():
            table.add_row(name, mode, f"{m['accuracy']:.2%}", f"{m['flops'] / 1e6:.1f}", size)
            name = size = ""
    Console().print(table)


@app.command()
def show(name: Annotated[str, typer.Argument(help="A network of the zoo.")], as_json: AsJson = False) -> None:
    """Print the model card of a network.

    [dim]Example: torchpact zoo show resnet32-tau0.01[/dim]
    """
    entry = zoo.find(name)
    print(
        json.dumps({"name": name, "config": entry.config, **entry.card}, indent=2)
        if as_json
        else markdown(entry)
    )


@app.command()
def add(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    name: Annotated[
        str, typer.Option(help="What to call it, after the network: tau0.01, sact-tau0.01, plain.")
    ],
    note: Annotated[str, typer.Option(help="What else the card should say of how it was trained.")] = "",
    into: Annotated[Path, typer.Option(help="Folder of the zoo.")] = zoo.FOLDER,
    data: DataRoot = None,
    device: Device = "auto",
) -> None:
    """Make an entry of a finished run: weights, measured anew on the test images of --data, and a model card.

    One of the same name is replaced. Weights are stored in half precision where accuracy stays within
    0.05 points in every mode that draws nothing.

    [dim]Example: torchpact zoo add runs/psact --name tau0.01[/dim]
    """
    check_folder(into)
    entry = add_entry(run, name, load_test(data, pick_device(device)), into, note=note)
    for mode, m in entry.card["results"].items():
        print(f"{entry.name}  {mode:<11}  accuracy {m['accuracy']:.2%}  {m['flops'] / 1e6:.1f} MFLOPs")
    print(f"{entry.path}  {entry.path.stat().st_size / 1e6:.2f} MB")
