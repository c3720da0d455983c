"""summary: which layers of a network are adaptive, which are not and why, and what the heads add."""

from dataclasses import dataclass
from typing import Any

from torchpact.adapt.adapting import adaptation_of
from torchpact.adapt.config import RunConfig
from torchpact.adapt.find import Refusal
from torchpact.adapt.network import inner_network
from torchpact.core.criterion import Criterion
from torchpact.core.layer_run import LayerRun


@dataclass(frozen=True)
class Summary:
    """What :func:`summary` found; ``print`` it.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> found = tp.summary(tp.adapt(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)))
        >>> found.parameters, found.head_parameters, found.runs[0].name
        (8896, 51, 'layers')

    """

    network: str
    runs: tuple[RunConfig, ...]
    kinds: tuple[str, ...]
    """The class of the layers of each run."""
    refused: tuple[Refusal, ...]
    parameters: int
    """The parameters of the network without heads."""
    head_parameters: int
    head_flops: tuple[int, ...]
    """FLOPs of the heads of each run for a position that never halts; 0 if not known."""
    trainable: int
    """The number of parameters that require gradients."""

    def __str__(self) -> str:
        share = self.head_parameters / max(self.parameters, 1)
        lines = [
            f"{self.network}: {self.parameters:,} parameters, {self.head_parameters:,} more in halting heads "
            f"({share:.3%}); {self.trainable:,} are trained"
        ]
        for run, kind, flops in zip(self.runs, self.kinds, self.head_flops, strict=True):
            added = f", heads cost {flops:,} FLOPs a {run.per}" if flops else ""
            lines.append(f"adaptive    {run.name}: {run.layers} × {kind}, per {run.per}{added}")
        lines += [f"unchanged   {each.name}: {each.reason}" for each in self.refused]
        return "\n".join(lines)


def summary(net: Any) -> Summary:
    """Return which layers are adaptive, which are not and why, and the parameters and FLOPs of the heads.

    Args:
        net: What :func:`~torchpact.adapt` returned.

    Returns:
        A record with these numbers, which prints as a few lines.

    Raises:
        ValueError: It is not adapted.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> net = tp.adapt(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
        >>> print(tp.summary(net))
        TransformerEncoder: 8,896 parameters, 51 more in halting heads (0.573%); 8,947 are trained
        adaptive    layers: 4 × TransformerEncoderLayer, per token, heads cost 96 FLOPs a token

    """
    root = inner_network(net)
    adaptation = adaptation_of(root)
    runs = [run for run in adaptation.runs if isinstance(run, LayerRun)]
    own = {id(p): p for p in adaptation.parameters()}
    every = {id(p): p for p in root.parameters()}
    return Summary(
        network=type(root).__name__,
        runs=adaptation.config.runs,
        kinds=tuple(type(run.layers[-1]).__name__ for run in runs),
        refused=adaptation.refused,
        parameters=sum(p.numel() for key, p in every.items() if key not in own),
        head_parameters=sum(p.numel() for p in own.values()),
        head_flops=tuple(_head_flops(run) for run in runs),
        trainable=sum(p.numel() for p in every.values() if p.requires_grad),
    )


def _head_flops(run: LayerRun) -> int:
    """Return two FLOPs a weight, for heads that use each weight once per position."""
    if run.per == "example" or any(isinstance(head, Criterion) for head in run.heads):
        return 0
    each = [sum(p.numel() for p in head.parameters() if p.dim() > 1) for head in run.heads]
    return 2 * (each[0] * (run.max_steps - 1) if len(each) == 1 else sum(each))
