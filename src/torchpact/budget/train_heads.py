"""The second stage of a distillation: halting heads learn, at a price that moves until the budget is met."""

import torch
from torch import Tensor, nn

from torchpact.budget.block_names import named_by_place
from torchpact.budget.budget import Budget
from torchpact.budget.discrepancy import Losses
from torchpact.budget.distillation import Distillation, Item
from torchpact.budget.exit_outputs import Exit
from torchpact.budget.progress import Progress
from torchpact.budget.training_state import load_optimizer, optimizer_tensors, part, prefixed
from torchpact.budget.updates import drawn, fixed, gradient_step, located
from torchpact.core.collect import collect
from torchpact.core.overrides import use_mode


def train_heads(work: Distillation) -> None:
    """Train the heads at a price of a step that moves until the budget is met; weights stay.

    By the advantage of halting, where a network has one block and a loss for whatever decides; otherwise by
    the relaxed objective.

    Args:
        work: The distillation; nothing is trained if heads have no parameters.

    """
    config, ada = work.config, work.ada
    heads = [p for p in work.heads.values()]  # noqa: C416
    if not heads or not config.head_updates:
        return
    before = [(p, p.requires_grad) for p in ada.parameters()]
    ada.requires_grad_(False)
    for head in heads:
        head.requires_grad_(True)
    optimizer = torch.optim.Adam(heads, lr=config.head_lr)
    saved = work.saved
    price = (
        {}
        if isinstance(work.asked, Budget)
        else _price_range(work)
        if saved is None
        else saved.record["price"]
    )
    if price:
        prices, targets = work.budget.prices, work.budget.targets
        work.budget = Budget(targets, **price)
        work.budget.prices = prices
    if saved is not None:
        load_optimizer(optimizer, part(saved.tensors, "optimizer"))
        work.budget.load_state_dict(saved.record["budget"])
        work.budget.targets = dict(saved.record["targets"])
    exits = work.exits(range(1, work.most + 1))
    values: dict[str, float] = {}
    while work.done < config.head_updates:
        item, _ = drawn(work, "heads")
        with fixed(ada, config.seed + 1, work.done), located(work):
            loss = _head_objective(work, item, exits)
            gradient_step(optimizer, loss, heads, config.clip)
        work.budget.step()
        work.done += 1
        values = {"loss": float(loss.detach()), "cost": work.budget.log["relaxed"], "tau": work.budget.tau}
        work.report(Progress("heads", work.done, config.head_updates, values))
        if work.done % config.save_every == 0 or work.done == config.head_updates:
            state = {"budget": work.budget.state_dict(), "targets": work.budget.targets, "price": price}
            work.save(state, prefixed("optimizer", optimizer_tensors(optimizer)))
    for p, needed in before:
        p.requires_grad_(needed)


def _head_objective(work: Distillation, item: Item, exits: list[Exit]) -> Tensor:
    """Return the objective of the heads for a batch."""
    if len(work.blocks) == 1:
        losses, ponders = work.losses(item, exits)
        (ponder,) = ponders
        fitted = _by_decision(losses, ponder.steps)
        if fitted is not None:
            values, weights = fitted
            return work.budget.loss(values, ponder._replace(weights=weights), "advantage")
    with use_mode(work.ada, "relaxed"), named_by_place(work.blocks), collect(work.ada) as ponders:
        output = item.given.call(work.ada)
    return work.budget.loss(work.loss_of(output, item).by_example, ponders, "relaxed")


def _by_decision(losses: list[Losses], steps: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the losses of whatever decides, (L, batch, …), and its weights; None where there are none."""
    batch = len(steps)
    if steps.numel() == batch:
        values = torch.stack([each.by_example for each in losses])
        return values.view(len(losses), *steps.shape), torch.ones_like(steps, dtype=values.dtype)
    if losses[0].values.dim() == 1 or steps.shape[1:2].numel() * batch != steps.numel():
        return None
    short = steps.size(1) - losses[0].values.size(1)  # as of the next token, which the last one has not
    if short < 0:
        return None
    values = nn.functional.pad(torch.stack([each.values for each in losses]), (0, short))
    weights = nn.functional.pad(losses[0].weights, (0, short))
    return values.view(len(losses), *steps.shape), weights.view(steps.shape)


def _price_range(work: Distillation) -> dict[str, float]:
    """Return a start, a floor and a ceiling of the price: what a step is worth, by the held-out losses."""
    held = work.held_out_losses()
    worth = max(float(held.max() - held.min()) / max(len(held) - 1, 1), 1e-8)
    return {"start": worth / 4, "floor": worth / 400, "ceiling": worth * 100}
