"""Small networks whose best depths are known, and what a budget of them costs by hand."""

import torch
from torch import nn

import torchpact as tp


class FreeLogits(nn.Module):
    """Heads of one block: a free logit of every example at every exit, read off the example's index."""

    def __init__(self, steps, examples, bias):
        super().__init__()
        self.logits = nn.Parameter(torch.full((steps - 1, examples), float(bias)))

    def head(self, index):
        return lambda u: self.logits[index].unsqueeze(1)


class Count(nn.Module):
    """A step that adds one."""

    def forward(self, u):
        return u + 1


def curves(steps=6, examples=64, seed=0):
    """Losses of examples at exits, (L, n): they fall geometrically, faster for some."""
    generator = torch.Generator().manual_seed(seed)
    height = torch.rand(examples, generator=generator)
    rate = 0.4 + 0.5 * torch.rand(examples, generator=generator)
    return height * rate ** torch.arange(steps).float().unsqueeze(1)


def free_block(losses, bias):
    """A block whose state is the number of steps, with a free logit of each example at each exit."""
    steps, examples = losses.shape
    free = FreeLogits(steps, examples, bias)
    block = tp.AdaptiveBlock([Count() for _ in range(steps)], [free.head(i) for i in range(steps - 1)])
    return free, block


def optimal_share(losses, tau):
    """The cost of the optimum at a price: every example at its best exit, as a share of all L steps."""
    costs = losses + tau * torch.arange(1, len(losses) + 1).unsqueeze(1)
    return float((costs.argmin(0) + 1).float().mean()) / len(losses)


class Classifier(nn.Module):
    """A network of one block per example with a read-out: a plain loop around residual steps."""

    def __init__(self, steps=4, width=8, classes=3, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(width, width)
        layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(steps)]
        self.block = tp.AdaptiveBlock(layers, [nn.Linear(width, 1) for _ in range(steps - 1)])
        self.last = nn.Linear(width, classes)

    def forward(self, x):
        u, _ = self.block(self.first(x))
        return self.last(u)


class Tokens(nn.Module):
    """Two runs of transformer layers, for ``tp.adapt``, and a read-out of every token."""

    def __init__(self, layers=3, width=16, classes=5, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(width, 2, 24, batch_first=True, dropout=0.0)
        self.first = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.second = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.last = nn.Linear(width, classes)

    def forward(self, x):
        return self.last(self.second(self.first(x)))


def with_random_heads(net, std=1.0, bias=0.0, seed=1):
    """Adapt a network, and let its heads decide something."""
    ada = tp.adapt(net)
    torch.manual_seed(seed)
    for run in ada.torchpact.runs:
        for head in run.heads:
            nn.init.normal_(head.weight, std=std)
            nn.init.constant_(head.bias, bias)
    return ada.eval()
