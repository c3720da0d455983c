"""What deploy found out, as a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal


@dataclass(frozen=True)
class Measurement:
    """A block, or the whole network: what runs it, and how long that took on the example.

    >>> block = Measurement("1", "16×32×32", "native", 0.4, {"native": 1e-3, "plain": 3e-3}, 5e6, 10e6)
    >>> block.speedup, block.flops_speedup
    (3.0, 2.0)
    """

    name: str
    output: str
    engine: str
    active: float
    """The share of units that positions ran, in the mean."""
    seconds: Mapping[str, float]
    """By engine; "plain" is the block of a network that is not adaptive, computed densely."""
    flops: float
    plain_flops: float

    @property
    def speedup(self) -> float:
        """How many times as fast as the plain block; NaN if that could not be measured."""
        return self.seconds.get("plain", math.nan) / self.seconds.get(self.engine, math.nan)

    @property
    def flops_speedup(self) -> float:
        """The same, were FLOPs all that counts; NaN if there are none."""
        return self.plain_flops / self.flops if self.flops and self.plain_flops else math.nan


@dataclass(frozen=True)
class Report:
    """The measurements of all blocks and of the network, and what kept engines from being tried."""

    batch: int
    measurements: Sequence[Measurement]
    notes: Sequence[str] = field(default=())
    what: str = "images"
    busy: bool = False
    """Whether other programs were in the way when it was measured, so that all of it means little."""

    def __str__(self) -> str:
        """Return a table for people."""
        head = ("block", "output", "engine", "active", "faster", "by FLOPs", "milliseconds")
        rows = [head, *(_cells(each) for each in self.measurements)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        busy = ", while other programs kept the cores busy" if self.busy else ""
        what = self.what[:-1] if self.batch == 1 else self.what
        lines.append(
            f"Medians on {self.batch} {what}, without gradients{busy}; “plain” is the same without decisions."
        )
        if self.measurements and self.measurements[-1].speedup < 0.97:
            lines.append(
                "Slower than without decisions, which take longer than what is skipped, if anything is."
            )
        if self.busy:
            lines.append(
                "Other programs were busy when this was chosen: retune(example) measures and chooses again."
            )
        return "\n".join([*lines, *self.notes])


def _cells(each: Measurement) -> tuple[str, ...]:
    times = sorted(each.seconds.items(), key=lambda item: item[1])
    return (
        each.name,
        each.output,
        each.engine,
        "" if math.isnan(each.active) else f"{each.active:.0%}",
        _times(each.speedup),
        _times(each.flops_speedup),
        ", ".join(f"{name} {_digits(1e3 * seconds)}" for name, seconds in times),
    )


def _times(ratio: float) -> str:
    return "" if math.isnan(ratio) else f"{ratio:.2f} ×"


def _digits(number: float) -> str:
    """Three significant digits, and never an exponent.

    >>> [_digits(x) for x in (1084.2, 999.7, 12.345, 0.5, 0.00001234)]
    ['1080', '1000', '12.3', '0.5', '0.0000123']
    """
    return format(Decimal(f"{number:.3g}"), "f")


def sizes_of(shape: Sequence[int]) -> str:
    """Return what an example of this shape looks like, for people.

    >>> sizes_of((64, 16, 32, 32))
    '16×32×32'
    """
    return "×".join(str(size) for size in shape[1:])
