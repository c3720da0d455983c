"""Criteria in deployed networks: the same decisions as densely, fewer questions, and what they cost."""

import math

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.adapt.networks import BERT, LLAMA, first, runs
from tests.core.test_exits import kept
from tests.criteria.cases import CASES, CLASSES, block, bound_within
from torchpact import criteria
from torchpact.core.criterion import Criterion
from torchpact.specs import block_spec

by_case = pytest.mark.parametrize("case", CASES, ids=str)


def decided(net, call):
    """Return the steps and the first output of a call."""
    with tp.collect(net) as ponders, torch.no_grad():
        output = call()
    return ponders[0].steps, first(output)


@pytest.mark.parametrize("shape", [(40, 4), (8, 5, 4)], ids=["examples", "positions"])
@by_case
def test_compaction_decides_as_the_dense_engine_does(case, shape):
    torch.manual_seed(2)
    read = nn.Linear(4, CLASSES)
    net, u = block(case.make(read)).eval(), torch.randn(shape)
    with torch.no_grad():
        _, plain = net(u, exits=True)
    tp.use_thresholds(net, tp.Thresholds(bound_within(kept(plain).logits[:-1])))
    fast = tp.deploy(net, u, engines=["compact"])
    assert fast.report.measurements[0].engine == "compact", fast.explain()
    for given in (u, torch.randn(13, *shape[1:])):
        steps, output = decided(net, lambda given=given: net(given))
        found, deployed = decided(fast, lambda given=given: fast(given))
        assert torch.equal(found, steps)
        torch.testing.assert_close(deployed, output)
    assert steps.unique().numel() > 2


def test_compaction_drops_the_rows_of_context_that_a_criterion_sees():
    class Near(Criterion):
        needs_context = True
        learned = False

        def forward(self, exit):
            (target,) = exit.context.args
            return 1 - (exit.state - target).abs().amax(1, keepdim=True)

    net = tp.AdaptiveBlock(lambda u, x: u + 0.5, Near(), max_steps=6, mode="thresholded")
    u, x = torch.zeros(6, 2), torch.arange(6.0).unsqueeze(1).expand(6, 2)
    tp.use_thresholds(net, 0.5)
    fast = tp.deploy(net, (u, x), engines=["compact"])
    assert fast.report.measurements[0].engine == "compact", fast.explain()
    steps, output = decided(net, lambda: net(u, x))
    found, deployed = decided(fast, lambda: fast(u, x))
    assert torch.equal(found, steps)
    assert torch.equal(deployed, output)
    assert steps.flatten().tolist() == [1, 1, 3, 5, 6, 6]


def test_a_deployed_block_that_is_given_weights_excludes_padding_in_its_criteria():
    read = nn.Linear(4, CLASSES)
    net = tp.AdaptiveBlock([nn.Linear(4, 4) for _ in range(4)], criteria.Confidence(read), mode="thresholded")
    net.eval()
    u, weights = torch.randn(12, 4), (torch.rand(12, 1) < 0.5).float()
    tp.use_thresholds(net, 0.5)
    fast = tp.deploy(net, u, engines=["compact"])
    steps, output = decided(net, lambda: net(u, weights=weights))
    found, deployed = decided(fast, lambda: fast(u, weights=weights))
    assert torch.equal(found, steps)
    assert torch.equal(deployed, output)


def adapted(network, criterion, per, inputs):
    """Return an adapted network with thresholds at which tokens halt after several layers."""
    net = tp.adapt(network.build(), per=per, heads=criterion)
    with tp.collect(net, exits=True) as ponders, torch.no_grad():
        net(**inputs)
    real = inputs["attention_mask"].bool()
    logits = kept(ponders[0]).logits[:-1]
    tp.use_thresholds(net, tp.Thresholds(bound_within(logits[:, real] if per == "token" else logits)))
    return net, real if per == "token" else torch.ones(len(real), 1, dtype=torch.bool)


@pytest.mark.parametrize("per", ["token", "example"])
@by_case
def test_active_tokens_decide_as_in_the_adapted_network(case, per):
    torch.manual_seed(4)
    inputs = BERT.inputs(7, 5 if per == "token" else 2)
    net, where = adapted(BERT, case.make(nn.Linear(16, CLASSES)), per, inputs)
    fast = tp.deploy(net, inputs, engines=["attention"])
    assert fast.report.measurements[0].engine == "attention", fast.explain()
    steps, output = decided(net, lambda: net(**inputs))
    found, deployed = decided(fast, lambda: fast(**inputs))
    assert torch.equal(found[where], steps[where])
    assert steps[where].unique().numel() > 1
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(deployed[real], output[real], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("criterion", ["Unchanged", "Divergence", "Confidence"])
def test_a_decoder_generates_the_same_with_criteria(criterion):
    net = LLAMA.build()
    inputs = LLAMA.inputs(3, 4)
    net, where = adapted(LLAMA, getattr(criteria, criterion)(["model.norm", "lm_head"]), "token", inputs)
    fast = tp.deploy(net, inputs, engines=["attention"])
    assert fast.report.measurements[0].engine == "attention", fast.explain()
    steps, _ = decided(net, lambda: net(**inputs))
    found, _ = decided(fast, lambda: fast(**inputs))
    assert torch.equal(found[where], steps[where])
    settings = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(fast.generate(**inputs, **settings), net.generate(**inputs, **settings))


class Counting(nn.Module):
    """A read-out that notes how many rows it is asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, CLASSES)
        self.rows: list[int] = []

    def forward(self, u):
        self.rows.append(u[..., 0].numel())
        return self.linear(u)

    def __deepcopy__(self, memo: object) -> "Counting":
        return self


@pytest.mark.parametrize("kind", ["Confidence", "Unchanged", "Divergence"])
def test_halted_and_padding_tokens_are_not_read_out(kind):
    torch.manual_seed(4)
    read, inputs = Counting(), BERT.inputs(7, 5)
    net, real = adapted(BERT, getattr(criteria, kind)(read), "token", inputs)
    fast = tp.deploy(net, inputs, engines=["attention"])
    read.rows.clear()
    steps, _ = decided(fast, lambda: fast(**inputs))
    ran = [int((steps.squeeze(2)[real] > index).sum()) for index in range(3)]
    assert read.rows == [rows for rows in ran if rows]
    assert ran[0] == int(real.sum())
    assert ran[2] < ran[0]


@pytest.mark.parametrize("kind", ["Confidence", "Unchanged", "Divergence"])
def test_halted_examples_are_not_read_out(kind):
    torch.manual_seed(4)
    read, inputs = Counting(), BERT.inputs(7, 2)
    net, _ = adapted(BERT, getattr(criteria, kind)(read), "example", inputs)
    fast = tp.deploy(net, inputs, engines=["attention"])
    read.rows.clear()
    steps, _ = decided(fast, lambda: fast(**inputs))
    ran = [2 * int((steps > index).sum()) for index in range(3)]
    assert read.rows == [rows for rows in ran if rows]


def test_criteria_that_look_at_other_tokens_are_asked_about_the_whole_state():
    class Neighbours(Criterion):
        learned = False

        def forward(self, exit):
            moved = (exit.state - exit.before).square().mean(2, keepdim=True)
            seen = moved if exit.memory is None else exit.memory + moved
            real = torch.ones_like(seen) if exit.weights is None else exit.weights
            return (seen * real).cumsum(1).log(), seen

    inputs = BERT.inputs(6, 5)
    net, where = adapted(BERT, Neighbours(), "token", inputs)
    fast = tp.deploy(net, inputs, engines=["attention"])
    assert fast.report.measurements[0].engine == "attention", fast.explain()
    steps, _ = decided(net, lambda: net(**inputs))
    found, _ = decided(fast, lambda: fast(**inputs))
    assert torch.equal(found[where], steps[where])
    assert steps[where].unique().numel() > 1


def test_random_exits_draw_the_same_depths_in_the_engine():
    inputs, shares = BERT.inputs(30, 6), [0.4, 0.3, 0.2, 0.1]
    net = tp.adapt(BERT.build(), heads=criteria.RandomExit(shares))
    tp.use_mode(net, "discrete")
    fast = tp.deploy(net, inputs, engines=["attention"])
    real = inputs["attention_mask"].bool()
    torch.manual_seed(3)
    steps, _ = decided(net, lambda: net(**inputs))
    torch.manual_seed(3)
    found, _ = decided(fast, lambda: fast(**inputs))
    assert torch.equal(found[real], steps[real])
    assert steps.unique().tolist() == [1, 2, 3, 4]


def test_engines_that_do_not_ask_criteria_say_so_in_one_line():
    units = [tp.models.ResidualUnit(4, 4) for _ in range(3)]
    net = tp.AdaptiveBlock(units, criteria.LatentChange(per="pixel"), mode="thresholded").eval()
    images = torch.randn(4, 4, 8, 8)
    with pytest.warns(UserWarning, match="the dense engine runs"):
        fast = tp.deploy(net, images, engines=["native", "sparse"])
    expected = "native, sparse: expected halting heads of torchpact.models.HaltingHead, got the criterion"
    assert f"{expected} LatentChange" in fast.explain()
    assert torch.equal(fast(images)[1].steps, net(images)[1].steps)

    class Curious(Criterion):
        needs_context = True

        def forward(self, exit):
            return exit.state[..., :1]

    adapted_net = tp.adapt(BERT.build(), heads=Curious())
    with pytest.warns(UserWarning, match="the dense engine runs"):
        fast = tp.deploy(adapted_net, BERT.inputs(2, 3), engines=["attention"])
    assert "expected criteria that do not look at the context of layers" in fast.explain()


def test_a_block_of_examples_that_see_each_other_is_not_compacted():
    class Batch(Criterion):
        def forward(self, exit):
            return exit.state.mean(0, keepdim=True).expand(exit.state.shape)[:, :1]

    net = tp.AdaptiveBlock(nn.Linear(4, 4), Batch(), max_steps=4, mode="thresholded").eval()
    with pytest.warns(UserWarning, match="the dense engine runs"):
        fast = tp.deploy(net, torch.randn(9, 4), engines=["compact"])
    assert "expected steps and heads that treat examples independently" in fast.explain()


def test_read_outs_of_criteria_cost_what_the_positions_that_are_asked_need():
    """Two FLOPs a weight of the read-out for every real token after every layer that it ran, but the last."""
    inputs, head = BERT.inputs(6, 5), nn.Linear(16, CLASSES)
    net, real = adapted(BERT, criteria.Confidence(head), "token", inputs)
    bare = tp.adapt(BERT.build(), heads=criteria.LatentChange())
    steps, _ = decided(net, lambda: net(**inputs))
    # the same decisions without a read-out
    pattern = steps.squeeze(2)

    class Planned(Criterion):
        def forward(self, exit):
            return torch.where(pattern == exit.index + 1, 1.0, -1.0).unsqueeze(2)

    with tp.use_heads(bare, Planned()):
        again, _ = decided(bare, lambda: bare(**inputs))
        assert torch.equal(again[real], steps[real])
        cheap = tp.count_flops(bare, inputs).total
    asked = torch.where(real, pattern.clamp(max=3), 0).sum(1)
    assert torch.equal(tp.count_flops(net, inputs).total - cheap, 2 * 16 * CLASSES * asked)


def test_a_shared_read_out_of_a_block_is_counted_at_every_exit():
    read = nn.Linear(4, CLASSES)
    net = block(criteria.Confidence(read), length=4)
    u = torch.randn(3, 4)
    assert tp.count_flops(net, u).total.tolist() == [4 * 2 * 16 + 3 * 2 * 4 * CLASSES] * 3


def test_the_specs_of_blocks_tell_their_criteria():
    spec = block_spec(block(criteria.LatentChange()))
    assert spec.has_criteria
    assert len(spec.heads) == 5
    assert spec.bounds == (math.inf,) * 5
    assert not block_spec(block(nn.Linear(4, 1))).has_criteria
    (run,) = runs(tp.adapt(BERT.build(), heads=criteria.LatentChange()))
    assert len(block_spec(run).heads) == 3
