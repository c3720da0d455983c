"""Maps, against what the halting probabilities say directly."""

import pytest
import torch

import torchpact as tp
from tests.viz.networks import images, network
from torchpact_recipes.data import standardize
from torchpact_recipes.viz import ponder_maps


def probabilities(model, pixels, seed=0):
    """All h of all blocks: with gradients enabled no step is left out."""
    torch.manual_seed(seed)
    return [ponder.probs.detach() for ponder in model(standardize(pixels))[1]]


def first_above_half(h):
    return (h > 0.5).int().argmax(0) + 1


@pytest.mark.parametrize(
    ("mode", "quantity", "by_hand"),
    [
        ("relaxed", "expected units", tp.expected_steps),
        ("act", "ponder cost", lambda h: tp.act_halting(h).ponder_cost),
        ("thresholded", "units run", first_above_half),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"group": 2}, {"per": "image"}], ids=str)
def test_a_map_holds_what_follows_from_the_halting_probabilities(mode, quantity, by_hand, settings):
    model, pixels = network(mode, **settings), images()
    maps = ponder_maps(model, pixels, seed=3)
    assert maps.quantity == quantity
    for found, h in zip(maps.blocks, probabilities(model, pixels, seed=3), strict=True):
        expected = by_hand(h).squeeze(1).float()
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert settings == {"per": "image"} or maps.blocks[0].std() > 0.1


def test_discrete_maps_are_the_steps_that_were_drawn():
    model, pixels = network("discrete"), images()
    maps = ponder_maps(model, pixels, seed=5)
    torch.manual_seed(5)
    with torch.no_grad():
        _, ponders = model(standardize(pixels))
    assert all(torch.equal(m, p.steps[:, 0].float()) for m, p in zip(maps.blocks, ponders, strict=True))


@pytest.mark.parametrize(
    ("settings", "height", "width", "side"),
    [
        ({}, 32, 32, 1),
        ({"group": 4}, 32, 32, 4),
        ({"group": 3, "image_size": 12}, 12, 24, 3),
        ({}, 5, 33, 1),
        ({"per": "image"}, 8, 12, 1000),
    ],
    ids=str,
)
def test_the_sum_has_at_each_pixel_the_positions_that_it_lies_in(settings, height, width, side):
    maps = ponder_maps(network("relaxed", **settings), images(1, height, width))
    assert maps.total.shape == (1, height, width)
    for i in range(height):
        for j in range(width):
            parts = [m[0, i // (side * 2**k), j // (side * 2**k)] for k, m in enumerate(maps.blocks)]
            assert maps.total[0, i, j] == pytest.approx(float(sum(parts)), rel=1e-6)


def test_the_mean_of_the_sum_is_the_sum_of_the_means():
    maps = ponder_maps(network("relaxed"), images(3))
    means = torch.tensor(maps.means())
    assert means.shape == (3, 3)
    torch.testing.assert_close(means.sum(1), maps.total.mean((1, 2)))
    assert maps.first(2).means() == maps.means()[:2]


def test_maps_of_many_images_are_those_of_each(monkeypatch):
    model, pixels = network("act"), images(5)
    whole = ponder_maps(model, pixels)
    monkeypatch.setattr("torchpact_recipes.viz.maps.BATCH", 2)
    torch.testing.assert_close(ponder_maps(model, pixels).total, whole.total)


def test_the_network_and_the_random_numbers_are_left_as_they_were():
    model = network("act").train()
    before, weights = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    maps = ponder_maps(model, images(), "discrete")
    assert maps.quantity == "units run"
    assert model.training
    assert all(block.mode == tp.ACT() for block in model.blocks)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_seed_gives_the_same_map_again():
    model, pixels = network("relaxed"), images()
    first, again, other = (ponder_maps(model, pixels, seed=s).total for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("model", "pixels", "message"),
    [
        (tp.models.resnet32(), images(), "expected an adaptive network, got a plain one"),
        (network(), images().float(), "expected images as bytes, torch.uint8; got torch.float32"),
    ],
)
def test_what_has_no_map_is_refused(model, pixels, message):
    with pytest.raises(ValueError, match=message):
        ponder_maps(model, pixels)
