"""What two processes do in tests: one step each, on half of the batch, and a comparison with one process."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchpact as tp
from tests.integrations.networks import Encoder, apart, gradients

WORLD = 2


def network() -> Any:
    """Return an adapted network whose heads have gradients of some size, without noise in its mode."""
    net = tp.adapt(Encoder(), bias=-1.0)
    tp.use_mode(net, tp.ACT())
    return net


def states() -> Tensor:
    return torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(2))


def step(net: nn.Module, call: nn.Module, u: Tensor) -> dict[str, Tensor]:
    return gradients(net, lambda: call(u).square().mean())


def compare(rank: int, port: int) -> None:
    """Assert that gradients of two processes are those of one; the process fails where they are not."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    try:
        own = states().chunk(WORLD)[rank]
        whole = network()
        wanted = step(whole, whole, states())
        _data_parallel(own, wanted)
        _sharded(own, wanted)
        _sharded(own, wanted, checkpointed=True)
        _sharded(own, wanted, 0.05, MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    finally:
        dist.destroy_process_group()


def _data_parallel(own: Tensor, wanted: dict[str, Tensor]) -> None:
    net = network()
    ddp = DistributedDataParallel(net)
    found = step(net, ddp, own)
    assert apart(found, wanted) < 1e-5, "DDP"


def _sharded(
    own: Tensor,
    wanted: dict[str, Tensor],
    tolerance: float = 1e-5,
    precision: MixedPrecisionPolicy | None = None,
    checkpointed: bool = False,
) -> None:
    net = network()
    if checkpointed:  # their forward alone, as transformers does it: hooks stay outside
        for layer in net.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    mesh = init_device_mesh("cpu", (WORLD,))
    precision = MixedPrecisionPolicy() if precision is None else precision
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(net, mesh=mesh, mp_policy=precision)
    found = {name: each.full_tensor() for name, each in step(net, net, own).items()}  # type: ignore[attr-defined]
    assert apart(found, wanted) < tolerance, f"FSDP2, {checkpointed=}, {precision=}"
    with tp.use_mode(net.eval(), None), tp.collect(net) as ponders, torch.no_grad():
        net(own)
    assert ponders[0].steps.float().mean() == len(net.layers), "thresholded"
