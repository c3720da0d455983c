"""The engine "rows": blocks of gated steps run on active rows only, with the outputs of dense execution."""

from typing import Any

import pytest
import torch
from torch import nn

import torchpact as tp
from torchpact.core.call_args import CallArgs
from torchpact.engines.attention import rows
from torchpact.engines.base import Unsupported
from torchpact.engines.generic.rows import RowsEngine
from torchpact.models import TransformerUnit
from torchpact.specs import block_spec, dense_execution, has_gated_execution, step_spec

ENGINE = RowsEngine()


@pytest.fixture(autouse=True)
def _small_layers_are_picked(monkeypatch):
    monkeypatch.setattr(rows, "LEAST", 0)
    monkeypatch.setattr(rows, "MOST", 1.0)


class Counting(nn.Linear):
    """A layer that counts the rows it is given."""

    rows = 0

    def forward(self, x):
        self.rows += x.numel() // self.in_features
        return super().forward(x)


class Part(nn.Module):
    """A gated step of which a part is by position."""

    gated = True

    def __init__(self):
        super().__init__()
        self.own = nn.Linear(12, 12)
        self.part = tp.Residual(
            nn.Sequential(Counting(12, 20), nn.Tanh(), nn.Linear(20, 12)), by_position=True
        )

    def forward(self, u, gate=None):
        u = u + self.own(u) * (1 if gate is None else gate)
        return self.part(u, gate=gate)


def attention():
    unit = TransformerUnit(12, heads=3, hidden=20)
    unit.linear1 = Counting(12, 20)
    return unit


def positionwise():
    return tp.Residual(nn.Sequential(Counting(12, 20), nn.Tanh(), nn.Linear(20, 12)), by_position=True)


def run(runner, *args) -> Any:
    return runner(*args)


def counted(block):
    found = [module for module in block.modules() if isinstance(module, Counting)]
    total = sum(module.rows for module in found)
    for module in found:
        module.rows = 0
    return total


def block_of(step, mode="thresholded", count=4, seed=0, **options):
    torch.manual_seed(seed)
    head = nn.Linear(12, 1)
    nn.init.normal_(head.weight, 0, 2)
    return tp.AdaptiveBlock([step() for _ in range(count)], head, mode=mode, **options).eval()


@pytest.mark.parametrize("step", [attention, positionwise, Part])
@pytest.mark.parametrize("mode", ["thresholded", "discrete", "act"])
@pytest.mark.parametrize("seed", [0, 1])
@torch.no_grad()
def test_outputs_are_those_of_dense_execution_and_halted_rows_are_not_computed(step, mode, seed):
    block, u = block_of(step, mode, seed=seed, name="middle", price=2.0), torch.randn(5, 9, 12)
    spec = block_spec(block)
    assert ENGINE.supports(spec, CallArgs((u,))) is None
    runner = ENGINE.build(spec, CallArgs((u,)))
    assert ENGINE.host_sync
    assert runner.host_sync
    with dense_execution():
        torch.manual_seed(3)
        expected, reference = block(u)
        everything = counted(block)
        torch.manual_seed(3)
        output, ponder = run(runner, u)  # whatever the caller has set
    assert torch.allclose(output, expected, atol=1e-4)
    assert torch.equal(ponder.steps, reference.steps)
    for name in ("probs", "expected_steps", "cost", "log_prob"):
        got, wanted = getattr(ponder, name), getattr(reference, name)
        assert got is wanted if wanted is None else torch.allclose(got, wanted, atol=1e-4)
    assert (ponder.name, ponder.price) == ("middle", 2.0)
    ran = int(ponder.steps.sum())
    assert 45 < ran < 4 * 45, "the comparison is empty"
    assert everything % 45 == 0
    assert counted(block) == ran


@torch.no_grad()
def test_padding_goes_by_position_or_by_name():
    block, u = block_of(attention), torch.randn(5, 9, 12)
    padding = torch.arange(9) >= torch.tensor([9, 4, 2, 7, 5])[:, None]
    for args, named in (((padding,), {}), ((), {"padding": padding})):
        example = CallArgs((u, *args), named)
        assert ENGINE.supports(block_spec(block), example) is None
        runner = ENGINE.build(block_spec(block), example)
        assert runner.accepts(u, CallArgs(args, named))
        with dense_execution():
            expected, reference = block(u, *args, **named)
        output, ponder = run(runner, u, CallArgs(args, named))
        assert torch.allclose(output, expected, atol=1e-4)
        assert torch.equal(ponder.steps, reference.steps)
    assert not torch.equal(block(u)[0], expected)


@torch.no_grad()
def test_bounds_are_those_of_the_call_or_of_the_block():
    block, u = block_of(attention), torch.randn(5, 9, 12)
    runner = ENGINE.build(block_spec(block), CallArgs((u,)))
    inf = float("inf")
    assert runner(u, bounds=(inf, inf, inf))[1].steps.unique().tolist() == [4]
    assert runner(u, bounds=(-inf, inf, inf))[1].steps.unique().tolist() == [1]
    assert runner(u, bounds=(inf, -inf, inf))[1].steps.unique().tolist() == [2]
    assert torch.equal(runner(u)[1].steps, block(u)[1].steps)
    with tp.use_thresholds(block, tp.Thresholds("never")):
        assert runner(u)[1].steps.unique().tolist() == [4]


def test_there_are_no_gradients_and_details_are_kept_as_the_block_says():
    block, u = block_of(positionwise), torch.randn(5, 9, 12, requires_grad=True)
    output, ponder = run(ENGINE.build(block_spec(block), CallArgs((u,))), u)
    assert not output.requires_grad
    assert not ponder.probs.isnan().any()
    with tp.use_mode(block, "thresholded", details=False):
        output, ponder = run(ENGINE.build(block_spec(block), CallArgs((u,))), u)
    assert ponder.probs.isnan().all()


@torch.no_grad()
def test_one_step_may_be_shared_by_all_iterations():
    torch.manual_seed(1)
    block = tp.AdaptiveBlock(attention(), nn.Linear(12, 1), max_steps=4, mode="thresholded").eval()
    u = torch.randn(3, 6, 12)
    expected, reference = block(u)
    output, ponder = run(ENGINE.build(block_spec(block), CallArgs((u,))), u)
    assert torch.equal(ponder.steps, reference.steps)
    assert torch.allclose(output, expected)


class Own(tp.AdaptiveBlock):
    """It has a forward of its own."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


STATE = torch.zeros(2, 5, 12)


@pytest.mark.parametrize(
    ("block", "inputs", "reason"),
    [
        (
            lambda: block_of(lambda: nn.Linear(12, 12)),
            (STATE,),
            r"^expected gated steps that compute active rows",
        ),
        (
            lambda: block_of(lambda: tp.Residual(nn.Linear(12, 12))),
            (STATE,),
            r"^expected gated steps that compute",
        ),
        (
            lambda: block_of(positionwise, count=1),
            (STATE,),
            r"^expected gated steps that compute active rows",
        ),
        (lambda: block_of(positionwise), (STATE, STATE), r"to be given the state only, got a context$"),
        (
            lambda: block_of(attention, "relaxed"),
            (STATE,),
            r"^expected a mode in which positions halt early, got Rel",
        ),
        (
            lambda: Own([attention(), attention()], nn.Linear(12, 1), mode="thresholded"),
            (STATE,),
            r"^expected the forward of AdaptiveBlock, got one of its own in Own$",
        ),
    ],
)
def test_what_it_cannot_run_is_said_in_a_line(block, inputs, reason):
    spec, example = block_spec(block()), CallArgs(inputs)
    said = ENGINE.supports(spec, example)
    with pytest.raises(Unsupported, match=reason) as raised:
        ENGINE.build(spec, example)
    assert str(raised.value) == said


def test_parts_of_steps_count_and_hooks_do_not_matter():
    assert has_gated_execution(step_spec(attention()))
    assert has_gated_execution(step_spec(Part()))
    unit = attention()
    unit.register_forward_hook(lambda *_: None)
    assert has_gated_execution(step_spec(unit))
    assert not has_gated_execution(step_spec(tp.Residual(nn.Linear(12, 12))))
