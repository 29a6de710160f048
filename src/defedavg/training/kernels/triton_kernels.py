"""Triton kernels of stacked convolutions with bias, ReLU and pooling.

The SGD update is fused into the backward pass. No kernel unfolds images or stores gradients of weights: a
convolution reads its patches from the image, and an update reads and writes the weights once. The results of a client
depend on its own numbers only, so they are bit-identical on the same device for any number of clients in a launch.
Kernels skip clients with learning rate zero.

Images are (C·B, height, width, channels), convolution weights (C, O, kh, kw, I), one C for each client. The images of a
first layer may have more channels, IX, than the weights: kernels ignore those beyond I, which align the others.
"""

# Triton's language has no types that a checker knows, and its arguments are named as in the formulas. Functions that
# kernels call are inlined by Triton's compiler.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _sgd_update(weights, gradients, rate, mask):
    tl.store(weights, tl.load(weights, mask=mask, other=0.0) - rate * gradients, mask=mask)


@triton.jit
def _output_gradient(grad, out, at, mask, RELU: tl.constexpr):
    """Load the gradient of a layer's outputs before their ReLU, if they have one."""
    g = tl.load(grad + at, mask=mask, other=0.0)
    if RELU:
        g = tl.where(tl.load(out + at, mask=mask, other=0.0) <= 0, 0.0, g)
    return g


@triton.jit
def _magnitude_bits(values):
    """Return the bits of magnitudes, which have the order of the magnitudes; those of NaN are the largest."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _patch_position(k, KW: tl.constexpr, IX: tl.constexpr):
    """Return row, column and channel of the k-th value of a patch."""
    return k // (IX * KW), k // IX % KW, k % IX


@triton.jit
def _weight_offsets(t, i, o, I: tl.constexpr, O: tl.constexpr, T: tl.constexpr, FLIPPED: tl.constexpr):
    """Return where the weights from channels i to channels o are; t is their place in the kernel of T = kh·kw values.

    FLIPPED: in the weights of the convolution whose gradient is computed, with the kernel in reverse order.
    """
    if FLIPPED:
        at = (i * (T * O) + (T - 1 - t) * O)[:, None] + o[None, :]
    else:
        at = o[None, :] * (T * I) + (t * I + i)[:, None]
    return at


@triton.jit
def _in_image(mask, top, left, kh, kw, H: tl.constexpr, W: tl.constexpr):
    """Restrict a mask to the values of patches that are inside the image; padding is zero."""
    ys = top[:, None] + kh[None, :]
    xs = left[:, None] + kw[None, :]
    return mask & (ys >= 0) & (ys < H) & (xs >= 0) & (xs < W)


@triton.jit
def _blocks_inside(line, ROW: tl.constexpr, H: tl.constexpr, KH: tl.constexpr, SH: tl.constexpr, DOWN: tl.constexpr,
                   POOL: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Return first and end of the blocks of a patch's values that are inside the image for some pixel of the program.

    ``line`` is the number of pooled pixels in a line of all images, ROW the number of values in a row of a patch.
    """
    LINE: tl.constexpr = POOL * SH
    highest = tl.program_id(0) * BM // (POOL * POOL) // line * LINE
    lowest = (tl.program_id(0) * BM + BM - 1) // (POOL * POOL) // line * LINE + LINE - SH
    first = tl.maximum(0, DOWN - lowest) * ROW // BK
    return first, (tl.minimum(KH, H + DOWN - highest) * ROW + BK - 1) // BK


@triton.jit
def _store_pooled(acc, out, which, c, o, B, PH: tl.constexpr, PW: tl.constexpr, O: tl.constexpr, EDGES: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Store the maximum of every four adjacent rows, and which of them it is; 4 where ReLU makes it zero."""
    four = tl.permute(tl.reshape(acc, (BM // 4, 2, 2, BN)), (0, 3, 1, 2))
    left_two, right_two = tl.split(four)
    best, low_left = tl.split(left_two)
    high_right, low_right = tl.split(right_two)
    where = tl.zeros((BM // 4, BN), dtype=tl.int32)
    better = (high_right > best) | (high_right != high_right)
    where = tl.where(better, 1, where)
    best = tl.where(better, high_right, best)
    better = (low_left > best) | (low_left != low_left)
    where = tl.where(better, 2, where)
    best = tl.where(better, low_left, best)
    better = (low_right > best) | (low_right != low_right)
    where = tl.where(better, 3, where)
    best = tl.where(better, low_right, best)
    where = tl.where(best <= 0, 4, where)
    best = tl.where(best <= 0, 0.0, best)  # NaN stays NaN
    pooled = tl.program_id(0) * (BM // 4) + tl.arange(0, BM // 4)
    mask = (pooled < B * PH * PW)[:, None] & (o < O)[None, :]
    if EDGES:
        pooled = (pooled // PW % B * PH + pooled // (B * PW)) * PW + pooled % PW
    to = c * B * (PH * PW * O) + pooled[:, None] * O + o[None, :]
    tl.store(out + to, best, mask=mask)
    tl.store(which + to, where.to(tl.int8), mask=mask)


@triton.jit
def _store_image(acc, out, added, mask_of, maxima, c, n, y, x, o, inside, B, tiles, O: tl.constexpr,
                 RELU: tl.constexpr, ADDED: tl.constexpr, MAXIMA: tl.constexpr, SPREAD: tl.constexpr,
                 LINES: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Store outputs in every SPREAD-th line and column of images with LINES and COLUMNS.

    ADDED adds other gradients to those of a convolution's images: 1 as they are, 2 where ``mask_of`` is above zero.
    MAXIMA stores the bits of the largest magnitude of the program, one of ``tiles`` for each client.
    """
    if RELU:
        acc = tl.where(acc <= 0, 0.0, acc)
    pixel = (n * LINES + y * SPREAD) * COLUMNS + x * SPREAD
    to = c * B * (LINES * COLUMNS * O) + pixel[:, None] * O + o[None, :]
    mask = inside[:, None] & (o < O)[None, :]
    if ADDED > 0:
        acc += _output_gradient(added, mask_of, to, mask, ADDED == 2)
    tl.store(out + to, acc, mask=mask)
    if MAXIMA:
        largest = tl.max(tl.max(tl.where(mask, _magnitude_bits(acc), 0), 1), 0)
        tl.store(maxima + c * tiles + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), largest)


@triton.jit(do_not_specialize=["B", "tiles"])
def conv(x, w, bias, rates, scales_x, scales_w, out, which, added, mask_of, maxima, B, tiles,
         H: tl.constexpr, W: tl.constexpr, I: tl.constexpr, IX: tl.constexpr, O: tl.constexpr, PH: tl.constexpr,
         PW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DOWN: tl.constexpr,
         ACROSS: tl.constexpr, EDGES: tl.constexpr, POOL: tl.constexpr, RELU: tl.constexpr, BIAS: tl.constexpr,
         SKIP: tl.constexpr, FLIPPED: tl.constexpr, SCALED: tl.constexpr, ADDED: tl.constexpr, MAXIMA: tl.constexpr,
         SPREAD: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
         BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Compute a convolution: rows are pixels of the pooled image, the four of each adjacent; columns output channels.

    With EDGES a patch may extend beyond its image, where all values are zero. With FLIPPED the weights are those of the
    convolution whose gradient this computes, (C, I, kh, kw, O) here. With SCALED the operands are 16-bit numbers with a
    factor for each client. ``_store_image`` describes the arguments for outputs without pooling.
    """
    c = tl.program_id(2).to(tl.int64)
    if SKIP:
        if tl.load(rates + c) == 0.0:
            return
    K: tl.constexpr = KH * KW * IX
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    pixel = row // (POOL * POOL)
    sub = row % (POOL * POOL)
    inside = pixel < B * PH * PW
    first = 0
    end = (K + BK - 1) // BK
    if EDGES:  # pixels are ordered by line, then image; kernel rows outside the image on all these lines are skipped
        y = pixel // (B * PW)
        n = pixel // PW % B
        first, end = _blocks_inside(B * PW, KW * IX, H, KH, SH, DOWN, POOL, BM, BK)
    else:
        y = pixel // PW % PH
        n = pixel // (PH * PW)
    top = (y * POOL + sub // POOL) * SH - DOWN
    left = (pixel % PW * POOL + sub % POOL) * SW - ACROSS
    start = n * (H * W * IX) + (top * W + left) * IX
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    x += c * B * (H * W * IX)
    w += c * (O * KH * KW * I)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for block in range(first, end):
        k = block * BK + tl.arange(0, BK)
        kh, kw, i = _patch_position(k, KW, IX)
        mask = inside[:, None] & (k < K)[None, :]
        if EDGES:
            mask = _in_image(mask, top, left, kh, kw, H, W)
        a = tl.load(x + start[:, None] + ((kh * W + kw) * IX + i)[None, :], mask=mask, other=0.0)
        at = _weight_offsets(kh * KW + kw, i, o, I, O, KH * KW, FLIPPED)
        b = tl.load(w + at, mask=((k < K) & (i < I))[:, None] & (o < O)[None, :], other=0.0)
        acc = _dot(a, b, acc, PRECISION)
    if SCALED:
        acc = acc * tl.load(scales_x + c) * tl.load(scales_w + c)  # the product of both could underflow
    if BIAS:
        acc += tl.load(bias + c * O + o, mask=o < O, other=0.0)[None, :]
    if POOL == 2:
        _store_pooled(acc, out, which, c, o, B, PH, PW, O, EDGES, BM, BN)
    else:
        _store_image(acc, out, added, mask_of, maxima, c, n, y, pixel % PW, o, inside, B, tiles, O, RELU, ADDED, MAXIMA,
                     SPREAD, LINES, COLUMNS)  # fmt: skip


@triton.jit
def patch_rows(x, rates, out, each, W: tl.constexpr, I: tl.constexpr, OW: tl.constexpr,
               SW: tl.constexpr, ROW: tl.constexpr, WIDE: tl.constexpr, SKIP: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """Store the ROW values of a line that the patch of every column has there, and zeros up to WIDE."""
    c = tl.program_id(1).to(tl.int64)
    if SKIP:
        if tl.load(rates + c) == 0.0:
            return
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = at % WIDE
    column = at // WIDE % OW
    line = at // (WIDE * OW)
    x += c * (each // (WIDE * OW)) * (W * I)
    value = tl.load(x + line * (W * I) + column * (SW * I) + j, mask=(at < each) & (j < ROW), other=0.0)
    tl.store(out + c * each + at, value, mask=at < each)


@triton.jit
def activation_backward(grad, out, which, rates, scales, dilated, each, OH: tl.constexpr, OW: tl.constexpr,
                        O: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
                        POOL: tl.constexpr, RELU: tl.constexpr, SCALED: tl.constexpr,
                        BLOCK: tl.constexpr):  # fmt: skip
    """Compute the gradient before ReLU and pooling, dilated with zeros by the stride of the convolution.

    With SCALED it is divided by the factor of its client, and stored as 16-bit numbers.
    """
    c = tl.program_id(1).to(tl.int64)
    if tl.load(rates + c) == 0.0:
        return
    WIDE: tl.constexpr = (OW - 1) * SW + 1
    HIGH: tl.constexpr = (OH - 1) * SH + 1
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = at % O
    x = at // O % WIDE
    y = at // (O * WIDE) % HIGH
    n = at // (O * WIDE * HIGH)
    oy = y // SH
    ox = x // SW
    mask = (at < each) & (oy * SH == y) & (ox * SW == x) & (oy // POOL < PH) & (ox // POOL < PW)
    source = c * (each // (WIDE * HIGH) * (PH * PW)) + ((n * PH + oy // POOL) * PW + ox // POOL) * O + o
    value = tl.load(grad + source, mask=mask, other=0.0)
    if POOL == 2:
        is_maximum = tl.load(which + source, mask=mask, other=4).to(tl.int32) == oy % 2 * 2 + ox % 2
        value = tl.where(is_maximum, value, 0.0)
    elif RELU:
        value = tl.where(tl.load(out + source, mask=mask, other=0.0) <= 0, 0.0, value)
    if SCALED:
        value *= 1.0 / tl.load(scales + c)  # a power of two
    tl.store(dilated + c * each + at, value.to(dilated.dtype.element_ty), mask=at < each)


@triton.jit
def flip_kernels(w, rates, flipped, I: tl.constexpr, O: tl.constexpr, T: tl.constexpr, BI: tl.constexpr,
                 BO: tl.constexpr):  # fmt: skip
    """Transpose weights (O, T, I) for the backward pass to (I, T in reverse order, O); T = kh·kw."""
    c = tl.program_id(2).to(tl.int64)
    if tl.load(rates + c) == 0.0:
        return
    t = tl.program_id(0)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    w += c * (O * T * I)
    flipped += c * (O * T * I)
    for i0 in range(0, I, BI):
        i = i0 + tl.arange(0, BI)
        mask = (o < O)[:, None] & (i < I)[None, :]
        weights = tl.load(w + o[:, None] * (T * I) + t * I + i[None, :], mask=mask, other=0.0)
        tl.store(flipped + i[None, :] * (T * O) + (T - 1 - t) * O + o[:, None], weights, mask=mask)


@triton.jit(do_not_specialize=["B"])
def conv_step(grad, x, w, bias, rates, scales_grad, scales_x, partial_sums, B,
              H: tl.constexpr, W: tl.constexpr, I: tl.constexpr, IX: tl.constexpr, O: tl.constexpr, OH: tl.constexpr,
              OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
              DOWN: tl.constexpr, ACROSS: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, WEIGHT: tl.constexpr,
              BIAS: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
              BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Update weight and bias: rows are output channels, columns values of a patch; the sum is over all pixels.

    The stored gradient is dilated by DH and DW. With PARTS > 1 a program sums over a part of the samples, and stores
    (weight, bias) in ``partial_sums``. With SCALED, operands are 16-bit numbers, and the bias is updated elsewhere.
    """
    c = tl.program_id(2).to(tl.int64)
    rate = tl.load(rates + c)
    if rate == 0.0:
        return
    K: tl.constexpr = KH * KW * IX
    WIDE: tl.constexpr = (OW - 1) * DW + 1
    HIGH: tl.constexpr = (OH - 1) * DH + 1
    part, tile = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    k = tile * BN + tl.arange(0, BN)
    kh, kw, i = _patch_position(k, KW, IX)
    offset = (kh * W + kw) * IX + i
    o = tl.program_id(1) * BM + tl.arange(0, BM)
    grad += c * B * (HIGH * WIDE * O)
    x += c * B * (H * W * IX)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    each = (B + PARTS - 1) // PARTS * (OH * OW)
    end = tl.minimum((part + 1) * each, B * (OH * OW))
    for r0 in range(part * each, end, BK):
        row = r0 + tl.arange(0, BK)
        n, oy, ox = row // (OH * OW), row // OW % OH, row % OW
        inside = row < end
        at = ((n * HIGH + oy * DH) * WIDE + ox * DW) * O
        a = tl.load(grad + at[:, None] + o[None, :], mask=inside[:, None] & (o < O)[None, :], other=0.0)
        top = oy * SH - DOWN
        left = ox * SW - ACROSS
        start = n * (H * W * IX) + (top * W + left) * IX
        mask = inside[:, None] & (k < K)[None, :]
        if DOWN > 0 or ACROSS > 0:
            mask = _in_image(mask, top, left, kh, kw, H, W)
        b = tl.load(x + start[:, None] + offset[None, :], mask=mask, other=0.0)
        acc = _dot(tl.trans(a), b, acc, PRECISION)
        if BIAS:
            total += tl.sum(a, 0)
    if SCALED:
        acc = acc * tl.load(scales_grad + c) * tl.load(scales_x + c)
    tile_mask = (o < O)[:, None] & ((k < K) & (i < I))[None, :]
    to = o[:, None] * (KH * KW * I) + ((kh * KW + kw) * I + i)[None, :]
    if PARTS > 1:
        partial_sums += (c * PARTS + part) * (O * KH * KW * I + O)
        tl.store(partial_sums + to, acc, mask=tile_mask)
        if tile == 0:
            tl.store(partial_sums + O * KH * KW * I + o, total, mask=o < O)
    else:
        if WEIGHT:
            _sgd_update(w + c * (O * KH * KW * I) + to, acc, rate, tile_mask)
        if BIAS:
            if tile == 0:
                _sgd_update(bias + c * O + o, total, rate, o < O)


@triton.jit
def add_parts(partial_sums, w, bias, rates, EACH: tl.constexpr, O: tl.constexpr, WEIGHT: tl.constexpr,
              BIAS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Update weight and bias by the partial sums of ``conv_step``, added in their order."""
    c = tl.program_id(1).to(tl.int64)
    rate = tl.load(rates + c)
    if rate == 0.0:
        return
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(PARTS):
        total += tl.load(partial_sums + (c * PARTS + part) * (EACH + O) + at, mask=at < EACH + O, other=0.0)
    if WEIGHT:
        _sgd_update(w + c * EACH + at, total, rate, at < EACH)
    if BIAS:
        _sgd_update(bias + c * O + at - EACH, total, rate, (at >= EACH) & (at < EACH + O))
