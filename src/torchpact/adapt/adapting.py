"""adapt: a network whose layers halt, made in place of one that runs all of them; and back again."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchpact.adapt import hooks
from torchpact.adapt.config import AdaptConfig, RunConfig
from torchpact.adapt.find import FoundRun, Refusal, Where, find_runs, runs_of
from torchpact.adapt.initial_bias import bias_within
from torchpact.adapt.network import inner_network
from torchpact.adapt.width import state_width
from torchpact.checks import check_number
from torchpact.core.call_args import call_args
from torchpact.core.halting_module import halting_modules
from torchpact.core.layer_run import LayerRun, Per
from torchpact.nn.halting_heads import ExampleHead, PixelHead, TokenHead

NAME = "torchpact"
"""The name of the submodule that an adapted network has besides its own."""
BIAS = -5.0
"""The bias of heads at the start: with −3 a relaxed MiniLM is another network, cosine 0.81 to itself."""

Heads = Callable[[nn.Module, int], nn.Module]


class Adaptation(nn.Module):
    """What an adapted network has besides its own modules: its runs of layers, with their heads.

    Args:
        runs: The runs.
        config: What was done.
        refused: The lists of layers that were left as they are.

    """

    def __init__(self, runs: list[LayerRun], config: AdaptConfig, refused: list[Refusal]) -> None:
        super().__init__()
        self.runs = nn.ModuleList(runs)
        self.config, self.refused = config, tuple(refused)


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
) -> Any:
    """Make a network adaptive, in place: its layers get halting heads, and hooks that drive a halting loop.

    Runs of layers are found by themselves. In ``train()`` the network runs relaxed, differentiably, and in
    ``eval()`` thresholded; :class:`~torchpact.use_mode` pins another mode. It returns what it returned
    before, and what its runs did is collected beside that by :class:`~torchpact.collect`. Until it is
    trained it returns in ``eval()`` exactly what it did. Hooks cannot skip work: an adapted network gets
    faster by :func:`~torchpact.deploy`.

    Weights, their names, the class and the signature of the network stay. The heads are one submodule more,
    ``net.torchpact``.

    Args:
        net: A network, or an object that holds one, such as a pipeline or a SentenceTransformer.
        per: For what is decided: "token", "example" or "pixel"; by default as is usual for its layers.
        where: The names of the runs to adapt, or a function of the name and the module of a list of layers;
            by default all that are found.
        heads: Makes the head of a layer, called with the layer and the width of its state, such as
            ``lambda layer, width: nn.Linear(width, 1)``; by default a linear head that starts at zero.
        bias: The bias of heads at the start, by default −5.
        example: What the network is called with: a mapping by name, a tuple by position, or the only
            argument. With it, and without ``bias``, the bias is the largest one at which the relaxed network
            differs from the original by no more than ``tolerance``.
        frozen: Whether the heads alone are trained.
        tolerance: The relative difference ‖relaxed − original‖ / ‖original‖ of the output that is allowed at
            the start.

    Returns:
        ``net`` itself.

    Raises:
        TypeError: ``net`` holds no network.
        ValueError: There are no layers that can halt, or they cannot decide ``per`` that; the network is as
            it was.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> net = tp.adapt(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
        >>> with tp.collect(net) as ponders:
        ...     output = net(torch.randn(2, 5, 16))
        >>> ponders[0].name, ponders[0].probs.shape
        ('layers', torch.Size([4, 2, 5, 1]))

    """
    root = inner_network(net)
    if isinstance(getattr(root, NAME, None), Adaptation):
        raise ValueError("expected a network that is not adaptive yet, got an adapted one: tp.unadapt first")
    if halting_modules(root):
        raise ValueError(f"expected a network without adaptive blocks, got {[*halting_modules(root)][0]!r}")
    check_number("tolerance", tolerance, 0, 1, open_low=True)
    found, refused = find_runs(root, where)
    if not found:
        raise ValueError(_nothing_found(root, refused, where))
    given = None if example is None else call_args(example)
    pers = [_per(run, per) for run in found]
    start = BIAS if bias is None else check_number("bias", bias, open_low=True, open_high=True)
    runs, configs = [], []
    for each, kind in zip(found, pers, strict=True):
        width = state_width(root, each, given)
        batch_dim = _batch_dim(each)
        normalize = each.family is None or each.family.normalize
        made = [_head(layer, width, kind, start, normalize, batch_dim, heads) for layer in each.layers[:-1]]
        causal = each.family is not None and each.family.causal
        shared = len({id(layer) for layer in each.layers}) == 1
        run = LayerRun(
            each.name,
            each.layers,
            each.layer_names,
            made[:1] if shared else made,
            per=kind,
            batch_dim=batch_dim,
            causal=causal,
        )
        runs.append(run.train(root.training))
        configs.append(RunConfig(each.name, len(each.layers), kind, width))
    name = "linear" if heads is None else getattr(heads, "__qualname__", type(heads).__name__)
    if frozen:
        for parameter in root.parameters():
            parameter.requires_grad_(False)
    config = AdaptConfig(tuple(configs), start, name, frozen)
    root.add_module(NAME, Adaptation(runs, config, refused))
    hooks.install(root, zip(found, runs, strict=True))
    if given is not None and bias is None and heads is None:
        try:
            config = replace(config, bias=bias_within(root, runs, given, tolerance))
        except Exception:
            unadapt(net)
            raise
    _record(root, config)
    return net


def unadapt(net: Any) -> Any:
    """Take the heads and hooks away again, in place: the network runs all of its layers, as it did.

    Weights stay as they are now. Parameters that ``frozen`` froze need gradients again.

    Args:
        net: What :func:`adapt` returned.

    Returns:
        ``net`` itself.

    Raises:
        ValueError: It is not adaptive.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> net = tp.adapt(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
        >>> [name for name, _ in tp.unadapt(net).named_children()]
        ['layers']

    """
    root = inner_network(net)
    adaptation = adaptation_of(root)
    hooks.remove(root)
    delattr(root, NAME)
    own = getattr(root, "config", None)
    if hasattr(own, NAME):
        delattr(own, NAME)
    if adaptation.config.frozen:
        for parameter in root.parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(True)
    return net


def adaptation_of(net: nn.Module) -> Adaptation:
    """Return what an adapted network has besides its own modules.

    Raises:
        ValueError: It is not adapted.

    """
    found = next((module for module in net.modules() if isinstance(module, Adaptation)), None)
    if found is None:
        raise ValueError(f"expected an adapted network, got {type(net).__name__} as it was: tp.adapt it first")
    return found


def _record(net: nn.Module, config: AdaptConfig) -> None:
    """Keep what was done; also in a configuration of Hugging Face's, which goes into every checkpoint."""
    adaptation_of(net).config = config
    own = getattr(net, "config", None)
    if hasattr(own, "to_json_string"):
        setattr(own, NAME, json.loads(config.to_json()))


def _per(run: FoundRun, per: Per | None) -> Per:
    choices: tuple[Per, ...] = ("token", "example", "pixel") if run.family is None else run.family.per
    if per is None:
        return choices[0]
    if per not in choices:
        kind = "layers" if run.family is None else f"layers of {run.family.name}"
        why = ", since a cache holds the tokens of examples that go on" if run.family and run.family.causal else ""
        options = " or ".join(repr(each) for each in choices)
        raise ValueError(f"expected per={options} for the {kind} in {run.name!r}{why}; got {per!r}")
    return per


def _batch_dim(run: FoundRun) -> int:
    known = None if run.family is None else run.family.batch_dim
    return 0 if known is None else known(run.layers[0])


def _head(
    layer: nn.Module, width: int, per: Per, bias: float, normalize: bool, batch_dim: int, heads: Heads | None
) -> nn.Module:
    """Return the head of a layer, where and in the precision that the layer is."""
    head: nn.Module
    if heads is not None:
        head = heads(layer, width)
        if not isinstance(head, nn.Module):
            raise TypeError(f"expected heads to return a module, got a {type(head).__name__}")
    elif per == "pixel":
        head = PixelHead(width, bias)
    elif per == "example":
        head = ExampleHead(width, bias, normalize, batch_dim)
    else:
        head = TokenHead(width, bias, normalize)
    like = next((p for p in layer.parameters() if p.is_floating_point()), torch.empty(0))
    kind = like.dtype if like.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16) else None
    return head.to(device=like.device, dtype=kind)


def _nothing_found(net: nn.Module, refused: list[Refusal], where: Where) -> str:
    looked = "a list of two or more layers of one class"
    if refused:
        first = refused[0]
        return f"expected {looked} in {type(net).__name__}; {first.name!r} is none: {first.reason}"
    hint = f" where={where!r} says so" if isinstance(where, str | list | tuple) else ""
    if hint:
        names = ", ".join(repr(run.name) for run in find_runs(net)[0]) or "none"
        return f"expected {looked}{hint}; the network has {names}"
    return (
        f"expected {looked}, each of which passes a hidden state on, in {type(net).__name__}; found none: "
        "tp.AdaptiveBlock makes steps of your own adaptive"
    )


def is_adapted(net: nn.Module) -> bool:
    """Whether a network has runs that were made adaptive."""
    return bool(runs_of(net))
