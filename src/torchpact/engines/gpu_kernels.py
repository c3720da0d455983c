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
    u, scale, shift, raised, columns, products, zeros, zero, pixels,
    C: tl.constexpr, N: tl.constexpr, P: tl.constexpr, K: tl.constexpr, ASKED: tl.constexpr,
):  # fmt: skip
    """Do so for all pixels: see ``survey``. Write ``zero`` zeros where later kernels count and add up."""
    at = tl.program_id(0) * P + tl.arange(0, P)
    for start in range(0, tl.cdiv(zero, tl.num_programs(0) * P)):
        place = start * tl.num_programs(0) * P + at
        tl.store(zeros + place, tl.zeros((P,), tl.int32), mask=place < zero)
    survey(u, scale, shift, raised, columns, products, at, at < pixels, pixels, C, N, P, K, ASKED)


@triton.jit  # type: ignore[untyped-decorator]
def survey(  # type: ignore[no-untyped-def]
    u, scale, shift, raised, columns, products, pixel, there, pixels,
    C: tl.constexpr, N: tl.constexpr, P: tl.constexpr, K: tl.constexpr, ASKED: tl.constexpr,
):  # fmt: skip
    """Leave what is looked at of pixels that do not change: relu(scale·u + shift), products if ``ASKED``.

    ``columns`` is a matrix of (C, 16) with the nine taps of a head's convolution. Convolutions leave the
    products with every ``N`` channels apart, to be added up; here all is in the first part.
    """
    row = pixel.to(tl.int64)[:, None] * C
    result = tl.zeros((P, 16), tl.float32)
    for start in range(0, C, K):
        k = start + tl.arange(0, K)
        inputs = tl.load(u + row + k[None, :], mask=there[:, None], other=0.0)
        if ASKED:
            taps = tl.load(columns + k[:, None] * 16 + tl.arange(0, 16)[None, :])
            result = tl.dot(inputs, taps, result, input_precision="ieee")
        _raise(raised, inputs, scale, shift, row, k, there)
    if ASKED:
        _leave_products(products, result, 0, pixel, there, pixels)
        for part in range(1, C // N):
            _leave_products(products, tl.zeros((P, 16), tl.float32), part, pixel, there, pixels)


@triton.jit
def _raise(raised, u, scale, shift, row, n, there):  # type: ignore[no-untyped-def]
    """Put some columns of pixels through the batch norm of the unit that comes next, and its ReLU."""
    result = relu(u.to(tl.float32) * tl.load(scale + n)[None, :] + tl.load(shift + n)[None, :])
    tl.store(raised + row + n[None, :], result.to(raised.dtype.element_ty), mask=there[:, None])


@triton.jit
def _leave_products(products, result, part, pixel, there, pixels):  # type: ignore[no-untyped-def]
    """Nine rows of all pixels for every part, so that what neighbours ask for lies side by side."""
    tap = tl.arange(0, 16)[:, None].to(tl.int64)
    at = (part * 9 + tap) * pixels + pixel[None, :]
    tl.store(products + at, tl.trans(result), mask=there[None, :] & (tap < 9))


@triton.jit(do_not_specialize=["pixels"])  # type: ignore[untyped-decorator]
def convolve(  # type: ignore[no-untyped-def]
    x, weight, bias, y, old, scale, shift, raised, columns, products, sums, places, count, pixels,
    height, width,
    C: tl.constexpr, D: tl.constexpr, TAPS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ALL: tl.constexpr, LAST: tl.constexpr, ASKED: tl.constexpr, SUMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A convolution of C channels to D, 3×3 or 1×1, at the listed pixels, and what comes after it.

    Its result is relu(· + bias), unless it is the ``LAST`` one of a unit. That leaves ``old`` and its result
    in ``y``. If a head is ``ASKED`` next it goes on as ``survey`` does, while all is in registers: reading
    maps once more, for every tap of a head, took as long as both convolutions with 64 channels. With ``SUMS``
    it adds what is new to ``sums``, which has a row for every image; with ``ALL`` that is everything. Tiles
    are numbered through all pixels and outputs.
    """
    total = pixels if ALL else tl.load(count)
    k = tl.arange(0, K)
    slices: tl.constexpr = C // K
    parts: tl.constexpr = D // N
    for tile in range(tl.program_id(0), tl.cdiv(total, P) * parts, tl.num_programs(0)):
        pixel, there = listed(places, tile // parts, total, P, ALL)
        n = tile % parts * N + tl.arange(0, N)
        inside = neighbours(pixel, there, height, width)
        row = pixel.to(tl.int64)[:, None]
        inputs_at = x + row * C + k[None, :]
        weights_at = weight + k[:, None] * D + n[None, :]
        target = row * D + n[None, :]
        result = tl.zeros((P, N), tl.float32)
        # one loop over taps and slices, so that loads of the next run ahead of products
        for turn in range(TAPS * slices):
            if TAPS == 9:
                tap = turn // slices
                offset = ((tap // 3 - 1) * width + tap % 3 - 1) * C + turn % slices * K
                mask = ((inside >> tap) & 1)[:, None] != 0
            else:
                offset = turn * K
                mask = there[:, None]
            inputs = tl.load(inputs_at + offset, mask=mask, other=0.0)
            weights = tl.load(weights_at + turn * (K * D))
            result = tl.dot(inputs, weights, result, input_precision=PRECISION)
        if LAST:
            before = tl.load(old + target, mask=there[:, None], other=0.0)
            image = tl.where(there, pixel // (height * width), -1)
            # what is new, before it is rounded: that evens out, and takes fewer registers
            if SUMS and not ALL:
                _add_by_image(sums, result, image, n, D)
            result += before.to(tl.float32)
            if SUMS and ALL:
                _add_by_image(sums, result, image, n, D)
            after = result.to(y.dtype.element_ty)
            tl.store(y + target, after, mask=there[:, None])
            if ASKED:
                _raise(raised, after, scale, shift, row * D, n, there)
                taps = tl.load(columns + n[:, None] * 16 + tl.arange(0, 16)[None, :])
                asked = tl.dot(after, taps, input_precision="ieee")
                _leave_products(products, asked, tile % parts, pixel, there, pixels)
        else:
            result = relu(result + tl.load(bias + n)[None, :])
            tl.store(y + target, result.to(y.dtype.element_ty), mask=there[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _add_by_image(sums, rows, image, n, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the rows of a tile to the sums of their images, one image after the other."""
    one = tl.max(image, 0)
    while one >= 0:  # mostly once or twice: lists keep images together
        added = tl.sum(tl.where((image == one)[:, None], rows, 0.0), 0)
        tl.atomic_add(sums + one * D + n, added, sem="relaxed")
        image = tl.where(image == one, -1, image)
        one = tl.max(image, 0)
