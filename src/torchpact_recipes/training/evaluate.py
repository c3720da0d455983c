"""Evaluation of a network on a whole data set, in any set of modes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
from torch.nn import functional as F

from torchpact import Mode, use_mode
from torchpact.checks import check_choice, check_count
from torchpact.flops import flops_from_ponders
from torchpact.models import ResNet
from torchpact_recipes.data import Images, as_input
from torchpact_recipes.training.config import Precision
from torchpact_recipes.training.state import seeded


def casting(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return the context in which to run a network at a precision."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


@dataclass(frozen=True)
class Evaluation:
    """What a network did in one mode; FLOPs and steps are per image."""

    accuracy: float
    nll: float
    flops: float
    flops_std: float
    block_flops: list[float]
    steps: list[float]
    """Mean iterations run per position, block by block: z, or ACT's N."""
    cost: list[float]
    """Mean of what the objective charges: N or ρ where that is known; else z."""
    images: int
    undecided: list[float] | None = None
    """Share of decisions taken at a probability between 0.1 and 0.9, block by block; where they are drawn."""
    block_flops_std: list[float] | None = None
    """Standard deviation over images; results of older versions do not have it."""

    def objective(self, tau: float) -> float:
        """Return nll + τ Σ cost."""
        return self.nll + tau * sum(self.cost)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, such as JSON holds."""
        return asdict(self)


@torch.no_grad()
def evaluate(
    model: ResNet,
    data: Images,
    mode: Mode | str | None = None,
    *,
    batch: int | None = None,
    precision: str = "fp32",
    seed: int = 0,
    seen: Callable[[int], object] = lambda images: None,
) -> Evaluation:
    """Evaluate on all of ``data``, in the given mode or the model's own.

    ``seen`` is called with the number of images of every batch that is done.
    """
    device = data.images.device
    check_choice("precision", precision, get_args(Precision))
    if batch is None:
        batch = 2500 if device.type == "cuda" else 250
    check_count("batch", batch)
    check_count("seed", seed, 0, 2**63 - 1)
    training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.double, device=device)
    blocks = len(model.blocks) if model.config.adaptive else 0
    steps = torch.zeros(blocks, dtype=torch.double, device=device)
    cost = torch.zeros(blocks, dtype=torch.double, device=device)
    totals, block_flops = [], []
    decisions = torch.zeros(blocks, 2, dtype=torch.double, device=device)  # undecided, and all
    try:
        # thresholded, steps and cost are all that is read: logits of all pixels would only take memory
        deciding = nullcontext() if mode is None else use_mode(model, mode, details=False)
        with seeded(seed, device), casting(device, precision), deciding:
            for images, labels in zip(data.images.split(batch), data.labels.split(batch), strict=True):
                logits, ponders = model(as_input(images))
                logits = logits.float()
                sums[0] += F.cross_entropy(logits, labels, reduction="sum")
                sums[1] += (logits.argmax(1) == labels).sum()
                count = flops_from_ponders(model, ponders, images.shape)
                totals.append(count.total)
                block_flops.append(count.blocks)
                for k, ponder in enumerate(ponders):
                    steps[k] += ponder.steps.double().mean() * len(labels)
                    cost[k] += ponder.cost.double().mean() * len(labels)
                    if ponder.log_prob is not None:
                        taken, h = ponder.active[:-1], ponder.probs[:-1]
                        decisions[k, 0] += (taken & (h > 0.1) & (h < 0.9)).sum()
                        decisions[k, 1] += taken.sum()
                seen(len(labels))
    finally:
        model.train(training)
    total, by_block = torch.cat(totals).double(), torch.cat(block_flops).double()
    n = len(data)
    return Evaluation(
        accuracy=sums[1].item() / n,
        nll=sums[0].item() / n,
        flops=total.mean().item(),
        flops_std=total.std(correction=0).item(),
        block_flops=by_block.mean(0).tolist(),
        block_flops_std=by_block.std(0, correction=0).tolist(),
        steps=(steps / n).tolist(),
        cost=(cost / n).tolist(),
        images=n,
        undecided=(decisions[:, 0] / decisions[:, 1]).tolist() if blocks and decisions[:, 1].all() else None,
    )


def evaluate_modes(
    model: ResNet, data: Images, modes: Sequence[str] | Mapping[str, Mode | str], **options: Any
) -> dict[str, dict[str, Any]]:
    """Evaluate in each of the modes, or in modes under the names given; a plain network as "plain"."""
    if not model.config.adaptive:
        return {"plain": evaluate(model, data, **options).to_dict()}
    named = modes if isinstance(modes, Mapping) else {mode: mode for mode in modes}
    return {name: evaluate(model, data, mode, **options).to_dict() for name, mode in named.items()}
