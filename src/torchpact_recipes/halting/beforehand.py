"""What diagnose says of real networks before anything is trained for halting.

    python -m torchpact_recipes.halting.beforehand [smollm2 stories reviews …] [--out results/halting]

``smollm2``  SmolLM2-135M as it is, the next token of film reviews
``stories``  stories15M as it is, the next token of its own stories
``reviews``  MiniLM fine-tuned on the polarity of reviews without exits (seed 0 of the reviews)
``exits``    MiniLM trained with exits (seed 0 of the reviews)

Each leaves ``diagnosis_NAME.json``.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import torchpact as tp
from torchpact.files import write_whole
from torchpact_recipes.data.files import data_folder
from torchpact_recipes.data.polarity import load_polarity
from torchpact_recipes.data.stories import told_stories
from torchpact_recipes.data.texts import text_batches
from torchpact_recipes.halting.networks import ReviewBatch, review_batches
from torchpact_recipes.halting.review_training import ReviewSettings
from torchpact_recipes.halting.reviews import Work
from torchpact_recipes.pretrained import smollm2, stories15m

NAMES = ("smollm2", "stories", "reviews", "exits")


def next_token(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross-entropy of each next token, NaN for padding and the last: (batch, length)."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    logits = output.logits[:, :-1].float()
    losses = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    losses = losses.masked_fill((mask[:, 1:] * mask[:, :-1]) == 0, float("nan"))
    return torch.cat([losses, losses.new_full((len(ids), 1), float("nan"))], 1)


def polarity(output: Tensor, batch: ReviewBatch) -> Tensor:
    """Return the cross-entropy of each label."""
    return cross_entropy(output.float(), batch.labels, reduction="none")


def diagnosed(name: str, examples: int, length: int, work: Path) -> tp.Diagnosis:
    """Return what diagnose finds on validation data.

    Args:
        name: Of the network.
        examples: How many.
        length: Tokens of each.
        work: Where the networks of the reviews are.

    """
    if name == "smollm2":
        net, tokenizer = smollm2()
        texts = [review.text for review in load_polarity("validation") if len(review.text.split()) > length]
        batches = text_batches(texts[:examples], tokenizer, length, max(2, examples // 4))
        ada = tp.adapt(net, per="token")
        return tp.diagnose(ada, batches, next_token, unit="nats")
    if name == "stories":
        net, _ = stories15m()
        tokens = told_stories(net, examples, length)
        batches = [
            {"input_ids": each, "attention_mask": torch.ones_like(each)}
            for each in tokens.split(max(2, examples // 4))
        ]
        return tp.diagnose(tp.adapt(net, per="token"), batches, next_token, unit="nats")
    kept = Work(work, ReviewSettings())
    review_net = kept.network("whole" if name == "reviews" else "taught", 0)
    if name == "reviews":
        tp.adapt(review_net, per="example")
    given = [*review_batches(kept.reviews("validation")[:examples], kept.tokenizer, length, 50, seed=0)]
    return tp.diagnose(
        review_net, given, polarity, inputs=lambda batch: batch.inputs, logits=True, unit="nats"
    )


def main() -> None:
    """Diagnose, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--examples", type=int, help="48 of decoders, 1000 reviews")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=data_folder("halting-reviews"))
    parser.add_argument("--out", type=Path, default=Path("results/halting"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        decoder = name in ("smollm2", "stories")
        with torch.autocast("cpu", torch.bfloat16):
            found = diagnosed(
                name, options.examples or (48 if decoder else 1000), options.length, options.work
            )
        print(f"{name}\n{found}\n", flush=True)
        write_whole(options.out / f"diagnosis_{name}.json", (found.to_json() + "\n").encode())


if __name__ == "__main__":
    main()
