"""How claims are judged: by what every seed says, and not by the mean alone.

A claim is put as bounds of a number that each seed has. In one setting

* it holds if the number is within them in every seed, or its mean is by two standard errors;
* partly, if the mean is within them but a seed is not, or if the mean is within looser bounds, where the
  judgement names some;
* else it does not.

Where it is made of several settings, it holds if it does in all of them, does not if it does in none, not
even partly, and else holds partly. Of several numbers at once, the worst decides. A single seed is its own
mean, so what is measured always says how many there are.
"""

import math
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Literal, NamedTuple

from torchpact_recipes.experiments.evidence import Evidence, Measured
from torchpact_recipes.experiments.gather import spread

Verdict = Literal["holds", "partly", "does not hold", "not measured yet"]
Judge = Callable[[Evidence], tuple[Verdict, str]]
"""Its verdict, and what was measured, in words."""

NOTHING: tuple[Verdict, str] = "not measured yet", ""

_FROM_BEST: tuple[Verdict, ...] = ("holds", "partly", "does not hold")


class Claim(NamedTuple):
    """What the paper says, where it does, and how it is judged."""

    text: str
    where: str
    judge: Judge


def claim(text: str, where: str) -> Callable[[Judge], Claim]:
    """Make a claim of the function that judges it."""
    return lambda judge: Claim(text, where, judge)


def judge(
    values: Sequence[float],
    *,
    above: float = -math.inf,
    below: float = math.inf,
    loosely: tuple[float, float] | None = None,
) -> Verdict:
    """Whether a number, of one setting and by seed, lies between bounds.

    >>> judge([2.1, 2.5], above=2), judge([1.9, 2.5], above=2), judge([1.9, 1.9], above=2)
    ('holds', 'partly', 'does not hold')

    One seed of many may be out of bounds if it hardly moves the mean; looser bounds hold partly:

    >>> judge([1.9, *[2.5] * 9], above=2), judge([1.9, 1.9], above=2, loosely=(1, math.inf))
    ('holds', 'partly')
    """
    known = spread(values)
    error = 0.0 if known.sd is None else known.sd / math.sqrt(known.n)
    in_every_seed = all(above < value < below for value in values)
    if in_every_seed or (above < known.mean - 2 * error and known.mean + 2 * error < below):
        return "holds"
    low, high = loosely or (above, below)
    return "partly" if above < known.mean < below or low < known.mean < high else "does not hold"


def across(verdicts: Iterable[Verdict]) -> Verdict:
    """That of a claim which is made of several settings.

    >>> across(["holds", "holds"]), across(["holds", "does not hold"]), across(["does not hold"])
    ('holds', 'partly', 'does not hold')
    """
    found = set(verdicts)
    return found.pop() if len(found) == 1 else "partly"


def worst(*verdicts: Verdict) -> Verdict:
    """That of a claim about several numbers at once.

    >>> worst("partly", "holds")
    'partly'
    """
    return max(verdicts, key=_FROM_BEST.index)


def in_words(values: Sequence[float], digits: int = 2, sign: str = "") -> str:
    """Mean and standard deviation, if there are several.

    >>> in_words([1.0, 2.0, 3.0], 1), in_words([5.0]), in_words([-0.001], sign="+")
    ('2.0 ± 1.0', '5.00', '+0.00')
    """
    known = spread(values)
    mean = round(known.mean, digits) + 0.0  # not -0.00
    deviation = "" if known.sd is None else f" ± {known.sd:.{digits}f}"
    return f"{mean:{sign}.{digits}f}{deviation}"


def seeds(*groups: Sized) -> str:
    """How many seeds there are in each of these groups.

    >>> seeds([1.0]), seeds([1.0, 2.0], [2.0, 3.0]), seeds([1.0], [2.0, 3.0])
    ('1 seed', '2 seeds', '1 or 2 seeds')
    """
    counts = sorted({len(group) for group in groups})
    return f"{' or '.join(map(str, counts))} seed{'' if counts == [1] else 's'}"


def by_setting(measured: Measured, digits: int = 2) -> str:
    """All that was measured, network by network.

    >>> by_setting({"ResNet-32": {"τ = 0.05": [1.0, 2.0], "τ = 0.01": [3.0, 3.0]}}, 1)
    '1.5 ± 0.7 (τ = 0.05), 3.0 ± 0.0 (τ = 0.01) for ResNet-32, 2 seeds'
    """
    return "; ".join(
        f"{', '.join(f'{in_words(each, digits)} ({label})' for label, each in settings.items())} "
        f"for {network}, {seeds(*settings.values())}"
        for network, settings in measured.items()
    )


def in_settings(measured: Measured, judge_one: Callable[[Sequence[float]], Verdict]) -> Verdict:
    """Judge all that was measured, setting by setting."""
    return across(judge_one(each) for settings in measured.values() for each in settings.values())
