"""FSDP2, sharded weights: torchrun --nproc-per-node 2 examples/fsdp2.py. Adapt first, then shard."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchpact as tp


def network() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return tp.adapt(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))


def main(steps: int) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))  # "cuda" on GPUs
    net = network()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)  # heads belong to the root: do not shard net.torchpact by itself
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(steps):
        u = torch.randn(16, 10, 32)
        with tp.collect(net) as ponders:
            loss = (net(u) - u.flip(2)).square().mean()
        optimizer.zero_grad()
        tp.map_loss(loss, ponders, tau=0.02).backward()
        optimizer.step()
    weights = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:  # a whole network again, for tp.save_pretrained and tp.deploy
        whole = network()
        print(whole.load_state_dict(weights))
        print(ponders.table())
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    main(parser.parse_args().steps)
