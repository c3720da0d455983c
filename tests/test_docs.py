"""What README and docs show must run, and what they name must exist."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from torchpact import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


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
        module = importlib.import_module("torchpact." + path.replace("/", "."))
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


def test_the_readme_lists_every_command():
    text = (ROOT / "README.md").read_text()
    table = text.partition("## The command line")[2].partition("\n## ")[0]
    for name in typer.main.get_command(cli.app).commands:  # type: ignore[attr-defined]
        assert re.search(rf"`(torchpact )?{name}\b", table), name


def test_tables_and_figures_are_those_of_the_results():
    command = [sys.executable, str(ROOT / "docs" / "tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_claims_of_the_papers_own_scale_are_those_that_it_has_runs_for():
    text = (ROOT / "docs" / "reproduction.md").read_text()
    table = text.partition("<!-- table: claims paper fast -->")[2].partition("<!-- end -->")[0]
    verdicts = re.findall(r"\*\*([a-z ]+)\*\*", table)
    assert len(verdicts) == 7
    assert "not measured yet" not in verdicts


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(
        r"\]\(([^)#]+?)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    ):
        if "://" not in target:
            assert (page.parent / target).exists(), target
