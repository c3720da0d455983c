"""FLOPs of plain residual networks made adaptive, against sums written by hand."""

import pytest
import torch
from torch.nn import functional as F

import torchpact as tp
from torchpact.models import ResNetConfig, build


@pytest.mark.parametrize("per", ["pixel", "example"])
@torch.no_grad()
def test_units_are_charged_where_they_ran_and_heads_of_one_tap_where_they_were_asked(per):
    torch.manual_seed(0)
    net = tp.adapt(build(ResNetConfig(units=3, adaptive=False)).eval(), per=per)
    images = torch.randn(4, 3, 8, 8)
    for run in net.torchpact.runs:
        for head in run.heads:
            torch.nn.init.normal_(head.weight)
            torch.nn.init.zeros_(head.bias)
    with tp.collect(net) as ponders:
        net(images)
    expected = []
    for number, (channels, side) in enumerate([(16, 8), (32, 4), (64, 2)]):
        given = channels if number == 0 else channels // 2
        steps = ponders[number].steps.expand(-1, 1, side, side)
        own = torch.full((4,), side**2 * 2 * 9 * channels * (given + channels))
        for unit in (2, 3):
            active = (steps >= unit).float()
            near = F.max_pool2d(active, 3, stride=1, padding=1)
            own += 2 * 9 * channels**2 * (active + near).sum((1, 2, 3)).long()
            asked = (
                (steps >= unit - 1).sum((1, 2, 3)) if per == "pixel" else ponders[number].steps >= unit - 1
            )
            own += 2 * channels * asked.view(4).long()
        expected.append(own)
    count = tp.count_flops(net, images)
    assert torch.equal(count.blocks, torch.stack(expected, 1))
    assert count.rest == 2 * 9 * 3 * 16 * 8 * 8 + 2 * 64 * 10
    report = tp.deploy(net, images).report
    assert report.measurements[0].flops == pytest.approx(float(expected[0].double().mean()))
