"""torchpact adapt: a network learns to meet a budget on a user's own texts or images, and a report of it."""

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor, nn

import torchpact as tp
from torchpact.files import write_whole
from torchpact_recipes.commands.diagnose import is_image_network, pixels_of
from torchpact_recipes.commands.folders import NAMES, batches_for, from_folder, import_transformers
from torchpact_recipes.data import DataError
from torchpact_recipes.data.texts import read_texts
from torchpact_recipes.outputs import check_folder
from torchpact_recipes.report.adapted import Report, Way, write_report

SHARES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LEFT = {"train": 0.7, "held out": 0.85}
"""Where the batches for training end, and those that are held out; the others are for the test."""


class _Task(NamedTuple):
    """A plain network, what it is called with, and what goes into its folder besides."""

    net: Any
    batches: list[Any]
    logits: bool | None
    tokenizer: Any


def adapt(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="NETWORK",
            help=f"A folder of Hugging Face with its tokenizer, or one of {', '.join(NAMES)}.",
        ),
    ],
    data: Annotated[
        Path, typer.Option(help="Texts, as .txt (one a line) or .jsonl ('text' in each); a folder of images.")
    ],
    budget: Annotated[float, typer.Option(help="What the deployed network may cost, a share of the FLOPs.")],
    per: Annotated[
        str | None, typer.Option(help="What halts: token or example; by default examples where possible.")
    ] = None,
    limit: Annotated[int, typer.Option(help="How many texts or images.", min=8)] = 4096,
    length: Annotated[int, typer.Option(help="How many tokens of each text.", min=2)] = 64,
    batch: Annotated[int, typer.Option(help="How many texts or images a batch has.", min=1)] = 16,
    updates: Annotated[int, typer.Option(help="Of the weights; heads get half as many.", min=0)] = 800,
    rate: Annotated[float, typer.Option("--lr", help="The learning rate of the weights.")] = 1e-4,
    frozen: Annotated[bool, typer.Option(help="Train heads only.")] = False,
    students: Annotated[
        bool, typer.Option(help="Also distil two students of fewer layers, to compare with.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of the split and of training.")] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of what it writes.")] = Path(
        "adapted"
    ),
) -> None:
    """Let a network learn to leave early within a budget, on your own texts or images, without labels.

    A copy is distilled from the network itself on 70 % of the batches; thresholds are chosen on 15 %, and all
    that the report says is measured on the last 15 %. Writes network/ with a model card, report.html and
    report.json. Interrupted, it goes on where it was.

    [dim]Example: torchpact adapt minilm --data texts.txt --budget 0.6[/dim]
    """
    check_folder(output)
    if per not in (None, "token", "example"):
        raise ValueError(f"expected --per token or example, got {per!r}")
    if not 0 < budget <= 1:
        raise ValueError(f"expected --budget in (0, 1], a share of the FLOPs, got {budget:g}")
    task = _task(folder, data, limit, length, batch)
    train, held, test = _split(task.batches, seed)
    config = tp.budget.DistillConfig(
        exit_updates=updates, head_updates=(updates + 1) // 2, lr=rate, seed=seed
    )
    checkpoint = output / "checkpoint"
    given: dict[str, Any] = {"held_out": held, "logits": task.logits, "config": config}
    units: Any = per
    ada = tp.distill(task.net, train, budget, per=units, frozen=frozen, checkpoint=checkpoint, **given)
    found = _measured(task, ada, held, test, budget)
    if students:
        found += _students(task, ada, train, test, given)
    _write(output, Path(folder).name, data.name, task, ada, test, budget, found)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _task(folder: str, data: Path, limit: int, length: int, batch: int) -> _Task:
    if is_image_network(folder):
        raise ValueError(
            f"expected a folder of Hugging Face, or {', '.join(NAMES)}; got {folder!r} of the zoo, which "
            "torchpact train makes adaptive"
        )
    if data.is_dir():
        net = _image_network(Path(folder))
        size = net.config.image_size
        pixels = pixels_of(data, limit, size if isinstance(size, int) else size[0])
        images = _normalized(pixels, Path(folder))
        return _Task(net, [{"pixel_values": part} for part in images.split(batch)], None, None)
    texts = read_texts(data, limit)
    net, tokenizer = NAMES[folder]() if folder in NAMES else from_folder(Path(folder))
    if any(name == "torchpact" for name, _ in net.named_children()):
        raise DataError(
            f"{folder}: expected a plain network, got one that is adaptive already: name the folder of the "
            "original, or call tp.distill in Python, which goes on with its heads"
        )
    return _Task(net.eval(), batches_for(net, tokenizer, texts, length, batch), None, tokenizer)


def _image_network(folder: Path) -> Any:
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = getattr(transformers, (config.architectures or ["AutoModel"])[0], transformers.AutoModel)
        net = kind.from_pretrained(folder).eval()
    except (OSError, ValueError, KeyError):
        raise DataError(f"{folder}: expected a network of Hugging Face for images") from None
    if not hasattr(net.config, "image_size"):
        raise DataError(
            f"{folder}: expected a network for images with a folder of images, got one without image_size"
        )
    return net


def _normalized(pixels: Tensor, folder: Path) -> Tensor:
    """Return images as the folder's preprocessor_config.json says, or else in [−1, 1]."""
    file = folder / "preprocessor_config.json"
    record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    mean, std = (
        torch.tensor(record.get(name) or [0.5] * 3).view(3, 1, 1) for name in ("image_mean", "image_std")
    )
    return (pixels.float() / 255 - mean) / std


def _split(batches: list[Any], seed: int) -> tuple[list[Any], list[Any], list[Any]]:
    if len(batches) < 4:
        raise DataError(
            f"expected at least 4 batches of data, got {len(batches)}: give more, or a smaller --batch"
        )
    order = random.Random(seed).sample(batches, len(batches))
    first = min(round(LEFT["train"] * len(order)), len(order) - 2)
    second = min(max(round(LEFT["held out"] * len(order)), first + 1), len(order) - 1)
    return order[:first], order[first:second], order[second:]


def _target_loss(task: _Task) -> Any:
    """Return the loss to the original network, one number an example."""
    kept: dict[int, Any] = {}

    def loss(output: Any, batch: Any) -> Tensor:
        if id(batch) not in kept:
            with torch.no_grad():
                target = kept[id(batch)] = task.net(**batch)
            if getattr(target, "past_key_values", None) is not None:
                target.past_key_values = None
        found, mask = tp.budget.discrepancy(output, kept[id(batch)], task.logits), batch.get("attention_mask")
        if found.dim() == 1:
            return found
        weights = (
            torch.ones_like(found) if mask is None or mask.shape != found.shape else mask.to(found.dtype)
        )
        mean: Tensor = (found * weights).sum(1) / weights.sum(1).clamp(min=1)
        return mean

    return loss


def _size(batch: Any) -> int:
    return len(next(iter(batch.values())))


def _measured(task: _Task, ada: Any, held: list[Any], test: list[Any], budget: float) -> list[Way]:
    """Return what heads and other criteria cost and lose on the test batches."""
    loss = _target_loss(task)
    least = tp.Budget(budget).bind(ada, held[0]).prices
    assert least is not None
    shares = sorted({budget, *(share for share in SHARES if share > least.least)})
    blocks = [*ada.torchpact.runs]
    table = tp.calibrate(ada, held, shares, lambda output, batch: -loss(output, batch), runs=6)
    meter = tp.budget.LatencyMeter(ada, test[0])
    times = meter.ms([row.thresholds for row in table.rows])
    ways = []
    for row, ms in zip(table.rows, times, strict=True):
        cost, lost = _ran(ada, test, loss, row.thresholds)
        ways.append(Way("heads", row.budget, cost, lost, ms))
    if len(blocks) == 1 and blocks[0].per == "example":
        found = tp.budget.compare(ada, held, test, shares, loss, logits=task.logits)
        return ways + [Way(*each) for each in found if each.criterion != "heads"]
    most = max(run.max_steps for run in blocks)
    for step in range(1, most + 1):
        cost, lost = _ran(ada, test, loss, tp.exit_thresholds(ada, step))
        ways.append(Way(f"layer {step}", cost, cost, lost))
    return ways


def _ran(ada: Any, batches: list[Any], loss: Any, thresholds: tp.Thresholds) -> tuple[float, float]:
    costs, losses = [], []
    with tp.use_mode(ada, "thresholded"), tp.use_thresholds(ada, thresholds), torch.no_grad():
        for batch in batches:
            count = tp.count_flops(ada, batch)
            costs.append(count.total.double() / count.plain)
            losses.append(loss(ada(**batch), batch))
    return float(torch.cat(costs).mean()), float(torch.cat(losses).mean())


def _students(task: _Task, ada: Any, train: list[Any], test: list[Any], given: dict[str, Any]) -> list[Way]:
    """Return two students of fewer layers, at a half and three quarters of them."""
    layers = max(run.max_steps for run in ada.torchpact.runs)
    loss, found = _target_loss(task), []
    for count in sorted({max(2, layers // 2), max(2, round(0.75 * layers))} - {layers}):
        try:
            student = tp.budget.fewer_layers(task.net, train, count, **given)
        except ValueError as error:
            typer.echo(f"no students of fewer layers: {error}", err=True)
            return []
        with torch.no_grad():
            lost = float(torch.cat([loss(student(**batch), batch) for batch in test]).mean())
        cost = _mean_flops(student, test) / _mean_flops(task.net, test)
        found.append(Way("fewer layers", cost, cost, lost, note=f"{count} layers, distilled alone"))
    return found


def _mean_flops(net: nn.Module, batches: list[Any]) -> float:
    """Return what an example costs, padding left out, as in the costs of adaptive networks."""
    same = tp.adapt(copy.deepcopy(net))
    with tp.use_mode(same, "thresholded"):
        counts = [(tp.count_flops(same, batch).plain, _size(batch)) for batch in batches]
    return sum(plain * size for plain, size in counts) / sum(size for _, size in counts)


def _write(
    output: Path, name: str, data: str, task: _Task, ada: Any, test: list[Any], budget: float, ways: list[Way]
) -> None:
    example = test[0]
    bounds = tp.Thresholds({run.name: [*run.bounds] for run in ada.torchpact.runs if run.bounds is not None})
    meter = tp.budget.LatencyMeter(ada, example)
    own, whole = meter.ms([bounds, tp.Thresholds("never")])
    with tp.collect(ada) as ponders, torch.no_grad():
        for batch in test:
            ada(**batch)
    report = Report(
        name,
        data,
        budget,
        tuple(ways),
        own,
        whole,
        str(meter),
        ponders.table(),
        str(tp.summary(ada)),
        sum(_size(batch) for batch in test),
        "images" if task.tokenizer is None else "texts",
    )
    target = output / "network"
    (target / "README.md").unlink(missing_ok=True)
    tp.save_pretrained(ada, target)
    if task.tokenizer is not None:
        task.tokenizer.save_pretrained(target)
    card = target / "README.md"
    write_whole(card, f"{card.read_text(encoding='utf-8')}\n{report.markdown()}".encode())
    write_whole(output / "report.json", f"{report.to_json()}\n".encode())
    page = write_report(report, output / "report.html")
    print(f"{report.markdown()}\n{target}\n{page}")
