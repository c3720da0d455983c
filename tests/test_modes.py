import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import torchpact as tp
from torchpact.core.modes import MODES, as_mode


def run(mode, logits):
    """Drive a mode by hand over L − 1 rows of logits: the weights of all L iterations, and the gates."""
    remaining = torch.ones_like(logits[0])
    weights, gates = [], [torch.ones_like(remaining)]
    for row in logits:
        weight, remaining = mode.halt(remaining, row)
        weights.append(weight)
        gates.append(mode.gate(remaining))
    return torch.stack([*weights, remaining]), torch.stack(gates)


LOGITS = st.lists(
    st.one_of(st.floats(-60, 60), st.sampled_from([-math.inf, math.inf, 0.0])), min_size=1, max_size=6
).map(lambda values: torch.tensor(values, dtype=torch.double))


@given(LOGITS, st.sampled_from(sorted(MODES)))
def test_weights_of_every_mode_are_a_distribution(logits, name):
    weights, gates = run(as_mode(name), logits)
    assert (weights >= 0).all()
    assert weights.sum().item() == pytest.approx(1, abs=1e-9)
    assert ((gates >= 0) & (gates <= 1)).all()
    assert (gates.diff(dim=0) <= 0).all(), "who has halted does not come back"


@given(LOGITS, st.sampled_from(["discrete", "thresholded"]))
def test_hard_modes_are_one_hot_and_active_up_to_the_chosen_iteration(logits, name):
    weights, gates = run(as_mode(name), logits)
    assert sorted(weights.tolist()) == [0.0] * len(logits) + [1.0]
    assert gates.sum().item() == weights.argmax().item() + 1


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.sampled_from([50.0, math.inf]))
def test_all_modes_agree_when_every_probability_is_zero_or_one(decisions, size):
    logits = torch.tensor([size if halt else -size for halt in decisions], dtype=torch.double)
    expected = torch.zeros(len(decisions) + 1, dtype=torch.double)
    expected[decisions.index(True) if True in decisions else -1] = 1
    for name in MODES:
        weights, _ = run(as_mode(name), logits)
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


def test_relaxed_follows_algorithm_3_for_given_noise():
    logits = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.double)
    generator = torch.Generator().manual_seed(5)
    epsilon = [torch.rand((), generator=generator, dtype=torch.double).item() for _ in logits]
    weights, gates = run(tp.Relaxed(0.5, 0.2, torch.Generator().manual_seed(5)), logits)
    stick = 1.0
    for l, (a, e) in enumerate(zip(logits.tolist(), epsilon, strict=True)):
        assert gates[l].item() == pytest.approx(stick if stick > 0.2 else 0.0)
        xi = 1 / (1 + math.exp(-(a + math.log(e / (1 - e))) / 0.5))
        assert weights[l].item() == pytest.approx(xi * stick)
        stick *= 1 - xi
    assert weights[-1].item() == pytest.approx(stick)


def test_relaxed_gate_is_clipped_and_carries_the_gradient_of_what_remains():
    remaining = torch.tensor([0.005, 0.01, 0.02, 1.0], requires_grad=True)
    gate = tp.Relaxed(clip=0.01).gate(remaining)
    assert torch.equal(gate, torch.tensor([0.0, 0.0, 0.02, 1.0]))
    gate.sum().backward()
    assert remaining.grad is not None
    assert torch.equal(remaining.grad, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert torch.equal(tp.Relaxed(clip=0.0).gate(remaining), remaining)


def test_masks_of_the_other_modes_carry_no_gradient():
    logits = torch.tensor([0.3, -0.2], requires_grad=True)
    for mode in (tp.Discrete(), tp.Thresholded(), tp.ACT()):
        _, gates = run(mode, logits)
        assert not gates.requires_grad


def test_thresholded_stops_at_first_h_above_half():
    h = torch.tensor([[0.2, 0.6, 0.5], [0.5, 0.9, 0.5], [0.51, 0.0, 0.5]], dtype=torch.double)
    weights, _ = run(tp.Thresholded(), torch.logit(h))
    assert (weights.argmax(0) + 1).tolist() == [3, 1, 4]  # h = 0.5 exactly does not fire


def test_threshold_is_a_probability():
    logits = torch.logit(torch.tensor([[0.29], [0.31]], dtype=torch.double))
    weights, _ = run(tp.Thresholded(threshold=0.3), logits)
    assert weights.argmax(0).item() == 1


def test_act_mode_equals_act_halting():
    h = torch.rand(5, 100, dtype=torch.double)
    weights, _ = run(tp.ACT(), torch.logit(h[:-1]))
    torch.testing.assert_close(weights, tp.act_halting(h).weights)


def test_discrete_and_relaxed_share_their_noise():
    logits = torch.randn(4, 1000, dtype=torch.double)
    hard, _ = run(tp.Discrete(torch.Generator().manual_seed(1)), logits)
    soft, _ = run(tp.Relaxed(0.01, generator=torch.Generator().manual_seed(1)), logits)
    # at a low temperature the relaxed weights are all but one-hot, and peak where the discrete ones do
    assert (hard.argmax(0) == soft.argmax(0)).double().mean() > 0.99


@pytest.mark.parametrize("make", [tp.Relaxed, tp.Discrete])
def test_a_generator_makes_a_mode_reproducible(make):
    logits = torch.randn(4, 50)
    first, _ = run(make(generator=torch.Generator().manual_seed(7)), logits)
    second, _ = run(make(generator=torch.Generator().manual_seed(7)), logits)
    other, _ = run(make(generator=torch.Generator().manual_seed(8)), logits)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_modes_compare_and_print_by_their_settings():
    assert tp.Relaxed(generator=torch.Generator()) == tp.Relaxed()
    assert tp.Thresholded(0.4) != tp.Thresholded()
    assert repr(tp.ACT()) == "ACT(eps=0.01)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tp.Relaxed(temperature=0), r"expected temperature in \(0, inf\), got 0"),
        (lambda: tp.Relaxed(temperature=-1.0), r"expected temperature in \(0, inf\), got -1.0"),
        (lambda: tp.Relaxed(temperature=math.nan), "expected temperature in .* got nan"),
        (lambda: tp.Relaxed(clip=-0.1), r"expected clip in \[0, 1\), got -0.1"),
        (lambda: tp.Relaxed(clip=1), r"expected clip in \[0, 1\), got 1"),
        (lambda: tp.Thresholded(threshold=0), r"expected threshold in \(0, 1\), got 0"),
        (lambda: tp.Thresholded(threshold=1.0), r"expected threshold in \(0, 1\), got 1.0"),
        (lambda: tp.ACT(eps=0.0), r"expected eps in \(0, 1\), got 0.0"),
        (lambda: tp.ACT(eps=1), r"expected eps in \(0, 1\), got 1"),
        (lambda: as_mode("soft"), "one of the names relaxed, discrete, thresholded, act; got 'soft'"),
        (lambda: as_mode(tp.ACT), "got the class ACT"),  # type: ignore[arg-type]
    ],
)
def test_wrong_settings_are_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_a_setting_of_the_wrong_type_is_refused():
    with pytest.raises(TypeError, match=r"expected temperature to be a number, got '0\.5'"):
        tp.Relaxed(temperature="0.5")  # type: ignore[arg-type]


def test_a_mode_that_tells_by_the_former_name_whether_it_can_exit_early_is_warned_of_and_heeded():
    with pytest.warns(DeprecationWarning, match="expected can_exit_early"):

        class Late(tp.Mode):
            leaves = False

            def halt(self, remaining: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
                return tp.Thresholded().halt(remaining, logits)

    assert not Late().can_exit_early
    with pytest.warns(DeprecationWarning, match="expected can_exit_early"):
        assert tp.Thresholded().leaves
    with pytest.warns(DeprecationWarning, match="expected can_exit_early"):
        assert not tp.Relaxed().leaves
