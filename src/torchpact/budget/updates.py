"""An update of a distillation: it depends on its number and the weights only."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torchpact.budget.distillation import Distillation, Item


def gradient_step(
    optimizer: torch.optim.Optimizer, loss: Tensor, parameters: list[nn.Parameter], clip: float
) -> None:
    """Move parameters along the gradient of a loss.

    Args:
        optimizer: Of the parameters.
        loss: The loss.
        parameters: Whose gradients are clipped.
        clip: The largest norm of gradients.

    Raises:
        ValueError: Gradients are not finite.

    """
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(parameters, clip)
    if not bool(norm.isfinite()):
        raise ValueError(f"expected finite gradients, got a norm of {float(norm)}: lower the learning rate")
    optimizer.step()


def drawn(work: Distillation, stage: str) -> tuple[Item, random.Random]:
    """Return the batch of the present update, and what else is drawn in it.

    Batches are drawn without replacement, epoch by epoch.

    Args:
        work: The distillation.
        stage: The name of the stage.

    """
    count, seed = len(work.train), work.config.seed
    order = random.Random(f"{seed} {stage} {work.done // count}").sample(range(count), count)
    return work.train[order[work.done % count]], random.Random(f"{seed} {stage} update {work.done}")


@contextmanager
def fixed(ada: nn.Module, seed: int, update: int) -> Iterator[None]:
    """Let draws of an update depend on its number only; dropout and batch norm rest, as in evaluation.

    Args:
        ada: The student.
        seed: Of the stage.
        update: The number of the update.

    """
    devices = [*{p.device for p in ada.parameters() if p.is_cuda}]
    ada.eval()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed * 1_000_003 + update)
        yield


@contextmanager
def located(work: Distillation) -> Iterator[None]:
    """Say in errors where training was.

    Args:
        work: The distillation.

    """
    try:
        yield
    except ValueError as error:
        where = f" (in update {work.done + 1} of the {work.stage})"
        raise ValueError(f"{error}{where}") from None
