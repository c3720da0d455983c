"""Cases of the zoo: the weights of every network, and what they make of four images."""

from functools import partial

import torch
from torch import Tensor

import torchpact as tp
from tests.golden.common import Case, flat, uniform
from tests.golden.digest import Fields


def images() -> Tensor:
    """Two images of noise, and two of coloured squares."""
    squares = uniform(2, 3, 8, 8, seed=12).repeat_interleave(4, 2).repeat_interleave(4, 3)
    return torch.cat([uniform(2, 3, 32, 32, seed=11), squares])


def network(name: str) -> Fields:
    fields: Fields = {}
    model = tp.models.zoo.load(name)
    for mode in (None, "thresholded") if model.config.adaptive else (None,):
        if mode is not None:
            tp.use_mode(model, mode)
        key = mode or "own"
        torch.manual_seed(1)
        with torch.no_grad():
            logits, ponders = model(images())
        fields |= flat(f"{key}.logits", logits) | flat(f"{key}.steps", [ponder.steps for ponder in ponders])
        torch.manual_seed(1)
        count = tp.count_flops(model, images())
        fields |= {f"{key}.flops": count.total, f"{key}.blocks": count.blocks, f"{key}.rest": count.rest}
    return fields


CASES = [Case(f"zoo-{entry.name}", partial(network, entry.name)) for entry in tp.models.zoo.entries()]
