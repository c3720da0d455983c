"""Threads that share the work of kernels, on a quiet machine and on a busy one, which tests only pretend."""

import os
import threading
import time

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.engines.networks import block_of, bottlenecks_of, relative
from tests.engines.recurrent_layers import lively
from torchpact.engines import ENGINES, threads
from torchpact.engines.attention import native as attention
from torchpact.engines.attention.ragged import Ragged
from torchpact.engines.base import NO_CONTEXT, Unsupported
from torchpact.engines.conv.native import engine as native
from torchpact.engines.recurrent import native as recurrent
from torchpact.engines.threads import calm, cpu_limit, kernel_threads
from torchpact.specs import block_spec

CPUS = 4


@pytest.fixture
def pretend():
    """Say how many CPUs kernels see, which as many threads may use, and whether others want them."""
    try:
        libraries = [each.library() for each in (native, attention, recurrent)]
    except Unsupported as reason:
        pytest.skip(str(reason))
    before = torch.get_num_threads()

    def say(busy, cpus=CPUS):
        torch.set_num_threads(cpus)
        for library in libraries:
            library.torchpact_pretend(cpus, int(busy))

    yield say
    torch.set_num_threads(before)
    for library in libraries:
        library.torchpact_pretend(0, 0)


def runner(block):
    return ENGINES["native"].build(block_spec(block), NO_CONTEXT)


@pytest.mark.parametrize("make", [block_of, bottlenecks_of])
@pytest.mark.parametrize("per", ["pixel", "image"])
@pytest.mark.parametrize("batch", [1, 3, 8, 13])
def test_blocks_have_the_same_bits_whether_the_machine_is_busy_or_not(pretend, make, per, batch):
    block, u = make(64, 7, 6, batch, per=per)
    u, run = u.contiguous(memory_format=torch.channels_last), runner(block)
    with torch.no_grad():
        expected, ponder = block(u)
        results = []
        for busy in (False, True, True, False):
            pretend(busy)
            results.append(run(u))
    for output, got in results:
        assert torch.equal(got.steps, ponder.steps)
        assert relative(output, expected) < 1e-5
        assert torch.equal(output, results[0][0])
        assert torch.equal(got.probs, results[0][1].probs)
        assert torch.equal(got.expected_steps, results[0][1].expected_steps)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_blocks_agree_for_any_number_of_threads(pretend, busy, count):
    pretend(busy, cpus=count)
    for batch in (1, 4, 7):
        block, u = block_of(32, 7, 9, batch, seed=4)
        with torch.no_grad():
            expected, ponder = block(u)
        output, got = runner(block)(u)
        assert torch.equal(got.steps, ponder.steps)
        assert relative(output, expected) < 1e-5


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_layers_agree_on_a_busy_machine(pretend, cell):
    torch.manual_seed(0)
    layer = lively(cell, batch_first=True).eval()
    x = torch.randn(11, 9, 3)
    with torch.no_grad():
        expected, _, ponder = layer(x)
    fast = tp.deploy(layer, x, engines=["recurrent"])
    for busy in (True, False):
        pretend(busy)
        output, _, got = fast(x)
        assert torch.equal(got.steps, ponder.steps)
        assert relative(output, expected) < 1e-5


def test_attention_has_the_same_bits_on_a_busy_machine(pretend):
    torch.manual_seed(0)
    queries, keys, values = (torch.randn(40, 4, 16) for _ in range(3))
    starts, offsets = torch.tensor([0, 3, 25, 40]), torch.tensor([0, 3, 25])
    last = torch.tensor([3] * 3 + [22] * 22 + [15] * 15, dtype=torch.int32)
    ragged = Ragged(starts=starts, offsets=offsets, first=torch.zeros_like(last), last=last)
    results = []
    for busy in (False, True):
        pretend(busy)
        results.append(attention.attend_natively(queries, keys, values, 0.25, ragged))
    assert torch.equal(*results)
    for begin, end in ((0, 3), (3, 25), (25, 40)):
        q, k, v = (x[begin:end].transpose(0, 1).unsqueeze(0) for x in (queries, keys, values))
        expected = nn.functional.scaled_dot_product_attention(q, k, v, scale=0.25)[0].transpose(0, 1)
        assert relative(results[1][begin:end].view(-1, 4, 16), expected) < 1e-5


@pytest.mark.parametrize("busy", [False, True])
def test_threads_that_call_at_once_do_not_disturb_each_other(pretend, busy):
    pretend(busy)
    blocks = [block_of(16, 9, 8, batch, seed=batch) for batch in (1, 5, 8, 6)]
    with torch.no_grad():
        expected = [block(u)[0] for block, u in blocks]
    runs, wrong = [runner(block) for block, _ in blocks], []

    def call(index):
        torch.set_num_threads(CPUS)
        for _ in range(100):
            output, _ = runs[index](blocks[index][1])
            if relative(output, expected[index]) > 1e-5:
                wrong.append(index)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(len(blocks))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_which_has_none_of_the_threads_computes_the_same(pretend):
    block, u = block_of(16, 9, 8, 6)
    run = runner(block)
    for busy in (True, False):
        pretend(busy)
        expected, _ = run(u)
        child = os.fork()
        if not child:  # no test framework here
            os._exit(0 if torch.equal(run(u)[0], expected) else 1)
        deadline = time.monotonic() + 60
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, 9)
                os.waitpid(child, 0)
                pytest.fail("the child waits for threads that it does not have")
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(done[1]) == 0


def test_helpers_sleep_when_there_is_nothing_to_do(pretend):
    pretend(busy=True)
    block, u = block_of(16, 9, 8, 8)
    run = runner(block)
    for _ in range(5):
        run(u)
    time.sleep(0.05)  # in which they may still spin, by 0.3 ms
    start = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - start < 0.25  # a thread that spins would have taken 0.5


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_no_thread_is_made_for_a_cpu_that_may_not_be_used():
    def work():
        os.sched_setaffinity(0, {min(before)})  # of this thread only
        torch.set_num_threads(CPUS)
        count = len(os.listdir("/proc/self/task"))
        runner(block)(u)
        made.append(len(os.listdir("/proc/self/task")) - count)

    block, u = block_of(16, 9, 8, 8)
    try:
        native.library()
    except Unsupported as reason:
        pytest.skip(str(reason))
    made: list[int] = []
    before, count = os.sched_getaffinity(0), torch.get_num_threads()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.set_num_threads(count)
    assert made == [0]


NONE = 2**16
NESTED = {"cpu.max": "max 100000\n", "a/cpu.max": "100000 100000\n", "a/b/cpu.max": "400000 100000"}
FIRST_VERSION = {"cpu/a/cpu.cfs_quota_us": "300000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}
UNLIMITED = {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("files", "member", "cpus"),
    [
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 2),
        ({"cpu.max": "max 100000\n"}, "0::/\n", NONE),
        (NESTED, "0::/a/b\n", 1),
        (FIRST_VERSION, "3:cpu:/a\n0::/\n", 3),
        (UNLIMITED, "3:cpu,cpuacct:/", NONE),
        ({"cpu.max": "nonsense"}, "0::/\n", NONE),
        ({}, "", NONE),
    ],
)
def test_limits_of_control_groups_are_known(tmp_path, files, member, cpus):
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "member").write_text(member)
    assert cpu_limit(tmp_path / "groups", tmp_path / "member") == cpus


def test_kernels_use_no_more_threads_than_a_control_group_allows(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        monkeypatch.setattr(threads, "cpu_limit", lambda: 3)
        assert kernel_threads(55) == 3
        assert kernel_threads(2) == 2
        monkeypatch.setattr(threads, "cpu_limit", lambda: 2**16)
        assert kernel_threads(55) == 8
    finally:
        torch.set_num_threads(before)


def test_torch_uses_one_thread_beside_kernels_on_a_busy_machine_only(pretend):
    @calm
    def inner():
        seen.append((torch.get_num_threads(), kernel_threads(55)))

    @calm
    def outer(fails=False):
        inner()
        seen.append((torch.get_num_threads(), kernel_threads(55)))
        if fails:
            raise ValueError

    seen: list[tuple[int, int]] = []
    pretend(busy=False)
    outer()
    assert seen == [(CPUS, CPUS)] * 2
    pretend(busy=True)
    seen.clear()
    outer()
    assert seen == [(1, CPUS)] * 2
    with pytest.raises(ValueError):  # noqa: PT011
        outer(fails=True)
    assert torch.get_num_threads() == CPUS
