"""Rows of results as CSV, and tensors as files, each there in full or not at all."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from torchpact.files import write_whole
from torchpact_recipes.halting.judging import Difference

Row = dict[str, Any]


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows, empty where one lacks a key.

    Args:
        path: The file.
        rows: The rows.

    """
    text = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as safetensors.

    Args:
        tensors: By name.
        path: The file.

    """
    write_whole(path, save({name: x.detach().contiguous() for name, x in tensors.items()}))


def difference(ours: str, theirs: str, found: Difference, digits: int) -> Row:
    """Return a difference as a row.

    Args:
        ours: What the difference is of.
        theirs: What is subtracted.
        found: The difference.
        digits: After the point.

    """
    mean, low, high = (round(x, digits) for x in found)
    return {"network": ours, "less": theirs, "difference": mean, "low": low, "high": high}


def means(
    rows: Sequence[Row], keys: Sequence[str], values: Sequence[str]
) -> dict[tuple[str, ...], list[float]]:
    """Return the means over seeds of some columns, by others.

    Args:
        rows: One for each seed.
        keys: The columns that tell groups apart.
        values: The columns to average.

    Example:
        >>> means([{"k": "a", "v": "1"}, {"k": "a", "v": "3"}], ["k"], ["v"])
        {('a',): [2.0]}

    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return {
        key: [sum(float(row[value]) for row in group) / len(group) for value in values]
        for key, group in groups.items()
    }
