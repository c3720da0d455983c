"""DistributedDataParallel: torchrun --nproc-per-node 2 examples/ddp.py. All processes run all layers."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchpact as tp


def main(steps: int) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)  # the same network everywhere
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    net = tp.adapt(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))  # before it is wrapped
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    torch.manual_seed(1 + dist.get_rank())  # other examples and other noise in each process
    for _ in range(steps):
        u = torch.randn(16, 10, 32)
        with tp.collect(ddp) as ponders:
            loss = (ddp(u) - u.flip(2)).square().mean()
        optimizer.zero_grad()
        tp.map_loss(loss, ponders, tau=0.02).backward()  # DDP averages gradients over processes
        optimizer.step()
    total = torch.stack([p.detach().double().sum() for p in net.parameters()]).sum()
    every = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(every, total)
    if dist.get_rank() == 0:
        print(f"{len(every)} processes, the same weights: {all(torch.equal(each, total) for each in every)}")
        print(ponders.table())
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    main(parser.parse_args().steps)
