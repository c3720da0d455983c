"""Saves and loads adapted networks: the backbone in its usual files, heads and record in two further ones."""

import importlib
import inspect
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchpact.adapt.adapting import NAME, adapt, adaptation_of, holder_of, unadapt
from torchpact.adapt.card import model_card
from torchpact.adapt.config import AdaptConfig
from torchpact.adapt.heads import Heads, with_heads
from torchpact.adapt.network import has_adapters_around, inner_network
from torchpact.adapt.own_config import THRESHOLDS
from torchpact.checks import one_line
from torchpact.core.halting_module import halting_modules
from torchpact.core.layer_run import LayerRun
from torchpact.core.thresholds import Thresholds, spelled
from torchpact.nn.criteria.records import from_record

HEADS, RECORD, BACKBONE = "torchpact.safetensors", "torchpact.json", "model.safetensors"
INDEX = "model.safetensors.index.json"
CARD = "README.md"


def save_pretrained(net: Any, folder: str | Path) -> None:
    """Write an adapted network to a folder.

    The backbone, with its present weights, is written to the files of its own ``save_pretrained``, which
    plain ``AutoModel.from_pretrained(folder)`` reads, or to ``model.safetensors`` if it has no such method.
    Heads are written to ``torchpact.safetensors``; the configuration and thresholds to ``torchpact.json``; a
    model card to ``README.md``, unless the folder has one. Other files in the folder are kept.

    Args:
        net: What :func:`~torchpact.adapt` returned.
        folder: Where to write; it is created if it does not exist.

    Raises:
        FileExistsError: ``folder`` is a file.
        ValueError: The network is not adapted, or has adapters of peft, which are to be merged first.

    Example:
        >>> import tempfile
        >>> def network():
        ...     layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        ...     return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        >>> net = tp.adapt(network()).eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tp.save_pretrained(net, folder)
        ...     again = tp.from_pretrained(folder, net=network()).eval()
        >>> x = torch.randn(2, 5, 16)
        >>> torch.equal(net(x), again(x))
        True

    """
    root = inner_network(net)
    adaptation = adaptation_of(root)
    if has_adapters_around(net) or _has_adapters(root):
        raise ValueError(
            f"expected a network without adapters of peft, got a {type(net).__name__} with some: save what "
            "net.merge_and_unload() returns"
        )
    if holder_of(root) is not root:
        raise ValueError(
            f"expected the network that was adapted, got a {type(root).__name__} around it: save what it "
            "wraps"
        )
    from safetensors.torch import save_file

    folder = _folder(folder)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"expected the name of a folder, got a file: {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        written = Path(name)
        _save_backbone(root, written)
        if not any(written.glob("*.safetensors*")):
            raise ValueError(
                f"expected a network whose save_pretrained writes its weights, got a {type(root).__name__}: "
                "save_pretrained wrote no .safetensors file"
            )
        heads = {key: value.detach().contiguous() for key, value in adaptation.state_dict().items()}
        save_file(heads, written / HEADS)
        runs = [run for run in adaptation.runs if isinstance(run, LayerRun)]
        config = with_heads(adaptation.config, runs)  # which use_heads may have changed
        record = {"adapt": json.loads(config.to_json()), THRESHOLDS: thresholds_of(runs)}
        (written / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if not (folder / CARD).exists() and not (written / CARD).exists():
            (written / CARD).write_text(model_card(root), encoding="utf-8")
        for path in sorted(written.rglob("*")):
            if path.is_file():
                target = folder / path.relative_to(written)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)


def from_pretrained(
    folder: str | Path, *, net: nn.Module | None = None, heads: Heads | None = None, **options: Any
) -> Any:
    """Load an adapted network from a folder; it is returned in ``eval()``.

    Reads what :func:`save_pretrained` wrote, and checkpoints of a Hugging Face ``Trainer`` of an adapted
    network. Nothing in the folder is run or unpickled.

    Args:
        folder: The folder.
        net: A plain network of the same architecture to load into, for networks that are not Hugging Face's.
        heads: The ``heads`` that the network was adapted with, if it was a factory or a criterion of your
            own. Ready-made criteria, with read-outs given by names of modules, are in the record.
        options: For ``from_pretrained`` of the network's class, such as ``dtype``.

    Returns:
        The adapted network: a new one, or ``net``.

    Raises:
        FileNotFoundError: The folder has no adapted network.
        TypeError: ``folder`` is no path.
        ValueError: Its files are damaged, do not belong together, or have no heads.

    Example:
        >>> import tempfile
        >>> def network():
        ...     layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        ...     return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        >>> net = tp.adapt(network(), heads=tp.criteria.LatentChange())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tp.save_pretrained(net, folder)
        ...     again = tp.from_pretrained(folder, net=network())
        >>> again.torchpact.runs[0].heads
        ModuleList(
          (0): LatentChange(per=None)
        )

    """
    # here and below: import torchpact imports torch alone
    from safetensors import SafetensorError
    from safetensors.torch import load_file, load_model

    folder = _folder(folder)
    record_file, heads_file = folder / RECORD, folder / HEADS
    if not record_file.is_file():
        return _from_checkpoint(folder, heads, options)
    record = _json(record_file)
    if not isinstance(record, dict) or "adapt" not in record:
        raise ValueError(f'expected a record with "adapt" in {record_file}, got a file without it')
    config = _config(record["adapt"], record_file)
    if net is None:
        net = _transformers_class(folder).from_pretrained(folder, **options)
    else:
        if halting_modules(net):
            raise ValueError(
                f"expected a plain network as net=, got a {type(net).__name__} that is adaptive already: "
                "from_pretrained adapts it"
            )
        try:
            load_model(net, folder / BACKBONE, strict=True)
        except (RuntimeError, SafetensorError, OSError) as error:
            kind = type(net).__name__
            raise ValueError(f"expected weights of a {kind} in {folder}: {one_line(error)}") from None
    again = _adapted(net, config, heads, record_file)
    adaptation = adaptation_of(inner_network(again))
    try:
        adaptation.load_state_dict(load_file(heads_file), strict=True)
    except (RuntimeError, SafetensorError, OSError) as error:
        raise ValueError(f"expected the heads of this network in {heads_file}: {one_line(error)}") from None
    _set_thresholds(adaptation.runs, record, record_file)
    return again.eval()


def _config(given: Any, file: Path) -> AdaptConfig:
    """Return the record of what was adapted that a file holds."""
    try:
        return AdaptConfig.from_json(json.dumps(given))
    except ValueError as error:
        raise ValueError(f"expected what tp.save_pretrained writes in {file}: {one_line(error)}") from None


def _save_backbone(root: nn.Module, folder: Path) -> None:
    from safetensors.torch import save_model

    own = {key: value for key, value in root.state_dict().items() if not key.startswith(f"{NAME}.")}
    save = getattr(root, "save_pretrained", None)
    if save is not None:
        takes = "state_dict" in inspect.signature(save).parameters
        save(str(folder), **({"state_dict": own} if takes else {}))
        return
    adaptation = root._modules.pop(NAME)
    try:
        save_model(root, str(folder / BACKBONE))
    finally:
        root.add_module(NAME, adaptation)


def _from_checkpoint(folder: Path, heads: Heads | None, options: Mapping[str, Any]) -> Any:
    """Load a checkpoint whose weights hold those of heads, too, as a trainer writes it."""
    file = folder / "config.json"
    config = _json(file) if file.is_file() else {}
    if not isinstance(config, dict) or NAME not in config:
        raise FileNotFoundError(f"expected {RECORD}, or a config.json of an adapted network, in {folder}")
    weights = _weights(folder)
    kind = _transformers_class(folder)
    net = kind(kind.config_class.from_pretrained(folder, **options))
    again = _adapted(net, _config(config[NAME], file), heads, file)
    heads_of_it = adaptation_of(again).state_dict()  # some criteria have no weights
    if heads_of_it and not any(key.startswith(f"{NAME}.") for key in weights):
        raise ValueError(
            f"expected the weights of halting heads in {folder}, got a record of them but no heads: the "
            "network was saved without them, and plain from_pretrained of its class loads it"
        )
    dtype = options.get("dtype")
    if isinstance(dtype, torch.dtype):
        weights = {key: each.to(dtype) if each.is_floating_point() else each for key, each in weights.items()}
    missing, unexpected = again.load_state_dict(weights, strict=False, assign=True)  # in their precision
    again.tie_weights()
    tied = set(getattr(again, "_tied_weights_keys", None) or ())
    missing = [key for key in missing if key not in tied]
    if missing or unexpected:
        raise ValueError(
            f"expected the weights of this network in {folder}; {[*missing, *unexpected][0]!r} is "
            f"{'missing' if missing else 'not one of them'}"
        )
    _set_thresholds(adaptation_of(again).runs, config[NAME], file)
    return again.eval()


def _weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights in a folder, of one file or of several with an index, as for large networks."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = folder / INDEX
    names: set[Any] = {BACKBONE}
    if not (folder / BACKBONE).is_file():
        if not index.is_file():
            raise FileNotFoundError(f"expected {BACKBONE} or {INDEX} in {folder}")
        record = _json(index)
        places = record.get("weight_map") if isinstance(record, dict) else None
        names = set(places.values()) if isinstance(places, dict) and places else {None}
        for name in names:
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(
                    f'expected "weight_map" with the names of files in {index}, got {name!r:.80}'
                )
    weights: dict[str, Tensor] = {}
    for name in sorted(names):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"expected {name}, which {INDEX} names, in {folder}")
        try:
            weights |= load_file(folder / name)
        except SafetensorError as error:
            raise ValueError(f"expected weights in {folder / name}: {one_line(error)}") from None
    return weights


def _adapted(net: Any, config: AdaptConfig, heads: Heads | None, file: Path) -> Any:
    """Make a network adaptive as a record says."""
    if heads is None and config.criterion is not None:
        heads = from_record(config.criterion)
    if config.heads != "linear" and heads is None:
        raise ValueError(f"expected heads=, which made the heads of this network ({config.heads})")
    names, pers = [run.name for run in config.runs], {run.per for run in config.runs}
    per = pers.pop() if len(pers) == 1 else None
    try:
        bias = config.bias if heads is None else None
        settings: dict[str, Any] = {"where": names, "per": per, "bias": bias, "frozen": config.frozen}
        adapt(net, heads=heads, record=config.runs, **settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected a record of this network in {file}: {one_line(error)}") from None
    found = adaptation_of(inner_network(net)).config
    if found.runs != config.runs:
        unadapt(net)
        ours, theirs = next((a, b) for a, b in zip(found.runs, config.runs, strict=True) if a != b)
        raise ValueError(
            f"expected a record of this network in {file}; it has {theirs.layers} layers of width "
            f"{theirs.width} in {theirs.name!r} per {theirs.per}, the network {ours.layers} of width "
            f"{ours.width} in {ours.name!r} per {ours.per}"
        )
    return net


def _transformers_class(folder: Path) -> Any:
    """Return the class of Hugging Face's that a folder's configuration names."""
    config = _json(folder / "config.json") if (folder / "config.json").is_file() else {}
    names = config.get("architectures") if isinstance(config, dict) else None
    if not names:
        raise ValueError(f"expected a config.json with the network's class in {folder}; pass net= for others")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise ValueError(
            "expected the package transformers to be installed: pip install transformers"
        ) from None
    kind = getattr(transformers, str(names[0]), None)
    if not isinstance(kind, type) or not hasattr(kind, "from_pretrained"):
        raise ValueError(f"expected a class of transformers in {folder}, got {names[0]!r:.80}")
    return kind


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON in {path}: {one_line(error):.200}") from None


def _folder(folder: Any) -> Path:
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"expected the name of a folder, got a {type(folder).__name__}")
    return Path(folder)


def _has_adapters(root: nn.Module) -> bool:
    """Return whether peft has put adapters into the layers of a network."""
    kinds = {type(module) for module in root.modules()}
    return any(base.__name__ == "BaseTunerLayer" for kind in kinds for base in kind.__mro__)


def thresholds_of(runs: Iterable[nn.Module]) -> dict[str, list[float | str]]:
    """Return the thresholds that are set on runs, by name, as JSON can hold them.

    Args:
        runs: The runs.

    """
    own = [run for run in runs if isinstance(run, LayerRun)]
    return {run.name: spelled(run.bounds) for run in own if run.bounds is not None}


def set_thresholds(runs: Iterable[nn.Module], given: Any) -> None:
    """Set thresholds on runs.

    Args:
        runs: The runs.
        given: As :func:`thresholds_of` returns them.

    Raises:
        TypeError: An entry is no threshold.
        ValueError: They are not for these runs.

    """
    if not isinstance(given, Mapping):
        raise ValueError("expected thresholds by the names of runs, got another record")
    for run in runs:
        assert isinstance(run, LayerRun)
        if run.name in given:
            run.bounds = Thresholds(dict(given)).for_block(0, run.name, run.max_steps - 1)


def _set_thresholds(runs: Iterable[nn.Module], record: Mapping[str, Any], file: Path) -> None:
    """Set the thresholds that a record holds, which older records call bounds."""
    try:
        set_thresholds(runs, record.get(THRESHOLDS, record.get("bounds", {})))
    except (TypeError, ValueError) as error:
        raise ValueError(f'expected "thresholds" of this network in {file}: {one_line(error)}') from None
