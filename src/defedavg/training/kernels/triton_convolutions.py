"""Convolutions of stacked models with Triton, for float32 weights.

In steps with TF32, the operands of products are 16-bit numbers with as many digits (``triton_half.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from . import triton_half
from . import triton_kernels as kernels
from .plain import Gradient, LayerKernels, LayerWeights, Saved, Window
from .triton_configs import blocks, filled, launch_config, power_of_two

SPLIT = 4  # with fewer tiles than this, the update of a convolution is summed in as many parts
ALIGNED_CHANNELS = 16  # images with no more have a power of two of them
FEW_CHANNELS = 4  # images with no more channels have tiles of their own
ROW_VALUES = 16  # of a patch: if a line has no more, it is stored for every column, so that patches are read in vectors
LEAST_ROW_CHANNELS = 2  # with fewer, single values are read faster than lines of patches
HALF_BLOCK = 2048  # values that a program stores at once as 16-bit numbers
MOST_PARTS = 8  # in which the largest magnitude of a client's values is searched


@dataclass(frozen=True, slots=True)
class Operand:
    """Images, weights or gradients of C clients: float32, or 16-bit numbers with one factor for each client."""

    values: Tensor
    scales: Tensor | None = None  # (C,): what the values must be multiplied by

    @property
    def saved(self) -> Saved:
        """The tensors, for the backward pass."""
        return (self.values,) if self.scales is None else (self.values, self.scales)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What a convolution does with its outputs besides storing them, for the gradient of images."""

    added: Tensor | None = None  # other gradients of the same images
    mask_of: Tensor | None = None  # add them only where these values, of the same shape, are above zero
    maxima: Tensor | None = None  # (C, all programs): the bits of the largest magnitudes
    first: int = 0  # the column of ``maxima`` for the first program
    spread: int = 1  # outputs are in every so many lines and columns of the images


PLAIN = Epilogue()


class TritonConvolutions(LayerKernels):
    """Convolutions with bias, ReLU and pooling; the SGD update is fused into the backward pass."""

    def __init__(self, precision: str) -> None:
        super().__init__(half=precision == "bf16")
        self._precision = {"float32": "ieee"}.get(precision, precision)
        self._stores_half = precision == "tf32"

    def conv(self, x: Tensor, params: LayerWeights, window: Window) -> tuple[Tensor, Saved]:
        """Do what ``LayerKernels.conv`` does."""
        _, height, width, ins = x.shape
        pool = 2 if window.pool else 1
        high, wide = (side // pool for side in window.out(height, width))
        out = x.new_empty((len(x), high, wide, params.weight.shape[1]))
        which = x.new_empty(out.shape if window.pool else (1,), dtype=torch.int8)
        weight, edges = self._operand(params.weight, params), window.padding != (0, 0)
        saved = (out, which, *weight.saved)
        if _has_rows(ins, window):
            images = self._rows_operand(x.contiguous(), params, window)
            weight, window = replace(weight, values=_by_rows(weight.values)), _one_wide(window)
        else:
            images = self._operand(aligned(x), params)
        self._conv(images, weight, params.bias, params.rates, out, which, window, edges)
        return out, (*saved, *images.saved)

    def _operand(self, values: Tensor, params: LayerWeights) -> Operand:
        """Return images or weights as they are, or for a step with TF32 as 16-bit numbers."""
        if not self._stores_half or params.rates is None:
            return Operand(values)
        return self._stored(values, params, *self._maxima(values, params))

    def _stored(self, values: Tensor, params: LayerWeights, maxima: Tensor, scales: Tensor, parts: int) -> Operand:
        """Return values as 16-bit numbers; ``_maxima`` returns the other arguments."""
        half, each = torch.empty_like(values, dtype=torch.float16), values.numel() // len(params)
        triton_half.store_half[blocks(each, HALF_BLOCK), len(params)](
            values, params.rates, maxima, half, scales, each, PARTS=parts, BLOCK=HALF_BLOCK
        )
        return Operand(half, scales)

    def _rows_operand(self, x: Tensor, params: LayerWeights, window: Window) -> Operand:
        """Return (C·B, H, W', kw·I and zeros): the values of each line that the patch of a column has there."""
        images, height, width, ins = x.shape
        row = window.size[1] * ins
        half = self._stores_half and params.rates is not None
        shape = images, height, window.out(height, width)[1], power_of_two(row)
        rows = x.new_empty(shape, dtype=torch.float16 if half else x.dtype)
        sizes = {"W": width, "I": ins, "OW": shape[2], "SW": window.stride[1], "ROW": row, "WIDE": shape[3]}
        if not half:
            each = rows.numel() // len(params)
            kernels.patch_rows[blocks(each, 1024), len(params)](
                x, *filled(x, params.rates), rows, each, SKIP=params.rates is not None, BLOCK=1024, **sizes
            )
            return Operand(rows)
        maxima, scales, parts = self._maxima(x, params)
        columns, block = images * height * shape[2] // len(params), HALF_BLOCK // shape[3]
        triton_half.store_half_rows[blocks(columns, block), len(params)](
            x, params.rates, maxima, rows, scales, columns, PARTS=parts, BLOCK=block, **sizes
        )
        return Operand(rows, scales)

    def _maxima(self, values: Tensor, params: LayerWeights) -> tuple[Tensor, Tensor, int]:
        """Return the bits of the largest magnitudes of parts, room for the factors, and the number of parts."""
        clients, each = len(params), values.numel() // len(params)
        parts = _half_parts(each)
        maxima = values.new_empty((clients, parts), dtype=torch.int32)
        triton_half.find_maxima[parts, clients](values, params.rates, maxima, each, PARTS=parts, BLOCK=HALF_BLOCK)
        return maxima, values.new_empty(clients), parts

    def _conv(
        self, x: Operand, weight: Operand, bias: Tensor | None, rates: Tensor | None, out: Tensor, which: Tensor,
        window: Window, edges: bool, flipped: bool = False, also: Epilogue = PLAIN,
    ) -> None:  # fmt: skip
        clients, outs, kh, kw, ins = weight.values.shape
        if flipped:  # weights of the layer itself, for the gradient of its images
            outs, ins = ins, outs
        images, height, width, channels = x.values.shape
        pool = 2 if window.pool else 1
        (_, lines, columns, _), spread = out.shape, also.spread
        high, wide = blocks(lines, spread), blocks(columns, spread)
        config, programs = _conv_launch(x, window, edges, outs, clients, high * wide)
        maxima = None if also.maxima is None else also.maxima[:, also.first :]
        kernels.conv[*programs, clients](
            x.values, weight.values, *filled(x.values, bias, rates, x.scales, weight.scales), out, which,
            *filled(x.values, also.added, also.mask_of, maxima), images // clients,
            0 if also.maxima is None else also.maxima.shape[1], H=height, W=width, I=ins, IX=channels, O=outs,
            PH=high, PW=wide, KH=kh, KW=kw, SH=window.stride[0],
            SW=window.stride[1], DOWN=window.padding[0], ACROSS=window.padding[1], EDGES=edges, POOL=pool,
            RELU=window.relu, BIAS=bias is not None, SKIP=rates is not None, FLIPPED=flipped,
            SCALED=x.scales is not None, ADDED=(also.added is not None) + (also.mask_of is not None),
            MAXIMA=maxima is not None, SPREAD=spread, LINES=lines, COLUMNS=columns, PRECISION=self._precision, **config,
        )  # fmt: skip

    def conv_backward(
        self, grad: Tensor, saved: Saved, shape: torch.Size, params: LayerWeights, window: Window, needs_x: bool
    ) -> Gradient:
        """Do what ``LayerKernels.conv_backward`` does."""
        out, which, *operands = saved
        half = len(operands) == 4
        weight, x = (Operand(*operands[:2]), Operand(*operands[2:])) if half else map(Operand, operands)
        assert params.rates is not None
        grad = grad.contiguous()
        scales = self._gradient_scales(grad, out, which, params, window) if half else None
        grad_x = dilated = None
        if needs_x:
            # The gradient of the images is a convolution of the dilated gradient with the flipped kernels.
            dilated = self._dilated(grad, out, which, params, shape, window, scales)
            grad_x = grad.new_empty(shape)
            turned = weight if half else Operand(_flipped(weight.values, params.rates))
            self._conv(dilated, turned, None, params.rates, grad_x, which, dense(window), edges=True, flipped=half)
        if params.trainable[0] or (params.trainable[1] and not half):
            if _has_rows(shape[-1], window):
                shape, dilated = x.values.shape, None  # lines of patches have no stride across
                params, window = _for_rows(params, window)
            if dilated is None:
                dilated = self._dilated(grad, out, which, params, shape, window, scales)
            self._conv_step(dilated, x, params, shape, window)
        return grad_x

    def _gradient_scales(
        self, grad: Tensor, out: Tensor, which: Tensor, params: LayerWeights, window: Window
    ) -> Tensor:  # fmt: skip
        """Return what 16-bit gradients must be multiplied by, and update the bias."""
        clients, outs = len(params), grad.shape[-1]
        scales, parts, width = grad.new_empty(clients), _half_parts(grad.numel() // clients), power_of_two(outs)
        maxima, sums = grad.new_empty((clients, parts), dtype=torch.int32), grad.new_empty((clients, parts, outs))
        bias, rates = filled(grad, params.updated_bias, params.rates)
        triton_half.find_gradient_maxima[parts, clients](
            grad, out, which, rates, maxima, sums, grad.numel() // outs // clients, O=outs,
            POOL=2 if window.pool else 1, RELU=window.relu, PARTS=parts, BO=width, BP=max(1, HALF_BLOCK // width),
        )  # fmt: skip
        triton_half.scale_gradient[clients,](
            maxima, sums, bias, rates, scales, O=outs, BIAS=params.trainable[1], PARTS=parts, BO=width
        )
        return scales

    def _dilated(
        self, grad: Tensor, out: Tensor, which: Tensor, params: LayerWeights, shape: torch.Size, window: Window,
        scales: Tensor | None,
    ) -> Operand:  # fmt: skip
        if scales is None and not window.relu and window.stride == (1, 1):
            return Operand(grad)
        (high, wide), (sh, sw), outs = window.out(shape[1], shape[2]), window.stride, grad.shape[-1]
        dtype = grad.dtype if scales is None else torch.float16
        dilated = grad.new_empty((len(grad), (high - 1) * sh + 1, (wide - 1) * sw + 1, outs), dtype=dtype)
        if scales is not None and window.pool and (high, wide) == (2 * grad.shape[1], 2 * grad.shape[2]):
            each = grad.numel() // len(params)
            triton_half.spread_pooled[blocks(each, 2048), len(params)](
                grad, which, params.rates, scales, dilated, each, O=outs, PW=grad.shape[2], BLOCK=2048
            )
            return Operand(dilated, scales)
        each = dilated.numel() // len(params)
        kernels.activation_backward[blocks(each, 1024), len(params)](
            grad, out, which, *filled(grad, params.rates, scales), dilated, each, OH=high, OW=wide, O=outs,
            PH=grad.shape[1], PW=grad.shape[2], SH=sh, SW=sw, POOL=2 if window.pool else 1, RELU=window.relu,
            SCALED=scales is not None, BLOCK=1024,
        )  # fmt: skip
        return Operand(dilated, scales)

    def _conv_step(
        self, grad: Operand, x: Operand, params: LayerWeights, shape: torch.Size, window: Window, dilated: bool = True
    ) -> None:
        clients, outs, kh, kw, ins = params.weight.shape
        channels, scaled = x.values.shape[-1], x.scales is not None
        size = len(x.values) // clients
        high, wide = window.out(shape[1], shape[2])
        patch = kh * kw * channels
        config = launch_config(_kernel("conv_step", x, window), BM=outs, BN=patch)
        tiles = blocks(patch, config["BN"])
        # With a small kernel and large images there are few programs: each sums over a part of the samples.
        parts = min(size, SPLIT) if tiles < SPLIT else 1
        each = outs * kh * kw * ins
        partial_sums = params.weight.new_empty((clients, parts, each + outs) if parts > 1 else (1,))
        bias, rates, of_grad, of_x = filled(x.values, params.updated_bias, params.rates, grad.scales, x.scales)
        updates = {"WEIGHT": params.trainable[0], "BIAS": params.trainable[1] and not scaled}
        kernels.conv_step[tiles * parts, blocks(outs, config["BM"]), clients](
            grad.values, x.values, params.updated_weight, bias, rates, of_grad, of_x, partial_sums, size, H=shape[1],
            W=shape[2], I=ins, IX=channels, O=outs, OH=high, OW=wide, KH=kh, KW=kw, SH=window.stride[0],
            SW=window.stride[1], DOWN=window.padding[0], ACROSS=window.padding[1], PARTS=parts, SCALED=scaled,
            DH=window.stride[0] if dilated else 1, DW=window.stride[1] if dilated else 1, PRECISION=self._precision,
            **updates, **config,
        )  # fmt: skip
        if parts > 1:
            kernels.add_parts[blocks(each + outs, 512), clients](
                partial_sums, params.updated_weight, bias, rates, EACH=each, O=outs, PARTS=parts, BLOCK=512, **updates
            )


def _conv_launch(
    x: Operand, window: Window, edges: bool, outs: int, clients: int, pixels: int
) -> tuple[dict[str, int], tuple[int, int]]:
    """Return the configuration of a convolution with these numbers of outputs, and its programs for each client."""
    config = launch_config(_kernel("conv", x, window, edges), BN=outs)
    rows = pixels * (len(x.values) // clients) * (4 if window.pool else 1)
    return config, (blocks(rows, config["BM"]), blocks(outs, config["BN"]))


def conv_programs(x: Operand, window: Window, edges: bool, shape: torch.Size, params: LayerWeights, spread: int) -> int:
    """Return how many programs compute outputs of this shape, in every so many lines and columns, of a client."""
    pixels = blocks(shape[1], spread) * blocks(shape[2], spread)
    _, (rows, columns) = _conv_launch(x, window, edges, shape[3], len(params), pixels)
    return rows * columns


def aligned_channels(channels: int) -> int:
    """Return how many channels aligned images have: 4 are read faster than 3."""
    return power_of_two(channels) if channels <= ALIGNED_CHANNELS else channels


def aligned(x: Tensor) -> Tensor:
    """Return contiguous images whose pixels are aligned in memory."""
    spare = aligned_channels(x.shape[-1]) - x.shape[-1]
    # The result of ``pad`` may have another order in memory if a dimension is one.
    return (F.pad(x, (0, spare)) if spare else x).contiguous()


def dense(window: Window) -> Window:
    """Return the convolution of the dilated gradient with the flipped kernels: the gradient of the images."""
    (kh, kw), (down, across) = window.size, window.padding
    return Window(window.size, (1, 1), (kh - 1 - down, kw - 1 - across))


def _kernel(name: str, x: Operand, window: Window, edges: bool = False) -> str:
    """Return the name of the configuration of a convolution's kernel for these images."""
    channels, half = x.values.shape[-1], x.scales is not None
    name = f"half_{name}" if half else name
    if window.size[1] == 1 and channels <= ROW_VALUES:
        return f"{name}_rows"
    if channels <= FEW_CHANNELS:
        return f"{name}_few"
    return f"{name}_edges" if half and edges else name


def _has_rows(channels: int, window: Window) -> bool:
    """Return whether the lines of patches are stored for every column."""
    few = LEAST_ROW_CHANNELS <= channels <= FEW_CHANNELS
    return few and window.padding == (0, 0) and window.size[1] * channels <= ROW_VALUES


def _half_parts(each: int) -> int:
    """Return in how many parts the largest magnitude of a client's values is searched."""
    return min(MOST_PARTS, power_of_two(blocks(each, HALF_BLOCK)))


def _flipped(weight: Tensor, rates: Tensor) -> Tensor:
    """Return weights for the gradient of the images, (C, I, kh, kw, O), with the kernels in reverse order."""
    clients, outs, kh, kw, ins = weight.shape
    flipped = weight.new_empty((clients, ins, kh, kw, outs))
    kernels.flip_kernels[kh * kw, blocks(outs, 32), clients](
        weight, rates, flipped, I=ins, O=outs, T=kh * kw, BI=32, BO=32
    )
    return flipped


def _by_rows(weight: Tensor) -> Tensor:
    """Return weights for the lines of patches, (C, O, kh, 1, kw·I)."""
    return weight.flatten(3).unsqueeze(3)


def _one_wide(window: Window) -> Window:
    """Return the window for the lines of patches: one column wide."""
    return replace(window, size=(window.size[0], 1), stride=(window.stride[0], 1))


def _for_rows(params: LayerWeights, window: Window) -> tuple[LayerWeights, Window]:
    """Return the same convolution for the lines of patches, with kw·I channels."""
    targets = None if params.targets[0] is None else _by_rows(params.targets[0]), params.targets[1]
    return replace(params, weight=_by_rows(params.weight), targets=targets), _one_wide(window)
