"""What runs are computed with: executor, device, precision and limits."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UserError, unknown
from ..training import StackingError, Trainer
from ..training.memory import parse_memory
from ..training.precision import DEFAULT, check_precision
from ..training.state_memory import StateNeed
from .simulation import EXECUTORS, Simulation

DEVICES = ("auto", "cpu", "cuda")


def choose_device(name: str, has_cuda: bool, where: str = "on this machine") -> str:
    """Return ``cpu`` or ``cuda`` for the device that the user named."""
    if name not in DEVICES:
        raise unknown("device", name, DEVICES)
    if name == "cuda" and not has_cuda:
        raise UserError(f"there is no CUDA device {where}; use --device cpu")
    return "cuda" if name != "cpu" and has_cuda else "cpu"


def reference_precision(precision: str, device: str) -> str:
    """Return the precision in which the reference executor computes where the batched one computes in this one."""
    # Its products are PyTorch's own, whose operands have at least the digits of TF32.
    return precision if precision != "bf16" else "float32" if device == "cpu" else "tf32"


def check_fallback(precision: str, device: str, reason: StackingError) -> None:
    """Raise ``UserError`` if a model that cannot be stacked would be trained in another precision than this one."""
    if reference_precision(precision, device) != precision:
        raise UserError(
            f"the model is trained one client at a time: {reason}. This does not compute in {precision}; use "
            f"--precision {_precisions(device)}"
        )


def _precisions(device: str) -> str:
    """Return the precisions in which the reference executor computes, for a message."""
    return "float32" if device == "cpu" else "float32 or tf32"


@dataclass(frozen=True, slots=True)
class ComputeConfig:
    """How runs are computed."""

    executor: str = "batched"
    device: str = "cpu"
    max_batch_jobs: int | None = None
    memory: int | None = None  # bytes
    precision: str = "float32"
    ray_address: str | None = None  # of a cluster; None: a cluster on this machine alone

    def __post_init__(self) -> None:
        if self.executor not in EXECUTORS:
            raise unknown("executor", self.executor, EXECUTORS)
        if self.max_batch_jobs is not None and self.max_batch_jobs < 1:
            raise UserError(f"--max-batch-jobs is {self.max_batch_jobs}; it must be at least 1")
        if self.executor == "reference" and reference_precision(self.precision, self.device) != self.precision:
            raise UserError(
                f"the reference executor does not compute in {self.precision}; use --executor batched or --precision "
                f"{_precisions(self.device)}"
            )
        check_precision(self.precision, self.device)

    @classmethod
    def choose(
        cls,
        executor: str,
        device: str,
        max_batch_jobs: int | None = None,
        memory: str | None = None,
        precision: str = "auto",
        ray_address: str | None = None,
    ) -> ComputeConfig:
        """Return the configuration for command options; with Ray, connect to the cluster to see its devices."""
        size = None if memory is None else parse_memory(memory)
        if executor == "ray":
            from .ray.connection import connect, has_gpus

            connect(ray_address)
            device = choose_device(device, has_gpus(), "in the cluster")
        elif ray_address is not None:
            raise UserError("--ray-address is for --executor ray; give both")
        else:
            import torch

            device = choose_device(device, torch.cuda.is_available())
        precision = DEFAULT[device] if precision == "auto" else precision
        return cls(executor, device, max_batch_jobs, size, precision, ray_address)

    @property
    def local_device(self) -> str:
        """The device of this process."""
        return "cpu" if self.executor == "ray" else self.device

    def trainer(self, run: Simulation, state: StateNeed) -> Trainer:
        """Return a trainer for all runs that differ from this one only in seed, algorithm and learning rates.

        Raise ``StackingError`` for a model that is to be trained one client at a time.
        """
        try:
            return Trainer(
                run.task,
                run.executor.module,
                batch_size=run.executor.local_training.batch_size,
                max_batch_jobs=self.max_batch_jobs,
                memory=self.memory,
                precision=self.precision,
                local_training=run.executor.local_training,
                state=state,
            )
        except StackingError as reason:
            check_fallback(self.precision, self.device, reason)
            raise
