"""Thresholds for several budgets: a table that is switched at run time."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchpact.checks import check_choice, one_line
from torchpact.core.thresholds import Thresholds, spelled
from torchpact.files import write_whole

UNITS = ("flops", "ms")


class TableRow(NamedTuple):
    """Thresholds for a budget, and what they gave on held-out examples."""

    budget: float
    thresholds: Thresholds
    cost: float
    """In the unit of the budget."""
    score: float


class ThresholdTable(Mapping[float, Thresholds]):
    """Thresholds by budget, as :func:`~torchpact.calibrate` returns them for several.

    Args:
        rows: One for each budget.
        unit: "flops", shares of those of the original network, or "ms".

    Raises:
        ValueError: There are no rows, or two of one budget, or the unit is another.

    Example:
        >>> table = ThresholdTable([
        ...     TableRow(0.5, tp.Thresholds([[0.1, "always"]]), 0.49, 0.9),
        ...     TableRow(0.8, tp.Thresholds([["never", 2.0]]), 0.79, 1.0),
        ... ])
        >>> table.at(0.6) == table[0.5], ThresholdTable.from_json(table.to_json()) == table
        (True, True)
        >>> table
        ThresholdTable(flops: 0.5, 0.8)
        >>> print(table)
        budget (flops)    cost  score
                 0.500  0.4900    0.9
                 0.800  0.7900      1

    """

    def __init__(self, rows: Iterable[TableRow], unit: str = "flops") -> None:
        check_choice("unit", unit, UNITS)
        self.rows, self.unit = tuple(sorted(rows, key=lambda row: row.budget)), unit
        self._by_budget = {row.budget: row for row in self.rows}
        if not self.rows or len(self._by_budget) < len(self.rows):
            raise ValueError(f"expected a row for each of several budgets, got {len(self.rows)} rows")

    def __repr__(self) -> str:
        budgets = ", ".join(f"{row.budget:g}" for row in self.rows)
        return f"ThresholdTable({self.unit}: {budgets})"

    def __str__(self) -> str:
        return self.table()

    def __getitem__(self, budget: float) -> Thresholds:
        return self._by_budget[budget].thresholds

    def __iter__(self) -> Iterator[float]:
        return iter(self._by_budget)

    def __len__(self) -> int:
        return len(self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ThresholdTable) and (self.rows, self.unit) == (other.rows, other.unit)

    __hash__ = None  # type: ignore[assignment]

    def row(self, budget: float) -> TableRow:
        """Return the row of the largest budget that is not above this one.

        Args:
            budget: Any number.

        Raises:
            ValueError: All are above it.

        """
        fitting = [row for row in self.rows if row.budget <= budget * (1 + 1e-9)]
        if not fitting:
            raise ValueError(
                f"expected a budget of at least {self.rows[0].budget:g}, the least here, got {budget:g}"
            )
        return fitting[-1]

    def at(self, budget: float) -> Thresholds:
        """Return the thresholds of the largest budget that is not above this one; see :meth:`row`."""
        return self.row(budget).thresholds

    def table(self) -> str:
        """Return the budgets, costs and scores as a table for ``print``."""
        lines = [f"budget ({self.unit})    cost  score"]
        width = len(lines[0].split("  ")[0])
        lines += [f"{row.budget:>{width}.3f}  {row.cost:.4f}  {row.score:>5.4g}" for row in self.rows]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the table as JSON."""
        rows = [
            {
                "budget": row.budget,
                "cost": row.cost,
                "score": row.score,
                "thresholds": _spelled(row.thresholds),
            }
            for row in self.rows
        ]
        return json.dumps({"unit": self.unit, "rows": rows}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ThresholdTable":
        """Return the table of :meth:`to_json`.

        Args:
            text: JSON.

        Raises:
            ValueError: It is another record.

        """
        try:
            record = json.loads(text)
            rows = [
                TableRow(
                    float(row["budget"]),
                    Thresholds(row["thresholds"]),
                    float(row["cost"]),
                    float(row["score"]),
                )
                for row in record["rows"]
            ]
            return cls(rows, record["unit"])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"expected the JSON of a threshold table: {one_line(error):.100}") from None

    def save(self, file: str | Path) -> None:
        """Write the table to a file, as JSON.

        Args:
            file: Its name.

        """
        write_whole(Path(file), self.to_json().encode())

    @classmethod
    def load(cls, file: str | Path) -> "ThresholdTable":
        """Return the table in a file that :meth:`save` wrote.

        Args:
            file: Its name.

        Raises:
            ValueError: It holds something else.

        """
        return cls.from_json(Path(file).read_text(encoding="utf-8"))


def _spelled(thresholds: Thresholds) -> Any:
    given = thresholds.logits
    if isinstance(given, Mapping):
        return {name: _entry(each) for name, each in given.items()}
    return [_entry(each) for each in given] if isinstance(given, tuple) else _entry(given)


def _entry(bound: float | tuple[float, ...]) -> Any:
    return spelled(bound) if isinstance(bound, tuple) else spelled([bound])[0]
