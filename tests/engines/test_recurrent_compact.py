"""Batch compaction in recurrent layers against the loop of AdaptiveRNN: results, draws, what is computed."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import torchpact as tp
from tests.models.test_rnn import CELLS, LENGTHS, TwoSpeeds, assert_same, batch, make
from torchpact.core.call_args import CallArgs
from torchpact.engines.base import Unsupported
from torchpact.engines.recurrent.compact import CompactRecurrent
from torchpact.models import never_halt
from torchpact.specs import block_spec

ENGINE = CompactRecurrent()
EARLY = [tp.Thresholded(), tp.Discrete(), tp.ACT()]


def compacted(rnn, x, *args, **named):
    """Return a runner of a layer, and what it makes of a call."""
    example = CallArgs((x, *args), named)
    assert ENGINE.supports(block_spec(rnn), example) is None
    runner = ENGINE.build(block_spec(rnn), example)
    return runner, lambda: runner(x, CallArgs(args, named))


@settings(max_examples=60)
@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from([-60.0, -2.0, 0.0, 2.0, 60.0]),
    st.sampled_from(CELLS),
    st.sampled_from(["discrete", "thresholded", "act"]),
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
)
def test_compaction_changes_nothing(max_steps, seed, bias, cell, mode, lengths):
    rnn = make(cell, max_steps=max_steps, seed=seed, bias=bias, mode=mode)
    x = torch.randn(4, len(lengths), 3, dtype=torch.double)
    _, run = compacted(rnn, x, lengths=lengths)
    torch.manual_seed(seed)
    compact = run()
    torch.manual_seed(seed)
    with torch.no_grad():
        dense = rnn(x, lengths=lengths)
    assert_same(compact, dense)


@pytest.mark.parametrize("mode", EARLY, ids=str)
def test_the_cell_and_the_head_see_active_examples_only(mode):
    rnn = make(mode=mode, max_steps=8, bias=-1.0)
    rows, asked = [], []
    rnn.cell.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    rnn.block.halting[0].register_forward_pre_hook(lambda _, args: asked.append(len(args[0][0])))
    _, run = compacted(rnn, batch(batch=40))
    ponder = run()[2]
    assert sum(rows) == ponder.steps.sum()
    assert sum(asked) == (ponder.steps - (ponder.steps == 8).long()).sum()
    assert ponder.steps.unique().numel() > 3


@pytest.mark.parametrize("mode", EARLY, ids=str)
def test_padding_is_not_computed(mode):
    rnn = make(mode=mode, batch_first=True)
    rows: list[int] = []
    rnn.cell.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    x = batch().transpose(0, 1).clone()
    x[torch.arange(6) >= torch.tensor(LENGTHS).unsqueeze(1)] = torch.nan
    _, run = compacted(rnn, x, lengths=torch.tensor(LENGTHS))
    output, final, ponder = run()
    assert all(part.isfinite().all() for part in (output, *final))
    assert sum(rows) == ponder.steps.sum()


@pytest.mark.parametrize("mode", EARLY, ids=str)
def test_packed_sequences_with_a_state_are_read_too(mode):
    rnn = make(nn.GRUCell, mode=mode)
    packed = pack_padded_sequence(batch(), LENGTHS, enforce_sorted=False)
    state = torch.randn(5, 5, dtype=torch.double)
    found = []
    _, run = compacted(rnn, packed, state)
    for call in (run, lambda: rnn(packed, state)):
        torch.manual_seed(3)
        with torch.no_grad():
            output, *rest = call()
        assert output.unsorted_indices.tolist() == packed.unsorted_indices.tolist()  # type: ignore[union-attr]
        found.append((output.data, *rest))
    assert_same(*found)


@pytest.mark.parametrize("mode", EARLY, ids=str)
def test_any_cell_will_do(mode):
    torch.manual_seed(0)
    rnn: Any = tp.AdaptiveRNN(TwoSpeeds(), max_steps=5, mode=mode, halting_bias=0.0)
    nn.init.normal_(rnn.cell.slow.weight, std=2.0)
    nn.init.normal_(rnn.cell.fast.weight, std=2.0)
    nn.init.normal_(rnn.block.halting[0].linear.weight, std=2.0)
    x = torch.randn(4, 30, 2)
    _, run = compacted(rnn, x, lengths=[2, 4, 1] * 10)
    torch.manual_seed(1)
    compact = run()
    torch.manual_seed(1)
    with torch.no_grad():
        assert_same(compact, rnn(x, lengths=[2, 4, 1] * 10))
    assert type(compact[1]).__name__ == "Pair"
    assert len(compact[2].steps.unique()) > 3


def test_draws_do_not_depend_on_what_has_halted():
    drawn = []
    for bias in (-60.0, 0.0, 60.0):
        generator = torch.Generator().manual_seed(4)
        _, run = compacted(make(bias=bias, mode=tp.Discrete(generator=generator)), batch(), lengths=LENGTHS)
        run()
        drawn.append(torch.rand(3, generator=generator))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("bounds", [(0.3, 0.3, 0.3), (0.7, -torch.inf, 0.0), (torch.inf, 0.2, -0.4)])
def test_thresholds_of_a_run(bounds):
    rnn, x = make(mode="thresholded", bias=-1.0), batch(batch=30)
    runner, _ = compacted(rnn, x)
    with torch.no_grad():
        expected = rnn(x, thresholds=tp.Thresholds([bounds]))
    assert_same(runner(x, bounds=bounds), expected)
    assert_same(runner(x, CallArgs((), {"thresholds": tp.Thresholds([bounds])}), bounds=(9.0,) * 3), expected)
    assert len(expected[2].steps.unique()) > 1
    with torch.no_grad():
        assert not torch.equal(expected[2].steps, rnn(x)[2].steps)


def test_modes_of_a_call():
    rnn, x = make(mode="thresholded"), batch()
    runner, _ = compacted(rnn, x)
    assert runner.accepts(x, CallArgs((), {"mode": None}))
    with torch.no_grad():
        assert_same(runner(x, CallArgs((), {"mode": "act"})), rnn(x, mode="act"))
    assert not runner.accepts(x, CallArgs((), {"mode": "relaxed"}))
    with pytest.raises(Unsupported, match=r"^expected a mode in which examples are done early, got Relaxed"):
        runner(x, CallArgs((), {"mode": "relaxed"}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_decision(dtype):
    torch.manual_seed(0)
    rnn = tp.AdaptiveRNN(nn.LSTMCell(4, 5), max_steps=4, mode="act")
    x = torch.randn(3, 20, 3)
    _, run = compacted(rnn, x)
    with torch.autocast("cpu", dtype=dtype), torch.no_grad():
        assert_same(run(), rnn(x))


@pytest.mark.parametrize(
    ("rnn", "named", "reason"),
    [
        (make(mode="relaxed"), {}, "expected a mode in which examples are done early, got Relaxed"),
        (make(mode="act", halting=never_halt), {}, "expected a head that may halt, got never_halt"),
        (make(mode="act"), {"mode": "relaxed"}, "expected a mode in which examples are done early"),
    ],
)
def test_what_gains_nothing_is_refused(rnn, named, reason):
    found = ENGINE.supports(block_spec(rnn), CallArgs((batch(),), named))
    assert found is not None
    assert found.startswith(reason)
    with pytest.raises(Unsupported, match=f"^{reason}"):
        ENGINE.build(block_spec(rnn), CallArgs((batch(),), named))


def test_layers_that_are_watched_or_none_are_refused():
    rnn = make(mode="act")
    spec = block_spec(rnn)
    assert ENGINE.supports(block_spec(rnn.block), CallArgs((batch(),))) == (
        "expected an AdaptiveRNN, got AdaptiveBlock"
    )
    assert ENGINE.supports(spec, CallArgs()) == "expected an example with the input of the layer, got none"
    assert ENGINE.supports(spec, CallArgs((), {"input": batch()})) is None
    rnn.register_forward_hook(lambda *_: None)
    assert ENGINE.supports(spec, CallArgs((batch(),))) == (
        "expected a layer without hooks or a forward of its own, got one with"
    )


def test_arguments_that_the_layer_has_not_are_an_error():
    rnn = make(mode="act")
    runner, _ = compacted(rnn, batch())
    with pytest.raises(TypeError, match="length"):
        runner(batch(), CallArgs((), {"length": [1]}))
