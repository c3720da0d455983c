"""torchpact evaluate: a checkpoint on the test set, in any mode."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from torchpact.commands.common import DataRoot, Device, load_data, pick_device
from torchpact.training.checkpoint import load_model
from torchpact.training.evaluate import evaluate_modes


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A .safetensors file of a run.")],
    mode: Annotated[
        list[str] | None, typer.Option(help="relaxed, discrete, thresholded or act; several if repeated.")
    ] = None,
    data: DataRoot = None,
    device: Device = "auto",
    precision: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    batch: Annotated[int | None, typer.Option(help="Images at a time.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the modes that sample.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Evaluate a checkpoint on the CIFAR-10 test set: accuracy, loss, FLOPs and steps.

    [dim]Example: torchpact evaluate runs/psact/last.safetensors --mode thresholded --mode discrete[/dim]
    """
    place = pick_device(device)
    model, config = load_model(checkpoint)
    _, test = load_data(data, place)
    modes = tuple(mode) if mode else config.modes
    measured = evaluate_modes(model.to(place), test, modes, precision=precision, batch=batch, seed=seed)
    if as_json:
        print(json.dumps(measured, indent=2))
        return
    table = Table(title=f"{checkpoint}, {len(test)} test images")
    for name in ("mode", "accuracy", "nll", "MFLOPs an image", "MFLOPs by block", "steps by block"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for name, m in measured.items():
        table.add_row(
            name,
            f"{m['accuracy']:.2%}",
            f"{m['nll']:.4f}",
            f"{m['flops'] / 1e6:.1f} ± {m['flops_std'] / 1e6:.1f}",
            "  ".join(f"{f / 1e6:.1f}" for f in m["block_flops"]),
            "  ".join(f"{s:.2f}" for s in m["steps"]) or "all",
        )
    Console().print(table)
