"""What benchmarks/onchip_phases.py makes of stamps; none of a GPU is needed."""

import argparse
import ctypes
import importlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engines.onchip.emulation import plans
from torchpact.engines.conv.onchip.nvrtc import SOURCE
from torchpact.engines.conv.onchip.plan import Plan

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("onchip_phases")


def stamped(bench, units, warps=2):
    """Stamps of CTAs, by unit: the clock of each stamp; the second warp is three cycles late at each."""
    stamps = torch.zeros(len(units), len(units[0]), bench.STAMPS, warps, dtype=torch.int64)
    for cta, of_cta in enumerate(units):
        for unit, clocks in enumerate(of_cta):
            for stamp, clock in clocks.items():
                stamps[cta, unit, stamp] = clock + 3 * torch.arange(warps)
    return stamps


FIRST = dict(enumerate((1000, 1010, 1020, 1120, 1130, 1330, 1340, 1360, 1400, 1401)))
SHORT = {0: 2000, 2: 2002, 3: 2042, 4: 2050, 5: 2130, 6: 2136}  # no lists, and the last one does not ask
LEFT = {0: 2000}  # finds nobody and stops


def test_cycles_are_means_over_the_units_that_were_run(bench):
    phases = bench.Phases(stamped(bench, [[FIRST, SHORT], [FIRST, LEFT]]))
    assert phases.ran.tolist() == [[True, True], [True, False]]
    assert phases.mean() == {
        "lists": 7,  # 10, 10 and none
        "lists_wait": 7,  # 10, 10, 2
        "conv1": 80,  # 100, 100, 40
        "conv1_wait": 9,  # 10, 10, 8
        "conv2": 160,  # 200, 200, 80
        "conv2_wait": 9,  # 10, 10, 6
        "decide": 13,  # 20, 20, none, as all that follow
        "refresh": 27,
        "refresh_wait": 1,
        "cycles": 313,  # 401, 401, 136
    }


def test_warps_count_alike(bench):
    stamps = stamped(bench, [[FIRST]])
    stamps[0, 0, 3, 1] -= 50  # it is early, and waits
    means = bench.Phases(stamps).mean()
    assert (means["conv1"], means["conv1_wait"], means["cycles"]) == (75, 35, 401)


def test_units_have_the_active_share_of_the_ctas_that_ran_them(bench):
    """Five images of two pixels, two a CTA; only the first two CTAs have stamps."""
    plan = replace(plans((16,), 32, 32, 10, True)[0], images=2)
    phases = bench.Phases(stamped(bench, [[FIRST, SHORT], [FIRST, LEFT]]))
    steps = torch.tensor([[2, 1], [2, 2], [1, 1], [1, 1], [2, 2]]).reshape(5, 1, 1, 2)
    first, second = phases.by_unit(steps, plan)
    assert {name: first[name] for name in ("unit", "ran", "active", "listed", "cycles")} == {
        "unit": 1,
        "ran": 1,
        "active": 1,
        "listed": 1,
        "cycles": 401,
    }
    assert (
        second
        == {"unit": 2, "ran": 0.5, "active": 0.75, "listed": 0}
        | bench.Phases(stamped(bench, [[SHORT]])).mean()
    )


def test_all_ctas_of_a_cluster_share_an_image(bench):
    plan = replace(plans((16,), 32, 32, 10, True)[0], images=1, cluster=2)
    phases = bench.Phases(stamped(bench, [[FIRST, SHORT]] * 2 + [[FIRST, LEFT]] * 2))
    steps = torch.tensor([[2, 1], [1, 1]]).reshape(2, 1, 1, 2)
    assert [row["active"] for row in phases.by_unit(steps, plan)] == [1, 0.5]


def test_units_that_nobody_ran_have_no_row(bench):
    plan = replace(plans((16,), 32, 32, 10, True)[0], images=1)
    phases = bench.Phases(stamped(bench, [[FIRST, LEFT]]))
    assert [row["unit"] for row in phases.by_unit(torch.ones(1, 1, 1, 2), plan)] == [1]


def test_the_kernel_has_the_stamps_that_have_names(bench):
    used = {int(number) for number in re.findall(r"STAMP\((\d+)\)", SOURCE.read_text())}
    assert used == set(range(len(bench.PHASES) + 1))
    sizes = re.search(r"STAMPS = (\d+), STAMPED = (\d+)", SOURCE.with_name("stamps.cuh").read_text())
    assert sizes is not None
    assert (int(sizes[1]), int(sizes[2])) == (bench.STAMPS, bench.STAMPED)
    assert bench.StampedArgs.stamps.offset == ctypes.sizeof(bench.Args)


def test_a_cut_changes_one_field_of_one_block(bench):
    before: list[Plan] = plans((16, 32), 32, 32, 10, True)
    after = bench.cut_plans(before, [bench.parse_cut("2:ahead=5"), bench.parse_cut("2:bordered=1")])
    assert after == [before[0], replace(before[1], ahead=5, bordered=True)] != before
    assert after[1].bordered is True
    with pytest.raises(ValueError, match="block of 1 to 2, got 3"):
        bench.cut_plans(before, [bench.parse_cut("3:ahead=5")])


@pytest.mark.parametrize("text", ["2:ahead", "ahead=5", "2:depth=5", "2:ahead=x"])
def test_a_cut_that_cannot_be_read_is_refused(bench, text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected"):
        bench.parse_cut(text)
