"""Networks that are not ours, deployed as a whole."""

import copy
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn

import torchpact as tp
from tests.engines.networks import block_of, bottlenecks_of
from tests.engines.strangers import Mine, agree

pytestmark = pytest.mark.usefixtures("no_patience")


@pytest.mark.parametrize("engine", ["dense", "sparse", "native", "compact", None])
def test_outputs_are_those_of_the_network_for_any_batch_and_size(engine, fastest):
    fastest(engine)
    net, images = Mine().eval(), torch.randn(7, 3, 10, 12)
    fast = tp.deploy(net, images[:3])
    for part in (images, images[:1], images[:0], images[:, :, :6, :8].clone()):
        assert agree(fast, net, part)
    assert agree(fast, net, images, 2.0)
    chosen = {each.name: each.engine for each in fast.report.measurements}
    assert set(chosen) == {"looks", "thinks", "all"}
    if engine in ("sparse", "native"):
        assert chosen["looks"] == engine
    if engine == "compact":
        assert chosen["thinks"] == engine
    assert str(fast).startswith("Deployed(Mine, looks: ")


class ByName(Mine):
    """Called by names, of which it knows none without."""

    def forward(self, *, images, scale):  # type: ignore[override]
        return super().forward(images, scale)


@pytest.mark.parametrize("engine", ["dense", "native", "compact", None])
@pytest.mark.parametrize("last", [False, True])
def test_arguments_may_have_names(engine, last, fastest):
    fastest(engine)
    net, images = ByName().eval(), torch.randn(7, 3, 10, 12)
    named = {"images": images[:3], "scale": torch.tensor(2.0)}
    fast = tp.deploy(net, (), kwargs=named)
    fast.channels_last = last
    assert agree(lambda *_: fast(**named), lambda *_: net(**named), named["images"])
    more = {"images": images, "scale": 1.0}
    assert agree(lambda *_: fast(**more), lambda *_: net(**more), images)
    assert fast.report.batch == 3
    assert tp.count_flops(net, (), kwargs=named).total.tolist() == [
        *tp.count_flops(Mine().eval(), (named["images"], 2.0)).total.tolist()
    ]
    partly = tp.deploy(Mine().eval(), images, kwargs={"scale": 2.0})
    assert agree(lambda *x: partly(*x, scale=2.0), lambda *x: net(images=x[0], scale=2.0), images)


def test_names_are_for_networks_of_ones_own():
    with pytest.raises(TypeError, match=r"^expected a tensor of images and nothing else, got Tensor, float$"):
        tp.deploy(tp.models.psact_resnet32(), torch.randn(1, 3, 32, 32), kwargs={"scale": 1.0})
    for function in (tp.deploy, tp.count_flops):
        with pytest.raises(TypeError, match=r"^expected kwargs to be a dictionary, got list$"):
            function(Mine(), torch.randn(1, 3, 8, 8), kwargs=[1.0])  # type: ignore[arg-type]
        with pytest.raises(
            TypeError, match=r"^expected tensors whose first dimension is the batch, got float$"
        ):
            function(ByName(), (), kwargs={"scale": 1.0})


def test_halted_examples_leave_the_batch_of_any_step(fastest):
    fastest("compact")
    net, images = Mine().eval(), torch.randn(12, 3, 6, 6) + 3 * torch.randn(12, 3, 1, 1)
    fast = tp.deploy(net, images)
    seen = fast.network.thinks.steps[0].seen
    seen.clear()
    with torch.no_grad():
        ponder = fast(images)["ponders"][1]
    assert seen == [int(n) for n in ponder.active.flatten(1).sum(1) if n]
    assert seen[-1] < 12


def test_the_network_stays_as_it_was_and_its_changes_without_effect():
    net, images = Mine("relaxed").train(), torch.randn(3, 3, 6, 6)
    before = copy.deepcopy(net.state_dict())
    fast = tp.deploy(net, images, mode="thresholded")
    assert net.training
    assert net.looks.mode == net.thinks.mode == tp.Relaxed()
    assert "forward" not in vars(net.looks)
    assert all(p.requires_grad for p in net.parameters())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    logits = fast(images)["logits"]
    assert not logits.requires_grad
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    fast.train()
    assert torch.equal(fast(images)["logits"], logits)
    assert not [*fast.parameters()]


def test_what_is_deployed_is_neither_saved_nor_moved_nor_told_another_mode():
    fast = tp.deploy(Mine().eval(), torch.randn(2, 3, 6, 6))
    with pytest.raises(TypeError, match="neither copied nor saved"):
        pickle.dumps(fast)
    with pytest.raises(TypeError, match="neither copied nor saved"):
        fast.state_dict()
    with pytest.raises(RuntimeError, match="deploy again"):
        fast.double()
    with pytest.raises(ValueError, match=r"^expected a model, got what is deployed: deploy the model again"):
        tp.use_mode(nn.Sequential(fast), "discrete")


def test_autocast_and_gradients_are_left_outside():
    net, images = Mine().eval(), torch.randn(2, 3, 6, 6)
    fast = tp.deploy(net, images)
    with torch.autocast("cpu", torch.bfloat16):
        logits = fast(images.requires_grad_())["logits"]
    assert logits.dtype == torch.float32
    assert agree(fast, net, images)


def test_details_may_be_left_out(fastest):
    for engine in ("native", "compact", "dense"):
        fastest(engine)
        net, images = Mine().eval(), torch.randn(5, 3, 6, 6)
        fast = tp.deploy(net, images, details=False)
        assert agree(fast, net, images)
        assert all(p.probs.isnan().all() for p in fast(images)["ponders"])


def test_modes_keep_the_generators_they_draw_from(fastest):
    fastest("compact")
    generator = torch.Generator().manual_seed(0)
    net, images = Mine(tp.Discrete(generator)).eval(), torch.randn(40, 3, 6, 6) + 3 * torch.randn(40, 3, 1, 1)
    fast = tp.deploy(net, images)
    draws = []
    for _ in range(2):
        generator.manual_seed(3)
        draws.append(fast(images)["ponders"])
    for one, other in zip(*draws, strict=True):
        assert torch.equal(one.steps, other.steps)
        assert one.log_prob is not None
    assert len(draws[0][1].steps.unique()) > 2


def test_soft_modes_run_as_they_are_with_a_warning():
    net, images = Mine("relaxed").eval(), torch.randn(2, 3, 6, 6)
    with pytest.warns(UserWarning, match=r"^expected a hard mode, .* got Relaxed") as caught:
        fast = tp.deploy(net, images)
    assert caught[0].filename == __file__
    assert "compact: expected a mode in which examples halt for good, got Relaxed" in fast.explain()
    assert set(fast(images)) == {"logits", "ponders"}


def test_engines_may_be_named():
    net, images = Mine().eval(), torch.randn(4, 3, 6, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = tp.deploy(net, images, engines=["sparse", "dense"])
    chosen = {each.name: each.engine for each in fast.report.measurements}
    assert chosen["looks"] in ("sparse", "dense")
    assert chosen["thinks"] == "dense"
    assert agree(fast, net, images)
    with pytest.raises(ValueError, match=r"^expected engines among dense, .*; got 'fast'"):
        tp.deploy(net, images, engines=["fast"])


def test_the_table_names_blocks_and_counts_all_flops():
    net, images = Mine().eval(), torch.randn(4, 3, 8, 8)
    fast = tp.deploy(net, images)
    count = tp.count_flops(net, images)
    *blocks, whole = fast.report.measurements
    assert [each.flops for each in blocks] == pytest.approx(count.blocks.double().mean(0).tolist())
    assert whole.flops == pytest.approx(count.mean.item())
    stem, readout = 2 * 64 * 27 * 16, 2 * 32 * 4
    looks = 2 * 16 * 9 * (16 * 32 + 32 * 32) + 2 * 2 * 16 * 9 * 2 * 32 * 32
    assert whole.plain_flops == stem + looks + 6 * 2 * 32 * 32 + readout
    lines = fast.explain().splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["block", "looks", "thinks", "all"]
    assert lines[4].startswith("Medians on 4 examples")


def test_blocks_may_be_anywhere_and_come_more_than_once(fastest):
    fastest("native")

    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = (block_of(16, 6, 6, 1, seed=seed)[0] for seed in (0, 1))
            self.order = [self.one, self.other, self.one]  # which no module knows of

        def forward(self, u):
            ponders = []
            for block in self.order:
                u, ponder = block(u)
                ponders.append(ponder)
            return {"logits": u.mean((2, 3)), "ponders": ponders}

    net, u = Lists().eval(), torch.randn(3, 16, 6, 6)
    fast = tp.deploy(net, u)
    assert agree(fast, net, u)
    assert [each.engine for each in fast.report.measurements] == ["native", "native", "blocks"]
    assert fast.report.measurements[0].flops > fast.report.measurements[1].flops


def test_code_that_views_maps_in_another_shape_works(fastest):
    fastest("native")

    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, _ = bottlenecks_of(64, 6, 6, 1)

        def forward(self, u):
            u, ponder = self.block(u)
            return {"logits": u.view(len(u), -1), "ponders": [ponder]}

    net, u = Views().eval(), torch.randn(3, 64, 6, 6)
    fast = tp.deploy(net, u)
    assert fast.report.measurements[0].engine == "native"
    assert agree(fast, net, u)


def test_a_mode_for_one_call_is_heeded(fastest):
    fastest("native")

    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, _ = block_of(16, 6, 6, 1)

        def forward(self, u, **options):
            u, ponder = self.block(u, **options)
            return {"logits": u.mean((2, 3)), "ponders": [ponder]}

    net, u = Chooses().eval(), torch.randn(3, 16, 6, 6)
    fast = tp.deploy(net, u)
    assert fast.report.measurements[0].engine == "native"
    with torch.no_grad():
        got, expected = (each(u, mode=tp.Thresholded(0.9)) for each in (fast, net))
    assert torch.equal(got["logits"], expected["logits"])
    assert torch.equal(got["ponders"][0].steps, expected["ponders"][0].steps)


def test_threads_may_call_at_the_same_time(fastest):
    fastest("native")
    net, images = Mine().eval(), torch.randn(4, 3, 8, 8)
    fast, right = tp.deploy(net, images), []
    workers = [
        threading.Thread(target=lambda n=n: right.append(agree(fast, net, images[:n]))) for n in range(5)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert right == [True] * 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("engine", ["gpu", "onchip", "compact", "dense"])
def test_on_a_gpu_outputs_are_those_of_the_network_too(engine, fastest, monkeypatch):
    fastest(engine)
    net, images = Mine().eval().cuda(), torch.randn(7, 3, 8, 12, device="cuda")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    fast = tp.deploy(net, images[:3])
    for part in (images, images[:1], images[:0], images[:, :, :4, :8].clone(), images):
        assert agree(fast, net, part)
