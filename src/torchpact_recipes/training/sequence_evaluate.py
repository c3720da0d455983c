"""Evaluation on a synthetic task: how often it is right, and how much it ponders on what is how hard."""

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torchpact import Mode, use_mode
from torchpact.models import SequenceNet
from torchpact.nn.sequence import sequence_nll
from torchpact_recipes.data.tasks import UNASKED, Task
from torchpact_recipes.training.sequence_loss import lengths_of
from torchpact_recipes.training.state import seeded


@dataclass(frozen=True)
class TaskEvaluation:
    """What a network did on examples of a task, in one mode."""

    accuracy: float
    """The share of answers that are right."""
    sequence_accuracy: float
    """The share of sequences, of those that are asked anything, with all answers right."""
    nll: float
    """The mean of −log p of an answer."""
    steps: float
    """The mean number of iterations of a time step, summed over layers."""
    steps_by_difficulty: dict[int, float]
    """The same, for the time steps of each difficulty."""
    accuracy_by_difficulty: dict[int, float]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, such as JSON holds; its keys are strings."""
        found = asdict(self)
        for name in ("steps_by_difficulty", "accuracy_by_difficulty"):
            found[name] = {str(level): value for level, value in found[name].items()}
        return found


@torch.no_grad()
def evaluate_on_task(
    model: SequenceNet,
    task: Task,
    mode: Mode | str | None = None,
    *,
    count: int = 2048,
    batch: int = 512,
    seed: int = 1_000_003,
) -> TaskEvaluation:
    """Evaluate on ``count`` fresh examples, in the given mode or the model's own.

    >>> from torchpact_recipes.data import Sort
    >>> from torchpact.models import SequenceNet
    >>> from torchpact_recipes.training.sequence_config import network_for
    >>> model = SequenceNet(network_for("sort", {"max_numbers": 3}, "repeat", max_steps=3))
    >>> evaluate_on_task(model, Sort(2, 3), count=64).steps
    3.0
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    training = model.training
    model.eval()
    right, nll, asked, sequences, steps, hard = [], [], [], [], [], []
    try:
        with seeded(seed, device), use_mode(model, mode) if mode is not None else nullcontext():
            for start in range(0, count, batch):
                examples = task.sample(min(batch, count - start), generator)
                logits, _, ponders = model(examples.inputs, lengths=lengths_of(examples))
                given = examples.targets != UNASKED
                correct = (logits.argmax(-1) == examples.targets) & given
                sequences.append((correct == given).flatten(1).all(1)[given.flatten(1).any(1)])
                nll.append(sequence_nll(logits, examples.targets).sum() * examples.targets.size(1))
                there = examples.difficulty > 0
                steps.append(torch.stack([ponder.steps for ponder in ponders]).sum(0)[there].double())
                right.append(correct.sum(2)[there].double())
                asked.append(given.sum(2)[there].double())
                hard.append(examples.difficulty[there])
    finally:
        model.train(training)
    all_steps, all_right, all_asked, all_hard = (torch.cat(x) for x in (steps, right, asked, hard))
    levels = all_hard.unique().tolist()
    return TaskEvaluation(
        accuracy=(all_right.sum() / all_asked.sum()).item(),
        sequence_accuracy=torch.cat(sequences).double().mean().item(),
        nll=(torch.stack(nll).sum() / all_asked.sum()).item(),
        steps=all_steps.mean().item(),
        steps_by_difficulty={n: all_steps[all_hard == n].mean().item() for n in levels},
        accuracy_by_difficulty={
            n: (all_right[all_hard == n].sum() / all_asked[all_hard == n].sum()).item()
            for n in levels
            if all_asked[all_hard == n].any()
        },
    )
