"""Heads of adapted networks: the default ones, and how a record names them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from torchpact.adapt.config import AdaptConfig
from torchpact.adapt.width import StateKind
from torchpact.core.criterion import Criterion, move_to_layer
from torchpact.core.layer_run import LayerRun, Per
from torchpact.nn.criteria.records import record_of
from torchpact.nn.halting_heads import ExampleHead, PixelHead, TokenHead

Heads = Callable[[nn.Module, int], nn.Module] | Criterion
"""A factory, called with a layer and the width of its state, or a criterion."""


def default_head(
    layer: nn.Module,
    kind: StateKind,
    per: Per,
    bias: float,
    normalize: bool,
    batch_dim: int,
) -> nn.Module:
    """Return the default head of a layer, on its device and in its precision.

    Args:
        layer: The layer.
        kind: The kind of its state.
        per: For what it decides.
        bias: The bias at the start.
        normalize: Whether the state is normalised first.
        batch_dim: The dimension of the state that is the batch.

    """
    head: nn.Module
    if kind.is_map:
        head = PixelHead(kind.width, bias, per_example=per == "example")
    elif per == "example":
        head = ExampleHead(kind.width, bias, normalize, batch_dim)
    else:
        head = TokenHead(kind.width, bias, normalize)
    move_to_layer(head, layer)
    return head


def check_bias(runs: Sequence[LayerRun], given: bool, wanted: bool) -> bool:
    """Return whether all heads have a bias that can be set.

    Args:
        runs: Those with the heads.
        given: Whether a bias is given.
        wanted: Whether one is to be chosen by an example.

    Raises:
        ValueError: There is none to be set.

    """
    for head in (head for run in runs for head in run.heads):
        bias = getattr(head, "bias", None)
        if isinstance(bias, Tensor) and bias.numel() == 1 and not isinstance(head, Criterion):
            continue
        if given or (wanted and not isinstance(head, Criterion)):
            argument = "bias" if given else "example"
            raise ValueError(
                f"expected heads with a bias of one number for {argument}= to set, got a "
                f"{type(head).__name__}: set it where you make the heads, and leave {argument}= out"
            )
        return False
    return True


def name_of(heads: Any) -> str:
    """Return the name of heads in a record: "linear", or that of a factory or class."""
    return "linear" if heads is None else getattr(heads, "__qualname__", type(heads).__name__)


def with_heads(config: AdaptConfig, runs: Sequence[LayerRun]) -> AdaptConfig:
    """Return a record with the heads that runs have now.

    Args:
        config: The record.
        runs: All runs.

    """
    heads = [head for run in runs for head in run.heads]
    criteria = [head for head in heads if isinstance(head, Criterion)]
    if not criteria:
        changed = any(type(head) not in (TokenHead, ExampleHead, PixelHead) for head in heads)
        default = config.heads == "linear" or config.criterion is not None
        name = name_of(heads[0]) if changed and default else config.heads
        return replace(config, criterion=None, heads=name if changed or not default else "linear")
    records = [record_of(head) if isinstance(head, Criterion) else None for head in heads]
    known = all(record == records[0] for record in records)
    return replace(config, heads=name_of(criteria[0]), criterion=records[0] if known else None)
