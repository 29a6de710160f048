"""Check the Triton kernels against plain operations on this machine's CUDA device, on fresh random inputs.

python benchmarks/kernels.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from defedavg.execute import stacked
from defedavg.execute.stacked import stack


def gradients(model: nn.Sequential, x: Tensor, clients: int, plain: bool) -> list[Tensor]:
    """Gradients of a stacked model, with the kernels or without."""
    kept = stacked.kernels
    stacked.kernels = None if plain else kept
    try:
        forward = stack(model)
        source = torch.Generator(device=x.device).manual_seed(1)
        params = {
            name: torch.randn((clients, *p.shape), device=x.device, dtype=x.dtype, generator=source).requires_grad_()
            for name, p in model.named_parameters()
        }
        out = forward(params, x)
        weights = torch.linspace(0, 1, out.numel(), device=x.device, dtype=x.dtype).view_as(out)
        found = torch.autograd.grad((out * weights).sum(), list(params.values()))
    finally:
        stacked.kernels = kept
    return [out.detach(), *found]


def main() -> None:
    """Compare; any difference beyond the order of a sum is an error."""
    if stacked.kernels is None:
        raise SystemExit("Triton is not installed here")
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        for size, kernel, stride in ((28, 5, 1), (20, 3, 1), (17, 2, 3)):
            mid = (size - kernel) // stride + 1
            model = nn.Sequential(nn.Conv2d(1, 8, kernel, stride), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 2, 2))
            x = torch.randn((3 * 6, 1, size, size), device="cuda", dtype=dtype)
            worst = max(
                float((a - b).norm() / b.norm())
                for a, b in zip(gradients(model, x, 3, False), gradients(model, x, 3, True), strict=True)
            )
            print(f"{dtype} image {size} (to {mid}), kernel {kernel}, stride {stride}: {worst:.1e}")
            if not worst <= limit:
                raise SystemExit("the kernels disagree with the plain operations")
    weights, gradient = torch.randn(5, 7, 11, device="cuda"), torch.randn(5, 7, 11, device="cuda")
    rates = torch.rand(5, device="cuda")
    expected = weights - rates.view(5, 1, 1) * gradient
    stacked.descend(weights, gradient, rates)
    torch.testing.assert_close(weights, expected)
    bad = torch.full((1, 2, 2, 1), float("nan"), device="cuda")
    assert torch.isnan(stacked.kernels.relu_pool(bad)[0]).all()
    ties = torch.zeros((1, 4, 4, 2), device="cuda")
    assert not stacked.kernels.relu_pool_backward(
        torch.ones(1, 2, 2, 2, device="cuda"), stacked.kernels.relu_pool(ties)[1]
    ).any()
    assert F.relu(ties).sum() == 0


if __name__ == "__main__":
    main()
