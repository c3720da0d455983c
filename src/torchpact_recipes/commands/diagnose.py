"""torchpact diagnose: whether halting can pay for a network, measured on a user's own texts or images."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor, nn

import torchpact as tp
from torchpact.files import write_whole
from torchpact_recipes import zoo
from torchpact_recipes.commands.common import find_network, load_test
from torchpact_recipes.commands.folders import NAMES, batches_for, from_folder
from torchpact_recipes.data import DataError, standardize
from torchpact_recipes.data.image_io import read_picture
from torchpact_recipes.data.texts import read_texts
from torchpact_recipes.outputs import check_folder
from torchpact_recipes.viz.diagnosis import show_diagnosis
from torchpact_recipes.viz.figures import save

BATCH = 16


class _Task(NamedTuple):
    """A network, what it is called with, and how its loss is measured."""

    net: Any
    batches: list[Any]
    loss: Callable[[Any, Any], Tensor] | None
    unit: str | None
    logits: bool | None


def diagnose(
    network: Annotated[
        str,
        typer.Argument(
            metavar="NETWORK",
            help=f"A folder of Hugging Face or of tp.save_pretrained, one of {', '.join(NAMES)}, or a "
            "network of the zoo.",
        ),
    ],
    data: Annotated[
        Path,
        typer.Option(
            help="Texts, as .txt (one a line) or .jsonl ('text' in each); a folder of images, or 'sample', "
            "whose 1,000 test images of CIFAR-10 are bundled."
        ),
    ],
    per: Annotated[
        str | None,
        typer.Option(help="What halts: token, example or pixel; by default as usual for the network."),
    ] = None,
    limit: Annotated[int, typer.Option(help="How many texts or images.", min=4)] = 256,
    length: Annotated[int, typer.Option(help="How many tokens of each text.", min=2)] = 64,
    tau: Annotated[
        float, typer.Option(help="The price of a step, for the advantage of trained heads.")
    ] = 0.0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of what it writes.")] = Path(
        "diagnosis"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print all as JSON.")] = False,
) -> None:
    """Tell whether halting can pay for a network, before it is trained, and why heads are dead, after.

    Measures what every exit costs and loses, with the network's own read-out and with a fitted one, and what
    thresholds on confidence or on a linear predictor save over fixed exits, on examples that they were not
    fitted on. Decoders are measured by the next token, encoders of sentences by the cosine of their mean
    state with that of the whole network, classifiers by the KL divergence. Writes diagnosis.json,
    diagnosis.png and diagnosis.pdf. docs/diagnose.md says what the columns mean.

    [dim]Example: torchpact diagnose minilm --data texts.txt[/dim]
    """
    check_folder(output)
    if per not in (None, "token", "example", "pixel"):
        raise ValueError(f"expected --per token, example or pixel, got {per!r}")
    task = (
        _of_images(network, data, per, limit)
        if is_image_network(network)
        else _of_texts(network, data, per, limit, length)
    )
    found = tp.diagnose(task.net, task.batches, task.loss, logits=task.logits, tau=tau, unit=task.unit)
    record = json.loads(found.to_json())
    settings = {
        "network": network,
        "data": data.name,
        "per": per,
        "limit": limit,
        "length": length,
        "tau": tau,
    }
    text = json.dumps({"settings": settings, **record}, indent=1, ensure_ascii=False)
    output.mkdir(parents=True, exist_ok=True)
    write_whole(output / "diagnosis.json", f"{text}\n".encode())
    with show_diagnosis(found, f"{Path(network).name}, {found.examples} examples") as figure:
        paths = save(figure, output, "diagnosis")
    written = "\n".join(map(str, [output / "diagnosis.json", *paths]))
    print(text if as_json else f"{found}\n\nWhat the columns mean: docs/diagnose.md\n{written}")


def is_image_network(name: str) -> bool:
    """Return whether a name is that of a network of the zoo."""
    return any(entry.name == name for entry in zoo.entries()) and not Path(name).is_dir()


def _of_texts(network: str, data: Path, per: str | None, limit: int, length: int) -> _Task:
    texts = read_texts(data, limit)
    net, tokenizer = NAMES[network]() if network in NAMES else from_folder(Path(network))
    batches = batches_for(net, tokenizer, texts, length, max(1, min(BATCH, len(texts) // 4)))
    adaptive = any(
        isinstance(module, nn.Module) and name == "torchpact" for name, module in net.named_children()
    )
    ada = net if adaptive else tp.adapt(net, per=per)  # type: ignore[arg-type]
    if net.config.architectures and re.search("CausalLM", net.config.architectures[0]):
        return _Task(ada, batches, next_token_loss, "nats", None)
    with torch.no_grad():
        first = net(**batches[0])
    if hasattr(first, "logits"):
        return _Task(ada, batches, None, None, None)
    return _Task(ada, batches, cosine_loss(ada, batches), "of the cosine", None)


def _of_images(network: str, data: Path, per: str | None, limit: int) -> _Task:
    if per == "token":
        raise ValueError(f"expected --per example or pixel for a network for images, got {per!r}")
    net = find_network(network).model.eval()
    pixels = pixels_of(data, limit, net.config.image_size)
    ada = net if net.config.adaptive else tp.adapt(net, per=per)  # type: ignore[arg-type]
    return _Task(
        ada, [*standardize(pixels).split(max(1, min(4 * BATCH, len(pixels) // 4)))], None, None, True
    )


def pixels_of(data: Path, limit: int, size: int) -> Tensor:
    """Return images as bytes, (n, 3, size, size).

    Args:
        data: A folder of images, or "sample".
        limit: How many at most.
        size: Their height and width.

    Raises:
        DataError: There are none.

    """
    if data == Path("sample"):
        return load_test(data, torch.device("cpu")).images[:limit]
    if not data.is_dir():
        raise DataError(f"{data}: expected a folder of images, or 'sample'")
    paths = sorted(
        path for path in data.iterdir() if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".bmp")
    )
    if not paths:
        raise DataError(f"{data}: expected a folder with images, got none")
    return torch.stack([read_picture(path, size) for path in paths[:limit]])


def next_token_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of the next token at each position, NaN where that is padding: (batch, length − 1).

    Args:
        output: With ``logits``.
        batch: The tokens and their mask.

    """
    logits, tokens, mask = output.logits[:, :-1], batch["input_ids"][:, 1:], batch["attention_mask"]
    loss = nn.functional.cross_entropy(logits.transpose(1, 2).float(), tokens, reduction="none")
    return torch.where((mask[:, 1:] * mask[:, :-1]) > 0, loss, torch.nan)


def cosine_loss(net: Any, batches: list[dict[str, Tensor]]) -> Callable[[Any, dict[str, Tensor]], Tensor]:
    """Return one minus the cosine of the mean last state with that of the network as it now is.

    Args:
        net: An encoder.
        batches: All that it will be measured on.

    """

    def mean(output: Any, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["attention_mask"].unsqueeze(2)
        found: Tensor = (output.last_hidden_state * mask).sum(1) / mask.sum(1)
        return found

    with torch.no_grad(), tp.use_mode(net, "thresholded"), tp.use_thresholds(net, tp.Thresholds("never")):
        full = {id(batch): mean(net(**batch), batch) for batch in batches}
    return lambda output, batch: 1 - torch.cosine_similarity(mean(output, batch), full[id(batch)])
