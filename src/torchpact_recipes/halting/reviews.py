"""Halting on film reviews: MiniLM with trained exits, per example, beside networks of fewer layers.

    python -m torchpact_recipes.halting.reviews [--seeds 3 | --only SEED] [--ready | --crossed] [--test]

For each seed: the whole network (labels), students of 2 and 3 layers (labels, and the whole network as the
teacher), and the network with exits (likewise, or labels and its own last exit), each by equal updates; then
criteria on the frozen exits. Weights and records stay in ``--work``, and what is there is not made again.
Criterion and thresholds are chosen on validation data. With ``--test`` the test data is opened, and five
files written:

    reviews.csv              each network and criterion at the budget: validation, test, cost, layers
    reviews_means.csv        the means over seeds, on the test data if it was opened
    reviews_validation_N.csv the same on the validation data, after N updates
    reviews_curves.csv       accuracy at several budgets, thresholds chosen on validation data
    reviews_differences.csv  paired differences on the test data, with 95 % intervals

``--crossed`` compares criteria on training reviews that the exits have not seen: reviews_crossed.csv.
Costs are FLOPs, read-outs and heads included, as a share of the whole network's.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import torchpact as tp
from torchpact_recipes.data.files import data_folder
from torchpact_recipes.data.polarity import Review, load_polarity
from torchpact_recipes.halting import review_judging
from torchpact_recipes.halting.exit_record import ExitRecord, record_exits, record_plain
from torchpact_recipes.halting.networks import ReviewNet, review_batches
from torchpact_recipes.halting.review_crossed import write_crossed
from torchpact_recipes.halting.review_training import ReviewSettings, train
from torchpact_recipes.halting.tables import save_tensors
from torchpact_recipes.pretrained import minilm

STUDENTS = (2, 3)
EXITS = ("exits", "taught")
HEADS, VALIDATION, TEST = 1500, 1500, 3000
"""How many examples heads learn from, of the training data, choices are made on, and judged on."""


class Work:
    """Networks and records of a seed, made once and kept in a folder.

    Args:
        folder: The folder.
        settings: Of the training.
        source: Returns a fresh encoder and its tokenizer.
        reviews: Returns the reviews of a part.
        exits_arm: Who teaches exits: "exits", the last one, or "taught", the whole network.

    """

    def __init__(
        self,
        folder: Path,
        settings: ReviewSettings,
        source: Callable[[], tuple[Any, Any]] = minilm,
        reviews: Callable[[Any], list[Review]] = load_polarity,
        exits_arm: str = "exits",
    ) -> None:
        self.folder, self.settings, self.source, self.exits_arm = folder, settings, source, exits_arm
        self.tokenizer = source()[1]
        self.tokenizer.model_max_length = 1_000_000  # texts are cut by us
        self.parts: dict[str, list[Review]] = {"train": reviews("train"), "heads": []}
        self.load = reviews
        folder.mkdir(parents=True, exist_ok=True)

    def reviews(self, part: str) -> list[Review]:
        """Return the reviews of a part; the last ones of the training data are for heads."""
        if part == "train":
            return self.parts["train"][:-HEADS]
        if part == "heads":
            return self.parts["train"][-HEADS:]
        most = VALIDATION if part == "validation" else TEST
        return self.load(part)[:most]

    @property
    def layers(self) -> int:
        """How many layers the whole network has."""
        return int(self.source()[0].config.num_hidden_layers)

    def network(self, arm: str, seed: int) -> ReviewNet:
        """Return a trained network: "whole", with exits, or a number of layers."""
        torch.manual_seed(seed)
        net = ReviewNet(self.source()[0], int(arm) if arm.isdigit() else self.layers)
        exits = arm in EXITS
        if exits:
            tp.adapt(net, per="example")
        path = self.folder / f"{arm}-{seed}.safetensors"
        if path.is_file():
            net.load_state_dict(load_file(path))
            return net.eval()
        teacher = self.network("whole", seed) if arm.isdigit() or arm == "taught" else None
        train(net, self.reviews("train"), self.tokenizer, self.settings, seed, teacher, exits)
        save_tensors(net.state_dict(), path)
        print(f"trained {arm}, seed {seed}", flush=True)
        return net

    def record(self, arm: str, seed: int, part: str) -> dict[str, Tensor]:
        """Return the exits of a network on a part of the data, or its class logits."""
        path = self.folder / f"{arm}-{seed}-{part}.record.safetensors"
        if not path.is_file():
            net = self.network(arm, seed)
            given = self.reviews(part)
            batches = [*review_batches(given, self.tokenizer, self.settings.length, 50)]
            labels = torch.cat([batch.labels for batch in batches])
            if arm in EXITS:
                found = record_exits(net, batches)._asdict()
            else:
                found = {"classes": record_plain(net, batches), "labels": labels}
            save_tensors(found, path)
            print(f"recorded {arm}, seed {seed}, {part}", flush=True)
        return load_file(path)

    def exits(self, seed: int, part: str) -> ExitRecord:
        """Return the exits of the network with exits."""
        return ExitRecord(**self.record(self.exits_arm, seed, part))

    def ready(self, arm: str, seed: int, part: str) -> bool:
        """Return whether the record is there."""
        return (self.folder / f"{arm}-{seed}-{part}.record.safetensors").is_file()

    def exit_costs(self, heads: Callable[[Any], Any], length: int) -> Tensor:
        """Return the FLOPs of texts that leave at each exit, by their length, (L, length + 1).

        Args:
            heads: Makes the criteria that are asked at each exit, for a network.
            length: The longest text.

        """
        net = ReviewNet(self.source()[0], self.layers)
        tp.adapt(net, per="example")
        rows = torch.arange(length).unsqueeze(0) < torch.arange(1, length + 1).unsqueeze(1)
        batch = {"input_ids": torch.where(rows, 7, 0), "attention_mask": rows.long()}
        costs = torch.zeros(self.layers, length + 1, dtype=torch.double)
        with tp.use_heads(net, heads(net)), tp.use_mode(net, "thresholded"):
            for step in range(self.layers):
                with tp.use_thresholds(net, tp.exit_thresholds(net, step + 1)):
                    costs[step, 1:] = tp.count_flops(net, batch).total.double()
        return costs


def main() -> None:
    """Train, record, choose and, if asked to, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", type=int, help="train and record this seed, and choose nothing")
    parser.add_argument(
        "--exits", choices=EXITS, default="taught", help="learn from the last, or are taught by the whole"
    )
    parser.add_argument("--ready", action="store_true", help="train nothing: write tables of what is there")
    parser.add_argument(
        "--crossed", action="store_true", help="compare criteria on training reviews, no more"
    )
    parser.add_argument("--updates", type=int, default=ReviewSettings.updates)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=data_folder("halting-reviews"))
    parser.add_argument("--out", type=Path, default=Path("results/halting"))
    parser.add_argument("--test", action="store_true", help="open the test data")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    work = Work(options.work, ReviewSettings(updates=options.updates), exits_arm=options.exits)
    seeds = [*range(options.seeds)] if options.only is None else [options.only]
    parts = ["validation", "test"] if options.test else ["validation"]
    if options.crossed:
        write_crossed(work, [seed for seed in seeds if work.ready(options.exits, seed, "heads")], options.out)
        return
    arms: tuple[str, ...] = (options.exits, "whole", *map(str, STUDENTS))
    if options.ready:
        needed = [(options.exits, "heads"), *((options.exits, part) for part in parts)]
        seeds = [seed for seed in seeds if all(work.ready(arm, seed, part) for arm, part in needed)]
        arms = tuple(
            arm for arm in arms if all(work.ready(arm, seed, part) for seed in seeds for part in parts)
        )
        print(f"there are seeds {seeds} of {', '.join(arms)}")
    for seed in seeds:
        work.record(options.exits, seed, "heads")
        for arm in arms:
            for part in parts:
                work.record(arm, seed, part)
    if options.only is None:
        review_judging.write(work, seeds, arms[1:], options.out, options.test)


if __name__ == "__main__":
    main()
