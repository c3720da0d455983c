"""torchpact evaluate: a checkpoint on the test set, in any mode."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from torchpact.commands.common import DataRoot, Device, load_test, network_file, pick_device
from torchpact.commands.results import result_lines
from torchpact.commands.train_sequences import load_test_text
from torchpact.training.checkpoint import is_of_sequences, load_model, load_sequence_model
from torchpact.training.evaluate import evaluate_modes
from torchpact.training.sequence_trainer import evaluate_sequences


def evaluate(
    checkpoint: Annotated[
        Path, typer.Argument(help="A run's folder or .safetensors file, or a network of the zoo.")
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
        measured = _on_sequences(checkpoint, mode, data, place, examples, seed)
        print(json.dumps(measured, indent=2) if as_json else result_lines({str(checkpoint): measured}))
        return
    model, config = load_model(checkpoint)
    if mode and not model.config.adaptive:
        raise ValueError(f"{given}: expected no mode for a plain network, got {', '.join(mode)}")
    test = load_test(data, place)
    modes = tuple(mode) if mode else config.modes
    measured = evaluate_modes(model.to(place), test, modes, precision=precision, batch=batch, seed=seed)
    if as_json:
        print(json.dumps(measured, indent=2))
        return
    table = Table(title=f"{given}, {len(test)} test images")
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


def _on_sequences(
    checkpoint: Path,
    modes: list[str] | None,
    data: Path | None,
    place: torch.device,
    examples: int | None,
    seed: int,
) -> dict[str, dict[str, Any]]:
    model, config = load_sequence_model(checkpoint)
    text = load_test_text(data, place) if config.is_text else None
    if text is not None:
        examples = examples or len(text) - 1
    chosen = tuple(modes) if modes else None
    return evaluate_sequences(model.to(place), config, text, modes=chosen, examples=examples, seed=seed)
