"""How long to measure: for a moment."""

from functools import partial

import pytest

from torchpact.engines import autotune, whole
from torchpact.engines.timing import interleaved

MEASURE = (autotune, whole)


@pytest.fixture(scope="module")
def no_patience():
    """Measure for a moment only: what is chosen does not matter."""
    with pytest.MonkeyPatch.context() as patch:
        for module in MEASURE:
            patch.setattr(module, "interleaved", partial(interleaved, seconds=0, least=1))
        yield


@pytest.fixture
def fastest(monkeypatch):
    """Let a candidate be the fastest, wherever it is one."""

    def favour(name):
        def times(candidates, **_):
            for run in candidates.values():
                run()
            return {n: 0.1 if n.startswith("blocks") else 0.5 if n == name else 1.0 for n in candidates}

        for module in MEASURE:
            monkeypatch.setattr(module, "interleaved", times)

    return favour
