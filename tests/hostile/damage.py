"""Hostile files, records, folders, caches and commands, each made at random, and what must become of them.

A case returns its outcome in a few words; anything else than what is promised raises.
"""

import contextlib
import copy
import io
import json
import math
import random
import shutil
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from tests.training.small import config, images
from torchpact import cli
from torchpact.engines import build_cache
from torchpact_recipes import zoo
from torchpact_recipes.data.image_io import read_picture
from torchpact_recipes.hub_files import FILES, read_network, to_settings
from torchpact_recipes.report import read_run, write_page
from torchpact_recipes.training import Trainer
from torchpact_recipes.training.checkpoint import load_checkpoint, load_model, save_checkpoint

MOST = 800
"""Characters of an error."""


class Broken(AssertionError):
    """A promise that was not kept."""


class Samples:
    """Sound files to damage: a run, a saved network, a picture."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        settings = {"iterations": 2, "batch": 4, "log_every": 1, "validate_every": 2, "checkpoint_every": 1}
        Trainer(config("relaxed", **settings), self.run, images(count=8), images("test", 8)).run()
        self.checkpoint = (self.run / "last.safetensors").read_bytes()
        self.entry = min(zoo.FOLDER.glob("*.safetensors")).read_bytes()
        with safe_open(self.run / "last.safetensors", "pt") as file:
            self.names = list(file.keys())
        model, _ = load_model(self.run / "last.safetensors")
        self.settings = to_settings(model)
        self.saved = folder / "saved"
        self.saved.mkdir()
        (self.saved / FILES[0]).write_text(json.dumps(self.settings))
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, self.saved / FILES[1])
        picture = io.BytesIO()
        Image.radial_gradient("L").resize((40, 30)).convert("RGB").save(picture, "PNG")
        self.picture = picture.getvalue()


Case = Callable[[random.Random, Samples, Path], str]


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Damage bytes as disks, networks and attackers do."""
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(found) + 1) if rng.random() < 0.7 else rng.randrange(min(len(found), 600) + 1)
        match rng.randrange(7):
            case 0:
                del found[at:]
            case 1:
                found[at : at + 1] = bytes([rng.randrange(256)])
            case 2:
                found[at:at] = rng.randbytes(rng.choice([1, 8, 100]))
            case 3:
                del found[at : at + rng.choice([1, 8, 100])]
            case 4:
                found[:8] = struct.pack("<Q", rng.choice([0, 1, 2**63, 2**64 - 1, len(found), 10**9]))
            case 5:
                found[at : at + 20] = bytes(20)
            case 6:
                found = found.replace(
                    *rng.choice([(b"F32", b"F64"), (b":", b" "), (b"0", b"9"), (b"[", b"{")])
                )
    return bytes(found)


VALUES: list[Any] = [
    None, True, -1, 0, 1, 10**9, 10**30, -(10**30), 0.5, 1e300, math.inf, -math.inf, math.nan, "", "x",
    "²", "\x1b[2J", "../../etc", "x" * 100_000, [], [1], {}, {"a": 1}, [[[[]]]], [None] * 1000,
]  # fmt: skip


def changed(rng: random.Random, value: Any) -> Any:
    """Change some value within plain values."""
    found = copy.deepcopy(value)
    place: Any = found
    while True:
        keys = [*place] if isinstance(place, dict) else [*range(len(place))]
        if not keys:
            return rng.choice(VALUES)
        key = rng.choice(keys)
        if isinstance(place[key], dict | list) and rng.random() < 0.8:
            place = place[key]
            continue
        match rng.randrange(5):
            case 0:
                del place[key]
            case 1 if isinstance(place, dict):
                place[rng.choice(["x", "", "config", "units"])] = rng.choice(VALUES)
            case _:
                place[key] = rng.choice(VALUES)
        return found


def text_of(rng: random.Random, value: Any) -> str:
    """Return JSON, perhaps of no sense."""
    text = json.dumps(value)
    match rng.randrange(12):
        case 0:
            return "[" * 50_000 + text
        case 1:
            return text[: rng.randrange(len(text))]
        case 2:
            return text.replace(":", ": " + "[" * 2000, 1)
        case 3:
            return "9" * 10_000
    return text


def refused(call: Callable[[], object]) -> str:
    """Return "taken", or "refused" where a ValueError says why in one short line."""
    try:
        call()
    except ValueError as error:
        line = str(error)
        if "\n" in line or len(line) > MOST:
            raise Broken(f"an error of {len(line)} characters: {line[:200]!r}") from error
        return "refused"
    return "taken"


def damaged_checkpoint(rng: random.Random, samples: Samples, folder: Path) -> str:
    path = folder / "last.safetensors"
    path.write_bytes(mutated(rng, samples.checkpoint))
    outcome = refused(lambda: load_model(path))
    if outcome == "taken" and load_checkpoint(path).info != load_checkpoint(samples.run / path.name).info:
        raise Broken("an altered checkpoint was taken")
    return outcome


def forged_checkpoint(rng: random.Random, samples: Samples, folder: Path) -> str:
    path, found = folder / "last.safetensors", load_checkpoint(samples.run / "last.safetensors")
    tensors = dict(found.tensors)
    if rng.random() < 0.3:
        tensors.pop(rng.choice(samples.names))
    save_checkpoint(path, tensors, changed(rng, found.info))
    return refused(lambda: load_model(path))


def damaged_entry(rng: random.Random, samples: Samples, folder: Path) -> str:
    path = folder / "resnet32-x.safetensors"
    path.write_bytes(mutated(rng, samples.entry))
    return refused(lambda: zoo.entries(folder))


def damaged_record(rng: random.Random, samples: Samples, folder: Path) -> str:
    shutil.copytree(samples.run, folder / "run")
    record = json.loads((samples.run / "run.json").read_text())
    (folder / "run" / "run.json").write_text(text_of(rng, changed(rng, record)))
    history = folder / "run" / "history.jsonl"
    events = [json.loads(line) for line in history.read_text().splitlines()]
    history.write_text("\n".join(text_of(rng, changed(rng, event)) for event in events))

    def report() -> None:
        write_page(folder / "page.html", [read_run(folder / "run").values], [], "")

    return refused(report)


def damaged_saved_network(rng: random.Random, samples: Samples, folder: Path) -> str:
    saved = shutil.copytree(samples.saved, folder / "saved")
    name = rng.choice(FILES)
    if name.endswith("json"):
        (saved / name).write_text(text_of(rng, changed(rng, samples.settings)))
    else:
        (saved / name).write_bytes(mutated(rng, (saved / name).read_bytes()))
    return refused(lambda: read_network(saved))


def damaged_picture(rng: random.Random, samples: Samples, folder: Path) -> str:
    path = folder / "picture.png"
    path.write_bytes(mutated(rng, samples.picture))
    return refused(lambda: read_picture(path))


def altered_compiled_code(rng: random.Random, samples: Samples, folder: Path) -> str:
    code = rng.randbytes(rng.randrange(1, 2000))
    with mock.patch.dict("os.environ", {"XDG_CACHE_HOME": str(folder)}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build_cache._warn.cache_clear()
        path = build_cache.compiled_file("kernel-1234", ".so", lambda: code)
        path.write_bytes(mutated(rng, code))
        again = build_cache.compiled_file("kernel-1234", ".so", lambda: code)
    if again.read_bytes() != code or again.stat().st_mode & 0o077:
        raise Broken("altered code would have been loaded")
    return "built anew or as it was"


WORDS = [
    "train", "evaluate", "report", "zoo", "maps", "bench", "data", "reproduce", "show", "add", "cifar10",
    "images", "text", "sequence",
    "--help", "--version", "--data", "sample", "nowhere", "--device", "cpu", "cuda:7", "--task",
    "parity", "sort", "--method", "plain", "act", "ponder", "--network", "²", "٣", "vgg", "--batch",
    "--iterations", "--tau", "nan", "inf", "-1", "0", "1e400", "--seed", "--name", "..", "-o", "/proc/x",
    "\udcff", "\x1b[2J", "resnet32-plain", "--preset", "smoke", "--size", "size=3", "size=²", "--hidden",
    "--layers", "--json", "--list", "--block", "64x56", "0x0", "--precision", "--mode", "eager",
    "--traceback=1", "--", "-",
]  # fmt: skip
COMMANDS = WORDS[:8]
WORDS += ["9" * 30, "x" * 5000, ""]


def random_command(rng: random.Random, samples: Samples, folder: Path) -> str:
    """Arguments at random; nothing is measured, trained or fetched, which their tests do."""
    arguments = [rng.choice(COMMANDS), *(rng.choice(WORDS) for _ in range(rng.randrange(6)))]
    out, err = io.StringIO(), io.StringIO()
    with (
        _without_work(), contextlib.chdir(folder), mock.patch.object(sys, "argv", ["torchpact", *arguments]),
        contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
    ):  # fmt: skip
        try:
            cli.main()
            raise Broken(f"{arguments} did not exit")
        except SystemExit as exit_:
            code = exit_.code or 0
    lines = err.getvalue().splitlines()
    told = [line for line in lines if line.startswith("torchpact: ")]
    if code not in (0, 2) or "Traceback" in err.getvalue():
        raise Broken(f"{arguments} ended with {code}: {lines[-1:]}")
    # one line, or of several files that cannot be read one for each
    if code and (
        not told or lines[-1] not in told or any(len(t) > MOST or not t.isprintable() for t in told)
    ):
        raise Broken(f"{arguments} said {err.getvalue()[-300:]!r}")
    return f"exit {code}"


@contextlib.contextmanager
def _without_work() -> Iterator[None]:
    """Let commands come as far as their work, and no further."""
    names = [
        "train.load_data", "train.sequence_trainers", "evaluate.load_test", "evaluate._on_sequences",
        "report.load_test", "zoo.load_test", "reproduce.load_data", "reproduce.load_texts",
        "bench._measure", "maps.load_test", "data.fetch_cifar10", "data.fetch_enwik8",
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name in names:
            target = f"torchpact_recipes.commands.{name}"
            stack.enter_context(mock.patch(target, side_effect=ValueError("expected no work")))
        yield


CASES: dict[str, Case] = {
    "damaged checkpoint": damaged_checkpoint,
    "forged checkpoint": forged_checkpoint,
    "damaged entry of the zoo": damaged_entry,
    "damaged record of a run": damaged_record,
    "damaged saved network": damaged_saved_network,
    "damaged picture": damaged_picture,
    "altered compiled code": altered_compiled_code,
    "random command": random_command,
}


def run_case(name: str, seed: int, samples: Samples) -> str:
    """Make and judge one case; return its outcome."""
    with tempfile.TemporaryDirectory(dir=samples.folder) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CASES[name](random.Random(f"{name} {seed}"), samples, Path(folder))
