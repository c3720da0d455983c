"""Train a classifier to half of its FLOPs, calibrate thresholds for three budgets, deploy one network."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import torchpact as tp


class Classifier(nn.Module):
    def __init__(self, layers: int = 4, width: int = 32) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.embed, self.read = nn.Embedding(10, width), nn.Linear(width, 2)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.read(self.encoder(self.embed(tokens)).mean(1))


def score(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return -cross_entropy(logits, batch[1], reduction="none")


def main(steps: int) -> tp.ThresholdTable:
    def batch(examples: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(10, (examples, 12))
        return tokens, (tokens.sum(1) > 54).long()  # hard where the sum is near 54

    net = tp.adapt(Classifier(), per="example").train()
    budget = tp.Budget(flops=0.5).bind(net, batch(8)[0])
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(steps):
        tokens, labels = batch(64)
        with tp.collect(net) as ponders:
            nll = cross_entropy(net(tokens), labels, reduction="none")
        optimizer.zero_grad()
        budget.loss(nll, ponders).backward()
        optimizer.step()
        budget.step()  # moves the price of a step
    print(budget)
    held_out = [batch(250) for _ in range(4)]
    table = tp.calibrate(net, held_out, [0.4, 0.6, 0.8], score, inputs=lambda batch: batch[0])
    fast = tp.deploy(net, batch(64)[0])
    print(table.table(), fast(batch(3)[0], thresholds=table.at(0.6)).argmax(1), sep="\n")
    return table


if __name__ == "__main__":
    torch.manual_seed(0)
    main(steps=300)
