"""torchpact train: one network, or a sweep of them at once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from torchpact.commands.common import DataRoot, Device, load_data, pick_device
from torchpact.commands.progress import TrainingProgress
from torchpact.models.config import Per, ResNetConfig
from torchpact.training import TrainConfig, Trainer, distributed, preset

NETWORKS = {"resnet32": 5, "resnet110": 18}


def train(
    out: Annotated[
        Path, typer.Argument(help="Folder for the run's files; a sweep gets one folder a run in it.")
    ],
    network: Annotated[str, typer.Option(help="resnet32, resnet110, or units a block.")] = "resnet32",
    method: Annotated[str, typer.Option(help="plain, relaxed, reinforce or act.")] = "relaxed",
    preset_name: Annotated[str, typer.Option("--preset", help="paper, fast or smoke.")] = "fast",
    tau: Annotated[list[float] | None, typer.Option(help="Price of a step; several make a sweep.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Several make a sweep.")] = None,
    warm_start: Annotated[
        str | None, typer.Option(help="Checkpoint of a plain network to start from; {seed} is filled in.")
    ] = None,
    iterations: Annotated[int | None, typer.Option(help="Instead of the preset's.")] = None,
    batch: Annotated[int | None, typer.Option(help="Instead of the preset's.")] = None,
    temperature: Annotated[float | None, typer.Option(help="λ of the relaxation.")] = None,
    clip: Annotated[float | None, typer.Option(help="δ, below which a relaxed position is skipped.")] = None,
    group: Annotated[int, typer.Option(help="Pixels a side that share a decision.")] = 1,
    per: Annotated[str, typer.Option(help="What decides: pixel or image.")] = "pixel",
    halting_norm: Annotated[bool, typer.Option(help="Batch norm in the halting heads, as SACT.")] = False,
    validate_every: Annotated[int | None, typer.Option(help="Iterations between validations.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16; bf16 on a GPU by default.")] = None,
    deterministic: Annotated[
        bool, typer.Option(help="The same bits every time on a GPU too; slower.")
    ] = False,
    data: DataRoot = None,
    images: Annotated[int | None, typer.Option(help="Train on the first so many images only.")] = None,
    device: Device = "auto",
    resume: Annotated[bool, typer.Option(help="Continue what the folder holds.")] = False,
    tensorboard: Annotated[bool, typer.Option(help="Write the history for TensorBoard too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Train a network on CIFAR-10, plain or adaptive; several taus or seeds are trained at once.

    On several GPUs, which share each batch: torchrun --nproc-per-node=4 -m torchpact train ...

    [dim]Example: torchpact train runs/psact --tau 0.01 --warm-start runs/plain/last.safetensors[/dim]
    """
    place = distributed.join(pick_device(device))
    units = NETWORKS.get(network)
    if units is None:
        if not network.isdigit():
            raise ValueError(f"expected a network among {', '.join(NETWORKS)}, or a number; got {network!r}")
        units = int(network)
    settings: dict[str, Any] = {
        "iterations": iterations,
        "batch": batch,
        "temperature": temperature,
        "clip": clip,
        "validate_every": validate_every,
        "precision": precision or ("bf16" if place.type == "cuda" else "fp32"),
        "deterministic": deterministic,
        "method": method,
        "network": ResNetConfig(
            units=units,
            adaptive=method != "plain",
            per=cast(Per, per),
            group=group,
            halting_norm=halting_norm,
        ),
    }
    base = preset(preset_name, **{k: v for k, v in settings.items() if v is not None})
    configs = [replace(base, tau=t, seed=s) for t in tau or [base.tau] for s in seed or [0]]
    folders = [out] if len(configs) == 1 else [out / _name(config) for config in configs]
    train_set, test_set = load_data(data, place, images)
    try:
        trainers = [
            Trainer(
                config,
                folder,
                train_set,
                test_set,
                resume=resume,
                initial=None if warm_start is None else Path(warm_start.format(seed=config.seed)),
                tensorboard=tensorboard,
            )
            for config, folder in zip(configs, folders, strict=True)
        ]
        for trainer in trainers:
            for note in trainer.notes:
                Console(stderr=True).print(note, highlight=False)
        with TrainingProgress() as progress:
            progress.train(trainers)
    except distributed.FirstFailed:
        raise SystemExit(2) from None  # the first process says why
    first = distributed.rank() == 0
    distributed.leave()
    if first:
        results = {str(folder): trainer.results for folder, trainer in zip(folders, trainers, strict=True)}
        print(json.dumps(results, indent=2) if as_json else _table(results))


def _name(config: TrainConfig) -> str:
    tau = "" if config.method == "plain" else f"-tau{config.tau:g}"
    return f"{config.method}{tau}-seed{config.seed}"


def _table(results: dict[str, Any]) -> str:
    lines = []
    for folder, modes in results.items():
        for mode, measured in modes.items():
            steps = " ".join(f"{s:.2f}" for s in measured["steps"])
            lines.append(
                f"{folder}  {mode:<11}  accuracy {measured['accuracy']:.2%}  "
                f"{measured['flops'] / 1e6:.1f} ± {measured['flops_std'] / 1e6:.1f} MFLOPs"
                + (f"  steps {steps}" if steps else "")
            )
    return "\n".join(lines)
