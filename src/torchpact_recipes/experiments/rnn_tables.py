"""What the experiments on sequences came to, as tables for the documentation."""

from collections.abc import Iterable

from torchpact_recipes.experiments.archive import Archive
from torchpact_recipes.experiments.gather import Spread, finished
from torchpact_recipes.experiments.rnn_figures import NAMES, Point, points_of
from torchpact_recipes.experiments.rnn_runs import SequenceRun

MEASURES = {
    "accuracy": ("accuracy, %", 1),
    "sequence_error": ("sequences with an error, %", 1),
    "bits": ("bits a character", 3),
}
"""What a table may show, with how many decimals."""


def points(runs: Iterable[SequenceRun], archive: Archive) -> list[Point]:
    """All settings that are finished, methods next to each other."""
    found = points_of(finished(runs, archive), archive)
    order = list(NAMES)
    return sorted(found, key=lambda p: (order.index(p.method), p.max_steps, -(p.tau or 0.0)))


def markdown(points: Iterable[Point], measure: str) -> str:
    """A row for every setting within what was trained on, means ± standard deviations over seeds.

    >>> print(markdown([], "bits"))
    | trained | τ | evaluated | bits a character | steps | seeds |
    | --- | --- | --- | --- | --- | --- |
    <BLANKLINE>
    """
    label, digits = MEASURES[measure]
    rows = [["trained", "τ", "evaluated", label, "steps", "seeds"]]
    for point in points:
        if point.transfer is None:
            value = _text(getattr(point, measure), digits)
            rows.append([*_setting(point), value, _steps(point, point.steps), str(point.steps.n)])
    return _table(rows)


def markdown_beyond(points: Iterable[Point]) -> str:
    """A row for every setting that was tested on more than it was trained on, too."""
    rows = [["trained", "τ", "evaluated", "accuracy, %", "steps", "beyond: accuracy, %", "steps", "seeds"]]
    for point in points:
        if point.transfer is not None and point.transfer_steps is not None:
            near = [_text(point.accuracy, 1), _steps(point, point.steps)]
            far = [_text(point.transfer, 1), _steps(point, point.transfer_steps)]
            rows.append([*_setting(point), *near, *far, str(point.steps.n)])
    return _table(rows)


def _setting(point: Point) -> list[str]:
    if point.tau is None:
        return [NAMES[point.method], "", ""]
    return [NAMES[point.method], f"{point.tau:g}", point.mode]


def _steps(point: Point, steps: Spread) -> str:
    return str(point.max_steps) if point.tau is None else _text(steps, 2)


def _text(value: Spread, digits: int) -> str:
    return f"{value.mean:.{digits}f}" + ("" if value.sd is None else f" ± {value.sd:.{digits}f}")


def _table(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
