"""Triton kernels for what stacked convolutional models spend their time on between the matrix products.

Each moves every byte once. They compute what the plain operations compute, and exist for CUDA only.
"""

# Triton's language has no types that a checker knows, and its arguments are named as in the formulas.
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


@triton.jit
def _gather(spread, out, total, H, W, CH, OH, OW, SH, SW, KH: tl.constexpr, KW: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    i = at % CH
    x = (at // CH) % W
    y = (at // (CH * W)) % H
    n = at // (CH * W * H)
    found = tl.zeros((BLOCK,), dtype=out.dtype.element_ty)
    for kh in tl.static_range(KH):
        for kw in tl.static_range(KW):
            oy = (y - kh) // SH
            ox = (x - kw) // SW
            good = inside & (y >= kh) & (x >= kw) & (oy * SH + kh == y) & (ox * SW + kw == x) & (oy < OH) & (ox < OW)
            place = (((n * OH + oy) * OW + ox) * KH + kh) * KW + kw
            found += tl.load(spread + place * CH + i, mask=good, other=0.0)
    tl.store(out + at, found, mask=inside)


def gather_patches(spread: Tensor, shape: torch.Size, stride: tuple[int, int]) -> Tensor:
    """Sum the gradients of overlapping patches: (n, high, wide, kh, kw, i) to an image of shape (n, h, w, i)."""
    out = torch.empty(shape, dtype=spread.dtype, device=spread.device)
    _, height, width, ins = shape
    _, high, wide, kh, kw, _ = spread.shape
    grid = (triton.cdiv(out.numel(), BLOCK),)
    _gather[grid](spread, out, out.numel(), height, width, ins, high, wide, *stride, KH=kh, KW=kw, BLOCK=BLOCK)
    return out


@triton.jit
def _pool(x, out, which, total, W, CH, OW, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    i = at % CH
    ox = (at // CH) % OW
    row = at // (CH * OW)  # rows of all images behind each other: each pooled row comes from two
    first = (2 * row * W + 2 * ox) * CH + i
    best = tl.load(x + first, mask=inside, other=0.0)
    place = tl.zeros((BLOCK,), dtype=tl.int32)
    for k in tl.static_range(1, 4):
        value = tl.load(x + first + ((k // 2) * W + k % 2) * CH, mask=inside, other=0.0)
        better = (value > best) | (value != value)
        place = tl.where(better, k, place)
        best = tl.where(better, value, best)
    place = tl.where(best <= 0, 4, place)
    best = tl.where(best <= 0, 0.0, best)  # what is not a number stays so
    tl.store(out + at, best, mask=inside)
    tl.store(which + at, place.to(tl.int8), mask=inside)


@triton.jit
def _unpool(grad, which, out, total, W, CH, OW, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    i = at % CH
    ox = (at // CH) % OW
    row = at // (CH * OW)
    first = (2 * row * W + 2 * ox) * CH + i
    value = tl.load(grad + at, mask=inside, other=0.0)
    place = tl.load(which + at, mask=inside, other=4)
    for k in tl.static_range(4):
        tl.store(out + first + ((k // 2) * W + k % 2) * CH, tl.where(place == k, value, 0.0), mask=inside)


def relu_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """ReLU and 2×2 maximum of an image (n, h, w, i) with even h and w, and where each maximum came from."""
    n, height, width, ins = x.shape
    out = torch.empty((n, height // 2, width // 2, ins), dtype=x.dtype, device=x.device)
    which = torch.empty(out.shape, dtype=torch.int8, device=x.device)
    _pool[(triton.cdiv(out.numel(), BLOCK),)](x, out, which, out.numel(), width, ins, width // 2, BLOCK=BLOCK)
    return out, which


def relu_pool_backward(grad: Tensor, which: Tensor) -> Tensor:
    """The gradient of ``relu_pool``'s input."""
    n, high, wide, ins = grad.shape
    out = torch.empty((n, 2 * high, 2 * wide, ins), dtype=grad.dtype, device=grad.device)
    _unpool[(triton.cdiv(grad.numel(), BLOCK),)](grad, which, out, grad.numel(), 2 * wide, ins, wide, BLOCK=BLOCK)
    return out


@triton.jit
def _columns(x, out, each, H: tl.constexpr, W: tl.constexpr, CH: tl.constexpr, OW: tl.constexpr,
             SH: tl.constexpr, SW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    # A program copies BLOCK places of one image's patches: all but the number of the image fits in 32 bits.
    n = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < each
    i = at % CH
    patch = at // CH
    kw = patch % KW
    kh = (patch // KW) % KH
    ox = (patch // (KW * KH)) % OW
    oy = patch // (KW * KH * OW)
    place = ((oy * SH + kh) * W + ox * SW + kw) * CH + i
    value = tl.load(x + n * (H * W * CH) + place, mask=inside, other=0.0)
    tl.store(out + n * each + at, value, mask=inside)


def columns(x: Tensor, size: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """The patches of an image (n, h, w, i) behind each other: (n, high, wide, kh, kw, i)."""
    n, height, width, ins = x.shape
    high, wide = (height - size[0]) // stride[0] + 1, (width - size[1]) // stride[1] + 1
    out = torch.empty((n, high, wide, *size, ins), dtype=x.dtype, device=x.device)
    each = out[0].numel()
    # The grid's second dimension ends at 65,535: larger batches go in parts.
    for first in range(0, n, 65_535):
        part, images = out[first : first + 65_535], x[first : first + 65_535]
        grid = (triton.cdiv(each, BLOCK), len(part))
        _columns[grid](images, part, each, height, width, ins, wide, *stride, KH=size[0], KW=size[1], BLOCK=BLOCK)
    return out


@triton.jit
def _descend(weights, gradients, rates, total, each, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    rate = tl.load(rates + at // each, mask=inside, other=0.0)
    step = rate * tl.load(gradients + at, mask=inside, other=0.0)
    tl.store(weights + at, tl.load(weights + at, mask=inside, other=0.0) - step, mask=inside)


def descend(weights: Tensor, gradients: Tensor, rates: Tensor) -> None:
    """A step of SGD in place: weights (C, …), gradients of the same shape, a rate for each of the C clients."""
    total = weights.numel()
    grid = (triton.cdiv(total, BLOCK),)
    _descend[grid](weights, gradients.contiguous(), rates, total, total // len(weights), BLOCK=BLOCK)
