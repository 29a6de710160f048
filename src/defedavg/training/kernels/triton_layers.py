"""The products of stacked layers by the Triton kernels, in float32 storage; what they do not cover is left to plain
operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import triton_kernels as kernels
from .plain import LayerKernels, Saved, Weights, Window

SPLIT = 4  # with fewer tiles than this a convolution's step is summed in as many parts
ROWS = 64  # more samples than this per client, and a fully connected layer is no longer skinny

CONFIGS: dict[str, dict[str, int]] = {
    "conv": {"BM": 128, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 3},
    "conv_step": {"BM": 64, "BN": 128, "BK": 32, "num_warps": 2, "num_stages": 3},
    "linear": {"BM": 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3},
    "linear_step": {"BM": 32, "BN": 128, "num_warps": 4, "num_stages": 2},
}
"""Tiles, warps and stages, the fastest that were measured (benchmarks/kernels.py); BM and BN are upper limits."""


def _tile(size: int, limit: int) -> int:
    """A power of two that covers the size, at least 16, at most the limit."""
    return max(16, min(limit, 1 << (size - 1).bit_length()))


def _aligned(channels: int) -> int:
    """So many channels that a pixel begins where the device likes to read: 3 of them are better read as 4."""
    return channels if channels > 16 else 1 << (channels - 1).bit_length()


def _parts(size: int, tile: int) -> int:
    return -(-size // tile)


class TritonLayerKernels(LayerKernels):
    """One kernel for each way through a layer."""

    skips = True

    def __init__(self, precision: str) -> None:
        super().__init__(half=precision == "bf16")
        self._precision = {"float32": "ieee"}.get(precision, precision)

    def linear(self, x: Tensor, own: Weights, relu: bool) -> tuple[Tensor, Saved]:
        """As ``Products.linear``."""
        clients, rows, ins = x.shape
        outs = own.weight.shape[1]
        x = x.contiguous()
        out = torch.empty((clients, rows, outs), dtype=x.dtype, device=x.device)
        config = dict(CONFIGS["linear"])
        config |= {"BM": _tile(outs, config["BM"]), "BN": _tile(rows, config["BN"]), "BK": _tile(ins, config["BK"])}
        grid = (_parts(outs, config["BM"]), _parts(rows, config["BN"]), clients)
        kernels.linear[grid](
            x, own.weight, *_or(x, own.bias, own.rates), out, rows, I=ins, O=outs, RELU=relu,
            BIAS=own.bias is not None, SKIP=own.rates is not None, PRECISION=self._precision, **config,
        )  # fmt: skip
        return out, (x, out)

    def linear_back(self, grad: Tensor, saved: Saved, own: Weights, relu: bool, needs_x: bool) -> Tensor | None:
        """As ``Products.linear_back``."""
        x, out = saved
        clients, rows, ins = x.shape
        if rows > ROWS:
            return super().linear_back(grad, saved, own, relu, needs_x)
        outs = own.weight.shape[1]
        grad_x = torch.empty_like(x) if needs_x else x
        config = dict(CONFIGS["linear_step"])
        config |= {"BM": _tile(outs, config["BM"]), "BN": _tile(ins, config["BN"]), "BR": _tile(rows, ROWS)}
        kernels.linear_step[_parts(ins, config["BN"]), clients](
            grad.contiguous(), out, x, own.weight, *_or(x, own.bias, own.rates), grad_x, rows, I=ins, O=outs,
            RELU=relu, INPUTS=needs_x, WEIGHT=own.moves[0], BIAS=own.moves[1], PRECISION=self._precision, **config,
        )  # fmt: skip
        return grad_x if needs_x else None

    def conv(self, x: Tensor, own: Weights, window: Window) -> tuple[Tensor, Saved]:
        """As ``Products.conv``."""
        _, height, width, ins = x.shape
        spare = _aligned(ins) - ins
        x = F.pad(x, (0, spare)) if spare else x.contiguous()
        pool = 2 if window.pool else 1
        high, wide = (side // pool for side in window.out(height, width))
        out = torch.empty((len(x), high, wide, own.weight.shape[1]), dtype=x.dtype, device=x.device)
        which = torch.empty(out.shape if window.pool else (1,), dtype=torch.int8, device=x.device)
        edges = window.padding != (0, 0)
        self._conv(x, own.weight, own.bias, own.rates, out, which, window, window.padding, edges)
        return out, (x, out, which)

    def _conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, rates: Tensor | None, out: Tensor, which: Tensor,
        window: Window, padding: tuple[int, int], edges: bool,
    ) -> None:  # fmt: skip
        clients, outs, kh, kw, ins = weight.shape
        _, height, width, channels = x.shape
        pool = 2 if window.pool else 1
        config = dict(CONFIGS["conv"])
        config |= {"BN": _tile(outs, config["BN"])}
        rows = out[0, :, :, 0].numel() * (len(x) // clients) * pool**2
        kernels.conv[_parts(rows, config["BM"]), _parts(outs, config["BN"]), clients](
            x, weight, *_or(x, bias, rates), out, which, len(x) // clients, H=height, W=width, I=ins, IX=channels,
            O=outs, PH=out.shape[1], PW=out.shape[2], KH=kh, KW=kw, SH=window.stride[0], SW=window.stride[1],
            DOWN=padding[0], ACROSS=padding[1], EDGES=edges, POOL=pool, RELU=window.relu, BIAS=bias is not None,
            SKIP=rates is not None, PRECISION=self._precision, **config,
        )  # fmt: skip

    def conv_back(
        self, grad: Tensor, saved: Saved, shape: torch.Size, own: Weights, window: Window, needs_x: bool
    ) -> Tensor | None:
        """As ``Products.conv_back``."""
        x, out, which = saved
        assert own.rates is not None
        grad = self._spread(grad.contiguous(), out, which, own, shape, window)
        grad_x = None
        if needs_x:
            # The way back is a convolution, too: of the gradient, with the kernel turned round.
            clients, outs, kh, kw, ins = own.weight.shape
            turned = torch.empty((clients, ins, kh, kw, outs), dtype=x.dtype, device=x.device)
            kernels.turn[kh * kw, _parts(outs, 32), clients](
                own.weight, own.rates, turned, I=ins, O=outs, T=kh * kw, BI=32, BO=32
            )
            grad_x = torch.empty(shape, dtype=x.dtype, device=x.device)
            padding = (kh - 1 - window.padding[0], kw - 1 - window.padding[1])
            dense = Window(window.size, (1, 1), padding)
            self._conv(grad, turned, None, own.rates, grad_x, which, dense, padding, edges=True)
        if any(own.moves):
            self._conv_step(grad, x, own, shape, window)
        return grad_x

    def _spread(
        self, grad: Tensor, out: Tensor, which: Tensor, own: Weights, shape: torch.Size, window: Window
    ) -> Tensor:
        """The gradient before ReLU and pooling, dense also where the convolution strode."""
        if not window.relu and window.stride == (1, 1):
            return grad
        high, wide = window.out(shape[1], shape[2])
        sh, sw = window.stride
        outs = grad.shape[-1]
        found = torch.empty(
            (len(grad), (high - 1) * sh + 1, (wide - 1) * sw + 1, outs), dtype=grad.dtype, device=grad.device
        )
        each = found.numel() // len(own)
        kernels.spread[_parts(each, 1024), len(own)](
            grad, out, which, own.rates, found, each, OH=high, OW=wide, O=outs, PH=grad.shape[1], PW=grad.shape[2],
            SH=sh, SW=sw, POOL=2 if window.pool else 1, RELU=window.relu, BLOCK=1024,
        )  # fmt: skip
        return found

    def _conv_step(self, grad: Tensor, x: Tensor, own: Weights, shape: torch.Size, window: Window) -> None:
        clients, outs, kh, kw, ins = own.weight.shape
        size = len(x) // clients
        high, wide = window.out(shape[1], shape[2])
        patch = kh * kw * x.shape[-1]
        config = dict(CONFIGS["conv_step"])
        config |= {"BM": _tile(outs, config["BM"]), "BN": _tile(patch, config["BN"])}
        tiles = _parts(patch, config["BN"])
        # A small kernel over large images gives one program too much to add up: parts of the samples are added apart.
        parts = min(size, SPLIT) if tiles < SPLIT else 1
        each = outs * kh * kw * ins
        moves = torch.empty((clients, parts, each + outs) if parts > 1 else (1,), dtype=x.dtype, device=x.device)
        bias, rates = _or(x, own.bias, own.rates)
        learns = {"WEIGHT": own.moves[0], "BIAS": own.moves[1]}
        kernels.conv_step[tiles * parts, _parts(outs, config["BM"]), clients](
            grad, x, own.weight, bias, rates, moves, size, H=shape[1], W=shape[2], I=ins, IX=x.shape[-1], O=outs,
            OH=high, OW=wide, KH=kh, KW=kw, SH=window.stride[0], SW=window.stride[1], DOWN=window.padding[0],
            ACROSS=window.padding[1], PARTS=parts, PRECISION=self._precision, **learns, **config,
        )  # fmt: skip
        if parts > 1:
            kernels.add_parts[_parts(each + outs, 512), clients](
                moves, own.weight, bias, rates, EACH=each, O=outs, PARTS=parts, BLOCK=512, **learns
            )


def _or(stand_in: Tensor, *given: Tensor | None) -> list[Tensor]:
    """A kernel wants a tensor in every place, also where it will not read it."""
    return [stand_in if tensor is None else tensor for tensor in given]
