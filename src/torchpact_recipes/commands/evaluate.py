"""torchpact evaluate: a checkpoint on the test set, in any mode."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from torchpact.checks import check_count
from torchpact_recipes.commands.common import DataRoot, Device, Network, load_test, network_file, pick_device
from torchpact_recipes.commands.progress import result_lines
from torchpact_recipes.commands.train_sequences import load_test_text
from torchpact_recipes.data.cifar10_formats import CLASSES
from torchpact_recipes.training.checkpoint import is_of_sequences, load_network, load_sequence_model
from torchpact_recipes.training.evaluate import evaluate_modes
from torchpact_recipes.training.sequences import evaluate_sequences


def evaluate(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A run's folder or .safetensors file, a network of the zoo, or a folder of save_pretrained."
        ),
    ],
    mode: Annotated[
        list[str] | None, typer.Option(help="relaxed, discrete, thresholded or act; several if repeated.")
    ] = None,
    data: DataRoot = None,
    device: Device = "auto",
    precision: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    batch: Annotated[int | None, typer.Option(help="Images at a time.")] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the modes that sample, and of fresh examples of a task.")
    ] = 0,
    examples: Annotated[
        int | None, typer.Option(help="Of a task how many examples, of a text how many characters.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Evaluate a checkpoint: on the CIFAR-10 test set, fresh examples of its task, or the test text.

    [dim]Example: torchpact evaluate runs/psact/last.safetensors --mode thresholded --mode discrete[/dim]
    """
    place = pick_device(device)
    given, checkpoint = checkpoint, network_file(checkpoint)
    if is_of_sequences(checkpoint):
        if batch is not None or precision != "fp32":
            raise ValueError(f"{given}: expected --batch and --precision for a network for images only")
        measured = _on_sequences(checkpoint, mode, data, place, examples, seed)
        print(json.dumps(measured, indent=2) if as_json else result_lines({str(checkpoint): measured}))
        return
    if examples is not None:
        raise ValueError(f"{given}: expected --examples for a network for sequences only")
    network = Network(*load_network(checkpoint))
    model = network.model
    if mode and not model.config.adaptive:
        raise ValueError(f"{given}: expected no mode for a plain network, got {', '.join(mode)}")
    if model.config.classes != len(CLASSES):
        raise ValueError(f"{given}: expected a network of {len(CLASSES)} classes, got {model.config.classes}")
    test = load_test(data, place)
    modes = {name: network.mode(name) for name in mode or network.modes}
    watcher = Console(stderr=True)
    with Progress(console=watcher, transient=True, disable=not watcher.is_terminal) as bar:
        task = bar.add_task("test images", total=len(test) * (len(modes) if model.config.adaptive else 1))
        measured = evaluate_modes(
            model.to(place), test, modes,
            precision=precision, batch=batch, seed=seed, seen=partial(bar.advance, task),
        )  # fmt: skip
    if as_json:
        print(json.dumps(measured, indent=2))
        return
    # a line for each block, lest it be too wide for a terminal
    table = Table(title=f"{escape(str(given))}, {len(test)} test images", show_lines=True)
    for name in ("mode", "accuracy", "nll", "MFLOPs an image", "MFLOPs by block", "steps by block"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for name, m in measured.items():
        table.add_row(
            name,
            f"{m['accuracy']:.2%}",
            f"{m['nll']:.4f}",
            _millions(m["flops"], m["flops_std"]),
            "\n".join(map(_millions, m["block_flops"], m["block_flops_std"])),
            "\n".join(f"{s:.2f}" for s in m["steps"]) or "all",
        )
    Console().print(table)


def _millions(mean: float, deviation: float) -> str:
    return f"{mean / 1e6:.1f} ± {deviation / 1e6:.1f}"


def _on_sequences(
    checkpoint: Path,
    modes: list[str] | None,
    data: Path | None,
    place: torch.device,
    examples: int | None,
    seed: int,
) -> dict[str, dict[str, Any]]:
    if examples is not None:
        check_count("examples", examples)
    model, config = load_sequence_model(checkpoint)
    text = load_test_text(data, place) if config.is_text else None
    if text is not None:
        examples = examples or len(text) - 1
    chosen = tuple(modes) if modes else None
    return evaluate_sequences(model.to(place), config, text, modes=chosen, examples=examples, seed=seed)
