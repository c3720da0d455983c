"""What is kept of a value, and how two of these are held against each other."""

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Value = Tensor | float | str
Fields = dict[str, Value]
Digest = list[Any]
"""[dtype, shape, sum, checksum] of integers, [dtype, shape, sum, squares, samples, special] of floats."""

GOLDEN = Path(__file__).with_name("golden.json")

RTOL = 2e-5
"""Of the size of a tensor's entries: another processor adds up in another order, in single precision."""
OF_GRADIENTS = 1e-4, 5e-6
"""Of gradients both, which are sums that nearly cancel: REINFORCE's of a bias, 0.0033, moved by 1e-6."""
ATOL = 1e-7
SAMPLES, SAMPLES_OF_PONDERS = 6, 4
MANY = "learn.grad", "learn.state"
"""Groups of fields of which little is kept, and names are written once: the sum, and that of magnitudes."""


def digest(value: Value, samples: int = SAMPLES, brief: bool = False) -> Digest:
    """Return what is kept of a value."""
    if not isinstance(value, Tensor):
        return ["value", value]
    x = value.detach().resolve_conj().cpu().contiguous().flatten()
    kind, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
    if not x.is_floating_point():
        x = x.long()
        weights = torch.arange(len(x)) % 1009 + 1
        return [kind, shape, int(x.sum()), int((x * weights).sum())]
    x = x.double()
    if brief:
        return [_short(x.sum().item()), _short(x.abs().sum().item())]
    finite = torch.where(x.isfinite(), x, 0.0)
    special = [int((x == math.inf).sum()), int((x == -math.inf).sum()), int(x.isnan().sum())]
    picked = [_short(x[i].item()) for i in _places(len(x), samples)]
    sums = [_short(finite.sum().item()), _short(finite.square().sum().item())]
    return [kind, shape, *sums, picked, special if any(special) else 0]


def digests(fields: Fields) -> dict[str, Digest]:
    """Return the digests of all fields of a case."""
    kept = {}
    for name, value in fields.items():
        samples = SAMPLES_OF_PONDERS if name.endswith(("probs", "cost", "_steps")) else SAMPLES
        kept[name] = digest(value, samples, name.startswith(MANY))
    return kept


def difference(expected: dict[str, Digest], found: dict[str, Digest]) -> str | None:
    """Return the first field that differs and how, or None.

    >>> difference({"x": ["value", 1.0]}, {"x": ["value", 1.000001]})
    >>> difference({"x": ["value", 1.0]}, {"x": ["value", 1.01]})
    'x: value: expected 1.0, found 1.01'
    """
    for name, value in found.items():
        if name not in expected:
            return f"{name}: expected no such field, found {value}"
        for what, old, new in _differences(expected[name], value):
            return f"{name}: {what}: expected {old}, found {new}"
    for name, value in expected.items():
        if name not in found:
            return f"{name}: expected {value}, found no such field"
    return None


def read() -> dict[str, dict[str, Digest]]:
    """Return the digests that are pinned, by case; none if there is no file."""
    if not GOLDEN.exists():
        return {}
    written = json.loads(GOLDEN.read_text(encoding="utf-8"))
    names = written.pop("names")
    pinned: dict[str, dict[str, Digest]] = {}
    for case, fields in written.items():
        pinned[case] = {}
        for field, value in fields.items():
            if field in MANY:
                key, *pairs = value
                each = zip(names[key], pairs[::2], pairs[1::2], strict=True)
                pinned[case] |= {f"{field}.{name}": [total, size] for name, total, size in each}
            else:
                pinned[case][field] = value
    return pinned


def write(pinned: dict[str, dict[str, Digest]]) -> None:
    """Write all digests, a field a line; the file is there in full or as it was."""
    names: dict[str, list[str]] = {}
    blocks = [_block(case, _packed(fields, names)) for case, fields in pinned.items()]
    blocks.append(_block("names", names))
    temporary = GOLDEN.with_name(f".{GOLDEN.name}.tmp")
    temporary.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")
    temporary.replace(GOLDEN)


def _packed(fields: dict[str, Digest], names: dict[str, list[str]]) -> dict[str, Any]:
    """Return fields with one for each group of many, whose names go into a table."""
    packed: dict[str, Any] = {name: value for name, value in fields.items() if not name.startswith(MANY)}
    for group in MANY:
        many = {name.removeprefix(f"{group}."): x for name, x in fields.items() if name.startswith(group)}
        if many:
            key = f"{zlib.crc32(' '.join(many).encode()):08x}"
            names[key] = [*many]
            packed[group] = [key, *[number for pair in many.values() for number in pair]]
    return packed


def _block(name: str, fields: Mapping[str, Any]) -> str:
    lines = [f"  {json.dumps(key)}: {_compact(value)}" for key, value in fields.items()]
    return f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}"


def _differences(expected: Digest, found: Digest) -> Iterator[tuple[str, Any, Any]]:
    if len(expected) == len(found) == 2 and expected[0] != "value" != found[0]:
        size = max(abs(each) for each in expected)
        for name, old, new in zip(("sum", "sum of magnitudes"), expected, found, strict=True):
            if not _close(old, new, size, *OF_GRADIENTS):
                yield name, old, new
        return
    names = ["dtype", "shape", "sum", "checksum"]
    floats = len(expected) == 6
    if expected[0] == "value":
        names = ["kind", "value"]
    elif floats:
        names = ["dtype", "shape", "sum", "sum of squares", "samples", "numbers of +inf, -inf, nan"]
    if len(expected) != len(found):
        yield "kind", expected, found
        return
    for name, old, new in zip(names, expected, found, strict=True):
        if name == "samples":
            size = _rms(expected)
            for place, a, b in zip(_places(math.prod(expected[1]), len(old)), old, new, strict=True):
                if not _close(a, b, size):
                    yield f"entry {place} of the flattened tensor", a, b
        elif name == "sum" and floats:
            if not _close(old, new, math.prod(expected[1]) * _rms(expected)):
                yield name, old, new
        elif name == "sum of squares":
            if not _close(old, new, 2 * abs(old)):
                yield name, old, new
        elif name == "value" and isinstance(old, float) and isinstance(new, float):
            if not _close(old, new, abs(old)):
                yield name, old, new
        elif old != new:
            yield name, old, new


def _rms(expected: Digest) -> float:
    """The root of the mean square of a tensor's entries."""
    return math.sqrt(float(expected[3]) / max(math.prod(expected[1]), 1))


def _close(a: float | str, b: float | str, size: float, rtol: float = RTOL, atol: float = ATOL) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return abs(a - b) <= atol + rtol * max(size, abs(a))


def _places(count: int, samples: int) -> list[int]:
    """Return which entries are kept: spread over the tensor, out of step with its rows."""
    if count <= samples:
        return [*range(count)]
    return [i * count // samples + 3 * i % (count // samples) for i in range(samples)]


def _short(x: float) -> float | str:
    """Seven digits, more than are compared; JSON has no infinity."""
    return float(f"{x:.7g}") if math.isfinite(x) else str(x)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
