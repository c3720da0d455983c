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
