"""Finished runs, seeds together: means and standard deviations of what they measured."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.runs import R, Run
from torchpact_recipes.training.run_files import Event


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over n seeds; a single one has no deviation."""

    mean: float
    sd: float | None
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.sd is None else f" ± {self.sd:.2f}")


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation of a sample.

    >>> print(spread([1.0, 2.0, 3.0]), spread([5.0]))
    2.00 ± 1.00 5.00
    """
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), sd, len(values))


def finished(runs: Iterable[R], archive: Archive) -> dict[str, list[R]]:
    """The runs that are finished, by setting; an error where there are none."""
    found: dict[str, list[R]] = {}
    runs = list(runs)
    for run in runs:
        if archive.record(run) is not None:
            found.setdefault(run.setting, []).append(run)
    if not found:
        raise ValueError(f"expected finished runs in {archive.results}, such as {runs[0].name}; got none")
    return found


def inventory(runs: Iterable[R], found: dict[str, list[R]]) -> dict[str, list[str]]:
    """The names of runs that a figure shows, and of those it does without."""
    shown = [run.name for group in found.values() for run in group]
    return {"runs": shown, "missing": [run.name for run in runs if run.name not in shown]}


def over_seeds(found: dict[str, list[R]], wanted: Sequence[R]) -> str:
    """What the points of a figure are, in words, and how many runs there are where not all."""
    counts = sorted(len(group) for group in found.values())
    low, high, total = counts[0], counts[-1], sum(counts)
    text = "1 seed" if high == 1 else f"mean ± sd of {high if low == high else f'{low} to {high}'} seeds"
    return text if total == len(wanted) else f"{text} ({total} of {len(wanted)} runs)"


def at_end(group: Iterable[Run], archive: Archive, mode: str) -> dict[str, Spread]:
    """Accuracy in per cent and MFLOPs of one setting, evaluated in a mode."""
    records = [record for run in group if (record := archive.record(run)) is not None]
    measured = [record["results"][mode] for record in records]
    return {
        "accuracy": spread([100 * m["accuracy"] for m in measured]),
        "mflops": spread([m["flops"] / 1e6 for m in measured]),
    }


@dataclass(frozen=True)
class Curve:
    """Something measured through training, at iterations that all n seeds have in common."""

    iterations: list[int]
    mean: list[float]
    sd: list[float] | None
    n: int


def through_training(
    group: Iterable[Run], archive: Archive, value: Callable[[Run, Event], float | None]
) -> Curve | None:
    """What ``value`` gives for the validations of a setting; None where it has nothing to say of any."""
    series: list[dict[int, float]] = []
    for run in group:
        events = [event for event in archive.history(run) if event["kind"] == "validate"]
        values = {event["iteration"]: value(run, event) for event in events}
        if known := {iteration: v for iteration, v in values.items() if v is not None}:
            series.append(known)
    if not series:
        return None
    iterations = sorted(set.intersection(*(set(one) for one in series)))
    spreads = [spread([one[iteration] for one in series]) for iteration in iterations]
    deviations = [s.sd for s in spreads if s.sd is not None]
    return Curve(iterations, [s.mean for s in spreads], deviations or None, len(series))
