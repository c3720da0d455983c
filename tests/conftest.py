"""What tests of several folders use."""

import signal
import sys

import pytest

from torchpact import cli

# a shell starts jobs in the background with Ctrl-C ignored, which programs inherit that tests interrupt
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def run(monkeypatch, capsys):
    """Call torchpact as from a shell; returns its exit code, and what it printed."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["torchpact", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return call
