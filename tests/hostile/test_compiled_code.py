"""Compiled code is loaded only if it is this user's own and what was built."""

import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchpact.engines import build_cache, cpp_build
from torchpact.engines.base import Unsupported

GOOD = 'extern "C" int answer() { return 42; }\n'
PLANTED = 'extern "C" int answer() { return 13; }\n'

pytestmark = pytest.mark.skipif(
    os.name != "posix" or not shutil.which("c++"), reason="needs owners of files, and a C++ compiler"
)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    """A cache of the test's own, and no memory of other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(build_cache, "_temporary", [])
    monkeypatch.setattr(cpp_build, "_hanging", set())
    for each in (build_cache._warn, cpp_build._target, build_cache.protect_compiler_caches):
        each.cache_clear()
    yield
    for each in (build_cache._warn, cpp_build._target, build_cache.protect_compiler_caches):
        each.cache_clear()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "tiny.cpp"
    path.write_text(GOOD)
    return path


def answer(source):
    return cpp_build.load_library(source).answer()


def shared_library(text, path):
    """Compile a library as an attacker would, in place of another."""
    path.unlink(missing_ok=True)
    subprocess.run(
        ["c++", "-x", "c++", "-", "-shared", "-fPIC", "-o", str(path)], input=text.encode(), check=True
    )


def test_a_library_is_built_once_and_only_its_owner_can_read_or_change_it(source, tmp_path, monkeypatch):
    assert answer(source) == 42
    path = cpp_build.build_library(source)
    assert path.parent == (tmp_path / "cache" / "torchpact" / "compiled").resolve()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(cpp_build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert cpp_build.build_library(source) == path
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:5000]),
        lambda path: shared_library('extern "C" int nothing() { return 0; }', path),
        lambda path: shared_library(PLANTED, path),
    ],
    ids=["empty", "truncated", "without our symbols", "planted"],
)
def test_an_altered_library_is_built_anew_and_that_is_said_once(source, spoil):
    path = cpp_build.build_library(source)
    spoil(path)
    path.chmod(0o600)
    with pytest.warns(RuntimeWarning, match=r"compiled anew, since .* was altered since") as told:
        assert answer(source) == 42
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answer(source) == 42


@pytest.mark.parametrize("kind", ["link", "pipe", "writable", "other's"])
def test_what_is_no_file_of_ones_own_is_not_loaded(source, kind, tmp_path):
    path = cpp_build.build_library(source)
    kept = tmp_path / "kept.so"
    path.rename(kept)
    if kind == "link":
        path.symlink_to(kept)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.write_bytes(kept.read_bytes())
        path.chmod(0o602 if kind == "writable" else 0o600)
        if kind == "other's":
            if os.geteuid():
                pytest.skip("only root can give files away")
            os.chown(path, 12345, -1)
    with pytest.warns(RuntimeWarning, match="compiled anew, since"):
        found = cpp_build.build_library(source)
    assert found.is_file()
    assert not found.is_symlink()
    assert found.stat().st_uid == os.geteuid()
    assert found.stat().st_mode & 0o022 == 0


def test_a_cache_in_which_others_can_write_is_neither_read_nor_written(source, tmp_path, monkeypatch):
    """The library of the report: planted by another user where XDG_CACHE_HOME points, it ran as root."""
    first = cpp_build.build_library(source)
    shared_library(PLANTED, first)
    (tmp_path / "cache").chmod(0o777)
    with pytest.warns(RuntimeWarning, match=r"for this process only: others can write in .*cache") as told:
        assert answer(source) == 42
    assert len(told) == 1
    monkeypatch.setattr(cpp_build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert answer(source) == 42
    assert [*first.parent.iterdir()] == [first]


def test_a_cache_of_another_user_is_not_used(source, monkeypatch):
    first = cpp_build.build_library(source)
    me = os.geteuid()
    (first.parents[2] / "theirs").mkdir()
    if me == 0:
        os.chown(first.parents[1], 12345, -1)
        assert build_cache.folder_problem(first.parent) == f"{first.parents[1]} belongs to user 12345"
    else:
        monkeypatch.setattr("os.geteuid", lambda: me + 1)
        assert build_cache.folder_problem(first.parent) == f"{first.parent} belongs to user {me}"


@pytest.mark.parametrize(
    ("mode", "problem"),
    [(0o755, None), (0o700, None), (0o777, "others can write"), (0o757, "others can write"), (0o1777, None)],
)
def test_folders_on_the_way_may_be_sticky_but_not_open_to_others(tmp_path, mode, problem):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    (tmp_path / "a").chmod(mode)
    found = build_cache.folder_problem(folder)
    assert found is None if problem is None else str(found).startswith(problem)
    # in the folder itself even a sticky bit lets others add files
    (tmp_path / "a").chmod(0o755)
    folder.chmod(mode)
    assert (build_cache.folder_problem(folder) is None) == (mode in (0o755, 0o700))


@pytest.mark.parametrize(
    ("name", "members", "private"),
    [("ann", [], True), ("ann", ["ann"], True), ("ann", ["ann", "bob"], False), ("staff", [], False)],
)
def test_a_group_is_private_only_if_it_is_named_as_its_one_user(
    tmp_path, monkeypatch, name, members, private
):
    number = tmp_path.stat().st_gid
    monkeypatch.setattr("pwd.getpwuid", lambda _: SimpleNamespace(pw_name="ann", pw_gid=number))
    monkeypatch.setattr("grp.getgrgid", lambda _: SimpleNamespace(gr_name=name, gr_mem=members))
    build_cache._is_own_group.cache_clear()
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o775)
    try:
        assert (build_cache.folder_problem(folder) is None) == private
    finally:
        build_cache._is_own_group.cache_clear()


def test_a_link_that_others_could_change_is_followed_before_the_check(source, tmp_path, monkeypatch):
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    own.mkdir()
    (shared / "link").symlink_to(own)
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "link"))
    path = cpp_build.build_library(source)
    assert path.is_relative_to(own.resolve())
    assert "shared" not in path.parts


def test_a_temporary_folder_that_others_can_change_is_refused(source, tmp_path, monkeypatch):
    (tmp_path / "tmp").chmod(0o777)
    (tmp_path / "cache").write_text("a file where a folder should be")
    with (
        pytest.warns(RuntimeWarning, match="for this process only"),
        pytest.raises(
            Unsupported, match="expected a temporary folder that only this user can change, but others"
        ),
    ):
        cpp_build.load_library(source)
    assert not [*(tmp_path / "tmp").iterdir()]


def test_without_a_home_code_is_built_for_the_process(source, tmp_path, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pathlib.Path.home", homeless)
    with pytest.warns(RuntimeWarning, match=r"for this process only: Could not determine home directory"):
        path = cpp_build.build_library(source)
    assert path.parent.parent == tmp_path / "tmp"


COUNTED = '#!/bin/sh\necho "$@" >> "{log}"\nexec c++ "$@"\n'
PROGRAM = """
import pathlib, sys, warnings
from torchpact.engines import cpp_build
for _ in range(2):
    for name in sys.argv[1:]:
        print(cpp_build.build_library(pathlib.Path(name)))
"""


def test_where_no_cache_can_be_written_all_libraries_share_one_folder_that_goes_with_the_process(tmp_path):
    log, wrapper = tmp_path / "log", tmp_path / "counted"
    wrapper.write_text(COUNTED.format(log=log))
    wrapper.chmod(0o755)
    sources = [tmp_path / f"{name}.cpp" for name in "abc"]
    for source in sources:
        source.write_text(GOOD)
    (tmp_path / "no").write_text("a file where a folder should be")
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path / "no"),
        "CXX": str(wrapper),
        "TMPDIR": str(tmp_path / "tmp"),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, sources)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = done.stdout.split()
    assert found[:3] == found[3:]
    assert len({Path(path).parent for path in found}) == 1
    assert done.stderr.count("RuntimeWarning") == 1
    calls = [line for line in log.read_text().splitlines() if "-o" in line.split()]
    assert len(calls) == 3
    assert not [*(tmp_path / "tmp").iterdir()]


def test_a_compiler_that_hangs_is_given_up_with_its_children_and_files(source, tmp_path, monkeypatch):
    hanging, child = tmp_path / "hanging", tmp_path / "child"
    hanging.write_text(f'#!/bin/sh\ntouch "$TMPDIR/left"\nsleep 1000 & echo $! >> "{child}"\nwait\n')
    hanging.chmod(0o755)
    monkeypatch.setenv("CXX", str(hanging))
    monkeypatch.setattr(cpp_build, "PATIENCE", 0.5)
    for _ in range(2):  # the second time it is not even started
        with pytest.raises(Unsupported, match=r"^hanging took more than 0.5 s$"):
            cpp_build.load_library(source)
    (number,) = child.read_text().split()
    for _ in range(100):
        if _is_gone(int(number)):
            break
        time.sleep(0.05)
    assert _is_gone(int(number))
    assert not [*(tmp_path / "tmp").iterdir()]


def _is_gone(number):
    """Whether a process has ended, be it that nobody has asked how."""
    status = Path(f"/proc/{number}/stat")
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_an_interrupted_compiler_ends_too(source, tmp_path, monkeypatch):
    child = tmp_path / "child"
    script = tmp_path / "interrupted"
    script.write_text(
        f'#!/bin/sh\nsleep 1000 & echo $! > "{child}"\nsleep .3\nkill -INT {os.getpid()}\nwait\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(KeyboardInterrupt):
        cpp_build.build_library(source)
    for _ in range(100):
        if _is_gone(int(child.read_text())):
            break
        time.sleep(0.05)
    assert _is_gone(int(child.read_text()))
    assert not [*(tmp_path / "tmp").iterdir()]


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"])
def test_caches_of_other_compilers_are_replaced_where_others_can_write(variable, tmp_path, monkeypatch):
    own, others = tmp_path / "own", tmp_path / "others"
    others.mkdir()
    others.chmod(0o777)
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(own))
    build_cache.protect_compiler_caches()
    assert os.environ[variable] == str(own)
    build_cache.protect_compiler_caches.cache_clear()
    monkeypatch.setenv(variable, str(others))
    with pytest.warns(RuntimeWarning, match=f"{variable} is a temporary folder .*: others can write in"):
        build_cache.protect_compiler_caches()
    chosen = Path(os.environ[variable])
    assert chosen.parent == build_cache.temporary_folder()
    assert build_cache.folder_problem(chosen.parent) is None
    assert not [*others.iterdir()]


def test_machine_code_for_a_gpu_is_kept_by_the_same_rules(tmp_path):
    built: list[None] = []

    def build():
        built.append(None)
        return b"\x7fELF code"

    path = build_cache.compiled_file("block-1234", ".cubin", build)
    assert path.read_bytes() == b"\x7fELF code"
    path.write_bytes(b"planted")
    with pytest.warns(RuntimeWarning, match="was altered since it was built"):
        assert build_cache.compiled_file("block-1234", ".cubin", build).read_bytes() == b"\x7fELF code"
    assert len(built) == 2
