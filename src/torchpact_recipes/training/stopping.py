"""Stopping when asked to: after an iteration, so that what was learned can be saved."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torchpact_recipes.training import distributed

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what batch systems send before they take a machine away."""

NOTICE = b"\nstopping after this iteration; once more to stop at once\n"


class Stopped(KeyboardInterrupt):
    """Training that was stopped by a signal of this ``number``; the message is one line: what is left."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class Stop:
    """The signal that asked to stop, if one has."""

    number: int | None = None

    @property
    def asked(self) -> bool:
        """Whether to stop."""
        return self.number is not None


@contextmanager
def on_signals() -> Iterator[Stop]:
    """Within, the first signal only asks to stop; a second one acts as it would have without.

    Signals that the program ignores, or that another thread is to receive, are left alone; and those of a
    process group, whose processes would stop at different iterations and wait for each other forever.
    """
    stop = Stop()
    handlers: dict[int, Any] = {}

    def restore() -> None:
        while handlers:  # emptied here or, by a signal meanwhile, there
            number, handler = handlers.popitem()
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        stop.number = number
        restore()
        os.write(2, NOTICE)  # a validation or compilation may have to end first

    if threading.current_thread() is threading.main_thread() and distributed.world() == 1:
        found = {number: signal.getsignal(number) for number in SIGNALS}
        handlers |= {
            number: handler for number, handler in found.items() if handler not in (signal.SIG_IGN, None)
        }
        for number in [*handlers]:
            signal.signal(number, ask)
    try:
        yield stop
    finally:
        restore()
