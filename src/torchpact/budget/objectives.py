"""The objectives of a budget by name: what each takes, at the price of a step of each block."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchpact.core.baseline import EMABaseline
from torchpact.core.exit_objectives import advantage_loss, exact_loss
from torchpact.core.objective import map_loss, ponder_loss, reinforce_loss, rloo_loss
from torchpact.core.ponder import Ponder

BY_EXIT = ("exact", "advantage", "ponder")
OBJECTIVES = ("relaxed", *BY_EXIT, "reinforce", "rloo")


def ponders_in(ponders: Any) -> list[Ponder]:
    """Return ponders given as one, as those of several blocks, or as those of several runs.

    Args:
        ponders: As objectives take them.

    Raises:
        TypeError: There is something else.
        ValueError: There are none.

    """
    if isinstance(ponders, Ponder):
        return [ponders]
    if not isinstance(ponders, Sequence):
        raise TypeError(f"expected a Ponder, or a sequence of them, got {type(ponders).__name__}")
    found = [ponder for each in ponders for ponder in ponders_in(each)]
    if not found:
        raise ValueError(
            "expected the ponders of at least one call, got none: call the network within "
            "`with tp.collect(net) as ponders:`"
        )
    return found


def objective_loss(
    name: str, losses: Any, ponders: Any, taus: Sequence[float], baseline: EMABaseline
) -> Tensor:
    """Return an objective.

    Args:
        name: One of :data:`OBJECTIVES`.
        losses: As the objective takes them.
        ponders: What the blocks did.
        taus: The price of a step of each ponder.
        baseline: For "reinforce".

    Raises:
        ValueError: The ponders are of several blocks, or have no exits, where losses are of every exit.

    """
    if name == "relaxed":
        return map_loss(losses, ponders, taus)
    if name == "reinforce":
        return reinforce_loss(losses, ponders, taus, baseline)
    if name == "rloo":
        runs = 1 if isinstance(losses, Tensor) else len(losses)
        return rloo_loss(losses, ponders, taus[: len(taus) // max(runs, 1)])
    blocks = ponders_in(ponders)
    if len(blocks) > 1:
        raise ValueError(f"expected the ponder of one call for objective={name!r}, got {len(blocks)}")
    exits, weights = blocks[0].exits, blocks[0].weights
    if exits is None:
        raise ValueError(
            f"expected a ponder with exits for objective={name!r}, got one without: call the network within "
            "`with tp.collect(net, exits=True) as ponders:`"
        )
    if name == "exact":
        return exact_loss(losses, exits.logits, taus[0], weights)
    if name == "advantage":
        return advantage_loss(losses, exits.logits, taus[0], weights)
    return ponder_loss(losses, exits.logits.reshape(losses.shape), taus[0])
