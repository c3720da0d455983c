"""The zoo's plain ResNet-32, frozen, made adaptive by tp.adapt per pixel and per image, in all three blocks.

    python benchmarks/frozen_maps.py

Halting heads are the paper's (tp.models.HaltingHead), 3×3 convolutions besides a product with the mean map
per pixel. They are trained relaxed for ``UPDATES`` of 64 training images, distorted as frozen_data.py has it,
by tp.Budget: the KL divergence from the outputs of the network as it was, and the price. What is trained is
the heads alone (``heads``), or the network's last norm and classifier, too (``read-out``); all else is
frozen. tp.calibrate chooses the thresholds for a budget of 0.8 on distorted images held out of the training
set, and the test set is run once, with the columns of frozen_exits.py. Random halting draws depths for each
position from the histogram of its block (tp.criteria.RandomExit), and is run, too. ``fewer`` is the best
network with fewer units of frozen_exits.py, as it was chosen for seed 0, which has had more updates.
"""

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from bootstrap import interval
from frozen_data import (
    VALIDATION,
    Split,
    as_inputs,
    channels_last,
    distorted,
    plain_network,
    split,
    test_split,
    train_images,
)
from frozen_exits import right_of_fewer
from safetensors.torch import load_file, save_file
from table import read_rows, write_csv
from torch import Tensor, nn
from torch.nn import functional as F

import torchpact as tp
from torchpact.core.call_args import CallArgs
from torchpact.flops.blocks import Meter

UPDATES, BATCH, HELD_OUT, AIM, BUDGET = 400, 64, 800, 0.72, 0.8
SETTINGS = (("pixel", "read-out"), ("pixel", "heads"), ("example", "read-out"))
SEEDS = (0, 1, 2)
Row = dict[str, str]


def adapted(per: Any) -> nn.Module:
    """Return the network with halting heads, frozen but for these."""

    def head(_layer: nn.Module, width: int) -> nn.Module:
        made = tp.models.HaltingHead(width, "pixel" if per == "pixel" else "image", bias=-4.0)
        for parameter in made.parameters():
            if parameter.dim() > 1:
                nn.init.zeros_(parameter)
        return made

    net: nn.Module = tp.adapt(tp.models.resnet32(pretrained="plain"), per=per, frozen=True, heads=head)
    return channels_last(net)


def trained(per: str, what: str, seed: int, strength: float) -> nn.Module:
    """Return the network with trained heads."""
    torch.manual_seed(seed)
    generator, images = torch.Generator().manual_seed(seed), train_images()
    teacher = plain_network()
    net = adapted(per)
    heads = [*net.torchpact.parameters()]  # type: ignore[union-attr]
    readout = [*net.norm.parameters(), *net.classifier.parameters()] if what == "read-out" else []  # type: ignore[union-attr]
    for parameter in readout:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam([{"params": heads, "lr": 0.02}, {"params": readout, "lr": 2e-3}])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, 2.5 * (1 - n / UPDATES)))
    budget = tp.Budget(flops=AIM, start=0.1).bind(net.eval(), as_inputs(images.images[:BATCH]))
    net.train()
    for update in range(UPDATES):
        chosen = torch.randint(VALIDATION.start, (BATCH,), generator=generator)
        inputs = as_inputs(distorted(images.images[chosen], strength, generator))
        with torch.no_grad():
            wanted = teacher(inputs)[0].log_softmax(1)
        with tp.collect(net) as ponders:
            found = net(inputs)[0].log_softmax(1)
        loss = budget.loss(F.kl_div(found, wanted, log_target=True, reduction="none").sum(1), ponders)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        budget.step()
        if update % 50 == 49:
            print(per, what, seed, f"{loss:.3f}", budget, flush=True)
    return net.eval()


@torch.no_grad()
def run(net: nn.Module, given: Split) -> tuple[Tensor, float, list[Tensor]]:
    """Return what is right, the cost as tp.count_flops has it, and the histogram of each block's depths."""
    right, flops, plain = [], 0.0, 0.0
    counts = [torch.zeros(5, dtype=torch.double) for _ in range(3)]
    for inputs, labels in zip(given.inputs.split(250), given.labels.split(250), strict=True):
        meter = Meter(net, CallArgs((inputs,)))
        with tp.collect(net) as ponders:
            found = meter.run()
        right.append((found.output[0].argmax(1) == labels).float())
        flops += sum(float(cost.flops.sum()) for cost in found.costs.values()) + found.rest * len(labels)
        plain += (sum(cost.plain for cost in found.costs.values()) + found.rest) * len(labels)
        for count, ponder in zip(counts, ponders, strict=True):
            count += torch.bincount(ponder.steps.flatten() - 1, minlength=5)
    return torch.cat(right), flops / plain, [count / count.sum() for count in counts]


@torch.no_grad()
def right_of_whole(given: Split) -> Tensor:
    """Return what the network itself has right."""
    net = plain_network()
    output = torch.cat([net(inputs)[0] for inputs in given.inputs.split(250)])
    return (output.argmax(1) == given.labels).float()


def measured(per: str, what: str, seed: int, folder: Path) -> Row:
    """Train, calibrate, and measure on the test set."""
    strength = float((folder / "strength.txt").read_text())
    path = folder / f"{per}-{what}-{seed}.safetensors"
    if path.exists():
        net = adapted(per).eval()
        net.load_state_dict(load_file(path))
    else:
        net = trained(per, what, seed, strength)
        save_file(net.state_dict(), path)
    held = split(train_images(), range(VALIDATION.start, VALIDATION.start + HELD_OUT), strength, 3)
    batches = [*zip(held.inputs.split(200), held.labels.split(200), strict=True)]
    found = tp.calibrate(
        net,
        batches,
        [BUDGET],
        lambda output, batch: -F.cross_entropy(output[0], batch[1], reduction="none"),
        inputs=lambda batch: batch[0],
        runs=8,
    ).rows[0]
    test = test_split()
    with tp.use_mode(net, "thresholded"), tp.use_thresholds(net, found.thresholds):
        right, cost, histograms = run(net, test)
    names = [each.name for each in net.torchpact.runs]  # type: ignore[union-attr]
    random = {name: tp.criteria.RandomExit(h.tolist()) for name, h in zip(names, histograms, strict=True)}
    with tp.use_heads(net, random), tp.use_mode(net, "discrete"):
        chance, chance_cost, _ = run(net, test)
    row = {
        "per": per,
        "trained": what,
        "seed": str(seed),
        "budget": str(BUDGET),
        "held_out": f"{found.cost:.4f}",
        "cost": f"{cost:.4f}",
        "accuracy": f"{100 * right.mean():.2f}",
        "depths": " / ".join(" ".join(f"{share:.3f}" for share in h.tolist()) for h in histograms),
        "chance_cost": f"{chance_cost:.4f}",
    }
    others = {"full": right_of_whole(test), "chance": chance, "fewer": right_of_fewer(folder, 0)}
    for key, other in others.items():
        mean, low, high = interval(100 * (right - other))
        row |= {key: f"{100 * other.mean():.2f}", f"vs_{key}": f"{mean:.2f}"}
        row |= {f"{key}_low": f"{low:.2f}", f"{key}_high": f"{high:.2f}"}
    print(*row.values(), sep=", ", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="a frozen ResNet-32 with halting heads")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "torchpact-frozen")
    arguments = parser.parse_args()
    rows = read_rows(arguments.out)
    done = {(row["per"], row["trained"], row["seed"]) for row in rows}
    for seed, (per, what) in itertools.product(SEEDS, SETTINGS):
        if (per, what, str(seed)) not in done:
            rows.append(measured(per, what, seed, arguments.work))
            write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
