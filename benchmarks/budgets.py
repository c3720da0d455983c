"""Budgets asked for beside what thresholded networks cost on other data than their thresholds were chosen on.

    python benchmarks/budgets.py [--images N] [--steps N] [--ms]

Ten budgets for each case, from a tenth above the least that can be met to 0.95. ``sequences`` is a small
transformer with one decision an example, ``tokens`` one with a decision for each token, both trained here on
sums of random digits to a budget of one half; ``images`` is PSACT ResNet-32 of the zoo (τ = 0.05), which
decides for each pixel in three blocks, on the CIFAR-10 images of the package: half for calibration, half for
the test. ``ratio`` is the cost on test data divided by the budget; the bar is 1.02 in FLOPs and 1.10 in ms.
``score`` is the accuracy on test data, ``full`` that of the network without halting.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from options import parser_for
from table import write_csv
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchpact as tp
from torchpact.budget.latency import LatencyMeter

Batch = tuple[Tensor, Tensor]
Row = dict[str, object]
BUDGETS = 10


class Sums(nn.Module):
    """Tells whether digits add up to more than their mean: of a whole sequence, or up to each token."""

    def __init__(self, by_token: bool, layers: int = 6, width: int = 32) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.embed, self.place = nn.Embedding(10, width), nn.Embedding(12, width)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.read, self.by_token = nn.Linear(width, 2), by_token

    def forward(self, tokens: Tensor) -> Tensor:
        """Return two logits of each sequence or token."""
        u = self.encoder(self.embed(tokens) + self.place.weight)
        logits: Tensor = self.read(u if self.by_token else u.mean(1))
        return logits

    def batch(self, examples: int) -> Batch:
        """Return digits and labels."""
        tokens = torch.randint(10, (examples, 12))
        sums = tokens.cumsum(1) if self.by_token else tokens.sum(1)
        return tokens, (sums > (4.5 * torch.arange(1, 13) if self.by_token else 54)).long()


def nll(output: Any, labels: Tensor) -> Tensor:
    logits = output[0] if isinstance(output, tuple) else output
    losses: Tensor = cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return losses.view(len(labels), -1).mean(1)


def accuracy(output: Any, labels: Tensor) -> Tensor:
    logits = output[0] if isinstance(output, tuple) else output
    right: Tensor = (logits.argmax(-1) == labels).float()
    return right.view(len(labels), -1).mean(1)


def trained(by_token: bool, steps: int) -> tuple[nn.Module, list[Batch], list[Batch]]:
    torch.manual_seed(0)
    task = Sums(by_token)
    net = tp.adapt(task, per="token" if by_token else "example").train()
    budget = tp.Budget(flops=0.5).bind(net, task.batch(8)[0])
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(steps):
        tokens, labels = task.batch(64)
        with tp.collect(net) as ponders:
            losses = nll(net(tokens), labels)
        optimizer.zero_grad()
        budget.loss(losses, ponders).backward()
        optimizer.step()
        budget.step()
    print(budget, flush=True)
    batches = [task.batch(500) for _ in range(12)]
    return net.eval(), batches[:4], batches[4:]


def images(count: int) -> tuple[nn.Module, list[Batch], list[Batch]]:
    from torchpact_recipes.data.augment import standardize
    from torchpact_recipes.data.sample import load_sample

    sample = load_sample("test")
    chosen, labels = standardize(sample.images[:count]), sample.labels[:count]
    batches = [(chosen[i : i + 100], labels[i : i + 100]) for i in range(0, count, 100)]
    net = tp.models.psact_resnet32(mode="thresholded", pretrained="tau0.05").eval()
    return net, batches[::2], batches[1::2]


def rows(name: str, net: nn.Module, held: list[Batch], test: list[Batch]) -> list[Row]:
    inputs: Callable[[Batch], Tensor] = lambda batch: batch[0]  # noqa: E731
    whole = torch.cat([batch[0] for batch in test])
    least = share(net, whole, tp.exit_thresholds(net, 1))
    low, high = 1.1 * least, 0.95
    asked = [low + (high - low) * i / (BUDGETS - 1) for i in range(BUDGETS)]
    table = tp.calibrate(net, held, asked, lambda out, batch: -nll(out, batch[1]), inputs=inputs, runs=6)
    full = scored(net, test, tp.Thresholds("never"))
    found: list[Row] = []
    for row in table.rows:
        cost = share(net, whole, row.thresholds)
        found.append(
            {
                "case": name,
                "unit": "flops",
                "budget": round(row.budget, 4),
                "held_out": round(row.cost, 4),
                "test": round(cost, 4),
                "ratio": round(cost / row.budget, 4),
                "score": round(scored(net, test, row.thresholds), 4),
                "full": round(full, 4),
            }
        )
        print(found[-1], flush=True)
    return found


def rows_in_ms(name: str, net: nn.Module, held: list[Batch], test: list[Batch]) -> list[Row]:
    """Budgets in milliseconds for a batch of held-out images; the test is on another batch."""
    example, other = held[0][0], test[0][0]
    meter = LatencyMeter(net, example)
    first, never = tp.exit_thresholds(net, 1), tp.Thresholds("never")
    least, most = meter.ms([first, never])
    found: list[Row] = []
    for i in range(4):
        asked = 1.1 * least + (0.95 * most - 1.1 * least) * i / 3
        budget = tp.Budget(ms=asked, example=example)
        thresholds = tp.calibrate(
            net,
            held[:2],
            budget,
            lambda out, batch: -nll(out, batch[1]),
            inputs=lambda batch: batch[0],
            runs=0,
        )
        meter_of_test = LatencyMeter(net, other)
        (ms,) = meter_of_test.ms([thresholds])
        found.append(
            {
                "case": name,
                "unit": "ms",
                "budget": round(asked, 3),
                "held_out": round(meter.ms([thresholds])[0], 3),
                "test": round(ms, 3),
                "ratio": round(ms / asked, 4),
                "score": round(scored(net, test, thresholds), 4),
                "full": "",
            }
        )
        print(found[-1], flush=True)
    return found


def share(net: nn.Module, inputs: Tensor, thresholds: tp.Thresholds) -> float:
    with tp.use_mode(net, "thresholded"), tp.use_thresholds(net, thresholds):
        return float(tp.count_flops(net, inputs).share)


def scored(net: nn.Module, test: list[Batch], thresholds: tp.Thresholds) -> float:
    with torch.no_grad(), tp.use_mode(net, "thresholded"), tp.use_thresholds(net, thresholds):
        return float(torch.cat([accuracy(net(x), labels) for x, labels in test]).mean())


def main() -> None:
    parser = parser_for(__doc__ or "", __file__, 0.5)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--steps", type=int, default=400, help="of training the transformers")
    parser.add_argument("--ms", action="store_true", help="budgets in milliseconds, too")
    options = parser.parse_args()
    found = rows("sequences", *trained(False, options.steps))
    found += rows("tokens", *trained(True, options.steps))
    found += rows("images", *images(options.images))
    if options.ms:
        found += rows_in_ms("images", *images(options.images))
    write_csv(Path(options.out), found)


if __name__ == "__main__":
    main()
