import time

import pytest
import torch

import torchpact as tp
from tests.engines.networks import block_of
from torchpact.engines import timing


def let_others(monkeypatch, used, idle, wall=10.0):
    """What the system tells: seconds of the clock, of cores used by others, of cores that were idle."""
    moments = iter([(100.0, 50.0, 20.0), (100.0 + wall, 50.0 + used, 20.0 + idle)])
    monkeypatch.setattr(timing.CpuContention, "_now", staticmethod(lambda: next(moments)))


@pytest.mark.parametrize(
    ("used", "idle", "said"), [(0.4, 0.0, False), (6.0, 3.0, True), (6.0, 30.0, False), (0.0, 0.0, False)]
)
def test_says_whether_other_programs_were_in_the_way(monkeypatch, used, idle, said):
    let_others(monkeypatch, used, idle)
    assert timing.CpuContention().is_high() is said


def test_what_the_system_does_not_tell_is_nothing_in_the_way(monkeypatch):
    monkeypatch.setattr(timing.CpuContention, "_now", staticmethod(lambda: None))
    assert not timing.CpuContention().is_high()


@pytest.mark.parametrize("used", [0.0, 6.0])
@torch.no_grad()
def test_a_deployed_network_says_so_too(monkeypatch, used):
    block, u = block_of(16, 6, 6, 2)
    let_others(monkeypatch, used, idle=0.0)
    fast = tp.deploy(block, u)
    assert ("without gradients, while other programs kept the cores busy; " in fast.explain()) == (used > 0)


def test_slow_calls_are_not_repeated_beyond_a_limit():
    calls: list[int] = []

    def slow():
        calls.append(1)
        time.sleep(0.02)

    timing.interleaved({"slow": slow}, seconds=0.0, least=3)
    assert len(calls) == 4  # one to warm up
    calls.clear()
    timing.interleaved({"slow": slow}, seconds=9.0, limit=0.01)
    assert len(calls) == 2
