import pytest
import torch

from torchpact_recipes.data import load_sample
from torchpact_recipes.experiments.occlusion import most, what_maps_show


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_the_largest_values_are_kept_in_just_this_share(share):
    maps = torch.randint(0, 4, (5, 8, 8), generator=torch.Generator().manual_seed(0)).float()
    mask = most(maps, share)
    assert mask.flatten(1).sum(1).tolist() == [round(64 * share)] * 5
    if 0 < share < 1:
        for values, kept in zip(maps, mask, strict=True):
            assert values[kept].min() >= values[~kept].max()


def test_ties_are_the_same_pixels_for_every_image():
    one, two = most(torch.zeros(2, 8, 8), 0.5)
    assert torch.equal(one, two)
    assert 0 < one[:4].sum() < 32  # not the upper half


def test_maps_that_hide_nothing_show_what_whole_images_do():
    data = load_sample("test").random(60, seed=1)
    shown = what_maps_show(torch.rand(60, 32, 32), data, kept=1.0)
    assert shown.own == shown.others == shown.whole > 0.7


def test_maps_of_where_the_image_is_show_more_than_those_of_others():
    data = load_sample("test").random(60, seed=2)
    # the object is all in the left or right half; maps know in which
    halves = torch.arange(60) % 2
    columns = torch.arange(32)
    left = (columns < 16).expand(60, 32, 32)
    maps = torch.where(halves[:, None, None] == 0, left, ~left).float()
    images = torch.where(maps[:, None].bool(), data.images, data.images.new_tensor(128))
    shown = what_maps_show(maps, type(data)(images, data.labels))
    assert shown.own > shown.others + 0.1
    assert shown.images == 60


def test_a_map_for_every_image_is_asked_for():
    data = load_sample("test").random(4, seed=0)
    with pytest.raises(
        ValueError, match=r"^expected a map as large as its image for each of 4, got \(3, 32, 32\)$"
    ):
        what_maps_show(torch.rand(3, 32, 32), data)
