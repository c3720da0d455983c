"""A small run and its parts, to be damaged."""

import json
import shutil

import pytest

from tests.training.small import config, images
from torchpact_recipes.training import Trainer


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """A finished run on images; not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    settings = {"iterations": 4, "batch": 4, "log_every": 2, "validate_every": 4, "checkpoint_every": 2}
    Trainer(config("relaxed", **settings), folder, images(count=8), images("test", 8)).run()
    return folder


@pytest.fixture
def run_folder(small_run, tmp_path):
    """A copy of it."""
    return shutil.copytree(small_run, tmp_path / "run")


@pytest.fixture
def one_line_of(run):
    """Call torchpact with arguments that it cannot take; return its exit code and the line that it says."""

    def call(*arguments):
        code, out, err = run(*arguments)
        line = err.splitlines()[-1]
        assert code in (1, 2), (code, out, err)
        assert line.startswith("torchpact: "), err
        assert "Traceback" not in err
        assert len(line) < 700
        assert line.isprintable()
        return code, line

    return call


@pytest.fixture
def record_of():
    """Change the run.json of a run; a text stands for itself."""

    def change(folder, values):
        path = folder / "run.json"
        if isinstance(values, str):
            path.write_text(values, encoding="utf-8")
        else:
            path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values))

    return change
