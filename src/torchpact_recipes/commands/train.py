"""torchpact train images | text | sequence: one network, or a sweep of them at once.

The options are the fields of the configurations that have a help text.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from typer.core import TyperGroup

from torchpact.models import ResNetConfig, SequenceConfig
from torchpact_recipes.commands.common import load_data, network_file, pick_device
from torchpact_recipes.commands.old_spelling import current_spelling
from torchpact_recipes.commands.options import options_of, with_options
from torchpact_recipes.commands.progress import TrainingProgress, result_lines
from torchpact_recipes.commands.train_sequences import sequence_trainers, sizes
from torchpact_recipes.outputs import check_folder
from torchpact_recipes.training import (
    SequenceTrainConfig,
    TrainConfig,
    Trainer,
    TrainingRun,
    distributed,
    preset,
    sequence_preset,
)
from torchpact_recipes.training.config import DISTILL
from torchpact_recipes.training.ensemble.images import form_ensembles
from torchpact_recipes.training.sequence_config import GENERATORS, RunConfig
from torchpact_recipes.training.settings import setting

R = TypeVar("R", bound="RunOptions")

NETWORKS = {"resnet32": 5, "resnet110": 18}
RESNET = {
    "per": "What decides: pixel (default) or image.",
    "group": "Pixels a side that share a decision.",
    "halting_norm": "Batch norm in the halting heads, as SACT.",
    "halting_bias": "Bias of the halting heads at first.",
}
RNN = {
    "cell": "rnn, gru or lstm.",
    "hidden": "Units of a layer.",
    "layers": "Layers.",
    "max_steps": "Most steps of the cell at a time step; repeat takes all.",
    "embedding": "Units of the linear layer that inputs enter by; 0 is for none.",
    "dropout": "Dropout between layers.",
    "halting_bias": "Bias of the halting units at first.",
}
DECIDING = (
    "tau", "tau_ramp", "free", "temperature", "clip", "group", "per", "head_lr", "halting_norm",
    "halting_bias", "validate_modes",
)  # fmt: skip
"""What only networks that decide have a use for."""
SWEEP = ("tau", "seed")

Out = Annotated[Path, typer.Argument(help="Folder for the run's files; a sweep gets one folder a run in it.")]


@dataclass(frozen=True)
class RunOptions:
    """Where a run is and what it begins with, beside its configuration."""

    preset: str = setting("tiny", "tiny (default), small or paper.")
    data: Path | None = setting(
        None, "Folder of the data set, if not the usual one; 'sample' is for a small one that is bundled."
    )
    device: str = setting("auto", "auto (default), cpu or cuda.")
    resume: bool = setting(False, "Continue what the folder holds.", flag=True)
    tensorboard: bool = setting(False, "Write the history for TensorBoard too.", flag=True)
    as_json: bool = setting(False, "Print the results as JSON.", option="json", flag=True)


@dataclass(frozen=True)
class ImageOptions(RunOptions):
    """The same for images."""

    preset: str = setting("fast", "paper, fast (default), strong or smoke.")
    network: str = setting("resnet32", "resnet32 (default), resnet110, or units a block.")
    warm_start: str | None = setting(
        None, "Plain network to start from: checkpoint, folder, name of the zoo; {seed} is filled in."
    )
    teacher: str | None = setting(
        None, "Plain network to learn from, in the same way, if not --warm-start's."
    )
    limit: int | None = setting(None, "Train on the first so many images only.", option="images")


class _Group(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and "--help" not in args:
            args = current_spelling(args)
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_Group, invoke_without_command=True)


@app.callback()
def _train(context: typer.Context) -> None:
    """Train a network on images, text or sequences, plain or adaptive; several taus or seeds at once.

    On several GPUs, which share each batch of images: torchrun --nproc-per-node=4 -m torchpact train images …

    [dim]Example: torchpact train images runs/psact --tau 0.01 --warm-start runs/plain/last.safetensors[/dim]

    [dim]Example: torchpact train sequence runs/parity --task parity --method act --tau 0.001[/dim]
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
@with_options(
    *options_of(ImageOptions, "Run"),
    *options_of(TrainConfig, "Training", repeated=SWEEP),
    *options_of(ResNetConfig, "Network", RESNET),
)
def images(out: Out, **settings: Any) -> None:
    """Train a ResNet on CIFAR-10, plain or adaptive.

    [dim]Example: torchpact train images runs/plain --method plain[/dim]
    """
    run, values = _parted(ImageOptions, settings)

    def trainers(place: torch.device) -> list[Trainer]:
        _refuse_unused(values)
        taus, seeds = (values.pop(name, None) for name in SWEEP)
        parts = {name: values.pop(name) for name in RESNET if name in values}
        adaptive = values.get("method") != "plain"
        values["network"] = ResNetConfig(units=_units(run.network), adaptive=adaptive, **parts)
        values.setdefault("precision", "bf16" if place.type == "cuda" else "fp32")
        if run.teacher is not None:
            values.setdefault("distill", DISTILL)
        base = preset(run.preset, **values)
        configs = [replace(base, tau=tau, seed=seed) for tau in taus or [base.tau] for seed in seeds or [0]]
        data = load_data(run.data, place, run.limit)
        made = []
        for config, folder in zip(configs, _folders(out, configs), strict=True):
            initial, teacher = (_network_of(name, config.seed) for name in (run.warm_start, run.teacher))
            made.append(
                Trainer(
                    config,
                    folder,
                    *data,
                    initial=initial,
                    teacher=teacher,
                    resume=run.resume,
                    tensorboard=run.tensorboard,
                )
            )
        if place.type == "cuda":  # those of one kind are trained by the same kernels
            form_ensembles([trainer.learner for trainer in made])
        return made

    _train_all(out, run, trainers)


@app.command()
@with_options(
    *options_of(RunOptions, "Run"),
    *(each for each in options_of(SequenceTrainConfig, "Training", repeated=SWEEP) if each.name != "beta"),
    *options_of(SequenceConfig, "Network", RNN),
)
def text(out: Out, **settings: Any) -> None:
    """Train a recurrent network to predict the next character of enwik8, plain or adaptive.

    [dim]Example: torchpact train text runs/text --preset small --tau 0.01[/dim]
    """
    _sequences(out, "enwik8", settings)


@app.command()
@with_options(
    *options_of(RunOptions, "Run"),
    *(each for each in options_of(SequenceTrainConfig, "Training", repeated=SWEEP) if each.name != "window"),
    *options_of(SequenceConfig, "Network", RNN),
)
def sequence(
    out: Out,
    task: Annotated[str, typer.Option(help=f"{', '.join(GENERATORS)}.")] = "parity",
    size: Annotated[
        list[str] | None, typer.Option(help="A size of the task, as max_digits=3; several if repeated.")
    ] = None,
    **settings: Any,
) -> None:
    """Train a recurrent network on one of the tasks of Graves' paper, plain or adaptive.

    [dim]Example: torchpact train sequence runs/parity --task parity --method act --tau 0.001[/dim]
    """
    _sequences(out, task, settings, size or [])


def _sequences(out: Path, task: str, settings: Mapping[str, Any], size: Sequence[str] = ()) -> None:
    run, values = _parted(RunOptions, settings)

    def trainers(place: torch.device) -> Sequence[TrainingRun[Any]]:
        _refuse_unused(values)
        if values.get("method") == "plain" and "max_steps" in values:
            raise ValueError("expected --max-steps where a cell may run more than once")
        taus, seeds = (values.pop(name, None) for name in SWEEP)
        prices = [{"tau": tau} for tau in taus or []] or [{}]
        configs = [
            sequence_preset(task, run.preset, **values, **sizes(task, size), **price, seed=seed)
            for price in prices
            for seed in seeds or [0]
        ]
        options = {"resume": run.resume, "tensorboard": run.tensorboard}
        return sequence_trainers(configs, _folders(out, configs), place, run.data, **options)

    _train_all(out, run, trainers)


def _train_all(
    out: Path, run: RunOptions, make: Callable[[torch.device], Sequence[TrainingRun[Any]]]
) -> None:
    """Train what is made on a device; print the results."""
    place = distributed.join(pick_device(run.device))
    if distributed.rank() == 0:
        check_folder(out)
    try:
        trainers = make(place)
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
        print(json.dumps(results, indent=2) if run.as_json else result_lines(results))


def _parted(kind: type[R], settings: Mapping[str, Any]) -> tuple[R, dict[str, Any]]:
    """Return the options of a run, and the settings of its configuration that were given, lists as tuples."""
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in settings.items()
        if value is not None and value != []
    }
    options: dict[str, Any] = {f.name: values.pop(f.name) for f in fields(kind) if f.name in values}
    return kind(**options), values


def _refuse_unused(values: Mapping[str, Any]) -> None:
    """Refuse settings that the method has no use for."""
    if values.get("method") in ("plain", "repeat"):
        for name in DECIDING:
            if name in values:
                option = "validate-mode" if name == "validate_modes" else name.replace("_", "-")
                raise ValueError(f"expected --{option} where a network decides")


def _units(network: str) -> int:
    if network in NETWORKS:
        return NETWORKS[network]
    if not (network.isascii() and network.isdecimal() and len(network) < 5):
        raise ValueError(f"expected a network among {', '.join(NETWORKS)}, or a number; got {network!r:.80}")
    return int(network)


def _network_of(name: str | None, seed: int) -> Path | None:
    """The checkpoint that is named, perhaps one for each seed."""
    return None if name is None else network_file(name.replace("{seed}", str(seed)))


def _folders(out: Path, configs: Sequence[RunConfig]) -> list[Path]:
    if len(configs) == 1:
        return [out]
    names = [_name(config) for config in configs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"expected every price and seed once, got {name} {names.count(name)} times")
    return [out / name for name in names]


def _name(config: RunConfig) -> str:
    tau = "" if config.method in ("plain", "repeat") else f"-tau{config.tau:g}"
    return f"{config.method}{tau}-seed{config.seed}"
