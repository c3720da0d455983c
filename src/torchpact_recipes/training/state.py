"""Optimizers, and the state of training as named tensors: weights, baseline and what the optimizer keeps."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.models import HaltingHead
from torchpact_recipes.training.config import TrainConfig


def derived_seed(*parts: object) -> int:
    """A seed for this purpose, from everything that should tell it from others."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw by a seed on a device; afterwards the program's generators go on as if nothing had been drawn.

    >>> with seeded(1, torch.device("cpu")):
    ...     one = torch.rand(2)
    >>> with seeded(1, torch.device("cpu")):
    ...     print(torch.equal(one, torch.rand(2)))
    True
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def collect(model: nn.Module, baseline: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors that make up the state, by name; not copies.

    >>> model = nn.Linear(2, 1)
    >>> sorted(collect(model, tp.EMABaseline(), torch.optim.Adam(model.parameters())))
    ['baseline.total', 'baseline.weight', 'model.bias', 'model.weight']
    """
    tensors = {f"model.{k}": v for k, v in model.state_dict(keep_vars=False).items()}
    tensors |= {f"baseline.{k}": v for k, v in baseline.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{key}.{name}"] = value
    return tensors


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state as it is now, to put back later."""
    return {name: value.clone() for name, value in tensors.items()}


def put_back(tensors: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """Make the state what it was; what an optimizer has begun to keep since then starts from zero."""
    for name, value in tensors.items():
        if name in before:
            value.copy_(before[name])
        else:
            value.zero_()


def make_room(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], captured: bool = False
) -> None:
    """Create what an optimizer keeps, which it would do in its first iteration."""
    parameters = dict(model.named_parameters())
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, key, parameter = name.split(".", 2)
            if parameter in parameters:
                own = parameters[parameter]
                if value.shape == own.shape and key != "step":  # it lies in memory as the parameter does
                    room = torch.zeros_like(own, dtype=value.dtype, requires_grad=False)
                else:  # Adam counts its steps on the host, unless captured
                    at = None if key == "step" and not captured else own.device
                    room = torch.zeros_like(value, device=at)
                optimizer.state[own].setdefault(key, room)


def check_same_tensors(own: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    """Refuse a state that is not of the same names, shapes and types."""
    if own.keys() != given.keys():
        odd = sorted(own.keys() ^ given.keys())
        raise ValueError(f"expected the tensors of this run, got {len(odd)} others or missing, as {odd[0]}")
    for name, value in own.items():
        if value.shape != given[name].shape or value.dtype != given[name].dtype:
            found = f"{tuple(given[name].shape)} {given[name].dtype}"
            raise ValueError(f"expected {name} as {tuple(value.shape)} {value.dtype}, got {found}")


def make_optimizer(model: nn.Module, config: TrainConfig, lr: float | Tensor) -> torch.optim.Optimizer:
    """Return the optimizer of a run; weights of convolutions and linear layers decay.

    A learning rate that lives on the device is for iterations that are captured; that of a group of
    parameters is some ``times`` as large.
    """
    decayed = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    slow = set() if config.head_lr == 1 else {id(p) for p in _of_heads(model)}
    groups: list[dict[str, Any]] = []
    for of_head, decays in itertools.product((False, True), (True, False)):
        chosen = [p for p in model.parameters() if (id(p) in slow, id(p) in decayed) == (of_head, decays)]
        if chosen:
            times = config.head_lr if of_head else 1.0
            decay = config.weight_decay if decays else 0.0
            groups.append({"params": chosen, "weight_decay": decay, "times": times, "lr": lr * times})
    captured = isinstance(lr, Tensor)
    fused = True if captured else None  # whose kernels take such a rate
    if config.optimizer == "adam":
        return torch.optim.Adam(groups, lr=lr, fused=fused, capturable=captured)
    return torch.optim.SGD(groups, lr=lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused)


def _of_heads(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, HaltingHead):
            yield from module.parameters()


def make_adam(weights: Iterable[nn.Parameter], lr: float | Tensor) -> torch.optim.Adam:
    """Adam; a learning rate that lives on the device is for iterations that are captured."""
    captured = isinstance(lr, Tensor)
    # fused kernels take such a rate
    return torch.optim.Adam(list(weights), lr=lr, fused=True if captured else None, capturable=captured)
