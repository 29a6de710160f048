"""The Triton kernels on this machine's CUDA device: agreement with plain operations, times, and a search for tiles.

    python benchmarks/kernels.py [--tune] [--clients 192] [--precision tf32]

Without ``--tune`` it compares every kernel with plain operations in float64 on random inputs, and times it on the
layers of the paper's CNN. With ``--tune`` it tries other tiles and prints the fastest.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from defedavg.training.kernels.deferred import DeferredUpdates
from defedavg.training.kernels.plain import LayerKernels, LayerWeights, Window
from defedavg.training.kernels.triton_configs import CONFIGS
from defedavg.training.kernels.triton_layers import TritonLayerKernels

PLAIN = Window((5, 5), (1, 1), (0, 0))
POOLED = Window((5, 5), (1, 1), (0, 0), relu=True, pool=True)
LAYERS = {  # image (height, width, channels) or inputs, outputs, and the convolution
    "28: conv 1-32": ((28, 28, 1), 32, POOLED),
    "32: conv 3-16, padded": ((32, 32, 3), 16, Window((3, 3), (1, 1), (1, 1))),
    "28: conv 32-64": ((12, 12, 32), 64, POOLED),
    "28: full 1024-512": ((1024,), 512, None),
    "32: conv 3-32": ((32, 32, 3), 32, POOLED),
    "32: conv 32-64": ((14, 14, 32), 64, POOLED),
    "32: full 1600-512": ((1600,), 512, None),
    "full 512-10": ((512,), 10, None),
}
ROWS, FEW = ("3-32",), ("1-32", "padded")  # layers whose kernels have these configurations
FIRST = ROWS + FEW
DEFERRED = ("keep", "deferred_linear", "deferred_grad_x", "add_updates")
LIMITS = {"float32": 1e-5, "tf32": 5e-3, "bf16": 5e-2}


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Return the time of one call, measured with a CUDA graph of several."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            work()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(repeats // 5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / (repeats // 5 * 5)


class Case:
    """One layer with random weights and inputs."""

    def __init__(self, name: str, clients: int, samples: int = 10) -> None:
        shape, outs, self.window = LAYERS[name]
        self.inner = not name.endswith(FIRST)  # the first layer's inputs need no gradient
        source = torch.Generator(device="cuda").manual_seed(0)

        def random(*size: int) -> Tensor:
            return torch.randn(size, device="cuda", generator=source)

        if self.window is None:
            self.x, weight = random(clients, samples, *shape), random(clients, outs, *shape) / shape[0] ** 0.5
        else:
            self.x = random(clients * samples, *shape)
            weight = random(clients, outs, *self.window.size, shape[-1]) / (25 * shape[-1]) ** 0.5
        self.params = LayerWeights(weight, random(clients, outs), torch.full((clients,), 1e-4, device="cuda"))

    def double(self) -> Case:
        """Return the same layer in float64."""
        other = object.__new__(Case)
        other.window, other.inner, other.x = self.window, self.inner, self.x.double()
        bias, rates = self.params.bias, self.params.rates
        assert bias is not None
        assert rates is not None
        other.params = LayerWeights(self.params.weight.double(), bias.double(), rates.double())
        return other

    def forward(self, kernels: LayerKernels) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the outputs, and the tensors for the backward pass."""
        if self.window is None:
            return kernels.linear(self.x, self.params, True)
        return kernels.conv(self.x, self.params, self.window)

    def backward(self, kernels: LayerKernels, grad: Tensor, saved: tuple[Tensor, ...], needs_x: bool) -> Tensor | None:
        """Update the parameters, and return the gradient of the inputs."""
        if self.window is None:
            return kernels.linear_backward(grad, saved, self.params, True, needs_x)
        return kernels.conv_backward(grad, saved, self.x.shape, self.params, self.window, needs_x)


def compare(name: str, precision: str) -> dict[str, float]:
    """Return the relative errors of the kernels against plain operations in float64."""
    case = Case(name, clients=5)
    exact = case.double()
    before = exact.params.weight.clone()
    out, saved = case.forward(TritonLayerKernels(precision))
    expected, kept = exact.forward(LayerKernels())
    grad = torch.randn(out.shape, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1))
    rates = 0.1 / len(case.x)
    assert case.params.rates is not None
    assert exact.params.rates is not None
    case.params.rates.fill_(rates)
    exact.params.rates.fill_(rates)
    found = case.backward(TritonLayerKernels(precision), grad, saved, True)
    wanted = exact.backward(LayerKernels(), grad.double(), kept, True)
    assert found is not None
    assert wanted is not None

    def far(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b).norm() / b.norm())

    # With TF32 the pooling may choose another of two nearly equal values; the error includes the effect on gradients.
    return {
        "outputs": far(out, expected),
        "inputs": far(found, wanted),
        "step": far(case.params.weight.double() - before, exact.params.weight - before),
    }


def times(name: str, clients: int, precision: str) -> dict[str, float]:
    """Return the milliseconds of every kernel of a layer."""
    case = Case(name, clients)
    kernels = TritonLayerKernels(precision)
    out, saved = case.forward(kernels)
    grad = torch.randn_like(out)
    found = {"forward": milliseconds(lambda: case.forward(kernels))}
    found["step"] = milliseconds(lambda: case.backward(kernels, grad, saved, False))
    if case.inner:
        found["both"] = milliseconds(lambda: case.backward(kernels, grad, saved, True))
    return found


class DeferredCase(Case):
    """A fully connected layer whose updates are deferred."""

    def __init__(self, name: str, clients: int, samples: int = 10) -> None:
        super().__init__(name, clients, samples)
        self.step, self.samples = torch.zeros(1, dtype=torch.int64, device="cuda"), samples
        self.updates = DeferredUpdates.of(self.params.weight, samples, self.step)
        self.params = replace(self.params, deferred=self.updates)
        self.steps = torch.full((clients,), 1000, device="cuda")

    def add(self, kernels: LayerKernels, first: int, end: int) -> None:
        """Add the updates of these steps to the weights."""
        assert self.params.rates is not None
        kernels.add_updates(self.params.weight, self.updates, self.params.rates, self.steps, (first, end), self.samples)


def compare_deferred(name: str) -> dict[str, float]:
    """Return the relative errors after eight steps with other inputs, the first six of which are added together."""
    case = DeferredCase(name, clients=5)
    exact, kernels, period = case.double(), TritonLayerKernels("tf32"), case.updates.period
    before = exact.params.weight.clone()
    assert case.params.rates is not None
    assert exact.params.rates is not None
    case.params.rates.fill_(1e-3)
    exact.params.rates.fill_(case.params.rates[0].item())
    source = torch.Generator(device="cuda").manual_seed(2)
    case.add(kernels, 0, 0)
    for number in range(period + 2):
        case.step.fill_(number)
        case.x.normal_(generator=source)
        exact.x = case.x.double()
        (out, saved), (expected, kept) = case.forward(kernels), exact.forward(LayerKernels())
        grad = torch.randn(out.shape, device="cuda", generator=source)
        found = case.backward(kernels, grad, saved, True)
        wanted = exact.backward(LayerKernels(), grad.double(), kept, True)
        if number == period - 1:
            case.add(kernels, 0, period)
    case.add(kernels, period, period + 2)
    assert found is not None
    assert wanted is not None
    changed = (case.params.weight.double() - before, exact.params.weight - before)
    pairs = {"outputs": (out.double(), expected), "inputs": (found.double(), wanted), "step": changed}
    return {key: float((a - b).norm() / b.norm()) for key, (a, b) in pairs.items()}


def deferred_work(case: DeferredCase, kernels: LayerKernels) -> dict[str, Callable[[], object]]:
    """Return the passes of a layer with half of the pending steps, by the tiles that they depend on most."""
    case.add(kernels, 0, 0)
    case.step.fill_(0)
    for _ in range(case.updates.period // 2):
        out, saved = case.forward(kernels)
        case.backward(kernels, torch.randn_like(out), saved, True)
        case.step.add_(1)
    grad, period = torch.randn_like(out), case.updates.period
    return {
        "deferred_linear": lambda: case.forward(kernels),
        "deferred_grad_x": lambda: case.backward(kernels, grad, saved, True),
        "keep": lambda: case.backward(kernels, grad, saved, False),
        "add_updates": lambda: case.add(kernels, 0, period),
    }


def configurations(
    limits: Mapping[str, Sequence[int]], launches: Sequence[tuple[int, int]]
) -> Iterator[dict[str, int]]:
    """Yield every tile with every pair of warps and stages."""
    for tile in itertools.product(*limits.values()):
        for warps, stages in launches:
            yield dict(zip(limits, tile, strict=True)) | {"num_warps": warps, "num_stages": stages}


def search(kind: str, tried: Iterable[dict[str, int]], works: Mapping[str, Callable[[], object]]) -> None:
    """Time some layers with every configuration of a kernel, and print the fastest of each layer."""
    kept = CONFIGS[kind]
    results: dict[str, list[tuple[float, dict[str, int]]]] = {name: [] for name in works}
    for setting in tried:
        CONFIGS[kind] = setting
        for name, work in works.items():
            try:
                results[name].append((milliseconds(work), setting))
            except Exception as error:  # the configuration does not fit the device
                print("failed:", kind, name, setting, str(error).splitlines()[0][:80])
    CONFIGS[kind] = kept
    for name, found in results.items():
        for spent, setting in sorted(found, key=lambda result: result[0])[:4]:
            print(f"{kind:<16} {name:<18} {spent:.4f} ms  {setting}", flush=True)


def tune_deferred(clients: int) -> None:
    """Try other tiles of the kernels of deferred updates, and print the fastest."""
    kernels = TritonLayerKernels("tf32")
    sizes: dict[str, dict[str, tuple[int, ...]]] = {
        "keep": {"BK": (32, 64, 128)},
        "deferred_linear": {"BM": (64, 128), "BK": (32, 64, 128)},
        "deferred_grad_x": {"BM": (16, 32, 64), "BN": (64, 128, 256)},
        "add_updates": {"BM": (16, 32, 64), "BN": (64, 128, 256)},
    }
    for name in [layer for layer in LAYERS if "-512" in layer]:
        works = deferred_work(DeferredCase(name, clients), kernels)
        for kind, limits in sizes.items():
            tried = configurations(limits, ((2, 3), (4, 2), (4, 3), (4, 4), (8, 2), (8, 3)))
            search(kind, tried, {name: works[kind]})


def tiles(kind: str) -> Iterator[dict[str, int]]:
    """Yield the configurations to try."""
    sizes: tuple[tuple[int, ...], ...] = {
        "conv": ((128, 256), (64,), (32, 64)),
        "conv_few": ((64, 128, 256), (64,), (32, 64)),
        "conv_rows": ((128, 256), (64,), (16, 32)),
        "conv_step": ((32, 64), (32, 64, 128), (16, 32, 64)),
        "conv_step_few": ((64,), (32, 64, 128), (32, 64)),
        "conv_step_rows": ((64,), (16, 32, 64), (16, 32, 64)),
        "half_conv": ((64, 128, 256), (64,), (32, 64, 128)),
        "half_conv_few": ((128, 256), (64,), (32,)),
        "half_conv_rows": ((64, 128, 256), (64,), (16, 32, 64)),
        "half_conv_edges": ((64, 128, 256), (64,), (32, 64, 128)),
        "half_conv_step": ((64,), (64, 128, 256), (32, 64, 128)),
        "half_conv_step_few": ((64,), (32,), (32, 64)),
        "half_conv_step_rows": ((64,), (32, 64, 128), (16, 32, 64)),
        "linear": ((64, 128), (64,), (64,)),
        "linear_step": ((32, 64, 128), (32, 64, 128)),
    }[kind]
    limits = dict(zip(("BM", "BN", "BK"), sizes, strict=False))  # the step of a linear layer has no BK
    return configurations(limits, ((1, 2), (1, 3), (2, 3), (4, 2), (4, 3), (4, 4), (8, 1), (8, 3)))


def work_of(kind: str, case: Case, kernels: LayerKernels) -> Callable[[], object]:
    """Return the pass of a layer that depends most on a kernel."""
    if kind not in ("linear_step", "half_conv_edges") and "conv_step" not in kind:
        return lambda: case.forward(kernels)
    out, saved = case.forward(kernels)
    grad = torch.ones_like(out)
    return lambda: case.backward(kernels, grad, saved, "conv_step" not in kind)


def tune(kind: str, names: list[str], clients: int, precision: str) -> None:
    """Try every configuration of a kernel on some layers, and print the fastest."""
    cases = {name: Case(name, clients) for name in names}
    if precision == "tf32" and kind.startswith("conv"):  # steps have 16-bit operands, evaluations have not
        for case in cases.values():
            case.params = replace(case.params, rates=None)
    kernels = TritonLayerKernels(precision)
    search(kind, tiles(kind), {name: work_of(kind, case, kernels) for name, case in cases.items()})


def main() -> None:
    """Compare and time the kernels, or search for tiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tune",
        nargs="*",
        metavar="KERNEL",
        help="search tiles; all if none is named; deferred: those of deferred updates",
    )
    parser.add_argument("--clients", type=int, default=192)
    parser.add_argument("--precision", choices=list(LIMITS), default="tf32")
    options = parser.parse_args()
    if options.tune is not None:
        if "deferred" in (options.tune or ["deferred"]):
            tune_deferred(options.clients)
        for kind in [name for name in options.tune or CONFIGS if name in CONFIGS and name not in DEFERRED]:
            names = [n for n in LAYERS if ("conv" in n) == ("conv" in kind)]
            names = [n for n in names if n.endswith(ROWS) == kind.endswith("rows")]
            names = [n for n in names if n.endswith(FEW) == kind.endswith("few")]
            used = not kind.startswith("conv_step") if options.precision == "tf32" else not kind.startswith("half")
            if not used:
                print(f"{kind}: not used with {options.precision}")
                continue
            tune(kind, names, options.clients, options.precision)
        return
    for name in LAYERS:
        for precision, limit in LIMITS.items():
            far = compare(name, precision)
            print(f"{name:<18} {precision:<8} " + "  ".join(f"{k} {v:.1e}" for k, v in far.items()))
            if not far["outputs"] <= limit:
                raise SystemExit(f"{name}: the kernels disagree with the plain operations; results would be wrong")
    for name in [layer for layer in LAYERS if "-512" in layer]:
        far = compare_deferred(name)
        print(f"{name:<18} deferred " + "  ".join(f"{k} {v:.1e}" for k, v in far.items()))
        if not far["outputs"] <= LIMITS["tf32"]:
            raise SystemExit(f"{name}: deferred updates disagree with the plain operations; results would be wrong")
        works = deferred_work(DeferredCase(name, options.clients), TritonLayerKernels("tf32"))
        print(f"{name:<18} deferred " + "  ".join(f"{k} {milliseconds(v):.4f} ms" for k, v in works.items()))
    for name in LAYERS:
        spent = times(name, options.clients, options.precision)
        print(f"{name:<18} {options.clients} clients  " + "  ".join(f"{k} {v:.4f} ms" for k, v in spent.items()))


if __name__ == "__main__":
    main()
