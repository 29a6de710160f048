"""Kernels of stacked layers for the CPU.

A client's results do not depend on the other clients of a batch: oneDNN computes convolutions one client at a time, as
group normalisation and, with bfloat16, all products. One thread computes a kernel; other threads compute other clients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .plain import Gradient, LayerKernels, LayerWeights, Saved, Window, aten, sizes


class CpuLayerKernels(LayerKernels):
    """Kernels for the CPU, where oneDNN computes convolutions, except those in float64 and those of single pixels.

    With ``half``, products of matrices and convolutions round their operands and results to bfloat16, and sum in
    float32.

    PyTorch multiplies a single pair of matrices of which one is a vector by another routine than several pairs, and it
    rounds differently: such a pair is doubled.
    """

    def product(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Do what ``LayerKernels.product`` does."""
        if self._half:
            return self._half_product(a, b, bias)
        if not _is_single_vector_product(a, b):
            return super().product(a, b, bias)
        return super().product(_doubled(a), _doubled(b), None if bias is None else bias.expand(2, -1))[:1]

    def _half_product(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        pairs = zip(a.bfloat16(), b.bfloat16(), strict=True)
        out = _joined([torch.mm(one, other).unsqueeze(0) for one, other in pairs]).to(a.dtype)
        return out if bias is None else out.add_(bias.unsqueeze(1))

    def _add_product(self, weight: Tensor, a: Tensor, b: Tensor) -> None:
        if not self._half and _is_single_vector_product(a, b):
            weight.copy_(torch.baddbmm(_doubled(weight), _doubled(a), _doubled(b))[:1])
        else:
            super()._add_product(weight, a, b)

    def _sum_patches(self, patches: Tensor, shape: torch.Size, window: Window) -> Tensor:
        if window.size != (1, 1) or window.padding != (0, 0):
            return super()._sum_patches(patches, shape, window)
        if window.stride == (1, 1):
            return patches.view(shape)
        image = patches.new_zeros(shape)
        image[:, :: window.stride[0], :: window.stride[1]] = patches[:, :, :, 0, 0]
        return image

    def conv(self, x: Tensor, params: LayerWeights, window: Window) -> tuple[Tensor, Saved]:
        """Do what ``LayerKernels.conv`` does."""
        if not _suits_onednn(params.weight, window):
            return super().conv(x, params, window)
        images, kernels = self._conv_operands(x, params)
        late_bias = params.bias if self._half else None  # a sum in float32
        biases = [None] * len(params) if params.bias is None or self._half else params.bias.unbind()
        outs = [
            F.conv2d(image, kernel, bias, window.stride, window.padding)
            for image, kernel, bias in zip(images, kernels, biases, strict=True)
        ]
        out = _joined(outs).permute(0, 2, 3, 1).to(x.dtype)
        if late_bias is not None and not window.pool:
            out.view(len(params), -1, out.shape[-1]).add_(late_bias.unsqueeze(1))
            late_bias = None
        out, saved = self._activate(out, window, late_bias)
        return out, (x, *saved)

    def _conv_operands(self, x: Tensor, params: LayerWeights) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the images and the kernels of every client, with the channels as the second dimension."""
        images, kernels = self.operand(x).permute(0, 3, 1, 2), self.operand(params.weight).permute(0, 1, 4, 2, 3)
        return images.chunk(len(params)), kernels.unbind()

    def conv_backward(
        self, grad: Tensor, saved: Saved, shape: torch.Size, params: LayerWeights, window: Window, needs_x: bool
    ) -> Gradient:
        """Do what ``LayerKernels.conv_backward`` does."""
        if not _suits_onednn(params.weight, window):
            return super().conv_backward(grad, saved, shape, params, window, needs_x)
        x, *activation = saved
        grad = self._activation_backward(grad, tuple(activation), window)
        assert params.rates is not None
        images, kernels = self._conv_operands(x, params)
        grads = self.operand(grad).permute(0, 3, 1, 2).chunk(len(params))
        targets = params.updated_weight.permute(0, 1, 4, 2, 3).unbind()
        wanted = (needs_x, params.trainable[0], False)
        grads_x, rates = [], params.rates.tolist()
        for grad_out, image, kernel, target, rate in zip(grads, images, kernels, targets, rates, strict=True):
            grad_x, grad_kernel, _ = aten.convolution_backward.default(
                grad_out, image, kernel, None, window.stride, window.padding, (1, 1), False, (0, 0), 1, wanted
            )
            if params.trainable[0] and rate:
                target.sub_(grad_kernel, alpha=rate)
            grads_x.append(grad_x)
        if (bias := params.updated_bias) is not None and params.trainable[1]:  # ten times faster than oneDNN's
            bias.sub_(params.scale(grad.reshape(len(params), -1, grad.shape[-1]).sum(1), params.rates.unsqueeze(1)))
        return _joined(grads_x).permute(0, 2, 3, 1).to(x.dtype) if needs_x else None

    def group_norm(self, x: Tensor, params: LayerWeights, groups: int, eps: float, relu: bool) -> tuple[Tensor, Saved]:
        """Do what ``LayerKernels.group_norm`` does.

        One client at a time: its values are still in the cache when the second pass over them begins.
        """
        biases = [None] * len(params) if params.bias is None else params.bias.unbind()
        parts = [
            aten.native_group_norm.default(values, weight, bias, *sizes(values), groups, eps)
            for values, weight, bias in zip(x.chunk(len(params)), params.weight, biases, strict=True)
        ]
        out, means, deviations = (_joined(column) for column in zip(*parts, strict=True))
        if relu:
            out.relu_()
        return out, (x, means, deviations, out) if relu else (x, means, deviations)

    def group_norm_backward(
        self, grad: Tensor, saved: Saved, params: LayerWeights, groups: int, relu: bool, needs_x: bool
    ) -> Gradient:
        """Do what ``LayerKernels.group_norm_backward`` does."""
        x, means, deviations = saved[:3]
        if relu:
            grad = aten.threshold_backward.default(grad, saved[3], 0)
        assert params.rates is not None
        clients, wanted = len(params), (needs_x, *params.trainable)
        columns = (tensor.chunk(clients) for tensor in (grad, x, means, deviations))
        parts = [
            aten.native_group_norm_backward.default(*tensors, weight, *sizes(tensors[1]), groups, wanted)
            for *tensors, weight in zip(*columns, params.weight, strict=True)
        ]
        rates = params.rates.unsqueeze(1)
        targets = zip(params.trainable, (params.updated_weight, params.updated_bias), (1, 2), strict=True)
        for trainable, target, number in targets:
            if trainable and target is not None:
                target.sub_(params.scale(torch.stack([part[number] for part in parts]), rates))
        return _joined([part[0] for part in parts]) if needs_x else None


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _is_single_vector_product(a: Tensor, b: Tensor) -> bool:
    return a.shape[0] == 1 and 1 in (*a.shape[1:], b.shape[2])


def _doubled(matrices: Tensor) -> Tensor:
    return matrices.expand(2, -1, -1)


def _suits_onednn(weight: Tensor, window: Window) -> bool:
    return weight.dtype == torch.float32 and window.size != (1, 1)
