"""Checks of what users hand in, made once at the public entry points; inner code trusts its inputs."""

import math
from collections.abc import Iterable
from numbers import Integral, Real

import torch
from torch import Tensor


def readable(x: Tensor) -> bool:
    """Whether Python may look at the values of ``x``: not while compiling, capturing or under torch.func."""
    # torch has no public way to ask for the third: under vmap a look raises
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return not x.is_meta and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def check_iterations(name: str, x: Tensor, dim: int) -> Tensor:
    """Return ``x`` in at least single precision, once it is known to hold iterations along ``dim``."""
    if not isinstance(x, Tensor):
        raise TypeError(f"expected {name} to be a tensor, got {type(x).__name__}")
    if x.dim() == 0 or x.size(dim) == 0:
        raise ValueError(
            f"expected {name} to hold at least one iteration along dim {dim}, got shape {tuple(x.shape)}"
        )
    return at_least_single(x)


def check_probabilities(name: str, x: Tensor, dim: int) -> Tensor:
    """Also check that all but the last entry along ``dim`` lie in [0, 1]."""
    x = check_iterations(name, x, dim)
    used = x.detach().narrow(dim, 0, x.size(dim) - 1)
    inside = (used >= 0) & (used <= 1)  # NaN fails both comparisons, so it is caught here too
    if readable(used) and not inside.all():
        bad = used[~inside].flatten()[0].item()
        raise ValueError(f"expected {name} in [0, 1], got {bad}")
    return x


def check_logits(name: str, x: Tensor, dim: int) -> Tensor:
    """Also check that no entry but perhaps the last along ``dim`` is NaN; infinities are fine."""
    x = check_iterations(name, x, dim)
    used = x.detach().narrow(dim, 0, x.size(dim) - 1)
    if readable(used) and used.isnan().any():
        raise ValueError(f"expected {name} without NaN, got {int(used.isnan().sum())} NaN")
    return x


def check_number(
    name: str,
    value: float,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> float:
    """Return ``value`` if it is a number within the bounds; the error states them as an interval."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"expected {name} to be a number, got {value!r}")
    inside = (low < value if open_low else low <= value) and (value < high if open_high else value <= high)
    if not inside:
        left = "(" if open_low or low == -math.inf else "["
        right = ")" if open_high or high == math.inf else "]"
        raise ValueError(f"expected {name} in {left}{low:g}, {high:g}{right}, got {value}")
    return float(value)


def check_count(name: str, value: int, minimum: int = 1, maximum: int | None = None) -> int:
    """Return ``value`` if it is a whole number of at least ``minimum``, and at most ``maximum`` if given."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ValueError(f"expected {name} to be an integer of at least {minimum}, got {value!r}")
    if maximum is not None and value > maximum:
        raise ValueError(f"expected {name} to be an integer of at most {maximum}, got {value!r}")
    return int(value)


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Refuse what is not among the choices.

    >>> check_choice("precision", "fp32", ["fp32", "bf16"])
    """
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"expected {name} to be one of {', '.join(choices)}; got {value!r}")


MALFORMED: tuple[type[Exception], ...] = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""What reading plain values raises that are not of the kind, size or nesting that was expected."""

MOST = 2**31 - 1
"""Of anything that a configuration counts."""

MOST_CHARACTERS = 500
"""Of an error: what it was given may be a file of any size."""


def one_line(error: BaseException | str) -> str:
    r"""Return what an error says, in a line of printable characters; its kind, if it says nothing.

    >>> one_line(ValueError("expected this,  got that")), one_line(KeyError())
    ('expected this, got that', 'KeyError')
    >>> one_line("an escape: \x1b"), len(one_line(1000 * "long "))
    ('an escape: \\x1b', 501)
    """
    text = str(error).partition("Exception raised from")[0]  # where in C++ it was
    cut = text[:MOST_CHARACTERS] + "…" if len(text) > MOST_CHARACTERS else text
    line = " ".join(cut.split()) or type(error).__name__
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def at_least_single(x: Tensor) -> Tensor:
    """Halting arithmetic is never done below single precision, whatever autocast says."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
