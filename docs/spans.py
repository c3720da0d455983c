"""Numbers in the sentences of a page, made from results; python docs/tables.py writes and checks them.

A span is a comment that says what its numbers are, text of the page, and a comment that ends it:

    <!--= accuracy,mflops paper/resnet32-relaxed-tau0.02 thresholded -->**91.55 % with 66** MFLOPs<!--/-->

Numbers in the text are replaced one by one, each with as many decimals as it has; all else stays. There must
be as many of them as there are values. What the values are, in parts divided by semicolons:

    [PICK] MEASURE[,MEASURE…] RUNS MODE[,MODE…] [less|over RUNS MODE[,MODE…]]

RUNS is SCALE/SETTING, seeds together, or SCALE/RUN with its seed, or several of these with a + between; scale
zoo has the cards of the zoo. {a,b} stands for a and b, in this order, and * for any letters but a dash, the
highest τ first. MODE may be that of an earlier iteration: act@12000. Every run gives its modes in turn,
and they their measures; less and over compare one by one. PICK is

    spread (mean and standard deviation over seeds), sd (the latter alone)                    of every run
    least, most, range (both), apart (most less least), same (one number, as all are alike)   of all runs

Or they are columns of a benchmark's rows, those that have the values given, with _ for a space:

    [PICK] csv NAME COLUMN[,COLUMN…] [COLUMN=VALUE[,VALUE…]…]

of benchmarks/NAME.csv, or of the file NAME.csv where NAME has folders; without a PICK all rows in turn.

No span may begin a line, which Markdown would take for HTML.
"""

import csv
import re
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from typing import Any

from torchpact.models import ResNetConfig
from torchpact_recipes import zoo
from torchpact_recipes.experiments import EXPERIMENTS, SCALES, AnyRun, Archive
from torchpact_recipes.experiments.evidence import early_weight, undecided
from torchpact_recipes.experiments.gather import Spread, spread

ROOT = Path(__file__).resolve().parent.parent
SPAN = re.compile(r"<!--= (?P<what>[^>]*?) -->(?P<text>.*?)<!--/-->", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.-])-?\d+(?:\.\d+)?")

Numbers = dict[str, Any]
MEASURES: dict[str, Callable[[Numbers, Numbers], float]] = {  # of what a mode came to, and of all of run.json
    "accuracy": lambda m, run: 100 * m["accuracy"],
    "mflops": lambda m, run: m["flops"] / 1e6,
    "share": lambda m, run: 100 * m["flops"] / _plain_flops(run["config"]["network"]["units"]),
    "lost": lambda m, run: 100 * (m["accuracy"] - run["results"]["thresholded"]["accuracy"]),
    "undecided": lambda m, run: 100 * _there(undecided(ResNetConfig(**run["config"]["network"]), m)),
    "remainder": lambda m, run: 1 - early_weight(ResNetConfig(**run["config"]["network"]), m),
    "steps": lambda m, run: m["steps"],
    "steps1": lambda m, run: m["steps"][0],  # of a block
    "steps2": lambda m, run: m["steps"][1],
    "steps3": lambda m, run: m["steps"][2],
    "easiest": lambda m, run: next(iter(m["steps_by_difficulty"].values())),  # steps on such inputs
    "hardest": lambda m, run: [*m["steps_by_difficulty"].values()][-1],
    "errors": lambda m, run: 100 * (1 - m["sequence_accuracy"]),
    "bits": lambda m, run: m["bits_per_character"],
}
PICKS: dict[str, Callable[[list[Spread]], list[list[float]]]] = {
    # for every number in the text one value, or several that should look alike
    "each": lambda found: [[s.mean] for s in found],
    "spread": lambda found: [[value] for s in found for value in (s.mean, _there(s.sd))],
    "sd": lambda found: [[_there(s.sd)] for s in found],
    "least": lambda found: [[min(s.mean for s in found)]],
    "most": lambda found: [[max(s.mean for s in found)]],
    "range": lambda found: [[pick(s.mean for s in found)] for pick in (min, max)],
    "apart": lambda found: [[max(s.mean for s in found) - min(s.mean for s in found)]],
    "same": lambda found: [[s.mean for s in found]],
}


def filled(text: str) -> tuple[str, list[str]]:
    """A page with the numbers of its spans as they should be, and where they are not, a line each."""
    if found := re.search(r"^[\s>]*(?:[*+-]\s+|\d+\.\s+)*<!--[=/].*", text, flags=re.MULTILINE):
        raise ValueError(f"expected no line to begin with a span, got {found[0].strip()!r}")
    if not text.count("<!--=") == text.count("<!--/-->") == len(SPAN.findall(text)):
        raise ValueError("expected spans of the form <!--= … -->…<!--/-->, one after the other")
    wrong = []

    def fill(span: re.Match[str]) -> str:
        line, what, old = text.count("\n", 0, span.start()) + 1, *span.groups()
        try:
            new = _text([value for part in what.split(";") for value in values(part)], old)
        except ValueError as error:
            raise ValueError(f"line {line}, <!--= {what} -->: {error}") from None
        if new != old:
            wrong.append(f"line {line}, <!--= {what} -->: expected {new!r}, got {old!r}")
        return f"<!--= {what} -->{new}<!--/-->"

    return SPAN.sub(fill, text), wrong


def _text(wanted: list[list[float]], like: str) -> str:
    """The text of a span with other numbers, halves rounded upwards, as people do."""
    if len(wanted) != len(NUMBER.findall(like)):
        raise ValueError(f"expected {len(wanted)} numbers in the text, got {like!r}")
    left = iter(wanted)

    def number(match: re.Match[str]) -> str:
        step = Decimal(1).scaleb(-len(match[0].partition(".")[2]))
        # six decimals: without the dust of binary fractions
        texts = {str(Decimal(f"{value:.6f}").quantize(step, ROUND_HALF_UP)) for value in next(left)}
        if len(texts) > 1:
            raise ValueError(f"expected one number for all, got {', '.join(sorted(texts))}")
        return texts.pop()

    return NUMBER.sub(number, like)


def values(part: str) -> list[list[float]]:
    """What one part of a span stands for."""
    words = part.split()
    pick = words.pop(0) if words and words[0] in PICKS else "each"
    if words[:1] == ["csv"]:
        return _picked(pick, _rows(words[1:], part))
    if len(words) not in (3, 6) or words[3:4] not in ([], ["less"], ["over"]):
        raise ValueError(f"expected [PICK] MEASURES RUNS MODES [less|over RUNS MODES], got {part.strip()!r}")
    measures = words[0].split(",")
    for unknown in [measure for measure in measures if measure not in MEASURES]:
        raise ValueError(f"expected a measure among {', '.join(MEASURES)}; got {unknown!r}")
    found = _all(words[1], words[2], measures)
    if words[3:]:
        others = _all(words[4], words[5], measures)
        if len(found) != len(others):
            raise ValueError(f"expected as many runs after {words[3]} as before, got {len(others)}")
        for ours, theirs in zip(found, others, strict=True):
            means = [(a.mean, b.mean) for a, b in zip(ours, theirs, strict=True)]
            ours[:] = [spread([a - b if words[3] == "less" else a / b]) for a, b in means]
    return _picked(pick, found)


def _picked(pick: str, found: list[list[Spread]]) -> list[list[float]]:
    if pick in ("each", "spread", "sd"):
        return PICKS[pick]([one for ours in found for one in ours])
    return [value for column in zip(*found, strict=True) for value in PICKS[pick]([*column])]


def _rows(words: list[str], part: str) -> list[list[Spread]]:
    """Columns of those rows of a benchmark that have the values asked for."""
    if len(words) < 2 or not all(word.count("=") == 1 for word in words[2:]):
        raise ValueError(f"expected csv NAME COLUMNS COLUMN=VALUES…, got {part.strip()!r}")
    columns = words[1].split(",")
    rows = rows_with(words[0], columns, words[2:])
    try:
        return [[spread([float(row[column])]) for column in columns] for row in rows]
    except ValueError:
        raise ValueError(f"expected numbers in {words[1]} of {words[0]}.csv") from None


def rows_with(name: str, columns: list[str], wanted: list[str]) -> list[dict[str, str]]:
    """Rows of NAME.csv, in benchmarks by default, that have the values wanted, each as COLUMN=VALUE,VALUE…"""
    file = ROOT / (f"{name}.csv" if "/" in name else f"benchmarks/{name}.csv")
    if not file.is_file():
        raise ValueError(f"expected the name of a file in benchmarks, or of one with folders, got {name!r}")
    with file.open(newline="") as opened:
        reader = csv.DictReader(opened)
        rows, known = [*reader], reader.fieldnames or []
    for column in [*columns, *(word.partition("=")[0] for word in wanted)]:
        if column not in known:
            raise ValueError(f"expected a column among {', '.join(known)}; got {column!r}")
    for column, _, choices in (word.partition("=") for word in wanted):
        for choice in choices.split(","):
            if choice not in {row[column].replace(" ", "_") for row in rows}:
                raise ValueError(f"expected rows of {file.name} with {column}={choice}, found none")
        rows = [row for row in rows if row[column].replace(" ", "_") in choices.split(",")]
    return rows


def _all(runs: str, modes: str, measures: list[str]) -> list[list[Spread]]:
    return [_measured(group, mode, measures) for group in _groups(runs) for mode in modes.split(",")]


def _measured(group: list[str], mode: str, measures: list[str]) -> list[Spread]:
    """Every measure of a setting, seeds together."""
    mode, _, iteration = mode.partition("@")
    rows = []
    for name in group:
        scale, _, run = name.partition("/")
        record = _records(scale)[run]
        if iteration:
            events = [e for e in archive(scale).history(_runs(scale)[run]) if e["kind"] == "validate"]
            modes = {str(e["iteration"]): e["modes"] for e in events}
            record = record | {"results": modes.get(iteration, {})}
        if mode not in record["results"]:
            raise ValueError(f"expected a mode of {name} among {', '.join(record['results'])}; got {mode!r}")
        try:
            rows.append([MEASURES[m](record["results"][mode], record) for m in measures])
        except (KeyError, TypeError):
            raise ValueError(f"expected a measure that {name} has, got {','.join(measures)!r}") from None
    return [spread(column) for column in zip(*rows, strict=True)]


def _groups(pattern: str) -> list[list[str]]:
    """Names of runs as SCALE/RUN, those of a setting together; each alone where the seed is given."""
    if "+" in pattern:
        return [group for part in pattern.split("+") for group in _groups(part)]
    if braces := re.search(r"{(.*?)}", pattern):
        choices = [pattern.replace(braces[0], choice, 1) for choice in braces[1].split(",")]
        return [group for choice in choices for group in _groups(choice)]
    scale, _, wanted = pattern.partition("/")
    found: dict[str, list[str]] = {}
    for name in sorted(_records(scale), key=lambda name: -_records(scale)[name]["config"]["tau"]):
        setting = name if "-seed" in wanted else name.partition("-seed")[0]
        if re.fullmatch(re.escape(wanted).replace(r"\*", "[^-]*"), setting):
            found.setdefault(setting, []).append(f"{scale}/{name}")
    if not found:
        raise ValueError(f"expected finished runs, got {pattern!r}, of which there are none")
    return [*found.values()]


@cache
def _records(scale: str) -> dict[str, Numbers]:
    if scale == "zoo":
        return {e.name: {"config": e.config, "results": e.card["results"]} for e in zoo.entries()}
    found = {name: archive(scale).record(run) for name, run in sorted(_runs(scale).items())}
    return {name: record for name, record in found.items() if record is not None}


@cache
def _runs(scale: str) -> dict[str, AnyRun]:
    if scale not in SCALES:
        raise ValueError(f"expected a scale among {', '.join(SCALES)}, zoo; got {scale!r}")
    chosen = SCALES[scale]
    return {run.name: run for each in EXPERIMENTS.values() for run in each.runs(chosen, each.seeds(chosen))}


def archive(scale: str) -> Archive:
    return Archive(ROOT / "results" / scale, ROOT / "runs" / scale)


def _plain_flops(units: int) -> float:
    (group,) = _groups(f"fast/resnet{6 * units + 2}-plain")
    return 1e6 * _measured(group, "plain", ["mflops"])[0].mean


def _there(value: float | None) -> float:
    if value is None:
        raise ValueError("expected what was measured, of several seeds where it is a deviation; got nothing")
    return value
