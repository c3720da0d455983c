"""Built-in criteria as JSON: their names and settings, by which they are made again."""

from collections.abc import Mapping
from typing import Any

from torchpact.core.criterion import Criterion
from torchpact.nn.criteria.combined import Combined
from torchpact.nn.criteria.readouts import Confidence, Divergence, Unchanged
from torchpact.nn.criteria.states import MLP, LatentChange, Linear, RandomExit

KINDS: dict[str, type[Criterion]] = {
    kind.__name__: kind
    for kind in (Linear, MLP, Confidence, Unchanged, LatentChange, Divergence, RandomExit, Combined)
}


def record_of(criterion: Criterion) -> dict[str, Any] | None:
    """Return the record of a criterion, or None of one with a read-out or a class of one's own.

    Args:
        criterion: Any.

    Example:
        >>> record_of(Unchanged("head", steps=2))
        {'kind': 'Unchanged', 'readout': ['head'], 'steps': 2, 'pool': None, 'per': None}

    """
    if KINDS.get(type(criterion).__name__) is not type(criterion):
        return None
    settings = criterion.settings
    if settings is None:
        return None
    record = {"kind": type(criterion).__name__, **settings}
    if isinstance(criterion, Combined):
        parts = [record_of(each) for each in criterion.criteria if isinstance(each, Criterion)]
        return None if None in parts else {**record, "criteria": parts}
    return record


def from_record(record: Any) -> Criterion:
    """Return the criterion of a record.

    Args:
        record: What :func:`record_of` returned, or JSON made of it.

    Raises:
        ValueError: It is no such record.

    Example:
        >>> from_record(record_of(LatentChange(per="token")))
        LatentChange(per='token')

    """
    kind = record.get("kind") if isinstance(record, Mapping) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"expected a record of a criterion among {', '.join(KINDS)}; got {record!r:.80}")
    settings = {name: value for name, value in record.items() if name != "kind"}
    if isinstance(settings.get("criteria"), list):
        settings["criteria"] = [from_record(each) for each in settings["criteria"]]
    try:
        return KINDS[kind](**settings)
    except TypeError as error:
        raise ValueError(f"expected the settings of {kind}, got others: {error}") from None
