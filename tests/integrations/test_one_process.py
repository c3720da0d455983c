"""Adapted networks under activation checkpointing, autocast and torch.compile: the same gradients."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchpact as tp
from tests.integrations.networks import Encoder, apart, batch, bert, gradients


@pytest.fixture
def states():
    return torch.randn(4, 5, 16)


def adapted(reentrant=None):
    return tp.adapt(Encoder(reentrant=reentrant), bias=-1.0)


def of_encoder(net, states, call=None):
    return gradients(net, lambda: (net if call is None else call)(states).square().mean())


def test_checkpointing_of_each_layer_changes_no_gradient(states):
    assert apart(of_encoder(adapted(False), states), of_encoder(adapted(), states)) < 1e-6


def test_checkpointing_of_the_whole_network_changes_no_gradient(states):
    net = adapted()
    whole = of_encoder(net, states, lambda u: checkpoint(net, u, use_reentrant=False))
    assert apart(whole, of_encoder(adapted(), states)) < 1e-6


def test_reentrant_checkpointing_in_which_heads_would_not_learn_is_refused(states):
    net = adapted(True)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        net(states.requires_grad_())
    assert net.eval()(states).shape == states.shape


def test_a_training_pass_without_gradients_is_no_reentrant_checkpointing(states):
    net = adapted()
    with tp.collect(net) as ponders, torch.no_grad():
        net(states)
    assert len(ponders) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_transformers_changes_no_gradient(reentrant):
    """The hooks of layers run outside of what transformers computes again."""
    given = batch()
    net, other = (tp.adapt(bert(), bias=-1.0).train() for _ in range(2))
    wanted = gradients(net, lambda: net(**given).loss)
    other.config.use_cache = False
    other.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert apart(gradients(other, lambda: other(**given).loss), wanted) < 1e-6


def test_autocast_trains_heads_and_halts_in_single_precision(states):
    net = adapted()
    wanted = of_encoder(net, states)
    with torch.autocast("cpu", torch.bfloat16):
        found = of_encoder(net, states)
    assert apart(found, wanted) < 0.05
    with torch.autocast("cpu", torch.bfloat16), tp.collect(net) as ponders:
        net(states)
    assert ponders[0].probs.dtype == ponders[0].cost.dtype == torch.float32


def test_an_alias_of_a_state_carries_the_loop_and_another_tensor_does_not(states):
    """As FSDP2 does, a hook gives every layer another name of its state; or a copy of it."""
    net, plain = adapted(), adapted()
    for layer in net.layers:
        layer.register_forward_pre_hook(lambda _layer, args: (args[0].view_as(args[0]),), prepend=True)
    assert apart(of_encoder(net, states), of_encoder(plain, states)) == 0
    plain.layers[1].register_forward_pre_hook(lambda _layer, args: (args[0].clone(),))
    with pytest.raises(ValueError, match="given another tensor"):
        plain(states)


@pytest.fixture
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_network_has_the_gradients_of_the_original_in_one_graph(states):
    net = adapted()
    wanted = of_encoder(net, states)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for _ in range(3):  # what is collected anew does not compile anew
        with torch.compiler.set_stance("default" if _ == 0 else "fail_on_recompile"):
            assert apart(of_encoder(net, states, compiled), wanted) < 1e-6


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the compiler of torch 2.11 fails on such layers")
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's, of its own look
def test_layers_compiled_one_by_one_halt_as_the_original(states):
    net = adapted()
    wanted = of_encoder(net, states)
    for layer in net.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for stance in ("default", "fail_on_recompile"):
        with torch.compiler.set_stance(stance):
            assert apart(of_encoder(net, states), wanted) < 1e-6


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_network_is_thresholded_in_evaluation(states):
    net = adapted().eval()
    for head in net.torchpact.runs[0].heads:
        nn.init.normal_(head.weight)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    found = []
    for call in (net, compiled):
        with tp.collect(net) as ponders, torch.no_grad():
            output = call(states)
        found.append((output, ponders[0].steps))
    torch.testing.assert_close(found[0], found[1])
    assert found[0][1].float().std() > 0


def test_an_objective_without_a_price_is_refused_where_nothing_was_collected(states):
    net = adapted()
    with tp.collect(net) as ponders:
        pass
    loss = net(states).square().mean()
    with pytest.raises(ValueError, match="call the network within"):
        tp.map_loss(loss, ponders, tau=0.1)
    assert tp.map_loss(loss, [], tau=0.1) == loss  # a network without blocks
