"""What recurrent layers tell engines of themselves."""

import pytest
from torch import nn

import torchpact as tp
from torchpact.models import never_halt
from torchpact.specs import LinearHead, NeverHead, Opaque, RecurrentCell, block_spec


@pytest.mark.parametrize(("cell", "kind"), [(nn.LSTMCell, "lstm"), (nn.GRUCell, "gru"), (nn.RNNCell, "rnn")])
def test_a_layer_of_a_cell_of_torch_is_known(cell, kind):
    rnn = tp.AdaptiveRNN(cell(4, 5), 3, mode="thresholded")
    rnn.block.name, rnn.block.price = "reader", 2.0
    spec = block_spec(rnn)
    assert spec.module is rnn
    assert (spec.max_steps, spec.shared, spec.mode) == (3, True, tp.Thresholded())
    assert (spec.label, spec.price, spec.details, spec.reason) == ("reader", 2.0, True, "")
    assert len(set(map(id, spec.steps))) == len(set(map(id, spec.heads))) == 1
    assert len(spec.heads) == 2
    (step, *_), (head, *_) = spec.steps, spec.heads
    assert isinstance(step, RecurrentCell)
    assert (step.cell, step.kind, step.units) == (rnn.cell, kind, 5)
    assert isinstance(head, LinearHead)
    unit = rnn.block.halting[0]
    assert head.module is unit
    assert head.weight is unit.linear.weight
    assert head.bias is unit.linear.bias


def test_a_head_that_never_halts_is_known():
    rnn = tp.AdaptiveRNN(nn.GRUCell(4, 5), 3, halting=never_halt)
    assert all(isinstance(head, NeverHead) for head in block_spec(rnn).heads)
    assert rnn.never_halts
    assert not tp.AdaptiveRNN(nn.GRUCell(4, 5), 3).never_halts


def test_one_step_is_shared_with_itself():
    spec = block_spec(tp.AdaptiveRNN(nn.GRUCell(4, 5), 1))
    assert (spec.max_steps, spec.shared, spec.heads) == (1, True, ())


class Own(nn.LSTMCell):
    """A cell that may do anything."""


def hooked(rnn):
    rnn.cell.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("cell", "change", "reason"),
    [
        (
            nn.RNNCell(4, 5, nonlinearity="relu"),
            None,
            r"or an nn\.RNNCell with tanh, got RNNCell\(4, 5, nonl",
        ),
        (Own(4, 5), None, r"expected an nn\.LSTMCell, .* got Own\(4, 5\)"),
        (nn.GRUCell(4, 5), hooked, "without forward hooks"),
        (
            nn.GRUCell(4, 5),
            lambda rnn: nn.utils.parametrizations.weight_norm(rnn.cell, "weight_hh"),
            "expected an nn.LSTMCell, .* got ParametrizedGRUCell",
        ),
    ],
    ids=["relu", "subclass", "hook", "parametrized"],
)
def test_other_cells_are_opaque_with_a_reason(cell, change, reason):
    rnn = tp.AdaptiveRNN(cell, 3)
    if change is not None:
        change(rnn)
    step = block_spec(rnn).steps[0]
    assert isinstance(step, Opaque)
    assert step.module is rnn.block.steps[0]
    with pytest.raises(ValueError, match=reason):
        raise ValueError(step.reason)
    assert "\n" not in step.reason


def test_other_heads_are_opaque():
    plain = tp.AdaptiveRNN(nn.GRUCell(4, 5), 3, halting=nn.Linear(5, 1))
    own = tp.AdaptiveRNN(nn.GRUCell(4, 5), 3, halting=lambda u: never_halt(u).zero_())
    other = tp.AdaptiveRNN(nn.GRUCell(4, 5), 3)
    other.block.halting[0].linear = nn.Sequential(nn.Linear(5, 1))
    for rnn in (plain, own, other):
        assert all(isinstance(head, Opaque) for head in block_spec(rnn).heads)
    assert "expected a halting unit with an nn.Linear, got Sequential" in block_spec(other).reason
