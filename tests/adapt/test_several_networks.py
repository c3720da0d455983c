"""A module that holds several adapted networks: each run has a name of its own, and none is left out."""

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.adapt.networks import BERT, WIDTH, ResidualMLP, first, randomize
from torchpact.core.halting_module import halting_modules
from torchpact.specs.call_capture import adaptive_parts

RUN = "bert.encoder.layer"
NAMES = [f"query.{RUN}", f"document.{RUN}"]


class Towers(nn.Module):
    """As a network for retrieval has them."""

    def __init__(self):
        super().__init__()
        self.query = randomize(tp.adapt(BERT.build()), scale=0.3, seed=3)
        self.document = randomize(tp.adapt(BERT.build()), scale=0.3, seed=4)

    def forward(self, **inputs):
        return first(self.query(**inputs)), first(self.document(**inputs))


@pytest.fixture
def towers():
    return Towers().eval()


@pytest.fixture
def inputs():
    return BERT.inputs(3, 6)


def alone(net, inputs):
    """Return the ponder of one tower, collected by itself."""
    with tp.collect(net) as ponders, torch.no_grad():
        net(**inputs)
    return ponders[0]


def test_both_are_collected_by_name(towers, inputs):
    with tp.collect(towers) as ponders, torch.no_grad():
        towers(**inputs)
    assert [ponder.name for ponder in ponders] == NAMES
    for ponder, net in zip(ponders, (towers.query, towers.document), strict=True):
        assert torch.equal(ponder.steps, alone(net, inputs).steps)
    assert not torch.equal(ponders[0].steps, ponders[1].steps)
    assert ponders.steps == sum(ponders.by_block[name].steps for name in NAMES)


def test_the_price_reaches_the_heads_of_both(towers, inputs):
    with tp.collect(towers.train()) as ponders:
        towers(**inputs)
    tp.map_loss(torch.tensor(0.0), ponders, tau=[1.0, 2.0]).backward()
    for net in (towers.query, towers.document):
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.torchpact.parameters())


def test_thresholds_are_set_by_name(towers, inputs):
    with tp.use_thresholds(towers, tp.Thresholds({NAMES[0]: "always", NAMES[1]: "never"})):
        assert (alone(towers.query, inputs).steps == 1).all()
        assert (alone(towers.document, inputs).steps == 4).all()


def test_the_flops_of_both_are_counted(towers, inputs):
    both = tp.count_flops(towers, inputs)
    each = [tp.count_flops(net, inputs) for net in (towers.query, towers.document)]
    assert torch.equal(both.blocks, torch.cat([count.blocks for count in each], 1))
    assert both.rest == sum(count.rest for count in each)


def test_both_are_deployed(towers, inputs):
    fast = tp.deploy(towers, inputs, engines=["attention"])
    assert [m.engine for m in fast.report.measurements[:2]] == ["attention", "attention"]
    real = inputs["attention_mask"] > 0
    with tp.collect(towers) as before, torch.no_grad():
        expected = towers(**inputs)
    with tp.collect(fast) as ponders:
        output = fast(**inputs)
    for ours, theirs in zip(output, expected, strict=True):
        torch.testing.assert_close(ours[real], theirs[real], rtol=1e-4, atol=1e-4)
    assert [ponder.name for ponder in ponders] == NAMES
    for ponder, other in zip(ponders, before, strict=True):
        assert torch.equal(ponder.steps[real], other.steps[real])
    thresholds = tp.Thresholds({NAMES[0]: "always", NAMES[1]: "never"})
    with tp.collect(fast) as ponders:
        fast(**inputs, thresholds=thresholds)
    assert [ponder.steps[real].float().mean().item() for ponder in ponders] == [1, 4]


def test_names_do_not_depend_on_modules_around(towers, inputs):
    around = nn.ModuleDict({"module": towers})
    assert [*halting_modules(around)] == [*adaptive_parts(around)] == NAMES
    alone = nn.ModuleDict({"module": towers.query})
    assert [*halting_modules(alone)] == [*adaptive_parts(alone)] == [RUN]
    fast = tp.deploy(towers.query, inputs, engines=["attention"])
    assert [*halting_modules(nn.ModuleDict({"a": fast, "b": towers.document}))] == [f"a.{RUN}", f"b.{RUN}"]


def test_plain_blocks_beside_them_keep_their_paths():
    def adapted():
        return tp.adapt(nn.Sequential(*[ResidualMLP(WIDTH) for _ in range(3)]))

    block = tp.AdaptiveBlock(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), max_steps=3)
    net = nn.Sequential(adapted(), block, adapted())
    with tp.collect(net[0]) as ponders:
        net[0](torch.randn(2, 5, WIDTH))
    assert [ponder.name for ponder in ponders] == [""]
    assert [*halting_modules(net)] == ["0", "1", "2"]
