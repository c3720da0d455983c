"""Students of the first layers, distilled by the same loop: whether halting is better than fewer layers."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from torchpact.adapt import adapt, unadapt
from torchpact.adapt.find import find_runs
from torchpact.adapt.network import inner_network
from torchpact.budget.discrepancy import DistillLoss
from torchpact.budget.distillation import Distillation
from torchpact.budget.progress import Report, reporter
from torchpact.budget.stages import DistillConfig
from torchpact.budget.train_exits import train_exits
from torchpact.checks import check_count


def first_layers(net: Any, layers: int) -> Any:
    """Return a copy of a network with the first layers of its run of layers.

    Args:
        net: A network with one list of layers.
        layers: How many are kept.

    Raises:
        ValueError: It has no such list, or several, or one of fewer layers.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> len(first_layers(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), 4).layers)
        4

    """
    student = copy.deepcopy(net)
    root = inner_network(student)
    found, _ = find_runs(root)
    lists = [run for run in found if isinstance(root.get_submodule(run.name), nn.ModuleList | nn.Sequential)]
    if len(found) != 1 or not lists or not lists[0].name:
        raise ValueError(
            f"expected a network with one list of layers, got {len(found)} runs, {len(lists)} of them lists"
        )
    (run,) = found
    check_count("layers", layers, 1, len(run.layers))
    owner = root.get_submodule(run.name.rpartition(".")[0])
    setattr(owner, run.name.rpartition(".")[2], root.get_submodule(run.name)[:layers])  # type: ignore[index]
    for holder in (getattr(root, "config", None), getattr(owner, "config", None)):
        if holder is not None and hasattr(holder, "num_hidden_layers"):
            holder.num_hidden_layers = layers
    if isinstance(getattr(owner, "num_layers", None), int):
        owner.num_layers = layers  # type: ignore[assignment]
    return student


def fewer_layers(
    net: Any,
    batches: Iterable[Any],
    layers: int,
    *,
    loss: DistillLoss | None = None,
    held_out: Iterable[Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    logits: bool | None = None,
    config: DistillConfig | None = None,
    progress: Report | bool | None = None,
) -> Any:
    """Return a student of the first layers of a network, distilled from it: the baseline of every halting.

    It is trained by the loop of :func:`torchpact.distill`, with as many updates as exits and heads get
    together, on its output alone.

    Args:
        net: The network; it is not changed.
        batches: As for :func:`torchpact.distill`.
        layers: How many layers the student has, at least 2.
        loss: As for :func:`torchpact.distill`.
        held_out: Batches for the early stop.
        inputs: Takes what the network is called with out of a batch.
        logits: Whether the output is class logits.
        config: That of the distillation to compare with.
        progress: Is told of progress.

    Returns:
        A plain network, in ``eval()``.

    Raises:
        ValueError: The network has no single list of layers, or batches or losses are not as expected.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> net = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
        >>> short = tp.budget.DistillConfig(exit_updates=4, head_updates=4)
        >>> student = tp.budget.fewer_layers(net, [torch.randn(8, 5, 16) for _ in range(5)], 2, config=short)
        >>> len(student.layers)
        2

    """
    check_count("layers", layers, 2)
    given = config or DistillConfig()
    alone = replace(
        given,
        exit_updates=given.exit_updates + given.head_updates,
        exit_shares=(*[0.0] * (layers - 1), 1.0),
    )
    student = adapt(first_layers(net, layers))
    work = Distillation(
        inner_network(student),
        inner_network(net),
        batches,
        held_out,
        1.0,
        loss,
        inputs,
        logits,
        False,
        alone,
        None,
        reporter(progress),
    )
    train_exits(work)
    inner_network(unadapt(student)).eval()
    return student
