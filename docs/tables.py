"""Tables in the documentation, made from results: python docs/tables.py writes them, --check only compares.

A table stands between `<!-- table: NAME ARGUMENTS -->` and `<!-- end -->` in a Markdown file. Names:

    claims SCALE       what the paper says it found, judged by the finished runs of a scale
    summary SCALE      all finished runs of a scale, seeds together
    csv FILE COLUMNS   a CSV file, such as benchmarks leave; some of its columns, if named

Figures of the reproduction that pages show are copied to docs/images.
"""

import argparse
import csv
import re
from collections.abc import Callable
from pathlib import Path

from torchpact._files import write_whole
from torchpact.experiments import SCALES, Archive, claims, summary

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIGURE = re.compile(r"images/(fig\d[\w-]*\.png)")
REGION = re.compile(r"(<!-- table: (?P<what>[^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def claims_table(scale: str) -> str:
    chosen = SCALES[scale]
    return claims.markdown(claims.findings(_archive(scale), chosen, list(range(chosen.seeds))))


def summary_table(scale: str) -> str:
    return summary.markdown(summary.rows(_archive(scale)))


def csv_table(arguments: str) -> str:
    name, *columns = arguments.split()
    with (ROOT / name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = columns or list(rows[0])
    lines = [[column.replace("_", " ") for column in columns], ["---"] * len(columns)]
    lines += [[_shown(row[column]) for column in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


TABLES: dict[str, Callable[[str], str]] = {
    "claims": claims_table,
    "summary": summary_table,
    "csv": csv_table,
}


def filled(text: str) -> str:
    """A page with its tables as they should be."""

    def table(match: re.Match[str]) -> str:
        name, _, argument = match["what"].partition(" ")
        if name not in TABLES:
            raise SystemExit(f"expected a table among {', '.join(TABLES)}; got {name!r}")
        return f"{match[1]}\n{TABLES[name](argument)}\n{match[3]}"

    return REGION.sub(table, text)


def _archive(scale: str) -> Archive:
    return Archive(ROOT / "results" / scale, ROOT / "runs" / scale)


def _shown(cell: str) -> str:
    return f"{int(cell):,}" if cell.isdigit() and len(cell) > 4 else cell


def main() -> None:
    parser = argparse.ArgumentParser(description="tables in the documentation")
    parser.add_argument("--check", action="store_true", help="only say whether they are as they should be")
    check = parser.parse_args().check
    wanted = {page: filled(page.read_text()).encode() for page in PAGES}
    for name in FIGURE.findall("".join(text.decode() for text in wanted.values())):
        wanted[ROOT / "docs" / "images" / name] = (ROOT / "results" / "fast" / "figures" / name).read_bytes()
    for path, content in wanted.items():
        if path.exists() and path.read_bytes() == content:
            continue
        shown = path.relative_to(ROOT)
        if check:
            raise SystemExit(f"{shown}: expected what the results give; run python docs/tables.py")
        write_whole(path, content)
        print(shown)


if __name__ == "__main__":
    main()
