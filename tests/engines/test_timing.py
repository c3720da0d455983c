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
    timing.interleaved({"slow": slow}, seconds=9.0, limit=0.05)
    assert 3 <= len(calls) <= 5  # one to warm up, and none is begun after 0.05 seconds


def test_a_first_call_of_more_than_half_of_the_limit_is_the_only_one():
    calls: list[str] = []

    def slow():
        calls.append("slow")
        time.sleep(0.06)

    times = timing.interleaved({"slow": slow, "fast": lambda: calls.append("fast")}, seconds=0.0, limit=0.1)
    assert calls == ["slow", *["fast"] * 4]  # one to warm up, and three rounds
    assert times["slow"] >= 0.06 > times["fast"]


def test_first_calls_that_were_made_before_are_not_made_again():
    calls: list[str] = []
    each = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = timing.interleaved(each, seconds=0.0, limit=5.0, first={"a": 4.0, "b": 0.1})
    assert calls == ["b"] * 3
    assert times["a"] == 4.0
