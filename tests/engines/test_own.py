"""Networks that are not ours, deployed as a whole."""

import copy
import pickle
import threading
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.engines.networks import block_of, bottlenecks_of, relative, undecided
from torchpact.engines import CompactBlock, Unsupported, own, registry, standing_in
from torchpact.engines.apart import compacted
from torchpact.engines.deployed import DeployedBlock
from torchpact.engines.timing import interleaved
from torchpact.models import HaltingHead, ResidualUnit

NO_TENSOR: Any = "images"
NO_MODULE: Any = torch.tanh


@pytest.fixture(scope="module", autouse=True)
def _no_patience():
    """Measure for a moment only: what is chosen does not matter here."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (own, registry, standing_in):
            patch.setattr(module, "interleaved", partial(interleaved, seconds=0, least=1))
        yield


@pytest.fixture
def fastest(monkeypatch):
    """Let a candidate be the fastest, wherever it is one."""

    def favour(name):
        def times(candidates, **_):
            for run in candidates.values():
                run()
            return {
                each: 0.1 if each.startswith("blocks") else 0.5 if each == name else 1.0
                for each in candidates
            }

        for module in (own, registry, standing_in):
            monkeypatch.setattr(module, "interleaved", times)

    return favour


class Rotate(nn.Module):
    """A step that moves examples about, one by one."""

    def __init__(self, size):
        super().__init__()
        self.turn = nn.Linear(size, size)
        nn.init.orthogonal_(self.turn.weight)
        nn.init.normal_(self.turn.bias)
        self.seen = []

    def forward(self, u, shift=0.0):
        self.seen.append(len(u))
        return self.turn(u) + shift


class Mine(nn.Module):
    """Residual units, then a state that is thought about."""

    def __init__(self, mode="thresholded"):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        units = [ResidualUnit(16, 32, 2), ResidualUnit(32, 32), ResidualUnit(32, 32)]
        self.looks = tp.AdaptiveBlock(units, [HaltingHead(32, bias=0.0) for _ in units[1:]], mode=mode)
        head = nn.Linear(32, 1)
        nn.init.normal_(head.weight)
        self.thinks = tp.AdaptiveBlock(Rotate(32), head, max_steps=6, mode=mode)
        self.norm, self.readout = nn.BatchNorm1d(32), nn.Linear(32, 4)

    def forward(self, images, scale=1.0):
        u, first = self.looks(self.stem(images))
        v, second = self.thinks(self.norm(u.mean((2, 3))) * scale)
        return {"logits": self.readout(v), "ponders": [first, second]}


@torch.no_grad()
def agree(fast, net, *inputs):
    got, expected = fast(*inputs), net(*inputs)
    assert got.keys() == expected.keys()
    assert got["logits"].shape == expected["logits"].shape
    for one, other in zip(got["ponders"], expected["ponders"], strict=True):
        assert not undecided(other)
        assert torch.equal(one.steps, other.steps)
        assert one.probs.isnan().all() or relative(one.probs, other.probs) < 1e-5
    return not len(inputs[0]) or relative(got["logits"], expected["logits"]) < 1e-5


@pytest.mark.parametrize("engine", ["dense", "sparse", "native", "compact", None])
def test_outputs_are_those_of_the_network_for_any_batch_and_size(engine, fastest):
    fastest(engine)
    net, images = Mine().eval(), torch.randn(7, 3, 10, 12)
    fast = tp.deploy(net, images[:3])
    for part in (images, images[:1], images[:0], images[:, :, :6, :8].clone()):
        assert agree(fast, net, part)
    assert agree(fast, net, images, 2.0)
    chosen = {each.name: each.engine for each in fast.report.measurements}
    assert set(chosen) == {"looks", "thinks", "all"}
    if engine in ("sparse", "native"):
        assert chosen["looks"] == engine
    if engine == "compact":
        assert chosen["thinks"] == engine
    assert str(fast).startswith("DeployedNetwork(Mine, looks: ")


def test_halted_examples_leave_the_batch_of_any_step(fastest):
    fastest("compact")
    net, images = Mine().eval(), torch.randn(12, 3, 6, 6) + 3 * torch.randn(12, 3, 1, 1)
    fast = tp.deploy(net, images)
    seen = fast.network.thinks.steps[0].seen
    seen.clear()
    with torch.no_grad():
        ponder = fast(images)["ponders"][1]
    assert seen == [int(n) for n in ponder.active.flatten(1).sum(1) if n]
    assert seen[-1] < 12


def test_the_network_stays_as_it_was_and_its_changes_without_effect():
    net, images = Mine("relaxed").train(), torch.randn(3, 3, 6, 6)
    before = copy.deepcopy(net.state_dict())
    fast = tp.deploy(net, images, mode="thresholded")
    assert net.training
    assert net.looks.mode == net.thinks.mode == tp.Relaxed()
    assert "forward" not in vars(net.looks)
    assert all(p.requires_grad for p in net.parameters())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    logits = fast(images)["logits"]
    assert not logits.requires_grad
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    fast.train()
    assert torch.equal(fast(images)["logits"], logits)
    assert not [*fast.parameters()]


def test_what_is_deployed_is_neither_saved_nor_moved_nor_told_another_mode():
    fast = tp.deploy(Mine().eval(), torch.randn(2, 3, 6, 6))
    with pytest.raises(TypeError, match="neither copied nor saved"):
        pickle.dumps(fast)
    with pytest.raises(TypeError, match="neither copied nor saved"):
        fast.state_dict()
    with pytest.raises(RuntimeError, match="deploy again"):
        fast.double()
    with pytest.raises(ValueError, match=r"^expected a model, got what is deployed: deploy the model again"):
        tp.use_mode(nn.Sequential(fast), "discrete")


def test_autocast_and_gradients_are_left_outside():
    net, images = Mine().eval(), torch.randn(2, 3, 6, 6)
    fast = tp.deploy(net, images)
    with torch.autocast("cpu", torch.bfloat16):
        logits = fast(images.requires_grad_())["logits"]
    assert logits.dtype == torch.float32
    assert agree(fast, net, images)


def test_details_may_be_left_out(fastest):
    for engine in ("native", "compact", "dense"):
        fastest(engine)
        net, images = Mine().eval(), torch.randn(5, 3, 6, 6)
        fast = tp.deploy(net, images, details=False)
        assert agree(fast, net, images)
        assert all(p.probs.isnan().all() for p in fast(images)["ponders"])


def test_modes_keep_the_generators_they_draw_from(fastest):
    fastest("compact")
    generator = torch.Generator().manual_seed(0)
    net, images = Mine(tp.Discrete(generator)).eval(), torch.randn(40, 3, 6, 6) + 3 * torch.randn(40, 3, 1, 1)
    fast = tp.deploy(net, images)
    draws = []
    for _ in range(2):
        generator.manual_seed(3)
        draws.append(fast(images)["ponders"])
    for one, other in zip(*draws, strict=True):
        assert torch.equal(one.steps, other.steps)
        assert one.log_prob is not None
    assert len(draws[0][1].steps.unique()) > 2


def test_soft_modes_run_as_they_are_with_a_warning():
    net, images = Mine("relaxed").eval(), torch.randn(2, 3, 6, 6)
    with pytest.warns(UserWarning, match=r"^expected a hard mode, .* got Relaxed") as caught:
        fast = tp.deploy(net, images)
    assert caught[0].filename == __file__
    assert "looks: nothing can be skipped in the mode Relaxed" in fast.explain()
    assert set(fast(images)) == {"logits", "ponders"}


def test_engines_may_be_named():
    net, images = Mine().eval(), torch.randn(4, 3, 6, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = tp.deploy(net, images, engines=["sparse", "dense"])
    chosen = {each.name: each.engine for each in fast.report.measurements}
    assert chosen["looks"] in ("sparse", "dense")
    assert chosen["thinks"] == "dense"
    assert agree(fast, net, images)
    with pytest.raises(ValueError, match=r"^expected engines among dense, .*; got 'fast'"):
        tp.deploy(net, images, engines=["fast"])


def test_the_table_names_blocks_and_counts_all_flops():
    net, images = Mine().eval(), torch.randn(4, 3, 8, 8)
    fast = tp.deploy(net, images)
    count = tp.count_flops(net, images)
    *blocks, whole = fast.report.measurements
    assert [each.flops for each in blocks] == pytest.approx(count.blocks.double().mean(0).tolist())
    assert whole.flops == pytest.approx(count.mean.item())
    stem, readout = 2 * 64 * 27 * 16, 2 * 32 * 4
    looks = 2 * 16 * 9 * (16 * 32 + 32 * 32) + 2 * 2 * 16 * 9 * 2 * 32 * 32
    assert whole.plain_flops == stem + looks + 6 * 2 * 32 * 32 + readout
    lines = fast.explain().splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["block", "looks", "thinks", "all"]
    assert lines[4].startswith("Medians on 4 examples")


def test_blocks_may_be_anywhere_and_come_more_than_once(fastest):
    fastest("native")

    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = (block_of(16, 6, 6, 1, seed=seed)[0] for seed in (0, 1))
            self.order = [self.one, self.other, self.one]  # which no module knows of

        def forward(self, u):
            ponders = []
            for block in self.order:
                u, ponder = block(u)
                ponders.append(ponder)
            return {"logits": u.mean((2, 3)), "ponders": ponders}

    net, u = Lists().eval(), torch.randn(3, 16, 6, 6)
    fast = tp.deploy(net, u)
    assert agree(fast, net, u)
    assert [each.engine for each in fast.report.measurements] == ["native", "native", "blocks"]
    assert fast.report.measurements[0].flops > fast.report.measurements[1].flops


def test_code_that_views_maps_in_another_shape_works(fastest):
    fastest("native")

    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, _ = bottlenecks_of(64, 6, 6, 1)

        def forward(self, u):
            u, ponder = self.block(u)
            return {"logits": u.view(len(u), -1), "ponders": [ponder]}

    net, u = Views().eval(), torch.randn(3, 64, 6, 6)
    fast = tp.deploy(net, u)
    assert fast.report.measurements[0].engine == "native"
    assert agree(fast, net, u)


def test_a_mode_for_one_call_is_heeded(fastest):
    fastest("native")

    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, _ = block_of(16, 6, 6, 1)

        def forward(self, u, **options):
            u, ponder = self.block(u, **options)
            return {"logits": u.mean((2, 3)), "ponders": [ponder]}

    net, u = Chooses().eval(), torch.randn(3, 16, 6, 6)
    fast = tp.deploy(net, u)
    assert fast.report.measurements[0].engine == "native"
    with torch.no_grad():
        got, expected = (each(u, mode=tp.Thresholded(0.9)) for each in (fast, net))
    assert torch.equal(got["logits"], expected["logits"])
    assert torch.equal(got["ponders"][0].steps, expected["ponders"][0].steps)


def test_threads_may_call_at_the_same_time(fastest):
    fastest("native")
    net, images = Mine().eval(), torch.randn(4, 3, 8, 8)
    fast, right = tp.deploy(net, images), []
    workers = [
        threading.Thread(target=lambda n=n: right.append(agree(fast, net, images[:n]))) for n in range(5)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert right == [True] * 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("engine", ["gpu", "onchip", "compact", "dense"])
def test_on_a_gpu_outputs_are_those_of_the_network_too(engine, fastest):
    fastest(engine)
    net, images = Mine().eval().cuda(), torch.randn(7, 3, 8, 12, device="cuda")
    fast = tp.deploy(net, images[:3])
    for part in (images, images[:1], images[:0], images[:, :, :4, :8].clone(), images):
        assert agree(fast, net, part)


# --- blocks of any steps ---


@torch.no_grad()
def test_any_block_deploys_by_itself_with_its_context(fastest):
    fastest("compact")
    torch.manual_seed(0)
    block = tp.AdaptiveBlock(Rotate(6), nn.Linear(6, 1), max_steps=5, mode="thresholded")
    u, shift = torch.randn(9, 6), torch.randn(9, 6)
    fast = tp.deploy(block, (u, shift))
    assert fast.report.measurements[0].engine == "compact"
    (output, ponder), (expected, reference) = fast(u[:4], shift[:4]), block(u[:4], shift[:4])
    assert relative(output, expected) < 1e-6
    assert torch.equal(ponder.steps, reference.steps)


@pytest.mark.parametrize("mode", ["thresholded", "act"])
@pytest.mark.parametrize("shape", [(3, 5, 6), (2, 3, 4, 6), (4, 1, 6)])
@torch.no_grad()
def test_positions_leave_where_steps_look_at_one_at_a_time(shape, mode):
    torch.manual_seed(0)
    step = Rotate(6)
    block = tp.AdaptiveBlock(step, nn.Linear(6, 1), max_steps=5, mode=mode)
    u, shift, table = torch.randn(shape), torch.randn(*shape[:-1], 1), torch.randn(6)

    def shifted(u, own, pair):
        return step(u, own + pair[0])

    shared = tp.AdaptiveBlock(shifted, block.halting[0], max_steps=5, mode=mode)
    for one, context in ((block, ()), (block, (shift,)), (shared, (shift, (table,)))):
        compact = compacted(one, u, *context)
        assert isinstance(compact, CompactBlock)
        (output, ponder), (expected, reference) = compact(u, *context), one(u, *context)
        assert output.shape == expected.shape
        assert relative(output, expected) < 1e-5
        assert [x.shape for x in ponder[:4]] == [x.shape for x in reference[:4]]
        for got, wanted in zip(ponder[:4], reference[:4], strict=True):
            assert relative(got, wanted) < 1e-5


@torch.no_grad()
def test_a_table_that_examples_share_stays_whole_even_if_as_many_come_later(fastest):
    fastest("compact")
    torch.manual_seed(0)
    rotate = Rotate(6)

    def step(u, table, own):
        return rotate(u, table.sum(0) * own)

    block = tp.AdaptiveBlock(step, nn.Linear(6, 1), max_steps=6, mode="thresholded")
    u, table, owns = torch.randn(9, 6), torch.randn(4, 6), torch.randn(9, 1)
    fast = tp.deploy(block, (u, table, owns))
    assert fast.report.measurements[0].engine == "compact"
    for n in (9, 4, 5):
        (output, ponder), (expected, reference) = (each(u[:n], table, owns[:n]) for each in (fast, block))
        assert len(reference.steps.unique()) > 1
        assert torch.equal(ponder.steps, reference.steps)
        assert relative(output, expected) < 1e-5


def mixing(u):
    return torch.tanh(u - u.mean(0))


def attending(u):
    return u.softmax(-1) @ u.mT @ u


def fixed(u):
    return u.view(4, 6) + 1


@pytest.mark.parametrize(
    ("step", "head", "shape", "reason"),
    [
        (mixing, nn.Linear(6, 1), (4, 6), "expected steps and heads that treat examples one by one"),
        (
            torch.tanh,
            lambda u: u.mean(0, True).mean(1, True).expand(len(u), 1),
            (4, 6),
            "treat examples one by one",
        ),
        (fixed, nn.Linear(6, 1), (4, 6), "expected steps that can run fewer examples, got RuntimeError"),
        (torch.tanh, nn.Linear(6, 1), (1, 6), "expected two examples"),
        (lambda u: u + u.mean(1, True), nn.Linear(6, 1), (4, 5, 6), "expected steps .*"),
        (torch.tanh, lambda u: u[:, :1], (4, 5, 6), r"expected a decision an example, .* got \(4, 1, 6\)"),
    ],
    ids=["mixing", "mixing heads", "sizes", "single", "attending", "elsewhere"],
)
def test_steps_that_mix_examples_run_as_they_are(step, head, shape, reason):
    torch.manual_seed(0)
    block = tp.AdaptiveBlock(step, head, max_steps=4, mode="thresholded")
    u = torch.randn(shape)
    fast = tp.deploy(block, u)
    assert [each.engine for each in fast.report.measurements] == ["dense", "dense"]
    with pytest.raises(Unsupported, match=reason):
        compacted(block, u)
    with torch.no_grad():
        (output, ponder), (expected, reference) = fast(u), block(u)
    assert torch.equal(output, expected)
    assert torch.equal(ponder.steps, reference.steps)


W = nn.init.orthogonal_(torch.empty(5, 5))


def paired(u):
    clock, state = u[:, :1], u[:, 1:]
    return torch.cat([clock + 1, (state + state.roll(len(u) // 2, 0)) @ W / 2], 1)


def loud(u):
    """One feature is large, and the others are mixed."""
    return torch.cat([u[:, :1] + 2e4, u[:, 1:] + 0.3 * u[:, 1:].mean(0)], 1)


class Attends(nn.Module):
    gated = True

    def __init__(self):
        super().__init__()
        self.look = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, u, gate=None):
        seen, _ = self.look(u, u, u, need_weights=False)
        return u + (seen if gate is None else seen * gate)


@pytest.mark.parametrize(
    ("step", "u"),
    [
        (paired, torch.randn(8, 6)),
        (loud, torch.randn(8, 6)),
        (mixing, torch.ones(8, 6)),
        (Attends(), torch.zeros(4, 7, 6)),
        (Attends(), torch.randn(4, 7, 6)),
        (lambda u: u if len(u) > 1 else u.squeeze(), torch.randn(8, 6)),
    ],
    ids=["pairs", "scales", "alike", "attention of zeros", "attention", "a single row"],
)
def test_steps_that_seem_to_treat_examples_one_by_one_are_found_out(step, u):
    block = tp.AdaptiveBlock(step, lambda u: u[..., :1], max_steps=3, mode="thresholded")
    with pytest.raises(Unsupported):
        compacted(block, u)


def test_a_row_that_all_share_is_not_taken_for_the_first_examples_own():
    block = tp.AdaptiveBlock(lambda u, m: u + m[0], nn.Linear(6, 1), max_steps=3, mode="thresholded")
    u, memory = torch.randn(9, 6), torch.randn(9, 6)
    with pytest.raises(Unsupported, match="treat examples one by one"):
        compacted(block, u, memory)
    assert compacted(block, u, nn.Parameter(memory)).theirs == (False,)


class KnowsTheFirst(nn.Module):
    gated = True

    def __init__(self):
        super().__init__()
        self.first, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, u, gate=None):
        return self.first(u) if gate is None else u + gate * self.other(u)


@torch.no_grad()
def test_steps_are_told_the_gate_when_others_have_left():
    torch.manual_seed(0)
    block = tp.AdaptiveBlock(KnowsTheFirst(), nn.Linear(6, 1), max_steps=6, mode="thresholded")
    u = torch.randn(20, 6)
    (output, ponder), (expected, reference) = CompactBlock(block)(u), block(u)
    assert len(reference.steps.unique()) > 1
    assert torch.equal(ponder.steps, reference.steps)
    assert relative(output, expected) < 1e-6


@torch.no_grad()
def test_calls_of_another_kind_than_the_examples_run_as_they_are(fastest):
    fastest("compact")
    torch.manual_seed(0)
    block = tp.AdaptiveBlock(Rotate(6), nn.Linear(6, 1), max_steps=5, mode="thresholded")
    x, shift = torch.randn(4, 5, 6), torch.randn(4, 5, 6)
    for example in (x[:, :1], (x, shift[:1]), (x, shift), x[:, 0], x, (x[:1], shift[:1])):
        fast = tp.deploy(block, example)
        for inputs in ((x,), (x, shift), (x, shift[:, :1]), (x[:, 0],), (x[:2, :3],), (x, 0.5)):
            (output, ponder), (expected, reference) = fast(*inputs), block(*inputs)
            assert relative(output, expected) < 1e-5
            assert torch.equal(ponder.steps, reference.steps)


@torch.no_grad()
def test_a_block_may_be_called_with_a_context_and_without(fastest):
    fastest("compact")

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = tp.AdaptiveBlock(Rotate(6), nn.Linear(6, 1), max_steps=5, mode="thresholded")

        def forward(self, u, shift):
            u, first = self.block(u)
            u, second = self.block(u, shift)
            return {"logits": u, "ponders": [first, second]}

    net, u = Twice().eval(), torch.randn(7, 6)
    assert agree(tp.deploy(net, (u, u)), net, u, u)


@torch.no_grad()
def test_states_of_tuples_deploy(fastest):
    fastest("compact")
    cell = nn.LSTMCell(3, 5)

    class Counts(nn.Module):
        """A state of two tensors and a count."""

        def __init__(self):
            super().__init__()
            self.cell = cell

        def forward(self, u):
            h, c = self.cell(torch.tanh(u[0][:, :3]), u[:2])
            return h, c, u[2] + 1

    block = tp.AdaptiveBlock(Counts(), lambda u: u[0].sum(1, True), max_steps=4, mode="thresholded")
    u = torch.randn(9, 5), torch.randn(9, 5), torch.zeros(9, 1, dtype=torch.long)
    fast = tp.deploy(block, (u,))
    assert fast.report.measurements[0].engine == "compact"
    (output, ponder), (expected, reference) = fast(u), block(u)
    assert torch.equal(ponder.steps, reference.steps)
    assert all(relative(one, other) < 1e-5 for one, other in zip(output, expected, strict=True))


def test_steps_may_blow_up_where_nobody_goes():
    """All steps run to see whether they treat examples one by one, those too that no example reaches."""
    block = tp.AdaptiveBlock(
        lambda u: 1e20 * u, lambda u: u[:, :1].abs() - 1, max_steps=6, mode="thresholded"
    )
    assert not compacted(block, torch.randn(6, 3)).positions


# --- copies ---


class Encloses(nn.Module):
    """Steps that are functions, and enclose the module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(6, 1)
        step = lambda u: self.drop(self.norm(self.linear(u)))  # noqa: E731
        self.block = tp.AdaptiveBlock(step, lambda u: self.head(u), max_steps=3, mode="thresholded")

    def forward(self, x):
        u, self.ponder = self.block(x)
        return {"logits": u, "ponders": [self.ponder]}


def test_functions_that_enclose_modules_are_copied_with_them():
    net, x = Encloses().train(), torch.randn(8, 6)
    net(x)["logits"].sum().backward()  # and leaves a ponder with gradients behind
    before = copy.deepcopy(net.state_dict())
    fast = tp.deploy(net, x)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert agree(fast, net.eval(), x)
    logits = fast(x)["logits"]
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    assert torch.equal(fast(x)["logits"], logits)


def test_trials_leave_buffers_and_generators_as_they_were():
    generator = torch.Generator().manual_seed(7)

    class Counts(Mine):
        calls: torch.Tensor

        def __init__(self):
            super().__init__(tp.Discrete(generator))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, images, scale=1.0):
            self.calls += 1
            return super().forward(images, scale) | {"calls": self.calls.clone()}

    net, images = Counts().eval(), torch.randn(3, 3, 6, 6)
    before = generator.get_state()
    fast = tp.deploy(net, images)
    assert torch.equal(generator.get_state(), before)
    assert fast(images)["calls"] == 1
    assert net.calls == 0


# --- trials that fail ---


class Fragile(nn.Module):
    """Runs, but not in every way in which one may try to run it."""

    def __init__(self, step, head):
        super().__init__()
        self.block = tp.AdaptiveBlock(step, head, max_steps=4, mode="thresholded")

    def forward(self, x):
        u, ponder = self.block(x)
        return {"logits": u, "ponders": [ponder]}


def explodes(u):
    if u.abs().max() > 1e3:
        raise FloatingPointError("too large")
    return 30 * u


class Casts(Fragile):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(nn.functional.linear(x, torch.eye(6)))


@pytest.mark.parametrize(
    "net",
    [
        Fragile(explodes, lambda u: u.abs().sum(1, True) - 1),
        Casts(nn.Linear(6, 6), lambda u: u[:, :1].float() + 1),
        Fragile(torch.tanh, lambda u: u.sum().view(1, 1)),
    ],
    ids=["explodes", "casts", "decides for all"],
)
def test_a_network_that_runs_deploys(net):
    x = torch.rand(5, 6) + 0.5
    fast = tp.deploy(net, x)
    with torch.no_grad():
        got, expected = fast(x), net(x)
    assert torch.equal(got["ponders"][0].steps, expected["ponders"][0].steps)
    assert relative(got["logits"], expected["logits"]) < 1e-2
    assert fast.explain()


def test_views_of_weights_and_other_layers_survive_another_layout(fastest, monkeypatch):
    monkeypatch.setattr(
        standing_in, "interleaved", lambda ways, **_: {n: 0.1 if n == "blocks 1" else 1.0 for n in ways}
    )

    class Standardised(Mine):
        def __init__(self):
            super().__init__()
            self.volume = nn.Conv3d(1, 1, 1)

        def forward(self, images, scale=1.0):
            weight = self.stem.weight.view(16, -1)
            return super().forward(images + weight.mean() + self.volume.weight.sum(), scale)

    net, images = Standardised().eval(), torch.randn(3, 3, 8, 8)
    fast = tp.deploy(net, images)
    assert fast.channels_last
    assert agree(fast, net, images)


# --- what stays as it is ---


class Own(tp.AdaptiveBlock):
    def forward(self, u, *context, mode=None):
        output, ponder = super().forward(u, *context, mode=mode)
        return 2 * output, ponder


def test_what_engines_do_not_know_runs_as_it_is():
    torch.manual_seed(0)

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            units = [ResidualUnit(16, 16), ResidualUnit(16, 16)]
            self.other = Own(units, HaltingHead(16, bias=0.0), mode="thresholded")
            self.biased, _ = block_of(16, 6, 6, 1)
            self.biased.steps[1].conv1 = nn.Conv2d(16, 16, 3, padding=1)
            self.told, _ = block_of(16, 6, 6, 1, seed=1)
            self.unused, _ = block_of(16, 6, 6, 1)

        def forward(self, u):
            u, first = self.other(u)
            u, second = self.biased(u)
            u, third = self.told(u, mode="thresholded")
            return {"logits": u.mean((2, 3)), "ponders": [first, second, third]}

    net, u = Odd().eval(), torch.randn(3, 16, 6, 6)
    fast = tp.deploy(net, u)
    assert agree(fast, net, u)
    text = fast.explain()
    for line in (
        "other: Own has a forward of its own, which engines do not know",
        "biased: expected step 2 to have Conv2d(",
        "told: called with mode, which is not fixed",
        "unused: the example does not come to it",
    ):
        assert any(row.startswith(line) for row in text.splitlines()), line


class Doubled(tp.models.ResNet):
    def forward(self, images):
        logits, ponders = super().forward(images)
        return 2 * logits, ponders


def change_forward(net):
    inner = net.forward
    net.forward = lambda x: (2 * inner(x)[0], inner(x)[1])


def watch(net):
    net.register_forward_hook(lambda module, inputs, output: (2 * output[0], output[1]))


@pytest.mark.parametrize("change", [change_forward, watch, None], ids=["forward", "hook", "class"])
def test_networks_and_blocks_that_do_something_else_are_deployed_as_what_they_are(change):
    config = tp.models.ResNetConfig(units=2, halting_bias=0.0)
    net: nn.Module
    if change is None:
        torch.manual_seed(0)
        net = Doubled(config, mode="thresholded").eval()
        units = [ResidualUnit(16, 16), ResidualUnit(16, 16)]
        block = Own(units, HaltingHead(16, bias=0.0), mode="thresholded").eval()
    else:
        net, (block, _) = tp.models.build(config, "thresholded").eval(), block_of(16, 6, 6, 1)
        change(net)
        change(block)
    for each, x in ((net, torch.randn(2, 3, 16, 16)), (block, torch.randn(2, 16, 6, 6))):
        with torch.no_grad():
            expected, _ = each(x)
            output, _ = tp.deploy(each, x)(x)
        assert relative(output, expected) < 1e-5


@pytest.mark.parametrize("change", ["forward", "hook"])
def test_changed_units_are_not_run_by_engines(change):
    block, u = block_of(16, 6, 6, 2)
    unit = block.steps[1]
    if change == "hook":
        unit.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    else:
        inner = unit.forward
        unit.forward = lambda u, gate=None: 2 * inner(u, gate=gate)
    with pytest.raises(TypeError, match=r"^expected units and heads "):
        tp.deploy(block, u)

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, u):
            u, ponder = self.block(u)
            return {"logits": u, "ponders": [ponder]}

    fast = tp.deploy(Around(), u)
    assert agree(fast, Around(), u)
    assert "block: expected units and heads " in fast.explain()


def test_a_mode_of_none_is_none():
    class Passes(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, _ = block_of(16, 6, 6, 1)

        def forward(self, u, mode=None):
            u, ponder = self.block(u, mode=mode)
            return {"logits": u, "ponders": [ponder]}

    net, u = Passes().eval(), torch.randn(2, 16, 6, 6)
    fast = tp.deploy(net, u)
    assert [each.name for each in fast.report.measurements] == ["block", "all"]
    assert agree(fast, net, u)


def test_modules_may_have_attributes_of_any_name():
    class Named(Mine):
        def __init__(self):
            super().__init__()
            self.fixed = self.countable = False
            self.register_buffer("_deployed", torch.zeros(4))

    net = Named().eval()
    with tp.use_mode(net, "thresholded"):
        assert tp.count_flops(net, torch.randn(2, 3, 6, 6)).mean > 0


def test_rows_say_what_runs_and_warnings_what_does_not(monkeypatch):
    net, images = Mine().eval(), torch.randn(2, 3, 6, 6)
    monkeypatch.setattr(
        standing_in,
        "interleaved",
        lambda ways, **_: {name: 2.0 if name.startswith("blocks") else 1.0 for name in ways},
    )
    with pytest.warns(
        UserWarning, match=r"^expected engines that can run it, got native: the dense engine runs\."
    ):
        fast = tp.deploy(net, images, engines=["native"])
    assert {each.engine for each in fast.report.measurements} == {"dense"}
    assert "thinks: native: expected residual units or bottlenecks, got other steps" in fast.explain()


def test_act_in_which_examples_leave_is_no_reason_to_warn():
    block = tp.AdaptiveBlock(Rotate(6), nn.Linear(6, 1), max_steps=3, mode="act")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tp.deploy(block, torch.randn(4, 6))


def test_flops_promise_nothing_of_steps_that_nobody_can_leave():
    block = tp.AdaptiveBlock(Attends(), nn.Linear(6, 1), max_steps=3, mode="thresholded")
    fast = tp.deploy(block, torch.randn(4, 7, 6))
    assert all(each.flops_speedup != each.flops_speedup for each in fast.report.measurements)  # NaN
    assert "nan" not in fast.explain()


def test_steps_without_products_have_no_flops_to_promise():
    block = tp.AdaptiveBlock(torch.tanh, lambda u: u[:, :1], max_steps=3, mode="thresholded")
    assert "inf" not in tp.deploy(block, torch.randn(4, 6)).explain()


def test_recurrent_layers_beside_blocks_run_as_they_are():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.rnn = tp.AdaptiveRNN(nn.GRUCell(4, 6), 3, batch_first=True, mode="thresholded")
            self.block = tp.AdaptiveBlock(Rotate(6), nn.Linear(6, 1), max_steps=5, mode="thresholded")

        def forward(self, x):
            output, _, first = self.rnn(x)
            u, second = self.block(output[:, -1])
            return {"logits": u, "ponders": [first, second]}

    net, x = Both().eval(), torch.randn(4, 5, 3)
    fast = tp.deploy(net, x)
    assert agree(fast, net, x)
    assert "rnn: leaves halted sequences out by itself" in fast.explain()
    with pytest.raises(
        TypeError, match=r"^expected a network with adaptive blocks, got AdaptiveRNN, whose recurrent"
    ):
        tp.deploy(net.rnn, x)


def test_networks_whose_flops_cannot_be_counted_deploy_all_the_same():
    class Repeats(nn.Module):
        """Once more, if anyone has halted at once."""

        def __init__(self):
            super().__init__()
            self.block, _ = block_of(16, 6, 6, 1)

        def forward(self, u):
            u, ponder = self.block(u)
            if (ponder.steps == 1).any():
                u, ponder = self.block(u)
            return {"logits": u.mean((2, 3)), "ponders": [ponder]}

    net, u = Repeats().eval(), torch.randn(3, 16, 6, 6)
    fast = tp.deploy(net, u)
    assert agree(fast, net, u)
    assert "FLOPs are not counted: expected the block 'block' to be called as often" in fast.explain()
    assert "nan" not in fast.explain()


def deployed():
    return nn.Sequential(tp.deploy(Mine(), torch.zeros(2, 3, 6, 6)))


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        self.block = tp.AdaptiveBlock(Rotate(4), nn.Linear(4, 1), max_steps=3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tp.deploy(nn.Linear(2, 2), torch.zeros(1, 2)), TypeError, "got Linear without any$"),
        (lambda: tp.deploy(Mine(), torch.zeros(0, 3, 6, 6)), ValueError, "at least one input, got none$"),
        (lambda: tp.deploy(Mine(), NO_TENSOR), TypeError, "first dimension is the batch, got str$"),
        (lambda: tp.deploy(Mine().looks, (torch.zeros(1), 2)), TypeError, "a tensor of maps .* got tuple$"),
        (lambda: tp.deploy(NO_MODULE, torch.zeros(1)), TypeError, "^expected an nn.Module, got a builtin"),
        (lambda: tp.deploy(deployed(), torch.zeros(2, 3, 6, 6)), TypeError, "^expected a model, got what is"),
        (
            lambda: tp.deploy(Locked(), torch.zeros(2, 4)),
            TypeError,
            "^expected a network that can be copied",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(call, error, message):
    with pytest.raises(error, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_the_network_is_left_alone_where_engines_do_not_help(monkeypatch):
    monkeypatch.setattr(
        standing_in,
        "interleaved",
        lambda ways, **_: {name: 2.0 if name.startswith("blocks") else 1.0 for name in ways},
    )
    net, images = Mine().eval(), torch.randn(2, 3, 6, 6)
    fast = tp.deploy(net, images)
    assert fast.report.measurements[-1].engine == "dense"
    assert "as a whole, the network is fastest as it is: no engine runs" in fast.explain()
    assert not any(isinstance(each, DeployedBlock) for each in fast.network.modules())
    assert "forward" not in vars(fast.network.looks)
    assert agree(fast, net, images)
