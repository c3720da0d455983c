"""Steps that heed the mask, and those that compute where it is open only."""

import copy

import pytest
import torch
from torch import nn

import torchpact as tp
from torchpact.specs import dense_execution


class Counting(nn.Module):
    """An MLP that remembers how many positions it was given."""

    def __init__(self, size, convolves=False):
        super().__init__()
        layer = (lambda a, b: nn.Conv2d(a, b, 1)) if convolves else nn.Linear
        self.layers = nn.Sequential(layer(size, 3 * size), nn.Tanh(), layer(3 * size, size))
        self.size, self.seen = size, []

    def forward(self, x):
        self.seen.append(x.numel() // self.size)
        return self.layers(x)


def units(features=-1, **options):
    torch.manual_seed(0)
    part = Counting(6, convolves=features == 1)
    return tp.Residual(part, by_position=True, features=features, **options), tp.Residual(copy.deepcopy(part))


SHAPES = [((5, 6), -1), ((2, 7, 6), -1), ((2, 3, 4, 6), -1), ((2, 6, 5, 3), 1), ((1, 6, 1, 1), 1)]


@pytest.mark.parametrize(("shape", "features"), SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_outputs_and_gradients_are_those_of_the_masked_step(shape, features, share):
    rows, masked = units(features)
    positions = [1 if dim == features % len(shape) else size for dim, size in enumerate(shape)]
    u = torch.randn(shape, requires_grad=True)
    gate = torch.rand(positions)
    gate = torch.where(gate < share, gate + 0.1, 0.0).requires_grad_()
    results = []
    for unit in (rows, masked):
        output = unit(u, gate=gate)
        asked = [u, *unit.parameters(), *([gate] if share == 1 else [])]
        results.append([output, *torch.autograd.grad(output.square().sum(), asked)])
    for got, expected in zip(*results, strict=True):
        assert got.shape == expected.shape
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert rows.function.seen == [int((gate > 0).sum())]


@pytest.mark.parametrize("mode", ["relaxed", "discrete", "thresholded", "act"])
def test_a_block_trains_as_with_masked_steps(mode):
    rows, masked = units()
    torch.manual_seed(1)
    head, u = nn.Linear(6, 1), torch.randn(4, 9, 6)
    nn.init.normal_(head.weight, 0, 3)  # sure of itself, so that relaxed masks are clipped
    results = []
    for unit in (rows, masked):
        own = copy.deepcopy(head)
        block = tp.AdaptiveBlock(unit, own, max_steps=6, mode=mode)
        torch.manual_seed(2)
        output, ponder = block(u)
        tp.map_loss(output.square().mean((1, 2)), ponder, tau=0.1).backward()
        results.append([output, ponder.cost, *(p.grad for p in block.parameters())])
    for got, expected in zip(*results, strict=True):
        assert torch.allclose(got, expected, rtol=1e-3, atol=1e-5)
    assert rows.function.seen[0] == 36  # the first iteration has no gate
    assert rows.function.seen[-1] < 36, "nobody halted: the comparison is empty"
    assert set(masked.function.seen) == {36}


def test_maps_keep_their_layout_and_gates_that_are_no_number_show():
    rows, masked = units(features=1)
    u, gate = torch.randn(2, 6, 5, 3), torch.rand(2, 1, 5, 3).round()
    assert rows(u, gate=gate).stride() == masked(u, gate=gate).stride()
    last = u.contiguous(memory_format=torch.channels_last)
    assert rows(last, gate=gate).stride() == last.stride()
    gate[0, 0, 0, 0] = torch.nan
    assert torch.equal(rows(u, gate=gate).isnan(), masked(u, gate=gate).isnan())


def test_a_decision_for_the_example_opens_all_of_its_positions():
    rows, masked = units()
    u, gate = torch.randn(3, 5, 6), torch.tensor([1.0, 0.0, 0.5]).view(3, 1, 1)
    assert torch.allclose(rows(u, gate=gate), masked(u, gate=gate), atol=1e-6)
    assert rows.function.seen == [10]


def test_half_precision_and_autocast_give_what_masked_steps_give():
    rows, masked = units()
    u, gate = torch.randn(2, 7, 6), torch.rand(2, 7, 1).round()
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = rows(u, gate=gate), masked(u, gate=gate)
    assert got.dtype == expected.dtype == torch.float32
    assert torch.allclose(got, expected, atol=2e-2)
    got, expected = (each.bfloat16()(u.bfloat16(), gate=gate.bfloat16()) for each in (rows, masked))
    assert got.dtype == expected.dtype == torch.bfloat16
    assert torch.allclose(got.float(), expected.float(), atol=5e-2)


def test_where_the_host_may_not_look_everything_is_computed():
    rows, masked = units()
    u, gate = torch.randn(3, 7, 6), torch.rand(3, 7, 1).round()
    got = torch.vmap(lambda u, gate: rows(u, gate=gate))(u, gate)
    assert torch.allclose(got, masked(u, gate=gate), atol=1e-6)
    compiled = torch.compile(rows, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(u, gate=gate), masked(u, gate=gate), atol=1e-6)


def test_a_context_is_handed_on():
    class Shifted(nn.Module):
        def forward(self, u, shift):
            return torch.tanh(u + shift)

    u, gate, shift = torch.randn(2, 5, 6), torch.rand(2, 5, 1).round(), torch.randn(2, 5, 6)
    rows, masked = tp.Residual(Shifted(), by_position=True), tp.Residual(Shifted())
    assert torch.equal(rows(u, shift, gate=gate), masked(u, shift, gate=gate))

    assert torch.equal(rows(u, gate=gate, shift=shift), masked(u, shift, gate=gate))


@pytest.mark.parametrize(("shape", "features"), SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_dense_execution_is_the_same_in_value_and_in_every_gradient(shape, features, seed):
    unit, _ = units(features)
    torch.manual_seed(seed)
    u = torch.randn(shape, requires_grad=True)
    gate = torch.rand([1 if dim == features % len(shape) else size for dim, size in enumerate(shape)])
    gate = (gate * (torch.rand_like(gate) < seed / 3)).requires_grad_()

    def run():
        output = unit(u, gate=gate)
        asked = [u, gate, *unit.parameters()]
        found = torch.autograd.grad(output.square().sum(), asked, materialize_grads=True)
        return [output, found[0], found[1].masked_fill(gate == 0, 0.0), *found[2:]]

    got = run()
    with dense_execution():
        expected = run()
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert unit.function.seen == [int((gate > 0).sum()), gate.numel()]


def test_a_gate_that_does_not_fit_is_refused_by_dense_execution_too():
    step = tp.Residual(nn.Tanh(), by_position=True)
    message = r"^expected a gate of one value along dim -1, got gates of \(2, 5, 6\)"
    with dense_execution(), pytest.raises(ValueError, match=message):
        step(torch.randn(2, 5, 6), gate=torch.ones(2, 5, 6))


def test_flops_are_charged_for_the_share_that_is_active():
    rows, _ = units()
    head = nn.Linear(6, 1)
    nn.init.normal_(head.weight, 0, 3)
    block = tp.AdaptiveBlock(rows, head, max_steps=5, mode="thresholded")
    u = torch.randn(3, 8, 6)
    with torch.no_grad():
        _, ponder = block(u)
    steps = ponder.steps.flatten(1)
    expected = steps.sum(1) * 2 * 2 * 6 * 18 + steps.clamp(max=4).sum(1) * 2 * 6
    assert steps.unique().numel() > 1
    assert tp.count_flops(block, u).total.tolist() == expected.tolist()


class Layer(nn.Module):
    """Positions look at each other, then think for themselves."""

    gated = True

    def __init__(self, by_position):
        super().__init__()
        torch.manual_seed(0)
        self.look = nn.MultiheadAttention(6, 2, batch_first=True)
        self.think = tp.Residual(Counting(6), by_position=by_position)

    def forward(self, u, gate=None):
        seen, _ = self.look(u, u, u, need_weights=False)
        return self.think(u + (seen if gate is None else seen * gate), gate=gate)


@torch.no_grad()
def test_a_part_of_a_step_may_be_skipped_where_the_rest_is_not():
    blocks, layers = [], [Layer(by_position) for by_position in (True, False)]
    for layer in layers:
        torch.manual_seed(1)
        head = nn.Linear(6, 1)
        nn.init.normal_(head.weight)
        blocks.append(tp.AdaptiveBlock(layer, head, max_steps=5, mode="thresholded").eval())
    u = torch.randn(3, 8, 6)
    (output, ponder), (expected, reference) = (block(u) for block in blocks)
    assert torch.equal(ponder.steps, reference.steps)
    assert torch.allclose(output, expected, atol=1e-5)
    ran = ponder.active.flatten(1).sum(1).tolist()
    assert layers[0].think.function.seen == [n for n in ran if n]
    assert 0 < ran[1] < 24
    deployed, taken = tp.deploy(blocks[0], u)(u)
    assert torch.equal(taken.steps, reference.steps)
    assert torch.allclose(deployed, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "gate", "message"),
    [
        (nn.Tanh(), (2, 5, 6), r"^expected a gate of one value along dim -1, got gates of \(2, 5, 6\) for a"),
        (
            nn.Linear(6, 3),
            (2, 5, 1),
            r"^expected a function that keeps the shape of a position, got \(9, 1, 3\)",
        ),
    ],
)
def test_what_does_not_fit_is_said_in_a_line(function, gate, message):
    gates = torch.ones(gate)
    gates[0, 0] = 0
    with pytest.raises(ValueError, match=message):
        tp.Residual(function, by_position=True)(torch.randn(2, 5, 6), gate=gates)
