"""Names of their own that users give to blocks change nothing."""

import pytest
import torch
from torch import nn

import torchpact as tp


class Blocks(nn.Module):
    """Blocks one after another, by their names."""

    def __init__(self, *names):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            tp.AdaptiveBlock([nn.Linear(8, 8) for _ in range(3)], nn.Linear(8, 1), name=name)
            for name in names
        )

    def forward(self, x):
        for block in self.blocks:
            x, _ = block(x)
        return x


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16, 8, generator=generator) for _ in range(4)]


@pytest.mark.parametrize("names", [("mine",), ("mine", "mine"), ("blocks.1", "blocks.0")])
def test_calibration_and_diagnosis_are_those_of_blocks_without_names(names):
    net, plain = Blocks(*names), Blocks(*[""] * len(names))
    assert tp.calibrate(net, inputs(), 0.8, runs=2) == tp.calibrate(plain, inputs(), 0.8, runs=2)
    assert tp.diagnose(net, inputs()) == tp.diagnose(plain, inputs())
    assert [block.name for block in net.blocks] == [*names]


def test_a_budget_charges_blocks_by_their_own_names_or_places():
    values = []
    for names in (("mine", "other"), ("", "")):
        net = Blocks(*names)
        budget = tp.Budget(flops={"blocks.0": 0.7, "blocks.1": 0.9}).bind(net, inputs()[0])
        with tp.collect(net) as ponders:
            output = net(inputs()[0])
        assert [ponder.name for ponder in ponders] == [name or f"blocks.{i}" for i, name in enumerate(names)]
        loss = budget.loss(output.square().mean(1), ponders)
        budget.step()
        values.append((float(loss.detach()), budget.log))
    assert values[0] == values[1]


def test_a_network_whose_blocks_share_a_name_is_distilled():
    config = tp.budget.DistillConfig(exit_updates=1, head_updates=1)
    ada = tp.distill(Blocks("mine", "mine"), inputs(), 0.8, config=config)
    with tp.use_mode(ada, "thresholded"):
        assert float(tp.count_flops(ada, inputs()[-1]).share) <= 0.8


def test_ponders_of_blocks_that_share_a_name_are_refused_by_a_budget():
    net = Blocks("mine", "mine")
    budget = tp.Budget(flops=0.8).bind(net, inputs()[0])
    with tp.collect(net) as ponders:
        output = net(inputs()[0])
    with pytest.raises(ValueError, match=r"expected ponders of the blocks .*, got one of 'mine'"):
        budget.loss(output.square().mean(1), ponders)
