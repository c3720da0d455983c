"""What the cases are made of: weights and inputs that depend on a seed only, and what is kept of a run."""

import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import environ
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import torchpact as tp
from tests.golden.digest import Fields

M = TypeVar("M", bound=nn.Module)

MODES: dict[str, Any] = {
    "relaxed": tp.Relaxed(),
    "discrete": tp.Discrete(),
    "thresholded": tp.Thresholded(0.3),
    "act": tp.ACT(),
}
NORMS = (nn.BatchNorm2d, nn.LayerNorm)


@dataclass(frozen=True)
class Case:
    """Something that the library does, by name; every run gives the same."""

    name: str
    make: Callable[[], Fields]
    compiled: bool = False
    """Whether it needs a C++ compiler."""

    def run(self) -> Fields:
        """Return what came out; the global generator is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make()


def has_compiler() -> bool:
    """Whether engines that are compiled can be had here."""
    if environ.get("TORCHPACT_NATIVE") == "0":
        return False
    return any(map(shutil.which, (environ.get("CXX", "c++"), "g++", "clang++")))


def uniform(*shape: int, seed: int = 0, size: float = 1.7) -> Tensor:
    """Draw from U(−size, size), by default of variance 1: every processor draws the same."""
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.rand(shape, generator=generator) - 1) * size


def varied(*shape: int, seed: int = 0) -> Tensor:
    """Draw examples of unlike contrast and brightness, so that one halts early and another late."""
    along = torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)) / (shape[0] - 1)
    return uniform(*shape, seed=seed) * (0.25 + 1.5 * along) + (along - 0.5) * 2


@torch.no_grad()
def fill(model: M, seed: int = 0, halting: float | None = 0.0) -> M:
    """Give a model weights that depend on their names only, and the biases of its heads this value."""
    for path, module in model.named_modules():
        centre = 1.0 if isinstance(module, NORMS) else 0.0
        for name, x in module.named_parameters(path, recurse=False):
            key = zlib.crc32(f"{seed} {name}".encode())
            if x.dim() > 1:
                x.copy_(uniform(*x.shape, seed=key, size=(6 / x[0].numel()) ** 0.5))
            else:
                x.copy_(uniform(*x.shape, seed=key, size=0.2) + (centre if name.endswith("weight") else 0.0))
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            key = zlib.crc32(f"{seed} {path}".encode())
            module.running_mean.copy_(uniform(module.num_features, seed=key, size=0.3))
            module.running_var.copy_(uniform(module.num_features, seed=key + 1, size=0.3) + 1)
    blocks = [module for module in model.modules() if isinstance(module, tp.AdaptiveBlock)]
    for head in (head for block in blocks for head in block.halting.modules()):
        if isinstance(head, nn.Linear | nn.Conv2d) and head.bias is not None and halting is not None:
            head.bias.fill_(halting)
    return model


def flat(name: str, value: Any) -> Fields:
    """Return all that a value holds, by name; what is not known, None or NaN throughout, is left out."""
    fields: Fields = {}
    if isinstance(value, Tensor):
        unknown = value.is_floating_point() and value.numel() > 0 and bool(value.isnan().all())
        return {} if unknown else {name: value.detach().clone()}
    if value is None:
        return {}
    whole: dict[str, Any]
    if isinstance(value, tp.Ponder):  # weights, name and price came later
        whole = dict(zip(value._fields[:5], value[:5], strict=True))
    elif isinstance(value, PackedSequence):
        whole = {"data": value.data, "batch_sizes": value.batch_sizes}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        whole = value._asdict()
    elif isinstance(value, dict):
        whole = value
    elif isinstance(value, tuple | list):
        whole = {str(index): part for index, part in enumerate(value)}
    else:
        return {name: value}
    for key, part in whole.items():
        fields |= flat(f"{name}.{key}", part)
    return fields


def parameters(model: nn.Module) -> Fields:
    """Return the gradients of all parameters; those without any are left out."""
    return {f"learn.grad.{name}": x.grad for name, x in model.named_parameters() if x.grad is not None}


def states(model: nn.Module) -> Fields:
    """Return all buffers, batch norm statistics among them."""
    return {f"learn.state.{key}": x.double() for key, x in model.named_buffers()}


def nll_of(output: Any) -> Tensor:
    """Return a number for every example, of which all of the output is part."""
    if isinstance(output, PackedSequence):
        output = torch.nn.utils.rnn.pad_packed_sequence(output, batch_first=True)[0]
    parts = output if isinstance(output, tuple) else (output,)
    return sum((part - 0.5).square().flatten(1).mean(1) for part in parts)  # type: ignore[no-any-return]


def objective(nll: Tensor, ponders: Any, tau: Any) -> Fields:
    """Differentiate what a network is trained by; return it, and the baseline."""
    several = [ponders] if isinstance(ponders, tp.Ponder) else [*ponders]
    # over all positions alike, as it was before padding had a weight
    several = [ponder._replace(weights=None) for ponder in several]
    ponders = several[0] if isinstance(ponders, tp.Ponder) else several
    if several and all(ponder.log_prob is not None for ponder in several):
        baseline = tp.EMABaseline(decay=0.9)
        baseline(torch.tensor([-1.0, -2.0]))  # else it starts from 0
        loss = tp.reinforce_loss(nll, ponders, tau, baseline)
        fields = flat("learn", {"baseline": baseline(torch.zeros(1)), "map": tp.map_loss(nll, ponders, tau)})
    else:
        loss, fields = tp.map_loss(nll, ponders, tau), {}
    loss.backward()
    return {"learn.loss": loss.detach()} | fields


def learn(
    model: nn.Module,
    inputs: Sequence[Any],
    mode: Any,
    tau: Any = 0.1,
    seed: int = 1,
    call: Callable[..., tuple[Any, Any]] | None = None,
) -> Fields:
    """Run a block with gradients; return outputs, ponders, the loss and all gradients."""
    torch.manual_seed(seed)
    model.zero_grad()
    first, *others = inputs
    if isinstance(first, Tensor) and first.is_floating_point():
        first = first.clone().requires_grad_()
    with tp.use_mode(model, mode):
        output, ponder = (call or model)(first, *others)
    fields = flat("learn.output", output) | flat("learn.ponder", ponder)
    fields |= objective(nll_of(output), ponder, tau) | parameters(model)
    if isinstance(first, Tensor) and first.grad is not None:
        fields["learn.grad.(input)"] = first.grad
    return fields


def evaluate(
    model: nn.Module, inputs: Sequence[Any], mode: Any, seed: int = 2, name: str = "run", **options: Any
) -> Fields:
    """Run a model without gradients; return all that comes out."""
    torch.manual_seed(seed)
    with torch.no_grad(), tp.use_mode(model, mode):
        return flat(name, model(*inputs, **options))


def flops(model: nn.Module, inputs: Any, mode: Any, **kwargs: Any) -> Fields:
    """Return what a run costs."""
    torch.manual_seed(2)
    with tp.use_mode(model, mode):
        count = tp.count_flops(model, inputs, **kwargs)
    return {"flops.total": count.total, "flops.blocks": count.blocks, "flops.rest": count.rest}
