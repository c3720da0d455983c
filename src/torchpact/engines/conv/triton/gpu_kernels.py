"""Triton kernels over lists of active pixels: the convolutions.

Maps lie channels last, so that a pixel is a row of ``C`` numbers, and a list holds the numbers of such rows.
How long a list is only the device knows: programs take tiles of it in turns until it is done, and nothing has
to wait for the host. Tiles are of ``P`` pixels; ``N`` outputs and ``K`` inputs of a convolution at a time.
With ``ALL`` the list is that of all pixels, and not read.

Two things that GPUs since Hopper offer did not pay on an H200, in blocks of 64 to 256 channels with 25 % and
50 % of their pixels active: kernels that are started before the last one is done made these 0 to 8 % slower,
weights that are loaded in bulk (TMA) −1 to 5 %.
"""

import triton
import triton.language as tl


@triton.jit
def relu(x):  # type: ignore[no-untyped-def]
    """Keeps NaN, as torch does."""
    return tl.where(x < 0, 0.0, x)


@triton.jit  # type: ignore[untyped-decorator]
def listed(places, tile, total, P: tl.constexpr, ALL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which pixels a tile has, and which of its places are filled."""
    at = tile * P + tl.arange(0, P)
    there = at < total
    pixel = tl.where(there, at, 0) if ALL else tl.load(places + at, mask=there, other=0)
    return pixel, there


@triton.jit
def neighbours(pixel, there, height, width):  # type: ignore[no-untyped-def]
    """Which of the 3×3 neighbours of pixels lie inside of the image: a bit for each."""
    row, column = pixel // width % height, pixel % width
    rows = tl.where(row > 0, 0b111, 0) | 0b111000 | tl.where(row < height - 1, 0b111000000, 0)
    columns = (
        tl.where(column > 0, 0b001001001, 0) | 0b010010010 | tl.where(column < width - 1, 0b100100100, 0)
    )
    return tl.where(there, rows & columns, 0)


@triton.jit(do_not_specialize=["pixels", "zero"])  # type: ignore[untyped-decorator]
def survey_all(  # type: ignore[no-untyped-def]
    u, scale, shift, raised, columns, products, pools, zeros, zero, pixels,
    C: tl.constexpr, N: tl.constexpr, P: tl.constexpr, K: tl.constexpr, W: tl.constexpr, HEADS: tl.constexpr,
    ASKED: tl.constexpr,
):  # fmt: skip
    """Do so for all pixels: see ``survey``. Write ``zero`` zeros where later kernels count."""
    at = tl.program_id(0) * P + tl.arange(0, P)
    for start in range(0, tl.cdiv(zero, tl.num_programs(0) * P)):
        place = start * tl.num_programs(0) * P + at
        tl.store(zeros + place, tl.zeros((P,), tl.int32), mask=place < zero)
    survey(
        u, scale, shift, raised, columns, products, pools, at, at < pixels, pixels, HEADS,
        C, N, P, K, W, HEADS, ASKED,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def survey(  # type: ignore[no-untyped-def]
    u, scale, shift, raised, columns, products, pools, pixel, there, pixels, left,
    C: tl.constexpr, N: tl.constexpr, P: tl.constexpr, K: tl.constexpr, W: tl.constexpr, HEADS: tl.constexpr,
    ASKED: tl.constexpr,
):  # fmt: skip
    """Leave what is looked at of pixels that do not change: relu(scale·u + shift), products if ``ASKED``.

    If ``raised`` is None, the convolution that comes next makes the former by itself. ``columns`` is a matrix
    of (C, W): the nine taps of a head's convolution, then what it and those ``left`` after it have for the
    mean of the map. The mean's product is the mean of products, and pixels that do not change have left
    theirs for all heads to come: if ``pools`` is None, they stay. Convolutions leave the products with every
    ``N`` channels apart, to be added up; here all is in the first part.
    """
    row = pixel.to(tl.int64)[:, None] * C
    # the first 16 columns have the taps
    V: tl.constexpr = 16 if pools is None else W
    result = tl.zeros((P, V), tl.float32)
    for start in range(0, C, K):
        k = start + tl.arange(0, K)
        inputs = tl.load(u + row + k[None, :], mask=there[:, None], other=0.0)
        if ASKED:
            taps = tl.load(columns + k[:, None] * W + tl.arange(0, V)[None, :])
            result = tl.dot(inputs, taps, result, input_precision="ieee")
        if raised is not None:
            _raise(raised, inputs, scale, shift, row, k, there)
    if ASKED:
        _leave_products(products, pools, result, 0, pixel, there, pixels, left, V, HEADS)
        for part in range(1, C // N):
            none = tl.zeros((P, V), tl.float32)
            _leave_products(products, pools, none, part, pixel, there, pixels, left, V, HEADS)


@triton.jit
def _raise(raised, u, scale, shift, row, n, there):  # type: ignore[no-untyped-def]
    """Leave some columns of pixels as the unit that comes next wants them."""
    tl.store(raised + row + n[None, :], _activated(u, scale, shift, n), mask=there[:, None])


@triton.jit
def _activated(u, scale, shift, n):  # type: ignore[no-untyped-def]
    """Put some columns of pixels through a batch norm and a ReLU."""
    result = relu(u.to(tl.float32) * tl.load(scale + n)[None, :] + tl.load(shift + n)[None, :])
    return result.to(u.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _leave_products(  # type: ignore[no-untyped-def]
    products, pools, result, part, pixel, there, pixels, left, W: tl.constexpr, HEADS: tl.constexpr
):
    """Nine rows of all pixels for every part, so that what neighbours ask for lies side by side.

    In ``pools`` each head has a row for every part; the last are ``left``.
    """
    column, rows = tl.arange(0, W)[:, None].to(tl.int64), tl.trans(result)
    at = (part * 9 + column) * pixels + pixel[None, :]
    tl.store(products + at, rows, mask=there[None, :] & (column < 9))
    if pools is not None:
        at = (part * HEADS + HEADS - left + column - 9) * pixels + pixel[None, :]
        tl.store(pools + at, rows, mask=there[None, :] & (column >= 9) & (column < 9 + left))


@triton.jit  # type: ignore[untyped-decorator]
def _enlarged(  # type: ignore[no-untyped-def]
    pixel, height, width, height_before, width_before, STRIDE: tl.constexpr
):
    """The pixels of a map before the stride that lie where these do."""
    row, column = pixel // width % height, pixel % width
    image = pixel // (height * width)
    return (image * height_before + row * STRIDE) * width_before + column * STRIDE


@triton.jit  # type: ignore[untyped-decorator]
def _before(  # type: ignore[no-untyped-def]
    old, pixel, there, n, height, width, height_before, width_before,
    D: tl.constexpr, P: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """What a unit adds to, of some channels.

    Of a larger map, means of ``STRIDE``² pixels, or what there is of them; of one with fewer channels these,
    with zeros around.
    """
    channel = n - (D - KEPT) // 2
    kept = there[:, None] & (channel >= 0)[None, :] & (channel < KEPT)[None, :]
    first = _enlarged(pixel, height, width, height_before, width_before, STRIDE).to(tl.int64)
    if STRIDE == 1:
        result = tl.load(old + first[:, None] * KEPT + channel[None, :], mask=kept, other=0.0)
    else:
        row, column = pixel // width % height * STRIDE, pixel % width * STRIDE
        total, number = tl.zeros((P, N), tl.float32), tl.zeros((P,), tl.float32)
        for at in tl.static_range(STRIDE * STRIDE):
            down, across = at // STRIDE, at % STRIDE
            inside = (row + down < height_before) & (column + across < width_before)
            place = (first + down * width_before + across)[:, None] * KEPT + channel[None, :]
            total += tl.load(old + place, mask=kept & inside[:, None], other=0.0).to(tl.float32)
            number += inside.to(tl.float32)
        result = (total / number[:, None]).to(old.dtype.element_ty)
    return result


@triton.jit(do_not_specialize=["pixels", "left"])  # type: ignore[untyped-decorator]
def convolve(  # type: ignore[no-untyped-def]
    x, weight, bias, y, old, scale, shift, raised, columns, products, pools, places, count, pixels,
    left, height, width, height_before, width_before,
    C: tl.constexpr, D: tl.constexpr, TAPS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    STRIDE: tl.constexpr, KEPT: tl.constexpr, RAISES: tl.constexpr,
    W: tl.constexpr, HEADS: tl.constexpr,
    ALL: tl.constexpr, LAST: tl.constexpr, ASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A convolution of C channels to D, 3×3 or 1×1, at the listed pixels, and what comes after it.

    Its result is relu(· + bias), unless it is the ``LAST`` one of a unit. That leaves ``old`` and its result
    in ``y``. If a head is ``ASKED`` next it goes on as ``survey`` does, while all is in registers: reading
    maps once more, for every tap of a head, took as long as both convolutions with 64 channels. Tiles are
    numbered through all pixels and outputs.

    A convolution may have a ``STRIDE``, and then looks at a map of the size ``before``. That of the ``LAST``
    one is its unit's: ``old`` is of that size, and has ``KEPT`` channels, see ``_before``. The first one of
    a bottleneck may put what it reads through the batch norm and ReLU by itself (``RAISES``).
    """
    total = pixels if ALL else tl.load(count)
    k = tl.arange(0, K)
    slices: tl.constexpr = C // K
    # a sum of few products: what it is added to is asked for before
    EARLY: tl.constexpr = LAST and TAPS == 1 and STRIDE == 1 and KEPT == D
    parts: tl.constexpr = D // N
    for tile in range(tl.program_id(0), tl.cdiv(total, P) * parts, tl.num_programs(0)):
        pixel, there = listed(places, tile // parts, total, P, ALL)
        n = tile % parts * N + tl.arange(0, N)
        row = pixel.to(tl.int64)[:, None]
        if LAST or STRIDE == 1:
            inside = neighbours(pixel, there, height, width)
            inputs_at, line = x + row * C + k[None, :], width
        else:
            source = _enlarged(pixel, height, width, height_before, width_before, STRIDE)
            inside = neighbours(source, there, height_before, width_before)
            inputs_at, line = x + source.to(tl.int64)[:, None] * C + k[None, :], width_before
        weights_at = weight + k[:, None] * D + n[None, :]
        target = row * D + n[None, :]
        result = tl.zeros((P, N), tl.float32)
        if EARLY:
            before = tl.load(old + target, mask=there[:, None], other=0.0)
        # one loop over taps and slices, so that loads of the next run ahead of products
        for turn in range(TAPS * slices):
            if TAPS == 9:
                tap = turn // slices
                offset = ((tap // 3 - 1) * line + tap % 3 - 1) * C + turn % slices * K
                mask = ((inside >> tap) & 1)[:, None] != 0
            else:
                offset = turn * K
                mask = there[:, None]
            inputs = tl.load(inputs_at + offset, mask=mask, other=0.0)
            if RAISES:
                inputs = _activated(inputs, scale, shift, turn % slices * K + k)
            weights = tl.load(weights_at + turn * (K * D))
            result = tl.dot(inputs, weights, result, input_precision=PRECISION)
        if LAST:
            if STRIDE > 1 or KEPT < D:
                before = _before(
                    old, pixel, there, n, height, width, height_before, width_before, D, P, N, STRIDE, KEPT
                )  # fmt: skip
            elif not EARLY:
                before = tl.load(old + target, mask=there[:, None], other=0.0)
            result += before.to(tl.float32)
            after = result.to(y.dtype.element_ty)
            tl.store(y + target, after, mask=there[:, None])
            if ASKED:
                if raised is not None:
                    _raise(raised, after, scale, shift, row * D, n, there)
                taps = tl.load(columns + n[:, None] * W + tl.arange(0, W)[None, :])
                asked = tl.dot(after, taps, input_precision="ieee")
                part = tile % parts
                _leave_products(products, pools, asked, part, pixel, there, pixels, left, W, HEADS)
        else:
            result = relu(result + tl.load(bias + n)[None, :])
            tl.store(y + target, result.to(y.dtype.element_ty), mask=there[:, None])
