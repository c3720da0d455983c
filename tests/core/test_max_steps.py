"""A run of a block may have more steps than it was made with, or fewer."""

import pytest
import torch
from torch import nn

import torchpact as tp


def counting(max_steps, head, **options):
    return tp.AdaptiveBlock(lambda u: u + 1, head, max_steps=max_steps, **options)


def fires_at(value):
    return lambda u: u - value + 0.5


@pytest.mark.parametrize(("asked", "taken"), [(1, 1), (3, 3), (10, 8), (100, 8)])
def test_a_run_takes_as_many_steps_as_it_needs_up_to_its_own_maximum(asked, taken):
    block = counting(5, fires_at(8), mode="thresholded")
    output, ponder = block(torch.zeros(2, 1), max_steps=asked)
    assert output.tolist() == [[taken]] * 2
    assert ponder.steps.tolist() == [[taken]] * 2
    assert len(ponder.probs) == asked
    assert ponder.probs[-1].tolist() == [[1.0]] * 2
    assert block.max_steps == 5


@pytest.mark.parametrize("mode", ["relaxed", "discrete", "act", "thresholded"])
@pytest.mark.parametrize("count", [2, 4, 9])
def test_it_is_the_run_of_a_block_that_was_made_with_as_many_steps(mode, count):
    step, head = nn.Linear(3, 3), nn.Linear(3, 1)
    given = tp.AdaptiveBlock(step, head, max_steps=4, mode=mode)
    made = tp.AdaptiveBlock(step, head, max_steps=count, mode=mode)
    u = torch.randn(6, 3)
    torch.manual_seed(0)
    output, ponder = given(u, max_steps=count)
    torch.manual_seed(0)
    expected, own = made(u)
    assert torch.equal(output, expected)
    assert torch.equal(ponder.probs, own.probs)
    assert torch.equal(ponder.cost, own.cost)


@pytest.mark.parametrize(
    ("thresholds", "count", "taken"),
    [
        (tp.Thresholds(5.0), 100, 6),
        (tp.Thresholds("never"), 30, 30),
        (tp.Thresholds([["never", "never", 6.0, 9.0]]), 100, 10),  # the last goes on
        (tp.Thresholds([["never", "never", 6.0, "never"]]), 100, 100),
        (tp.Thresholds([[0.5, 9.0, 9.0, 9.0]]), 2, 1),  # the first count
    ],
)
def test_thresholds_of_single_heads_are_cut_or_the_last_goes_on(thresholds, count, taken):
    block = counting(5, lambda u: u, mode="thresholded")
    zeros = torch.zeros(1, 1)
    assert int(block(zeros, max_steps=count, thresholds=thresholds)[1].steps) == taken
    with tp.use_thresholds(block, thresholds):
        assert int(block(zeros, max_steps=count)[1].steps) == taken


def test_a_block_of_one_step_may_take_more_with_a_threshold_for_all():
    block = counting(1, lambda u: u, mode="thresholded")
    assert int(block(torch.zeros(1, 1), max_steps=9, thresholds=tp.Thresholds(3.5))[1].steps) == 4


def test_a_list_of_steps_takes_fewer_and_not_more():
    layers = [nn.Linear(2, 2) for _ in range(3)]
    block = tp.AdaptiveBlock(layers, nn.Linear(2, 1), mode="thresholded")
    u = torch.randn(4, 2)
    output, ponder = block(u, max_steps=2, thresholds=tp.Thresholds("never"))
    assert torch.equal(output, layers[1](layers[0](u)))
    assert ponder.steps.flatten().tolist() == [2] * 4
    with pytest.raises(ValueError, match="at most 3, as there is a list of steps, got 4"):
        block(u, max_steps=4)
    heads = tp.AdaptiveBlock(nn.Linear(2, 2), [nn.Linear(2, 1) for _ in range(2)], max_steps=3)
    with pytest.raises(ValueError, match="at most 3, as there is a list of heads, got 5"):
        heads(u, max_steps=5)
    with pytest.raises(ValueError, match="max_steps"):
        block(u, max_steps=0)


class Net(nn.Module):
    def __init__(self, max_steps):
        super().__init__()
        self.block = tp.AdaptiveBlock(nn.Linear(4, 4), nn.Linear(4, 1), max_steps=3, mode="thresholded")
        self.max_steps = max_steps

    def forward(self, x):
        return self.block(x, max_steps=self.max_steps)


@pytest.mark.parametrize("count", [2, 8])
def test_flops_are_those_of_the_steps_that_were_run(count):
    net, x = Net(count).eval(), torch.randn(5, 4)
    tp.use_thresholds(net, tp.Thresholds("never"))
    cost = tp.count_flops(net, x)
    # each step 2·4·4 for an example, each head 2·4, which the last step does not ask
    assert cost.total.tolist() == [count * 32 + (count - 1) * 8] * 5


def test_what_is_deployed_leaves_such_a_block_as_it_is():
    net, x = Net(8).eval(), torch.randn(5, 4)
    tp.use_thresholds(net, tp.Thresholds("never"))
    fast = tp.deploy(net, x)
    assert torch.allclose(fast(x)[0], net(x)[0], atol=1e-6)
    assert any("forward calls it with max_steps" in note for note in fast.report.notes)
