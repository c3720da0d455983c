"""Stopping when asked to: after an iteration, so that what was learned can be saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torchpact.training import distributed

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what batch systems send before they take a machine away."""


class Stopped(KeyboardInterrupt):
    """Training that was stopped by a signal; the message is one line and says what is left."""


class Stop:
    """Whether to stop."""

    asked = False


@contextmanager
def on_signals() -> Iterator[Stop]:
    """Within, the first signal only asks to stop; a second one acts as it would have without.

    Signals that the program ignores, or that another thread is to receive, are left alone; and those of a
    process group, whose processes would stop at different iterations and wait for each other forever.
    """
    stop = Stop()
    handlers: dict[signal.Signals, object] = {}

    def restore() -> None:
        for number in [*handlers]:
            signal.signal(number, handlers.pop(number))  # type: ignore[arg-type]

    def ask(number: int, frame: FrameType | None) -> None:
        stop.asked = True
        restore()

    if threading.current_thread() is threading.main_thread() and distributed.world() == 1:
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                handlers[number] = signal.signal(number, ask)
    try:
        yield stop
    finally:
        restore()
