import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchpact as tp

EXTREME = [-math.inf, -50.0, -20.0, -1.0, 0.0, 1.0, 20.0, 50.0, math.inf]


def probabilities(minimum=1, maximum=8):
    entry = st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, 1.0, 0.5, 1e-30]))
    return st.lists(entry, min_size=minimum, max_size=maximum).map(
        lambda values: torch.tensor(values, dtype=torch.double)
    )


def naive_stick_breaking(xi):
    z, remaining = [], 1.0
    for value in [*xi[:-1], 1.0]:
        z.append(value * remaining)
        remaining *= 1 - value
    return z


def naive_act(h, eps):
    """Equations 29 and 30, read aloud."""
    h = [*h[:-1], 1.0]
    n = min(n for n in range(1, len(h) + 1) if sum(h[:n]) >= 1 - eps)
    remainder = 1 - sum(h[: n - 1])
    return [*h[: n - 1], remainder, *[0.0] * (len(h) - n)], n, remainder


@given(probabilities())
def test_stick_breaking_follows_the_definition(xi):
    expected = torch.tensor(naive_stick_breaking(xi.tolist()), dtype=torch.double)
    torch.testing.assert_close(tp.stick_breaking(xi), expected, rtol=1e-12, atol=1e-15)


@given(probabilities())
def test_halting_distribution_is_a_distribution(xi):
    z = tp.stick_breaking(xi)
    assert (z >= 0).all()
    assert z.sum().item() == pytest.approx(1, abs=1e-12)


@given(probabilities())
def test_expected_steps_is_the_mean_of_the_halting_distribution(h):
    steps = tp.expected_steps(h).item()
    mean = sum(l * p for l, p in enumerate(naive_stick_breaking(h.tolist()), start=1))
    assert steps == pytest.approx(mean, rel=1e-12)
    assert 1 <= steps <= len(h)


@given(probabilities(), st.sampled_from([0.01, 0.1, 0.3]))
def test_act_halting_follows_the_definition(h, eps):
    # at a tie the two ways of summing may round to different sides
    sums = h.cumsum(0)[:-1]
    if ((sums - (1 - eps)).abs() < 1e-9).any():
        return
    weights, steps, remainder = naive_act(h.tolist(), eps)
    got = tp.act_halting(h, eps=eps)
    torch.testing.assert_close(got.weights, torch.tensor(weights, dtype=torch.double))
    assert got.steps.item() == steps
    assert got.remainder.item() == pytest.approx(remainder)
    assert got.ponder_cost.item() == pytest.approx(steps + remainder)
    assert 2 <= got.ponder_cost.item() <= len(h) + 1


@given(probabilities())
def test_act_weights_are_a_distribution(h):
    weights = tp.act_halting(h).weights
    assert (weights >= 0).all()
    assert weights.sum().item() == pytest.approx(1)


@given(probabilities(minimum=2))
def test_ponder_cost_has_gradient_minus_one_before_the_halting_step_and_zero_from_it_on(h):
    h.requires_grad_()
    act = tp.act_halting(h)
    act.ponder_cost.backward()
    before = torch.arange(1, len(h) + 1) < act.steps
    assert torch.equal(h.grad, torch.where(before, -1.0, 0.0).double())


def test_ponder_cost_jumps_where_the_paper_says():
    """Fig. 2: h² = h³ = h⁴ = 1/3. N drops where h¹ plus thirds reaches 0.99; the slope is −1 between."""

    def rho(h1):
        return tp.act_halting(torch.tensor([h1, 1 / 3, 1 / 3, 1 / 3], dtype=torch.double)).ponder_cost.item()

    pieces = [  # from, to, ρ at the left end, and the slope
        (0.0, 0.99 - 2 / 3, 4 + 1 / 3, -1),
        (0.99 - 2 / 3, 0.99 - 1 / 3, 4 - (0.99 - 2 / 3) - 1 / 3, -1),
        (0.99 - 1 / 3, 0.99, 3 - (0.99 - 1 / 3), -1),
        (0.99, 1.0, 2.0, 0),
    ]
    for left, right, value, slope in pieces:
        for t in (1e-9, 0.25, 0.5, 0.75, 1 - 1e-9):
            h1 = left + t * (right - left)
            assert rho(h1) == pytest.approx(value + slope * (h1 - left), abs=1e-8)
    assert rho(0.99 - 1 / 3 - 1e-9) - rho(0.99 - 1 / 3 + 1e-9) == pytest.approx(2 / 3, abs=1e-7)
    # PACT's own cost has no jump on the same line
    line = torch.linspace(0, 1, 2001, dtype=torch.double)
    thirds = torch.full_like(line, 1 / 3)
    steps = tp.expected_steps(torch.stack([line, thirds, thirds, thirds]))
    assert steps.diff().abs().max() < 2e-3


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_dim_equals_moving_it_first(dim, dtype):
    h = torch.rand(3, 4, 5, dtype=dtype)
    first = h.movedim(dim, 0)
    torch.testing.assert_close(tp.stick_breaking(h, dim).movedim(dim, 0), tp.stick_breaking(first))
    torch.testing.assert_close(tp.expected_steps(h, dim), tp.expected_steps(first))
    torch.testing.assert_close(tp.log_stick_breaking(h, dim).movedim(dim, 0), tp.log_stick_breaking(first))
    act, act_first = tp.act_halting(h, dim=dim), tp.act_halting(first)
    torch.testing.assert_close(act.weights.movedim(dim, 0), act_first.weights)
    torch.testing.assert_close(act.ponder_cost, act_first.ponder_cost)
    assert act.weights.dtype == dtype


@given(st.lists(st.sampled_from(EXTREME), min_size=1, max_size=6))
def test_log_form_is_exact_at_extreme_logits(values):
    logits = torch.tensor(values, dtype=torch.float32, requires_grad=True)
    log_q = tp.log_stick_breaking(logits)
    # the reference: log h = −softplus(−a) and log (1 − h) = −softplus(a), in Python's doubles

    def softplus(a):
        return max(a, 0.0) + math.log1p(math.exp(-abs(a)))

    remaining = 0.0
    for l, a in enumerate(values):
        fires = 0.0 if l == len(values) - 1 else -softplus(-a)
        assert log_q[l].item() == pytest.approx(remaining + fires, rel=1e-5)
        remaining -= softplus(a)
    finite = log_q[log_q.isfinite()]
    finite.sum().backward()
    assert logits.grad is not None
    assert not logits.grad.isnan().any()


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=6))
def test_log_form_agrees_with_the_plain_one(values):
    logits = torch.tensor(values, dtype=torch.double)
    torch.testing.assert_close(
        tp.log_stick_breaking(logits).exp(), tp.stick_breaking(logits.sigmoid()), rtol=1e-9, atol=1e-12
    )


def test_a_single_iteration_always_halts():
    h = torch.tensor([[math.nan, 0.3]])
    assert torch.equal(tp.stick_breaking(h), torch.ones(1, 2))
    assert torch.equal(tp.expected_steps(h), torch.ones(2))
    assert torch.equal(tp.log_stick_breaking(h), torch.zeros(1, 2))
    act = tp.act_halting(h)
    assert torch.equal(act.weights, torch.ones(1, 2))
    assert torch.equal(act.ponder_cost, torch.full((2,), 2.0))


def test_no_positions_is_fine():
    h = torch.rand(3, 0)
    assert tp.stick_breaking(h).shape == (3, 0)
    assert tp.expected_steps(h).shape == (0,)
    assert tp.act_halting(h).ponder_cost.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(dtype):
    h = torch.rand(16, 4).to(dtype)
    for result in (tp.stick_breaking(h), tp.expected_steps(h), tp.act_halting(h).weights):
        assert result.dtype == torch.float32
    torch.testing.assert_close(tp.stick_breaking(h), tp.stick_breaking(h.float()))


def test_gradients_agree_with_finite_differences():
    h = torch.tensor([[0.2, 0.0], [0.7, 1.0], [0.4, 0.6], [0.1, 0.5]], dtype=torch.double, requires_grad=True)
    # away from 0 and 1, where a finite difference would leave the domain
    inner = torch.rand(5, 3, dtype=torch.double).mul(0.8).add(0.1).requires_grad_()
    assert torch.autograd.gradcheck(tp.stick_breaking, inner)
    assert torch.autograd.gradcheck(tp.expected_steps, inner)
    assert torch.autograd.gradcheck(tp.log_stick_breaking, inner)
    tp.expected_steps(h).sum().backward()
    assert h.grad is not None
    # second column, h = (0, 1, 0.6): dN/dh¹ = −(1 + 0 + 0), dN/dh² = −(1 + 0.4), dN/dh³ = −1·0
    torch.testing.assert_close(h.grad[:, 1], torch.tensor([-1.0, -1.4, 0.0, 0.0], dtype=torch.double))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tp.stick_breaking(torch.tensor([0.1, math.nan, 0.0])), r"expected xi in \[0, 1\], got nan"),
        (lambda: tp.stick_breaking(torch.tensor([1.5, 0.0])), r"expected xi in \[0, 1\], got 1.5"),
        (lambda: tp.expected_steps(torch.tensor([-0.5, 0.0])), r"expected h in \[0, 1\], got -0.5"),
        (lambda: tp.act_halting(torch.tensor([math.nan, 0.0])), r"expected h in \[0, 1\], got nan"),
        (lambda: tp.log_stick_breaking(torch.tensor([math.nan, 0.0])), "without NaN, got 1 NaN"),
        (lambda: tp.act_halting(torch.rand(3), eps=0.0), r"expected eps in \(0, 1\), got 0.0"),
        (lambda: tp.act_halting(torch.rand(3), eps=1.0), r"expected eps in \(0, 1\), got 1.0"),
        (lambda: tp.stick_breaking(torch.tensor(0.5)), r"at least one iteration along dim 0, got shape \(\)"),
        (lambda: tp.expected_steps(torch.rand(2, 0), dim=1), r"at least one iteration along dim 1"),
    ],
)
def test_wrong_values_are_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_list_is_refused_by_type():
    with pytest.raises(TypeError, match="expected h to be a tensor, got list"):
        tp.expected_steps([0.5, 0.5])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_act_halts_at_a_tie_as_the_algorithm_says(dtype):
    """c = 0.99 is not below 1 − ε, so the position halts."""
    assert tp.act_halting(torch.tensor([0.99, 0.0, 0.0], dtype=dtype)).steps.item() == 1
    assert tp.act_halting(torch.tensor([0.49, 0.5, 0.0], dtype=dtype)).steps.item() == 2


def test_functions_compile_as_one_graph():
    torch._dynamo.reset()
    h = torch.rand(4, 3)
    for function in (tp.stick_breaking, tp.expected_steps, tp.log_stick_breaking, tp.act_halting):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(h)
        torch.testing.assert_close(compiled, function(h))


def test_functions_run_under_vmap_and_grad():
    h = torch.rand(7, 4, dtype=torch.double)
    batched = torch.func.vmap(tp.expected_steps)(h)
    torch.testing.assert_close(batched, tp.expected_steps(h, dim=1))
    torch.testing.assert_close(
        torch.func.vmap(tp.act_halting)(h).ponder_cost, tp.act_halting(h, dim=1).ponder_cost
    )
    per_example = torch.func.vmap(torch.func.grad(tp.expected_steps))(h)
    leaf = h.clone().requires_grad_()
    tp.expected_steps(leaf, dim=1).sum().backward()
    torch.testing.assert_close(per_example, leaf.grad)
