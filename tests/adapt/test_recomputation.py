"""Activation checkpointing, threads, nested collects, errors on the way, memory, compilation and export."""

import copy
import functools
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchpact as tp
from tests.adapt.networks import BERT, CORE, LLAMA, UNFAMILIAR, VIT, first, randomize, runs, torch_encoder

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
core = pytest.mark.parametrize("case", CORE, ids=str)
hugging_face = pytest.mark.parametrize("case", [BERT, LLAMA, VIT], ids=str)


def training_inputs(case):
    return {**case.inputs(3, 5), **({"use_cache": False} if case.decoder else {})}


def gradients(net, call, before_backward=lambda: None, in_thread=False):
    """Return the output, the ponders, and the gradients of all parameters."""
    net.zero_grad()
    torch.manual_seed(7)
    with tp.collect(net) as ponders:
        output = call()
    loss = output.double().square().mean() + ponders.cost
    before_backward()
    if in_thread:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    else:
        loss.backward()
    grads = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    return output.detach(), list(ponders), grads


def same(one, other):
    output, ponders, grads = one
    again, others, again_grads = other
    assert torch.equal(output, again)
    assert len(ponders) == len(others)
    assert all(torch.equal(a.probs, b.probs) for a, b in zip(ponders, others, strict=True))
    assert grads.keys() == again_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(again_grads[name], grad, rtol=1e-5, atol=1e-6, msg=name)


def layers_with_checkpoints(net, reentrant=False):
    """Let each layer of the runs compute its activations again in backward, its hooks included."""
    for layer in {layer for run in runs(net) for layer in run.layers}:
        kind = type(layer)

        def again(self, *args, kind=kind, **kwargs):
            call = functools.partial(kind.__call__, self, **kwargs)
            return checkpoint(call, *args, use_reentrant=reentrant)

        layer.__class__ = type("Again", (kind,), {"__call__": again})


@core
@pytest.mark.parametrize("in_thread", [False, True], ids=["same thread", "another thread"])
def test_checkpoints_around_layers_change_no_gradient_and_count_no_ponder_twice(case, in_thread):
    net, inputs = randomize(tp.adapt(case.build()), scale=0.2).train(), training_inputs(case)
    plain = gradients(net, lambda: first(net(**inputs)))
    layers_with_checkpoints(net)

    def later():
        tp.use_mode(net, "thresholded")  # a recomputation uses the mode of the call

    again = gradients(net, lambda: first(net(**inputs)), later, in_thread)
    same(plain, again)


@core
def test_a_checkpoint_around_the_network_changes_no_gradient(case):
    net, inputs = randomize(tp.adapt(case.build()), scale=0.2).train(), training_inputs(case)
    plain = gradients(net, lambda: first(net(**inputs)))
    again = gradients(net, lambda: first(checkpoint(net, use_reentrant=False, **inputs)))
    same(plain, again)


def test_a_checkpoint_around_the_encoder_sees_the_padding_that_the_network_was_given():
    net, inputs = randomize(tp.adapt(BERT.build(), per="example"), scale=0.2).train(), training_inputs(BERT)
    plain = gradients(net, lambda: first(net(**inputs)))
    encoder = next(module for module in net.modules() if type(module).__name__ == "BertEncoder")
    kind = type(encoder)

    def again(self, *args, **kwargs):
        return checkpoint(functools.partial(kind.__call__, self), *args, use_reentrant=False, **kwargs)

    encoder.__class__ = type("Again", (kind,), {"__call__": again})
    same(plain, gradients(net, lambda: first(net(**inputs))))


@hugging_face
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_transformers_changes_no_gradient(case, reentrant):
    net, inputs = randomize(tp.adapt(case.build()), scale=0.2).train(), training_inputs(case)
    plain = gradients(net, lambda: first(net(**inputs)))
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    again = gradients(net, lambda: first(net(**inputs)))
    same(plain, again)


def test_reentrant_checkpoints_with_hooks_within_are_refused():
    net = tp.adapt(torch_encoder()).train()
    layers_with_checkpoints(net, reentrant=True)
    u = torch.randn(2, 5, 16, requires_grad=True)
    with pytest.raises(ValueError, match=r"their heads would not learn\. .*pass use_reentrant=False$"):
        net(u)
    net.torchpact.requires_grad_(False)
    output = net(u)
    with pytest.raises(ValueError, match=r"pass use_reentrant=False to activation checkpointing$"):
        output.mean().backward()


@core
def test_every_thread_collects_its_own_calls(case):
    net, counts = tp.adapt(case.build()), {}

    def work(batch):
        with tp.collect(net) as ponders, torch.no_grad():
            for _ in range(3):
                net(**case.inputs(batch, 5))
        counts[batch] = [len(ponder.steps) for ponder in ponders]

    threads = [threading.Thread(target=work, args=(batch,)) for batch in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == {batch: [batch] * 3 for batch in (1, 2, 3, 4)}


def test_nested_collects_each_see_what_happens_within():
    net, inputs = tp.adapt(BERT.build()), BERT.inputs(2, 5)
    with torch.no_grad(), tp.collect(net) as outer:
        net(**inputs)
        with tp.collect(net) as inner, tp.collect(net) as innermost:
            net(**inputs)
        net(**inputs)
    assert (len(outer), len(inner), len(innermost)) == (3, 1, 1)


class Interruption(BaseException):
    """Not an Exception: torch calls no hooks after it."""


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, Interruption])
def test_errors_on_the_way_leave_nothing_behind(kind):
    net, inputs = tp.adapt(BERT.build()), BERT.inputs(4, 5)
    with torch.no_grad():
        expected = first(net(**inputs))
        layer = net.bert.encoder.layer[2]
        handle = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(kind("stop")))
        with pytest.raises(kind), tp.collect(net) as ponders:
            net(**inputs)
        handle.remove()
        assert not ponders
        with tp.collect(net) as ponders:
            assert torch.equal(
                first(net(input_ids=inputs["input_ids"])), first(BERT.build()(inputs["input_ids"]))
            )
        assert ponders[0].weights is None  # the mask of the call before is gone
        assert torch.equal(first(net(**inputs)), expected)


def test_a_layer_called_by_itself_is_the_plain_layer():
    net = tp.adapt(torch_encoder())
    tp.use_thresholds(net, tp.Thresholds("always"))
    u, original = torch.randn(2, 5, 16), torch_encoder()
    with torch.no_grad(), tp.collect(net) as ponders:
        net(u)
        assert len(ponders) == 1
        v = w = u
        for layer, same_layer in zip(net.layers, original.layers, strict=True):
            v, w = layer(v), same_layer(w)
    assert len(ponders) == 1
    torch.testing.assert_close(v, w)


@core
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("collecting", [True, False], ids=["collected", "not collected"])
def test_a_call_without_backward_leaves_no_memory_behind(case, train, collecting):
    net, inputs = randomize(tp.adapt(case.build())).train(train), case.inputs(2, 5)
    states = []
    run = runs(net)[0]
    for layer in run.layers:
        layer.register_forward_hook(
            lambda _m, _a, output: states.append(
                weakref.ref(output if isinstance(output, torch.Tensor) else output[0])
            )
        )
    gc.disable()
    try:
        if collecting:
            with tp.collect(net) as ponders:
                output = first(net(**inputs))
            assert ponders.cost > 0
            del ponders
        else:
            output = first(net(**inputs))
        del output
        gc.collect()  # the outputs of transformers are cycles of their own
        assert len(states) == run.max_steps
        assert not any(state() is not None for state in states)
    finally:
        gc.enable()


def test_states_that_a_user_keeps_carry_nothing_into_copies_and_files():
    net, inputs = tp.adapt(BERT.build()), BERT.inputs(2, 5)
    with torch.no_grad():
        states = net(**inputs, output_hidden_states=True).hidden_states
    assert not any(vars(state) for state in states[:-1])
    x = torch.randn(2, 5, 3)
    tp.adapt(UNFAMILIAR.build()).blocks  # noqa: B018
    encoder = tp.adapt(torch_encoder())
    u = torch.randn(2, 5, 16)
    encoder(u)
    for again in (copy.deepcopy(u), pickle.loads(pickle.dumps(u))):
        assert torch.equal(again, u)
        assert all(value is None for value in vars(again).values())
    assert not vars(x)


@pytest.mark.parametrize("case", [BERT, VIT, UNFAMILIAR], ids=str)
def test_export_gives_the_thresholded_network(case):
    net, inputs = randomize(tp.adapt(case.build())), case.inputs(2, 5)
    with torch.no_grad():
        expected = first(net(**inputs))
        program = torch.export.export(net, (), inputs)
        torch.testing.assert_close(first(program.module()(**inputs)), expected)
        other = {name: x.roll(1, 0) for name, x in inputs.items()}
        torch.testing.assert_close(first(program.module()(**other)), first(net(**other)))


@pytest.mark.slow
def test_export_of_a_decoder_gives_the_thresholded_network():
    net, inputs = randomize(tp.adapt(LLAMA.build())), LLAMA.inputs(2, 5)
    inputs["use_cache"] = False
    with torch.no_grad():
        program = torch.export.export(net, (), inputs)
        torch.testing.assert_close(first(program.module()(**inputs)), first(net(**inputs)))


@pytest.mark.parametrize("case", [BERT, UNFAMILIAR], ids=str)
def test_layers_may_be_compiled_one_by_one(case):
    net, inputs = randomize(tp.adapt(case.build())), case.inputs(3, 5)
    with torch.no_grad(), tp.collect(net) as ponders:
        expected = first(net(**inputs))
    torch._dynamo.reset()
    for layer in runs(net)[0].layers:
        layer.compile(backend="eager", fullgraph=True)
    with torch.no_grad(), tp.collect(net) as again:
        torch.testing.assert_close(first(net(**inputs)), expected)
    torch._dynamo.reset()
    assert torch.equal(again[0].steps, ponders[0].steps)


@pytest.mark.parametrize("case", [BERT, UNFAMILIAR], ids=str)
def test_compiled_training_gives_the_gradients_of_eager_training(case):
    net, inputs = randomize(tp.adapt(case.build()), scale=0.2).train(), training_inputs(case)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plain = gradients(net, lambda: first(net(**inputs)))
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    same(plain, gradients(net, lambda: first(compiled(**inputs))))
    torch._dynamo.reset()
