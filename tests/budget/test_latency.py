"""Budgets in milliseconds, with a clock that tells what FLOPs do."""

import pytest
import torch

import torchpact as tp
from tests.budget.networks import Classifier
from torchpact.budget import latency
from torchpact.budget.latency import LatencyMeter
from torchpact.engines.timing import CpuContention

NET, EXAMPLE = Classifier(), torch.randn(16, 8)


MEASURED = LatencyMeter.ms


def clock(meter, thresholds):
    """A machine on which the whole original network takes 10 ms, and any run 1 ms besides."""
    MEASURED(meter, thresholds)  # it runs
    (x,) = meter.given.args
    times = []
    for each in thresholds:
        with tp.use_mode(NET, "thresholded"), tp.use_thresholds(NET, each):
            times.append(1 + 10 * float(tp.count_flops(NET, x).share))
    return times


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    monkeypatch.setattr(LatencyMeter, "ms", clock)
    monkeypatch.setattr(
        latency, "in_turns", lambda calls, **_: {name: [len(call()) / 16] for name, call in calls.items()}
    )


def test_milliseconds_are_a_share_of_the_flops_by_exits_that_were_measured():
    budget = tp.Budget(ms=8.0, example=EXAMPLE).bind(NET)
    assert budget.target == pytest.approx(0.7)
    assert "a batch of 16 examples by " in repr(budget)
    assert ", measured 20" in budget.note


@pytest.mark.filterwarnings("ignore:times of a batch")  # of a busy machine
def test_thresholds_are_the_best_within_the_milliseconds():
    held_out = [EXAMPLE, torch.randn(16, 8)]
    thresholds = tp.calibrate(NET, held_out, tp.Budget(ms=8.0, example=EXAMPLE))
    (ms,) = clock(LatencyMeter(NET, EXAMPLE), [thresholds])
    assert 6.5 < ms <= 8.0
    table = tp.calibrate(NET, held_out, [tp.Budget(ms=x, example=EXAMPLE) for x in (7.0, 9.0)])
    assert table.unit == "ms"
    assert [row.cost <= row.budget for row in table.rows] == [True, True]
    assert tp.ThresholdTable.from_json(table.to_json()) == table


@pytest.mark.parametrize("ms", [5.0, 30.0])
def test_milliseconds_that_cannot_be_met_say_what_can(ms):
    with pytest.raises(
        ValueError, match=r"expected a budget of 5\.65 to 11\.\d ms for a batch of 16 examples by"
    ):
        tp.Budget(ms=ms, example=EXAMPLE).bind(NET)


def test_calibration_below_the_first_exit_says_what_can_be_met():
    with pytest.raises(ValueError, match=r"expected a budget of 5\.65 to 11\.\d ms"):
        tp.calibrate(NET, [EXAMPLE], tp.Budget(ms=5.0, example=EXAMPLE))


def test_units_are_not_mixed():
    with pytest.raises(ValueError, match="budgets of one unit"):
        tp.calibrate(NET, [EXAMPLE], [0.6, tp.Budget(ms=8.0, example=EXAMPLE)])


def test_a_busy_machine_is_noticed(monkeypatch):
    monkeypatch.setattr(CpuContention, "is_high", lambda self: True)
    budget = tp.Budget(ms=8.0, example=EXAMPLE).bind(NET)
    assert "other programs kept the cores busy" in repr(budget)
    with pytest.warns(UserWarning, match="other programs kept the cores busy"):
        tp.calibrate(NET, [EXAMPLE], tp.Budget(ms=8.0, example=EXAMPLE))


def test_a_larger_budget_in_ms_is_never_worse_where_fewer_flops_can_take_longer(monkeypatch):
    """An engine that is slow for some thresholds: a bisection of the FLOPs leads away from good ones."""
    monkeypatch.setattr(CpuContention, "is_high", lambda self: False)

    def odd(meter, thresholds):
        times = clock(meter, thresholds)
        return [ms + (3.0 if 6.5 < ms < 8.5 else 0.0) for ms in times]

    monkeypatch.setattr(LatencyMeter, "ms", odd)
    held_out = [torch.randn(60, 8) for _ in range(2)]
    budgets = [tp.Budget(ms=x, example=EXAMPLE) for x in (10.4, 6.0, 7.0, 8.5, 9.5)]
    table = tp.calibrate(NET, held_out, budgets)
    scores = [row.score for row in table.rows]
    assert scores == sorted(scores)
    assert all(row.cost <= row.budget for row in table.rows)
