"""The record of an adaptation, which is written to JSON and read again."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torchpact.checks import one_line

FORMAT = 1
"""The version of the record."""


@dataclass(frozen=True)
class RunConfig:
    """A run of layers that was made adaptive."""

    name: str
    """The name of the run in the network."""
    layers: int
    """How many layers it has."""
    per: str
    """What a decision is for: a "token", an "example" or a "pixel"."""
    width: int
    """The features of its state."""
    is_map: bool = False
    """Whether its state is a map (batch, channels, height, width)."""


@dataclass(frozen=True)
class AdaptConfig:
    """The record of :func:`~torchpact.adapt`; ``AdaptConfig.from_json(config.to_json())`` equals it.

    Example:
        >>> config = AdaptConfig(runs=(RunConfig("encoder.layer", 6, "token", 384),))
        >>> AdaptConfig.from_json(config.to_json()) == config
        True

    """

    runs: tuple[RunConfig, ...] = ()
    bias: float = -5.0
    """The bias of the heads at the start."""
    heads: str = "linear"
    """"linear", the name of a criterion, or that of the user's own factory, which loading needs again."""
    frozen: bool = False
    """Whether only the heads are trained."""
    criterion: Mapping[str, Any] | None = None
    """The settings of a ready-made criterion, if all heads are of it; see :mod:`torchpact.criteria`."""
    format: int = field(default=FORMAT)

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "AdaptConfig":
        """Return the record that JSON holds.

        Args:
            text: As :meth:`to_json` gives it.

        Raises:
            ValueError: It is not such a record, or of a later version.

        """
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected an AdaptConfig as JSON, got other text: {one_line(error)}") from None
        if not isinstance(given, Mapping) or not isinstance(given.get("runs"), list):
            raise ValueError('expected an AdaptConfig as JSON with a list "runs", got another record')
        if given.get("format", FORMAT) != FORMAT:
            raise ValueError(f"expected an AdaptConfig of format {FORMAT}, got {given['format']!r:.20}")
        kinds: dict[str, tuple[Any, str]] = {
            "bias": (float | int, "a number"),
            "heads": (str, "a name"),
            "frozen": (bool, "true or false"),
            "format": (int, "an integer"),
            "criterion": (Mapping | None, "an object or null"),
        }
        known = {name: given[name] for name in kinds if name in given}
        for name, value in known.items():
            kind, called = kinds[name]
            if not isinstance(value, kind):
                raise ValueError(f"expected {name!r} of an AdaptConfig to be {called}, got {value!r:.40}")
        return cls(runs=tuple(_run(each) for each in given["runs"]), **known)


def _run(given: Any) -> RunConfig:
    kinds = {"name": str, "layers": int, "per": str, "width": int}
    if not isinstance(given, Mapping):
        raise ValueError(f"expected a run of an AdaptConfig as an object, got {given!r:.40}")
    wrong = [name for name, kind in kinds.items() if not isinstance(given.get(name), kind)]
    if wrong:
        raise ValueError(f"expected a run of an AdaptConfig with {wrong[0]!r}, got {dict(given)!r:.80}")
    if not isinstance(given.get("is_map", False), bool):
        raise ValueError(f"expected 'is_map' of a run to be true or false, got {given['is_map']!r:.40}")
    return RunConfig(**{each.name: given[each.name] for each in fields(RunConfig) if each.name in given})
