import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

import torchpact as tp
from tests.engines.fakes import ConvEngine, NetworkEngine
from tests.engines.networks import lively, relative, tell_heads
from torchpact.engines import Runner, Unsupported, autotune, registry, whole
from torchpact.engines.sequential import BlockByBlock, Whole
from torchpact.models import resnet32
from torchpact.specs import network_spec

pytestmark = pytest.mark.usefixtures("no_patience")


def images_of(batch, size=16, seed=0):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def agree(fast, model, images):
    logits, ponders = fast(images)
    expected, reference = model(images)
    assert logits.shape == expected.shape
    assert [p.steps.shape for p in ponders] == [p.steps.shape for p in reference]
    if len(images):
        assert relative(logits, expected) < 1e-5
    return all(torch.equal(one.steps, other.steps) for one, other in zip(ponders, reference, strict=True))


@pytest.mark.parametrize("engine", [None, "dense", "sparse", "native"])
def test_the_outputs_are_those_of_the_model_for_any_batch(engine):
    model = lively()
    fast = tp.deploy(model, images_of(2), engines=None if engine is None else [engine])
    for batch in (0, 1, 7):
        assert agree(fast, model, images_of(batch))


@pytest.mark.parametrize("options", [{"per": "image"}, {"group": 2}, {"halting_norm": True}, {"width": 2}])
def test_networks_of_every_kind_deploy(options):
    model = lively(image_size=16, **options)
    assert agree(tp.deploy(model, images_of(3)), model, images_of(5, seed=1))


def test_a_plain_network_deploys():
    model = resnet32().eval()
    fast = tp.deploy(model, images_of(2))
    assert fast(images_of(3))[1] == []
    assert agree(fast, model, images_of(3))
    assert fast.report.measurements[-1].flops_speedup == 1


def test_images_of_other_sizes_and_layouts_run():
    model = lively()
    fast = tp.deploy(model, images_of(2))
    wide = torch.randn(2, 3, 21, 40)
    assert agree(fast, model, wide[:, :, :, ::2])
    assert agree(fast, model, wide.permute(0, 1, 3, 2))


def test_bfloat16_agrees_to_its_digits():
    model = tell_heads(lively(), -50.0)
    with torch.no_grad():
        expected, _ = model(images_of(4))
    fast = tp.deploy(model.bfloat16(), images_of(2).bfloat16())
    logits, _ = fast(images_of(4).bfloat16())
    assert logits.dtype == torch.bfloat16
    assert relative(logits, expected) < 1e-2


def test_threads_may_call_at_the_same_time():
    model = lively()
    for engine in ("native", "sparse"):
        fast = tp.deploy(model, images_of(2), engines=[engine])
        batches = [images_of(1 + i % 3, size=12 + 4 * (i % 2), seed=i) for i in range(16)]
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(lambda images, fast=fast: agree(fast, model, images), batches))


def test_the_model_is_left_as_it_was_and_its_changes_stay_without_effect():
    model = lively(mode="relaxed").train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fast = tp.deploy(model, images_of(2), mode="thresholded")
    assert model.training
    assert model.blocks[0].mode == tp.Relaxed()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    logits, _ = fast(images_of(2))
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(fast(images_of(2))[0], logits)


def test_a_soft_mode_runs_dense_with_a_warning():
    model = lively(mode="act")
    with pytest.warns(
        UserWarning, match=r"^expected a hard mode, .* got ACT\(eps=0.01\): the dense engine runs"
    ):
        fast = tp.deploy(model, images_of(2))
    assert {each.engine for each in fast.report.measurements} == {"dense", "blocks"}
    assert agree(fast, model, images_of(2))


def test_the_table_says_what_was_chosen_and_why_not_more(monkeypatch):
    refusing = ConvEngine("native", reason="native: expected a C++ compiler, found none")
    monkeypatch.setitem(registry.ENGINES, "native", refusing)
    with pytest.warns(
        UserWarning, match=r"got native: the dense engine runs\. native: expected a C\+\+ compiler"
    ):
        fast = tp.deploy(tell_heads(lively(), 50.0), images_of(2, size=32), engines=["native"])
    lines = fast.explain().splitlines()
    assert lines[0].split() == [
        "block",
        "output",
        "engine",
        "active",
        "faster",
        "by",
        "FLOPs",
        "milliseconds",
    ]
    assert [line.split()[1:4] for line in lines[1:4]] == [
        ["16×32×32", "dense", "33%"],
        ["32×16×16", "dense", "33%"],
        ["64×8×8", "dense", "33%"],
    ]
    assert lines[4].startswith("all")
    assert lines[-1] == "native: expected a C++ compiler, found none"


def test_flops_of_the_table_are_those_that_are_counted():
    model = lively(units=5)
    images = images_of(2, size=32)
    whole = tp.deploy(model, images).report.measurements[-1]
    assert whole.plain_flops == 137725184
    assert whole.flops == pytest.approx(float(tp.count_flops(model, images).mean))


def test_per_image_act_is_deployed_compact():
    model = lively(mode="act", per="image")
    fast = tp.deploy(model, images_of(4), engines=["compact"])
    assert {each.engine for each in fast.report.measurements} == {"compact", "blocks"}
    assert agree(fast, model, images_of(5))


def test_an_engine_for_whole_networks_is_taken_if_it_is_the_fastest(monkeypatch):
    answer: tuple[torch.Tensor, list[tp.Ponder]] = torch.zeros(2, 10), []

    monkeypatch.setitem(registry.ENGINES, "whole", NetworkEngine("whole", lambda images: answer))
    fast = tp.deploy(lively(), images_of(2))
    assert fast.report.measurements[-1].engine == "whole"
    assert fast(images_of(2)) is answer
    with pytest.raises(ValueError, match="expected images of shape"):
        fast(images_of(2)[0])


def test_a_whole_network_is_tuned_with_the_example_and_told_about_details(monkeypatch):
    seen: list[Any] = []

    def run(images):
        return torch.zeros(len(images), 10), []

    engine = NetworkEngine(
        "whole", run, tune=seen.append, see=lambda s: seen.append([b.details for b in s.blocks])
    )
    monkeypatch.setitem(registry.ENGINES, "whole", engine)
    example = images_of(2)
    tp.deploy(lively(), example, engines=["dense", "whole"], details=False)
    assert seen[0] == [False] * 3
    assert seen[1] is example


@pytest.mark.parametrize("engine", ["dense", "sparse", "native"])
def test_without_details_only_decisions_are_returned(engine):
    model, images = lively(), images_of(3)
    logits, ponders = tp.deploy(model, images, engines=[engine])(images)
    brief = tp.deploy(model, images, engines=[engine], details=False)
    with tp.use_mode(model, "thresholded", details=False):
        likewise = tp.deploy(model, images, engines=[engine])
    for fast in (brief, likewise):
        others_logits, others = fast(images)
        assert torch.equal(others_logits, logits)
        for ponder, other in zip(ponders, others, strict=True):
            assert torch.equal(ponder.steps, other.steps)
            assert torch.equal(ponder.cost, other.cost)
            assert other.probs.shape == ponder.probs.shape
            assert other.expected_steps.shape == ponder.expected_steps.shape
            assert other.probs.isnan().all()
            assert other.expected_steps.isnan().all()
            assert not other.probs.untyped_storage().nbytes() > 4


@pytest.mark.parametrize("engine", ["dense", "sparse", "native"])
def test_every_block_keeps_details_or_not_by_itself(engine):
    model, images = lively(), images_of(2)
    model.blocks[0].details = False
    model.blocks[1].mode, model.blocks[1].details = tp.Discrete(), False
    _, ponders = tp.deploy(model, images, engines=[engine])(images)
    assert [bool(ponder.probs.isnan().any()) for ponder in ponders] == [True, False, False]
    assert [bool(ponder.expected_steps.isnan().any()) for ponder in ponders] == [True, False, False]
    assert [ponder.log_prob is not None for ponder in ponders] == [False, True, False]


@pytest.mark.parametrize("engine", [None, "dense", "sparse", "native"])
def test_what_callers_write_into_a_ponder_stays_with_them(engine):
    model, images = lively(), images_of(2)
    if engine is None:
        tp.use_mode(model, "thresholded", details=False)
        run = torch.no_grad()(model)
    else:
        run = tp.deploy(model, images, engines=[engine], details=False)
    _, before = run(images)
    _, spoiled = run(images)
    for ponder in spoiled:
        ponder.probs[0, 0, 0, 0, 0].zero_()
    _, after = run(images)
    for ponder in (*before, *after):
        assert ponder.probs.isnan().all()
        assert ponder.expected_steps.isnan().all()


def test_a_network_of_another_gpu_makes_it_the_current_one(monkeypatch):
    model, images = lively(), images_of(2)
    fast = tp.deploy(model, images, engines=["dense"])
    seen = []

    @contextmanager
    def entered(device):
        seen.append(device)
        yield

    monkeypatch.setattr(fast, "check", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", entered)
    for index in (0, 1):
        fast.device = torch.device("cuda", index)
        assert agree(fast, model, images)
    assert seen == [torch.device("cuda", 1)]


def test_a_whole_network_waits_for_the_device_if_its_blocks_do():
    class Waiting(Runner):
        host_sync = True

        def __call__(self, u, context=None, bounds=None):
            return u, None

    class Calm(Waiting):
        host_sync = False

    spec = network_spec(lively())
    assert spec is not None
    calm, waiting = (BlockByBlock(spec, [run]) for run in (Calm(), Waiting()))
    assert [Whole(calm, in_turn).host_sync for in_turn in (calm, waiting)] == [False, True]


def test_other_modes_than_thresholded_keep_their_details():
    model, images = lively(mode="discrete"), images_of(2)
    _, ponders = tp.deploy(model, images, engines=["sparse"], details=False)(images)
    assert not any(ponder.probs.isnan().any() or ponder.log_prob is None for ponder in ponders)


def test_a_whole_network_leaves_sizes_that_it_does_not_know_to_the_blocks(monkeypatch):
    model = lively()

    def run(images):
        if images.size(2) != 16:
            raise Unsupported(f"whole: expected images of 16 pixels, got {images.size(2)}")
        return torch.full((len(images), 10), 7.0), []

    monkeypatch.setitem(registry.ENGINES, "whole", NetworkEngine("whole", run))
    monkeypatch.setattr(whole, "interleaved", lambda calls, **_: dict.fromkeys(calls, 1.0) | {"whole": 0.5})
    fast = tp.deploy(model, images_of(2), engines=["dense", "whole"])
    assert fast(images_of(2))[0].eq(7).all()
    assert agree(fast, model, images_of(2, size=12))
    assert "whole runs the network as a whole" in fast.explain()

    other = tp.deploy(model, images_of(2, size=20), engines=["dense", "whole"])
    assert other.report.measurements[-1].engine == "blocks"
    assert other.explain().splitlines()[-1] == "whole: expected images of 16 pixels, got 20"


def test_the_engine_on_the_chip_is_offered_to_gpus_and_says_what_it_lacks():
    names = partial(registry.names_among, None)
    assert "onchip" in names("cuda")
    assert "onchip" not in names("cpu")
    fast = tp.deploy(lively().half(), images_of(1).half(), engines=["dense", "onchip"])
    assert fast.report.measurements[-1].engine == "blocks"
    assert fast.explain().splitlines()[-1] == "onchip: expected a network on a GPU, got one on cpu"


def test_a_new_engine_is_an_entry_in_the_table(monkeypatch):
    monkeypatch.setitem(registry.ENGINES, "mine", ConvEngine("mine"))
    fast = tp.deploy(lively(), images_of(1), engines=["mine"])
    assert [each.engine for each in fast.report.measurements] == ["mine"] * 3 + ["blocks"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: tp.deploy(torch.nn.Linear(2, 2), images_of(1)),
            TypeError,
            "expected a network with adaptive blocks, got Linear without any",
        ),
        (lambda: tp.deploy(lively(), images_of(0)), ValueError, "expected an example of at least one input"),
        (lambda: tp.deploy(lively(), images_of(1)[0]), ValueError, r"got \(3, 16, 16\)"),
        (
            lambda: tp.deploy(lively(), images_of(1).double()),
            ValueError,
            "expected images of torch.float32 on cpu",
        ),
        (lambda: tp.deploy(lively(), images_of(1).to("meta")), ValueError, "got torch.float32 on meta"),
        (
            lambda: tp.deploy(lively(), images_of(1), engines=["fast"]),
            ValueError,
            "expected engines among dense, ",
        ),
        (
            lambda: tp.deploy(lively(group=4), images_of(1, size=18)),
            ValueError,
            "expected a group that divides",
        ),
        (lambda: tp.deploy(lively(), images_of(1)).double(), RuntimeError, "deploy again"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("fastest", ["dense", "sparse"])
def test_the_fastest_engine_is_taken(monkeypatch, fastest):
    def measured(candidates, **_):
        return {name: 1.0 if name in (fastest, "blocks") else 2.0 for name in candidates}

    for module in (autotune, whole):
        monkeypatch.setattr(module, "interleaved", measured)
    fast = tp.deploy(lively(), images_of(2), engines=["dense", "sparse"])
    assert [m.engine for m in fast.report.measurements[:-1]] == [fastest] * 3


def test_autocast_around_it_changes_nothing():
    model = lively()
    for engine in ("sparse", "dense"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fast = tp.deploy(model, images_of(2), engines=[engine])
            logits, _ = fast(images_of(3))
        assert logits.dtype == torch.float32
        assert torch.equal(logits, fast(images_of(3))[0])


def test_engines_are_a_list():
    with pytest.raises(TypeError, match="expected a list of engines, got the string 'dense'"):
        tp.deploy(lively(), images_of(1), engines="dense")
    with pytest.raises(TypeError, match="expected tensors whose first dimension is the batch, got list"):
        tp.deploy(lively(), [1, 2])


def test_it_is_in_evaluation_whatever_the_model_is_in():
    assert not tp.deploy(lively().train(), images_of(1)).training


@pytest.mark.parametrize("copy", [copy.copy, copy.deepcopy, pickle.dumps, lambda fast: fast.state_dict()])
def test_copies_and_files_are_refused_in_one_line(copy):
    fast = tp.deploy(lively(), images_of(1))
    with pytest.raises(TypeError, match="a deployed network can be neither copied nor saved") as raised:
        copy(fast)
    assert "\n" not in str(raised.value)
