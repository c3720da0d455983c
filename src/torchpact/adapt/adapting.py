"""adapt and unadapt: add halting heads and hooks to a network in place, and remove them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from torchpact.adapt import hooks
from torchpact.adapt.config import AdaptConfig, RunConfig
from torchpact.adapt.find import FoundRun, Refusal, Where, find_runs
from torchpact.adapt.heads import Heads, check_bias, name_of, with_heads
from torchpact.adapt.initial_bias import bias_within, check_call, set_bias
from torchpact.adapt.make_runs import decides_for, kinds_of, run_of
from torchpact.adapt.network import holders_of, inner_network
from torchpact.adapt.own_config import Replaced, give_own_config, restore_config, write_record
from torchpact.adapt.refusals import check_found, check_plain
from torchpact.checks import check_number
from torchpact.core.call_args import call_args
from torchpact.core.frozen import FrozenModule
from torchpact.core.halting_module import halting_modules
from torchpact.core.layer_run import LayerRun, Per
from torchpact.core.overrides import check_heads

NAME = "torchpact"
"""The name of the submodule that an adapted network has besides its own."""
BIAS = -5.0
"""The initial bias of heads. With −3, embeddings of a relaxed MiniLM have cosine 0.81 to the original's."""


@dataclass(frozen=True)
class Before:
    """What :func:`unadapt` restores."""

    trained: frozenset[str] = frozenset()
    """The parameters that needed gradients, if the network was frozen."""
    settings: tuple[tuple[str, str, Any], ...] = ()
    """Attributes that were changed: the module's name, that of the attribute, its value."""
    config: Replaced | None = None
    """The configuration of transformers that the network had, of which it got a copy."""


class Adaptation(nn.Module):
    """The submodule that :func:`adapt` adds to a network: its runs of layers, with their heads.

    Args:
        runs: The runs.
        config: The record of the adaptation.
        refused: The lists of layers that were not adapted.
        before: What :func:`unadapt` restores.

    """

    def __init__(
        self, runs: list[LayerRun], config: AdaptConfig, refused: list[Refusal], before: Before
    ) -> None:
        super().__init__()
        self.runs = nn.ModuleList(runs)
        self.config, self.refused, self.before = config, tuple(refused), before

    def forward(self, x: Any) -> Any:
        """Return the input unchanged: an ``nn.Sequential`` also calls this module, as its last."""
        return x


def adapt(
    net: Any,
    *,
    per: Per | None = None,
    where: Where = None,
    heads: Heads | None = None,
    bias: float | None = None,
    example: Any = None,
    frozen: bool = False,
    tolerance: float = 0.02,
    record: Sequence[RunConfig] = (),
) -> Any:
    """Make a network adaptive in place: add halting heads to its layers, and hooks that run the halting loop.

    A run is a list of layers that the network calls one after the other; runs are found automatically. In
    ``train()`` the network is relaxed, which is differentiable, and in ``eval()`` thresholded;
    :class:`~torchpact.use_mode` pins another mode. The type of its output does not change;
    :class:`~torchpact.collect` gathers the ponders of its runs. Before training, outputs in ``eval()`` are
    exactly the original's. Hooks cannot skip work: use :func:`~torchpact.deploy` to make the network faster.

    The weights, their names, the class and the signature of the network do not change. The heads are an
    additional submodule, ``net.torchpact``. Adapt a network before you wrap it for several devices. A
    configuration of transformers, which other networks may share, is replaced by a copy with the record.

    Args:
        net: A network, or an object that holds one, such as a pipeline, a SentenceTransformer, or a network
            with adapters of peft, which may be merged afterwards.
        per: What each decision is for: a "token", an "example" or a "pixel"; the default depends on the
            family of the layers.
        where: The names of the runs to adapt, or a function of the name and the module of a list of layers
            that returns whether to adapt it; by default all runs that are found.
        heads: A factory that returns the head of a layer, called with the layer and the width of its state;
            or a criterion (see :mod:`torchpact.criteria`), which is copied for each layer if it is learned or
            has parameters, and shared otherwise. By default, a linear head whose weights start at zero.
            Heads of a factory stay as it made them: outputs are the original's before training only if
            their logits are below 0 then.
        bias: The initial bias of the heads, −5 by default. It is set on heads of a factory, too, which have
            a ``bias`` of one number then.
        example: Inputs of the network: a mapping by name, a tuple by position, or the only argument. If it
            is given and ``bias`` is not, the bias is the largest one at which the relaxed network differs
            from the original by no more than ``tolerance``.
        frozen: Whether only the heads are trained.
        tolerance: The relative difference ‖relaxed − original‖ / ‖original‖ of the outputs that ``example``
            may have before training.
        record: The runs of an earlier ``AdaptConfig``, so that layers of unknown families need no
            ``example`` to determine the width of their state.

    Returns:
        ``net`` itself.

    Raises:
        TypeError: ``net`` holds no network, or an argument is of another type.
        ValueError: There are no layers that can halt, they cannot make decisions ``per`` that unit, or
            heads have no bias that ``bias`` or ``example`` could set; the network is unchanged.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> net = tp.adapt(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
        >>> with tp.collect(net) as ponders:
        ...     output = net(torch.randn(2, 5, 16))
        >>> ponders[0].name, ponders[0].probs.shape
        ('layers', torch.Size([4, 2, 5, 1]))
        >>> def head(layer, width):  # one's own, which starts as the default one does
        ...     linear = nn.Linear(width, 1)
        ...     nn.init.zeros_(linear.weight)
        ...     nn.init.constant_(linear.bias, -5.0)
        ...     return linear
        >>> net = tp.adapt(tp.unadapt(net), heads=head)

    """
    root = inner_network(net)
    if isinstance(getattr(root, NAME, None), Adaptation):
        raise ValueError("expected a network that is not adaptive yet, got an adapted one: tp.unadapt first")
    check_plain(root, NAME)
    check_number("tolerance", tolerance, 0, 1, open_low=True)
    start = BIAS if bias is None else check_number("bias", bias, open_low=True, open_high=True)
    check_heads(heads)
    if isinstance(example, int | float | str):
        raise TypeError(f"expected inputs of the network as example, got {example!r:.40}")
    found, refused = find_runs(root, where)
    check_found(root, found, refused, where)
    hooks.check_free(found)
    given = None if example is None else call_args(example)
    kinds, unknown = kinds_of(root, found, given, {run.name: run for run in record})
    if unknown and (where is not None or not kinds):
        raise ValueError(unknown[0].reason)
    refused += unknown
    found = [each for each in found if each.name in kinds]
    runs, configs = [], []
    for each in found:
        kind = kinds[each.name]
        decides = decides_for(root, each, kind.is_map, per)
        run = run_of(root, each, kind, decides, start, heads)
        runs.append(run.train(each.layers[-1].training))
        configs.append(RunConfig(each.name, len(each.layers), decides, kind.width, kind.is_map))
    widths_known = all(each.family is not None for each in found)
    by_example = given is not None and bias is None
    if heads is not None:
        by_example = check_bias(runs, bias is not None, by_example and widths_known) and by_example
        if bias is not None:
            set_bias(runs, start)
    config = with_heads(AdaptConfig(tuple(configs), start, name_of(heads), frozen), runs)
    trained = frozenset(name for name, p in root.named_parameters() if frozen and p.requires_grad)
    settings, around = tuple(_settings(root, found)), _around(net, root)
    before = Before(trained, settings, give_own_config(root, around))
    root.add_module(NAME, Adaptation(runs, config, refused, before))
    try:
        hooks.install(root, zip(found, runs, strict=True), holders_of(root, net))
        for each in found:
            for attribute, value in _settings_of(root, each).items():
                setattr(root.get_submodule(each.owner), attribute, value)
        if frozen:
            hooks.freeze_norms(root)
            for parameter in (root.get_parameter(each) for each in trained):
                parameter.requires_grad_(False)
        if given is not None and by_example:
            config = replace(config, bias=bias_within(root, runs, given, tolerance))
        elif given is not None:
            check_call(root, given)
        adaptation_of(root).config = config
        write_record(root, NAME, config, runs)
    except BaseException:
        unadapt(net)
        raise
    return net


def unadapt(net: Any) -> Any:
    """Remove the heads and hooks, in place: the network runs all of its layers again.

    Weights keep their present values. Parameters that ``frozen`` froze require gradients again.

    Args:
        net: What :func:`adapt` returned.

    Returns:
        ``net`` itself.

    Raises:
        ValueError: The network is not adapted.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> net = tp.adapt(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
        >>> [name for name, _ in tp.unadapt(net).named_children()]
        ['layers']

    """
    root = holder_of(inner_network(net))
    before, runs = adaptation_of(root).before, adaptation_of(root).runs
    for module in (root, *holders_of(root, net)):
        hooks.remove(module, runs)
    delattr(root, NAME)
    restore_config(root, _around(net, root), before.config, NAME)
    for name, attribute, value in before.settings:
        setattr(root.get_submodule(name), attribute, value)
    for name, parameter in root.named_parameters():
        if name in before.trained:
            parameter.requires_grad_(True)
    return net


def holder_of(net: nn.Module) -> nn.Module:
    """Return the module that was adapted: the network itself, or one that it wraps.

    Raises:
        ValueError: Nothing in it is adapted.

    """
    for module in net.modules():
        if isinstance(module._modules.get(NAME), Adaptation):
            return module
    if any(isinstance(module, FrozenModule) for module in net.modules()):
        raise ValueError(
            "expected an adapted network, got a deployed one: pass the network that tp.deploy was given"
        )
    if halting_modules(net):
        raise ValueError(
            f"expected a network that tp.adapt made adaptive, got a {type(net).__name__} with adaptive "
            "blocks of its own, which is saved as any module is, by its state_dict()"
        )
    raise ValueError(f"expected an adapted network, got a plain {type(net).__name__}: tp.adapt it first")


def adaptation_of(net: nn.Module) -> Adaptation:
    """Return the submodule that :func:`adapt` added to a network.

    Raises:
        ValueError: It is not adapted.

    """
    found = holder_of(net)._modules[NAME]
    assert isinstance(found, Adaptation)
    return found


def _around(net: Any, root: nn.Module) -> nn.Module:
    """Return the module whose parts may refer to the configuration of a network."""
    return net if isinstance(net, nn.Module) else root


def _settings_of(net: nn.Module, run: FoundRun) -> dict[str, Any]:
    """Return the attributes to set on the module that calls the layers of a run."""
    owner = net.get_submodule(run.owner)
    wanted = {} if run.family is None else run.family.settings
    return {name: value for name, value in wanted.items() if hasattr(owner, name)}


def _settings(net: nn.Module, found: Iterable[FoundRun]) -> Iterator[tuple[str, str, Any]]:
    """Yield the present values of those attributes."""
    for run in found:
        for name in _settings_of(net, run):
            yield run.owner, name, getattr(net.get_submodule(run.owner), name)
