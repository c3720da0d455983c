"""Halting on stories: stories15M, per token, trained on stories that it tells itself.

    python -m torchpact_recipes.halting.stories [--seeds 3] [--out results/halting] [--work FOLDER] [--test]

For each seed: all weights of the network are trained while fewer and fewer layers are run, with heads on the
state, and students of 4 and 5 layers are distilled by as many updates. The original is *full*. One bound for
all heads is chosen on validation stories, for each mean number of layers. Weights stay in ``--work``, and
what is there is not made again. Two files are written, of the validation stories, or with ``--test`` of the
test stories:

    stories.csv              loss (nats a token), layers and FLOPs of everything
    stories_differences.csv  paired differences, with 95 % intervals, of the mean over seeds

FLOPs are shares of the original's, with its read-out and, for confidence and patience, the read-out of every
exit that they look at.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import torchpact as tp
from torchpact import criteria
from torchpact_recipes.data.files import data_folder
from torchpact_recipes.data.stories import told_stories
from torchpact_recipes.halting.story_heads import bound_for
from torchpact_recipes.halting.story_judging import told, write
from torchpact_recipes.halting.story_runs import StorySettings, thresholded
from torchpact_recipes.halting.story_training import train_exits, train_student
from torchpact_recipes.halting.tables import save_tensors
from torchpact_recipes.pretrained import stories15m

STUDENTS = (4, 5)
LENGTH, VALIDATION, TEST = 128, 96, 192


class Stories:
    """Networks of a seed, made once and kept in a folder, and the stories.

    Args:
        folder: The folder.
        settings: Of the training.
        count: How many stories there are to train on.
        source: Returns the original network and its tokenizer.
        tell: Returns stories: of the network, how many, and how long.

    """

    def __init__(
        self,
        folder: Path,
        settings: StorySettings,
        count: int,
        source: Callable[[], tuple[Any, Any]] = stories15m,
        tell: Callable[[Any, int, int], Tensor] = told_stories,
    ) -> None:
        self.folder, self.settings, self.source = folder, settings, source
        self.teacher = source()[0].eval()
        stories = tell(self.teacher, TEST + VALIDATION + count, LENGTH)
        self.test, self.validation, self.train = stories.split([TEST, VALIDATION, count])
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def layers(self) -> int:
        """How many layers the original has."""
        return int(self.teacher.config.num_hidden_layers)

    def exits(self, seed: int) -> Any:
        """Return the network whose tokens leave early."""
        torch.manual_seed(seed)
        head = criteria.MLP(hidden=self.settings.hidden, normalize=True, bias=-1.0)
        net = tp.adapt(self.source()[0], per="token", heads=head)
        path = self.folder / f"exits-{seed}.safetensors"
        if not path.is_file():
            train_exits(net.train(), self.teacher, self.train, self.settings, seed)
            save_tensors(_untied(net), path)
            print(f"trained exits, seed {seed}", flush=True)
        net.load_state_dict(load_file(path), strict=False)
        return net.eval()

    def student(self, layers: int, seed: int) -> Any:
        """Return a student of the first layers."""
        net = self.source()[0]
        net.model.layers = net.model.layers[:layers]
        net.config.num_hidden_layers = layers
        path = self.folder / f"{layers}-{seed}.safetensors"
        if not path.is_file():
            train_student(net.train(), self.teacher, self.train, self.settings, seed)
            save_tensors(_untied(net), path)
            print(f"trained {layers} layers, seed {seed}", flush=True)
        net.load_state_dict(load_file(path), strict=False)
        return net.eval()


def _untied(net: Any) -> dict[str, Tensor]:
    """Return all weights, the embeddings that the read-out shares once."""
    return {name: x for name, x in net.state_dict().items() if name != "lm_head.weight"}


def validated(work: Stories, seed: int) -> None:
    """Print what the network with exits loses on validation stories."""
    net, full = work.exits(seed), told(work.teacher, work.validation)
    bounds = tp.Thresholds(bound_for(net, work.validation, work.settings.layers))
    one = told(net, work.validation, *thresholded(net, bounds))
    above = float((one.by_story - full.by_story).mean())
    print(f"seed {seed}, validation: {one.layers:.2f} layers, {above:+.4f} nats")
    for step in range(1, work.layers + 1):
        fixed = told(net, work.validation, *thresholded(net, tp.exit_thresholds(net, step)))
        print(
            f"    all leave after layer {step}: {float((fixed.by_story - full.by_story).mean()):+.4f}",
            flush=True,
        )


def main() -> None:
    """Train, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=StorySettings.updates)
    parser.add_argument("--told", type=int, default=3808, help="stories to train on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=data_folder("halting-stories"))
    parser.add_argument("--out", type=Path, default=Path("results/halting"))
    parser.add_argument("--test", action="store_true", help="open the test stories")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = StorySettings(updates=options.updates)
    work = Stories(options.work, settings, options.told)
    for seed in range(options.seeds):
        validated(work, seed)
    for seed in range(options.seeds):
        for layers in STUDENTS:
            work.student(layers, seed)
    part = "test" if options.test else "validation"
    write(work, [*range(options.seeds)], options.out, STUDENTS, part)


if __name__ == "__main__":
    main()
