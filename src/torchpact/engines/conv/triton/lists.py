"""The Triton kernel that decides who goes on, and makes the lists of those.

The first convolution of a unit runs at active pixels and their neighbours, the near ones, and looks at
neighbours of these, the far ones. Lists of ``gpu_kernels``, and its letters.
"""

import triton
import triton.language as tl

from torchpact.engines.conv.triton.gpu_kernels import neighbours, survey


@triton.jit(do_not_specialize=["pixels", "iteration"])  # type: ignore[untyped-decorator]
def advance(  # type: ignore[no-untyped-def]
    u, products, pools, bias, noise, was_on, goes_on,
    steps, cost, probs, survival, expected, log_q, iteration, last, bound,
    scale, shift, raised, columns, next_products, near_list, active_list, frozen_list, counts,
    pixels, height, width,
    C: tl.constexpr, N: tl.constexpr, R: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, ABOVE: tl.constexpr, BESIDE: tl.constexpr, W: tl.constexpr,
    HEADS: tl.constexpr, SHARE: tl.constexpr, REACH: tl.constexpr, ALL: tl.constexpr, ASKED: tl.constexpr,
):  # fmt: skip
    """Decide in a region of an image, list who goes on and who is near, and survey those that are looked at.

    A region has a margin, ``ABOVE`` and below, ``BESIDE`` on both sides, that belongs to others: its
    decisions are needed to tell who is near and far, and made once more rather than waited for. Hence flags
    and products are read from one place and left in another.

    A logit is a sum of ``products`` of neighbours and the mean of ``pools``, which the last convolution or
    ``survey`` has left. ``counts`` has that of active pixels in its lower half, that of near ones in its
    upper. A region has its own room in ``frozen_list`` for far pixels that do not go on.

    Where regions are few, ``SHARE`` programs have one: all of them decide, the first writes that down, and
    each surveys ``R`` frozen pixels at a time, in turns.
    """
    P: tl.constexpr = ROWS * COLUMNS
    region, member = tl.program_id(0) // SHARE, tl.program_id(0) % SHARE
    image, row, column, own = _region(region, height, width, ROWS, COLUMNS, ABOVE, BESIDE)
    there = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    pixel = tl.where(there, (image * height + row) * width + column, 0)
    own = own & there
    noted = own & (tl.zeros((P,), tl.int32) + member == 0)
    asked = there
    if not ALL:
        asked = there & (tl.load(was_on + pixel, mask=there, other=0) != 0)
        if tl.max(asked.to(tl.int32), 0) == 0:
            tl.store(goes_on + pixel, tl.zeros((P,), tl.uint8), mask=noted)
            return
    pooled = _pooled(pools, iteration - 1, image, pixels, height * width, C // N, HEADS, P)
    logit = tl.zeros((P,), tl.float32) + pooled / (height * width) + tl.load(bias)
    logit += _asked_of_neighbours(products, pixel, asked, pixels, height, width, C // N, P)
    go = _note(
        logit, pixel, there, asked & noted, noise, pixels, steps, cost, probs, survival, expected, log_q,
        iteration, last, bound, P, ALL,
    )  # fmt: skip
    go = asked & go
    tl.store(goes_on + pixel, go.to(tl.uint8), mask=noted)
    near, far = _near_and_far(go, ROWS, COLUMNS, REACH)
    near, active, frozen = near & noted, go & noted, far & own & ~go
    # three counts in one number: what all threads add up takes its time
    each = (near.to(tl.int64) << 40) + (active.to(tl.int64) << 20) + frozen.to(tl.int64)
    end, total = tl.cumsum(each, 0), tl.sum(each, 0)
    room, place = frozen_list + region * P, (end & 0xFFFFF).to(tl.int32) - 1
    tl.store(room + place, pixel, mask=frozen & (place // R % SHARE == member))
    start = tl.atomic_add(
        counts, ((total >> 40) << 32) + ((total >> 20) & 0xFFFFF), mask=member == 0, sem="relaxed"
    )
    tl.store(near_list + (start >> 32) + (end >> 40) - 1, pixel, mask=near)
    tl.store(active_list + (start & 0xFFFFFFFF) + ((end >> 20) & 0xFFFFF) - 1, pixel, mask=active)
    if raised is None and not ASKED:
        return
    tl.debug_barrier()
    left = (total & 0xFFFFF).to(tl.int32)
    for first in range(member * R, left, SHARE * R):
        at = first + tl.arange(0, R)
        some = tl.load(room + at, mask=at < left, other=0)
        survey(
            u, scale, shift, raised, columns, next_products, None, some, at < left, pixels, 0,
            C, N, R, K, W, HEADS, ASKED,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _region(  # type: ignore[no-untyped-def]
    region, height, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ABOVE: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """The image of a region, its rows and columns, inside of the image or not, and which are its own."""
    down, across = tl.cdiv(height, ROWS - 2 * ABOVE), tl.cdiv(width, COLUMNS - 2 * BESIDE)
    image, region = region // (down * across), region % (down * across)
    at = tl.arange(0, ROWS * COLUMNS)
    i, j = at // COLUMNS, at % COLUMNS
    own = (i >= ABOVE) & (i < ROWS - ABOVE) & (j >= BESIDE) & (j < COLUMNS - BESIDE)
    row = region // across * (ROWS - 2 * ABOVE) - ABOVE + i
    column = region % across * (COLUMNS - 2 * BESIDE) - BESIDE + j
    return image, row, column, own


@triton.jit  # type: ignore[untyped-decorator]
def _pooled(  # type: ignore[no-untyped-def]
    pools, head, image, pixels, size, PARTS: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr
):
    """The sum of what the pixels of an image, ``size`` of them, have left for the mean that a head sees."""
    result, stride = tl.zeros((P,), tl.float32), tl.zeros((P,), tl.int64) + pixels
    for part in range(PARTS):
        for start in range(0, size, P):
            at = start + tl.arange(0, P)
            place = (part * HEADS + head) * stride + image * size + at
            result += tl.load(pools + place, mask=at < size, other=0.0)
    return tl.sum(result, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _asked_of_neighbours(  # type: ignore[no-untyped-def]
    products, pixel, asked, pixels, height, width, PARTS: tl.constexpr, P: tl.constexpr
):
    """The sum over taps of what the neighbour there has left for it."""
    inside = neighbours(pixel, asked, height, width)
    result = tl.zeros((P,), tl.float32)
    stride = tl.zeros((P,), tl.int64) + pixels
    for part in range(PARTS):
        for tap in tl.static_range(9):  # unrolled, so that all are loaded at once
            at = (part * 9 + tap) * stride + pixel + (tap // 3 - 1) * width + tap % 3 - 1
            result += tl.load(products + at, mask=((inside >> tap) & 1) != 0, other=0.0)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _note(  # type: ignore[no-untyped-def]
    logit, pixel, there, asked, noise, pixels, steps, cost, probs, survival, expected, log_q,
    iteration, last, bound, P: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Turn logits into decisions, and add them to what is known of the pixels that are asked.

    ``noise`` decides, and ``log_q`` is kept, unless they are None. ``probs``, ``survival`` and ``expected``
    are details, and may be None too. ``probs`` has a row of all pixels for each iteration up to the ``last``;
    the first decision fills all. Known values are loaded for all pixels, so that no program waits for the
    list of open ones.
    """
    if noise is not None:
        go = ~(logit + tl.load(noise + pixel, mask=there, other=0.0) > 0)
        # log(1 − h) or log h, without a difference of large numbers
        log = -tl.log(1 + tl.exp(-tl.abs(logit))) - tl.where(
            go, tl.maximum(logit, 0.0), -tl.minimum(logit, 0.0)
        )
        if not ALL:
            log += tl.load(log_q + pixel, mask=there, other=0.0)
        tl.store(log_q + pixel, log, mask=asked)
    else:
        # also where it is NaN, as dense modes have it; minus infinity is exceeded by all
        go = ~((logit > bound) | (bound == float("-inf")))
    if probs is not None:
        so_far, left = tl.full((P,), 1.0, tl.float32), 1 / (1 + tl.exp(logit))
        stride = tl.zeros((P,), tl.int64) + pixels
        if ALL:
            for later in range(iteration, last):
                tl.store(probs + later * stride + pixel, so_far, mask=asked)
        else:
            left *= tl.load(survival + pixel, mask=there, other=0.0)
            so_far = tl.load(expected + pixel, mask=there, other=0.0)
        tl.store(survival + pixel, left, mask=asked)
        tl.store(expected + pixel, so_far + left, mask=asked)
        tl.store(probs + (iteration - 1) * stride + pixel, 1 / (1 + tl.exp(-logit)), mask=asked)
    ran = iteration + go.to(tl.int64)
    tl.store(steps + pixel, ran, mask=asked)
    tl.store(cost + pixel, ran.to(tl.float32), mask=asked)
    return go


@triton.jit  # type: ignore[untyped-decorator]
def _near_and_far(  # type: ignore[no-untyped-def]
    go, ROWS: tl.constexpr, COLUMNS: tl.constexpr, REACH: tl.constexpr
):
    """Whether any of the pixels around goes on; of those up to ``REACH`` away. A row is a number of bits."""
    column = tl.arange(0, COLUMNS)[None, :].to(tl.int64)
    bits = tl.sum(tl.reshape(go, (ROWS, COLUMNS)).to(tl.int64) << column, 1)
    near = bits | _rows_from(bits, -1, ROWS) | _rows_from(bits, 1, ROWS)
    far = near | _rows_from(bits, -2, ROWS) | _rows_from(bits, 2, ROWS)
    near |= (near << 1) | (near >> 1)
    far |= (far << 1) | (far >> 1) | (far << 2) | (far >> 2)
    if REACH == 1:
        far = near
    return (
        tl.reshape(((near[:, None] >> column) & 1) != 0, (ROWS * COLUMNS,)),
        tl.reshape(((far[:, None] >> column) & 1) != 0, (ROWS * COLUMNS,)),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _rows_from(bits, distance: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """For every row the one at a distance, or 0."""
    row = tl.arange(0, ROWS)
    return tl.sum(tl.where(row[None, :] == row[:, None] + distance, bits[None, :], 0), 1)
