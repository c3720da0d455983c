"""Streams return what the block returns for each input: in any order and width, from any iterator."""

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchpact as tp

WIDTHS = [1, 7, 256]


def countdown(max_steps=20, **options):
    """A block whose examples take as many steps as their first feature says; the second counts them."""

    def step(u, told=None):
        moved = u + torch.tensor([-1.0, 1.0])
        return moved if told is None else moved + told

    return tp.AdaptiveBlock(
        step, lambda u: 0.5 - u[:, :1], max_steps=max_steps, mode="thresholded", **options
    )


def numbers(*steps):
    return torch.tensor([[float(n), 0.0] for n in steps]).reshape(len(steps), 2)


def taken(results):
    return [int(ponder.steps) for _, ponder in results]


def learned(max_steps=9, bias=-1.0, seed=0, **options):
    torch.manual_seed(seed)
    head = nn.Linear(6, 1)
    nn.init.normal_(head.weight, 0, 2)
    nn.init.constant_(head.bias, bias)
    step = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    nn.init.normal_(step.get_parameter("0.weight"), 0, 1)  # it does not settle
    block = tp.AdaptiveBlock(step, head, max_steps=max_steps, mode="thresholded", **options)
    return block.double()  # rounding grows from step to step


def vectors(count):
    return torch.randn(count, 6, dtype=torch.double)


def assert_same(results, output, ponder):
    """Compare results of single examples with those of the block on the batch of them."""
    results = list(results)
    assert len(results) == len(output)
    if not results:
        return
    assert torch.allclose(torch.stack([one for one, _ in results]), output, atol=1e-5)
    for index, (_, own) in enumerate(results):
        rows = slice(index, index + 1)
        assert torch.equal(own.steps, ponder.steps[rows])
        assert own.steps.dtype == ponder.steps.dtype
        assert torch.allclose(own.probs, ponder.probs[:, rows], atol=1e-5)
        assert torch.allclose(own.expected_steps, ponder.expected_steps[rows], atol=1e-4)
        assert torch.allclose(own.cost, ponder.cost[rows], atol=1e-4)


@pytest.mark.parametrize("width", WIDTHS)
@given(steps=st.lists(st.integers(1, 25), max_size=40), ordered=st.booleans(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_input_takes_the_steps_that_it_should_and_none_is_lost_or_comes_twice(
    width, steps, ordered, data
):
    block, limit = countdown(), 20
    batches = data.draw(st.booleans())
    inputs = numbers(*steps)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(steps)), max_size=4))) if batches else []
    pieces = list(inputs.tensor_split(cuts)) if batches else inputs
    ahead = data.draw(st.sampled_from([None, 1, 5]))
    results = list(tp.stream(block, pieces, width=width, batches=batches, ordered=ordered, ahead=ahead))
    if not ordered:
        assert sorted(index for index, *_ in results) == list(range(len(pieces)))
        results = [(output, ponder) for _, output, ponder in sorted(results, key=lambda each: each[0])]
    outputs = [output if batches else output.unsqueeze(0) for output, _ in results]
    ran = torch.cat([torch.zeros(0, 2), *outputs])[:, 1]  # counted by the step itself, exactly
    assert ran.tolist() == [min(n, limit) for n in steps]
    assert [int(n) for _, ponder in results for n in ponder.steps] == ran.tolist()


@pytest.mark.parametrize("width", WIDTHS)
def test_results_are_those_of_the_block_with_probabilities_and_costs(width):
    block, u = learned(), vectors(60)
    with torch.no_grad():
        output, ponder = block(u)
    assert len(ponder.steps.unique()) > 3
    assert_same(tp.stream(block, u, width=width), output, ponder)


@pytest.mark.parametrize("mode", [tp.ACT(), tp.Thresholded(0.3)])
def test_other_modes_in_which_examples_halt_for_good(mode):
    block, u = learned(), vectors(30)
    with torch.no_grad():
        output, ponder = block(u, mode=mode)
    assert_same(tp.stream(block, u, width=4, mode=mode), output, ponder)


@pytest.mark.parametrize(
    "thresholds", [0.2, tp.Thresholds("never"), tp.Thresholds("always"), tp.Thresholds([[*range(-4, 4)]])]
)
def test_thresholds_of_a_run_count_by_the_steps_of_each_example(thresholds):
    block, u = learned(), vectors(30)
    with torch.no_grad():
        output, ponder = block(u, thresholds=thresholds)
    assert_same(tp.stream(block, u, width=4, thresholds=thresholds), output, ponder)
    if not isinstance(thresholds, float):
        with tp.use_thresholds(block, thresholds):
            assert_same(tp.stream(block, u, width=4), output, ponder)


@pytest.mark.parametrize("max_steps", [1, 5, 30])
def test_a_run_may_have_more_steps_or_fewer_than_the_block(max_steps):
    block, u = learned(bias=-4.0), vectors(30)
    with torch.no_grad():
        output, ponder = block(u, max_steps=max_steps)
    assert int(ponder.steps.max()) == max_steps
    assert_same(tp.stream(block, u, width=4, max_steps=max_steps), output, ponder)


def test_an_example_may_have_a_limit_of_its_own():
    u = numbers(9, 9, 9, 9) + torch.tensor([[0, 3.0], [0, 1], [0, 20], [0, 7]])  # the limit comes second
    assert taken(tp.stream(countdown(), u, width=2, limit=lambda item: int(item[1]))) == [3, 1, 9, 7]
    batches = tp.stream(countdown(), [u], width=2, batches=True, limit=lambda batch: batch[:, 1].long())
    assert [ponder.steps.flatten().tolist() for _, ponder in batches] == [[3, 1, 9, 7]]


def test_context_goes_with_its_example_by_position_and_by_name():
    block = tp.AdaptiveBlock(
        lambda u, a, mask=1.0: torch.tanh(u * a + mask),
        lambda u: 3 * u.mean(1, keepdim=True),
        max_steps=6,
        mode="thresholded",
    )
    u, a, mask = torch.randn(3, 40, 5).unbind()
    with torch.no_grad():
        output, ponder = block(u, a, mask=mask)
        plain, own = block(u, a)
    rows = list(zip(u, a, mask, strict=True))
    assert_same(tp.stream(block, ({"u": x, "a": y, "mask": z} for x, y, z in rows), width=7), output, ponder)
    assert_same(tp.stream(block, [(x, y) for x, y, _ in rows], width=7), plain, own)


def test_states_may_be_pairs():
    cell = nn.LSTMCell(3, 5)
    block = tp.AdaptiveBlock(
        lambda u, x: cell(x, u), lambda u: 9 * u[0].sum(1, keepdim=True), max_steps=4, mode="thresholded"
    )
    x, h, c = torch.randn(30, 3), torch.randn(30, 5), torch.randn(30, 5)
    with torch.no_grad():
        (first, second), ponder = block((h, c), x)
    results = list(tp.stream(block, [((a, b), y) for a, b, y in zip(h, c, x, strict=True)], width=4))
    assert torch.allclose(torch.stack([one[0] for one, _ in results]), first, atol=1e-6)
    assert torch.allclose(torch.stack([one[1] for one, _ in results]), second, atol=1e-6)
    assert taken(results) == ponder.steps.flatten().tolist()


@pytest.mark.parametrize("gated", [False, True])
def test_positions_may_halt_one_by_one_and_an_example_leaves_with_the_last(gated):
    torch.manual_seed(0)
    mix = nn.Conv1d(4, 4, 3, padding=1)
    head = nn.Conv1d(4, 1, 1)
    nn.init.normal_(head.weight, 0, 3)
    step = tp.Residual(mix) if gated else nn.Sequential(mix, nn.Tanh())
    block = tp.AdaptiveBlock(step, head, max_steps=6, mode="thresholded")
    u = torch.randn(20, 4, 5)
    with torch.no_grad():
        output, ponder = block(u)
    assert len(ponder.steps[0].unique()) > 1
    assert_same(tp.stream(block, u, width=3), output, ponder)


class Remembers(tp.criteria.Criterion):
    """Halts an example at the third exit, and tells by its memory only."""

    def forward(self, exit):
        seen = 1.0 + (torch.zeros(len(exit.state), 1) if exit.memory is None else exit.memory)
        return seen - 2.5, seen


@pytest.mark.parametrize(
    "criterion",
    [
        Remembers(),
        tp.criteria.Unchanged(lambda u: u, steps=2),
        tp.criteria.Divergence(lambda u: u),
        tp.criteria.LatentChange(),
    ],
    ids=lambda each: type(each).__name__,
)
def test_criteria_begin_anew_with_every_example(criterion):
    step = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    block = tp.AdaptiveBlock(step, criterion, max_steps=8, mode="thresholded")
    u, thresholds = torch.randn(30, 6), tp.Thresholds(0.0)
    with torch.no_grad():
        output, ponder = block(u, thresholds=thresholds)
    assert_same(tp.stream(block, u, width=4, thresholds=thresholds), output, ponder)
    if isinstance(criterion, Remembers):
        assert ponder.steps.flatten().tolist() == [3] * 30


def test_weights_of_positions_reach_criteria_and_ponders():
    block = tp.AdaptiveBlock(
        nn.Tanh(), tp.criteria.Confidence(lambda u: u, per="example"), max_steps=5, mode="thresholded"
    )
    u, weights = 3 * torch.randn(20, 4, 3), (torch.rand(20, 4, 1) < 0.6).float()
    with torch.no_grad():
        output, ponder = block(u, weights=weights[:, :1], thresholds=0.55)
    items = [{"u": a, "weights": b} for a, b in zip(u, weights[:, :1], strict=True)]
    results = list(tp.stream(block, items, width=3, thresholds=0.55))
    assert_same(results, output, ponder)
    assert torch.equal(
        torch.cat([own.weights for _, own in results if own.weights is not None]), weights[:, :1]
    )


@pytest.mark.parametrize("inputs", [[], torch.zeros(0, 2), iter(())])
def test_no_inputs_give_no_results(inputs):
    assert list(tp.stream(countdown(), inputs, width=3)) == []


def test_one_input_gives_one_result():
    assert taken(tp.stream(countdown(), numbers(4), width=256)) == [4]


def test_a_batch_without_examples_keeps_its_place():
    pieces = [numbers(3, 5), numbers(), numbers(1)]
    results = list(tp.stream(countdown(), pieces, width=2, batches=True))
    assert [ponder.steps.flatten().tolist() for _, ponder in results] == [[3, 5], [], [1]]


@pytest.mark.parametrize("ordered", [True, False])
def test_an_error_of_the_inputs_comes_after_all_results_before_it(ordered):
    def inputs():
        yield from numbers(9, 2, 3)
        raise OSError("the disk is gone")

    results = tp.stream(countdown(), inputs(), width=2, ordered=ordered)
    seen = [next(results) for _ in range(3)]
    assert sorted(int(each[-1].steps) for each in seen) == [2, 3, 9]
    with pytest.raises(OSError, match="the disk is gone"):
        next(results)


def test_an_input_of_another_shape_is_an_error_of_the_inputs():
    results = tp.stream(countdown(), [*numbers(5, 3), torch.zeros(3)], width=2)
    assert taken([next(results), next(results)]) == [5, 3]
    with pytest.raises(ValueError, match="expected all inputs to be like the first"):
        next(results)


def test_inputs_are_taken_as_rows_become_free_and_results_come_first():
    asked = []

    def inputs():
        for n in itertools.count():
            asked.append(n)
            yield numbers(1 + n % 3)[0]

    results = tp.stream(countdown(), inputs(), width=4)
    assert asked == []
    for n in range(50):
        _, ponder = next(results)
        assert int(ponder.steps) == 1 + n % 3
        assert len(asked) <= n + 1 + 2 * 4 * 3  # under way, and finished before their turn
    results.close()
    before = len(asked)
    gc.collect()
    assert len(asked) == before


def test_none_says_that_there_is_nothing_yet_and_those_under_way_go_on():
    def inputs():
        yield numbers(2)[0]
        for _ in range(2):
            yield None
        assert len(seen) == 1  # it is out before the next is given
        yield numbers(7)[0]
        yield None
        yield numbers(1)[0]

    seen = []
    for _, ponder in tp.stream(countdown(), inputs(), width=2):
        seen.append(int(ponder.steps))
    assert seen == [2, 7, 1]


def test_a_straggler_bounds_what_is_taken_ahead_of_it():
    most = 0

    def inputs():
        nonlocal most
        for n in range(200):
            most = max(most, n - done)
            yield numbers(100 if n == 0 else 1)[0]

    done = 0
    for _, ponder in tp.stream(countdown(100), inputs(), width=4, ahead=10):
        assert int(ponder.steps) == (1 if done else 100)
        done += 1
    assert done == 200
    assert most <= 10 + 4 + 4


def test_no_more_tensors_are_alive_later_than_sooner():
    block, alive = countdown(), []

    def inputs():
        for n in range(400):
            yield numbers(1 + n % 9)[0]

    for index, _ in enumerate(tp.stream(block, inputs(), width=8)):
        if index in (100, 390):
            gc.collect()
            alive.append(sum(type(each) is torch.Tensor for each in gc.get_objects()))
    assert alive[1] <= alive[0] + 60


def test_ending_early_leaves_nothing_behind():
    block = learned()
    held = weakref.ref(block)
    keys = set(vars(block))
    for _ in tp.stream(block, itertools.repeat(vectors(1)[0]), width=3):
        break
    gc.collect()
    assert set(vars(block)) == keys
    u = vectors(5)
    with torch.no_grad():
        assert_same(tp.stream(block, u, width=3), *block(u))
    del block
    gc.collect()
    assert held() is None


def test_two_streams_of_a_block_do_not_disturb_each_other():
    block = countdown()
    pairs = zip(
        tp.stream(block, numbers(*range(1, 13)), width=3),
        tp.stream(block, numbers(*range(12, 0, -1)), width=4),
        strict=True,
    )
    both = [(int(a[1].steps), int(b[1].steps)) for a, b in pairs]
    assert both == [(n, 13 - n) for n in range(1, 13)]


def test_the_inputs_stay_as_they_were_even_where_a_step_returns_what_it_is_given():
    block = tp.AdaptiveBlock(lambda u: u, lambda u: u[:, :1], max_steps=3, mode="thresholded")
    batches = [torch.randn(4, 2) for _ in range(6)]
    before = [batch.clone() for batch in batches]
    for (output, _), batch in zip(tp.stream(block, batches, width=4, batches=True), before, strict=True):
        assert torch.equal(output, batch)
    assert all(map(torch.equal, batches, before))


def test_a_table_that_a_step_returns_is_not_written_to():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(3, 2))

        def forward(self, u):
            return self.table if len(u) == 3 else u.clone()

    step = Table()
    block = tp.AdaptiveBlock(step, lambda u: u[:, :1], max_steps=2, mode="thresholded")
    list(tp.stream(block, torch.randn(9, 2), width=3))
    assert torch.equal(step.get_buffer("table"), torch.ones(3, 2))


def test_the_batch_narrows_while_it_drains():
    widths = []

    def step(u):
        widths.append(len(u))
        return u + torch.tensor([-1.0, 1.0])

    block = tp.AdaptiveBlock(step, lambda u: 0.5 - u[:, :1], max_steps=9, mode="thresholded")
    list(tp.stream(block, numbers(1, 2, 3, 4, 1, 1), width=4))
    # 1 2 3 4 | 1 for the one that halted | 1 for the two that halted | and no more
    assert widths == [4, 4, 3, 1]


def test_a_compiled_step_has_a_batch_of_one_width_until_it_drains(monkeypatch):
    widths = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)

    def step(u):
        widths.append(len(u))
        return u + torch.tensor([-1.0, 1.0])

    block = tp.AdaptiveBlock(step, lambda u: 0.5 - u[:, :1], max_steps=9, mode="thresholded")
    results = tp.stream(block, numbers(9, 9, 9, 2, 9, 9, 2, 3, 8), width=4, compile=True)
    assert taken(results) == [9, 9, 9, 2, 9, 9, 2, 3, 8]
    # the fourth takes two steps, the fifth starts then; after 12 steps two are left, with nothing to come
    assert widths == [4] * 12 + [2] * 6 + [1]


@pytest.mark.slow
@pytest.mark.parametrize("criterion", [False, True])
def test_a_compiled_stream_returns_what_the_block_does_and_compiles_once(criterion):
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    block = learned()
    if criterion:
        block.halting[0] = tp.criteria.LatentChange()
    u = vectors(90)
    for thresholds in (tp.Thresholds(0.1), tp.Thresholds(-0.5)):
        with torch.no_grad():
            output, ponder = block(u, thresholds=thresholds)
        assert_same(tp.stream(block, u, width=8, thresholds=thresholds, compile=True), output, ponder)
    assert counters["stats"]["unique_graphs"] == 1


def test_inference_mode_around_some_of_the_results_does_no_harm():
    block, u = learned(), vectors(20)
    with torch.no_grad():
        output, ponder = block(u)
    results = tp.stream(block, u, width=3)
    with torch.inference_mode():
        some = [next(results) for _ in range(5)]
    assert_same([*some, *results], output, ponder)


def test_gradients_stay_on_for_the_caller():
    for output, _ in tp.stream(learned(), vectors(5), width=2):
        assert torch.is_grad_enabled()
        assert not output.requires_grad


def test_a_block_of_a_single_step_has_results_too():
    block = tp.AdaptiveBlock(nn.Tanh(), [], max_steps=1)
    u = torch.randn(5, 3)
    results = list(tp.stream(block, u, width=2))
    assert torch.equal(torch.stack([output for output, _ in results]), u.tanh())
    assert taken(results) == [1] * 5


def test_a_looped_network_embeds_and_reads_out_each_example():
    torch.manual_seed(0)
    net = tp.nn.Looped(nn.Embedding(3, 8), tp.nn.AttentionUpdate(8, 2), nn.Linear(8, 2), max_steps=6).eval()
    nn.init.normal_(net.get_parameter("block.halting.0.linear.weight"), 0, 2)
    tokens = torch.randint(3, (30, 5))
    with torch.no_grad():
        _, ponder = net(tokens, exits=True)
        options: dict[str, Any] = {"thresholds": tp.Thresholds(float(ponder.exits.logits[:-1].quantile(0.8)))}
        output, ponder = net(tokens, **options)
    assert len(ponder.steps.unique()) > 1
    assert_same(tp.stream(net, tokens, width=4, **options), output, ponder)
    pieces = list(tp.stream(net, tokens.split(8), width=5, batches=True, **options))
    assert torch.allclose(torch.cat([each for each, _ in pieces]), output, atol=1e-5)


@pytest.mark.parametrize(
    ("block", "options", "message"),
    [
        (tp.AdaptiveBlock([nn.Tanh()] * 3, nn.Linear(2, 1)), {}, "one step that all iterations share, got a"),
        (tp.AdaptiveBlock(nn.Tanh(), [nn.Linear(2, 1)] * 2, max_steps=3), {}, "one head that all iterations"),
        (countdown(), {"mode": "discrete"}, "halt for good and that draws nothing, got Discrete"),
        (countdown(), {"mode": "relaxed"}, "halt for good and that draws nothing, got Relaxed"),
        (countdown(), {"width": 0}, "expected width of at least 1|width"),
        (countdown(), {"max_steps": 0}, "max_steps"),
    ],
)
def test_what_cannot_be_streamed_is_refused_at_once(block, options, message):
    with pytest.raises(ValueError, match=message):
        tp.stream(block, numbers(1), **options)


def test_a_network_without_a_loop_is_refused():
    with pytest.raises(TypeError, match="expected an AdaptiveBlock or a Looped to stream, got a Linear"):
        tp.stream(nn.Linear(2, 2), numbers(1))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ([{"u": numbers(1)[0], "mode": "act"}], {}, "expected mode as an argument of the stream"),
        (
            [(numbers(1, 2), torch.zeros(3, 2))],
            {"batches": True},
            "expected tensors of 2 examples in a batch",
        ),
        ([3], {"batches": True}, "expected batches, tensors whose first dimension is the batch"),
        (numbers(4), {"limit": lambda item: 21}, "expected a limit of 1 to 20 steps"),
        ([numbers(4, 4)], {"batches": True, "limit": lambda item: torch.tensor([1])}, "each of 2 examples"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_in_a_line(inputs, options, message):
    with pytest.raises(ValueError, match=message) as error:
        list(tp.stream(countdown(), inputs, **options))
    assert "\n" not in str(error.value)
