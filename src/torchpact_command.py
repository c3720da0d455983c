"""The program ``torchpact`` from its first moment: Ctrl-C while torch is imported ends it in one line.

A module beside the package, since to import anything of the package is to import torch.
"""

import os
import signal
from types import FrameType
from typing import NoReturn

__all__ = ["main"]


def main() -> None:
    """Import the command line and run it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # ignored, as of a job in the background, it stays so
        signal.signal(signal.SIGINT, _leave)
    from torchpact.cli import main as run

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, before)
    run()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"\ntorchpact: interrupted before anything was begun\n")
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
