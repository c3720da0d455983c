"""Ready-made criteria against loops over positions by hand."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.adapt.networks import BERT, runs
from tests.core.test_exits import kept
from tests.criteria.cases import CASES, CLASSES, block, bound_within, by_hand, steps_of
from torchpact import criteria
from torchpact.core.criterion import Exit

PADDED = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]).bool()


Criteria: Any = criteria  # some arguments are wrong


@pytest.fixture
def read():
    torch.manual_seed(2)
    return nn.Linear(4, CLASSES).requires_grad_(False)


@pytest.mark.parametrize("padding", [False, True], ids=["all real", "padding"])
@pytest.mark.parametrize("per", ["token", "example"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_criterion_decides_as_a_loop_by_hand_does(case, per, padding, read):
    net = block(case.make(read, per=per))
    u, real = torch.randn(4, 5, 4), PADDED if padding else None
    states = [u]
    for step in net.steps:
        states.append(step(states[-1]))
    expected = by_hand(case, states, read, real, per)
    weights, bound = None if real is None else real.float().unsqueeze(2), bound_within(expected)
    if per == "example" and padding:
        # an example's weight is for objectives; criteria see those of its tokens
        loop = tp.HaltingLoop.start("thresholded", 6, bounds=[bound] * 5, may_stop=False)
        for index, (before, after) in enumerate(pairwise(states)):
            head = net.halting[0] if index < 5 else None
            loop, _ = tp.advance(loop, before, after, head, weights=weights)
        logits, steps = torch.stack(loop.logits), loop.steps
        assert steps is not None
    else:
        thresholds = tp.Thresholds(bound)
        with torch.no_grad():
            _, ponder = net(u, weights=weights, thresholds=thresholds, exits=True)
        logits, steps = kept(ponder).logits[:-1], ponder.steps
    where = torch.ones_like(expected, dtype=torch.bool)
    if per == "token" and padding:
        where = PADDED.expand(expected.shape)
    torch.testing.assert_close(logits.squeeze(-1)[where], expected[where], rtol=1e-3, atol=1e-3)
    counted = steps_of(expected, bound)
    assert torch.equal(steps.squeeze(-1)[where[0]], counted[where[0]])
    assert counted[where[0]].unique().numel() > 1  # some halt earlier than others
    assert net(u)[1].steps.unique().tolist() == [6]  # never, until a threshold is chosen


def test_per_pixel_a_criterion_decides_as_for_tokens(read):
    u, read = torch.randn(3, 4, 2, 5).double(), read.double()
    conv = nn.Conv2d(4, CLASSES, 1).double()
    conv.load_state_dict({"weight": read.weight[:, :, None, None], "bias": read.bias})
    tokens = u.flatten(2).transpose(1, 2)
    for case in CASES:
        for per in ("pixel", "example"):
            logits = []
            for state, before, own, kind in (
                (u.tanh(), u, conv, per),
                (tokens.tanh(), tokens, read, "token" if per == "pixel" else per),
            ):
                criterion, memory = case.make(own, per=kind), None
                for index in range(3):
                    found = criterion(Exit(state, before, index, memory=memory))
                    found, memory = found if isinstance(found, tuple) else (found, None)
                    before, state = state, (state * 1.2).tanh()
                logits.append(found)
            assert logits[0].shape == ((3, 1, 2, 5) if per == "pixel" else (3, 1, 1, 1))
            torch.testing.assert_close(logits[0].flatten(), logits[1].flatten(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("measure", ["probability", "margin", "entropy"])
def test_confidence_is_exact_where_probabilities_have_rounded(measure):
    gaps = torch.tensor([[0.0], [1e-3], [5.0], [30.0], [60.0]], dtype=torch.double)
    classes = torch.cat([gaps, torch.zeros(5, 2)], 1)  # three classes
    found = criteria.Confidence(lambda u: u, measure)(Exit(classes.float(), classes.float(), 0)).flatten()
    p, q = 1 / (1 + 2 * torch.exp(-gaps[:, 0])), 1 / (torch.exp(gaps[:, 0]) + 2)  # p + 2q = 1
    expected = {
        "probability": p.log() - (2 * q).log(),
        "margin": ((gaps[:, 0]).expm1() * q).log() - (3 * q).log(),  # 1 − (p − q) = 3q
    }
    if measure == "entropy":
        share = -(p * p.log() + 2 * q * q.log()) / math.log(3)
        wanted = torch.where(share < 1e-6, torch.inf, (1 - share).log() - share.log())
        assert found[0] < -10
        torch.testing.assert_close(found[1:3].double(), wanted[1:3], rtol=0.2, atol=1e-3)
        assert (found[3:] > 20).all()
    else:
        torch.testing.assert_close(found[1:].double(), expected[measure][1:], rtol=2e-4, atol=1e-4)
    assert found.diff().ge(0).all()


def test_a_read_out_of_one_logit_has_two_classes():
    logits = torch.tensor([[2.0], [-3.0], [0.0]])
    sure = criteria.Confidence(lambda u: u)
    torch.testing.assert_close(sure(Exit(logits, logits, 0)), logits.abs())


@pytest.mark.parametrize("kind", [criteria.Linear, criteria.MLP])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("per", ["token", "example"])
def test_learned_criteria_see_the_state_or_its_mean_over_real_tokens(kind, normalize, per):
    criterion = kind(4, normalize=normalize, per=per, bias=-2.0)
    u, weights = torch.randn(4, 5, 4), PADDED.float().unsqueeze(2)
    first = criterion(Exit(u, u, 0, weights))
    assert torch.equal(first, torch.full(((4, 5, 1) if per == "token" else (4, 1, 1)), -2.0))
    for parameter in criterion.parameters():
        nn.init.normal_(parameter)
    found, own = criterion(Exit(u, u, 0, weights)), criterion.function
    for b in range(4):
        rows = [u[b, t] for t in range(5)]
        if normalize:
            rows = [(x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() for x in rows]
        if per == "example":
            rows = [sum(x for x, real in zip(rows, PADDED[b], strict=True) if real) / PADDED[b].sum()]
        for t, x in enumerate(rows):
            torch.testing.assert_close(found[b, t], own(x))


def test_pooled_read_outs_see_the_first_token_or_the_mean_of_real_ones(read):
    u, weights = torch.randn(4, 5, 4), PADDED.float().unsqueeze(2)
    means = torch.stack([u[b][PADDED[b]].mean(0) for b in range(4)])
    for pool, rows in (("first", u[:, 0]), ("mean", means)):
        found = Criteria.Confidence(read, pool=pool)(Exit(u, u, 0, weights))
        assert found.shape == (4, 1, 1)
        top = read(rows).softmax(-1).amax(-1)
        torch.testing.assert_close(found.flatten(), torch.logit(top))


def test_gradients_reach_a_read_out_on_request_only():
    for detach in (True, False):
        read = nn.Linear(4, CLASSES)
        u = torch.randn(3, 4, requires_grad=True)
        for criterion in (
            criteria.Confidence(read, detach=detach),
            criteria.Divergence(read, detach=detach),
        ):
            found = criterion(Exit(u, u, 0, memory=torch.full((3, CLASSES), -math.log(CLASSES))))
            logits = found[0] if isinstance(found, tuple) else found
            assert logits.requires_grad is not detach
            if not detach:
                read.zero_grad()
                logits.sum().backward()
                assert read.weight.grad is not None
                assert read.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_that_stay_as_they_are_have_gradients_and_those_that_are_not_numbers_show(case):
    """Relaxed and gated runs freeze states, whose logits may be infinite."""
    read = nn.Linear(4, CLASSES)
    criterion = case.make(read, per="token")
    for part in (criterion, *getattr(criterion, "criteria", ())):
        part.detach = False
    u = torch.randn(3, 5, 4, requires_grad=True)
    found = criterion(Exit(u, u, 0))
    memory = found[1] if isinstance(found, tuple) else None
    again = criterion(Exit(u, u, 1, memory=memory))
    logits = again[0] if isinstance(again, tuple) else again
    if logits.requires_grad:
        weight = torch.where(logits.isfinite(), 1.0, 0.0)
        (torch.sigmoid(logits) * weight).sum().backward()
        assert u.grad is None or u.grad.isfinite().all()
    if "unchanged" not in case.name and "two" not in case.name:
        lost = torch.full((3, 5, 4), torch.nan)
        found = criterion(Exit(lost, u.detach(), 1, memory=memory))
        assert (found[0] if isinstance(found, tuple) else found).isnan().all()


def test_a_learned_combination_learns_the_weights_of_criteria(read):
    both = criteria.Combined([criteria.Confidence(read), criteria.LatentChange()], "learned", bias=-1.0)
    net = block(both)
    u = torch.randn(4, 5, 4)
    assert kept(net(u, mode="relaxed", exits=True)[1]).logits[:-1].unique().tolist() == [-1.0]
    both.weight.data = torch.tensor([0.5, 2.0])
    before = u
    for index, step in enumerate(net.steps):
        after = step(before)
        logits = net.ask(Exit(after, before, index))[0]
        sure = torch.logit(read(after).softmax(-1).amax(-1, keepdim=True))
        change = -((after - before).norm(dim=-1) / before.norm(dim=-1)).log().unsqueeze(-1)
        torch.testing.assert_close(logits, 0.5 * sure + 2 * change - 1, rtol=1e-4, atol=1e-4)
        before = after
    assert net.bounds is None
    net(u, mode="relaxed")[1].cost.mean().backward()
    assert both.weight.grad is not None
    assert both.weight.grad.ne(0).all()


def test_a_learned_combination_learns_from_the_state_even_if_the_linear_part_starts_at_0():
    linear = criteria.Linear(4, bias=0.0)
    both = criteria.Combined([criteria.Confidence(lambda u: u), linear], "learned", bias=-1.0)
    optimizer = torch.optim.Adam(both.parameters(), lr=0.05)
    torch.manual_seed(0)
    u = torch.randn(200, 4)
    wanted = (u[:, 0] > 0).float()  # which the largest probability does not tell
    for _ in range(100):
        logits, _ = both(criteria.Exit(u, u, 0))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 0], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(((logits[:, 0] > 0) == (wanted > 0)).float().mean()) > 0.9


HISTOGRAM = [0.1, 0.0, 0.4, 0.2, 0.3]


@pytest.mark.parametrize("per", ["token", "example"])
def test_random_exits_have_the_histogram_asked_for(per):
    """Pearson's χ² of 20,000 draws, at a false-alarm rate of 1e-6: with 3 degrees of freedom below 30.66."""
    net = block(criteria.RandomExit(HISTOGRAM, per=per), length=5)
    generator = torch.Generator().manual_seed(1)
    u = torch.zeros(20000 // (5 if per == "token" else 1), 5, 4)
    with torch.no_grad():
        steps = net(u, mode=tp.Discrete(generator))[1].steps
    assert steps.numel() == 20000
    counts = torch.bincount(steps.flatten(), minlength=6)[1:].double()
    wanted = 20000 * torch.tensor(HISTOGRAM, dtype=torch.double)
    assert counts[1] == 0
    where = wanted > 0
    assert ((counts - wanted)[where].square() / wanted[where]).sum() < 30.66


def test_the_depths_of_random_exits_are_exact_in_their_probabilities():
    net = block(criteria.RandomExit(HISTOGRAM), length=5)
    probs = net(torch.zeros(2, 3, 4), mode="discrete")[1].probs
    torch.testing.assert_close(tp.stick_breaking(probs)[:, 0, 0, 0], torch.tensor(HISTOGRAM))


def test_thresholds_never_and_always_hold_for_every_criterion(read):
    for case in CASES:
        for per in ("token", "example"):
            net, u = block(case.make(read, per=per)), torch.randn(3, 5, 4)
            for word, steps in (("never", 6), ("always", 1)):
                assert net(u, thresholds=tp.Thresholds(word))[1].steps.unique().tolist() == [steps]


def test_criteria_see_padding_and_decide_in_an_adapted_network(read):
    """Of tiny BERT, per token and per example, by loops over the hidden states of the original."""
    inputs, several = BERT.inputs(12, 2), 0
    real = inputs["attention_mask"].bool()
    torch.manual_seed(5)
    head = nn.Linear(16, CLASSES).requires_grad_(False)
    with torch.no_grad():
        hidden = BERT.build()(**inputs, output_hidden_states=True).hidden_states
    for case in CASES:
        for per in ("token", "example"):
            net = tp.adapt(BERT.build(), per=per, heads=case.make(head))
            expected = by_hand(case, [*hidden], head, real, per)
            middle = expected[:, real] if per == "token" else expected
            bound = bound_within(middle)
            with tp.collect(net, exits=True) as ponders, torch.no_grad():
                net(**inputs)
                with tp.use_thresholds(net, tp.Thresholds(bound)):
                    net(**inputs)
            logits = kept(ponders[0]).logits[:-1].squeeze(-1)
            where = real.expand(expected.shape) if per == "token" else torch.ones_like(expected).bool()
            torch.testing.assert_close(logits[where], expected[where], rtol=1e-3, atol=1e-3)
            assert ponders[0].steps.unique().tolist() == [4]
            # states after a halt are frozen, but decisions before one are those of the original
            by_network = ponders[1].steps.squeeze(-1)
            if per == "example":
                assert torch.equal(by_network, steps_of(expected, bound))
            else:
                early = real & (steps_of(expected, bound) == 1)
                assert torch.equal(by_network[real] == 1, early[real])
            several += by_network[real if per == "token" else real.any(1)].unique().numel() > 1
    assert several == 2 * len(CASES)


def test_one_criterion_serves_all_layers_unless_it_has_parameters():
    net = tp.adapt(BERT.build(), heads=criteria.LatentChange())
    assert len(runs(net)[0].heads) == 1
    net = tp.adapt(BERT.build(), heads=criteria.MLP(hidden=3))
    heads = runs(net)[0].heads
    assert [head.function[0].weight.shape for head in heads] == [(3, 16)] * 3
    assert len({id(p) for p in heads.parameters()}) == 12
    assert runs(net)[0].bounds is None
    own = nn.Linear(16, 2)
    net = tp.adapt(BERT.build(), heads=criteria.Confidence(own))
    assert len(runs(net)[0].heads) == 3
    assert not any(p is own.weight for p in net.parameters())


@pytest.mark.parametrize("form", ["names", "modules", "function"])
def test_a_read_out_of_the_network_itself_is_not_registered_again(form):
    net = BERT.build()
    parameters, names = sum(p.numel() for p in net.parameters()), [*net.state_dict()]
    readout = {"names": ["cls"], "modules": net.cls, "function": lambda u: net.cls(u)}[form]
    inputs = BERT.inputs(3, 5)
    with torch.no_grad():
        hidden = net(**inputs, output_hidden_states=True).hidden_states
        expected = [torch.logit(net.cls(u).softmax(-1).amax(-1, keepdim=True)) for u in hidden[1:-1]]
    net = tp.adapt(net, heads=criteria.Confidence(readout))
    assert sum(p.numel() for p in net.parameters()) == parameters
    assert [*net.state_dict()] == names
    with tp.collect(net, exits=True) as ponders, torch.no_grad():
        net(**inputs)
    torch.testing.assert_close(kept(ponders[0]).logits[:-1], torch.stack(expected), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Criteria.Confidence(3), "expected a read-out as a module, a function or names"),
        (
            lambda: Criteria.Confidence("x", "surprise"),
            "expected measure='probability', 'margin' or 'entropy'",
        ),
        (lambda: Criteria.Confidence("x", per="word"), "expected per='token', 'pixel' or 'example', or None"),
        (lambda: Criteria.Confidence("x", pool="last"), "expected pool='mean' or 'first', or None"),
        (lambda: Criteria.Unchanged("x", 0), "expected steps"),
        (lambda: Criteria.RandomExit([0.5, 0.4]), "expected probabilities that sum to 1, got a sum of 0.9"),
        (lambda: Criteria.RandomExit([1.5, -0.5]), "expected a probability"),
        (lambda: Criteria.Combined([]), "expected one or more criteria, got none"),
        (lambda: Criteria.Combined([nn.Linear(2, 1)]), "expected one or more criteria, got a Linear"),
        (lambda: Criteria.Combined([Criteria.LatentChange()], bounds=[1, 2]), "expected 1 bounds"),
        (
            lambda: tp.adapt(BERT.build(), heads=Criteria.Confidence("nothing")),
            "expected the name of",
        ),
        (
            lambda: tp.adapt(BERT.build(), heads=Criteria.LatentChange(per="example")),
            "expected a criterion per token, as the network decides, got per='example'",
        ),
        (lambda: block(Criteria.Confidence("x"))(torch.zeros(2, 4)), "expected tp.adapt or tp.use_heads"),
        (lambda: block(Criteria.Linear())(torch.zeros(2, 4)), "expected a criterion with a width"),
        (
            lambda: block(Criteria.RandomExit([0.5, 0.5]))(torch.zeros(2, 4)),
            "expected probabilities for as many steps as the block has, got 2",
        ),
        (
            lambda: block(Criteria.Confidence(lambda u: u[:, 0], per="token"))(torch.zeros(2, 3, 4)),
            "expected a read-out with class logits for every token",
        ),
        (
            lambda: tp.AdaptiveRNN(nn.GRUCell(4, 4), 3, halting=Criteria.Linear(4)),
            "expected a halting head of the state, got the criterion Linear",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(make, said):
    with pytest.raises((ValueError, TypeError), match=f"^{said}") as error:
        make()
    assert "\n" not in str(error.value)
