"""The program ``torchpact`` from its first moment: Ctrl-C while torch is imported ends it in one line.

A module beside the package, since to import anything of the package is to import torch.
"""

import os
import signal
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

__all__ = ["end_in_one_line", "is_program", "main"]


def main() -> None:
    """Import the command line and run it."""
    end_in_one_line()
    from torchpact.cli import main as run

    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def end_in_one_line() -> None:
    """Have Ctrl-C end the program in one line, until its command line runs."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored, as of a job, it stays so
        signal.signal(signal.SIGINT, _leave)


def is_program(arguments: Sequence[str]) -> bool:
    """Return whether an interpreter with these arguments is asked for ``-m torchpact``.

    Args:
        arguments: As in ``sys.orig_argv``.

    Example:
        >>> is_program(["python", "-Xdev", "-m", "torchpact", "zoo"]), is_program(["python", "train.py"])
        (True, False)

    """
    before = ""
    for each in arguments[1:]:
        if before.startswith("-") and not before.startswith("--") and before.endswith("m"):
            return each == "torchpact"
        if each == "-mtorchpact":
            return True
        if not each.startswith("-") and before not in ("-X", "-W"):
            return False  # a file
        before = each
    return False


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"\ntorchpact: interrupted before anything was begun\n")
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
