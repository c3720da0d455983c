"""The kernel runs here as C++ on the CPU, from the very source that a GPU gets; see emulator.hpp."""

from dataclasses import replace

import pytest
import torch

import torchpact as tp
from tests.engines.networks import lively, relative, tell_heads
from tests.engines.onchip.emulation import (
    H200,
    counted,
    engine,
    needs_compiler,
    plans,
    reference,
    shared_by,
    take,
    tame,
)
from torchpact.engines import Unsupported
from torchpact.engines.conv.onchip import OnChipNetwork
from torchpact.engines.conv.onchip.plan import candidates
from torchpact_recipes.bench.blobs import with_blobs

PRECISION = {torch.float16: 1e-3, torch.bfloat16: 1e-2}


@needs_compiler
@pytest.mark.parametrize(
    ("settings", "size", "batch", "dtype"),
    [
        ({"units": 3}, (32, 32), 1, torch.float16),  # the plans of CIFAR
        ({"units": 3}, (32, 32), 2, torch.float16),
        ({"units": 3}, (32, 32), 2, torch.bfloat16),
        (
            {"units": 2},
            (8, 12),
            5,
            torch.float16,
        ),  # several images a CTA in every block, the last one not full
        ({"units": 2, "width": 2, "classes": 3}, (8, 8), 2, torch.float16),
        ({"units": 2, "adaptive": False}, (16, 16), 3, torch.float16),
    ],
)
def test_equals_the_dense_engine_in_single_precision(settings, size, batch, dtype):
    model = tame(lively(2, **settings)).to(dtype)
    images = torch.randn(batch, 3, *size).to(dtype)
    logits, ponders = engine(model)(images)
    expected, references = reference(model, images)
    assert logits.dtype == dtype
    assert len(ponders) == len(references)
    same = True
    for ponder, wanted in zip(ponders, references, strict=True):
        steps = wanted.steps.double()
        assert 1 < steps.mean() < model.config.units  # some go on, some do not
        agree = ponder.steps == wanted.steps
        # those that differ were close to the bound, or near to some that were
        assert agree.double().mean() > (0.999 if dtype == torch.float16 else 0.95)
        same &= bool(agree.all())
        assert torch.equal(ponder.cost, ponder.steps.float())
        if same:
            assert relative(ponder.probs, wanted.probs) < PRECISION[dtype]
            assert relative(ponder.expected_steps, wanted.expected_steps) < PRECISION[dtype]
    if same:
        assert relative(logits, expected) < PRECISION[dtype]
    assert same or dtype == torch.bfloat16


@needs_compiler
def test_does_not_depend_on_the_order_of_warps_nor_on_the_layout_of_images():
    model = lively(units=2).half()
    images = torch.randn(3, 3, 16, 16).half()
    logits, ponders = engine(model)(images)
    again, others = engine(model, reverse=True)(images.contiguous(memory_format=torch.channels_last))
    assert torch.equal(logits, again)
    for ponder, other in zip(ponders, others, strict=True):
        assert torch.equal(ponder.probs, other.probs)
        assert torch.equal(ponder.steps, other.steps)


HELD = {"n_tiles": 2, "hold": True, "tall": 2, "m_tiles": 1}


@needs_compiler
@pytest.mark.parametrize(
    "cuts",
    [
        ({"tall": 1, "m_tiles": 2}, HELD, {"images": 3, "m_tiles": 3, "ahead": 4, "bordered": True}),
        (
            {"hold": False, "m_tiles": 2, "warps": 4, "bordered": True},
            {"tall": 2, "m_tiles": 1},
            {"n_tiles": 2, "ahead": 3},
        ),
        ({}, {"warps": 4, "m_tiles": 4, "ahead": 6}, {"warps": 8, "n_tiles": 4, "m_tiles": 2, "ahead": 6}),
    ],
)
def test_however_the_work_is_cut(monkeypatch, cuts):
    take(monkeypatch, plans((16, 32, 64), 16, 24, 10, True), cuts)
    model = tame(lively(2, units=3)).half()
    images = torch.randn(3, 3, 16, 24).half()
    logits, ponders = engine(model, reverse=True)(images)
    expected, references = reference(model, images)
    assert relative(logits, expected) < 1e-3
    for ponder, wanted in zip(ponders, references, strict=True):
        assert (ponder.steps == wanted.steps).double().mean() > 0.999
        assert relative(ponder.probs, wanted.probs) < 1e-3


@needs_compiler
@pytest.mark.parametrize("settings", [{"units": 3}, {"units": 2, "adaptive": False}])
def test_threads_that_share_memory_wait_for_one_another(settings):
    model = tame(lively(2, **settings)).half()
    images = torch.randn(3, 3, 16, 24).half()
    logits, _ = engine(model, watched=True)(images)
    expected, _ = reference(model, images)
    assert relative(logits, expected) < 1e-3


@needs_compiler
def test_scattered_pixels_meet_few_bank_conflicts():
    model, images = with_blobs(tp.models.ResNetConfig(units=3), batch=2, active=0.25)
    fast = engine(model.half())
    made = [plan for plan, _ in fast.kernels.prepare(32, 32, 2)]
    for plan in made:
        counted(plan)
    fast(images.half())
    for plan in made:
        reads, cycles, products = counted(plan)
        assert products > 0
        assert (
            reads <= cycles < 1.5 * reads
        )  # row by row it would be 1.8 in the first block, 2.2 in the others


@needs_compiler
@pytest.mark.parametrize(("down", "every"), [(1, 8), (8, 4), (3, 5)])
def test_pixels_that_lie_badly_for_the_banks(down, every):
    """Diagonals, whose pixels all start at the same bank, and columns: lists take them as they are."""
    model, images = with_blobs(tp.models.ResNetConfig(units=3), batch=2, active=0.25)
    row, column = torch.arange(32)[:, None], torch.arange(32)
    images[:, 0] = ((column + down * row) % every != 0).float()
    logits, ponders = engine(model.half(), reverse=True)(images.half())
    expected, references = reference(model, images.half())
    assert 1 < references[0].steps.double().mean() < 3
    assert torch.equal(ponders[0].steps, references[0].steps)
    assert relative(logits, expected) < 1e-3


@needs_compiler
@pytest.mark.parametrize("bias", [-9.0, 9.0])
def test_all_and_none_active(bias):
    model = tell_heads(tame(lively(2, units=3)), bias).half()
    images = torch.randn(2, 3, 16, 16).half()
    logits, ponders = engine(model)(images)
    expected, references = reference(model, images)
    assert relative(logits, expected) < 1e-3
    for ponder, wanted in zip(ponders, references, strict=True):
        assert (ponder.steps == (3 if bias < 0 else 1)).all()
        assert relative(ponder.probs, wanted.probs) < 1e-5
        assert relative(ponder.expected_steps, wanted.expected_steps) < 1e-5


@needs_compiler
@pytest.mark.parametrize("details", [True, False])
def test_a_decision_for_every_image(details):
    """All pixels of an image take it; images that share a CTA may take others."""
    model, images = by_image()
    expected, references = reference(model.half(), images)
    with tp.use_mode(model.half(), "thresholded", details=details):
        logits, ponders = engine(model)(images)
    assert len({tuple(int(p.steps[i]) for p in references) for i in range(7)}) > 2
    for ponder, wanted in zip(ponders, references, strict=True):
        assert ponder.steps.shape == ponder.cost.shape == (7, 1, 1, 1)
        assert torch.equal(ponder.steps, wanted.steps)
        assert ponder.probs.shape == wanted.probs.shape
        assert relative(ponder.probs, wanted.probs) < 2e-3 if details else ponder.probs.isnan().all()
    assert relative(logits, expected) < 2e-3


@needs_compiler
def test_draws_one_decision_for_every_image():
    model, images = by_image()
    modes = [tp.Discrete(torch.Generator().manual_seed(1)) for _ in range(2)]
    _, references = reference(model.half(), images, modes[1])
    _, ponders = engine(model.half(), modes[0])(images)
    for ponder, wanted in zip(ponders, references, strict=True):
        assert torch.equal(ponder.steps, wanted.steps)
        assert torch.allclose(ponder.log_prob, wanted.log_prob, atol=0.05)


def by_image():
    """A network that decides for images, and some that it does not treat alike."""
    model = tame(lively(1, units=4, per="image", halting_bias=-0.4))
    contrast = torch.linspace(0.2, 3, 7).view(-1, 1, 1, 1)
    return model, (torch.randn(7, 3, 16, 8) * contrast).half()


@needs_compiler
def test_draws_and_scores_decisions_as_the_dense_engine_does():
    model = tame(lively(2, units=3)).half()
    images = torch.randn(2, 3, 16, 16).half()
    modes = [tp.Discrete(torch.Generator().manual_seed(1)) for _ in range(2)]
    _, ponders = engine(model, modes[0])(images)
    _, references = reference(model, images, modes[1])
    for ponder, wanted in zip(ponders, references, strict=True):
        agree = ponder.steps == wanted.steps
        assert agree.double().mean() > 0.99
        assert torch.allclose(ponder.log_prob[agree], wanted.log_prob[agree], atol=0.05)
        assert torch.equal(ponder.probs[-1], torch.ones_like(ponder.probs[-1]))


@needs_compiler
def test_pairs_as_they_are_planned(monkeypatch):
    model = tame(lively(2, units=3)).half()
    images = torch.randn(2, 3, 16, 24).half()
    found = plans((16, 32, 64), 16, 24, 10, True, batch=64)
    assert [(plan.cluster, plan.warps) for plan in found] == [(2, 16), (2, 8), (2, 8)]
    take(monkeypatch, found, [{}] * 3)
    logits, ponders = engine(model, watched=True)(images)
    expected, references = reference(model, images)
    assert relative(logits, expected) < 1e-3
    for ponder, wanted in zip(ponders, references, strict=True):
        assert torch.equal(ponder.steps, wanted.steps)


@needs_compiler
@pytest.mark.parametrize(
    ("clusters", "settings", "how"),
    [
        ((4, 4, 2), {"units": 3}, {"reverse": True}),
        ((8, 8, 4), {"units": 3}, {"watched": True}),
        ((2, 4, 4), {"units": 2, "adaptive": False}, {"watched": True}),
    ],
)
def test_ctas_that_share_an_image_give_what_one_gives(monkeypatch, clusters, settings, how):
    model = tame(lively(2, **settings)).half()
    images = torch.randn(2, 3, 16, 24).half()
    found = plans((16, 32, 64), 16, 24, 10, True, model.config.adaptive, batch=1)
    take(monkeypatch, found, shared_by(*clusters))
    logits, ponders = engine(model, **how)(images)
    expected, references = reference(model, images)
    assert relative(logits, expected) < 1e-3
    for ponder, wanted in zip(ponders, references, strict=True):
        assert torch.equal(ponder.steps, wanted.steps)
        assert relative(ponder.probs, wanted.probs) < 1e-3
        assert relative(ponder.expected_steps, wanted.expected_steps) < 1e-3


@needs_compiler
@pytest.mark.parametrize("how", [{}, {"watched": True}])
def test_ctas_whose_rows_have_halted_go_on_with_those_that_share_the_image(monkeypatch, how):
    """The uppermost rows halt first, then most others, at last a pixel: by a channel that no unit changes."""
    model = tame(lively(2, units=5)).half()
    block = tell_heads(model.blocks[0], 0.0)
    with torch.no_grad():
        model.stem.weight[3] = 0
        model.stem.weight[3, 0, 1, 1] = 1
        for unit in block.steps:
            unit.conv2.weight[3] = 0
        for head, bound in zip(block.halting, (100, 8, 4, 2), strict=True):
            head.conv.weight[0, 3, 1, 1] = 1
            head.linear.bias.fill_(-bound)
    images = torch.randn(1, 3, 16, 16)
    images[:, 0] = 5
    images[:, 0, :2], images[:, 0, 15, 3] = 10, 3
    images = images.half()
    take(monkeypatch, plans((16, 32, 64), 16, 16, 10, True, batch=1), shared_by(8, 8, 4))
    logits, ponders = engine(model, **how)(images)
    expected, references = reference(model, images)
    assert set(references[0].steps[0, 0, :, 3].tolist()) == {2, 3, 4}
    assert relative(logits, expected) < 1e-3
    for ponder, wanted in zip(ponders, references, strict=True):
        assert torch.equal(ponder.steps, wanted.steps)


@needs_compiler
@pytest.mark.parametrize("size", [(40, 8), (48, 16)])  # the list just fits into a border, and does not
def test_images_higher_than_a_warp_has_lanes(size):
    model = tame(lively(2, units=2)).half()
    images = torch.randn(1, 3, *size).half()
    logits, ponders = engine(model, made=OnChipNetwork)(images)
    expected, references = reference(model, images)
    assert relative(logits, expected) < 1e-3
    for ponder, wanted in zip(ponders, references, strict=True):
        assert (ponder.steps == wanted.steps).double().mean() > 0.99


@needs_compiler
def test_few_images_have_a_cta_each_and_give_the_same():
    model = tame(lively(2, units=3)).half()
    images = torch.randn(2, 3, 16, 16).half()
    logits, ponders = engine(model, made=OnChipNetwork, device=replace(H200, clusters=False))(images)
    expected, references = engine(model)(images)
    assert torch.equal(logits, expected)
    for ponder, wanted in zip(ponders, references, strict=True):
        assert torch.equal(ponder.steps, wanted.steps)
        assert torch.allclose(ponder.probs, wanted.probs, atol=1e-4)  # terms of logits are rounded by groups


@needs_compiler
@pytest.mark.parametrize(
    ("size", "batch", "cuts", "how"),
    [
        ((16, 16), 2, [{}] * 3, {}),
        # 192, 48 and 12 pixels an image: fewer than threads, rows that share a word, a last CTA not full
        ((12, 16), 5, [{}, {"images": 3}, {"images": 3}], {"watched": True}),
        # more words than are read at once, which fill the last rounds or do not
        ((40, 16), 1, [{"warps": 4}, {"images": 1, "warps": 4}, {"images": 2}], {"watched": True}),
        ((40, 24), 1, [{"warps": 4}, {"images": 1, "warps": 4}, {"images": 2}], {}),
        ((16, 24), 2, shared_by(4, 8, 4), {"watched": True}),  # CTAs that share a word
    ],
)
def test_keeps_no_details_where_the_block_keeps_none(monkeypatch, size, batch, cuts, how):
    """And decides the same, by another way: a bound for all."""
    many = 1 if "cluster" in cuts[0] else 1024
    take(monkeypatch, plans((16, 32, 64), size[0], size[1], 10, True, batch=many), cuts)
    model = tame(lively(2, units=3)).half()
    images = torch.randn(batch, 3, *size).half()
    expected, references = engine(model)(images)
    with tp.use_mode(model, "thresholded", details=False):
        logits, ponders = engine(model, **how)(images)
    assert torch.equal(logits, expected)
    for ponder, wanted in zip(ponders, references, strict=True):
        assert torch.equal(ponder.steps, wanted.steps)
        assert 1 < ponder.steps.double().mean() < 3
        assert torch.equal(ponder.cost, wanted.cost)
        assert ponder.probs.shape == wanted.probs.shape
        assert ponder.probs.isnan().all()
        assert ponder.expected_steps.isnan().all()


@needs_compiler
def test_no_images():
    logits, ponders = engine(lively(units=2).half())(torch.empty(0, 3, 8, 8).half())
    assert logits.shape == (0, 10)
    assert [ponder.steps.shape for ponder in ponders] == [(0, 1, 8, 8), (0, 1, 4, 4), (0, 1, 2, 2)]


def test_plans_fill_the_device():
    images = {
        batch: [plan.images for plan in plans((16, 32, 64), 32, 32, 10, half=False, batch=batch)]
        for batch in (1, 264, 1024, 8192)
    }
    # a CTA or more for every image, as long as there is room; else as many as take fewer waves
    assert images == {1: [1, 1, 1], 264: [1, 1, 1], 1024: [1, 2, 2], 8192: [1, 2, 3]}


def test_few_images_are_shared_where_ctas_can_and_rows_suffice():
    def clusters(batch, size=32, device=H200):
        found = candidates((16, 32, 64), size, size, 10, False, True, batch, device)
        return [sorted({plan.cluster for plan in each}, reverse=True) for each in found]

    assert clusters(1) == clusters(8) == [[8, 4, 2, 1]] * 3
    assert clusters(9) == clusters(16) == [[4, 2, 1]] * 3
    assert clusters(17) == clusters(66) == [[2, 1]] * 3
    assert clusters(67) == clusters(1, device=replace(H200, clusters=False)) == [[1]] * 3
    assert clusters(1, size=16) == [[8, 4, 2, 1], [8, 4, 2, 1], [4, 2, 1]]
    higher = candidates((16, 32, 64), 64, 16, 10, False, True, 1, H200)
    assert [max(plan.cluster for plan in each) for each in higher] == [1, 8, 8]


def test_many_images_may_run_in_several_ways():
    found = candidates((16, 32, 64), 32, 32, 10, False, True, 1024, H200)
    cuts = [
        [(plan.images, plan.ctas, plan.warps, plan.m_tiles, plan.tall, plan.bordered) for plan in each]
        for each in found
    ]
    assert cuts == [
        [(1, 2, 8, 1, 2, True)],
        [(2, 2, 8, 3, 1, False), (1, 3, 4, 2, 2, False), (2, 2, 8, 4, 1, False)],
        [(2, 2, 4, 2, 1, True), (2, 3, 4, 2, 2, True)],
    ]
    for plan in (plan for each in found for plan in each):
        assert plan.ctas * (plan.shared_bytes + 1024) <= 228 * 1024


def test_lists_lie_in_the_border_of_the_residual_stream_where_they_fit():
    def border_takes(height, width):
        plan = plans((16, 32, 64), height, width, 10, half=False, batch=1024)[0]
        assert plan.bordered
        return plan.shared_bytes - replace(plan, bordered=False).shared_bytes

    # 16 bytes for every slot of two chunks, the first filled up; without a border, a pixel of zeros
    assert border_takes(40, 8) == 16 * (380 + 379) - 16 * (324 + 321) - 40 * 8
    assert border_takes(48, 16) == 16 * (852 + 851) - 16 * (772 + 769)


def test_plans_of_cifar_leave_room_for_two_ctas():
    for plan in plans((16, 32, 64), 32, 32, 10, half=False):
        assert plan.ctas * (plan.shared_bytes + 1024) <= 228 * 1024
    with pytest.raises(Unsupported, match=r"got 3\d\d KB for 48 channels of 32×32"):
        plans((48, 96, 192), 32, 32, 10, half=False)
    with pytest.raises(Unsupported, match="no wider than 32; got 64×64"):
        plans((16, 32, 64), 64, 64, 10, half=False)
