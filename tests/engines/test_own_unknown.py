"""What engines do not know, in networks that are not ours: it runs as it is, or is refused in a line."""

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.engines.networks import block_of, relative
from tests.engines.strangers import Attends, Mine, Rotate, agree
from torchpact.engines import whole
from torchpact.engines.patching import PatchedPart
from torchpact.models import HaltingHead, ResidualUnit

pytestmark = pytest.mark.usefixtures("no_patience")


NO_TENSOR: Any = "images"
NO_MODULE: Any = torch.tanh


class Own(tp.AdaptiveBlock):
    def forward(self, u, *context, mode=None, **named):
        output, ponder = super().forward(u, *context, mode=mode, **named)
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
    for start, name in (
        ("Own has a forward of its own, which engines do not know", "other"),
        ("sparse, native: expected step 2 to have Conv2d(", "biased"),
        ("forward calls it with mode, and engines need the block's own", "told"),
        ("the example does not come to it", "unused"),
    ):
        assert any(row.startswith(start) and row.endswith(f"(block {name})") for row in text.splitlines()), (
            start
        )


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
    alone = tp.deploy(block, u)
    with torch.no_grad():
        assert relative(alone(u)[0], block(u)[0]) < 1e-5
    assert "expected units and heads " in alone.explain()

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, u):
            u, ponder = self.block(u)
            return {"logits": u, "ponders": [ponder]}

    fast = tp.deploy(Around(), u)
    assert agree(fast, Around(), u)
    assert "expected units and heads " in fast.explain()


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
        whole,
        "interleaved",
        lambda ways, **_: {name: 2.0 if name.startswith("blocks") else 1.0 for name in ways},
    )
    fast = tp.deploy(net, images, engines=["native"])  # which is slower, but was asked for
    assert [each.engine for each in fast.report.measurements] == ["native", "dense", "blocks"]
    assert "expected a block whose steps are all ResidualUnit or all Bottleneck, got Rotate" in fast.explain()
    alone = tp.AdaptiveBlock(Rotate(6), nn.Linear(6, 1), max_steps=3, mode="thresholded")
    with pytest.warns(
        UserWarning, match=r"^expected engines that can run it, got native: the dense engine runs\."
    ):
        fast = tp.deploy(alone, torch.randn(4, 6), engines=["native"])
    assert {each.engine for each in fast.report.measurements} == {"dense"}


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


def test_recurrent_layers_beside_blocks_are_deployed_too():
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
    assert [each.name for each in fast.report.measurements] == ["rnn", "block", "all"]
    with torch.no_grad():
        output, final, ponder = tp.deploy(net.rnn, x)(x)
        expected, expected_final, reference = net.rnn(x)
    assert relative(output, expected) < 1e-5
    assert relative(final, expected_final) < 1e-5
    assert torch.equal(ponder.steps, reference.steps)


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
        (
            lambda: tp.deploy(Mine().looks, torch.zeros(1)),
            ValueError,
            r"^expected maps of shape .* got \(1,\)$",
        ),
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
        whole,
        "interleaved",
        lambda ways, **_: {name: 2.0 if name.startswith("blocks") else 1.0 for name in ways},
    )
    net, images = Mine().eval(), torch.randn(2, 3, 6, 6)
    fast = tp.deploy(net, images)
    assert fast.report.measurements[-1].engine == "dense"
    assert "as a whole, the network is fastest as it is: no engine runs" in fast.explain()
    for part in (fast.network.looks, fast.network.thinks):
        assert isinstance(part.forward, PatchedPart)
        assert part.forward.runner is None
    assert agree(fast, net, images)
