"""Finding runs of layers in a network: lists of modules of one class that pass a hidden state on."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchpact.adapt.families.registry import Family, family_of, family_of_owner
from torchpact.core.halting_module import HaltingModule

Where = Sequence[str] | Callable[[str, nn.Module], bool] | str | None


@dataclass(frozen=True)
class FoundRun:
    """Layers that a network calls one after the other."""

    name: str
    """The name of the list that holds them, or of the module that calls them in a way of its own."""
    owner: str
    """The name of the module whose forward calls them."""
    layers: tuple[nn.Module, ...]
    """In the order of the calls."""
    layer_names: tuple[str, ...]
    family: Family | None
    """None of layers that nothing is known of."""


@dataclass(frozen=True)
class Refusal:
    """A list of layers that is not made adaptive, and why."""

    name: str
    reason: str


def find_runs(net: nn.Module, where: Where = None) -> tuple[list[FoundRun], list[Refusal]]:
    """Return the outermost runs of layers of a network, and the lists that were rejected.

    A run has two layers or more, of one class, whose parameters have equal shapes from the second layer on.
    Layers of a class that no family knows have to be made of other modules, so that lists of single layers
    (heads, projections) are left alone; beside runs of known families they are taken only if ``where`` says
    so.

    Args:
        net: Any network.
        where: Names of runs, or a function of the name and the module of a list that says whether to look at
            it; by default all.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> runs, refused = find_runs(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
        >>> runs[0].name, runs[0].owner, len(runs[0].layers)
        ('layers', '', 4)

    """
    wanted = _filter(where)
    candidates: list[FoundRun] = []
    blocks: list[str] = []  # what is adaptive by itself
    for name, module in net.named_modules():
        if _is_within(name, blocks):
            continue
        if isinstance(module, HaltingModule):
            blocks.append(name)
            continue
        found = _candidate(name, module)
        if found is not None and wanted(name, module):
            candidates.append(found)
    runs: list[FoundRun] = []
    refused: list[Refusal] = []
    for found in candidates:
        if found.family is not None:
            _sort_in(found, runs, refused)
    known = [run.name for run in runs] + [each.name for each in refused]
    for found in candidates:
        if found.family is None and not any(_is_within(name, [found.name]) for name in known):
            problem = _problem(found)
            if problem is None and where is None and known:
                problem = "layers of no known family beside known ones: name it in where= to adapt it, too"
            _sort_in(found, runs, refused, problem)
    # a list that holds other lists with runs in them is no run that failed
    names = [run.name for run in runs]
    refused = [each for each in refused if not any(_is_within(name, [each.name]) for name in names)]
    order = {name: place for place, (name, _) in enumerate(net.named_modules())}
    return _without_shared(sorted(runs, key=lambda run: order[run.name]), refused), refused


def _sort_in(run: FoundRun, runs: list[FoundRun], refused: list[Refusal], problem: str | None = "?") -> None:
    """Add a candidate to the runs or to what is refused, unless it lies within another run."""
    if _is_within(run.name, [each.name for each in runs]):
        return
    problem = _problem(run) if problem == "?" else problem
    if problem is None:
        runs.append(run)
    elif problem:
        refused.append(Refusal(run.name, problem))


def _is_within(name: str, others: Iterable[str]) -> bool:
    return any(not other or name == other or name.startswith(f"{other}.") for other in others)


def _candidate(name: str, module: nn.Module) -> FoundRun | None:
    family = family_of_owner(module)
    if family is not None and family.sequence is not None:
        steps = family.sequence(module)
        names = tuple(_joined(name, each) for each, _ in steps)
        return FoundRun(name, name, tuple(layer for _, layer in steps), names, family)
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return None
    children = [*module.named_children()]
    if len(module) < 2 or len(children) < len(module):  # a list may hold a module twice
        children = [(str(i), layer) for i, layer in enumerate(module)]
    owner = name.rpartition(".")[0]
    layers = tuple(layer for _, layer in children)
    names = tuple(_joined(name, each) for each, _ in children)
    return FoundRun(name, owner, layers, names, family_of(layers[-1]) if layers else None)


def _problem(run: FoundRun) -> str | None:
    """Return None for a run of layers, a reason for near misses, "" otherwise."""
    layers = run.layers
    kinds = {type(layer) for layer in layers}
    known = run.family is not None
    if len(layers) < 2 or (not known and not all(_is_composed(layer) for layer in layers)):
        return ""
    if len(kinds) > 1:
        return (
            f"expected layers of one class, got {_listed(kind.__name__ for kind in kinds)}" if known else ""
        )
    first, *others = (_shapes(layer) for layer in layers[1:])
    for number, shapes in enumerate(others, start=3):
        if shapes != first:
            return f"expected layers of equal shapes from the second on, got others in layer {number}"
    return None


def _without_shared(runs: list[FoundRun], refused: list[Refusal]) -> list[FoundRun]:
    """Leave out runs that share a layer with one before."""
    taken: dict[int, str] = {}
    kept = []
    for run in runs:
        other = next((taken[id(layer)] for layer in run.layers if id(layer) in taken), None)
        if other is None:
            kept.append(run)
            taken |= {id(layer): run.name for layer in run.layers}
        else:
            refused.append(Refusal(run.name, f"expected layers that no other run has, got some of {other!r}"))
    return kept


def _is_composed(layer: nn.Module) -> bool:
    """Whether a layer is made of others and has parameters, as one that passes a hidden state on."""
    composed = any(True for _ in layer.children())
    is_list = isinstance(layer, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
    return composed and not is_list and any(True for _ in layer.parameters())


def _shapes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}


def _filter(where: Where) -> Callable[[str, nn.Module], bool]:
    if where is None:
        return lambda _name, _module: True
    if callable(where):
        return where
    names = [where] if isinstance(where, str) else [*where]
    return lambda name, _module: name in names


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _listed(words: Iterable[str]) -> str:
    return " and ".join(sorted(words))


def ancestors(net: nn.Module, owner: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules from a network down to the one of a name, both included.

    >>> net = nn.Sequential(nn.Sequential(nn.Tanh()))
    >>> [name for name, _ in ancestors(net, "0.0")]
    ['', '0', '0.0']
    """
    module: Any = net
    yield "", module
    parts = owner.split(".") if owner else []
    for depth, part in enumerate(parts, start=1):
        module = module.get_submodule(part)
        yield ".".join(parts[:depth]), module
