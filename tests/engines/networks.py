"""Networks with statistics as training might leave them, and heads that are told where to halt."""

import torch
from torch import nn

import torchpact as tp
from torchpact.models import Bottleneck, HaltingHead, ResNetConfig, build


def lively(seed=0, mode="thresholded", **settings):
    """A network whose batch norms do something, and whose heads halt about half of the positions."""
    torch.manual_seed(seed)
    model = build(ResNetConfig(**{"units": 3, "halting_bias": 0.0} | settings), mode).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
            statistics = dict(module.named_buffers())
            statistics["running_mean"].normal_(0, 0.3)
            statistics["running_var"].uniform_(0.5, 2)
    return model


def tell_heads(model, bias):
    """Let all heads give the same logit everywhere."""
    for head in model.modules():
        if isinstance(head, HaltingHead):
            for parameter in head.parameters():
                nn.init.zeros_(parameter)
            nn.init.constant_(head.linear.bias, bias)
    return model


def block_of(channels, height, width, batch, *, stride=1, seed=0, **settings):
    """A block of a network with the given channels, and states to run it on."""
    block = lively(seed, width=channels // 16, **settings).blocks[0]
    if stride == 2:
        block = lively(seed, width=channels // 32, **settings).blocks[1]
    inputs = block.steps[0].conv1.in_channels
    return block, torch.randn(batch, inputs, height * stride, width * stride)


def relative(got, expected):
    """The distance of two tensors relative to the norm of the second."""
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def undecided(ponder, bound=0.0, margin=1e-4):
    """Whether any logit that was asked lies so close to the bound that rounding may decide."""
    return bool(((ponder.probs.logit() - bound).abs() < margin).any())


@torch.no_grad()
def halt_outside(block, u, mask):
    """Let heads halt for sure where a (batch, height, width) mask is false, and nowhere else."""
    tell_heads(block, 0.0)
    for unit in block.steps:
        getattr(unit, "conv3", unit.conv2).weight[3] = 0  # a channel that no unit changes
    for head in block.halting:
        head.conv.weight[0, 3, 1, 1] = 1
    u[:, 3] = torch.where(mask, -8.0, 8.0)
    return block, u


@torch.no_grad()
def bottlenecks_of(channels, height, width, batch, *, stride=1, seed=0, **heads_are):
    """Return a block of three bottleneck units that stops here and there, and its input."""
    torch.manual_seed(seed)
    inputs = channels // 2 if stride == 2 else channels
    steps = [Bottleneck(inputs, channels, stride), *(Bottleneck(channels, channels) for _ in range(2))]
    heads = [HaltingHead(channels, bias=0.0, **heads_are) for _ in steps[1:]]
    block = tp.AdaptiveBlock(steps, heads, mode="thresholded").eval()
    for norm in (m for m in block.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_(0, 0.3)
    return block, torch.randn(batch, inputs, height * stride, width * stride)
