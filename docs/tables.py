"""Numbers in the documentation, made from results: python docs/tables.py writes them, --check only compares.

A table stands between `<!-- table: NAME ARGUMENTS -->` and `<!-- end -->` in a Markdown file. Names:

    claims SCALE       what the paper says it found, judged by the finished runs of a scale
    claims SCALE OTHER   those of them for which it has runs, and another result than OTHER
    summary SCALE      all finished runs of a scale, seeds together
    sequences SCALE EXPERIMENT MEASURE   settings of an experiment on sequences, seeds together
    beyond SCALE EXPERIMENT              those tested on more than they were trained on
    zoo                the pretrained networks, as their cards have them
    csv FILE COLUMNS COLUMN=VALUE,VALUE…   a CSV file, such as benchmarks leave; some of its columns, if
                                           named, and the rows with these values, where _ stands for a space
    ranges NAME KEY,… COLUMN,… COLUMN=VALUE,…   of rows of benchmarks/NAME.csv with these values, those alike
                       in the keys together: the least and the most of each column

In sentences they stand between `<!--= WHAT -->` and `<!--/-->`: spans.py says what can be asked for.

Figures of the reproduction that pages show are copied to docs/images, those of scale paper to images/paper;
tables of claims and of all runs lie beside the results, too. Pages named on the command line are done alone.
"""

import argparse
import csv
import re
from collections.abc import Callable
from pathlib import Path

import spans

from torchpact.files import write_whole
from torchpact_recipes import zoo
from torchpact_recipes.experiments import EXPERIMENTS, SCALES, claims, rnn_tables, summary
from torchpact_recipes.experiments.rnn_figures import Point
from torchpact_recipes.experiments.rnn_runs import SequenceRun
from torchpact_recipes.training import TrainConfig
from torchpact_recipes.training.titles import title

ROOT = spans.ROOT
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FIGURE = re.compile(rf"images/((?:paper/)?)((?:{'|'.join(EXPERIMENTS)})[\w-]*\.png)")
REGION = re.compile(r"(<!-- table: (?P<what>[^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def claims_table(arguments: str) -> str:
    scale, *others = arguments.split()
    found = _findings(scale)
    for other in others:
        known = _findings(other)
        found = [f for f in found if f.verdict != "not measured yet" and f not in known]
    return claims.markdown(found)


def _findings(scale: str) -> list[claims.Finding]:
    return claims.findings(spans.archive(scale), SCALES[scale], list(range(SCALES[scale].seeds)))


def summary_table(scale: str) -> str:
    return summary.markdown(summary.rows(spans.archive(scale)))


def sequence_table(arguments: str) -> str:
    scale, name, measure = arguments.split()
    return rnn_tables.markdown(_points(scale, name), measure)


def beyond_table(arguments: str) -> str:
    return rnn_tables.markdown_beyond(_points(*arguments.split()))


def _points(scale: str, name: str) -> list[Point]:
    chosen, experiment = SCALES[scale], EXPERIMENTS[name]
    runs = [run for run in experiment.runs(chosen, experiment.seeds(chosen)) if isinstance(run, SequenceRun)]
    return rnn_tables.points(runs, spans.archive(scale))


def zoo_table(arguments: str) -> str:
    """Each network in the mode it is deployed in, or trained in where that is ACT."""
    lines = [
        ["network", "name", "iterations", "mode", "test accuracy", "MFLOPs an image", "of the plain one"]
    ]
    lines.append(["---"] * len(lines[0]))
    entries = zoo.entries()
    plain = {e.network.units: e.card["results"]["plain"]["flops"] for e in entries if not e.network.adaptive}
    for entry in entries:
        results = entry.card["results"]
        mode = "act" if "act" in results else [*results][-1]
        m = results[mode]
        share = f"{m['flops'] / plain[entry.network.units]:.0%}" if entry.network.units in plain else ""
        config = TrainConfig.from_dict(entry.config)
        network = [title(config), f"`{entry.name}`", f"{config.iterations:,}"]
        lines.append([*network, mode, f"{m['accuracy']:.2%}", f"{m['flops'] / 1e6:.1f}", share])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def csv_table(arguments: str) -> str:
    name, *words = arguments.split()
    columns = [word for word in words if "=" not in word]
    with (ROOT / name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = columns or list(rows[0])
    for column, _, values in (word.partition("=") for word in words if "=" in word):
        rows = [row for row in rows if row[column].replace(" ", "_") in values.split(",")]
    if not rows:
        raise ValueError(f"expected rows of {name} with what {arguments!r} asks for, found none")
    lines = [[column.replace("_", " ") for column in columns], ["---"] * len(columns)]
    lines += [[_shown(row[column]) for column in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def range_table(arguments: str) -> str:
    name, keys, columns, *wanted = arguments.split()
    shown = [*keys.split(","), *columns.split(",")]
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in spans.rows_with(name, shown, wanted):
        groups.setdefault(tuple(row[key] for key in keys.split(",")), []).append(row)
    lines = [[column.replace("_", " ") for column in shown], ["---"] * len(shown)]
    for values, rows in groups.items():
        found = [sorted((row[c] for row in rows), key=float) for c in columns.split(",")]
        lines.append([*values, *(f[0] if f[0] == f[-1] else f"{f[0]} to {f[-1]}" for f in found)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


TABLES: dict[str, Callable[[str], str]] = {
    "claims": claims_table,
    "summary": summary_table,
    "sequences": sequence_table,
    "beyond": beyond_table,
    "zoo": zoo_table,
    "csv": csv_table,
    "ranges": range_table,
}


def filled(text: str) -> str:
    """A page with its tables as they should be."""

    def table(match: re.Match[str]) -> str:
        name, _, argument = match["what"].partition(" ")
        if name not in TABLES:
            raise ValueError(f"expected a table among {', '.join(TABLES)}; got {name!r}")
        return f"{match[1]}\n{TABLES[name](argument)}\n{match[3]}"

    return REGION.sub(table, text)


def _figures(scale: str) -> Path:
    return ROOT / "results" / scale / "figures"


def _shown(cell: str) -> str:
    return f"{int(cell):,}" if cell.isdigit() and len(cell) > 4 else cell


def main() -> None:
    parser = argparse.ArgumentParser(description="tables and numbers in the documentation")
    parser.add_argument("--check", action="store_true", help="only say whether they are as they should be")
    parser.add_argument(
        "pages", nargs="*", type=Path, help="Markdown files to look at, instead of all there is"
    )
    arguments = parser.parse_args()
    wanted, wrong = {}, []
    for page in arguments.pages or PAGES:
        try:
            text, found = spans.filled(page.read_text())
            wanted[page] = filled(text).encode()
        except ValueError as error:
            raise SystemExit(f"{_name(page)}: {error}") from None
        wrong += [f"{_name(page)}: {line}" for line in found]
    if not arguments.pages:
        wanted |= _others("".join(text.decode() for text in wanted.values()))
    if arguments.check and wrong:
        raise SystemExit("\n".join([*wrong, "run python docs/tables.py"]))
    for path, content in wanted.items():
        if path.exists() and path.read_bytes() == content:
            continue
        if arguments.check:
            raise SystemExit(f"{_name(path)}: expected what the results give; run python docs/tables.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
        print(_name(path))


def _others(pages: str) -> dict[Path, bytes]:
    """Files that are no pages: figures that pages show, and tables beside the results."""
    wanted = {}
    for folder, name in FIGURE.findall(pages):
        wanted[ROOT / "docs" / "images" / folder / name] = (_figures(folder or "fast") / name).read_bytes()
    for scale in ("fast", "paper"):
        tables = summary.files(summary.rows(spans.archive(scale))) | claims.files(_findings(scale))
        wanted |= {_figures(scale) / name: text.encode() for name, text in tables.items()}
    return wanted


def _name(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


if __name__ == "__main__":
    main()
