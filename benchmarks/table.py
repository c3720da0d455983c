"""Results as CSV, written whole or not at all."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file, none where it is not there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows, empty where one lacks a key; what was there stays until the new file is complete."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)
