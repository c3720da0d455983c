"""A looped network learns prefix parity with resets, is calibrated to a budget, and streams inputs."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchpact as tp


def strings(count: int, length: int = 16) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(2, (count, length)).masked_fill(torch.rand(count, length) < 0.15, 2)
    parity = [torch.zeros(count, dtype=torch.long)]  # of the bits since the last 2, a reset
    for token in tokens.unbind(1):
        parity.append(torch.where(token == 2, 0, parity[-1] ^ (token == 1)))
    return tokens, torch.stack(parity[1:], 1)


class Embed(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).transpose(1, 2)  # channels first


def right(output: tuple[Tensor, tp.Ponder], batch: tuple[Tensor, Tensor]) -> Tensor:
    return (output[0].argmax(1) == batch[1]).all(1).float()


def main(steps: int, batch: int = 32) -> tuple[float, float]:
    embed, readout = Embed(3, 32), nn.Conv1d(32, 2, 1)
    sure = tp.criteria.Confidence(readout, per="example")  # halts once the read-out is sure
    net = tp.nn.Looped(embed, tp.nn.ConvUpdate(32), readout, halting=sure, max_steps=12)
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)
    for _ in range(steps):
        tokens, parity = strings(batch)
        losses = partial(cross_entropy, target=parity, reduction="none")
        loss = tp.nn.loop_loss(net, tokens, losses, "every")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    held_out = [strings(128) for _ in range(4)]
    thresholds = tp.calibrate(net.eval(), held_out, 0.6, right, inputs=lambda each: each[0])
    tokens, parity = strings(500)
    outputs, ponders = zip(*tp.stream(net, tokens, width=64, thresholds=thresholds), strict=True)
    solved = float((torch.stack(outputs).argmax(1) == parity).all(1).float().mean())
    taken = float(tp.Ponders(ponders).steps)
    print(f"{solved:.3f} of the strings solved in {taken:.1f} of 12 steps")
    return solved, taken


if __name__ == "__main__":
    torch.manual_seed(0)
    main(steps=400)
