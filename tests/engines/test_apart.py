"""Blocks of any steps, from which examples or positions leave."""

from typing import Any

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.engines.networks import relative
from tests.engines.strangers import Attends, Rotate, agree
from torchpact.core.call_args import CallArgs
from torchpact.engines import Unsupported
from torchpact.engines.generic.compact import CompactRunner
from torchpact.engines.generic.independence import check_independence

pytestmark = pytest.mark.usefixtures("no_patience")


def checked(block, u, *context):
    """Whether positions leave, rather than examples, once steps are seen to be independent."""
    return check_independence(block, u, CallArgs(context))


@torch.no_grad()
def test_any_block_deploys_by_itself_with_its_context(fastest):
    fastest("compact")
    torch.manual_seed(0)
    block = tp.AdaptiveBlock(Rotate(6), nn.Linear(6, 1), max_steps=5, mode="thresholded")
    u, shift = torch.randn(9, 6), torch.randn(9, 6)
    fast = tp.deploy(block, (u, shift))
    assert fast.report.measurements[0].engine == "compact"
    (output, ponder), (expected, reference) = fast(u[:4], shift[:4]), block(u[:4], shift[:4])
    assert relative(output, expected) < 1e-6
    assert torch.equal(ponder.steps, reference.steps)


@pytest.mark.parametrize("mode", ["thresholded", "act"])
@pytest.mark.parametrize("shape", [(3, 5, 6), (2, 3, 4, 6), (4, 1, 6)])
@torch.no_grad()
def test_positions_leave_where_steps_look_at_one_at_a_time(shape, mode):
    torch.manual_seed(0)
    step = Rotate(6)
    block = tp.AdaptiveBlock(step, nn.Linear(6, 1), max_steps=5, mode=mode)
    u, shift, table = torch.randn(shape), torch.randn(*shape[:-1], 1), torch.randn(6)

    def shifted(u, own, pair):
        return step(u, own + pair[0])

    shared = tp.AdaptiveBlock(shifted, block.halting[0], max_steps=5, mode=mode)
    for one, context in ((block, ()), (block, (shift,)), (shared, (shift, (table,)))):
        compact = CompactRunner(one, checked(one, u, *context), (u, CallArgs(context)))
        assert compact.positions == (torch.Size(shape[1:-1]).numel() > 1)
        (output, ponder), (expected, reference) = compact(u, CallArgs(context)), one(u, *context)
        assert isinstance(output, torch.Tensor)
        assert output.shape == expected.shape
        assert relative(output, expected) < 1e-5
        assert [x.shape for x in ponder[:4]] == [x.shape for x in reference[:4]]
        for got, wanted in zip(ponder[:4], reference[:4], strict=True):
            assert relative(got, wanted) < 1e-5


@torch.no_grad()
def test_a_table_that_examples_share_stays_whole_even_if_as_many_come_later(fastest):
    fastest("compact")
    torch.manual_seed(0)
    rotate = Rotate(6)

    def step(u, table, own):
        return rotate(u, table.sum(0) * own)

    block = tp.AdaptiveBlock(step, nn.Linear(6, 1), max_steps=6, mode="thresholded")
    u, table, owns = torch.randn(9, 6), torch.randn(4, 6), torch.randn(9, 1)
    fast = tp.deploy(block, (u, table, owns))
    assert fast.report.measurements[0].engine == "compact"
    for n in (9, 4, 5):
        (output, ponder), (expected, reference) = (each(u[:n], table, owns[:n]) for each in (fast, block))
        assert len(reference.steps.unique()) > 1
        assert torch.equal(ponder.steps, reference.steps)
        assert relative(output, expected) < 1e-5


def mixing(u):
    return torch.tanh(u - u.mean(0))


def attending(u):
    return u.softmax(-1) @ u.mT @ u


def fixed(u):
    return u.view(4, 6) + 1


@pytest.mark.parametrize(
    ("step", "head", "shape", "reason"),
    [
        (mixing, nn.Linear(6, 1), (4, 6), "expected steps and heads that treat examples independently"),
        (
            torch.tanh,
            lambda u: u.mean(0, True).mean(1, True).expand(len(u), 1),
            (4, 6),
            "treat examples independently",
        ),
        (fixed, nn.Linear(6, 1), (4, 6), "expected steps that can run fewer examples, got RuntimeError"),
        (torch.tanh, nn.Linear(6, 1), (1, 6), "expected two examples"),
        (lambda u: u + u.mean(1, True), nn.Linear(6, 1), (4, 5, 6), "expected steps .*"),
        (torch.tanh, lambda u: u[:, :1], (4, 5, 6), r"expected a decision an example, .* got \(4, 1, 6\)"),
    ],
    ids=["mixing", "mixing heads", "sizes", "single", "attending", "elsewhere"],
)
def test_steps_that_mix_examples_run_as_they_are(step, head, shape, reason):
    torch.manual_seed(0)
    block = tp.AdaptiveBlock(step, head, max_steps=4, mode="thresholded")
    u = torch.randn(shape)
    fast = tp.deploy(block, u)
    assert [each.engine for each in fast.report.measurements] == ["dense", "dense"]
    with pytest.raises(Unsupported, match=reason):
        checked(block, u)
    with torch.no_grad():
        (output, ponder), (expected, reference) = fast(u), block(u)
    assert torch.equal(output, expected)
    assert torch.equal(ponder.steps, reference.steps)


W = nn.init.orthogonal_(torch.empty(5, 5))


def paired(u):
    clock, state = u[:, :1], u[:, 1:]
    return torch.cat([clock + 1, (state + state.roll(len(u) // 2, 0)) @ W / 2], 1)


def loud(u):
    """One feature is large, and the others are mixed."""
    return torch.cat([u[:, :1] + 2e4, u[:, 1:] + 0.3 * u[:, 1:].mean(0)], 1)


@pytest.mark.parametrize(
    ("step", "u"),
    [
        (paired, torch.randn(8, 6)),
        (loud, torch.randn(8, 6)),
        (mixing, torch.ones(8, 6)),
        (Attends(), torch.zeros(4, 7, 6)),
        (Attends(), torch.randn(4, 7, 6)),
        (lambda u: u if len(u) > 1 else u.squeeze(), torch.randn(8, 6)),
    ],
    ids=["pairs", "scales", "alike", "attention of zeros", "attention", "a single row"],
)
def test_steps_that_seem_to_treat_examples_one_by_one_are_found_out(step, u):
    block = tp.AdaptiveBlock(step, lambda u: u[..., :1], max_steps=3, mode="thresholded")
    with pytest.raises(Unsupported):
        checked(block, u)


def test_a_row_that_all_share_is_not_taken_for_the_first_examples_own():
    block = tp.AdaptiveBlock(lambda u, m: u + m[0], nn.Linear(6, 1), max_steps=3, mode="thresholded")
    u, memory = torch.randn(9, 6), torch.randn(9, 6)
    with pytest.raises(Unsupported, match="treat examples independently"):
        checked(block, u, memory)
    context = CallArgs((nn.Parameter(memory),))
    assert not check_independence(block, u, context)
    assert CompactRunner(block, False, (u, context)).per_example == ((False,), {})


def shares(u, context):
    return 1.1 * u + context.mean(0)


def masks(u, mask):
    return 1.1 * u * mask / mask.float().mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("step", "u", "context"),
    [
        (shares, torch.randn(8, 6), torch.zeros(8, 6)),
        (masks, torch.randn(4, 7, 6), torch.ones(4, 7, 1)),
        (masks, torch.randn(4, 7, 6), torch.ones(4, 7, 1, dtype=torch.bool)),
    ],
    ids=["zeros", "mask", "boolean mask"],
)
def test_a_context_that_tells_nothing_does_not_hide_what_is_shared(step, u, context):
    block = tp.AdaptiveBlock(step, lambda u: u[..., :1], max_steps=3, mode="thresholded")
    with pytest.raises(Unsupported, match="independently"):
        checked(block, u, context)


@torch.no_grad()
def test_contexts_may_be_lists_and_dicts(fastest):
    fastest("compact")
    torch.manual_seed(0)
    rotate = Rotate(6)

    def step(u, given):
        own, table = given["own"], given["list"][0]
        return rotate(u, own + table.sum(0))

    block = tp.AdaptiveBlock(step, nn.Linear(6, 1), max_steps=6, mode="thresholded")
    u = torch.randn(9, 6)
    given: dict[str, Any] = {"own": torch.randn(9, 6), "list": [torch.randn(4, 6)]}
    fast = tp.deploy(block, (u, given))
    assert fast.report.measurements[0].engine == "compact"
    for inputs in (
        (u, given),
        (u[:4], {"own": given["own"][:4], "list": given["list"]}),
        (u, given | {"own": torch.randn(1, 6)}),
    ):
        (output, ponder), (expected, reference) = fast(*inputs), block(*inputs)
        assert torch.equal(ponder.steps, reference.steps)
        assert relative(output, expected) < 1e-5


@torch.no_grad()
def test_steps_may_differ_in_precision():
    steps = [nn.Identity(), Rotate(6).bfloat16(), Rotate(6).bfloat16()]
    torch.manual_seed(0)
    first = tp.AdaptiveBlock(
        [steps[0], lambda u: steps[1](u.bfloat16()), lambda u: steps[2](u.bfloat16())],
        lambda u: u[:, :1].float(),
        mode="thresholded",
    )
    u = torch.randn(20, 6)
    (output, ponder), (expected, reference) = CompactRunner(first)(u), first(u)
    assert len(reference.steps.unique()) > 1
    assert torch.equal(ponder.steps, reference.steps)
    assert relative(output, expected) < 1e-2


class KnowsTheFirst(nn.Module):
    gated = True

    def __init__(self):
        super().__init__()
        self.first, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, u, gate=None):
        return self.first(u) if gate is None else u + gate * self.other(u)


@torch.no_grad()
def test_steps_are_told_the_gate_when_others_have_left():
    torch.manual_seed(0)
    block = tp.AdaptiveBlock(KnowsTheFirst(), nn.Linear(6, 1), max_steps=6, mode="thresholded")
    u = torch.randn(20, 6)
    (output, ponder), (expected, reference) = CompactRunner(block)(u), block(u)
    assert len(reference.steps.unique()) > 1
    assert torch.equal(ponder.steps, reference.steps)
    assert relative(output, expected) < 1e-6


@torch.no_grad()
def test_calls_of_another_kind_than_the_examples_run_as_they_are(fastest):
    fastest("compact")
    torch.manual_seed(0)
    block = tp.AdaptiveBlock(Rotate(6), nn.Linear(6, 1), max_steps=5, mode="thresholded")
    x, shift = torch.randn(4, 5, 6), torch.randn(4, 5, 6)
    for example in (x[:, :1], (x, shift[:1]), (x, shift), x[:, 0], x, (x[:1], shift[:1])):
        fast = tp.deploy(block, example)
        for inputs in ((x,), (x, shift), (x, shift[:, :1]), (x[:, 0],), (x[:2, :3],), (x, 0.5)):
            (output, ponder), (expected, reference) = fast(*inputs), block(*inputs)
            assert relative(output, expected) < 1e-5
            assert torch.equal(ponder.steps, reference.steps)


@torch.no_grad()
def test_a_block_may_be_called_with_a_context_and_without(fastest):
    fastest("compact")

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = tp.AdaptiveBlock(Rotate(6), nn.Linear(6, 1), max_steps=5, mode="thresholded")

        def forward(self, u, shift):
            u, first = self.block(u)
            u, second = self.block(u, shift)
            return {"logits": u, "ponders": [first, second]}

    net, u = Twice().eval(), torch.randn(7, 6)
    assert agree(tp.deploy(net, (u, u)), net, u, u)


@torch.no_grad()
def test_states_of_tuples_deploy(fastest):
    fastest("compact")
    cell = nn.LSTMCell(3, 5)

    class Counts(nn.Module):
        """A state of two tensors and a count."""

        def __init__(self):
            super().__init__()
            self.cell = cell

        def forward(self, u):
            h, c = self.cell(torch.tanh(u[0][:, :3]), u[:2])
            return h, c, u[2] + 1

    block = tp.AdaptiveBlock(Counts(), lambda u: u[0].sum(1, True), max_steps=4, mode="thresholded")
    u = torch.randn(9, 5), torch.randn(9, 5), torch.zeros(9, 1, dtype=torch.long)
    fast = tp.deploy(block, (u,))
    assert fast.report.measurements[0].engine == "compact"
    (output, ponder), (expected, reference) = fast(u), block(u)
    assert torch.equal(ponder.steps, reference.steps)
    assert all(relative(one, other) < 1e-5 for one, other in zip(output, expected, strict=True))


def test_steps_may_blow_up_where_nobody_goes():
    """All steps run to see whether they treat examples independently, those too that no example reaches."""
    block = tp.AdaptiveBlock(
        lambda u: 1e20 * u, lambda u: u[:, :1].abs() - 1, max_steps=6, mode="thresholded"
    )
    assert not checked(block, torch.randn(6, 3))
