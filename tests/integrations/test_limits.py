"""What docs/adapt-training.md says does not go together, and how each of it fails."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import torchpact as tp
from tests.integrations.networks import Encoder, bert


@pytest.fixture
def mesh():
    """A mesh of this process alone, whose weights FSDP2 shards all the same."""
    if not dist.is_gloo_available():
        pytest.skip("processes on a CPU talk by gloo")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step(net):
    with tp.collect(net) as ponders:
        output = net(torch.randn(4, 5, 16))
    tp.map_loss(output.square().mean(), ponders, tau=0.1).backward()


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_around_a_sharded_layer_fails_in_backward(mesh):
    net = tp.adapt(Encoder(reentrant=False), bias=-1.0)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    with pytest.raises(ValueError, match="within the layer's forward"):
        step(net)


def test_a_checkpoint_within_a_sharded_layer_does_not(mesh):
    net = tp.adapt(Encoder(), bias=-1.0)
    for layer in net.layers:
        forward = layer.forward
        layer.forward = lambda *args, own=forward, **kwargs: checkpoint(
            own, *args, use_reentrant=False, **kwargs
        )
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    step(net)


def test_heads_that_are_sharded_by_themselves_fail(mesh):
    net = tp.adapt(Encoder(), bias=-1.0)
    fully_shard(net.torchpact, mesh=mesh)
    fully_shard(net, mesh=mesh)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        step(net)


@pytest.mark.usefixtures("_fresh_compiler")
def test_collect_within_a_compiled_function_breaks_its_graph():
    net = tp.adapt(Encoder())

    def forward(u):
        with tp.collect(net):
            return net(u)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(forward, fullgraph=True, backend="eager")(torch.randn(4, 5, 16))


def test_several_gpus_in_one_process_are_refused_in_the_trainer():
    pytest.importorskip("transformers", reason="its Trainer is what is tested")
    from torchpact.integrations.transformers import price_scale

    with pytest.raises(ValueError, match="expected one GPU a process"):
        price_scale(SimpleNamespace(args=SimpleNamespace(n_gpu=2)))


def test_heads_that_peft_copies_are_refused():
    peft = pytest.importorskip("peft", reason="its way with modules is what is tested")
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"], modules_to_save=["torchpact"])
    model = peft.get_peft_model(tp.adapt(bert()), config).train()
    with pytest.raises(ValueError, match=r"^expected the heads of 'bert.encoder.layer' once, [^\n]*$"):
        tp.collect(model)


def test_peft_saves_no_heads(tmp_path):
    peft = pytest.importorskip("peft", reason="what it saves is what is tested")
    net = tp.adapt(bert())
    model = peft.get_peft_model(net, peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    net.torchpact.requires_grad_(True)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert not any("torchpact" in name for name in file.keys())  # noqa: SIM118


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_wrapper_that_is_sharded_fails_in_backward(mesh):
    """The head is within what is computed again, and asks for it before FSDP2 has gathered the weights."""
    net = tp.adapt(Encoder(), bias=-1.0)
    apply_activation_checkpointing(net, check_fn=lambda m: isinstance(m, nn.TransformerEncoderLayer))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        step(net)
