"""The first stage of a distillation: all weights learn, so that exits are useful."""

import math

import torch
from torch import Tensor, nn

from torchpact.budget.distillation import Distillation
from torchpact.budget.progress import Progress
from torchpact.budget.training_state import load_optimizer, optimizer_tensors, part, prefixed
from torchpact.budget.updates import drawn, fixed, gradient_step, located


def train_exits(work: Distillation) -> None:
    """Train all weights on the mean loss of exits, and keep those that were best on held-out batches.

    Args:
        work: The distillation; nothing is trained if it is frozen or past this stage.

    """
    config, ada = work.config, work.ada
    if work.stage != "exits" or not work.weights or not config.exit_updates:
        work.stage, work.done = ("heads", 0) if work.stage == "exits" else (work.stage, work.done)
        return
    optimizer = torch.optim.AdamW(work.weights, lr=config.lr, weight_decay=0.01)
    best, best_loss, waited = _copied(ada), math.inf, 0
    if work.saved is not None:
        best, best_loss = part(work.saved.tensors, "best"), work.saved.record["best_loss"]
        waited = work.saved.record["waited"]
        load_optimizer(optimizer, part(work.saved.tensors, "optimizer"))
    else:
        best_loss = work.held_out_loss()
    values: dict[str, float] = {}
    while work.done < config.exit_updates and waited < config.patience:
        for group in optimizer.param_groups:
            group["lr"] = config.lr * _schedule(work.done, config.exit_updates)
        item, draw = drawn(work, "exits")
        with fixed(ada, config.seed, work.done), located(work):
            losses = work.losses_among_halted(item, work.drawn_exits(draw))
            loss = torch.stack([each.mean for each in losses]).mean()
            gradient_step(optimizer, loss, work.weights, config.clip)
        work.done += 1
        values["loss"] = float(loss.detach())
        if work.done % config.check_every == 0 or work.done == config.exit_updates:
            with located(work):
                held = work.held_out_loss()
            waited = 0 if held < best_loss else waited + 1
            if held < best_loss:
                best, best_loss = _copied(ada), held
            values["held out"] = held
        work.report(Progress("exits", work.done, config.exit_updates, values))
        if work.done % config.save_every == 0:
            tensors = prefixed("best", best) | prefixed("optimizer", optimizer_tensors(optimizer))
            work.save({"best_loss": best_loss, "waited": waited}, tensors)
    ada.load_state_dict(best)
    work.stage, work.done, work.saved = "heads", 0, None


def _schedule(update: int, updates: int) -> float:
    """Return the learning rate of an update as a share of the largest: a linear warm-up, then a cosine."""
    warm = max(1, min(100, updates // 20))
    return min((update + 1) / warm, 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * update / updates)))


def _copied(net: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in net.state_dict().items()}
