"""The images a network spends most and least on, and what it did at every position of them."""

import base64
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpact import ACT, Ponder, use_mode
from torchpact.flops import flops_from_ponders
from torchpact.models import ResNet
from torchpact_recipes.data import Images, as_input
from torchpact_recipes.data.cifar10_formats import CLASSES

EACH = 8
"""Images of either kind."""

BATCH = 100


@torch.no_grad()
def gallery(model: ResNet, data: Images, mode: str | None = None, each: int = EACH) -> dict[str, Any]:
    """Return what the page shows of an adaptive network: the ``each`` hardest and easiest images of ``data``.

    The mode is ACT's for a network trained so, else thresholded. Halting probabilities are bytes, 255 for 1.
    """
    block: Any = model.blocks[0]
    mode = mode or ("act" if isinstance(block.mode, ACT) else "thresholded")
    flops, predicted = [], []
    with use_mode(model.eval(), mode):
        for images in data.images.split(BATCH):
            logits, ponders = model(as_input(images))
            flops.append(flops_from_ponders(model, ponders, images.shape).total)
            predicted.append(logits.argmax(1))
        spent, guess = torch.cat(flops), torch.cat(predicted)
        order = spent.argsort(descending=True, stable=True).tolist()
        each = min(each, len(order) // 2)
        picked = order[:each] + order[::-1][:each]
        logits, ponders = model(as_input(data.images[picked]))
    shown = [
        {
            "kind": "hardest" if i < each else "easiest",
            "pixels": _encoded(data.images[index]),
            "size": list(data.images.shape[2:]),
            "label": CLASSES[int(data.labels[index])],
            "predicted": CLASSES[int(guess[index])],
            "mflops": spent[index].item() / 1e6,
            "blocks": [_positions(ponder, i) for ponder in ponders],
        }
        for i, index in enumerate(picked)
    ]
    total = torch.stack([_enlarged(ponder.steps, data.images.shape[2:]) for ponder in ponders]).sum(0)
    return {
        "mode": mode,
        "units": model.config.units,
        "sizes": [list(ponder.steps.shape[2:]) for ponder in ponders],
        "range": [int(total.min()), int(total.max())],
        "images": shown,
    }


def _positions(ponder: Ponder, index: int) -> dict[str, str]:
    """How many units ran at each position, and the halting probabilities after all but the last."""
    probs = ponder.probs[:-1, index, 0].float()
    return {
        "steps": _encoded(ponder.steps[index, 0].to(torch.uint8)),
        "probs": _encoded((probs * 255).round().to(torch.uint8)),
    }


def _enlarged(steps: Tensor, size: torch.Size) -> Tensor:
    return F.interpolate(steps.float(), size=tuple(size), mode="nearest")


def _encoded(values: Tensor) -> str:
    return base64.b64encode(values.cpu().contiguous().numpy().tobytes()).decode()
