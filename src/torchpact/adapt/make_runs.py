"""From runs of layers that were found to runs with heads: the width of the state, what is decided for."""

from collections.abc import Mapping

from torch import nn

from torchpact.adapt.config import RunConfig
from torchpact.adapt.find import FoundRun, Refusal
from torchpact.adapt.heads import Heads, default_head
from torchpact.adapt.width import StateKind, state_kind
from torchpact.core.call_args import CallArgs
from torchpact.core.criterion import placed
from torchpact.core.layer_run import LayerRun, Per


def kinds_of(
    net: nn.Module, found: list[FoundRun], example: CallArgs | None, record: Mapping[str, RunConfig]
) -> tuple[dict[str, StateKind], list[Refusal]]:
    """Return the kind of the state of each run by its name, and the runs whose state is not known.

    Args:
        net: The network.
        found: The runs.
        example: A call of the network, for layers of no known family.
        record: What an earlier ``AdaptConfig`` says of runs, by their names.

    """
    kinds, unknown = {}, []
    for run in found:
        if run.family is None and run.name in record:
            kinds[run.name] = StateKind(record[run.name].width, record[run.name].is_map)
            continue
        try:
            kinds[run.name] = state_kind(net, run, example)
        except ValueError as error:
            unknown.append(Refusal(run.name, str(error)))
    return kinds, unknown


def run_of(
    net: nn.Module, found: FoundRun, kind: StateKind, per: Per, bias: float, heads: Heads | None
) -> LayerRun:
    """Return a run with a head for every layer but the last, or a single head for one repeated layer.

    Args:
        net: The network.
        found: The run of layers.
        kind: The kind of its state.
        per: For what it decides.
        bias: The bias of default heads at the start.
        heads: Makes other heads.

    """
    family = found.family
    batch_dim = 0 if family is None or family.batch_dim is None else family.batch_dim(found.layers[-1])
    normalize = family is None or family.normalize
    shared = len({id(layer) for layer in found.layers}) == 1
    layers = found.layers[:1] if shared else found.layers[:-1]
    if heads is None:
        made = [default_head(layer, kind, per, bias, normalize, batch_dim) for layer in layers]
    else:
        made = placed(net, heads, layers, per, kind.width)
    return LayerRun(
        found.name,
        found.layers,
        found.layer_names,
        made,
        per=per,
        batch_dim=batch_dim,
        causal=_is_decoder(net, found),
        width=kind.width,
        is_map=kind.is_map,
        known_layout=family is not None,
    )


def _is_decoder(net: nn.Module, run: FoundRun) -> bool:
    """Whether layers run with a cache; those that no family knows do, if their network generates."""
    if run.family is None:
        return hasattr(net, "generate")
    return run.family.causal or bool(getattr(run.layers[-1], "is_decoder", False))  # a BERT may be one


def decides_for(net: nn.Module, run: FoundRun, is_map: bool, per: Per | None) -> Per:
    """Return the unit of decision: the requested one, or the family's default.

    Args:
        net: The network.
        run: The run.
        is_map: Whether its state is a map.
        per: The requested unit.

    Raises:
        ValueError: Its layers cannot decide for that.

    """
    decoder = _is_decoder(net, run)
    choices: tuple[Per, ...]
    if run.family is not None:
        choices = tuple(each for each in run.family.per if each != "example" or not decoder)
    elif decoder:
        choices = ("token",)
    else:
        choices = ("pixel" if is_map else "token", "example")
    if per is None:
        return choices[0]
    if per not in choices:
        kind = type(run.layers[-1]).__name__ if run.family is None else run.family.name
        refused_by_cache = decoder and per == "example"
        why = ", since cached tokens could not be dropped with their example" if refused_by_cache else ""
        options = " or ".join(repr(each) for each in choices)
        raise ValueError(f"expected per={options} for the layers of {kind} in {run.name!r}{why}; got {per!r}")
    return per
