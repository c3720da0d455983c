"""Criteria in the halting loop: what they see of an exit, and what they keep for the next."""

from typing import Any

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.adapt.networks import BERT, CORE, randomize, runs, text, torch_encoder
from tests.adapt.test_recomputation import gradients, layers_with_checkpoints, same, training_inputs
from tests.core.blocks import KINDS
from tests.core.test_exits import kept
from torchpact.core.call_args import CallArgs
from torchpact.core.criterion import Criterion, map_memory
from torchpact.core.state import parts


class Recorder(Criterion):
    """Notes what it sees; its memory is the number of exits so far."""

    def __init__(self, needs_context: bool = False) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.needs_context = needs_context

    def forward(self, exit):
        self.seen.append(exit)
        first = parts(exit.state)[0]
        logits = first.new_full((len(first), *[1] * (first.dim() - 1)), -1.0)
        count = torch.zeros(len(first)) if exit.memory is None else exit.memory
        return logits, count + 1


class Moved(Criterion):
    """A learned criterion with a memory that carries gradients: w·|u − before|² summed over exits so far."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.3))
        self.bias = nn.Parameter(torch.tensor(-1.0))

    def forward(self, exit):
        moved = (exit.state - exit.before).square().mean(-1, keepdim=True)
        total = moved if exit.memory is None else exit.memory + moved
        return self.weight * total + self.bias, total


@pytest.mark.parametrize("kind", KINDS)
def test_a_criterion_sees_the_states_around_each_step_and_its_memory(kind):
    block, u = KINDS[kind](4)
    recorder = Recorder()
    own = tp.AdaptiveBlock([*block.steps] * (4 // len(block.steps)), recorder, mode="thresholded")
    _, ponder = own(u, thresholds=tp.Thresholds("never"))
    states = [u]
    for step in own.steps:
        states.append(step(states[-1]))
    assert [exit.index for exit in recorder.seen] == [0, 1, 2]
    for exit in recorder.seen:
        for found, l in ((exit.before, exit.index), (exit.state, exit.index + 1)):
            assert all(torch.equal(*pair) for pair in zip(parts(found), parts(states[l]), strict=True))
        expected = None if not exit.index else torch.full((len(parts(u)[0]),), float(exit.index))
        assert exit.memory is None if expected is None else torch.equal(exit.memory, expected)
    assert ponder.steps.unique().tolist() == [4]


def test_a_criterion_sees_weights_and_the_context_if_it_asks_for_it():
    def step(u, x, *, y):
        return u + x + y

    u, x, y = torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 1)
    weights = torch.tensor([[1.0], [0.0]])
    for needs in (False, True):
        recorder = Recorder(needs)
        tp.AdaptiveBlock(step, recorder, max_steps=3)(u, x, y=y, weights=weights)
        for exit in recorder.seen:
            assert exit.weights is weights
            expected = CallArgs((x,), {"y": y}) if needs else CallArgs()
            assert [a is b for a, b in zip(exit.context.values, expected.values, strict=True)] == [True] * (
                2 * needs
            )


def test_a_memory_is_used_in_the_loop_as_in_a_loop_by_hand():
    criterion, steps = Moved(), [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    block, u = tp.AdaptiveBlock(steps, criterion, mode="relaxed"), torch.randn(3, 5, 4)
    _, ponder = block(u, exits=True)
    total, rows = torch.zeros(3, 5, 1), []
    for step in steps[:-1]:
        before, u = u, step(u)
        total = total + (u - before).square().mean(-1, keepdim=True)
        rows.append(criterion.weight * total + criterion.bias)
    assert torch.equal(kept(ponder).logits[:-1], torch.stack(rows))


def network_with_criteria(case):
    net = tp.adapt(case.build(), heads=lambda layer, width: Moved())
    for run in runs(net):
        for index, head in enumerate(run.heads):
            head.weight.data.fill_(0.5 / (index + 1))
    return net


@pytest.mark.parametrize("case", [case for case in CORE if case.name != "ResNet"], ids=str)
def test_a_memory_survives_activation_checkpointing(case):
    net, inputs = network_with_criteria(case).train(), training_inputs(case)
    plain = gradients(net, lambda: net(**inputs)[0] if case.name != "fallback" else net(**inputs))
    assert any(".heads." in name and grad.abs() > 0 for name, grad in plain[2].items())
    layers_with_checkpoints(net)
    again = gradients(net, lambda: net(**inputs)[0] if case.name != "fallback" else net(**inputs))
    same(plain, again)


def test_criteria_of_an_adapted_network_see_padding_and_the_arguments_of_the_layer():
    net = tp.adapt(BERT.build(), heads=lambda layer, width: Recorder(needs_context=True))
    inputs = text(3, 5)
    with torch.no_grad():
        net(**inputs)
    (run,) = runs(net)
    for index, head in enumerate(run.heads):
        (exit,) = head.seen
        assert exit.index == index
        assert torch.equal(exit.weights.squeeze(2), inputs["attention_mask"].to(exit.weights))
        assert exit.context.values
        assert not any(value is exit.before for value in exit.context.values)


def test_criteria_of_a_network_whose_sequence_is_first_see_the_batch_first():
    """The same weights, sequence and batch exchanged, decide the same."""
    found = []
    for batch_first in (True, False):
        net = tp.adapt(
            torch_encoder(batch_first=batch_first, norm_first=True), heads=lambda layer, width: Moved()
        )
        u = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
        padding = torch.zeros(3, 5, dtype=torch.bool)
        padding[1, 3:] = True
        with tp.collect(net, exits=True) as ponders, torch.no_grad():
            net(u if batch_first else u.transpose(0, 1), src_key_padding_mask=padding)
        found.append((kept(ponders[0]).logits, ponders[0].steps))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_criteria_that_are_not_learned_start_at_the_threshold_never():
    class Always(Criterion):
        learned = False

        def forward(self, exit):
            return exit.state[..., :1] * 0 + 50

    block = tp.AdaptiveBlock(nn.Tanh(), Always(), max_steps=3, mode="thresholded")
    u = torch.zeros(2, 4)
    assert block(u)[1].steps.tolist() == [[3], [3]]
    assert block(u, thresholds=0.5)[1].steps.tolist() == [[1], [1]]
    net = tp.adapt(torch_encoder(), heads=lambda layer, width: Always())
    with tp.collect(net) as ponders, torch.no_grad():
        net(torch.randn(2, 5, 16))
        with tp.use_thresholds(net, 0.5):
            net(torch.randn(2, 5, 16))
    assert [ponder.steps.unique().tolist() for ponder in ponders] == [[4], [1]]
    learned = randomize(tp.adapt(torch_encoder()))
    assert runs(learned)[0].bounds is None


def test_logits_of_a_wrong_shape_are_refused():
    class Wrong(Criterion):
        def forward(self, exit):
            return exit.state.mean(), None

    with pytest.raises(ValueError, match=r"^halting head 1 gave \(\), expected logits that broadcast"):
        tp.AdaptiveBlock(nn.Tanh(), Wrong(), max_steps=3)(torch.zeros(2, 4))


def test_memories_may_be_nested():
    memory = (torch.arange(3), (None, torch.arange(4)))
    found = map_memory(lambda x: x[1:], memory)
    assert isinstance(found, tuple)
    assert torch.equal(found[0], torch.tensor([1, 2]))  # type: ignore[arg-type]
