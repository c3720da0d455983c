"""The command line in hostile places: terminals, folders, signals, sizes."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from torchpact import cli
from torchpact.files import remove_leftovers, write_whole
from torchpact_command import is_program
from torchpact_recipes.commands import report as report_command
from torchpact_recipes.outputs import check_file, check_folder
from torchpact_recipes.training.run_files import RunFiles

TRAIN = ("--preset", "smoke", "--iterations", 2, "--batch", 4, "--images", 8, "--data", "sample")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("sequence", "--hidden", 1_000_000), "expected sizes for which there is memory"),
        (("sequence", "--batch", 10**20), "expected batch to be an integer of at most 2147483647"),
        (("sequence", "--layers", 10**20), "expected layers to be an integer of at most 2147483647"),
        (("images", "--network", "²", "--data", "sample"), "or a number; got '²'"),
        (("images", "--network", "٣", "--data", "sample"), "or a number; got '٣'"),
        (("images", "--network", "9" * 5000, "--data", "sample"), "or a number; got '999"),
        (("images", "--network", "1001", "--data", "sample"), "to be an integer of at most 1000"),
    ],
)
def test_sizes_that_no_machine_has_are_told_in_one_line(one_line_of, tmp_path, arguments, told):
    code, line = one_line_of("train", *arguments, tmp_path / "run")
    assert code == 2
    assert told in line


@pytest.mark.parametrize("name", ["..", ".", "-a", "a/b", "²", "ä", "", "x" * 101, "a\nb", "a\n"])
def test_a_name_that_no_entry_of_the_zoo_can_have(one_line_of, tmp_path, name):
    _, line = one_line_of("zoo", "add", tmp_path, f"--name={name}", "--data", "sample")
    assert "expected a name of letters, digits" in line


ERRORS: list[Exception] = [
    RuntimeError("first\nsecond"),
    RecursionError("maximum recursion depth exceeded"),
    MemoryError(),
    OverflowError("too large"),
    KeyError("x" * 1_000_000),
    ZeroDivisionError("division by zero"),
    AssertionError(),
    ValueError("\x1b[31mred\x07"),
    OSError(5, "Input/output error", "/folder/\udcff"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_any_error_ends_in_one_line(one_line_of, monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr("torchpact_recipes.zoo.entries", fail)
    code, line = one_line_of("zoo")
    expected = 2 if isinstance(error, (ValueError, OSError, MemoryError)) else 1
    assert code == expected
    assert ("--traceback shows where" in line) == (expected == 1)


@pytest.mark.parametrize("arguments", [("--traceback", "zoo"), ("zoo", "--traceback")])
def test_the_traceback_is_shown_to_those_who_ask(run, monkeypatch, arguments):
    def fail():
        raise RuntimeError("of zoo")

    monkeypatch.setattr("torchpact_recipes.zoo.entries", fail)
    code, _, err = run(*arguments)
    assert code == 1
    assert "Traceback (most recent call last)" in err
    assert err.splitlines()[-1].startswith("torchpact: RuntimeError: of zoo")
    monkeypatch.setenv("TORCHPACT_TRACEBACK", "1")
    assert "Traceback" in run("zoo")[2]
    monkeypatch.setenv("TORCHPACT_TRACEBACK", "0")
    assert "Traceback" not in run("zoo")[2]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_a_terminal_cannot_show_does_not_fail_what_is_done(monkeypatch, encoding):
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding=encoding))
    cli.prepare_terminal()
    print("± × τ − ∂ 中 /runs/\udcff\udcfe end")
    sys.stdout.flush()
    line = buffer.getvalue()
    assert line.endswith(b" /runs/\xff\xfe end\n"), "names of files are their bytes"
    assert line.startswith({"ascii": b"+- x tau - \\u2202", "latin-1": b"\xb1 \xd7 tau"}.get(encoding, b""))


@pytest.mark.slow
def test_training_in_a_folder_of_any_name_and_in_ascii_ends_well(tmp_path):
    if sys.platform != "linux":
        pytest.skip("names of files are bytes on Linux only")
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff")
    command = [
        sys.executable,
        "-m",
        "torchpact",
        "train",
        "images",
        folder,
        *map(str, TRAIN),
        "--network",
        "2",
    ]
    environment = os.environ | {"PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"run-\xff" in done.stdout
    assert b" +- " in done.stdout
    page = tmp_path / "page.html"
    command = [sys.executable, "-m", "torchpact", "report", folder, "--no-timing", "-o", str(page)]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "run-\\udcff" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("columns", ["0", "", "-3", "²", "many", "9" * 5000])
def test_columns_that_a_terminal_cannot_have_are_not_heeded(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = run("zoo")
    assert code == 0
    assert "resnet32-plain" in out


@pytest.mark.skipif(os.name != "posix", reason="needs pipes that close")
def test_a_reader_that_leaves_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "torchpact", "zoo", "--json"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert done.returncode in (1, 128 + signal.SIGPIPE)  # the former is Typer's
    assert done.stderr == b""


# Ctrl-C


def interrupted(*command, after, environment=None):
    """Start a program, send it Ctrl-C when ``after`` is true of it, and return exit code and output."""
    program = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | (environment or {}),
    )  # fmt: skip
    while not after(program):
        assert program.poll() is None, program.communicate()
        time.sleep(0.02)
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=60)
    return program.returncode, out, err


@pytest.mark.parametrize("module", ["torchpact_command", "torchpact"])
def test_an_interrupt_while_torch_is_imported_is_one_line(tmp_path, module):
    slow = tmp_path / "torch.py"  # in place of torch
    slow.write_text(
        f"import pathlib, time\npathlib.Path({str(tmp_path / 'there')!r}).touch()\ntime.sleep(60)\n"
    )
    code, _, err = interrupted(
        "-m", module, "zoo",
        after=lambda _: (tmp_path / "there").exists(),
        environment={"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )  # fmt: skip
    assert code == 130
    assert err.split("\n") == ["", "torchpact: interrupted before anything was begun", ""]


def test_a_program_of_the_users_own_gets_its_interrupts_itself(tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    (tmp_path / "mine.py").write_text(
        "try:\n    import torchpact\nexcept KeyboardInterrupt:\n    print('mine')\n"
    )
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "mine", "-m", "torchpact"],
        capture_output=True, text=True, env=os.environ | paths, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "mine\n", "")


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [
        (("-m", "torchpact", "zoo"), True),
        (("-um", "torchpact"), True),
        (("-mtorchpact",), True),
        (("-X", "dev", "-W", "error", "-m", "torchpact"), True),
        (("-m", "torchpact_recipes"), False),
        (("train.py", "-m", "torchpact"), False),
        (("-m", "mine", "-m", "torchpact"), False),
        ((), False),
    ],
)
def test_what_is_asked_of_the_interpreter_says_whether_it_is_the_program(arguments, ours):
    assert is_program(["python", *arguments]) is ours


@pytest.mark.parametrize(
    "arguments",
    [("report",), ("evaluate",), ("zoo", "add"), ("maps",), ("bench",), ("zoo",), ("data", "cifar10")],
    ids=" ".join,
)
def test_an_interrupt_in_any_command_is_one_line(run, monkeypatch, tmp_path, run_folder, arguments):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    places = {
        "report": ("torchpact_recipes.commands.report.measure", (run_folder, "-o", tmp_path / "page.html")),
        "evaluate": ("torchpact_recipes.commands.evaluate.evaluate_modes", (run_folder, "--data", "sample")),
        "zoo add": (
            "torchpact_recipes.publishing.evaluate_modes",
            (run_folder, "--name", "a", "--into", tmp_path, "--data", "sample"),
        ),
        "maps": (
            "torchpact_recipes.commands.maps._draw",
            ("--model", "resnet32-tau0.01", "--count", 1, "-o", tmp_path / "maps"),
        ),
        "bench": (
            "torchpact_recipes.commands.bench._measure",
            ("--network", "none", "--block", "16x8", "-o", tmp_path / "bench"),
        ),
        "zoo": ("torchpact_recipes.zoo.entries", ()),
        "data cifar10": ("torchpact_recipes.commands.data.fetch_cifar10", ()),
    }
    place, options = places[" ".join(arguments)]
    monkeypatch.setattr(place, interrupt)
    code, _, err = run(*arguments, *options)
    assert code == 130
    assert len([line for line in err.splitlines() if line.startswith("torchpact: ")]) == 1
    last = err.splitlines()[-1]
    assert re.search("interrupted; what was being written is not there|stopped; no row was measured", last)
    assert "Traceback" not in err


def test_tests_of_interrupts_pass_where_they_are_ignored_at_first(tmp_path):
    """Thirteen failed under nohup, or as a job in the background."""
    names = ["tests/training/test_stopping.py::test_a_second_signal_acts_at_once"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *names]
    ignoring = f"trap '' INT; exec {' '.join(command)}"
    done = subprocess.run(
        ["sh", "-c", ignoring], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


# where results go


@pytest.mark.parametrize("name", ["/proc/a.html", "/dev/full/a.html", "{}/a.html/b.html", "{}", "x" * 300])
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_measured(
    one_line_of, monkeypatch, run_folder, tmp_path, name
):
    (tmp_path / "a.html").write_text("a file")
    monkeypatch.setattr(report_command, "read_run", lambda _: pytest.fail("read"))
    path = name.format(tmp_path)
    code, line = one_line_of("report", run_folder, "-o", path)
    assert code == 2
    assert "expected" in line


def test_an_entry_of_the_zoo_that_cannot_be_written_is_refused_before_it_is_measured(
    one_line_of, monkeypatch, run_folder
):
    monkeypatch.setattr("torchpact_recipes.publishing.evaluate_modes", lambda *_: pytest.fail("measured"))
    options = ("--name", "a", "--into", "/proc/zoo", "--data", "sample")
    code, line = one_line_of("zoo", "add", run_folder, *options)
    assert code == 2
    assert "/proc/zoo: expected a folder that can be written in" in line


def test_training_where_nothing_can_be_written_is_refused_before_data_are_read(one_line_of, monkeypatch):
    monkeypatch.setattr("torchpact_recipes.commands.train.load_data", lambda *_: pytest.fail("read"))
    _, line = one_line_of("train", "images", "/proc/run", *TRAIN)
    assert "/proc/run: expected a folder that can be written in" in line


def test_checks_of_outputs_leave_nothing(tmp_path):
    check_folder(tmp_path / "a" / "b")
    check_file(tmp_path / "a" / "b" / "page.html")
    assert not [*tmp_path.iterdir()]
    there = tmp_path / "there.html"
    there.write_text("before")
    check_file(there)
    assert there.read_text() == "before"
    assert [*tmp_path.iterdir()] == [there]


@pytest.mark.parametrize("name", ["page.html", "x" * 240])
def test_a_link_is_written_through_and_stays(tmp_path, name):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / name, tmp_path / "link"
    target.write_bytes(b"before")
    link.symlink_to(target)
    write_whole(link, b"after", keep=tmp_path / "kept")
    assert link.is_symlink()
    assert target.read_bytes() == b"after"
    assert (tmp_path / "kept").read_bytes() == b"before"
    assert [*target.parent.iterdir()] == [target]


def test_a_link_to_nowhere_is_told_by_name(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere" / "page.html")
    with pytest.raises(OSError, match="link"):
        write_whole(link, b"data")
    assert link.is_symlink()


def test_what_killed_writers_left_is_removed_when_a_run_goes_on(run_folder):
    from tests.training.small import config, images
    from torchpact_recipes.training import Trainer

    left = [f".torchpact-{'0' * 32}.tmp", f".last.safetensors.{'a' * 32}.tmp"]
    own = [".keep.tmp", "notes.tmp", ".torchpact-short.tmp"]
    for name in left + own:
        (run_folder / name).write_bytes(b"half")
    settings = {"iterations": 4, "batch": 4, "log_every": 2, "validate_every": 4, "checkpoint_every": 2}
    Trainer(config("relaxed", **settings), run_folder, images(count=8), images("test", 8), resume=True)
    names = {path.name for path in run_folder.iterdir()}
    assert not names & {*left}
    assert names >= {*own, RunFiles(run_folder).last.name}


def test_a_writer_that_is_killed_leaves_one_temporary_file_that_is_known(tmp_path):
    program = (
        "import os, sys, pathlib\n"
        "from torchpact import files\n"
        "os.fsync = lambda number: os.kill(os.getpid(), 9)\n"
        "files.write_whole(pathlib.Path(sys.argv[1]) / 'last.safetensors', b'data')\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert len([*tmp_path.iterdir()]) == 1
    remove_leftovers(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_doctests_leave_nothing_in_the_temporary_folder(tmp_path):
    source = Path(__file__).parents[2] / "src"
    with_files = [path for path in source.rglob("*.py") if ">>> import tempfile" in path.read_text()]
    assert with_files
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, with_files)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run(command, cwd=source.parent, env=environment, **options)
    assert done.returncode == 0, done.stdout
    left = [path for path in tmp_path.iterdir() if not path.name.startswith(("pytest-of", "torchinductor"))]
    assert not left
    shutil.rmtree(tmp_path)
