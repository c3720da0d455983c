"""Halting heads, to whose logits pixels add for their neighbours; the kernel runs as C++ here."""

import pytest
import torch

from tests.engines.networks import lively, tell_heads
from tests.engines.onchip.emulation import (
    AsForMany,
    engine,
    needs_compiler,
    plans,
    reference,
    shared_by,
    take,
)
from torchpact.engines.conv.onchip import OnChipNetwork

ROUNDING = 2.0**-17  # of a term of a logit


def known(dtype, units=4, seed=2):
    """A network whose residual stream stays its images, exactly: only heads compute."""
    model = lively(seed, units=units)
    with torch.no_grad():
        for block in model.blocks:
            for unit in block.steps:
                unit.conv2.weight.zero_()
        model.stem.weight.zero_()
        for channel in range(16):
            model.stem.weight[channel, channel % 3, channel % 2 + 1, channel % 3] = 1
        for head in (head for block in model.blocks for head in block.halting):
            head.conv.weight.mul_(2)
    return model.to(dtype)


def pictures(batch, height, width, dtype):
    """Images of halves, of which means of 16 have no more digits than bfloat16."""
    torch.manual_seed(height * width)
    return (torch.randint(-3, 4, (batch, 3, height, width)) / 2).to(dtype)


TALL = {"tall": 2, "m_tiles": 1}
GROUPED = {"n_tiles": 2, "warps": 8, "m_tiles": 1}


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("cuts", "how"),
    [
        (({}, {}, {}), {}),
        (({"tall": 1, "gap": 3}, TALL | {"images": 1}, {"images": 3}), {"reverse": True}),
        (({"bordered": True}, GROUPED, GROUPED | TALL | {"images": 2}), {"watched": True}),
    ],
)
def test_logits_are_sums_over_all_neighbours(monkeypatch, dtype, cuts, how):
    """At edges and corners, beside halted pixels, of each image that a CTA has, by each unit's own head."""
    take(monkeypatch, plans((16, 32, 64), 16, 24, 10, dtype == torch.float16), cuts)
    check(known(dtype), pictures(5, 16, 24, dtype), **how)


@needs_compiler
@pytest.mark.parametrize("clusters", [(2, 4, 2), (8, 8, 4)])
def test_logits_are_sums_over_neighbours_in_other_ctas(monkeypatch, clusters):
    take(monkeypatch, plans((16, 32, 64), 16, 16, 10, True, batch=1), shared_by(*clusters))
    check(known(torch.float16), pictures(2, 16, 16, torch.float16), watched=clusters == (2, 4, 2))


def check(model, images, **how):
    _, ponders = engine(model, **how)(images)
    _, references = reference(model, images)
    for ponder, wanted in zip(ponders, references, strict=True):
        asked = wanted.steps.unique().tolist()
        assert len(asked) > 2  # some halt early, some late, some not at all
        assert torch.equal(ponder.steps, wanted.steps)
        # nine terms of up to four groups of channels; a probability changes by a quarter of a logit at most
        assert (ponder.probs - wanted.probs).abs().max() < 9 * 4 * ROUNDING / 4 + 2e-6


@needs_compiler
def test_runs_do_not_differ_by_the_order_in_which_warps_add():
    model, images = lively(3, units=3).bfloat16(), torch.randn(3, 3, 16, 24).bfloat16()
    (logits, ponders), (again, others) = (engine(model, reverse=way)(images) for way in (False, True))
    assert torch.equal(logits, again)
    for ponder, other in zip(ponders, others, strict=True):
        assert torch.equal(ponder.probs, other.probs)


@needs_compiler
def test_a_nan_of_an_image_is_in_its_logits_alone():
    model = known(torch.float16)
    images = pictures(4, 16, 24, torch.float16)
    expected, references = engine(model)(images)
    spoilt = images.clone()
    spoilt[1, 0, 7, 9] = torch.nan
    logits, ponders = engine(model)(spoilt)
    _, wanted = reference(model, spoilt)
    others = [0, 2, 3]
    assert torch.equal(logits[others], expected[others])
    for ponder, before, exact in zip(ponders, references, wanted, strict=True):
        assert torch.equal(ponder.probs[:, others], before.probs[:, others])
        assert torch.equal(ponder.steps, exact.steps)
        assert (ponder.steps[1] == 4).all()
        assert torch.equal(ponder.probs.isnan(), exact.probs.isnan())


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tap", [3000.0, -3000.0, torch.nan])
def test_terms_that_are_huge_or_no_numbers_decide_as_they_do_elsewhere(dtype, tap):
    """Also at corners, where four of them add up, and edges, where six do."""
    model = tell_heads(known(dtype, units=3), 0.0)
    for head in (head for block in model.blocks for head in block.halting):
        head.conv.weight.data.fill_(tap)
    images = torch.full((3, 3, 16, 24), 1.5).to(dtype)
    with torch.no_grad():
        model.stem.weight.zero_()
        model.stem.weight[:, 0, 1, 1] = 1
    _, ponders = engine(model)(images)
    _, references = reference(model, images)
    for ponder, wanted in zip(ponders, references, strict=True):
        assert (wanted.steps == (1 if tap > 0 else 3)).all()
        assert torch.equal(ponder.steps, wanted.steps)
        assert torch.equal(ponder.probs.isnan(), wanted.probs.isnan())
        assert torch.allclose(ponder.probs, wanted.probs, atol=1e-6, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize(("own", "above", "bias", "steps"), [(700, -690, -5, 1), (690, -700, 5, 3)])
@pytest.mark.parametrize("made", [AsForMany, OnChipNetwork])
def test_large_terms_of_opposite_signs_cancel(made, own, above, bias, steps):
    """Whatever the plan, and so over how many groups of channels they are spread."""
    model = tell_heads(known(torch.float16, units=3), bias)
    with torch.no_grad():
        model.stem.weight.zero_()
        model.stem.weight[:, 0, 1, 1] = 1
        for head in (head for block in model.blocks for head in block.halting):
            head.conv.weight[0, :, 1, 1], head.conv.weight[0, :, 0, 1] = own / 16, above / 16
    images = torch.ones(2, 3, 16, 16, dtype=torch.float16)
    _, ponders = engine(model, made=made)(images)
    _, references = reference(model, images)
    for ponder, wanted in zip(ponders, references, strict=True):
        assert (wanted.steps[:, :, 1:] == steps).all()
        assert torch.equal(ponder.steps, wanted.steps)
