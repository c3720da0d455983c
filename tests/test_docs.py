"""What README and docs show must run, and what they name must exist."""

import csv
import importlib
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import torchpact as tp
from torchpact import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if python_blocks(p)], ids=lambda page: page.name)
def test_the_code_on_a_page_runs_from_top_to_bottom(page, capsys):
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for number, block in enumerate(python_blocks(page), start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


def test_the_example_of_an_own_iteration_is_short_and_stops_later_for_larger_inputs(capsys):
    (program, *_) = python_blocks(ROOT / "docs" / "adaptive.md")
    assert sum(bool(line.strip()) for line in program.splitlines()) <= 30
    namespace: dict[str, object] = {}
    exec(program, namespace)
    roots, steps = (eval(part) for part in re.findall(r"\[.*?\]", capsys.readouterr().out))
    assert roots == pytest.approx([1, 10, 100], rel=0.02)
    assert steps[0] < steps[1] < steps[2] < 10


def test_the_paper_map_names_code_that_exists():
    text = (ROOT / "docs" / "paper-map.md").read_text()
    references = re.findall(r"`([\w/]+)\.py::(\w+)`", text)
    assert len(references) > 30
    for path, name in references:
        module = importlib.import_module(path.replace("/", "."))
        assert hasattr(module, name), f"{path}.py has no {name}"


def test_the_paper_map_lists_every_equation_and_algorithm_once():
    text = (ROOT / "docs" / "paper-map.md").read_text()
    equations, algorithms = [], []
    for cell in re.findall(r"^\| ([^|]*) \|", text, flags=re.MULTILINE):
        found = [int(n) for n in re.findall(r"\d+", cell)]
        if cell.startswith("eq."):
            equations += found
        elif cell.startswith("alg."):
            algorithms += found
    assert equations == list(range(1, 31))
    assert algorithms == [1, 2, 3, 4]


def test_every_public_name_stands_in_the_api_reference():
    reference = (ROOT / "docs" / "reference.md").read_text()
    shown = set(re.findall(r"^::: ([\w.]+)$", reference, flags=re.MULTILINE))
    for name in tp.__all__:
        thing = getattr(tp, name)
        # the reference names the place of definition, since subpackages bear the names of functions
        where = thing.__name__ if inspect.ismodule(thing) else f"{thing.__module__}.{thing.__qualname__}"
        assert where in shown, f"docs/reference.md has no ::: {where}"


def test_the_readme_lists_every_command():
    text = (ROOT / "README.md").read_text()
    table = text.partition("## The command line")[2].partition("\n## ")[0]
    for name in typer.main.get_command(cli.make_app()).commands:  # type: ignore[attr-defined]
        assert re.search(rf"`(torchpact )?{name}\b", table), name


@pytest.fixture
def tables(monkeypatch):
    """What `python docs/tables.py ARGUMENTS` says when it fails; None where it does not."""
    monkeypatch.syspath_prepend(ROOT / "docs")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tables.py", *map(str, arguments)])
        try:
            runpy.run_path(str(ROOT / "docs" / "tables.py"), run_name="__main__")
        except SystemExit as end:
            return end.code
        return None

    return run


def test_numbers_tables_and_figures_are_those_of_the_results():
    command = [sys.executable, str(ROOT / "docs" / "tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_wrong_numbers_in_sentences_are_found(tables, tmp_path):
    text = (ROOT / "docs" / "rnn.md").read_text()
    wrong = text.replace("-->2.04 steps, 99.3<!--", "-->2.05 steps, 99.3<!--").replace(
        "-->2.9<!--", "-->3<!--"
    )
    assert wrong != text
    page = tmp_path / "rnn.md"
    page.write_text(wrong)
    (line, *others) = tables("--check", page).splitlines()
    assert line.startswith(f"{page}: line ")
    assert "fast/parity-size8-act-tau0.1-free0.5-seed1" in line
    assert "expected '2.04 steps, 99.3', got '2.05 steps, 99.3'" in line
    # 2.903 with as many decimals as the text has is 3
    assert others == ["run python docs/tables.py"]


SETTING = "fast/resnet110-relaxed-tau0.005"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f"A <!--= speed {SETTING} relaxed -->1<!--/-->.",
            "expected a measure among accuracy, .*; got 'speed'",
        ),
        (f"A <!--= lots accuracy {SETTING} act -->1<!--/-->.", r"expected \[PICK\] MEASURES RUNS MODES"),
        (
            "A <!--= accuracy fast/resnet9-plain plain -->1<!--/-->.",
            "got 'fast/resnet9-plain', of which there",
        ),
        ("A <!--= accuracy slow/resnet32-plain plain -->1<!--/-->.", "expected a scale among .*; got 'slow'"),
        (f"A <!--= accuracy {SETTING} act -->1<!--/-->.", "expected a mode of .* thresholded; got 'act'"),
        (f"A <!--= accuracy {SETTING} relaxed@3 -->1<!--/-->.", "expected a mode of .*; got 'relaxed'"),
        (f"A <!--= bits {SETTING} relaxed -->1<!--/-->.", "expected a measure that .* has, got 'bits'"),
        (f"A <!--= sd accuracy {SETTING} relaxed -->1<!--/-->.", "several seeds"),
        (
            f"A <!--= accuracy {SETTING} relaxed -->1 or 2<!--/-->.",
            "expected 1 numbers in the text, got '1 or 2'",
        ),
        (f"A <!--= same accuracy {SETTING} relaxed,discrete -->1.00<!--/-->.", "for all, got 91.98, 92.01"),
        (f"A\n<!--= accuracy {SETTING} relaxed -->92<!--/-->.", "no line to begin with a span"),
        (f"* A\n* <!--= accuracy {SETTING} relaxed -->92<!--/-->.", "no line to begin with a span"),
        (f"A <!--= accuracy {SETTING} relaxed -->92.", "expected spans of the form"),
        ("<!-- table: chairs -->\n<!-- end -->", "expected a table among .*; got 'chairs'"),
        (
            "A <!--= csv engines_cpu -->1<!--/-->.",
            "expected csv NAME COLUMNS COLUMN=VALUES…, got 'csv engines_cpu'",
        ),
        (
            "A <!--= csv chairs speedup -->1<!--/-->.",
            "expected the name of a file in benchmarks, or of one with folders, got 'chairs'",
        ),
        (
            "A <!--= csv engines_cpu speedup batch=3 network=ResNet-32 -->1<!--/-->.",
            "with batch=3, found none",
        ),
        (
            "A <!--= csv engines_cpu speedup batch=1,3 -->1<!--/-->.",
            "with batch=3, found none",
        ),
        (
            "A <!--= csv engines_cpu masks best_dense=compiled_frozen -->1<!--/-->.",
            "expected numbers in masks of engines_cpu.csv",
        ),
        ("A <!--= csv engines_cpu legs -->1<!--/-->.", "expected a column among .*speedup.*; got 'legs'"),
        ("A <!--= csv engines_cpu speedup legs=4 -->1<!--/-->.", "expected a column among .*; got 'legs'"),
        (
            "A <!--= csv engines_cpu speedup batch=3 -->1<!--/-->.",
            "rows of engines_cpu.csv with batch=3, found none",
        ),
    ],
)
def test_spans_that_mean_nothing_are_refused_in_one_line(text, said, tables, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    (line,) = tables("--check", page).splitlines()
    assert line.startswith(f"{page}: ")
    assert re.search(said, line), line


def test_spans_are_filled_with_what_results_say(tables, tmp_path):
    """Numbers by hand from run.json: 0.9198, 0.9201 and 0.9200 of 10,000 images, three seeds of others."""
    page = tmp_path / "page.md"
    spans = [
        (f"accuracy {SETTING} relaxed,discrete,thresholded", "0.00, 0.0 and 0", "91.98, 92.0 and 92"),
        (f"apart accuracy {SETTING} relaxed,discrete", "**0.00 points**", "**0.03 points**"),
        (f"accuracy {SETTING} discrete less {SETTING} relaxed", "0.00 of ResNet-110", "0.03 of ResNet-110"),
    ]
    page.write_text("".join(f"A <!--= {what} -->{old}<!--/-->.\n" for what, old, _ in spans))
    assert tables(page) is None
    assert page.read_text() == "".join(f"A <!--= {what} -->{new}<!--/-->.\n" for what, _, new in spans)


def test_spans_are_filled_with_what_benchmarks_have_measured(tables, tmp_path):
    with (ROOT / "benchmarks" / "engines_cpu.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["masks"] == "blobs 25%" and row["batch"] == "64"]
    assert len(rows) > 1
    page = tmp_path / "page.md"
    wanted = "csv engines_cpu speedup masks=blobs_25% batch=64"
    page.write_text(f"A <!--= {wanted} -->{', '.join(['0.00'] * len(rows))}<!--/-->.\n")
    assert tables(page) is None
    every = ", ".join(f"{float(row['speedup']):.2f}" for row in rows)
    assert page.read_text() == f"A <!--= {wanted} -->{every}<!--/-->.\n"
    page.write_text(f"A <!--= most {wanted} -->0.00 ×<!--/-->.\n")
    assert tables(page) is None
    assert f"-->{max(float(row['speedup']) for row in rows):.2f} ×<" in page.read_text()


def test_tables_have_the_rows_that_are_asked_for(tables, tmp_path):
    page = tmp_path / "page.md"
    wanted = "table: csv benchmarks/engines_cpu.csv masks batch masks=blobs_25%,blobs_50% batch=64"
    page.write_text(f"<!-- {wanted} -->\n<!-- end -->\n")
    assert tables(page) is None
    rows = [line for line in page.read_text().splitlines() if line.startswith("| blobs")]
    with (ROOT / "benchmarks" / "engines_cpu.csv").open(newline="") as file:
        every = [row for row in csv.DictReader(file) if row["batch"] == "64"]
    count = sum(row["masks"] in ("blobs 25%", "blobs 50%") for row in every)
    assert len(rows) == count > 2
    assert set(rows) == {"| blobs 25% | 64 |", "| blobs 50% | 64 |"}
    page.write_text("<!-- table: csv benchmarks/engines_cpu.csv masks batch=3 -->\n<!-- end -->\n")
    assert "found none" in tables(page)


def test_a_table_of_ranges_has_the_least_and_the_most_of_rows_that_are_alike(tables, tmp_path):
    with (ROOT / "benchmarks" / "engines_cpu.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["masks"] == "blobs 25%"]
    page = tmp_path / "page.md"
    page.write_text("<!-- table: ranges engines_cpu batch speedup masks=blobs_25% -->\n<!-- end -->\n")
    assert tables(page) is None
    lines = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    assert [line[0] for line in lines[2:]] == [
        f"| {batch}" for batch in dict.fromkeys(r["batch"] for r in rows)
    ]
    for batch, cell in lines[2:]:
        found = [float(row["speedup"]) for row in rows if row["batch"] == batch.strip("| ")]
        low, _, high = cell.strip(" |").partition(" to ")
        assert (float(low), float(high or low)) == (min(found), max(found))


GIVEN = [
    # settings
    r"[τλδ] = 0\.\d+((,| and) 0\.\d+)*",
    r"\bat 0\.\d+((,| and) 0\.\d+)*",
    "Temperatures from 0.4 to 0.8",
    r"learning rates of 0\.\d+ and 0\.\d+",
    r"\(not in the figure\), with 0\.005 those",
    r"of the rate \(… 0\.1\)",
    # bounds
    "between 0.1 and 0.9",
    "less than 1 %",
    # published, and what was hoped for
    r"\(published: 92.5 %\)",
    "SACT as published, 91.82 % with 82 MFLOPs",
    r"2020\) 93.58 % with 111 MFLOPs",
    "the published 93.6 %",
    "not reached: 93.6 % with 110 MFLOPs",
    "or 92.5 % with 70",
    "published about the same: 93.3 % with 49.5 %",
    "The goal was 93.6 %",
]
"""Numbers that stand in sentences of docs/reproduction.md and are no results, with the words around them."""


def by_hand(text):
    """Numbers of sentences that look like results and are in no span, and what of GIVEN is not there."""
    for gone in (
        r"```.*?```",
        r"<!-- table:.*?<!-- end -->",
        r"<!--=.*?<!--/-->",
        r"\]\([^)]*\)",
        r"`[^`]*`",
    ):
        text = re.sub(gone, "…", text, flags=re.DOTALL)
    text = re.sub(r"\s+", " ", text)
    unused = [given for given in GIVEN if not re.search(given, text)]
    text = re.sub("|".join(f"(?:{given})" for given in GIVEN), "…", text)
    return re.findall(r".{,40}\d+(?:\.\d+|(?= %| MFLOPs)).{,20}", text), unused


def test_no_result_in_the_reproduction_is_written_by_hand():
    assert by_hand((ROOT / "docs" / "reproduction.md").read_text()) == ([], [])


def test_results_written_by_hand_are_found():
    assert by_hand("It has 92.1 % at τ = 0.05.")[0] == ["It has 92.1 % at …."]
    assert by_hand("With 87 MFLOPs, <!--= … -->92.1 %<!--/-->.")[0] == ["With 87 MFLOPs, …."]


def test_claims_of_the_papers_own_scale_are_those_that_it_has_runs_for():
    text = (ROOT / "docs" / "reproduction.md").read_text()
    table = text.partition("<!-- table: claims paper fast -->")[2].partition("<!-- end -->")[0]
    verdicts = re.findall(r"\*\*([a-z ]+)\*\*", table)
    assert len(verdicts) == 9
    assert "not measured yet" not in verdicts


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(
        r"\]\(([^)#]+?)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    ):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_figures_of_benchmarks_are_drawn_from_todays_results():
    command = [sys.executable, str(ROOT / "docs" / "plots.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
