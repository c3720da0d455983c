"""Thresholds as a value and as an argument of the run."""

import copy
import math
import pickle
import threading
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchpact as tp
from torchpact.core.thresholds import as_thresholds

NEVER, ALWAYS = math.inf, -math.inf
NUMBERS = st.one_of(st.floats(-3, 3), st.sampled_from([NEVER, ALWAYS, 0.0]))


def block_of(length: int, seed: int = 0, name: str = "") -> tp.AdaptiveBlock:
    torch.manual_seed(seed)
    steps = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(length)]
    heads = [nn.Linear(3, 1) for _ in range(length - 1)]
    for head in heads:
        nn.init.normal_(head.weight, 0, 2)
    return tp.AdaptiveBlock(steps, heads, mode="thresholded", name=name)


def by_enumeration(
    block: tp.AdaptiveBlock, u: torch.Tensor, bounds: list[float]
) -> tuple[list[int], list[torch.Tensor]]:
    """The first iteration whose logit exceeds its bound, example by example, and the state there."""
    taken, outputs = [], []
    for example in u.unbind():
        for l, step in enumerate(block.steps):
            example = step(example)
            last = l == block.max_steps - 1
            bound = None if last else bounds[l]
            if last or bound == ALWAYS or block.halting[l](example).item() > bound:
                break
        taken.append(l + 1)
        outputs.append(example)
    return taken, outputs


@settings(max_examples=60)
@given(st.lists(NUMBERS, min_size=0, max_size=5), st.integers(0, 1000), st.booleans(), st.booleans())
def test_a_run_halts_where_a_logit_first_exceeds_its_bound(bounds, seed, grad, details):
    block = block_of(len(bounds) + 1, seed)
    block.details = details
    u = torch.randn(5, 3)
    with torch.set_grad_enabled(grad):
        output, ponder = block(u, thresholds=tp.Thresholds([bounds]))
    steps, outputs = by_enumeration(block, u, bounds)
    assert ponder.steps.flatten().tolist() == steps
    torch.testing.assert_close(output, torch.stack(outputs))


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.8])
def test_a_number_is_what_the_mode_takes(probability):
    block, u = block_of(6), torch.randn(50, 3)
    expected = block(u, mode=tp.Thresholded(probability))
    for given_ in (probability, tp.Thresholds.at(probability)):
        output, ponder = block(u, thresholds=given_)
        assert torch.equal(output, expected[0])
        assert torch.equal(ponder.steps, expected[1].steps)
    assert expected[1].steps.unique().numel() > 1
    with tp.use_thresholds(block, probability):
        assert torch.equal(block(u)[1].steps, expected[1].steps)
        assert torch.equal(block(u, mode=tp.Thresholded(0.9))[1].steps, expected[1].steps)
        overriding = block(u, thresholds=tp.Thresholds("always"))[1]
        assert (overriding.steps == 1).all()
    assert torch.equal(block(u, mode=tp.Thresholded(probability))[1].steps, expected[1].steps)


@pytest.mark.parametrize("logit", [-math.inf, -50.0, 0.0, 50.0, math.inf])
def test_never_and_always_hold_for_every_logit(logit):
    block = tp.AdaptiveBlock(nn.Tanh(), lambda u: torch.full_like(u[:, :1], logit), max_steps=4)
    for word, number, expected in (("never", NEVER, 4), ("always", ALWAYS, 1)):
        for thresholds in (tp.Thresholds(word), tp.Thresholds(number), tp.Thresholds([[word] * 3])):
            _, ponder = block(torch.zeros(2, 3), mode="thresholded", thresholds=thresholds)
            assert ponder.steps.flatten().tolist() == [expected] * 2


def test_entries_are_for_all_for_a_block_or_for_a_head():
    heads = {"blocks.0": 2, "blocks.1": 1, "last": 3}
    one = tp.Thresholds(1.5).for_blocks(heads)
    assert one == {"blocks.0": (1.5, 1.5), "blocks.1": (1.5,), "last": (1.5, 1.5, 1.5)}
    listed = tp.Thresholds([0, "never", ["always", 2, -1.5]]).for_blocks(heads)
    assert listed == {"blocks.0": (0.0, 0.0), "blocks.1": (NEVER,), "last": (ALWAYS, 2.0, -1.5)}
    named = tp.Thresholds({"last": 1, "blocks.1": [0.5], "blocks.0": "always"}).for_blocks(heads)
    assert named == {"blocks.0": (ALWAYS, ALWAYS), "blocks.1": (0.5,), "last": (1.0, 1.0, 1.0)}
    assert list(named) == list(heads)


def test_an_own_name_is_what_a_mapping_asks_for_in_a_call():
    block = block_of(4, name="encoder")
    u = torch.randn(5, 3)
    assert (block(u, thresholds=tp.Thresholds({"encoder": "never"}))[1].steps == 4).all()
    with pytest.raises(ValueError, match="expected thresholds for blocks among 'encoder'; got 'decoder'"):
        block(u, thresholds=tp.Thresholds({"decoder": 0.0, "encoder": 0.0}))


def test_values_compare_copy_and_pickle():
    for logits in (0.5, "never", [0.0, ["always", 1.0]], {"a": [1.0], "b": "never"}):
        one = tp.Thresholds(logits)
        assert one == tp.Thresholds(logits) == copy.deepcopy(one) == pickle.loads(pickle.dumps(one))
        assert one != tp.Thresholds(0.25)
        assert as_thresholds(one) is one


class Two(nn.Module):
    """Two blocks, of three and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = block_of(4), block_of(3, seed=1)

    def forward(self, u: torch.Tensor) -> list[list[int]]:
        u, one = self.first(u)
        return [ponder.steps.flatten().tolist() for ponder in (one, self.second(u)[1])]


def test_a_with_statement_sets_them_and_nested_ones_count_from_the_inside():
    net, u = Two(), torch.randn(2, 3)
    before = net(u)
    with tp.use_thresholds(net, tp.Thresholds(["never", "always"])) as inside:
        assert inside is net
        assert net(u) == [[4, 4], [1, 1]]
        with tp.use_thresholds(net.second, tp.Thresholds("never")):
            assert net(u) == [[4, 4], [3, 3]]
            with (
                suppress(KeyError),
                tp.use_thresholds(net, tp.Thresholds({"first": "always", "second": 0})),
            ):
                assert net(u)[0] == [1, 1]
                raise KeyError
            assert net(u) == [[4, 4], [3, 3]]
        assert net(u) == [[4, 4], [1, 1]]
    assert net(u) == before
    assert net.first.bounds is None


def test_they_count_in_thresholded_mode_only():
    net, u = Two(), torch.randn(20, 3)
    with tp.use_thresholds(net, tp.Thresholds("always")):
        for mode in (tp.ACT(), tp.Discrete(torch.Generator().manual_seed(0))):
            within = net.first(u, mode=mode)[1].steps
            assert within.unique().numel() > 1


def test_a_thread_that_gives_them_in_the_call_is_not_disturbed_by_others():
    block, u = block_of(5), torch.randn(4, 3)
    wrong: list[int] = []

    def calls(bounds: list[float | str], expected: int) -> None:
        for _ in range(100):
            steps = block(u, thresholds=tp.Thresholds([bounds]))[1].steps
            wrong.extend(steps[steps != expected].tolist())

    def settings_() -> None:
        for _ in range(100):
            with tp.use_thresholds(block, tp.Thresholds("never")):
                pass

    threads = [
        threading.Thread(target=calls, args=(["never"] * k + ["always"] * (4 - k), k + 1)) for k in range(4)
    ]
    threads += [threading.Thread(target=settings_) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert block.bounds is None


BLOCK, U = block_of(3), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: tp.Thresholds("sometimes"),
            TypeError,
            "expected a threshold as a logit, 'never' or 'always', got 's",
        ),
        (lambda: tp.Thresholds(True), TypeError, "expected a threshold as a logit, .* got True"),
        (lambda: tp.Thresholds([None]), TypeError, "expected a threshold as a logit, .* got None"),
        (lambda: tp.Thresholds([[[1.0]]]), TypeError, r"expected a threshold as a logit, .* got \[1.0\]"),
        (
            lambda: tp.Thresholds(torch.zeros(9, 9)),
            TypeError,
            r"expected a threshold as a logit, .* got tensor",
        ),
        (
            lambda: tp.Thresholds([torch.zeros(())]),
            TypeError,
            r"expected a threshold as a logit, .* got tensor",
        ),
        (lambda: tp.Thresholds(math.nan), ValueError, "expected a threshold as a logit, got NaN"),
        (lambda: tp.Thresholds({"a": [math.nan]}), ValueError, "expected a threshold as a logit, got NaN"),
        (lambda: tp.Thresholds.at(1.0), ValueError, r"expected threshold in \(0, 1\), got 1.0"),
        (lambda: BLOCK(U, thresholds=1.5), ValueError, r"expected threshold in \(0, 1\), got 1.5"),
        (
            lambda: BLOCK(U, thresholds=[0.5]),
            TypeError,
            r"expected thresholds as a number in \(0, 1\), or Thresholds of logits, got list",
        ),
        (
            lambda: BLOCK(U, thresholds=0.5, mode="act"),
            ValueError,
            r"expected the mode thresholded with thresholds, got ACT\(eps=0.01\)",
        ),
        (
            lambda: BLOCK(U, thresholds=tp.Thresholds([[0.0]])),
            ValueError,
            "expected 2 thresholds for as many heads of '', got 1",
        ),
        (
            lambda: tp.use_thresholds(Two(), tp.Thresholds([0.0])),
            ValueError,
            "expected thresholds for 2 blocks, got 1",
        ),
        (
            lambda: tp.use_thresholds(Two(), tp.Thresholds({"first": 0.0})),
            ValueError,
            "expected thresholds for the block 'second', got some for 'first'",
        ),
        (
            lambda: tp.use_thresholds(Two(), tp.Thresholds({"third": 0.0})),
            ValueError,
            "expected thresholds for blocks among 'first', 'second'; got 'third'",
        ),
        (
            lambda: tp.Thresholds([0.0]).for_block(1, "b", 1),
            ValueError,
            "expected thresholds for block 2, got 1",
        ),
    ],
)
def test_wrong_use_is_told_in_one_line(call, kind, message):
    with pytest.raises(kind, match=f"^{message}") as error:
        call()
    assert "\n" not in str(error.value)


def test_a_mistake_sets_nothing():
    net = Two()
    with pytest.raises(ValueError, match="expected 3 thresholds"):
        tp.use_thresholds(net, tp.Thresholds([[0.0], 0.0]))
    assert net.first.bounds is None
    assert net.second.bounds is None
