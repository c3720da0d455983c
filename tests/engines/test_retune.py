"""retune: what is deployed is measured again, and chosen again."""

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.engines.networks import relative
from torchpact.engines.report import Report
from torchpact.engines.timing import CpuContention

pytestmark = pytest.mark.usefixtures("no_patience")


class Own(nn.Module):
    """A network of one's own around a block."""

    def __init__(self):
        super().__init__()
        steps = [tp.Residual(nn.Linear(16, 16)) for _ in range(4)]
        heads = [nn.Linear(16, 1) for _ in range(3)]
        self.first = nn.Linear(8, 16)
        self.block = tp.AdaptiveBlock(steps, heads, mode="thresholded")

    def forward(self, x):
        return self.block(self.first(x))


def own():
    torch.manual_seed(0)
    return Own().eval(), torch.randn(32, 8)


def resnet():
    torch.manual_seed(0)
    net = tp.models.ResNet(tp.models.ResNetConfig(units=2, halting_bias=0.0), mode="thresholded").eval()
    return net, torch.randn(3, 3, 16, 16)


@torch.no_grad()
def same(fast, net, x):
    (expected, told), (output, got) = net(x), fast(x)
    told, got = (each if isinstance(each, list) else [each] for each in (told, got))
    assert relative(output, expected) < 1e-4
    assert [p.steps.tolist() for p in got] == [p.steps.tolist() for p in told]


@pytest.mark.parametrize("make", [own, resnet])
def test_another_engine_is_chosen_where_it_is_faster_now(make, fastest, monkeypatch):
    net, x = make()
    fastest("dense")
    fast = tp.deploy(net, x)
    before = [row.engine for row in fast.report.measurements]
    fastest("compact" if make is own else "sparse")
    told = fast.retune(x[:2])
    assert told == fast.explain()
    assert fast.report.batch == 2
    after = [row.engine for row in fast.report.measurements]
    assert before != after
    assert {"compact", "sparse"} & {*after}
    for inputs in (x, x[:1]):
        same(fast, net, inputs)
    fastest("dense")
    fast.retune(x)
    assert [row.engine for row in fast.report.measurements] == before
    same(fast, net, x)


@pytest.mark.parametrize("make", [own, resnet])
def test_what_was_chosen_stays_where_an_example_does_not_fit(make):
    net, x = make()
    fast = tp.deploy(net, x)
    before = fast.explain()
    for example in (x[:0], x[:, :2], "no tensor"):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            fast.retune(example)
        assert fast.explain() == before
        same(fast, net, x)


def test_measuring_again_is_no_call_of_the_network():
    net, x = own()
    fast = tp.deploy(net, x)
    with tp.collect(fast) as ponders:
        fast.retune(x)
        assert len(ponders) == 0
        fast(x)
    assert len(ponders) == 1


def test_thresholds_and_engines_are_those_of_the_deployment():
    net, x = own()
    fast = tp.deploy(net, x, engines=["compact"], mode=tp.Thresholded(0.4))
    fast.retune(x)
    assert [row.engine for row in fast.report.measurements] == ["compact", "blocks"]
    with torch.no_grad():
        assert torch.equal(fast(x)[1].steps, net.block(net.first(x), mode=tp.Thresholded(0.4))[1].steps)
        assert torch.equal(fast(x, thresholds=0.9)[1].steps, net.block(net.first(x), thresholds=0.9)[1].steps)


def test_a_network_with_hooks_of_its_layers_is_tuned_again():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    net = tp.adapt(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval(), per="token")
    for head in net.torchpact.runs[0].heads:
        nn.init.normal_(head.weight)
        nn.init.zeros_(head.bias)
    x = torch.randn(2, 7, 16)
    fast = tp.deploy(net, x)
    with torch.no_grad():
        expected = net(x)
        fast.retune(x[:1])
        assert relative(fast(x), expected) < 1e-4


def test_it_says_that_others_were_busy_when_it_chose(monkeypatch):
    net, x = own()
    monkeypatch.setattr(CpuContention, "is_high", lambda _: True)
    fast = tp.deploy(net, x)
    assert "Other programs were busy when this was chosen: retune(example)" in fast.explain()
    monkeypatch.setattr(CpuContention, "is_high", lambda _: False)
    assert "busy" not in fast.retune(x)


def test_a_report_of_a_quiet_machine_says_nothing_of_others():
    assert "busy" not in str(Report(1, []))
    assert str(Report(1, [], busy=True)).count("busy") == 2
