import copy
import math
import shutil
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchpact as tp
from tests.problems import Stack, assert_mean_is

MODES = [tp.Relaxed(), tp.Discrete(), tp.Thresholded(), tp.ACT()]
HARD = [tp.Discrete(), tp.Thresholded()]


def vector_block(max_steps=4, width=3, **options):
    return tp.AdaptiveBlock(
        [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(max_steps)],
        [nn.Linear(width, 1) for _ in range(max_steps - 1)],
        **options,
    )


class PixelHead(nn.Conv2d):
    def __init__(self, channels):
        super().__init__(channels, 1, 3, padding=1)


def pixel_block(max_steps=4, channels=3):
    return tp.AdaptiveBlock(
        [tp.Residual(nn.Conv2d(channels, channels, 3, padding=1)) for _ in range(max_steps)],
        [PixelHead(channels) for _ in range(max_steps - 1)],
    )


def run_seeded(block, u, mode, seed=0):
    torch.manual_seed(seed)
    return block(u, mode=mode)


def reference(block, u, mode, seed=0):
    """The paper's algorithms by hand: for Residual steps with the mask, for plain ones without."""
    torch.manual_seed(seed)
    length = block.max_steps
    u = block.steps[0](u)
    remaining, output, weights, h = torch.ones(()), 0, [], []
    for l in range(length):
        if l > 0:
            if isinstance(mode, tp.Relaxed):
                mask = remaining * (remaining > mode.clip)
            else:
                mask = (remaining > 0).to(u.dtype)
            step = block.steps[l]
            u = u + step.function(u) * mask if isinstance(step, tp.Residual) else step(u)
        if l < length - 1:
            logits = block.halting[l](u)
            h.append(logits.sigmoid())
            if isinstance(mode, tp.ACT):
                goes_on = remaining - h[-1] > mode.eps
                weight = torch.where(goes_on, h[-1], remaining * torch.ones_like(h[-1]))
                remaining = torch.where(goes_on, remaining - h[-1], 0.0)
            else:
                epsilon = torch.rand_like(logits).clamp(1e-16, 1 - 1e-16)
                noisy = logits + (epsilon / (1 - epsilon)).log()
                if isinstance(mode, tp.Relaxed):
                    xi = (noisy / mode.temperature).sigmoid()
                elif isinstance(mode, tp.Discrete):
                    xi = (noisy > 0).to(u.dtype)
                else:
                    xi = (h[-1] > 0.5).to(u.dtype)
                weight = remaining * xi
                remaining = remaining * (1 - xi)
        else:
            weight = remaining
        weights.append(weight)
        output = output + weight * u
    return output, torch.stack(weights), torch.stack([*h, torch.ones_like(h[0])])


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("make", [vector_block, pixel_block])
def test_output_and_gradients_equal_the_algorithms_by_hand(mode, make):
    torch.manual_seed(3)
    block = make().double()
    u = torch.randn(5, 3, dtype=torch.double)
    if make is pixel_block:
        u = torch.randn(2, 3, 7, 5, dtype=torch.double)
    output, ponder = run_seeded(block, u, mode)
    expected, weights, h = reference(block, u, mode)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(ponder.probs, h)
    torch.testing.assert_close(ponder.expected_steps, tp.expected_steps(h))
    if isinstance(mode, tp.ACT):
        torch.testing.assert_close(ponder.cost, tp.act_halting(h).ponder_cost)
        assert torch.equal(ponder.steps, tp.act_halting(h).steps)
    else:
        torch.testing.assert_close(ponder.cost, tp.expected_steps(h))
    if mode.hard:
        assert torch.equal(ponder.steps, weights.argmax(0) + 1)
    probe = torch.randn_like(output)
    grads = torch.autograd.grad((output * probe).sum() + ponder.cost.sum(), list(block.parameters()))
    cost = tp.act_halting(h).ponder_cost if isinstance(mode, tp.ACT) else tp.expected_steps(h)
    by_hand = torch.autograd.grad((expected * probe).sum() + cost.sum(), list(block.parameters()))
    for got, wanted in zip(grads, by_hand, strict=True):
        torch.testing.assert_close(got, wanted)


def plain_pixels_with_mixing_heads():
    """Steps for each pixel alone, but heads that look at neighbours."""
    steps = [nn.Sequential(nn.Conv2d(3, 3, 1), nn.Tanh()) for _ in range(5)]
    return tp.AdaptiveBlock(steps, [PixelHead(3) for _ in range(4)])


def plain_convolutions():
    return tp.AdaptiveBlock([nn.Conv2d(3, 3, 3, padding=1) for _ in range(5)], PixelHead(3))


def plain_and_gated_steps():
    steps = [nn.Conv2d(3, 3, 1), tp.Residual(nn.Conv2d(3, 3, 3, padding=1))]
    steps += [nn.Sequential(nn.Conv2d(3, 3, 1), nn.Tanh()), tp.Residual(nn.Conv2d(3, 3, 3, padding=1))]
    return tp.AdaptiveBlock(steps, nn.Conv2d(3, 1, 1))


PIXELS = [pixel_block, plain_pixels_with_mixing_heads, plain_convolutions, plain_and_gated_steps]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("make", [vector_block, *PIXELS])
def test_inference_gives_the_output_and_steps_of_training(mode, make):
    torch.manual_seed(1)
    block = make().double()
    u = torch.randn(6, 3, dtype=torch.double)
    if make in PIXELS:
        u = torch.randn(4, 3, 6, 6, dtype=torch.double)
    trained, learning = run_seeded(block, u, mode)
    with torch.no_grad():
        output, ponder = run_seeded(block, u, mode)
    torch.testing.assert_close(output, trained)
    assert torch.equal(ponder.steps, learning.steps)
    if not mode.hard:
        torch.testing.assert_close(ponder.cost, learning.cost)
    else:
        assert torch.equal(ponder.cost, ponder.steps.double())
    if isinstance(mode, tp.Relaxed):
        torch.testing.assert_close(ponder.probs, learning.probs)
        torch.testing.assert_close(ponder.expected_steps, learning.expected_steps)
        return
    ran = ponder.active[:-1]
    assert (ponder.probs[:-1][~ran] == 1).all()
    torch.testing.assert_close(ponder.probs[:-1][ran], learning.probs[:-1][ran])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_step_that_writes_into_its_input_is_refused(mode, grad):
    block = tp.AdaptiveBlock(lambda u: u.add_(1), lambda u: u[:, :1] - 2, max_steps=5, mode=mode)
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="step 2 changed its input in place"):
        block(torch.zeros(3, 1))


def test_inference_mode_works_and_equals_no_grad():
    block = vector_block()
    u = torch.randn(4, 3)
    for mode in (tp.Thresholded(), tp.ACT()):
        with torch.no_grad():
            expected, _ = block(u, mode=mode)
        with torch.inference_mode():
            output, _ = block(u, mode=mode)
        torch.testing.assert_close(output, expected)


def test_expected_steps_of_gated_steps_are_those_given_the_masks_drawn():
    """Eq. 24 with eq. 28: after halting at z the state is frozen, and so h is that of uᶻ."""
    torch.manual_seed(0)
    functions = [nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double() for _ in range(3)]
    heads = [nn.Linear(2, 1).double() for _ in range(2)]
    block = tp.AdaptiveBlock([tp.Residual(f) for f in functions], heads, mode="discrete")
    u = torch.tensor([0.7, -0.3], dtype=torch.double)
    output, ponder = block(u.expand(100_000, 2))
    states = [u]
    for function in functions:
        states.append(states[-1] + function(states[-1]))
    h1 = heads[0](states[1]).sigmoid()
    running, frozen = heads[1](states[2]).sigmoid(), heads[1](states[1]).sigmoid()
    exact = {1: h1, 2: (1 - h1) * running, 3: (1 - h1) * (1 - running)}
    for z, probability in exact.items():
        here = ponder.steps.flatten() == z
        assert_mean_is(here.double(), probability.detach().squeeze())
        torch.testing.assert_close(output[here], states[z].expand(int(here.sum()), 2))
        h2 = frozen if z == 1 else running
        expected = 1 + (1 - h1) + (1 - h1) * (1 - h2)
        torch.testing.assert_close(ponder.expected_steps[here], expected.expand(int(here.sum()), 1))


def test_relaxed_steps_count_where_the_clipped_mask_is_open():
    block = vector_block(max_steps=5)
    u = torch.randn(200, 3)
    mode = tp.Relaxed(temperature=0.3, clip=0.2)
    _, ponder = run_seeded(block, u, mode)
    _, weights, _ = reference(block, u, mode)
    left = 1 - weights.cumsum(0)[:-1]
    assert ponder.steps.min() < 5
    assert torch.equal(ponder.steps, 1 + (left > 0.2).sum(0))


@pytest.mark.parametrize("mode", [tp.Thresholded(), tp.Discrete(), tp.ACT()], ids=str)
def test_loop_stops_as_soon_as_nothing_is_active(mode):
    calls = []

    def count(u):
        calls.append(len(u))
        return torch.cat([u[:, :1], u[:, 1:] + 1], 1)

    def head(u):
        # the first entry says how many iterations an example is to run, the second counts them
        return torch.where(u[:, 1:] >= u[:, :1], 50.0, -50.0)

    block = tp.AdaptiveBlock(count, head, max_steps=10, mode=mode)
    u = torch.tensor([[1.0, 0.0], [3.0, 0.0], [4.0, 0.0]])
    with torch.no_grad():
        output, ponder = block(u)
    assert len(calls) == 4
    assert ponder.steps.flatten().tolist() == [1, 3, 4]
    torch.testing.assert_close(output[:, 1], torch.tensor([1.0, 3.0, 4.0]))
    assert ponder.probs.shape == (10, 3, 1)
    calls.clear()
    block(u)
    assert len(calls) == 10, "N needs every h, so a pass with gradients runs all the way"


class LiveStates(TorchDispatchMode):
    """Counts the tensors of a given shape that are alive at once, while it is on."""

    on = False

    def __init__(self, shape):
        super().__init__()
        self.shape, self.born, self.peak = shape, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape == self.shape and result.is_floating_point():
            self.born.append(weakref.ref(result))
            if LiveStates.on:
                self.peak = max(self.peak, sum(ref() is not None for ref in self.born))
        return result


def test_hard_modes_need_less_memory_in_inference_than_act():
    def step(u):
        counting.on = True
        result = u * 1.01
        counting.on = False
        return result

    counting = LiveStates
    block = tp.AdaptiveBlock(step, lambda u: u[:, :1] - 50, max_steps=20)
    u = torch.ones(3, 2)

    def peak(mode):
        with torch.no_grad(), LiveStates((3, 2)) as states:
            block(u, mode=mode)
        return states.peak

    # inside a step: what it was given and what it makes; ACT holds its sum besides
    assert peak(tp.Thresholded()) == peak(tp.Discrete()) == 2
    assert peak(tp.ACT()) == 3


def test_halted_positions_are_frozen_in_hard_modes():
    seen = []

    class Spy(tp.Residual):
        def forward(self, u, *context, gate=None, **named):
            result = super().forward(u, *context, gate=gate, **named)
            if gate is not None:
                seen.append((u, result, gate))
            return result

    conv = [Spy(nn.Conv2d(2, 2, 3, padding=1)) for _ in range(5)]
    block = tp.AdaptiveBlock(conv, PixelHead(2), mode="discrete")
    torch.manual_seed(0)
    output, _ = block(torch.randn(2, 2, 6, 6))
    assert len(seen) == 4
    for before, after, gate in seen:
        closed = (gate == 0).expand_as(before)
        assert closed.any()
        assert torch.equal(before[closed], after[closed])
    assert torch.equal(output, seen[-1][1])


def test_a_first_step_may_change_the_shape():
    steps = [nn.Conv2d(3, 8, 3, stride=2, padding=1), *[tp.Residual(nn.Conv2d(8, 8, 3, padding=1))] * 2]
    block = tp.AdaptiveBlock(steps, PixelHead(8))
    output, ponder = block(torch.randn(2, 3, 9, 7))
    assert output.shape == (2, 8, 5, 4)
    assert ponder.steps.shape == (2, 1, 5, 4)


def test_shared_step_and_shared_head_equal_lists_of_the_same():
    step, head = nn.Linear(3, 3), nn.Linear(3, 1)
    shared = tp.AdaptiveBlock(step, head, max_steps=4)
    listed = tp.AdaptiveBlock([step] * 4, [head] * 4)
    fewer = tp.AdaptiveBlock(nn.ModuleList([step] * 4), [head] * 3)
    u = torch.randn(5, 3)
    outputs = [run_seeded(block, u, tp.Relaxed()) for block in (shared, listed, fewer)]
    for output, ponder in outputs[1:]:
        torch.testing.assert_close(output, outputs[0][0])
        torch.testing.assert_close(ponder.probs, outputs[0][1].probs)
    assert len(list(shared.parameters())) == 4


def test_a_head_for_the_last_step_is_never_asked():
    def forbidden(u):
        raise AssertionError

    head = nn.Linear(3, 1)
    block = tp.AdaptiveBlock([nn.Linear(3, 3)] * 3, [head, head, forbidden])
    block(torch.randn(2, 3))


def test_sequential_is_one_step_and_modulelist_is_many():
    two = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    assert tp.AdaptiveBlock(two, nn.Linear(3, 1), max_steps=5).max_steps == 5
    assert tp.AdaptiveBlock(nn.ModuleList(two), nn.Linear(3, 1)).max_steps == 2


@pytest.mark.parametrize("halting", [[], nn.Linear(3, 1)])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_single_iteration_is_just_the_step(mode, halting):
    step = nn.Linear(3, 3)
    block = tp.AdaptiveBlock([step], halting, mode=mode)
    u = torch.randn(4, 3)
    output, ponder = block(u)
    torch.testing.assert_close(output, step(u))
    assert torch.equal(ponder.probs, torch.ones(1, 4, 1))
    assert torch.equal(ponder.expected_steps, torch.ones(4, 1))
    assert torch.equal(ponder.cost, torch.full((4, 1), 2.0 if isinstance(mode, tp.ACT) else 1.0))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("batch", [0, 1])
def test_batches_of_none_and_one(mode, batch, grad):
    block = vector_block()
    with torch.set_grad_enabled(grad):
        output, ponder = block(torch.randn(batch, 3), mode=mode)
    assert output.shape == (batch, 3)
    assert ponder.probs.shape == (4, batch, 1)
    assert ponder.steps.shape == ponder.cost.shape == (batch, 1)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_tuple_of_tensors_is_interpolated_or_frozen_as_one_state(mode):
    cell = nn.LSTMCell(2, 3)
    x = torch.randn(4, 2)

    def step(state, x):
        return cell(x, state)

    block = tp.AdaptiveBlock(step, lambda state: state[0].sum(1, keepdim=True), max_steps=4, mode=mode)
    state = (torch.randn(4, 3), torch.randn(4, 3))
    (h, c), _ = run_seeded(lambda s, mode: block(s, x, mode=mode), state, mode)
    states = []
    for _ in range(4):
        state = cell(x, state)
        states.append(state)
    torch.manual_seed(0)
    remaining, weights = torch.ones(4, 1), []
    for each in states[:-1]:
        weight, remaining = mode.halt(remaining, each[0].sum(1, keepdim=True))
        weights.append(weight)
    weights.append(remaining)
    torch.testing.assert_close(h, sum(w * s[0] for w, s in zip(weights, states, strict=True)))
    torch.testing.assert_close(c, sum(w * s[1] for w, s in zip(weights, states, strict=True)))
    with torch.no_grad():
        (h_again, c_again), _ = run_seeded(lambda s, mode: block(s, x, mode=mode), (h * 0, c * 0), mode)
    assert h_again.shape == c_again.shape == (4, 3)


def test_states_of_earlier_iterations_are_not_written_to():
    seen = []

    def step(u):
        seen.append(u)
        return u + 1

    block = tp.AdaptiveBlock(step, nn.Linear(2, 1), max_steps=3, mode="thresholded")
    u = torch.zeros(2, 2)
    with torch.no_grad():
        block(u)
    assert torch.equal(u, torch.zeros(2, 2))
    assert torch.equal(seen[0], torch.zeros(2, 2))


def test_log_prob_is_that_of_the_decisions_taken():
    block = vector_block(max_steps=5).double()
    _, ponder = block(torch.randn(100, 3, dtype=torch.double), mode="discrete")
    log_q = tp.stick_breaking(ponder.probs).log()
    expected = torch.stack([log_q[z - 1, i, 0] for i, z in enumerate(ponder.steps.flatten())])
    torch.testing.assert_close(ponder.log_prob.flatten(), expected)
    for mode in (tp.Relaxed(), tp.Thresholded(), tp.ACT()):
        assert block(torch.randn(2, 3, dtype=torch.double), mode=mode)[1].log_prob is None


def test_active_marks_the_iterations_that_ran():
    block = pixel_block(max_steps=5)
    _, ponder = block(torch.randn(2, 3, 4, 4), mode="discrete")
    assert ponder.active.shape == ponder.probs.shape
    assert ponder.active[0].all()
    assert torch.equal(ponder.active.sum(0), ponder.steps)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("logit", [-math.inf, -50.0, 50.0, math.inf])
def test_saturated_heads_give_finite_outputs_and_gradients(mode, logit):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = nn.Parameter(torch.tensor(logit))

        def forward(self, u):
            return self.value.expand(len(u), 1)

    block = tp.AdaptiveBlock([nn.Linear(3, 3) for _ in range(4)], Constant(), mode=mode)
    output, ponder = block(torch.randn(2, 3))
    loss = output.sum() + ponder.cost.sum()
    if ponder.log_prob is not None:
        loss = loss + ponder.log_prob.sum()
    loss.backward()
    for value in (output, ponder.cost, *(p.grad for p in block.parameters() if p.grad is not None)):
        assert value.isfinite().all()
    assert (ponder.steps == (1 if logit > 0 else 4)).all() or isinstance(mode, tp.Relaxed)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_autocast_keeps_halting_in_single_precision(mode):
    block = vector_block(width=32)
    u = torch.randn(8, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, ponder = run_seeded(block, u, mode)
    assert output.dtype == torch.bfloat16
    assert ponder.probs.dtype == ponder.cost.dtype == torch.float32
    output.float().sum().backward()
    _, exact_ponder = run_seeded(copy.deepcopy(block).double(), u.double(), tp.Thresholded())
    torch.testing.assert_close(ponder.probs.double(), exact_ponder.probs, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_compiles_as_one_graph(mode, grad):
    torch._dynamo.reset()
    block = pixel_block(max_steps=3)
    u = torch.randn(2, 3, 5, 5)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(grad):
        output, ponder = run_seeded(compiled, u, mode)
        expected, expected_ponder = run_seeded(block, u, mode)
    if not isinstance(mode, tp.Relaxed | tp.Discrete):  # compiled random numbers may differ
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(ponder.cost, expected_ponder.cost)
    if grad:
        tp.map_loss(output.flatten(1).sum(1), ponder, tau=0.1).backward()
        assert all(p.grad is not None for p in block.parameters())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("mode", [tp.Relaxed(temperature=0.5), tp.ACT()], ids=str)
def test_inductor_gives_the_same_network(mode):
    torch._dynamo.reset()
    block = vector_block(max_steps=3)
    # saturated heads, so that the noise, which inductor draws its own way, decides nothing
    for head, sign in zip(block.halting, (-1, 1), strict=True):
        nn.init.constant_(head.bias, 50.0 * sign)
    u = torch.randn(4, 3)
    output, ponder = torch.compile(block, fullgraph=True)(u, mode=mode)
    expected, _ = block(u, mode=mode)
    torch.testing.assert_close(output, expected)
    (output.sum() + ponder.cost.sum()).backward()


@pytest.mark.parametrize("mode", [tp.Thresholded(), tp.ACT()], ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_vmap_equals_a_batch(mode, grad):
    block = vector_block().double()
    u = torch.randn(6, 3, dtype=torch.double)

    def one(u):
        output, ponder = block(u, mode=mode)
        return output, ponder.cost

    with torch.set_grad_enabled(grad):
        output, cost = torch.func.vmap(one)(u)
        expected, ponder = block(u, mode=mode)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(cost, ponder.cost)


def test_per_example_gradients_by_vmap_of_grad():
    model = Stack(blocks=2)
    parameters = dict(model.named_parameters())
    u = torch.randn(5, 2, dtype=torch.double)

    def loss(parameters, u):
        with tp.use_mode(model, "act"):
            nll, ponders = torch.func.functional_call(model, parameters, (u.unsqueeze(0),))
        return tp.map_loss(nll, ponders, tau=0.1)

    per_example = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, u)
    for i in range(5):
        single = torch.func.grad(loss)(parameters, u[i])
        for name, value in single.items():
            torch.testing.assert_close(per_example[name][i], value)


def test_relaxed_under_vmap_draws_different_noise_for_each_example():
    block = vector_block()
    u = torch.randn(3).expand(8, 3)
    output = torch.func.vmap(lambda u: block(u)[0], randomness="different")(u)
    assert len(output.unique(dim=0)) == 8


def test_use_mode_sets_every_block_below():
    model = Stack(blocks=3)
    tp.use_mode(model, "act")
    assert [block.mode for block in model.blocks] == [tp.ACT()] * 3


def test_use_mode_restores_each_block_also_after_an_error():
    model = Stack(blocks=2)
    tp.use_mode(model.blocks[1], tp.ACT())

    def fail():
        with tp.use_mode(model, tp.Thresholded(0.3)) as inside:
            assert inside is model
            assert {block.mode for block in model.blocks} == {tp.Thresholded(0.3)}
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [block.mode for block in model.blocks] == [tp.Relaxed(), tp.ACT()]


def test_use_mode_with_an_unknown_name_changes_nothing():
    model = Stack()
    with pytest.raises(ValueError, match="got 'sharp'"):
        tp.use_mode(model, "sharp")
    assert model.blocks[0].mode == tp.Relaxed()


def test_use_mode_on_a_network_without_blocks_does_nothing():
    with tp.use_mode(nn.Linear(2, 2), "act"):
        pass


def test_use_mode_can_be_entered_again():
    model = Stack()
    switch = tp.use_mode(model, "act")
    for _ in range(2):
        with switch:
            assert model.blocks[0].mode == tp.ACT()
        assert model.blocks[0].mode == tp.Relaxed()


def test_gated_steps_get_the_context_and_a_gate_of_the_states_type():
    seen = []

    class Step(nn.Module):
        gated = True

        def forward(self, u, x, gate=None):
            seen.append((x, None if gate is None else gate.dtype))
            return u + (x if gate is None else x * gate)

    block = tp.AdaptiveBlock(Step(), lambda u: u[:, :1].float(), max_steps=3)
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    output, _ = block(torch.zeros(2, 4, dtype=torch.bfloat16), x)
    assert [dtype for _, dtype in seen] == [None, torch.bfloat16, torch.bfloat16]
    assert all(context is x for context, _ in seen)
    assert output.dtype == torch.bfloat16


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_indexed_step_is_told_its_iteration_from_one(mode):
    told = []

    def step(u, *, iteration, gate=None):
        told.append((iteration, gate is not None))
        return u + iteration

    step.indexed = True  # type: ignore[attr-defined]
    block = tp.AdaptiveBlock(step, lambda u: torch.full_like(u, -50.0), max_steps=3, mode=mode)
    output, _ = block(torch.zeros(2, 1))
    assert told == [(1, False), (2, False), (3, False)]
    torch.testing.assert_close(output, torch.full((2, 1), 6.0))
    told.clear()
    step.gated = True  # type: ignore[attr-defined]
    tp.AdaptiveBlock(step, lambda u: torch.full_like(u, -50.0), max_steps=3, mode=mode)(torch.zeros(2, 1))
    assert told == [(1, False), (2, True), (3, True)]


def test_a_plain_function_can_be_gated_too():
    def step(u, gate=None):
        return u + (1 if gate is None else gate)

    step.gated = True  # type: ignore[attr-defined]
    block = tp.AdaptiveBlock(step, lambda u: torch.full((len(u), 1), 50.0), max_steps=4, mode="discrete")
    assert torch.equal(block(torch.zeros(2, 3))[0], torch.ones(2, 3))


def test_a_first_step_without_gate_does_not_make_a_block_of_gated_steps_run_on():
    first = nn.Conv2d(3, 3, 1)
    rest = [tp.Residual(nn.Conv2d(3, 3, 3, padding=1)) for _ in range(3)]
    block = tp.AdaptiveBlock([first, *rest], lambda u: torch.full((len(u), 1, 4, 4), 50.0), mode="discrete")
    u = torch.randn(1, 3, 4, 4)
    output, _ = block(u)
    assert torch.equal(output, first(u))


def test_a_gated_first_step_does_not_freeze_plain_ones():
    plain = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)]
    head = nn.Linear(3, 1)
    gated = tp.AdaptiveBlock([tp.Residual(plain[0]), *plain[1:]], head, mode="discrete")
    same = tp.AdaptiveBlock([lambda u: u + plain[0](u), *plain[1:]], head, mode="discrete")
    u = torch.randn(50, 3)
    (_, one), (_, two) = (run_seeded(block, u, tp.Discrete()) for block in (gated, same))
    torch.testing.assert_close(one.probs, two.probs)


def test_relaxed_inference_runs_to_the_end_even_when_every_gate_is_closed():
    """N needs every h, and the output what is left of the stick."""
    block = vector_block(max_steps=4)
    nn.init.constant_(block.halting[0].bias, 50.0)
    u = torch.randn(5, 3)
    _, learning = run_seeded(block, u, tp.Relaxed())
    with torch.no_grad():
        _, ponder = run_seeded(block, u, tp.Relaxed())
    assert (ponder.steps == 1).all()
    assert (ponder.probs[1:3] < 1).all()
    torch.testing.assert_close(ponder.probs, learning.probs)


def test_named_tuples_stay_named():
    class State(NamedTuple):
        h: torch.Tensor
        c: torch.Tensor

    block = tp.AdaptiveBlock(
        lambda s: State(s.h + 1, s.c * 2), lambda s: s.h[:, :1] - 2, max_steps=4, mode="thresholded"
    )
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            output, _ = block(State(torch.zeros(2, 3), torch.ones(2, 3)))
        assert isinstance(output, State)
        assert torch.equal(output.h, torch.full((2, 3), 3.0))
        assert torch.equal(output.c, torch.full((2, 3), 8.0))


def test_blocks_copy_and_load():
    block = vector_block(mode=tp.Discrete(torch.Generator().manual_seed(0)))
    other = vector_block()
    other.load_state_dict(block.state_dict())
    clone = copy.deepcopy(block)
    u = torch.randn(2, 3)
    for mode in (tp.Thresholded(), tp.ACT()):
        torch.testing.assert_close(other(u, mode=mode)[0], block(u, mode=mode)[0])
        torch.testing.assert_close(clone(u, mode=mode)[0], block(u, mode=mode)[0])
    assert "max_steps=4, mode=Discrete()" in repr(block)


STEP, HEAD = nn.Linear(3, 3), nn.Linear(3, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tp.AdaptiveBlock(STEP, HEAD), "expected max_steps=L with a single shared step"),
        (lambda: tp.AdaptiveBlock(STEP, HEAD, max_steps=0), "integer of at least 1, got 0"),
        (lambda: tp.AdaptiveBlock([], HEAD), "the number of steps to be an integer of at least 1, got 0"),
        (lambda: tp.AdaptiveBlock([STEP] * 3, HEAD, max_steps=4), "expected max_steps=3 .*, got 4"),
        (
            lambda: tp.AdaptiveBlock([STEP] * 4, [HEAD] * 5),
            "expected 3 or 4 halting heads for 4 steps, or a single shared one; got a list of 5",
        ),
        (
            lambda: tp.AdaptiveBlock([STEP] * 4, [HEAD] * 2),
            "expected 3 or 4 halting heads .* got a list of 2",
        ),
        (lambda: tp.AdaptiveBlock(STEP, HEAD, mode="lazy", max_steps=2), "got 'lazy'"),
        (
            lambda: tp.AdaptiveBlock([STEP, nn.Linear(3, 4)], HEAD)(torch.randn(2, 3)),
            r"step 2 changed the shape of the state: expected \(2, 3\), got \(2, 4\)",
        ),
        (
            lambda: tp.AdaptiveBlock(STEP, lambda u: u[:, 0], max_steps=2)(torch.randn(3, 3)),
            r"halting head 1 gave \(3,\), expected .* \(3, 3\) without adding dimensions, such as \(3, 1\)",
        ),
        (
            lambda: tp.AdaptiveBlock([STEP] * 3, [HEAD, lambda u: u[:1, :1]])(torch.randn(2, 3)),
            r"halting head 2 gave \(1, 1\), expected the first's \(2, 1\)",
        ),
        (
            lambda: tp.AdaptiveBlock(lambda s: s, lambda s: s[0], max_steps=2)(
                (torch.zeros(2, 3), torch.zeros(2, 1))
            ),
            r"halting head 1 gave \(2, 3\), expected logits that broadcast to the state's \(2, 1\)",
        ),
        (
            lambda: tp.AdaptiveBlock(STEP, nn.Linear(3, 2), max_steps=2)(torch.randn(2, 3)),
            r"halting head 1 gave \(2, 2\)",
        ),
        (
            lambda: tp.AdaptiveBlock(STEP, lambda u: str(u), max_steps=2)(torch.randn(2, 3)),  # type: ignore[arg-type,return-value]
            "halting head 1 gave str",
        ),
    ],
)
def test_wrong_use_is_told_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: tp.AdaptiveBlock(3, HEAD),  # type: ignore[arg-type]
        lambda: tp.AdaptiveBlock([STEP, "u"], HEAD),  # type: ignore[list-item]
        lambda: tp.AdaptiveBlock(STEP, None, max_steps=2),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_called_is_refused(call):
    with pytest.raises(TypeError, match="expected"):
        call()
