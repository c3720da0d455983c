"""The state of training as named tensors: weights, baseline and what the optimizer keeps."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


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
