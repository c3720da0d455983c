"""Criteria in networks that are compiled, copied, pickled, checkpointed, or run by rows."""

import copy
import io

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.adapt.networks import BERT, CORE, TORCH, first, runs
from tests.adapt.test_recomputation import gradients, layers_with_checkpoints, same, training_inputs
from tests.core.test_exits import kept
from tests.criteria.cases import CASES, CLASSES, bound_within
from torchpact import criteria


@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[7], CASES[8]], ids=str)
def test_a_compiled_network_asks_its_criteria_without_a_graph_break(case):
    torch.manual_seed(0)
    net = tp.adapt(TORCH.build(), heads=case.make(nn.Linear(16, CLASSES)))
    u = torch.randn(3, 5, 16)
    with torch.no_grad(), tp.collect(net, exits=True) as ponders:
        net(u)
    tp.use_thresholds(net, tp.Thresholds(bound_within(kept(ponders[0]).logits[:-1])))
    torch.compiler.reset()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    with torch.no_grad(), tp.collect(net, exits=True) as ponders:
        output, found = net(u), compiled(u)
    torch.compiler.reset()
    assert ponders[0].steps.unique().numel() > 1
    assert torch.equal(ponders[0].steps, ponders[1].steps)
    torch.testing.assert_close(kept(ponders[1]).logits, kept(ponders[0]).logits)
    torch.testing.assert_close(found, output)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("form", ["names", "modules"])
def test_a_copy_of_a_network_reads_out_by_its_own_modules(how, form):
    net = BERT.build()
    net = tp.adapt(net, heads=criteria.Confidence("cls" if form == "names" else net.cls))
    if how == "deepcopy":
        other = copy.deepcopy(net)
    else:
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    readout = runs(other)[0].heads[0].readout
    own = readout.modules[0] if form == "names" else readout
    assert own is other.cls
    assert own is not net.cls
    inputs = BERT.inputs(3, 5)
    with torch.no_grad(), tp.collect(net, exits=True) as before:
        net(**inputs)
    with torch.no_grad():
        other.cls.predictions.decoder.weight.mul_(3)
    with torch.no_grad(), tp.collect(other, exits=True) as after:
        other(**inputs)
    assert not torch.equal(kept(after[0]).logits[:-1], kept(before[0]).logits[:-1])


@pytest.mark.parametrize("network", CORE, ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[7]], ids=str)
def test_read_outs_that_are_trained_survive_activation_checkpointing(case, network):
    torch.manual_seed(0)
    head, inputs = case.make(nn.Linear(16, CLASSES)), training_inputs(network)
    head.detach = False
    net = tp.adapt(network.build(), heads=head).train()
    plain = gradients(net, lambda: first(net(**inputs)))
    assert any("readout" in name and grad.abs().sum() > 0 for name, grad in plain[2].items())
    layers_with_checkpoints(net)
    same(plain, gradients(net, lambda: first(net(**inputs))))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gated_steps_that_skip_rows_decide_as_densely(case):
    torch.manual_seed(0)
    units = [tp.models.TransformerUnit(16, heads=2, hidden=24) for _ in range(4)]
    net = tp.AdaptiveBlock(units, case.make(nn.Linear(16, CLASSES)), mode="thresholded").eval()
    u = torch.randn(6, 5, 16)
    with torch.no_grad():
        logits = kept(net(u, exits=True)[1]).logits[:-1]
    tp.use_thresholds(net, tp.Thresholds(bound_within(logits)))
    fast = tp.deploy(net, u, engines=["rows"])
    assert fast.report.measurements[0].engine == "rows", fast.explain()
    with torch.no_grad():
        output, ponder = net(u)
        found, deployed = fast(u)
    assert torch.equal(deployed.steps, ponder.steps)
    torch.testing.assert_close(found, output, rtol=1e-4, atol=1e-4)
