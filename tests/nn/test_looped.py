"""Looped networks: what a step computes, where gradients go, and what each objective is."""

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import torchpact as tp
from torchpact.nn.loop_updates import LoopHead, LoopStep


class Plus(nn.Module):
    """u + 2·told, so that steps can be followed by hand."""

    width, features = 1, 1

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, u, told):
        return u + self.factor * told


def unit(x):
    return x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt()


def looped(update=None, readout=None, **options):
    update = tp.nn.ConvUpdate(6) if update is None else update
    readout = nn.Conv1d(6, 2, 1) if readout is None else readout
    return tp.nn.Looped(nn.Identity(), update, readout, **({"max_steps": 4} | options))


def test_a_step_of_one_state_is_inner_updates_each_told_the_input_and_normalised():
    step, e, u = LoopStep(Plus(), False, 3, 1, False, False), torch.randn(4, 5), torch.randn(4, 5)
    expected = u
    for _ in range(3):
        expected = unit(expected + 2 * e)
    assert torch.allclose(step(u, e), expected, atol=1e-5)


def test_a_step_of_a_pair_is_inner_updates_of_z_and_one_of_y_in_each_cycle():
    step, (e, z, y) = LoopStep(Plus(), True, 2, 2, False, False), torch.randn(3, 4, 5).unbind()
    found = step((z, y), e)
    for _ in range(2):
        for _ in range(2):
            z = unit(z + 2 * (y + e))
        y = unit(y + 2 * z)
    assert torch.allclose(found[0], z, atol=1e-5)
    assert torch.allclose(found[1], y, atol=1e-5)


def test_only_the_last_cycle_has_gradients():
    update, e = Plus(), torch.randn(4, 5)
    LoopStep(update, False, 1, 3, False, False)(torch.zeros(4, 5), e).sum().backward()
    whole = update.factor.grad
    update.factor.grad = None
    with torch.no_grad():
        before = LoopStep(update, False, 1, 2, False, False)(torch.zeros(4, 5), e)
    LoopStep(update, False, 1, 1, False, False)(before, e).sum().backward()
    assert whole is not None
    assert update.factor.grad is not None
    assert torch.allclose(whole, update.factor.grad, atol=1e-6)


@pytest.mark.parametrize(("detach", "reaches"), [(False, True), (True, False)])
def test_with_detach_an_exit_trains_its_own_step_only(detach, reaches):
    net = looped(detach=detach)
    _, ponder = net(torch.randn(3, 6, 5), exits=True, mode="thresholded", thresholds=tp.Thresholds("never"))
    first, second = ponder.exits.states[:2]
    found = torch.autograd.grad(second.sum(), first, allow_unused=True)[0]
    assert (found is not None) is reaches


@pytest.mark.parametrize("per", ["example", "position"])
@pytest.mark.parametrize("kind", ["conv 1d", "conv 2d", "tokens"])
@pytest.mark.parametrize("pair", [False, True])
def test_heads_decide_for_examples_or_positions_from_a_bias(kind, per, pair):
    update = {
        "conv 1d": tp.nn.ConvUpdate(6),
        "conv 2d": tp.nn.ConvUpdate(6, dims=2),
        "tokens": tp.nn.AttentionUpdate(6, 2),
    }[kind]
    shape = {"conv 1d": (3, 6, 5), "conv 2d": (3, 6, 5, 4), "tokens": (3, 5, 6)}[kind]
    positions = {"conv 1d": (1, 5), "conv 2d": (1, 5, 4), "tokens": (5, 1)}[kind]
    net = looped(update, nn.Identity(), per=per, pair=pair, inner=2 if pair else 1).eval()
    output, ponder = net(torch.randn(shape))
    assert output.shape == shape
    assert ponder.steps.shape == (3, *(positions if per == "position" else (1,) * len(positions)))
    assert torch.allclose(
        ponder.probs[:-1], torch.full_like(ponder.probs[:-1], 0.0474259), atol=1e-6
    )  # σ(−3)


def test_a_head_per_example_sees_the_mean_the_largest_and_the_smallest():
    head = LoopHead(1, 1, "example", 0.5)
    nn.init.constant_(head.linear.weight, 1.0)
    u = torch.tensor([[[1.0, 2.0, 6.0]]])
    assert head(u).tolist() == [[[0.5 + 3 + 6 + 1]]]


def test_positions_that_have_halted_stay_as_they_are_if_they_are_to():
    net = looped(readout=nn.Identity(), per="position", freeze=True).eval()
    nn.init.normal_(net.get_parameter("block.halting.0.linear.weight"), 0, 5)
    u = torch.randn(4, 6, 7)
    output, ponder = net(u)
    assert len(ponder.steps.unique()) > 1
    state = torch.zeros_like(u)
    for step in range(4):
        after = net.block.steps[0](state, u)
        state = torch.where(ponder.steps > step, after, state)
    assert torch.allclose(output, state, atol=1e-5)


def test_training_relaxes_and_evaluation_thresholds_unless_a_mode_is_given():
    net = looped()
    assert (net.block.present_mode, net.eval().block.present_mode) == (tp.Relaxed(), tp.Thresholded())
    assert looped(mode="act").block.present_mode == tp.ACT()
    with tp.use_mode(net, "discrete"):
        assert net.block.present_mode == tp.Discrete()


def test_it_runs_more_steps_than_it_was_made_with_and_is_deployed_and_counted():
    net, u = looped(mode="thresholded").eval(), torch.randn(5, 6, 7)
    with torch.no_grad():
        assert int(net(u, max_steps=9)[1].steps.max()) == 9
        expected, _ = net(u)
    fast = tp.deploy(net, u, engines=["compact"])
    assert torch.allclose(fast(u)[0], expected, atol=1e-5)
    assert float(tp.count_flops(net, u).share) > 1  # all four steps, and heads


def losses_for(targets):
    return lambda output: cross_entropy(output, targets, reduction="none")


@pytest.fixture
def problem():
    torch.manual_seed(0)
    net, inputs, targets = looped(), torch.randn(6, 6, 5), torch.randint(2, (6, 5))
    nn.init.normal_(net.get_parameter("block.halting.0.linear.weight"))
    never = {"mode": "thresholded", "thresholds": tp.Thresholds("never")}
    outputs = [net(inputs, max_steps=n, **never)[0] for n in range(1, 5)]
    states = net(inputs, exits=True, **never)[1].exits
    return net, inputs, targets, outputs, states


def test_fixed_and_every_are_the_losses_of_outputs_after_each_number_of_steps(problem):
    net, inputs, targets, outputs, _ = problem
    each = [cross_entropy(output, targets) for output in outputs]
    assert torch.allclose(tp.nn.loop_loss(net, inputs, losses_for(targets), "fixed"), each[-1])
    assert torch.allclose(tp.nn.loop_loss(net, inputs, losses_for(targets), "fixed", max_steps=2), each[1])
    assert torch.allclose(tp.nn.loop_loss(net, inputs, losses_for(targets)), torch.stack(each).mean())


def test_exact_is_the_expectation_over_exits_and_the_price(problem):
    net, inputs, targets, outputs, exits = problem
    h = torch.sigmoid(exits.logits[:-1, :, 0, 0])
    h = torch.cat([h, torch.ones(1, 6)])
    total, remains = torch.zeros(6), torch.ones(6)
    for n in range(4):
        q = remains * h[n]
        total = total + q * (losses_for(targets)(outputs[n]).mean(1) + 0.1 * (n + 1))
        remains = remains - q
    found = tp.nn.loop_loss(net, inputs, losses_for(targets), "exact", tau=0.1)
    assert torch.allclose(found, total.mean(), atol=1e-5)


def test_correct_adds_the_cross_entropy_of_being_right(problem):
    net, inputs, targets, outputs, exits = problem

    def right(output):
        return (output.argmax(1) == targets).all(1)

    expected = torch.stack([cross_entropy(output, targets) for output in outputs]).mean()
    for output, logits in zip(outputs[:-1], exits.logits, strict=False):
        expected = expected + binary_cross_entropy_with_logits(logits.flatten(), right(output).float()) / 3
    found = tp.nn.loop_loss(net, inputs, losses_for(targets), "correct", right=right)
    assert torch.allclose(found, expected, atol=1e-5)
    with pytest.raises(TypeError, match="expected right"):
        tp.nn.loop_loss(net, inputs, losses_for(targets), "correct")


def test_advantage_trains_the_network_by_every_exit_and_heads_apart_from_it(problem):
    net, inputs, targets, *_ = problem
    body = [p for name, p in net.named_parameters() if "halting" not in name]
    every = torch.autograd.grad(tp.nn.loop_loss(net, inputs, losses_for(targets)), body)
    loss = tp.nn.loop_loss(net, inputs, losses_for(targets), "advantage", tau=0.1)
    both = torch.autograd.grad(loss, [*body, *net.block.halting.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(every, both, strict=False))
    assert both[-1].abs().sum() > 0


def test_relaxed_is_the_map_objective_of_the_relaxed_run(problem):
    net, inputs, targets, *_ = problem
    torch.manual_seed(1)
    found = tp.nn.loop_loss(net, inputs, losses_for(targets), "relaxed", tau=0.1)
    torch.manual_seed(1)
    output, ponder = net(inputs, mode="relaxed")
    nll = losses_for(targets)(output).mean(1)
    assert torch.allclose(found, tp.map_loss(nll, ponder, 0.1))


def test_random_draws_numbers_of_steps_of_which_only_the_last_have_gradients(problem):
    net, inputs, targets, outputs, _ = problem
    values = {round(cross_entropy(output, targets).item(), 5) for output in outputs}
    draw, first = torch.Generator().manual_seed(0), net.get_parameter("block.steps.0.update.out.weight")
    seen, gradients = set(), set()
    for _ in range(60):
        loss = tp.nn.loop_loss(net, inputs, losses_for(targets), "random", generator=draw)
        seen.add(round(loss.item(), 5))
        (found,) = torch.autograd.grad(loss, first)
        gradients.add(round(found.norm().item(), 5))
    assert seen == values
    assert len(gradients) == 10  # of 1 to 4 steps, the last 1 to all of them


@pytest.mark.parametrize("objective", ["fixed", "every", "exact", "relaxed", "advantage"])
def test_positions_that_weigh_nothing_do_not_matter(problem, objective):
    net, inputs, targets, *_ = problem
    net = looped(per="position")
    weights = torch.ones(6, 1, 5)
    weights[:, :, 3:] = 0
    other = targets.clone()
    other[:, 3:] = 1 - other[:, 3:]
    found = []
    for each in (targets, other):
        torch.manual_seed(0)
        found.append(tp.nn.loop_loss(net, inputs, losses_for(each), objective, weights=weights, tau=0.1))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: looped(nn.Linear(6, 6)), TypeError, "expected an update with whole numbers"),
        (lambda: looped(lambda u, e: u), TypeError, "expected an update as a module"),
        (lambda: looped(per="token"), ValueError, "per"),
        (lambda: looped(inner=0), ValueError, "inner"),
        (lambda: tp.nn.ConvUpdate(6, kernel=4), ValueError, "expected an odd kernel, got 4"),
        (lambda: tp.nn.ConvUpdate(6, dims=3), ValueError, "dims"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_network_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def logits_of(net, x, steps=4):
    """The halting logits and the states of a run in which nothing halts."""
    _, ponder = net.eval()(x, thresholds=tp.Thresholds("never"), exits=True, max_steps=steps)
    return ponder.exits.logits[:-1], ponder.exits.states


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("length", [6, 9])  # as many positions as features, or other numbers
def test_confidence_reads_classes_along_the_channels_of_a_sequence(pair, length):
    readout = nn.Conv1d(6, 3, 1)
    for per in ("example", None):
        sure = tp.criteria.Confidence(readout, per=per)
        x = torch.randn(5, 6, length)
        logits, states = logits_of(looped(readout=readout, halting=sure, pair=pair), x)
        for found, state in zip(logits, states[:-1], strict=True):
            p = readout(state[-1] if pair else state).softmax(1).amax(1)  # (batch, length)
            expected = p.mean(1).view(5, 1, 1) if per else p.unsqueeze(1)
            assert found.shape == expected.shape
            assert torch.allclose(found.sigmoid(), expected, atol=1e-5)


def test_confidence_reads_tokens_and_maps_as_they_are():
    for readout, update, x in (
        (nn.Linear(8, 3), tp.nn.AttentionUpdate(8), torch.randn(5, 7, 8)),
        (nn.Conv2d(8, 3, 1), tp.nn.ConvUpdate(8, dims=2), torch.randn(5, 8, 1, 4)),
    ):
        sure = tp.criteria.Confidence(readout, per="example")
        logits, states = logits_of(looped(update, readout, halting=sure), x)
        p = readout(states[0]).softmax(1 if x.dim() == 4 else -1).amax(1 if x.dim() == 4 else -1)
        assert torch.allclose(logits[0].flatten().sigmoid(), p.flatten(1).mean(1), atol=1e-5)


def test_unchanged_counts_steps_in_which_all_predictions_of_a_sequence_stay():
    readout = nn.Conv1d(6, 3, 1)
    same = tp.criteria.Unchanged(readout, per="example")
    logits, states = logits_of(looped(readout=readout, halting=same), torch.randn(40, 6, 6), steps=8)
    said = torch.stack([readout(u).argmax(1) for u in states])
    count = torch.zeros(40)
    for index in range(7):
        if index:
            count = torch.where((said[index] == said[index - 1]).all(1), count + 1, 0.0)
        assert torch.equal(logits[index].flatten(), count - 0.5)
    assert 0 < (logits[-1] > 0).float().mean() < 1


def test_learned_criteria_and_changes_of_the_state_see_channels_as_features():
    x = torch.randn(5, 6, 9)
    linear = tp.criteria.Linear(6, bias=0.0)
    (weight, _) = linear.parameters()
    nn.init.normal_(weight)
    logits, states = logits_of(looped(halting=linear), x)
    assert torch.allclose(logits[0], torch.einsum("bcl,c->bl", states[0], weight[0])[:, None])
    logits, states = logits_of(looped(halting=tp.criteria.LatentChange(per="example")), x)
    moved = (states[1] - states[0]).flatten(1).norm(dim=1) / states[0].flatten(1).norm(dim=1)
    assert torch.allclose(logits[1].flatten(), -moved.log(), atol=1e-4)


def test_a_stream_halts_by_criteria_where_the_network_does():
    readout = nn.Conv1d(6, 2, 1)
    net = looped(readout=readout, halting=tp.criteria.Confidence(readout, per="example"), max_steps=9).eval()
    x = torch.randn(20, 6, 6)
    thresholds = tp.Thresholds(float(logits_of(net, x, 9)[0].median()))
    output, ponder = net(x, thresholds=thresholds)
    results = [*tp.stream(net, x, width=4, thresholds=thresholds)]
    steps = torch.stack([each.steps.flatten() for _, each in results]).flatten()
    assert torch.equal(steps, ponder.steps.flatten())
    assert len(steps.unique()) > 1
    assert torch.allclose(torch.stack([each for each, _ in results]), output, atol=1e-5)
