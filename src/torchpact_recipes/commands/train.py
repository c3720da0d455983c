"""torchpact train: one network, or a sweep of them at once."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from torchpact.models import ResNetConfig
from torchpact_recipes.commands.common import DataRoot, Device, load_data, network_file, pick_device
from torchpact_recipes.commands.progress import TrainingProgress
from torchpact_recipes.commands.results import result_lines
from torchpact_recipes.commands.train_sequences import sequence_configs, sequence_trainers, sizes
from torchpact_recipes.outputs import check_folder
from torchpact_recipes.training import (
    SequenceTrainConfig,
    TrainConfig,
    Trainer,
    TrainingLoop,
    distributed,
    preset,
)
from torchpact_recipes.training.config import DISTILL
from torchpact_recipes.training.ensemble.images import form_ensembles
from torchpact_recipes.training.sequence_config import TASKS

NETWORKS = {"resnet32": 5, "resnet110": 18}
IMAGES, SEQUENCES = "Images only", "Sequences only"


def train(
    out: Annotated[
        Path, typer.Argument(help="Folder for the run's files; a sweep gets one folder a run in it.")
    ],
    task: Annotated[
        str | None, typer.Option(help=f"{', '.join(TASKS)}: sequences instead of images.", show_default=False)
    ] = None,
    method: Annotated[
        str,
        typer.Option(help="plain, relaxed, reinforce, act or random; for sequences also repeat and ponder."),
    ] = "relaxed",
    preset_name: Annotated[
        str | None,
        typer.Option(
            "--preset", help="paper, fast, strong or smoke (fast); for sequences tiny, small or paper (tiny)."
        ),
    ] = None,
    tau: Annotated[list[float] | None, typer.Option(help="Price of a step; several make a sweep.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Several make a sweep.")] = None,
    iterations: Annotated[int | None, typer.Option(help="Instead of the preset's.")] = None,
    batch: Annotated[int | None, typer.Option(help="Instead of the preset's.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate, instead of the preset's.")] = None,
    temperature: Annotated[float | None, typer.Option(help="λ of the relaxation.")] = None,
    validate_every: Annotated[int | None, typer.Option(help="Iterations between validations.")] = None,
    validate_mode: Annotated[
        list[str] | None,
        typer.Option(
            help="Mode to validate in: relaxed, discrete, thresholded or act; several if repeated, the best "
            "checkpoint being chosen by the first.",
            rich_help_panel=IMAGES,
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(help="resnet32 (default), resnet110, or units a block.", rich_help_panel=IMAGES),
    ] = None,
    warm_start: Annotated[
        str | None,
        typer.Option(
            help="Plain network to start from: checkpoint, folder, name of the zoo; {seed} is filled in.",
            rich_help_panel=IMAGES,
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            help="Plain network to learn from, likewise, if not --warm-start's.",
            rich_help_panel=IMAGES,
        ),
    ] = None,
    distill: Annotated[
        float | None,
        typer.Option(
            help=f"How much the teacher counts, from 0 to 1; with --teacher {DISTILL}.",
            rich_help_panel=IMAGES,
        ),
    ] = None,
    clip: Annotated[
        float | None,
        typer.Option(help="δ, below which a relaxed position is skipped.", rich_help_panel=IMAGES),
    ] = None,
    group: Annotated[
        int | None, typer.Option(help="Pixels a side that share a decision.", rich_help_panel=IMAGES)
    ] = None,
    per: Annotated[
        str | None, typer.Option(help="What decides: pixel (default) or image.", rich_help_panel=IMAGES)
    ] = None,
    head_lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate of halting heads, in times of the others' (1).", rich_help_panel=IMAGES
        ),
    ] = None,
    halting_norm: Annotated[
        bool | None,
        typer.Option(
            "--halting-norm", help="Batch norm in the halting heads, as SACT.", rich_help_panel=IMAGES
        ),
    ] = None,
    random_steps: Annotated[
        list[float] | None,
        typer.Option(
            help="Mean steps of a block decided by lot, by --method random; once for each block.",
            rich_help_panel=IMAGES,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="fp32 or bf16; bf16 on a GPU by default.", rich_help_panel=IMAGES),
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic", help="The same bits every time on a GPU too; slower.", rich_help_panel=IMAGES
        ),
    ] = None,
    images: Annotated[
        int | None, typer.Option(help="Train on the first so many images only.", rich_help_panel=IMAGES)
    ] = None,
    cell: Annotated[str | None, typer.Option(help="rnn, gru or lstm.", rich_help_panel=SEQUENCES)] = None,
    hidden: Annotated[int | None, typer.Option(help="Units of a layer.", rich_help_panel=SEQUENCES)] = None,
    layers: Annotated[int | None, typer.Option(help="Layers.", rich_help_panel=SEQUENCES)] = None,
    max_steps: Annotated[
        int | None,
        typer.Option(
            help="Most steps of the cell at a time step; repeat takes all.", rich_help_panel=SEQUENCES
        ),
    ] = None,
    beta: Annotated[
        float | None, typer.Option(help="Weight of PonderNet's prior.", rich_help_panel=SEQUENCES)
    ] = None,
    free: Annotated[
        float | None,
        typer.Option(help="Share of training before steps cost anything.", rich_help_panel=SEQUENCES),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            help="A size of the task, as max_digits=3; several if repeated.", rich_help_panel=SEQUENCES
        ),
    ] = None,
    data: DataRoot = None,
    device: Device = "auto",
    resume: Annotated[bool, typer.Option(help="Continue what the folder holds.")] = False,
    tensorboard: Annotated[bool, typer.Option(help="Write the history for TensorBoard too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Train a network on CIFAR-10, or on sequences, plain or adaptive; several taus or seeds at once.

    On several GPUs, which share each batch of images: torchrun --nproc-per-node=4 -m torchpact train ...

    [dim]Example: torchpact train runs/psact --tau 0.01 --warm-start runs/plain/last.safetensors[/dim]

    [dim]Example: torchpact train runs/parity --task parity --method act --tau 0.001[/dim]
    """
    place = distributed.join(pick_device(device))
    common: dict[str, Any] = {
        "method": method,
        "iterations": iterations,
        "batch": batch,
        "lr": lr,
        "temperature": temperature,
        "validate_every": validate_every,
    }
    of_images: dict[str, Any] = {
        "network": network,
        "warm_start": warm_start,
        "teacher": teacher,
        "distill": DISTILL if teacher is not None and distill is None else distill,
        "clip": clip,
        "group": group,
        "per": per,
        "head_lr": head_lr,
        "halting_norm": halting_norm,
        "precision": precision,
        "deterministic": deterministic,
        "images": images,
        "random_steps": random_steps or None,
        "validate_mode": validate_mode or None,
    }
    of_sequences: dict[str, Any] = {
        "cell": cell,
        "hidden": hidden,
        "layers": layers,
        "max_steps": max_steps,
        "beta": beta,
        "free": free,
        "size": size,
    }
    options = {"resume": resume, "tensorboard": tensorboard}
    if distributed.rank() == 0:
        check_folder(out)
    try:
        trainers: Sequence[TrainingLoop[Any]]
        if method in ("plain", "repeat"):
            decides = {"tau": tau, "temperature": temperature, "clip": clip, "group": group, "per": per}
            heads = {"head_lr": head_lr, "halting_norm": halting_norm}
            others = {"free": free, "validate_mode": validate_mode or None}
            _refuse(decides | heads | others, "where a network decides")
        if task is None:
            _refuse(of_sequences, "with --task only")
            trainers = _image_trainers(
                out, place, preset_name or "fast", tau, seed, common, of_images, data, options
            )
        else:
            _refuse(of_images, "without --task only")
            if method == "plain":
                _refuse({"max_steps": max_steps}, "where a cell may run more than once")
            del of_sequences["size"]
            settings = common | of_sequences | sizes(task, size or [])
            configs = sequence_configs(task, preset_name, tau, seed, settings)
            trainers = sequence_trainers(configs, _folders(out, configs), place, data, **options)
        for trainer in trainers:
            for note in trainer.notes:
                print(note, file=sys.stderr)
        with TrainingProgress(goes_on="the same command with --resume goes on") as progress:
            progress.train(trainers)
    except distributed.FirstFailed:
        raise SystemExit(2) from None  # the first process says why
    first = distributed.rank() == 0
    distributed.leave()
    if first:
        results = {str(trainer.files.folder): trainer.results for trainer in trainers}
        print(json.dumps(results, indent=2) if as_json else result_lines(results))


def _image_trainers(
    out: Path,
    place: torch.device,
    preset_name: str,
    taus: list[float] | None,
    seeds: list[int] | None,
    common: dict[str, Any],
    given: dict[str, Any],
    data: Path | None,
    options: dict[str, Any],
) -> list[Trainer]:
    network = given["network"] or "resnet32"
    units = NETWORKS.get(network)
    if units is None:
        if not (network.isascii() and network.isdecimal() and len(network) < 5):
            raise ValueError(
                f"expected a network among {', '.join(NETWORKS)}, or a number; got {network!r:.80}"
            )
        units = int(network)
    parts = {k: given[k] for k in ("per", "group", "halting_norm") if given[k] is not None}
    settings = common | {
        **{name: given[name] for name in ("clip", "distill", "head_lr")},
        "precision": given["precision"] or ("bf16" if place.type == "cuda" else "fp32"),
        "deterministic": given["deterministic"],
        "random_steps": given["random_steps"] and tuple(given["random_steps"]),
        "validate_modes": given["validate_mode"] and tuple(given["validate_mode"]),
        "network": ResNetConfig(units=units, adaptive=common["method"] != "plain", **parts),
    }
    base = preset(preset_name, **{k: v for k, v in settings.items() if v is not None})
    configs = [replace(base, tau=t, seed=s) for t in taus or [base.tau] for s in seeds or [0]]
    train_set, test_set = load_data(data, place, given["images"])
    start, teacher = given["warm_start"], given["teacher"]
    trainers = [
        Trainer(
            config,
            folder,
            train_set,
            test_set,
            initial=_network_of(start, config.seed),
            teacher=_network_of(teacher, config.seed),
            **options,
        )
        for config, folder in zip(configs, _folders(out, configs), strict=True)
    ]
    if place.type == "cuda":  # those of one kind are trained by the same kernels
        form_ensembles([trainer.learner for trainer in trainers])
    return trainers


def _network_of(name: str | None, seed: int) -> Path | None:
    """The checkpoint that is named, perhaps one for each seed."""
    return None if name is None else network_file(name.replace("{seed}", str(seed)))


def _refuse(options: dict[str, Any], where: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"expected --{name.replace('_', '-')} {where}")


def _folders(out: Path, configs: Sequence[TrainConfig | SequenceTrainConfig]) -> list[Path]:
    if len(configs) == 1:
        return [out]
    names = [_name(config) for config in configs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"expected every price and seed once, got {name} {names.count(name)} times")
    return [out / name for name in names]


def _name(config: TrainConfig | SequenceTrainConfig) -> str:
    tau = "" if config.method in ("plain", "repeat") else f"-tau{config.tau:g}"
    return f"{config.method}{tau}-seed{config.seed}"
