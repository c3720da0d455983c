"""Exits on request: the states and logits after all steps, in one pass; halting after a step of choice."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.adapt.networks import BERT, CORE, LLAMA, TORCH, VIT, first, randomize, runs, torch_encoder
from tests.adapt.test_recomputation import layers_with_checkpoints, training_inputs
from tests.core.blocks import KINDS
from torchpact.core.callables import is_gated
from torchpact.core.exits import exit_thresholds
from torchpact.core.state import parts

L = 4


def kept(ponder: tp.Ponder) -> Any:
    """Return the exits of a ponder, which are there."""
    assert ponder.exits is not None
    return ponder.exits


MODES = {
    "relaxed": lambda: tp.Relaxed(generator=torch.Generator().manual_seed(5)),
    "discrete": lambda: tp.Discrete(generator=torch.Generator().manual_seed(5)),
    "thresholded": tp.Thresholded,
    "act": tp.ACT,
}


def by_hand(block, u, mode):
    """Return states and logits of a loop of four lines."""
    states, logits, remaining = [], [], None
    for index, step in enumerate([*block.steps] * (block.max_steps // len(block.steps))):
        gated = is_gated(step) and remaining is not None
        u = step(u, gate=mode.gate(remaining)) if gated else step(u)
        states.append(u)
        if index + 1 < block.max_steps:
            logits.append(block.halting[min(index, len(block.halting) - 1)](u))
            remaining = torch.ones_like(logits[-1]) if remaining is None else remaining
            _, remaining = mode.halt(remaining, logits[-1])
    return states, torch.stack([*logits, torch.full_like(logits[0], torch.inf)])


@pytest.mark.parametrize("grad", [False, True], ids=["without gradients", "with gradients"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_exits_of_a_block_are_those_of_a_loop_by_hand(kind, mode, grad):
    block, u = KINDS[kind](L)
    with torch.set_grad_enabled(grad):
        states, logits = by_hand(block, u, MODES[mode]())
        output, ponder = block(u, mode=MODES[mode](), exits=True)
        expected, plain = block(u, mode=MODES[mode]())
    assert len(kept(ponder).states) == L
    for found, state in zip(kept(ponder).states, states, strict=True):
        assert all(torch.equal(*pair) for pair in zip(parts(found), parts(state), strict=True))
    assert torch.equal(kept(ponder).logits, logits)
    # and nothing else changes
    assert all(torch.equal(*pair) for pair in zip(parts(output), parts(expected), strict=True))
    assert torch.equal(ponder.steps, plain.steps)
    assert torch.equal(ponder.cost, plain.cost)
    assert plain.exits is None


def test_logits_of_exits_are_in_single_precision_where_states_are_in_half():
    block = KINDS["plain vectors"](L)[0].to(torch.bfloat16)
    exits = kept(block(torch.randn(6, 3, dtype=torch.bfloat16), exits=True)[1])
    assert exits.logits.dtype == torch.float32
    assert exits.states[0].dtype == torch.bfloat16


def test_gradients_reach_steps_and_heads_through_exits():
    block, u = KINDS["plain vectors"](L)
    exits = kept(block(u, mode="relaxed", exits=True)[1])
    loss = sum((l + 1) * state.square().mean() for l, state in enumerate(exits.states))
    (loss + exits.logits[:-1].mean()).backward()
    found = {name: p.grad for name, p in block.named_parameters()}
    block.zero_grad()
    states, logits = by_hand(block, u, tp.Relaxed())
    loss = sum((l + 1) * state.square().mean() for l, state in enumerate(states))
    (loss + logits[:-1].mean()).backward()
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize("case", [BERT, LLAMA, VIT], ids=str)
def test_the_plain_exits_of_an_adapted_network_are_its_hidden_states(case):
    net, inputs = case.build(), case.inputs(3, 5)
    with torch.no_grad():
        hidden = net(**inputs, output_hidden_states=True).hidden_states
    net = randomize(tp.adapt(net))
    with (
        tp.use_mode(net, "thresholded"),
        tp.use_thresholds(net, tp.Thresholds("never")),
        torch.no_grad(),
        tp.collect(net, exits=True) as ponders,
    ):
        net(**inputs)
    states, logits = kept(ponders[0])
    assert len(states) == len(hidden) - 1
    for state, expected in zip(states[:-1], hidden[1:-1], strict=True):  # the last may be normed
        assert torch.equal(state, expected)
    for head, row, state in zip(runs(net)[0].heads, logits, states, strict=False):
        assert torch.equal(row, head(state))
    assert torch.equal(logits[-1], torch.full_like(logits[0], torch.inf))


@pytest.mark.parametrize("mode", ["relaxed", "discrete", "thresholded"])
def test_exits_of_an_adapted_network_are_what_its_layers_are_given_next(mode):
    net, inputs = randomize(tp.adapt(BERT.build())), BERT.inputs(4, 7)
    (run,), given = runs(net), []
    handles = [
        layer.register_forward_pre_hook(lambda _layer, args: given.append(args[0])) for layer in run.layers
    ]
    with tp.use_mode(net, mode), tp.collect(net, exits=True) as ponders, torch.no_grad():
        net(**inputs)
    for handle in handles:
        handle.remove()
    assert ponders[0].steps.unique().numel() > 1
    for state, after in zip(kept(ponders[0]).states, given[1:], strict=False):
        assert torch.equal(state, after)


def test_exits_of_a_network_whose_sequence_is_first_have_the_batch_first():
    net = torch_encoder(batch_first=False, norm_first=True)
    adapted = randomize(tp.adapt(copy.deepcopy(net)))
    u = torch.randn(5, 3, 16)
    with tp.use_thresholds(adapted, tp.Thresholds("never")), tp.collect(adapted, exits=True) as ponders:
        adapted(u)
    states, logits = kept(ponders[0])
    assert logits.shape == (4, 3, 5, 1)
    for layer, state in zip(net.layers, states, strict=True):
        u = layer(u)
        torch.testing.assert_close(state, u.transpose(0, 1))


def _losses(net, inputs, checkpoints):
    """Return the gradients of losses of all exits."""
    net.zero_grad()
    torch.manual_seed(3)
    with tp.collect(net, exits=True) as ponders:
        net(**inputs)
    exits = [kept(ponder) for ponder in ponders]
    if checkpoints:
        tp.use_mode(net, "thresholded")  # a recomputation uses the mode of the call
    loss = sum(
        (l + 1) * s.double().square().mean() for each in exits for l, s in enumerate(each.states)
    ) + sum(each.logits[:-1].double().sigmoid().mean() for each in exits)
    loss.backward()
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return [len(each.states) for each in exits], grads


@pytest.mark.parametrize("case", CORE, ids=str)
def test_activation_checkpointing_changes_no_gradient_of_exits(case):
    net = randomize(tp.adapt(case.build()), scale=0.2).train()
    count, plain = _losses(net, training_inputs(case), checkpoints=False)
    layers_with_checkpoints(net)
    again, grads = _losses(net, training_inputs(case), checkpoints=True)
    assert count == again
    assert plain.keys() == grads.keys()
    for name, grad in plain.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-6, msg=name)


def test_a_block_in_a_checkpoint_hands_out_its_exits_once():
    block, u = KINDS["gated pixels"](L)
    with tp.collect(block, exits=True) as ponders:
        output, _ = torch.utils.checkpoint.checkpoint(block, u, use_reentrant=False)
    loss = output.mean() + sum(state.square().mean() for state in kept(ponders[0]).states)
    loss.backward()
    assert len(ponders) == 1
    assert all(p.grad is not None for p in block.steps.parameters())


def _alive(net, inputs, exits):
    """Return how many states between layers outlive a call."""
    states = []
    handles = [
        layer.register_forward_hook(lambda _layer, _args, out: states.append(weakref.ref(first(out))))
        for layer in runs(net)[0].layers
    ]
    with torch.no_grad(), tp.collect(net, exits=exits) as ponders:
        output = net(**inputs)
    for handle in handles:
        handle.remove()
    del output
    states_kept = kept(ponders[0]).states if exits else ()
    storages = {x.untyped_storage().data_ptr() for x in states_kept}
    return len(ponders), sum(ref() is not None for ref in states), len(storages)


def test_states_are_kept_on_request_only():
    net, inputs = tp.adapt(BERT.build()), BERT.inputs(3, 5)
    assert _alive(net, inputs, exits=False) == (1, 0, 0)
    assert _alive(net, inputs, exits=True)[2] == 4


def test_a_block_keeps_states_on_request_only():
    class Watched(nn.Module):
        def forward(self, u):
            made.append(weakref.ref(v := u + 1))
            return v

    made: list[weakref.ref[torch.Tensor]] = []
    block = tp.AdaptiveBlock([Watched() for _ in range(4)], nn.Linear(3, 1), mode="thresholded")
    never = tp.Thresholds("never")
    with torch.no_grad():
        output, ponder = block(torch.zeros(2, 3), thresholds=never)
        assert [ref() is not None for ref in made] == [False] * 4
        made.clear()
        output, ponder = block(torch.zeros(2, 3), thresholds=never, exits=True)
        assert [ref() is not None for ref in made] == [True] * 4
    del output, ponder
    assert [ref() is not None for ref in made] == [False] * 4


def test_only_the_collector_that_asks_gets_exits_and_every_call_adds_some():
    net, inputs = tp.adapt(BERT.build()), BERT.inputs(3, 5)
    with tp.collect(net) as plain, tp.collect(net, exits=True) as ponders, torch.no_grad():
        net(**inputs)
        net(**BERT.inputs(2, 7))
    assert [ponder.exits is None for ponder in plain] == [True, True]
    assert [kept(ponder).states[0].shape for ponder in ponders] == [(3, 5, 16), (2, 7, 16)]


@pytest.mark.parametrize("grad", [False, True], ids=["without gradients", "with gradients"])
def test_compiled_networks_hand_out_exits(grad):
    net, inputs = tp.adapt(TORCH.build()), {"src": torch.randn(2, 5, 16)}
    tp.use_mode(net, "thresholded")
    net.train(grad)
    torch.compiler.reset()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(grad):
        with tp.collect(net, exits=True) as ponders:
            compiled(**inputs)
        with tp.collect(net, exits=True) as expected:
            net(**inputs)
        with tp.collect(net) as without:
            compiled(**inputs)
    torch.compiler.reset()
    assert without[0].exits is None
    torch.testing.assert_close(kept(ponders[0]).logits, kept(expected[0]).logits)
    for pair in zip(kept(ponders[0]).states, kept(expected[0]).states, strict=True):
        torch.testing.assert_close(*pair)


def test_what_keeps_no_exits_is_refused_in_one_line():
    block, u = KINDS["plain vectors"](3)
    tp.use_mode(block, "thresholded")
    fast = tp.deploy(block, u, engines=["compact"])
    with pytest.raises(ValueError, match=r"^expected the network itself for its exits, got a deployed one"):
        tp.collect(fast, exits=True)
    with pytest.raises(ValueError, match=r"^expected a call without exits"):
        fast(u, exits=True)
    rnn = tp.AdaptiveRNN(nn.GRUCell(3 + 1, 4), max_steps=3)
    with (
        pytest.raises(ValueError, match=r"^expected blocks and layers, which keep exits, got 'block'"),
        tp.collect(rnn, exits=True),
    ):
        rnn(torch.randn(5, 2, 3))


@pytest.mark.parametrize("step", [1, 2, 3, 4])
@pytest.mark.parametrize("case", [BERT, LLAMA], ids=str)
def test_pinned_exits_are_the_network_with_fewer_layers(case, step):
    net, inputs = case.build(), case.inputs(3, 5)
    shorter = copy.deepcopy(net)
    layers = shorter.get_submodule(case.runs[0])
    del layers[step:]
    shorter.config.num_hidden_layers = step
    with torch.no_grad():
        expected = first(shorter(**inputs))
    net = randomize(tp.adapt(net))
    thresholds = exit_thresholds(net, step)
    with tp.use_thresholds(net, thresholds), tp.collect(net) as ponders, torch.no_grad():
        found = first(net(**inputs))
    assert torch.equal(ponders[0].steps, torch.full((3, 5, 1), step))
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real])
    fast = tp.deploy(net, inputs, engines=["attention"])
    with torch.no_grad():
        torch.testing.assert_close(
            first(fast(**inputs, thresholds=thresholds))[real], expected[real], rtol=1e-4, atol=1e-4
        )


def test_pinned_exits_of_blocks_of_several_lengths():
    net = nn.ModuleList([KINDS["plain vectors"](n)[0] for n in (2, 4, 1)])
    thresholds = exit_thresholds(net, 3)
    assert thresholds == tp.Thresholds({"0": ["never"], "1": ["never", "never", "always"], "2": []})
    for wrong in (5, 0):
        with pytest.raises(ValueError, match=r"^expected .*step.*, got "):
            exit_thresholds(net, wrong)
    with pytest.raises(ValueError, match=r"^expected a network with adaptive blocks, got Linear$"):
        exit_thresholds(nn.Linear(2, 2), 1)
