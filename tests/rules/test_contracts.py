"""The import contracts of pyproject.toml, on the source and on small packages that break them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"

ROOMS = ["budget", "adapt", "models", "engines", "nn", "flops", "specs", "svo", "core"]
FILES = ["__main__", "cli", "checks", "files", "first", "plugins"]


def lint(path: Path) -> tuple[int, str]:
    """Check the packages below a folder by the contracts; return the exit status and what was printed."""
    done = subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache", "--config", str(ROOT / "pyproject.toml")],
        env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        cwd=path,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def package(path: Path, **sources: str) -> Path:
    """Make packages with the rooms of ours, empty but for these sources."""
    for room in ROOMS:
        (path / "torchpact" / room).mkdir(parents=True)
        (path / "torchpact" / room / "__init__.py").touch()
        (path / "torchpact" / room / "part.py").touch()
    for file in FILES:
        (path / "torchpact" / f"{file}.py").touch()
    (path / "torchpact_recipes").mkdir()
    (path / "torchpact_recipes" / "__init__.py").write_text("import torchpact.engines.part\n")
    (path / "torchpact" / "__init__.py").write_text("from torchpact import engines, models, svo\n")
    for name, source in sources.items():
        room, _, part = name.partition("__")
        (path / "torchpact" / (f"{room}/{part}.py" if part else f"{room}.py")).write_text(source + "\n")
    return path


def test_the_source_keeps_the_contracts():
    status, printed = lint(ROOT / "src")
    assert status == 0, printed


def test_a_package_that_keeps_them_passes(tmp_path):
    status, printed = lint(
        package(
            tmp_path,
            engines__part="import torchpact.nn.part, torchpact.flops.part, torchpact.specs.part",
            nn__part="import torchpact.specs.part",
            specs__part="import torchpact.core.part",
            core__part="import torchpact.checks",
            cli="import torchpact\nimport typer",
        )
    )
    assert status == 0, printed


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("core__part", "import torchpact.specs.part"),
        ("core__part", "import torchpact"),
        ("core__part", "def f():\n    from torchpact.engines import part"),
        ("specs__part", "from torchpact.nn import part"),
        ("nn__part", "from torchpact.engines import part"),
        ("nn__part", "from torchpact.flops import part"),
        ("flops__part", "from torchpact.nn import part"),
        ("flops__part", "from torchpact import models"),
        ("engines__part", "from torchpact.models import part"),
        ("svo__part", "from torchpact.nn import part"),
        ("checks", "from torchpact.core import part"),
        ("plugins", "import torchpact_recipes"),
        ("engines__part", "import torchpact_recipes"),
        ("engines__part", "import numpy"),
        ("core__part", "import triton"),
        ("nn__part", "def f():\n    import typer"),
        ("newcomer", ""),
    ],
)
def test_a_planted_import_breaks_them(tmp_path, name, source):
    status, printed = lint(package(tmp_path, **{name: source}))
    assert status == 1, printed
    assert "BROKEN" in printed or "Missing layers" in printed or "not listed" in printed.lower(), printed
