"""Triton kernels over lists of active pixels: convolutions, decisions, and the lists themselves.

Maps lie channels last, so that a pixel is a row of ``C`` numbers, and a list holds the numbers of such rows.
How long a list is only the device knows: programs take tiles of it in turns until it is done, and nothing has
to wait for the host. Tiles are of ``P`` pixels; ``N`` outputs and ``K`` inputs of a convolution at a time.
"""

import triton
import triton.language as tl


@triton.jit
def _relu(x):  # type: ignore[no-untyped-def]
    """Keeps NaN, as torch does."""
    return tl.where(x < 0, 0.0, x)


@triton.jit  # type: ignore[untyped-decorator]
def convolve(  # type: ignore[no-untyped-def]
    x, weight, scale, shift, bias, y, sums, places, count, height, width,
    C: tl.constexpr, P: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A 3×3 convolution at the listed pixels, with what comes before and after it.

    The first one of a unit is of relu(scale·x + shift), and its result is relu(· + bias). The second adds its
    result to ``y``, and what that changes to ``sums``, which has a row for every image.
    """
    total = tl.load(count)
    n = tl.program_id(1) * N + tl.arange(0, N)
    for tile in range(tl.program_id(0), tl.cdiv(total, P), tl.num_programs(0)):
        at = tile * P + tl.arange(0, P)
        there = at < total
        pixel = tl.load(places + at, mask=there, other=0)
        row, column = pixel // width % height, pixel % width
        result = tl.zeros((P, N), tl.float32)
        for tap in tl.static_range(9):
            i, j = tap // 3 - 1, tap % 3 - 1
            inside = there & (row + i >= 0) & (row + i < height) & (column + j >= 0) & (column + j < width)
            source = (pixel + i * width + j).to(tl.int64) * C
            for start in range(0, C, K):
                k = start + tl.arange(0, K)
                inputs = tl.load(x + source[:, None] + k[None, :], mask=inside[:, None], other=0)
                if FIRST:
                    raised = inputs.to(tl.float32) * tl.load(scale + k)[None, :] + tl.load(shift + k)[None, :]
                    # outside of the image are zeros, not what a batch norm makes of them
                    raised = tl.where(inside[:, None], _relu(raised), 0.0)
                    inputs = raised.to(x.dtype.element_ty)
                weights = tl.load(weight + (tap * C + k)[:, None] * C + n[None, :])
                result = tl.dot(inputs, weights, result, input_precision=PRECISION)
        target = pixel.to(tl.int64)[:, None] * C + n[None, :]
        if FIRST:
            result = _relu(result + tl.load(bias + n)[None, :])
            tl.store(y + target, result.to(y.dtype.element_ty), mask=there[:, None])
        else:
            before = tl.load(y + target, mask=there[:, None], other=0)
            after = (before.to(tl.float32) + result).to(y.dtype.element_ty)
            tl.store(y + target, after, mask=there[:, None])
            changed = after.to(tl.float32) - before.to(tl.float32)
            image = tl.where(there, pixel // (height * width), -1)
            earlier = tl.load(places + at - 1, mask=there & (at > tile * P), other=0) // (height * width)
            _add_by_image(
                sums, changed, image, there & (at > tile * P) & (image != earlier), n, C, P, PRECISION
            )


@triton.jit  # type: ignore[untyped-decorator]
def _add_by_image(  # type: ignore[no-untyped-def]
    sums, changed, image, new, n, C: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr
):
    """Add the rows of a tile to the sums of their images: sixteen runs of one image each at a time."""
    # what is not finite goes by itself, since even nothing of it would spoil the sums of other images
    odd = ~(tl.abs(changed) < float("inf")) & (image >= 0)[:, None]
    tl.atomic_add(sums + image[:, None] * C + n[None, :], changed, mask=odd, sem="relaxed")
    changed = tl.where(odd, 0.0, changed)
    run = tl.cumsum(new.to(tl.int32), 0)
    slots = tl.arange(0, 16)
    for start in range(0, tl.max(run, 0) + 1, 16):
        own = (run[None, :] == start + slots[:, None]) & (image[None, :] >= 0)
        # tf32 where convolutions are of half precision anyway
        added = tl.dot(own.to(tl.float32), changed, input_precision=PRECISION)
        whose = tl.max(tl.where(own, image[None, :], -1), 1)
        tl.atomic_add(
            sums + whose[:, None] * C + n[None, :], added, mask=(whose >= 0)[:, None], sem="relaxed"
        )


@triton.jit  # type: ignore[untyped-decorator]
def decide(  # type: ignore[no-untyped-def]
    u, weight, pooled, noise, places, count, goes_on, steps, probs, survival, expected, log_q,
    iteration, bound, height, width, C: tl.constexpr, P: tl.constexpr, K: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """Ask the halting head at the listed pixels, and note who goes on to the next iteration."""
    total = tl.load(count)
    for tile in range(tl.program_id(0), tl.cdiv(total, P), tl.num_programs(0)):
        at = tile * P + tl.arange(0, P)
        there = at < total
        pixel = tl.load(places + at, mask=there, other=0)
        row, column = pixel // width % height, pixel % width
        logit = tl.load(pooled + pixel // (height * width), mask=there, other=0.0)
        for tap in tl.static_range(9):
            i, j = tap // 3 - 1, tap % 3 - 1
            inside = there & (row + i >= 0) & (row + i < height) & (column + j >= 0) & (column + j < width)
            source = (pixel + i * width + j).to(tl.int64) * C
            for start in range(0, C, K):
                k = start + tl.arange(0, K)
                inputs = tl.load(u + source[:, None] + k[None, :], mask=inside[:, None], other=0)
                logit += tl.sum(inputs.to(tl.float32) * tl.load(weight + tap * C + k)[None, :], 1)
        halt = 1 / (1 + tl.exp(-logit))
        stays = 1 / (1 + tl.exp(logit))
        if SAMPLES:
            go = ~(logit + tl.load(noise + pixel, mask=there, other=0.0) > 0)
            # log(1 − h) or log h, without a difference of large numbers
            log = -tl.log(1 + tl.exp(-tl.abs(logit))) - tl.where(
                go, tl.maximum(logit, 0.0), -tl.minimum(logit, 0.0)
            )
            tl.store(log_q + pixel, tl.load(log_q + pixel, mask=there, other=0.0) + log, mask=there)
        else:
            go = ~(logit > bound)  # also where it is NaN, as dense modes have it
        left = tl.load(survival + pixel, mask=there, other=0.0) * stays
        tl.store(survival + pixel, left, mask=there)
        tl.store(expected + pixel, tl.load(expected + pixel, mask=there, other=0.0) + left, mask=there)
        tl.store(probs + pixel, halt, mask=there)
        tl.store(goes_on + pixel, go.to(tl.uint8), mask=there)
        tl.store(steps + pixel, iteration + 1 + tl.zeros((P,), tl.int64), mask=there & go)


@triton.jit  # type: ignore[untyped-decorator]
def filter_lists(  # type: ignore[no-untyped-def]
    near,
    near_count,
    goes_on,
    new_near,
    new_near_count,
    new_active,
    new_active_count,
    height,
    width,
    P: tl.constexpr,
):
    """Of the pixels near active ones, list those that still are near some, and those that are active.

    The order of tiles is that in which programs come to it; within a tile it stays.
    """
    total = tl.load(near_count)
    for tile in range(tl.program_id(0), tl.cdiv(total, P), tl.num_programs(0)):
        at = tile * P + tl.arange(0, P)
        there = at < total
        pixel = tl.load(near + at, mask=there, other=0)
        row, column = pixel // width % height, pixel % width
        seen = tl.zeros((P,), tl.int32)
        for tap in tl.static_range(9):
            i, j = tap // 3 - 1, tap % 3 - 1
            inside = there & (row + i >= 0) & (row + i < height) & (column + j >= 0) & (column + j < width)
            seen |= tl.load(goes_on + pixel + i * width + j, mask=inside, other=0).to(tl.int32)
        own = tl.load(goes_on + pixel, mask=there, other=0).to(tl.int32)
        _append(new_near, new_near_count, pixel, seen)
        _append(new_active, new_active_count, pixel, own)


@triton.jit
def _append(places, count, pixel, chosen):  # type: ignore[no-untyped-def]
    """Append the chosen pixels to a list."""
    start = tl.atomic_add(count, tl.sum(chosen, 0), sem="relaxed")
    tl.store(places + start + tl.cumsum(chosen, 0) - 1, pixel, mask=chosen > 0)
