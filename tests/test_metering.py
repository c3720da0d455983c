"""FLOPs of networks of one's own, against sums made by hand or by torch's counter, one example at a time."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import torchpact as tp
from tests.engines.networks import block_of, bottlenecks_of, lively
from torchpact.models import HaltingHead, ResidualUnit


class Thinks(nn.Module):
    """A stem, an adaptive block of separate steps, and a readout."""

    def __init__(self, mode="thresholded"):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.readout = nn.Linear(5, 8), nn.Linear(8, 3)
        widths = [16, 4, 32, 8]
        steps = [nn.Sequential(nn.Linear(8, w), nn.Tanh(), nn.Linear(w, 8)) for w in widths]
        heads = [nn.Sequential(nn.Linear(8, 2 * k), nn.Tanh(), nn.Linear(2 * k, 1)) for k in (1, 2, 3)]
        self.block = tp.AdaptiveBlock(steps, heads, mode=mode)
        for parameter in self.block.parameters():  # so that examples differ
            nn.init.normal_(parameter, 0, 2)
        self.step_prices = [2 * 2 * 8 * w for w in widths]
        self.head_prices = [2 * 8 * 2 * k + 2 * 2 * k for k in (1, 2, 3)]

    def forward(self, x):
        u, ponder = self.block(self.stem(x) * 3)
        return self.readout(u), [ponder]


@pytest.mark.parametrize("mode", ["relaxed", "discrete", "thresholded", "act"])
def test_an_example_pays_for_the_steps_it_ran_and_the_heads_it_asked(mode):
    net, x = Thinks(mode), torch.randn(20, 5)
    torch.manual_seed(1)
    count = tp.count_flops(net, x)
    torch.manual_seed(1)
    with torch.no_grad():
        _, [ponder] = net(x)
    assert ponder.steps.unique().numel() > 1 or mode == "relaxed"
    for example, z in enumerate(ponder.steps.flatten().tolist()):
        expected = sum(net.step_prices[:z]) + sum(net.head_prices[: min(z, 3)])
        assert count.blocks[example].tolist() == [expected]
    assert count.rest == 2 * (5 * 8 + 8 * 3)


def test_one_example_by_itself_costs_what_torch_counts():
    """The block stops when all have, so that a single thresholded example runs what it is charged for."""
    net, x = Thinks().eval(), torch.randn(12, 5)
    totals = []
    for example in x:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            net(example[None])
        totals.append(counter.get_total_flops())
    assert len(set(totals)) > 1
    assert tp.count_flops(net, x).total.tolist() == totals


def test_positions_are_charged_for_their_share():
    torch.manual_seed(0)
    step = nn.Linear(6, 6)
    nn.init.orthogonal_(step.weight)
    block = tp.AdaptiveBlock(step, nn.Linear(6, 1), max_steps=5, mode="thresholded")
    u = torch.randn(4, 7, 3, 6)
    count = tp.count_flops(block, u)
    with torch.no_grad():
        _, ponder = block(u)
    steps = ponder.steps.flatten(1)
    expected = 2 * 36 * steps.sum(1) + 2 * 6 * steps.clamp(max=4).sum(1)
    assert steps.unique().numel() > 2
    assert count.blocks[:, 0].tolist() == expected.tolist()
    assert count.rest == 0


def test_rows_that_a_network_makes_of_an_example_are_its_own():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = tp.AdaptiveBlock(nn.Linear(6, 6), nn.Linear(6, 1), max_steps=5, mode="thresholded")

        def forward(self, x):
            return self.block(x.flatten(0, 1))

    torch.manual_seed(0)
    net, x = Tokens(), torch.randn(4, 7, 6)
    steps = net(x)[1].steps.view(4, 7)
    expected = 2 * 36 * steps.sum(1) + 2 * 6 * steps.clamp(max=4).sum(1)
    assert tp.count_flops(net, x).total.tolist() == expected.tolist()


@pytest.mark.parametrize("make", [block_of, bottlenecks_of])
@pytest.mark.parametrize("stride", [1, 2])
def test_residual_units_cost_their_neighbourhood_in_any_network(make, stride):
    block, u = make(32, 6, 5, 3, stride=stride)

    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.block = nn.Conv2d(u.size(1), u.size(1), 1), block

        def forward(self, x, scale):
            return self.block(self.before(x) * scale)

    net = Mine()
    count = tp.count_flops(net, (u, torch.tensor(1.0)))
    with torch.no_grad():
        output, ponder = net(u, torch.tensor(1.0))
    first, second, *_ = block.steps
    steps = ponder.steps.float()
    near = nn.functional.max_pool2d(steps, 3, stride=1, padding=1)
    assert not torch.equal(near, steps)
    one, *others = [
        2 * getattr(second, f"conv{i}").weight.numel() for i in (1, 2, 3) if hasattr(second, f"conv{i}")
    ]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        first(u[:1])
    expected = (
        counter.get_total_flops() + (near - 1).sum((1, 2, 3)) * one + (steps - 1).sum((1, 2, 3)) * sum(others)
    )
    asked = steps.clamp(max=2)
    expected += asked.sum((1, 2, 3)) * 2 * 9 * 32 + asked.amax((1, 2, 3)) * 2 * 32
    assert count.blocks[:, 0].tolist() == expected.long().tolist()
    assert count.rest == 2 * u.size(1) ** 2 * u[0, 0].numel()
    assert output.shape[2:] == steps.shape[2:]


def test_a_resnet_in_another_network_costs_as_much_as_by_itself():
    class Wrapped(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, images):
            return self.net(images)[0].softmax(1)

    images = torch.randn(3, 3, 16, 16)
    for options in ({}, {"per": "image"}, {"group": 2, "image_size": 16}):
        net = lively(**options)
        assert torch.equal(tp.count_flops(Wrapped(net), images).total, tp.count_flops(net, images).total)


def test_shared_units_are_charged_each_time():
    torch.manual_seed(0)
    block = tp.AdaptiveBlock(
        ResidualUnit(16, 16), HaltingHead(16, bias=0.0), max_steps=4, mode="thresholded"
    ).eval()
    apart = tp.AdaptiveBlock([block.steps[0]] * 4, [block.halting[0]] * 4, mode="thresholded").eval()
    u = torch.randn(2, 16, 6, 6)
    count = tp.count_flops(block, u)
    assert count.total.min() > 36 * 2 * 2 * 9 * 16 * 16  # more than one unit
    assert torch.equal(count.total, tp.count_flops(apart, u).total)


def test_a_block_that_is_called_again_pays_again():
    class Twice(Thinks):
        def forward(self, x):
            u, first = self.block(self.stem(x) * 3)
            u, second = self.block(u)
            return self.readout(u), [first, second]

    net, x = Twice(), torch.randn(6, 5)
    with torch.no_grad():
        _, ponders = net(x)
    expected = [
        sum(sum(net.step_prices[:z]) + sum(net.head_prices[: min(z, 3)]) for z in zs)
        for zs in zip(*(p.steps.flatten().tolist() for p in ponders), strict=True)
    ]
    assert tp.count_flops(net, x).blocks[:, 0].tolist() == expected


@pytest.mark.parametrize("lengths", [None, [7, 2, 4]])
@pytest.mark.parametrize("mode", ["thresholded", "act", "relaxed"])
def test_a_recurrent_layer_pays_for_every_iteration_of_its_time_steps(lengths, mode):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = tp.AdaptiveRNN(nn.GRUCell(8 + 1, 16), 5, batch_first=True, mode=mode, halting_bias=0.0)
            self.readout = nn.Linear(16, 2)

        def forward(self, x, lengths):
            output, _, ponder = self.rnn(x, lengths=lengths)
            return self.readout(output), [ponder]

    torch.manual_seed(0)
    net, x = Reads(), torch.randn(3, 7, 8)
    lengths = None if lengths is None else torch.tensor(lengths)
    torch.manual_seed(1)
    count = tp.count_flops(net, (x, lengths))
    torch.manual_seed(1)
    with torch.no_grad():
        _, [ponder] = net(x, lengths)
    steps = ponder.steps
    expected = steps.sum(1) * 2 * 3 * 16 * (9 + 16) + steps.clamp(max=4).sum(1) * 2 * 16
    assert count.blocks[:, 0].tolist() == expected.tolist()
    assert count.rest == 7 * 2 * 16 * 2


def products(*sizes):
    return sum(2 * a * b * c for a, b, c in sizes)


def test_attention_and_recurrent_layers_are_counted_in_full():
    """Also where torch runs them by kernels of their own, of which its counter knows nothing."""
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    tokens = 5
    linear = products((tokens, 16, 48), (tokens, 16, 16), (tokens, 16, 32), (tokens, 32, 16))
    attention = 2 * products((tokens, 8, tokens), (tokens, tokens, 8))
    assert tp.count_flops(encoder, torch.randn(2, tokens, 16)).total.tolist() == [linear + attention] * 2
    lstm = nn.LSTM(8, 16, batch_first=True)
    assert tp.count_flops(lstm, torch.randn(2, 5, 8)).total.tolist() == [5 * 2 * 4 * 16 * (8 + 16)] * 2
    block = tp.AdaptiveBlock(encoder, nn.Linear(16, 1), max_steps=3, mode=tp.Relaxed(temperature=1e3))
    heads = 2 * products((tokens, 16, 1))
    count = tp.count_flops(block, torch.randn(2, tokens, 16))
    assert count.total.tolist() == [3 * (linear + attention) + heads] * 2
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mkldnn.enabled


class Compares(nn.Module):
    def forward(self, x, table):
        return x @ table.T


@pytest.mark.parametrize("batch", [3, 5])
def test_a_table_is_counted_whole_even_if_it_has_as_many_rows_as_there_are_examples(batch):
    count = tp.count_flops(Compares(), (torch.randn(batch, 8), torch.randn(5, 8)))
    assert count.total.tolist() == [2 * 8 * 5] * batch


@pytest.mark.parametrize(("time", "batch"), [(4, 4), (2, 8), (7, 3)])
def test_a_recurrent_layer_may_have_time_first(time, batch):
    torch.manual_seed(0)
    rnn = tp.AdaptiveRNN(nn.GRUCell(3 + 1, 6), 3, mode="thresholded", halting_bias=0.0)
    x = torch.randn(time, batch, 3)
    with torch.no_grad():
        steps = rnn(x)[2].steps
    expected = steps.sum(1) * 2 * 3 * 6 * (4 + 6) + steps.clamp(max=2).sum(1) * 2 * 6
    assert tp.count_flops(rnn, x).total.tolist() == expected.tolist()


def test_inputs_may_lie_in_tuples_lists_and_dicts():
    class Pair(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, given):
            values = given.values() if isinstance(given, dict) else given
            return sum(self.linear(x) for x in values)

    x = torch.randn(3, 4)
    for given in ([x, x], ({"a": x, "b": x},), Pair(x, x), ((x, x),), {"given": [x, x]}):
        assert tp.count_flops(Takes(), given).total.tolist() == [2 * 2 * 4 * 4] * 3


def test_states_of_tuples_are_counted():
    block = tp.AdaptiveBlock(
        lambda u: (u[0] @ torch.ones(4, 4), u[1]), lambda u: u[0][:, :1], max_steps=3, mode="thresholded"
    )
    u = torch.randn(6, 4), torch.randn(6, 2)
    with torch.no_grad():
        steps = block(u)[1].steps.flatten()
    assert tp.count_flops(block, (u,)).total.tolist() == (2 * 16 * steps).tolist()


def test_counting_leaves_modes_hooks_and_training_as_they_were():
    net = Thinks("relaxed").train()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()]
    tp.count_flops(net, torch.randn(2, 5))
    assert net.training
    assert net.block.mode == tp.Relaxed()
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()]


def test_none_are_counted_as_none():
    count = tp.count_flops(Thinks(), torch.zeros(0, 5))
    assert count.blocks.shape == (0, 1)
    assert count.rest == 2 * (5 * 8 + 8 * 3)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        inner = tp.AdaptiveBlock(nn.Linear(4, 4), nn.Linear(4, 1), max_steps=2)
        self.block = tp.AdaptiveBlock([Inner(inner), nn.Tanh()], nn.Linear(4, 1))

    def forward(self, x):
        return self.block(x)


class Inner(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.inner = block

    def forward(self, u):
        return self.inner(u)[0]


class Repeats(nn.Module):
    """Once more, if anyone has halted at once."""

    def __init__(self):
        super().__init__()
        self.block = tp.AdaptiveBlock(nn.Linear(4, 4), lambda u: u[:, :1], max_steps=2, mode="thresholded")

    def forward(self, x):
        x, ponder = self.block(x)
        return self.block(x) if (ponder.steps == 1).any() else (x, ponder)


class Joins(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = tp.AdaptiveBlock(nn.Linear(4, 4), nn.Linear(4, 1), max_steps=2)

    def forward(self, x):
        return self.block(torch.cat([x, x[:1]]))


@pytest.mark.parametrize(
    ("net", "inputs", "error", "message"),
    [
        (
            Nested(),
            torch.randn(2, 4),
            TypeError,
            r"^expected adaptive blocks beside each other, got the block 'block\.steps\.0\.inner' within the "
            "block 'block'$",
        ),
        (
            Repeats(),
            torch.randn(30, 4),
            ValueError,
            "^expected the block 'block' to be called as often whatever halts, got 2 calls, and 1 where ",
        ),
        (
            Joins(),
            torch.randn(3, 4),
            ValueError,
            "^expected the block 'block' to decide for 3 examples, the first dimension of .*; got 4$",
        ),
        (Joins(), (2, "a"), TypeError, "^expected tensors whose first dimension is the batch, got int, str$"),
        (Joins(), (), TypeError, "^expected tensors whose first dimension is the batch, got nothing$"),
        (Joins(), torch.tensor(1.0), TypeError, "batch, got one without dimensions$"),
    ],
    ids=["nested", "repeats", "joins", "numbers", "nothing", "scalar"],
)
def test_what_cannot_be_counted_is_said_in_a_line(net, inputs, error, message):
    with pytest.raises(error, match=message):
        tp.count_flops(net, inputs)


@torch.no_grad()
def test_what_is_deployed_is_not_counted_for_its_kernels_do_not_show():
    block, u = block_of(16, 6, 6, 2)
    for deployed in (
        tp.deploy(block, u),
        tp.deploy(Thinks(), torch.randn(2, 5)),
    ):
        with pytest.raises(
            TypeError, match=f"^expected the model itself, got a {type(deployed).__name__}: count"
        ):
            tp.count_flops(nn.Sequential(deployed), u)
