"""Networks that tp.adapt refuses, with one line each, and runs of layers that were not found."""

from torch import nn

from torchpact.adapt.find import FoundRun, Refusal, Where, find_runs
from torchpact.core.halting_module import halting_modules

_WRAPPERS = {
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "DeepSpeedEngine",
}
"""Classes of networks on several devices, which collect their parameters when they are wrapped."""


def check_plain(net: nn.Module, name: str) -> None:
    """Refuse networks that cannot be made adaptive as a whole.

    Args:
        net: The network.
        name: The name that the submodule of the heads would have.

    Raises:
        TypeError: It is a container without a ``forward``.
        ValueError: It has an attribute of this name, has adaptive blocks, or is wrapped for several devices.

    """
    if isinstance(net, nn.ModuleList | nn.ModuleDict):
        raise TypeError(
            f"expected a network with a forward, got a {type(net).__name__}: adapt the module that holds it"
        )
    for module in net.modules():
        kinds = _WRAPPERS & {kind.__name__ for kind in type(module).__mro__}
        if kinds:
            raise ValueError(
                f"expected a network that is not wrapped yet, got a {kinds.pop()}, which would not "
                "synchronise the heads: adapt the network first, then wrap it"
            )
    if hasattr(net, name):
        raise ValueError(f"expected a network without an attribute {name!r}, the name of the heads")
    for block in halting_modules(net):
        raise ValueError(f"expected a network without adaptive blocks, got {block!r}")


def check_found(net: nn.Module, found: list[FoundRun], refused: list[Refusal], where: Where) -> None:
    """Refuse a network in which a requested run, or any run, is missing.

    Args:
        net: The network.
        found: The runs that were found.
        refused: The lists of layers that cannot halt.
        where: Which runs are requested.

    Raises:
        ValueError: A run is missing, or there is none.

    """
    names: list[str] = [where] if isinstance(where, str) else []
    if not (where is None or callable(where) or isinstance(where, str)):
        names = [*where]
    reasons = {each.name: each.reason for each in refused}
    missing = [name for name in names if name not in [run.name for run in found]]
    looked = "a list of two or more layers of one class"
    if missing and missing[0] in reasons:
        raise ValueError(f"{missing[0]!r}: {reasons[missing[0]]}")
    if missing:
        runs, others = find_runs(net)
        known = ", ".join(map(repr, [*(run.name for run in runs), *(each.name for each in others)])) or "none"
        raise ValueError(f"expected {looked} under where={missing[0]!r}; the network has {known}")
    if not found and refused:
        raise ValueError(
            f"expected {looked} in {type(net).__name__}; {refused[0].name!r}: {refused[0].reason}"
        )
    if not found:
        raise ValueError(
            f"expected {looked}, each of which passes a hidden state on, in a {type(net).__name__}: "
            "tp.AdaptiveBlock makes steps of your own adaptive"
        )
