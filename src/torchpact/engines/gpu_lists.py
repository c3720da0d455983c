"""Triton kernels that decide who goes on, and make the lists of those: apart, or in one for small maps.

The first convolution of a unit runs at active pixels and their neighbours, the near ones, and looks at
neighbours of these, the far ones. Lists of ``gpu_kernels``, and its letters.
"""

import triton
import triton.language as tl

from torchpact.engines.gpu_kernels import listed, neighbours, raise_rows, relu


@triton.jit(do_not_specialize=["pixels", "iteration"])  # type: ignore[untyped-decorator]
def decide(  # type: ignore[no-untyped-def]
    u, weight, sums, pooled_weight, pooled_bias, noise, places, count, pixels,
    goes_on, steps, cost, probs, survival, expected, log_q, iteration, last, bound, height, width,
    C: tl.constexpr, P: tl.constexpr, K: tl.constexpr, ALL: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """Ask the halting head at the listed pixels, and note who goes on to the next iteration."""
    total = pixels if ALL else tl.load(count)
    k = tl.arange(0, K)
    for tile in range(tl.program_id(0), tl.cdiv(total, P), tl.num_programs(0)):
        pixel, there = listed(places, tile, total, P, ALL)
        inside = neighbours(pixel, there, height, width)
        row = pixel.to(tl.int64)[:, None] * C
        products = tl.zeros((P, K), tl.float32)
        for part in range(0, C, K):
            for tap in tl.static_range(9):  # unrolled, so that all are loaded at once
                offset = ((tap // 3 - 1) * width + tap % 3 - 1) * C + part + k
                mask = ((inside >> tap) & 1)[:, None] != 0
                inputs = tl.load(u + row + offset[None, :], mask=mask, other=0.0)
                products += inputs.to(tl.float32) * tl.load(weight + tap * C + part + k)[None, :]
        image = tl.where(there, pixel // (height * width), -1)
        logit = tl.sum(products, 1) + tl.load(pooled_bias)
        logit += _pooled_by_image(sums, pooled_weight, image, C, P, K) / (height * width)
        _note(
            logit, pixel, there, there, noise, pixels, goes_on, steps, cost, probs, survival, expected, log_q,
            iteration, last, bound, P, ALL, SAMPLES,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _note(  # type: ignore[no-untyped-def]
    logit, pixel, there, asked, noise, pixels, goes_on, steps, cost, probs, survival, expected, log_q,
    iteration, last, bound, P: tl.constexpr, ALL: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """Turn logits into decisions, and add them to what is known of the pixels that are asked.

    ``probs`` has a row of all pixels for each iteration up to the ``last``; the first decision fills all.
    """
    halt = 1 / (1 + tl.exp(-logit))
    left = 1 / (1 + tl.exp(logit))
    if SAMPLES:
        go = ~(logit + tl.load(noise + pixel, mask=there, other=0.0) > 0)
        # log(1 − h) or log h, without a difference of large numbers
        log = -tl.log(1 + tl.exp(-tl.abs(logit))) - tl.where(
            go, tl.maximum(logit, 0.0), -tl.minimum(logit, 0.0)
        )
        if not ALL:
            log += tl.load(log_q + pixel, mask=there, other=0.0)
        tl.store(log_q + pixel, log, mask=asked)
    else:
        go = ~(logit > bound)  # also where it is NaN, as dense modes have it
    so_far = tl.full((P,), 1.0, tl.float32)
    stride = tl.zeros((P,), tl.int64) + pixels
    if ALL:
        for later in range(iteration, last):
            tl.store(probs + later * stride + pixel, so_far, mask=asked)
    else:
        left *= tl.load(survival + pixel, mask=there, other=0.0)
        so_far = tl.load(expected + pixel, mask=there, other=0.0)
    tl.store(survival + pixel, left, mask=asked)
    tl.store(expected + pixel, so_far + left, mask=asked)
    tl.store(probs + (iteration - 1) * stride + pixel, halt, mask=asked)
    tl.store(goes_on + pixel, go.to(tl.uint8), mask=asked)
    ran = iteration + go.to(tl.int64)
    tl.store(steps + pixel, ran, mask=asked)
    tl.store(cost + pixel, ran.to(tl.float32), mask=asked)


@triton.jit  # type: ignore[untyped-decorator]
def _pooled_by_image(  # type: ignore[no-untyped-def]
    sums, weight, image, C: tl.constexpr, P: tl.constexpr, K: tl.constexpr
):
    """The product of the sums of each pixel's image with the weights, one image after the other."""
    result = tl.zeros((P,), tl.float32)
    one = tl.max(image, 0)
    while one >= 0:
        result = tl.where(image == one, _pooled(sums + one * C, weight, C, K), result)
        image = tl.where(image == one, -1, image)
        one = tl.max(image, 0)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _pooled(row, weight, C: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    k = tl.arange(0, K)
    product = tl.zeros((K,), tl.float32)
    for part in range(0, C, K):
        product += tl.load(row + part + k) * tl.load(weight + part + k)
    return tl.sum(product, 0)


@triton.jit(do_not_specialize=["pixels"])  # type: ignore[untyped-decorator]
def prepare(  # type: ignore[no-untyped-def]
    u, scale, shift, before, goes_on, far, far_count, pixels,
    new_far, new_far_count, new_near, new_near_count, new_active, new_active_count, height, width,
    C: tl.constexpr, P: tl.constexpr, K: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Filter the lists of pixels, and leave relu(scale·u + shift) where the first convolution looks.

    The order of tiles is that in which programs come to it; within a tile it stays.
    """
    total = pixels if ALL else tl.load(far_count)
    for tile in range(tl.program_id(0), tl.cdiv(total, P), tl.num_programs(0)):
        pixel, there = listed(far, tile, total, P, ALL)
        own, near, seen = _active_around(goes_on, pixel, there, height, width)
        _append(new_far, tl.atomic_add(new_far_count, tl.sum(seen, 0), sem="relaxed"), pixel, seen)
        _append(new_near, tl.atomic_add(new_near_count, tl.sum(near, 0), sem="relaxed"), pixel, near)
        _append(new_active, tl.atomic_add(new_active_count, tl.sum(own, 0), sem="relaxed"), pixel, own)
        raise_rows(u, scale, shift, before, pixel, seen > 0, C, K)


@triton.jit
def _active_around(goes_on, pixel, there, height, width):  # type: ignore[no-untyped-def]
    """Whether a pixel goes on, or any of its 3×3 neighbours, or of its 5×5 ones."""
    row, column = pixel // width % height, pixel % width
    own = tl.load(goes_on + pixel, mask=there, other=0).to(tl.int32)
    near = own
    seen = own
    for tap in tl.static_range(25):
        i, j = tap // 5 - 2, tap % 5 - 2
        inside = there & (row + i >= 0) & (row + i < height) & (column + j >= 0) & (column + j < width)
        goes = tl.load(goes_on + pixel + i * width + j, mask=inside, other=0).to(tl.int32)
        seen |= goes
        if i * i <= 1 and j * j <= 1:
            near |= goes
    return own, near, seen


@triton.jit
def _append(places, start, pixel, chosen):  # type: ignore[no-untyped-def]
    """Write the chosen pixels to a list, from a place on."""
    tl.store(places + start + tl.cumsum(chosen, 0) - 1, pixel, mask=chosen > 0)


@triton.jit(do_not_specialize=["pixels", "iteration"])  # type: ignore[untyped-decorator]
def advance(  # type: ignore[no-untyped-def]
    u, weight, products, pooled_bias, noise,
    goes_on, steps, cost, probs, survival, expected, log_q, iteration, last, bound,
    scale, shift, before, near_list, active_list, counts, pixels, height, width,
    C: tl.constexpr, P: tl.constexpr, K: tl.constexpr, ALL: tl.constexpr, SAMPLES: tl.constexpr,
    LOOKS: tl.constexpr,
):  # fmt: skip
    """Decide and prepare at once, by a program for each image, whose threads wait for each other.

    ``weight`` is a matrix of (C, 16): the nine taps of the head's convolution, then what the mean of the
    image is multiplied by. A logit is a sum of ``products`` of pixels with these. ``counts`` has that of
    active pixels in its lower half, that of near ones in its upper.

    What takes time is loads that wait for each other, hence few of these: pixels are put through the batch
    norm while they are at hand, before anyone knows which the convolution looks at; what is known of them is
    loaded whether they are asked or not; and a program ``LOOKS`` whether anyone of its image goes on only if
    another one waits for its place.
    """
    image = tl.program_id(0)
    size = height * width
    if LOOKS and not ALL:
        alive = tl.zeros((P,), tl.uint8)
        for start in range(0, size, P):
            pixel, there = _of_image(image, start, size, P)
            alive |= tl.load(goes_on + pixel, mask=there, other=0)
        if tl.max(alive, 0) == 0:
            return
    total = tl.zeros((16,), tl.float32)
    for start in range(0, size, P):
        pixel, there = _of_image(image, start, size, P)
        total += _project(u, weight, products, scale, shift, before, pixel, there, C, P, K)
    pooled = tl.sum(tl.where(tl.arange(0, 16) == 9, total, 0.0), 0) / size + tl.load(pooled_bias)
    tl.debug_barrier()
    for start in range(0, size, P):
        pixel, there = _of_image(image, start, size, P)
        asked = there if ALL else tl.load(goes_on + pixel, mask=there, other=0) != 0
        inside = neighbours(pixel, there, height, width)
        logit = tl.zeros((P,), tl.float32) + pooled
        for tap in tl.static_range(9):
            at = pixel + (tap // 3 - 1) * width + tap % 3 - 1
            logit += tl.load(products + at * 16 + tap, mask=((inside >> tap) & 1) != 0, other=0.0)
        _note(
            logit, pixel, there, asked, noise, pixels, goes_on, steps, cost, probs, survival, expected, log_q,
            iteration, last, bound, P, ALL, SAMPLES,
        )  # fmt: skip
    tl.debug_barrier()
    for start in range(0, size, P):
        pixel, there = _of_image(image, start, size, P)
        own, near = _near_active(goes_on, pixel, there, height, width)
        # counts of both lists in one number: what all threads add up takes its time
        both = (near.to(tl.int64) << 32) + own
        end = tl.atomic_add(counts, tl.sum(both, 0), sem="relaxed") + tl.cumsum(both, 0)
        tl.store(near_list + (end >> 32) - 1, pixel, mask=near > 0)
        tl.store(active_list + (end & 0xFFFFFFFF) - 1, pixel, mask=own > 0)


@triton.jit  # type: ignore[untyped-decorator]
def _of_image(image, start, size, P: tl.constexpr):  # type: ignore[no-untyped-def]
    at = start + tl.arange(0, P)
    return image * size + at, at < size


@triton.jit  # type: ignore[untyped-decorator]
def _project(  # type: ignore[no-untyped-def]
    u, weight, products, scale, shift, before, pixel, there, C: tl.constexpr, P: tl.constexpr, K: tl.constexpr
):
    """Leave the products of pixels with each column of weights, and return their sums.

    On the way it leaves relu(scale·u + shift) in ``before``.
    """
    k, t = tl.arange(0, K), tl.arange(0, 16)
    row = pixel.to(tl.int64)[:, None]
    result = tl.zeros((P, 16), tl.float32)
    for part in range(0, C, K):
        at = row * C + part + k[None, :]
        inputs = tl.load(u + at, mask=there[:, None], other=0.0)
        weights = tl.load(weight + (part + k[:, None]) * 16 + t[None, :])
        scales, shifts = tl.load(scale + part + k)[None, :], tl.load(shift + part + k)[None, :]
        result = tl.dot(inputs, weights, result, input_precision="ieee")
        raised = relu(inputs.to(tl.float32) * scales + shifts)
        tl.store(before + at, raised.to(before.dtype.element_ty), mask=there[:, None])
    tl.store(products + row * 16 + t[None, :], result, mask=there[:, None])
    return tl.sum(result, 0)


@triton.jit
def _near_active(goes_on, pixel, there, height, width):  # type: ignore[no-untyped-def]
    """Whether a pixel goes on, or any of its 3×3 neighbours."""
    inside = neighbours(pixel, there, height, width)
    own = tl.load(goes_on + pixel, mask=there, other=0).to(tl.int32)
    near = own
    for tap in tl.static_range(9):
        at = pixel + (tap // 3 - 1) * width + tap % 3 - 1
        near |= tl.load(goes_on + at, mask=((inside >> tap) & 1) != 0, other=0).to(tl.int32)
    return own, near
