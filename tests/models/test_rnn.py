import copy
import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import torchpact as tp
from tests.problems import assert_mean_is
from torchpact.models import StackedRNN, never_halt
from torchpact.nn import rnn as module

MODES = [tp.Relaxed(), tp.Discrete(), tp.Thresholded(), tp.ACT()]
CELLS = [nn.LSTMCell, nn.GRUCell, nn.RNNCell]
LENGTHS = [3, 6, 1, 6, 2]


def make(cell=nn.LSTMCell, max_steps=4, features=3, size=5, seed=0, bias=0.0, **options) -> Any:
    """A layer in double precision, with weights that make halting differ from state to state."""
    torch.manual_seed(seed)
    rnn: Any = tp.AdaptiveRNN(cell(features + 1, size).double(), max_steps, **options)
    for parameter in rnn.parameters():
        nn.init.normal_(parameter)
    if "halting" not in options:
        nn.init.normal_(rnn.block.halting[0].linear.weight, std=2.0)
        nn.init.constant_(rnn.block.halting[0].linear.bias, bias)
    return rnn


def batch(batch=5, time=6, features=3, seed=1):
    return torch.randn(time, batch, features, dtype=torch.double, generator=torch.manual_seed(seed))


def parts(state):
    return state if isinstance(state, tuple) else (state,)


def assert_same(got, wanted):
    """Outputs, final states and ponders agree."""
    torch.testing.assert_close(got[0], wanted[0])
    for mine, theirs in zip(parts(got[1]), parts(wanted[1]), strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(got[2], wanted[2], strict=True):
        assert type(mine) is type(theirs)
        if isinstance(mine, Tensor):
            torch.testing.assert_close(mine, theirs)
        else:
            assert mine == theirs


# One iteration is the recurrent network that torch has


def torchs_own(cell, batch_first=False):
    """The nn.LSTM, GRU or RNN of the weights of a cell whose flag has weight zero."""
    kind = {nn.LSTMCell: nn.LSTM, nn.GRUCell: nn.GRU, nn.RNNCell: nn.RNN}[type(cell)]
    network = kind(cell.input_size - 1, cell.hidden_size, batch_first=batch_first).double()
    with torch.no_grad():
        cell.weight_ih[:, -1] = 0
        network.weight_ih_l0.copy_(cell.weight_ih[:, :-1])
        network.weight_hh_l0.copy_(cell.weight_hh)
        network.bias_ih_l0.copy_(cell.bias_ih)
        network.bias_hh_l0.copy_(cell.bias_hh)
    return network


def with_layer_dimension(state):
    return tuple(part.unsqueeze(0) for part in state) if isinstance(state, tuple) else state.unsqueeze(0)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_a_single_iteration_is_torchs_own_network(cell, mode, grad):
    rnn = make(cell, max_steps=1, mode=mode)
    network = torchs_own(rnn.cell)
    x = batch()
    with torch.set_grad_enabled(grad):
        output, state, ponder = rnn(x)
        expected, final = network(x)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        for mine, theirs in zip(parts(with_layer_dimension(state)), parts(final), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        assert (ponder.steps == 1).all()
        assert ponder.steps.shape == (5, 6)

        again, _, _ = rnn(x.flip(0), state)
        torch.testing.assert_close(again, network(x.flip(0), final)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cell", CELLS)
def test_a_single_iteration_of_packed_sequences_is_torchs_too(cell):
    rnn = make(cell, max_steps=1, batch_first=True)
    network = torchs_own(rnn.cell, batch_first=True)
    packed = pack_padded_sequence(batch().transpose(0, 1), LENGTHS, batch_first=True, enforce_sorted=False)
    start = torch.randn(5, 5, dtype=torch.double)
    state = (start, start.cos()) if cell is nn.LSTMCell else start
    output, final, _ = rnn(packed, state)
    expected, wanted = network(packed, with_layer_dimension(state))
    torch.testing.assert_close(output.data, expected.data, rtol=1e-12, atol=1e-12)
    assert torch.equal(output.unsorted_indices, expected.unsorted_indices)
    for mine, theirs in zip(parts(with_layer_dimension(final)), parts(wanted), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_stacked_layers_of_a_single_iteration_are_torchs_deep_network():
    layers = [make(max_steps=1, features=n, seed=n) for n in (3, 5)]
    network = nn.LSTM(3, 5, num_layers=2).double()
    for index, layer in enumerate(layers):
        single = torchs_own(layer.cell)
        for name, value in single.named_parameters():
            getattr(network, name[:-1] + str(index)).data.copy_(value)
    output, states, ponders = StackedRNN(layers)(batch(), lengths=LENGTHS)
    packed = pack_padded_sequence(batch(), LENGTHS, enforce_sorted=False)
    expected, (h, c) = network(packed)
    torch.testing.assert_close(output, pad_packed_sequence(expected)[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.stack([state[0] for state in states]), h)
    torch.testing.assert_close(torch.stack([state[1] for state in states]), c)
    assert [p.steps.sum().item() for p in ponders] == [sum(LENGTHS)] * 2


# Several iterations are the algorithms, written out


def by_hand(rnn, x, mode):
    """Algorithms 1 to 4 on each time step in turn; noise drawn as torch draws it, a time step at a time."""
    state = None
    outputs, weights, probs = [], [], []
    for row in x:
        flag = torch.ones(len(row), 1, dtype=row.dtype)
        states, h = [], []
        u = state
        for l in range(rnn.max_steps):
            u = rnn.cell(torch.cat([row, flag if l == 0 else 0 * flag], 1), u)
            states.append(u)
            h.append(rnn.block.halting[0](u).sigmoid())
        h[-1] = torch.ones_like(h[-1])
        z = halting_distribution(h, mode)
        stacked = [torch.stack([parts(u)[k] for u in states]) for k in range(len(parts(u)))]
        mixed = [(z * part).sum(0) for part in stacked]
        state = tuple(mixed) if isinstance(u, tuple) else mixed[0]
        outputs.append(mixed[0])
        weights.append(z)
        probs.append(torch.stack(h))
    return (
        torch.stack(outputs),
        state,
        torch.stack(weights, -1).squeeze(2),
        torch.stack(probs, -1).squeeze(2),
    )


def halting_distribution(h, mode):
    left, z = torch.ones_like(h[0]), []
    if isinstance(mode, tp.ACT):
        total = torch.zeros_like(left)
        halted = torch.zeros_like(left, dtype=torch.bool)
        for l, p in enumerate(h):
            total = total + p
            stops = ~halted & ((total >= 1 - mode.eps) | (l == len(h) - 1))
            z.append(torch.where(halted, 0.0, torch.where(stops, left, p)))
            halted = halted | stops
            left = left - p
        return torch.stack(z)
    for p in h[:-1]:
        if isinstance(mode, tp.Thresholded):
            xi = (p > mode.threshold).double()
        else:
            uniform = torch.rand(p.shape, dtype=p.dtype)
            noise = uniform.log() - (-uniform).log1p()
            logit = p.log() - (-p).log1p() + noise
            xi = (logit > 0).double() if mode.hard else (logit / mode.temperature).sigmoid()
        z.append(left * xi)
        left = left * (1 - xi)
    return torch.stack([*z, left])


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_outputs_costs_and_gradients_are_those_of_the_algorithms(cell, mode):
    rnn = make(cell)
    x = batch()
    torch.manual_seed(7)
    output, state, ponder = rnn(x, mode=mode)
    torch.manual_seed(7)
    expected, final, weights, h = by_hand(rnn, x, mode)
    torch.testing.assert_close(output, expected)
    for mine, theirs in zip(parts(state), parts(final), strict=True):
        torch.testing.assert_close(mine, theirs)
    if isinstance(mode, tp.ACT):
        halting = tp.act_halting(h)
        cost = halting.ponder_cost
        assert torch.equal(ponder.steps, halting.steps)
    else:
        cost = tp.expected_steps(h)
        torch.testing.assert_close(ponder.probs, h)
    if mode.hard:
        assert torch.equal(ponder.steps, weights.argmax(0) + 1)
        assert len(set(ponder.steps.flatten().tolist())) > 2, "a test of one number of steps shows little"
    torch.testing.assert_close(ponder.cost, cost)
    weight = torch.randn_like(output)
    parameters = list(rnn.parameters())
    got = torch.autograd.grad((output * weight).sum() + ponder.cost.sum(), parameters, allow_unused=True)
    wanted = torch.autograd.grad((expected * weight).sum() + cost.sum(), parameters, allow_unused=True)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def graves(cell, head, x, state, eps, limit):
    """One time step of one example by Graves' equations 5 to 12, with plain numbers."""
    total, states, p = 0.0, [], []
    for n in range(1, limit + 1):
        state = cell(torch.cat([x, torch.tensor([float(n == 1)], dtype=x.dtype)]), state)
        h = head(state).item()
        states.append(state)
        if total + h >= 1 - eps or n == limit:
            p.append(1 - total)  # R(t)
            break
        p.append(h)
        total += h
    mixed = tuple(sum(w * s[k] for w, s in zip(p, states, strict=True)) for k in range(2))
    return mixed, len(p), p[-1]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("eps", [0.01, 0.2])
def test_act_is_graves_step_for_step(eps, grad):
    rnn = make(max_steps=6, bias=-1.0, mode=tp.ACT(eps))
    x = batch()
    with torch.set_grad_enabled(grad):
        output, (h, c), ponder = rnn(x)
    with torch.no_grad():
        for example in range(5):
            state: Any = None
            for time in range(6):
                head = lambda s: rnn.block.halting[0]((s[0],)).sigmoid()  # noqa: E731
                state, n, remainder = graves(rnn.cell, head, x[time, example], state, eps, 6)
                torch.testing.assert_close(output[time, example], state[0])
                assert ponder.steps[example, time] == n
                assert ponder.cost[example, time].item() == pytest.approx(n + remainder)
            torch.testing.assert_close(h[example], state[0])
            torch.testing.assert_close(c[example], state[1])
    assert ponder.steps.unique().numel() > 3


@pytest.mark.parametrize(("h", "steps"), [(0.1, 10), (0.2, 5), (0.3, 4), (0.45, 3)])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float, torch.double])
def test_act_with_a_constant_probability_halts_when_its_sum_reaches_one(h, steps, grad, dtype):
    cell = nn.GRUCell(3, 4).to(dtype)
    calls = []
    cell.register_forward_hook(lambda *_: calls.append(1))
    logit = math.log(h / (1 - h))
    rnn = tp.AdaptiveRNN(cell, 100, halting=lambda u: never_halt(u).fill_(logit))
    calls.clear()
    with torch.set_grad_enabled(grad):
        _, _, ponder = rnn(torch.randn(3, 2, 2, dtype=dtype), mode="act")
    assert (ponder.steps == steps).all()
    torch.testing.assert_close(ponder.cost, torch.full_like(ponder.cost, steps + 1 - (steps - 1) * h))
    assert len(calls) == 3 * steps, "iterations that nobody needs are not run, in training either"


def test_the_flag_is_up_in_the_first_iteration_of_every_time_step():
    seen = []
    cell = nn.GRUCell(3, 4)
    cell.register_forward_pre_hook(lambda _, args: seen.append(args[0][:, -1].tolist()))
    rnn = tp.AdaptiveRNN(cell, 3, halting=never_halt)
    seen.clear()
    rnn(torch.randn(2, 2, 2), mode="thresholded")
    assert seen == [[1, 1], [0, 0], [0, 0]] * 2


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_a_head_that_never_halts_repeats_the_cell(mode, grad):
    rnn = make(max_steps=3, halting=never_halt, mode=mode)
    x = batch()
    with torch.set_grad_enabled(grad):
        output, _, ponder = rnn(x)
    state: Any = None
    for row, out in zip(x, output, strict=True):
        for l in range(3):
            state = rnn.cell(nn.functional.pad(row, (0, 1), value=float(l == 0)), state)
        torch.testing.assert_close(out, state[0])
    assert (ponder.steps == 3).all()
    torch.testing.assert_close(ponder.expected_steps, torch.full_like(ponder.expected_steps, 3.0))


# Sequences of different lengths


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", [tp.Thresholded(), tp.ACT()], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_padded_packed_and_single_sequences_agree(cell, mode, grad):
    rnn = make(cell, mode=mode)
    x = batch()
    state = torch.randn(5, 5, dtype=torch.double)
    start = (state, state.sin()) if cell is nn.LSTMCell else state
    with torch.set_grad_enabled(grad):
        output, final, ponder = rnn(x, start, lengths=LENGTHS)
        packed = pack_padded_sequence(x, LENGTHS, enforce_sorted=False)
        packed_output, *packed_rest = rnn(packed, start)
        assert_same((pad_packed_sequence(packed_output)[0], *packed_rest), (output, final, ponder))
        for i, length in enumerate(LENGTHS):
            own: Any = tuple(part[i : i + 1] for part in parts(start))
            single = rnn(x[:length, i : i + 1], own if cell is nn.LSTMCell else own[0])
            torch.testing.assert_close(output[:length, i], single[0][:, 0])
            for whole, part in zip(parts(final), parts(single[1]), strict=True):
                torch.testing.assert_close(whole[i], part[0])
            assert single[2].weights is None
            for whole, part in zip(ponder, single[2], strict=True):
                if isinstance(part, Tensor):
                    torch.testing.assert_close(whole[..., i, :length], part[..., 0, :])
        assert ponder.weights.tolist() == [[1.0] * length + [0.0] * (6 - length) for length in LENGTHS]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_padding_is_never_looked_at_and_costs_nothing(mode, grad):
    rnn = make(mode=mode, batch_first=True)
    rows = []
    rnn.cell.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    x = batch().transpose(0, 1).clone()
    padding = torch.arange(6) >= torch.tensor(LENGTHS).unsqueeze(1)
    x[padding] = math.nan
    x.requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        output, final, ponder = rnn(x, lengths=torch.tensor(LENGTHS))
    assert output.shape == (5, 6, 5)
    assert (output[padding] == 0).all()
    assert all(part.isfinite().all() for part in (output, *final))
    assert (ponder.steps > 0).equal(~padding)
    assert not ponder.active[:, padding].any()
    for field in (ponder.expected_steps, ponder.cost, ponder.log_prob):
        assert field is None or (field[padding] == 0).all()
    assert sum(rows) <= rnn.max_steps * sum(LENGTHS)
    if grad:
        (output.sum() + ponder.cost.sum()).backward()
        assert (x.grad[padding] == 0).all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in rnn.parameters())


def test_lengths_may_leave_the_whole_batch_shorter_than_the_input():
    rnn = make(mode="thresholded")
    output, _, ponder = rnn(batch(), lengths=[2, 1, 2, 1, 1])
    assert output.shape == (6, 5, 5)
    assert ponder.steps.shape == (5, 6)
    assert (output[2:] == 0).all()
    assert ponder.weights.sum(1).tolist() == [2, 1, 2, 1, 1]


def test_sorted_packed_sequences_come_back_as_they_came():
    rnn = make(mode="act")
    sequences = [torch.randn(n, 3, dtype=torch.double) for n in (4, 4, 2)]
    output, _, ponder = rnn(pack_sequence(sequences))
    assert output.sorted_indices is None
    assert output.batch_sizes.tolist() == [3, 3, 2, 2]
    assert (ponder.steps > 0).sum(1).tolist() == [4, 4, 2]
    equal, _, ponder = rnn(pack_sequence(sequences[:2]))
    torch.testing.assert_close(equal.data[:2], output.data[:2])
    assert ponder.steps.shape == (2, 4)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_batch_first_only_turns_input_and_output_round(mode):
    rnn, other = make(mode=mode), make(mode=mode, batch_first=True)
    torch.manual_seed(3)
    expected = rnn(batch())
    torch.manual_seed(3)
    turned, *rest = other(batch().transpose(0, 1))
    assert_same((turned.transpose(0, 1), *rest), expected)


@pytest.mark.parametrize("mode", [tp.Thresholded(), tp.ACT()], ids=str)
def test_a_sequence_in_two_pieces_is_the_sequence(mode):
    rnn = make(mode=mode)
    x = batch()
    output, final, _ = rnn(x)
    first, state, _ = rnn(x[:2])
    second, last, _ = rnn(x[2:], state)
    torch.testing.assert_close(torch.cat([first, second]), output)
    torch.testing.assert_close(last, final)


# Gradients


@pytest.mark.parametrize("cell", CELLS)
def test_gradcheck_of_relaxed_with_fixed_noise(cell):
    rnn = make(cell, max_steps=3, features=2, size=3)
    names = [name for name, _ in rnn.named_parameters()]
    x = torch.randn(3, 2, 2, dtype=torch.double, requires_grad=True)
    start = torch.randn(2, 3, dtype=torch.double, requires_grad=True)

    def function(x, start, *parameters):
        mode = tp.Relaxed(generator=torch.Generator().manual_seed(3))
        state = (start, start.sin()) if cell is nn.LSTMCell else start
        values = dict(zip(names, parameters, strict=True))
        output, final, ponder = torch.func.functional_call(
            rnn, values, (x, state), {"lengths": [3, 2], "mode": mode}
        )
        return output, *parts(final), ponder.cost, ponder.probs

    inputs = (x, start, *(p.detach().requires_grad_() for p in rnn.parameters()))
    assert torch.autograd.gradcheck(function, inputs)


# The discrete model, against enumeration


class TwoSteps(nn.Module):
    """Two time steps of up to three iterations on a state of two; nll is smooth in both outputs."""

    def __init__(self):
        super().__init__()
        self.rnn = make(nn.RNNCell, max_steps=3, features=1, size=2, seed=5, mode="discrete")
        self.x = torch.tensor([[0.7], [-1.1]], dtype=torch.double)

    @staticmethod
    def nll(outputs):
        return (outputs[0, :, 0] - 0.4) ** 2 + torch.sin(2 * outputs[1, :, 1]) + outputs[1, :, 0] ** 2

    def copies(self, count):
        outputs, _, ponder = self.rnn(self.x.unsqueeze(1).expand(2, count, 1))
        return self.nll(outputs), ponder

    def paths(self):
        """Every pair (z₁, z₂): its probability, nll, and N of both time steps."""
        for z in itertools.product((1, 2, 3), repeat=2):
            state, outputs, counts = None, [], []
            probability = torch.ones((), dtype=torch.double)
            for x, chosen in zip(self.x, z, strict=True):
                h, states = [], []
                for l in range(3):
                    flag = torch.tensor([float(l == 0)], dtype=torch.double)
                    state = self.rnn.cell(torch.cat([x, flag]).unsqueeze(0), state)
                    states.append(state)
                    logit = self.rnn.block.halting[0](state)
                    h.append(logit.sigmoid()[0, 0] if l < 2 else torch.ones((), dtype=torch.double))
                q = [h[0], (1 - h[0]) * h[1], (1 - h[0]) * (1 - h[1])]
                counts.append(q[0] + 2 * q[1] + 3 * q[2])
                probability = probability * q[chosen - 1]
                state = states[chosen - 1]
                outputs.append(state)
            yield z, probability, self.nll(torch.stack(outputs))[0], counts

    def exact(self, tau):
        """E[nll + τ·mean N], with N not held against earlier decisions, as eq. 26 has it."""
        return sum(p * nll + p.detach() * tau * (n[0] + n[1]) / 2 for _, p, nll, n in self.paths())


def test_discrete_decisions_have_the_probabilities_and_costs_of_every_path():
    problem = TwoSteps()
    nll, ponder = problem.copies(20_000)
    for z, probability, exact, counts in problem.paths():
        here = (ponder.steps == torch.tensor(z)).all(1)
        assert_mean_is(here.double(), probability.detach())
        torch.testing.assert_close(nll[here], exact.expand(int(here.sum())))
        torch.testing.assert_close(ponder.log_prob[here].sum(1), probability.log().expand(int(here.sum())))
        torch.testing.assert_close(ponder.cost[here], torch.stack(counts).expand(int(here.sum()), 2))


def test_reinforce_has_the_exact_gradient():
    problem, tau = TwoSteps(), 0.3
    parameters = list(problem.parameters())
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(problem.exact(tau), parameters)])
    samples = []
    for _ in range(150):
        nll, ponder = problem.copies(400)
        loss = tp.reinforce_loss(nll, ponder, tau, baseline=-0.3)
        samples.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
    assert_mean_is(torch.stack(samples), exact)


def test_relaxed_loss_trains_and_reports_the_mean_over_real_time_steps():
    rnn = make()
    output, _, ponder = rnn(batch(), lengths=LENGTHS)
    nll = output.square().sum(2).sum(0) / torch.tensor(LENGTHS)
    loss = tp.map_loss(nll, ponder, tau=0.1)
    costs = [ponder.cost[i, :length].mean() for i, length in enumerate(LENGTHS)]
    torch.testing.assert_close(loss, nll.mean() + 0.1 * torch.stack(costs).mean())
    loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in rnn.parameters())


# Without gradients


@pytest.mark.parametrize("mode", [tp.Thresholded(), tp.ACT()], ids=str)
def test_inference_gives_the_outputs_and_steps_of_training(mode):
    rnn = make(mode=mode)
    output, state, ponder = rnn(batch())
    with torch.inference_mode():
        again, final, quick = rnn(batch())
    torch.testing.assert_close(again, output)
    torch.testing.assert_close(final, state)
    assert torch.equal(quick.steps, ponder.steps)
    assert torch.equal(quick.cost, ponder.steps.double() if mode.hard else ponder.cost)


def test_draws_do_not_depend_on_what_has_halted():
    drawn = []
    for bias in (-60.0, 0.0, 60.0):
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            make(bias=bias, mode=tp.Discrete(generator=generator))(batch(), lengths=LENGTHS)
        drawn.append(torch.rand(3, generator=generator))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("halting", [None, never_halt])
def test_thresholds_of_a_run_come_before_those_of_the_mode(halting):
    rnn = make(mode="thresholded", **({} if halting is None else {"halting": halting}))
    with torch.no_grad():
        own = rnn(batch())[2].steps
        assert (rnn(batch(), thresholds=tp.Thresholds("always"))[2].steps == 1).all()
        assert (rnn(batch(), thresholds=tp.Thresholds([["never", "always", "never"]]))[2].steps == 2).all()
        assert (rnn(batch(), thresholds=tp.Thresholds("never"))[2].steps == 4).all()
        assert torch.equal(rnn(batch(), thresholds=0.5)[2].steps, own)
        with tp.use_thresholds(rnn, tp.Thresholds("always")):
            assert (rnn(batch())[2].steps == 1).all()
    with pytest.raises(ValueError, match="expected the mode thresholded with thresholds, got ACT"):
        rnn(batch(), mode="act", thresholds=0.5)


# Being a good module


class Pair(NamedTuple):
    fast: Tensor
    slow: Tensor


class TwoSpeeds(nn.Module):
    """A cell of our own, whose state is a named tuple of two sizes and whose input is 3 wide."""

    input_size = 3

    def __init__(self):
        super().__init__()
        self.fast, self.slow = nn.Linear(3 + 4, 4), nn.Linear(4 + 2, 2)

    def forward(self, x, state=None):
        if state is None:
            state = Pair(x.new_zeros(len(x), 4), x.new_zeros(len(x), 2))
        fast = self.fast(torch.cat([x, state.fast], 1)).tanh()
        return Pair(fast, self.slow(torch.cat([fast, state.slow], 1)).tanh())


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_any_cell_of_the_same_shape_will_do(mode, grad):
    rnn = tp.AdaptiveRNN(TwoSpeeds(), max_steps=3, mode=mode)
    with torch.set_grad_enabled(grad):
        output, state, ponder = rnn(torch.randn(4, 2, 2), lengths=[2, 4])
    assert isinstance(state, Pair)
    assert state.slow.shape == (2, 2)
    assert output.shape == (4, 2, 4)
    torch.testing.assert_close(output[1, 0], state.fast[0])
    torch.testing.assert_close(output[3, 1], state.fast[1])
    assert ponder.probs.shape == (3, 2, 4)


@pytest.mark.parametrize("compact", [True, False])
def test_compact_does_nothing_but_warn(compact):
    with pytest.warns(DeprecationWarning, match=r"use torchpact\.deploy to skip halted examples"):
        rnn = make(mode="thresholded", compact=compact)
    assert_same(rnn(batch()), make(mode="thresholded")(batch()))


def test_use_mode_reaches_the_layer():
    rnn = make()
    with tp.use_mode(rnn, "thresholded"):
        _, _, ponder = rnn(batch())
        assert ponder.log_prob is None
        assert torch.equal(ponder.steps, rnn(batch(), mode="thresholded")[2].steps)
    assert isinstance(rnn.block.mode, tp.Relaxed)


def test_parameters_are_those_of_the_cell_and_the_halting_unit_once_each():
    rnn: Any = tp.AdaptiveRNN(nn.LSTMCell(4, 5), max_steps=3)
    assert len(rnn.state_dict()) == len(list(rnn.parameters())) == 4 + 2
    assert (rnn.input_size, rnn.hidden_size, rnn.max_steps) == (3, 5, 3)
    assert rnn.block.halting[0].linear.bias.item() == 1
    twin = copy.deepcopy(rnn)
    twin.load_state_dict(rnn.state_dict())
    x = torch.randn(2, 3, 3)
    torch.testing.assert_close(twin(x, mode="act")[0], rnn(x, mode="act")[0])


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_autocast_keeps_halting_in_single_precision(mode, grad):
    rnn = tp.AdaptiveRNN(nn.LSTMCell(4, 5), max_steps=3, mode=mode)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(grad):
        output, _, ponder = rnn(torch.randn(2, 3, 3))
    assert output.isfinite().all()
    assert ponder.probs.dtype == ponder.cost.dtype == torch.float


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_an_empty_batch_gives_empty_results(mode, grad):
    with torch.set_grad_enabled(grad):
        output, (h, _), ponder = make(mode=mode)(torch.zeros(6, 0, 3, dtype=torch.double))
    assert output.shape == (6, 0, 5)
    assert h.shape == (0, 5)
    assert ponder.cost.shape == (0, 6)


def test_dropout_between_layers_is_for_training_only():
    layers = [make(max_steps=2, features=n, mode="act") for n in (3, 5)]
    stack = StackedRNN(layers, dropout=1.0)
    packed = pack_padded_sequence(batch(), LENGTHS, enforce_sorted=False)
    trained, _, _ = stack(packed)
    torch.testing.assert_close(trained.data[0], trained.data[1])  # the second layer saw nothing
    output, states, _ = stack.eval()(batch())
    below, first, _ = layers[0](batch())
    above, second, _ = layers[1](below)
    torch.testing.assert_close(output, above)
    torch.testing.assert_close(stack(batch(), states)[0], layers[1](layers[0](batch(), first)[0], second)[0])


# What is refused


class Wrong(nn.Module):
    """A cell that returns whatever it was given."""

    input_size = 4

    def __init__(self, state):
        super().__init__()
        self.state = state

    def forward(self, x, state=None):
        return self.state


class Rigged(nn.Module):
    """A cell around torch's own, whose states are what ``change`` makes of them."""

    input_size = 4

    def __init__(self, change):
        super().__init__()
        self.cell, self.change = nn.GRUCell(4, 2), change

    def forward(self, x, state=None):
        return self.change(self.cell(x, state))


class Headless(nn.Module):
    """A cell that must be given a state."""

    input_size = 4

    def forward(self, x, state):
        return state * 1


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (
            Rigged(lambda h: (h, h)),
            r"takes the state it returns, \(\(3, 2\), \(3, 2\)\); Rigged raised .*Error",
        ),
        (
            Rigged(lambda h: torch.cat([h, h], 1)),
            r"takes the state it returns, \(3, 4\); Rigged raised Runtime",
        ),
        (Headless(), "expected a cell that starts without a state; Headless raised TypeError"),
    ],
)
def test_a_cell_of_another_layout_is_refused_when_the_layer_is_made(cell, message):
    with pytest.raises(ValueError, match=message) as error:
        tp.AdaptiveRNN(cell, 3)
    assert "\n" not in str(error.value)


def test_a_state_that_grows_is_refused():
    class Grows(nn.Module):
        input_size = 4

        def forward(self, x, state=None):
            return x if state is None else torch.cat([state, x], 1)

    with pytest.raises(ValueError, match=r"keeps its shape, \(3, 4\); got \(3, 8\) after it$"):
        tp.AdaptiveRNN(Grows(), 3, halting=never_halt)


@pytest.mark.parametrize("lengths", ["abc", [None, 1, 2], [1.5, 2, 1], [[1], [2], [3]]])
def test_lengths_that_are_none_are_told(lengths):
    with pytest.raises(ValueError, match=r"^expected 3 whole numbers as lengths, got "):
        make(batch_first=True)(torch.zeros(3, 5, 3), lengths=lengths)


def test_a_batch_of_none_has_no_lengths():
    output, _, _ = make(batch_first=True)(torch.zeros(0, 5, 3).double(), lengths=[])
    assert output.shape[0] == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make(max_steps=0), "expected max_steps to be an integer of at least 1, got 0"),
        (lambda: make(max_steps=2.5), "expected max_steps to be an integer of at least 1, got 2.5"),
        (
            lambda: make()(torch.zeros(6, 5, 4)),
            r"expected input of shape \(time, batch, 3\), got \(6, 5, 4\)",
        ),
        (
            lambda: tp.AdaptiveRNN(nn.LSTMCell(8, 16), 3)(torch.zeros(6, 5, 8)),
            r"got \(6, 5, 8\); the cell takes the flag as its last input, so make it for 9 to read 8",
        ),
        (lambda: make(batch_first=True)(torch.zeros(3)), r"shape \(batch, time, 3\), got \(3,\)"),
        (lambda: make()(batch()[:0]), "expected sequences of at least one time step, got 0"),
        (lambda: make()(batch(), lengths=[3, 0, 1, 1, 1]), "expected lengths of 1 to 6, got 0"),
        (lambda: make()(batch(), lengths=[7, 1, 1, 1, 1]), "expected lengths of 1 to 6, got 7"),
        (
            lambda: make()(batch(), lengths=[1, 2]),
            r"expected 5 whole numbers as lengths, got torch.int64 \(2,\)",
        ),
        (
            lambda: make()(batch(), lengths=[1.0] * 5),
            "expected 5 whole numbers as lengths, got torch.float32",
        ),
        (
            lambda: make()(pack_sequence([torch.zeros(2, 4)])),
            r"expected a PackedSequence of 3 features, got data of shape \(2, 4\)",
        ),
        (
            lambda: make()(pack_sequence([torch.zeros(2, 3)]), lengths=[2]),
            "expected no lengths with a Packed",
        ),
        (
            lambda: make()(batch(), torch.zeros(5, 5)),
            r"expected an initial state of shape \(\(5, 5\), \(5, 5\)\), got \(5, 5\)",
        ),
        (
            lambda: make(nn.GRUCell)(batch(), torch.zeros(1, 5, 5)),
            r"expected an initial state of shape \(5, 5\), got \(1, 5, 5\)",
        ),
        (
            lambda: tp.AdaptiveRNN(nn.Linear(3, 4), 3),
            "expected a cell whose input_size is at least 2, .* got Linear with none",
        ),
        (lambda: tp.AdaptiveRNN(nn.GRUCell(1, 4), 3), "got GRUCell with 1"),
        (
            lambda: tp.AdaptiveRNN(Wrong([torch.zeros(3, 2)]), 3),
            r"expected a cell whose state is a tensor of shape \(batch, size\) or a tuple of them, got list",
        ),
        (lambda: tp.AdaptiveRNN(Wrong((torch.zeros(3, 2), None)), 3), "got .*NoneType.* for a batch of 3"),
        (lambda: tp.AdaptiveRNN(Wrong(torch.zeros(1, 3, 2)), 3), r"got \(1, 3, 2\) for a batch of 3"),
        (
            lambda: tp.AdaptiveRNN(nn.GRUCell(4, 5), 3, halting=nn.Linear(5, 2)),
            r"expected a halting head that gives \(batch, 1\), got \(3, 2\) for a batch of 3",
        ),
        (lambda: StackedRNN([]), "expected at least one layer, got none"),
        (lambda: StackedRNN([make(), make()]), "expected a layer of input_size=5, .* got 3, False"),
        (lambda: StackedRNN([make()], dropout=2), r"expected dropout in \[0, 1\], got 2"),
        (lambda: StackedRNN([make()])(batch(), []), "expected 1 states for as many layers, got 0"),
    ],
)
def test_wrong_use_is_told_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_what_is_no_cell_no_layer_or_no_tensor_is_refused():
    with pytest.raises(TypeError, match=r"expected a cell such as nn.LSTMCell\(9, 16\), got str"):
        tp.AdaptiveRNN("lstm", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected layers of AdaptiveRNN, got LSTM"):
        StackedRNN([nn.LSTM(3, 4)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="or a PackedSequence, got list"):
        make()([1.0])


def test_input_and_state_are_checked_once(monkeypatch):
    checked = []

    def watch(holder, name):
        check = getattr(holder, name)

        def watched(*args, **options):
            checked.append(name)
            return check(*args, **options)

        monkeypatch.setattr(holder, name, watched)

    watch(module, "time_first")
    watch(tp.AdaptiveRNN, "check_state")
    rnn, state = make(nn.GRUCell, mode="thresholded"), torch.zeros(5, 5).double()
    with torch.no_grad():
        for options in ({}, {"lengths": LENGTHS}):
            checked.clear()
            rnn(batch(), state, **options)
            assert checked == ["time_first", "check_state"]
