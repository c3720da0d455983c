"""``use_mode``: whatever overlaps, nests, fails or is forgotten, a block is left in the mode it had."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchpact as tp
from tests.problems import Stack

MODES = [tp.ACT(), tp.Thresholded(0.3), tp.Discrete(), tp.Thresholded(0.6), tp.Relaxed(0.2)]


def modes(net: nn.Module) -> list[Any]:
    return [module.mode for module in net.modules() if isinstance(module, tp.AdaptiveBlock)]


def together(work: Callable[[int], None], count: int = 8) -> None:
    """Run work in as many threads, begun at once; what they raise is raised here."""
    barrier, errors = threading.Barrier(count), []

    def run(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_many_threads_leave_the_mode_as_it_was():
    net = Stack(blocks=2)
    tp.use_mode(net.blocks[0], tp.ACT(0.2))
    before = modes(net)

    def work(number: int) -> None:
        for turn in range(300):
            mode = MODES[(number + turn) % len(MODES)]
            with suppress(KeyError), tp.use_mode(net if turn % 3 else net.blocks[1], mode, details=False):
                if turn % 7 == 0:
                    with tp.use_mode(net, MODES[number % len(MODES)]):
                        raise KeyError

    together(work)
    assert modes(net) == before
    assert all(block.details for block in net.blocks)


def test_threads_that_run_inside_see_one_of_the_modes_that_were_set():
    block: Any = Stack().blocks[0]
    u = torch.zeros(2, 2, dtype=torch.double)
    steps: list[set[int]] = [set() for _ in range(4)]
    for head in block.halting:
        nn.init.constant_(head.bias, 2.0)
        nn.init.zeros_(head.weight)

    def work(number: int) -> None:
        for _ in range(50):
            with tp.use_mode(block, tp.Thresholded((0.1, 0.99)[number % 2])), torch.no_grad():
                steps[number].update(block(u)[1].steps.flatten().tolist())

    together(work, 4)
    assert set().union(*steps) <= {1, 3}
    assert block.mode == tp.Relaxed()


@settings(max_examples=200)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_calls_entries_and_ends_in_any_order_leave_what_was_there(picks, random):
    """As several threads do it: each calls, enters and ends; the last to be entered counts."""
    net = Stack(blocks=2)
    tp.use_mode(net.blocks[1], tp.ACT(0.25))
    before = modes(net)
    switches: list[Any] = [None] * len(picks)
    stages, entered = [0] * len(picks), []
    while any(stage < 3 for stage in stages):
        i = random.choice([i for i, stage in enumerate(stages) if stage < 3])
        stages[i] += 1
        if stages[i] == 1:
            switches[i] = tp.use_mode(net, MODES[picks[i]])
            assert modes(net) == [MODES[picks[i]]] * 2
        elif stages[i] == 2:
            switches[i].__enter__()
            entered.append(i)
            assert modes(net) == [MODES[picks[i]]] * 2
        else:
            switches[i].__exit__(None, None, None)
            entered.remove(i)
            if entered and not any(stage == 1 for stage in stages):
                assert modes(net) == [MODES[picks[entered[-1]]]] * 2
    assert modes(net) == before


def test_a_mode_set_by_hand_is_what_later_switches_come_back_to():
    block: Any = Stack().blocks[0]
    switch = tp.use_mode(block, "act")
    block.mode = tp.Discrete()
    with tp.use_mode(block, "thresholded"):
        assert block.mode == tp.Thresholded()
    assert block.mode == tp.Discrete()
    with switch:
        assert block.mode == tp.ACT()
    assert block.mode == tp.Discrete()
    block.mode = tp.Relaxed(0.1)
    with tp.use_mode(block, "thresholded"):
        pass
    assert block.mode == tp.Relaxed(0.1)


def test_parts_of_a_network_overlap_as_the_whole_does():
    net = Stack(blocks=2)
    whole = tp.use_mode(net, "act")
    part = tp.use_mode(net.blocks[0], "discrete")
    assert whole.__enter__() is net
    assert part.__enter__() is net.blocks[0]
    whole.__exit__(None, None, None)
    assert modes(net) == [tp.Discrete(), tp.Relaxed()]
    part.__exit__(None, None, None)
    assert modes(net) == [tp.Relaxed()] * 2


def test_a_permanent_call_stays_and_is_what_later_ones_come_back_to():
    net = Stack(blocks=2)
    tp.use_mode(net, "act")
    gc.collect()
    assert modes(net) == [tp.ACT()] * 2
    with tp.use_mode(net, "thresholded"):
        assert modes(net) == [tp.Thresholded()] * 2
    assert modes(net) == [tp.ACT()] * 2
    tp.use_mode(net, "discrete")
    assert modes(net) == [tp.Discrete()] * 2


def test_a_permanent_call_within_a_with_statement_ends_with_it():
    net = Stack(blocks=2)
    for keep in (False, True):
        with tp.use_mode(net, "act"):
            switch = tp.use_mode(net.blocks[0], "discrete")
            if not keep:
                del switch
                gc.collect()
            assert modes(net) == [tp.Discrete(), tp.ACT()]
        assert modes(net) == [tp.Relaxed()] * 2, "kept or not"


def test_one_that_was_forgotten_open_hands_back_through_those_after_it():
    """A switch entered and dropped is a permanent call; one that ends later restores what it found."""
    net = Stack()
    forgotten = tp.use_mode(net, "act")
    forgotten.__enter__()
    with tp.use_mode(net, "thresholded"):
        del forgotten
        gc.collect()
        assert modes(net) == [tp.Thresholded()]
    assert modes(net) == [tp.ACT()]


def test_a_generator_that_is_collected_restores_the_mode():
    net = Stack(blocks=2)

    def inside() -> Iterator[list[Any]]:
        with tp.use_mode(net, "act"):
            yield modes(net)
            yield modes(net)

    running = inside()
    assert next(running) == [tp.ACT()] * 2
    del running
    gc.collect()
    assert modes(net) == [tp.Relaxed()] * 2


def test_blocks_can_be_collected_while_a_switch_is_open():
    with tp.use_mode(Stack(), "act") as net:
        found = modes(net)
        del net
        gc.collect()
    assert found == [tp.ACT()]


def test_an_exception_while_several_are_open_ends_them_all():
    net = Stack(blocks=3)

    def fail() -> None:
        with ExitStack() as stack:
            for mode in MODES:
                stack.enter_context(tp.use_mode(net, mode))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert modes(net) == [tp.Relaxed()] * 3


def test_a_switch_kept_for_later_sets_its_mode_when_it_is_entered():
    net = Stack()
    switch = tp.use_mode(net, "act")
    tp.use_mode(net, "discrete")
    with switch:
        assert modes(net) == [tp.ACT()]
    assert modes(net) == [tp.Discrete()]


def test_one_that_ends_between_the_call_and_the_with_statement_of_another_takes_nothing_from_it():
    net = Stack()
    first = tp.use_mode(net, "act")
    first.__enter__()
    second = tp.use_mode(net, "thresholded")
    first.__exit__(None, None, None)
    with second:
        assert modes(net) == [tp.Thresholded()]
    assert modes(net) == [tp.Relaxed()]


def test_one_switch_entered_twice_within_itself_restores_at_the_end():
    net = Stack()
    switch = tp.use_mode(net, "act")
    with switch:
        with switch:
            assert modes(net) == [tp.ACT()]
        assert modes(net) == [tp.ACT()], "it is still open"
    assert modes(net) == [tp.Relaxed()]


def test_modes_and_thresholds_do_not_disturb_each_other():
    block: Any = Stack().blocks[0]
    mode, thresholds = tp.use_mode(block, "thresholded"), tp.use_thresholds(block, tp.Thresholds("never"))
    mode.__enter__()
    thresholds.__enter__()
    mode.__exit__(None, None, None)
    assert block.mode == tp.Relaxed()
    assert block.bounds == (float("inf"),) * 2
    thresholds.__exit__(None, None, None)
    assert block.bounds is None
