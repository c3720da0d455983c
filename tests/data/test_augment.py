"""Augmentation and standardisation against naive loops; the order of batches."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchpact_recipes.data import BatchOrder, augment, crop_and_flip, standardize

SHAPES = st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))


def random_images(shape: tuple[int, ...], low: int = 0, high: int = 255) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, high + 1, shape, dtype=torch.uint8, generator=generator)


def naive_standardize(images: Tensor) -> Tensor:
    result = np.empty(images.shape)
    for n, image in enumerate(images.numpy().astype(np.float64)):
        pixels = [float(x) for x in image.flatten()]
        mean = math.fsum(pixels) / len(pixels)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in pixels) / len(pixels))
        result[n] = (image - mean) / max(std, 1 / math.sqrt(len(pixels)))
    return torch.from_numpy(result)


def naive_crop_and_flip(
    images: Tensor, tops: list[int], lefts: list[int], flips: list[bool], pad: int
) -> Tensor:
    count, channels, height, width = images.shape
    result = torch.zeros_like(images)
    for n in range(count):
        for c in range(channels):
            for i in range(height):
                for j in range(width):
                    row, column = i + tops[n] - pad, j + lefts[n] - pad
                    if 0 <= row < height and 0 <= column < width:
                        target = width - 1 - j if flips[n] else j
                        result[n, c, i, target] = images[n, c, row, column]
    return result


# Standardisation


@settings(deadline=None)
@given(SHAPES, st.integers(0, 255), st.data())
def test_standardize_is_the_formula_at_any_contrast(
    shape: tuple[int, ...], darkest: int, data: st.DataObject
) -> None:
    brightest = data.draw(st.integers(darkest, 255))
    images = random_images(shape, low=darkest, high=brightest)
    expected = naive_standardize(images)
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        error = torch.linalg.vector_norm(standardize(images, dtype) - expected)
        assert error <= tolerance * torch.linalg.vector_norm(expected)


def test_standardized_images_have_zero_mean_and_unit_variance() -> None:
    result = standardize(random_images((16, 3, 32, 32)))
    variance, mean = torch.var_mean(result, dim=(1, 2, 3), correction=0)
    torch.testing.assert_close(mean, torch.zeros(16), rtol=0, atol=1e-5)
    torch.testing.assert_close(variance, torch.ones(16), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 5, 7), (1, 1, 1)])
def test_an_image_of_one_colour_becomes_zero_exactly(shape: tuple[int, ...]) -> None:
    grey = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, *shape)
    assert standardize(grey).equal(torch.zeros(256, *shape))


def test_the_divisor_is_never_below_one_over_root_pixels() -> None:
    images = torch.full((1, 3, 32, 32), 100, dtype=torch.uint8)
    images[0, 0, 0, 0] = 101
    # One pixel of n = 3072 that differs by 1: variance (1/n)(1 − 1/n), just below the floor of 1/n
    expected = (1 - 1 / 3072) * math.sqrt(3072)
    assert standardize(images, torch.float64)[0, 0, 0, 0].item() == pytest.approx(expected, 1e-12)


def test_half_precision_is_single_precision_rounded_once() -> None:
    images = random_images((4, 3, 32, 32))
    for dtype in (torch.bfloat16, torch.float16):
        assert standardize(images, dtype).equal(standardize(images).to(dtype))


def test_standardize_refuses_what_is_no_batch_of_images_or_no_float() -> None:
    with pytest.raises(ValueError, match=r"expected images of shape .* got \(3, 32, 32\)"):
        standardize(torch.zeros(3, 32, 32, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"got torch\.uint8"):
        standardize(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.uint8)


# Augmentation


@settings(deadline=None)
@given(SHAPES, st.integers(0, 4), st.data())
def test_crop_and_flip_is_the_naive_loop(shape: tuple[int, ...], pad: int, data: st.DataObject) -> None:
    def draw(entries: st.SearchStrategy[int]) -> list[int]:
        return data.draw(st.lists(entries, min_size=shape[0], max_size=shape[0]))

    offsets = st.integers(0, 2 * pad)
    top, left, flip = draw(offsets), draw(offsets), [bool(x) for x in draw(st.integers(0, 1))]
    images = random_images(shape)
    result = crop_and_flip(
        images,
        torch.tensor(top, dtype=torch.int64),
        torch.tensor(left, dtype=torch.int64),
        torch.tensor(flip, dtype=torch.bool),
        pad,
    )
    assert result.dtype == torch.uint8
    assert result.equal(naive_crop_and_flip(images, top, left, flip, pad))


def test_memory_layout_does_not_matter() -> None:
    images = random_images((5, 3, 6, 7))
    last = images.to(memory_format=torch.channels_last)
    first = augment(images, torch.Generator().manual_seed(3))
    assert first.equal(augment(last, torch.Generator().manual_seed(3)))


def test_augment_leaves_its_input_alone_even_without_padding() -> None:
    images = random_images((6, 3, 5, 5))
    before = images.clone()
    augment(images, pad=0).zero_()
    assert images.equal(before)


def test_augment_is_reproducible_under_a_generator() -> None:
    images = random_images((64, 3, 32, 32))
    first, second = (augment(images, torch.Generator().manual_seed(7)) for _ in range(2))
    assert first.equal(second)
    assert not first.equal(augment(images, torch.Generator().manual_seed(8)))


def test_all_fifty_crops_and_flips_are_equally_likely() -> None:
    image = (1 + torch.arange(36, dtype=torch.uint8)).view(1, 1, 6, 6)
    names = {}
    for top in range(5):
        for left in range(5):
            for flip in (False, True):
                crop = naive_crop_and_flip(image, [top], [left], [flip], 2)
                names[crop.numpy().tobytes()] = (top, left, flip)
    assert len(names) == 50
    count = 20_000
    generator = torch.Generator().manual_seed(0)
    results = augment(image.expand(count, -1, -1, -1), generator).numpy()
    seen = Counter(names[result.tobytes()] for result in results)
    chi_squared = sum((seen[name] - count / 50) ** 2 / (count / 50) for name in names.values())
    # The 99.99th percentile of χ² with 49 degrees of freedom
    assert chi_squared < 94


def test_augment_looks_at_no_value_from_the_host() -> None:
    with FakeTensorMode():
        images = torch.empty(8, 3, 33, 31, dtype=torch.uint8)
        result = standardize(augment(images), torch.bfloat16)
    assert result.shape == (8, 3, 33, 31)


def test_augment_compiles_to_one_graph() -> None:
    images = random_images((8, 3, 32, 32))
    compiled = torch.compile(lambda x: standardize(augment(x)), backend="eager", fullgraph=True)
    torch.manual_seed(0)
    result = compiled(images)
    torch.manual_seed(0)
    assert result.equal(standardize(augment(images)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_augment_in_a_cuda_graph_draws_afresh_at_each_replay() -> None:
    images = random_images((64, 3, 32, 32)).cuda()
    augment(images)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = augment(images)
    graph.replay()
    first = captured.clone()
    graph.replay()
    assert not first.equal(captured)
    top, left = torch.randint(5, (2, 64))
    flip = torch.rand(64) < 0.5
    gpu = crop_and_flip(images, top.cuda(), left.cuda(), flip.cuda())
    assert gpu.cpu().equal(crop_and_flip(images.cpu(), top, left, flip))


def test_crop_and_flip_says_what_is_wrong_with_its_arguments() -> None:
    images = random_images((2, 3, 4, 4))
    good, flip = torch.tensor([0, 4]), torch.tensor([True, False])
    crop_and_flip(images, good, good, flip)
    with pytest.raises(ValueError, match=r"expected top in \[0, 4\], got 5"):
        crop_and_flip(images, good + 1, good, flip)
    with pytest.raises(ValueError, match=r"expected left in \[0, 4\], got -1"):
        crop_and_flip(images, good, good - 1, flip)
    with pytest.raises(ValueError, match=r"expected flip to be torch\.bool of shape \(2,\)"):
        crop_and_flip(images, good, good, good)
    with pytest.raises(ValueError, match=r"expected left .* got torch\.int64 of shape \(1,\)"):
        crop_and_flip(images, good, good[:1], flip)
    with pytest.raises(ValueError, match="expected pad to be an integer of at least 0, got -1"):
        augment(images, pad=-1)


# The order of batches


def epoch_of(order: BatchOrder, epoch: int) -> list[int]:
    first = epoch * order.batches_per_epoch
    iterations = range(first, first + order.batches_per_epoch)
    return [int(i) for iteration in iterations for i in order.indices(iteration)]


@settings(deadline=None)
@given(st.integers(1, 40), st.data(), st.integers(0, 2**64), st.integers(0, 1000))
def test_every_epoch_visits_distinct_examples_and_drops_only_the_last_few(
    size: int, data: st.DataObject, seed: int, epoch: int
) -> None:
    batch = data.draw(st.integers(1, size))
    seen = epoch_of(BatchOrder(size, batch, seed), epoch)
    assert len(set(seen)) == len(seen) == size - size % batch
    assert set(seen) <= set(range(size))


def test_an_epoch_that_divides_evenly_is_a_permutation_and_each_is_another() -> None:
    order = BatchOrder(size=100, batch=20, seed=1)
    epochs = [epoch_of(order, epoch) for epoch in range(20)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 20


def test_a_run_resumed_anywhere_sees_the_same_batches() -> None:
    order = BatchOrder(size=23, batch=5, seed=4)
    whole = [order.indices(iteration) for iteration in range(30)]
    for start in range(30):
        resumed = BatchOrder(size=23, batch=5, seed=4)
        assert resumed.indices(start).equal(whole[start])
    backwards = [order.indices(iteration) for iteration in reversed(range(30))]
    assert all(a.equal(b) for a, b in zip(whole, reversed(backwards), strict=True))


def test_seed_and_epoch_are_not_interchangeable() -> None:
    def orders(seed: int) -> list[tuple[int, ...]]:
        return [tuple(epoch_of(BatchOrder(50, 50, seed), epoch)) for epoch in range(5)]

    # Seeding by seed + epoch would repeat most of these, seeding by 32 bits of it the last
    assert len({order for seed in (0, 1, 2, 2**32) for order in orders(seed)}) == 20


def test_examples_are_equally_likely_to_be_dropped() -> None:
    order = BatchOrder(size=7, batch=3, seed=0)
    kept = Counter(i for epoch in range(3500) for i in epoch_of(order, epoch))
    # Six of seven are kept: 3000 times each, standard deviation √(3500·6/49) = 20.7
    assert all(abs(kept[i] - 3000) < 5 * 20.7 for i in range(7))


def test_writing_into_a_batch_does_not_change_those_to_come() -> None:
    order = BatchOrder(size=8, batch=4, seed=0)
    before = order.indices(0).clone()
    order.indices(0).zero_()
    assert order.indices(0).equal(before)


def test_the_permutation_is_drawn_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[np.random.SeedSequence] = []
    original = np.random.default_rng

    def counted(sequence: np.random.SeedSequence) -> np.random.Generator:
        drawn.append(sequence)
        return original(sequence)

    monkeypatch.setattr(np.random, "default_rng", counted)
    order = BatchOrder(size=100, batch=10, seed=0)
    for iteration in range(30):
        order.indices(iteration)
    assert len(drawn) == 3


@pytest.mark.parametrize(
    ("batch", "seed", "message"),
    [
        (11, 0, "expected a batch of at most 10 examples, got 11"),
        (4, -1, "expected seed to be an integer of at least 0, got -1"),
    ],
)
def test_batch_order_says_what_is_wrong_with_its_arguments(batch: int, seed: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchOrder(10, batch, seed)


def test_there_is_no_iteration_before_the_first() -> None:
    with pytest.raises(ValueError, match=r"expected iteration to be .* at least 0, got -1"):
        BatchOrder(size=10, batch=4, seed=0).indices(-1)
