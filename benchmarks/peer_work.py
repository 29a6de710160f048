"""The work that ``peers.py`` compares, and one function per simulator that does it in a process of its own.

A process imports this module in the environment of its simulator, so it needs PyTorch and NumPy alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CLIENTS, PER_ROUND, STEPS, BATCH = 100, 10, 50, 10
SAMPLES, RATE, CLASSES = STEPS * BATCH, 0.05, 10
IMAGE = (1, 28, 28)
SOURCE = Path(__file__).resolve().parent.parent / "src"
OURS = {"ours": ("fedavg", 1), "ours, three runs": ("fedavg", 3), "ours, FedBuff": ("fedbuff", 1)}
WORK = "DEFEDAVG_PEERS_WORK"  # the folder of the data, for processes that a peer starts


# What all of them train.


def prepare(folder: Path, data: Path | None) -> None:
    """Write the images and labels of all clients; data that cannot be used raise a ``ValueError`` that says why."""
    count = CLIENTS * SAMPLES
    source = np.random.default_rng(0)
    if data is None:
        images = source.standard_normal((count, *IMAGE), np.float32)
        labels = source.integers(0, CLASSES, count)
    else:
        images, labels = read(data, count)
        images = images.reshape(count, *IMAGE)
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)


def read(data: Path, count: int) -> tuple[Any, Any]:
    """Return the first images, scaled to 1 if they are bytes, and labels of a file."""
    try:
        with np.load(data, allow_pickle=False) as found:
            images, labels = found["images"][:count], found["labels"][:count].astype(np.int64)
        images = images.astype(np.float32) / (255.0 if images.dtype == np.uint8 else 1.0)
    except FileNotFoundError:
        raise ValueError(f"there is no file {data}; give another --data, or leave it out for random images") from None
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, zipfile.BadZipFile, zlib.error):
        raise ValueError(f"{data} cannot be read; give an npz file with the arrays images and labels") from None
    if min(len(images), len(labels)) < count or images[0].size != np.prod(IMAGE):
        raise ValueError(
            f"{data} has {len(images):,} images and {len(labels):,} labels; give {count:,} of each, images of 28×28"
        )
    return images, labels


@functools.cache
def arrays() -> tuple[Any, Any]:
    """Return all images and labels."""
    folder = Path(os.environ[WORK])
    return np.load(folder / "images.npy", mmap_mode="c"), np.load(folder / "labels.npy")


def tensors(client: int) -> tuple[Any, Any]:
    """Return the images and labels of a client."""
    import torch

    own = slice(client * SAMPLES, (client + 1) * SAMPLES)
    return torch.from_numpy(np.asarray(arrays()[0][own])), torch.from_numpy(arrays()[1][own])


def model() -> Any:
    """Return the paper's CNN; the definition needs PyTorch and NumPy alone."""
    sys.path.append(str(SOURCE))
    from defedavg.tasks import build

    return build("cnn", IMAGE, CLASSES)


class Clock:
    """The times at which rounds ended."""

    def __init__(self, processor_time: Callable[[], float] = time.process_time) -> None:
        self._processor_time = processor_time
        self.moments: list[tuple[float, float]] = []

    def tick(self) -> None:
        """Record the end of a round."""
        self.moments.append((time.perf_counter(), self._processor_time()))

    def result(self) -> dict[str, float]:
        """Return updates per second and processor time per update, after the first round."""
        updates = PER_ROUND * (len(self.moments) - 1)
        wall, used = (last - first for first, last in zip(self.moments[0], self.moments[-1], strict=True))
        return {"updates_per_s": updates / wall, "cpu_s_per_update": used / updates}


# One function per simulator; each runs in a process of its own.


def ours(rounds: int, algorithm: str, runs: int) -> dict[str, Any]:
    """Train with the batched executor."""
    import torch

    from defedavg.config import study
    from defedavg.config.build import make_executor, make_simulator
    from defedavg.tasks import Data, Task, cross_entropy
    from defedavg.training import BatchedRun, RunProgress, StoppingRule, Trainer, run_batched

    data = Data(*(torch.from_numpy(np.asarray(values)) for values in arrays()))
    parts = tuple(np.arange(client * SAMPLES, (client + 1) * SAMPLES, dtype=np.int64) for client in range(CLIENTS))
    task = Task("peers", model, cross_entropy, data, data[:10], parts, CLASSES)
    tables: dict[str, Any] = {"algorithms": [algorithm], "training": {"local_lr": RATE, "global_lr": 1.0}}
    if algorithm == "fedavg":
        tables["fedavg"] = {"replacement": False}
    settings = study.study(tables).points()[0].settings
    used = (
        settings.clients.num_clients,
        *(getattr(settings.training, name) for name in ("updates_per_round", "local_steps", "batch_size")),
    )
    assert used == (CLIENTS, PER_ROUND, STEPS, BATCH)
    trainer = Trainer(task, task.model(), batch_size=BATCH)

    def compute(count: int) -> int:
        rule = StoppingRule(max_rounds=count, every_rounds=2**31)
        made = [
            BatchedRun(make_executor(settings, seed, task), iter(make_simulator(settings, seed)), rule, RunProgress())
            for seed in range(runs)
        ]
        for _ in run_batched(made, trainer):
            pass
        return sum(run.reference.updates_trained for run in made)

    compute(1)
    before = time.perf_counter(), time.process_time()
    updates = compute(rounds)
    wall, cpu = time.perf_counter() - before[0], time.process_time() - before[1]
    return {"updates_per_s": updates / wall, "cpu_s_per_update": cpu / updates, "torch": torch.__version__}


def flower(rounds: int) -> dict[str, Any]:
    """Train with the simulation of Flower: one Ray actor per core."""
    import flwr
    import torch
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    clock = Clock(_of_all_processes)
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def train(message: Any, context: Any) -> Any:
        torch.set_num_threads(1)
        found = model()
        found.load_state_dict(message.content["arrays"].to_torch_state_dict())
        local_steps(found, *tensors(int(context.node_config["partition-id"])))
        content: Any = {"arrays": ArrayRecord(found.state_dict()), "metrics": MetricRecord({"num-examples": SAMPLES})}
        return Message(content=RecordDict(content), reply_to=message)

    class Timed(FedAvg):
        def aggregate_train(self, *given: Any, **named: Any) -> Any:
            found = super().aggregate_train(*given, **named)
            clock.tick()
            return found

    @server_app.main()
    def main(grid: Any, context: Any) -> None:  # noqa: ARG001 (the interface of Flower)
        strategy = Timed(
            fraction_train=PER_ROUND / CLIENTS,
            fraction_evaluate=0.0,
            min_train_nodes=PER_ROUND,
            min_evaluate_nodes=0,
            min_available_nodes=CLIENTS,
        )
        strategy.start(grid=grid, initial_arrays=ArrayRecord(model().state_dict()), num_rounds=rounds + 1)

    cores = len(os.sched_getaffinity(0))
    config: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": cores}}
    run_simulation(server_app, client_app, CLIENTS, backend_config=config)
    return {**clock.result(), "version": flwr.__version__, "torch": torch.__version__}


def _of_all_processes() -> float:
    """Return the processor time of this process and all that it started; Ray brings psutil."""
    import ray

    psutil = importlib.import_module("psutil", ray.__name__)
    main = psutil.Process()
    times = [each.cpu_times() for each in (main, *main.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def local_steps(found: Any, images: Any, labels: Any) -> None:
    """Train one epoch in a random order by plain SGD: a client of Flower brings its own loop."""
    import torch

    optimizer = torch.optim.SGD(found.parameters(), lr=RATE)
    for chosen in torch.randperm(SAMPLES).view(STEPS, BATCH):
        optimizer.zero_grad()
        loss: Any = torch.nn.functional.cross_entropy(found(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()


def pfl(rounds: int) -> dict[str, Any]:
    """Train with pfl-research, in one process."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    clock = Clock()

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, images: Any) -> Any:
            return self.inner(images)

        def loss(self, images: Any, labels: Any) -> Any:
            self.train()
            return torch.nn.functional.cross_entropy(self(images), labels)

        def metrics(self, images: Any, labels: Any) -> dict[str, Any]:  # noqa: ARG002 (the interface of pfl)
            return {}

    class Timed(TrainingProcessCallback):  # type: ignore[misc] # without types
        def after_central_iteration(self, *given: Any, **named: Any) -> tuple[bool, Any]:  # noqa: ARG002
            clock.tick()
            return False, Metrics()

    def user(client: int) -> Any:
        return PyTorchTensorDataset(list(tensors(client)), user_id=str(client))

    users = list(range(CLIENTS))
    dataset = FederatedDataset(user, get_user_sampler("random", users))
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    trained = PyTorchModel(network, torch.optim.SGD, optimizer)
    parameters = NNAlgorithmParams(
        central_num_iterations=rounds + 1, evaluation_frequency=10**9, train_cohort_size=PER_ROUND, val_cohort_size=0
    )
    local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH)
    backend = SimulatedBackend(training_data=dataset, val_data=None)
    FederatedAveraging().run(parameters, backend, trained, local, None, [Timed()], send_metrics_to_platform=False)
    return {**clock.result(), "version": importlib.metadata.version("pfl"), "torch": torch.__version__}


FLGO_TASK = """
import peer_work, torch
images, labels = peer_work.arrays()
train_data = torch.utils.data.TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))
test_data = torch.utils.data.TensorDataset(torch.from_numpy(images[:10]), torch.from_numpy(labels[:10]))
get_model = peer_work.model
"""


def flgo(rounds: int) -> dict[str, Any]:
    """Train with FLGo, in one process."""
    import flgo
    import flgo.algorithm.fedavg as fedavg
    import torch
    from flgo.benchmark.toolkits.cv.classification import FromDatasetPipe

    # PyTorch 2.15, which its package installs, refuses the data set of FLGo 0.4.4 without this method.
    FromDatasetPipe.TaskDataset.__getitems__ = lambda data, indices: [data[index] for index in indices]

    clock = Clock()
    folder = Path(tempfile.mkdtemp(dir=os.environ[WORK]))
    os.chdir(folder)
    sys.path.append(str(folder))
    (folder / "images_task.py").write_text(FLGO_TASK)
    made = flgo.gen_benchmark_from_file("images_benchmark", "images_task.py", ".", "cv", "classification")
    benchmark: Any = importlib.import_module(made) if isinstance(made, str) else made
    benchmark.visualize = lambda *_: None  # it draws every sample of every client, which takes minutes
    partition = {"name": "IIDPartitioner", "para": {"num_clients": CLIENTS}}
    flgo.gen_task({"benchmark": made, "partitioner": partition}, "task")
    options = {
        "num_rounds": rounds + 1, "proportion": PER_ROUND / CLIENTS, "num_steps": STEPS, "batch_size": BATCH,
        "learning_rate": RATE, "train_holdout": 0.0, "eval_interval": 10**9, "sample": "uniform",
        "aggregate": "uniform", "torch_num_threads": torch.get_num_threads(), "no_log_console": True,
    }  # fmt: skip
    runner = flgo.init("task", fedavg, options)
    iterate = runner.iterate

    def timed() -> Any:
        found = iterate()
        clock.tick()
        return found

    runner.iterate = timed
    runner.run()
    return {**clock.result(), "version": importlib.metadata.version("flgo"), "torch": torch.__version__}


PEERS: dict[str, Callable[[int], dict[str, Any]]] = {"flower": flower, "pfl": pfl, "flgo": flgo}


def worker(name: str, rounds: int, threads: int) -> None:
    """Run one simulator in this process and print its result as the last line."""
    import torch

    torch.set_num_threads(threads)
    found = ours(rounds, *OURS[name]) if name in OURS else PEERS[name](rounds)
    print("\n" + json.dumps({"name": name, "threads": threads, **found}), flush=True)
