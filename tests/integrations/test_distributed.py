"""Two processes have the gradients of one with the whole batch."""

import socket

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from tests.integrations.processes import WORLD, compare


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="processes on a CPU talk by gloo")
def test_ddp_and_fsdp2_have_the_gradients_of_one_process():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(compare, (port,), nprocs=WORLD)
