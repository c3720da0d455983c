"""What a subclass of a ResNet adds is counted."""

import torch
from torch import nn

import torchpact as tp


class Wider(tp.models.ResNet):
    """A ResNet with one more convolution before the stem."""

    def __init__(self):
        super().__init__(tp.models.ResNetConfig(units=5), mode="thresholded")
        self.extra = nn.Conv2d(3, 3, 7, padding=3)

    def forward(self, images):
        return super().forward(self.extra(images))


def test_a_layer_that_a_subclass_adds_is_charged():
    torch.manual_seed(0)
    net, images = Wider().eval(), torch.randn(2, 3, 32, 32)
    count = tp.count_flops(net, images)
    assert count.rest == 886_016 + 2 * 7 * 7 * 3 * 3 * 32 * 32 == 1_789_184
    plain = tp.models.ResNet(net.config, mode="thresholded").eval()
    plain.load_state_dict(net.state_dict(), strict=False)
    with torch.no_grad():
        inner = net.extra(images)
    assert torch.equal(count.blocks, tp.count_flops(plain, inner).blocks)


def test_a_layer_that_inherits_all_it_does_costs_the_same():
    class Mine(tp.AdaptiveRNN):
        """By another name."""

    torch.manual_seed(0)
    layer = tp.AdaptiveRNN(nn.GRUCell(9, 16), 3, mode="thresholded", halting_bias=0.0)
    other = Mine(nn.GRUCell(9, 16), 3, mode="thresholded", halting_bias=0.0)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 4, 8)
    count, same = tp.count_flops(layer, x), tp.count_flops(other, x)
    assert torch.equal(count.blocks, same.blocks)
    assert (count.rest, len(same.blocks)) == (same.rest, 4)


def test_hooks_change_no_flops():
    torch.manual_seed(0)
    net, images = (
        tp.models.psact_resnet32(mode="thresholded", halting_bias=0.0).eval(),
        torch.randn(2, 3, 16, 16),
    )
    before = tp.count_flops(net, images).total
    net.get_submodule("blocks.1.steps.2").register_forward_hook(lambda module, inputs, output: None)
    assert torch.equal(tp.count_flops(net, images).total, before)


def test_images_of_no_weight_cost_nothing():
    torch.manual_seed(0)
    net = tp.models.psact_resnet32(mode="thresholded", halting_bias=0.0).eval()

    class Weighed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = net.blocks[0]

        def forward(self, u):
            weights = torch.tensor([1.0, 0.0]).view(2, 1, 1, 1)
            return self.block(u, weights=weights)

    u = torch.randn(2, 16, 8, 8)
    all_of_it, weighed = tp.count_flops(net.blocks[0], u), tp.count_flops(Weighed(), u)
    assert weighed.total.tolist() == [all_of_it.total[0].item(), 0]
