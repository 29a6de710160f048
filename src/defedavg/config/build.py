"""From settings to the parts of a run: fleet, server machine, simulator, plan, task, executor, stopping rule."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ..algorithms import BUILT_IN, ServerMachine, Setup, algorithm
from ..algorithms.protocol import SERVER_OPTIMIZERS
from ..errors import UserError
from ..planning.client_totals import Energy
from ..planning.devices import Fleet, parse_availability
from ..planning.plan import Plan
from ..planning.simulator import Simulator
from ..planning.slowness import Slowness
from ..planning.sparse_simulator import make_simulator_for
from ..planning.traces import read_trace
from .settings import Settings
from .task_module import task_from_module
from .timeouts import answer_timeout

if TYPE_CHECKING:
    from ..tasks import Task
    from ..training import LocalTraining, Reference, StoppingRule
    from ..training.state_vectors import StateLayout


def make_fleet(settings: Settings, seed: int) -> Fleet:
    """Return the simulated clients of a run."""
    c = settings.clients
    values = {item.name: getattr(c, item.name) for item in fields(Fleet) if item.name != "seed"}
    values["slowness"], values["availability"] = Slowness.parse(c.slowness), parse_availability(c.availability)
    values["trace"] = read_trace(c.trace) if c.trace else None
    values["model_megabytes"] = message_megabytes(settings)
    return Fleet(seed=seed, **values)


def message_megabytes(settings: Settings) -> float:
    """Return the size of a model in a message, which some algorithms quantise."""
    bits = algorithm(settings.algorithm).message_bits(settings.algorithm_settings)
    return settings.clients.model_megabytes if bits == 32 else settings.clients.model_megabytes * bits / 32


def make_setup(
    settings: Settings, seed: int, timeout_seconds: float | None = None, shares: tuple[float, ...] | None = None
) -> Setup:
    """Return what the server machine of a run needs to know; without ``shares``, the task is built if they matter."""
    kind, training = algorithm(settings.algorithm), settings.training
    if training.weighting not in kind.weightings:
        raise UserError(
            f"{kind.name} cannot weight updates by {training.weighting}; set weighting = "
            f"{' or '.join(repr(name) for name in kind.weightings)} in [training], or in [{kind.name}] alone"
        )
    sizes = settings.clients.num_clients, kind.updates_per_merge(training.updates_per_round), training.local_steps
    if training.weighting != "samples":
        shares = None
    elif shares is None:
        shares = _shares(settings, seed)
    return Setup(*sizes, seed=seed, timeout_seconds=timeout_seconds, shares=shares)


@lru_cache(maxsize=32)
def _shares(settings: Settings, seed: int) -> tuple[float, ...]:
    """Return the share of every client in the training samples of the task."""
    return shares_of(build_task(settings, seed))


def shares_of(task: Task) -> tuple[float, ...]:
    """Return the share of every client in the training samples of a task."""
    counts = [len(samples) for samples in task.clients]
    return tuple(count / sum(counts) for count in counts)


def make_server(
    settings: Settings, seed: int, timeout_seconds: float | None, shares: tuple[float, ...] | None = None
) -> ServerMachine:
    """Return the server machine of a run; rehearse an algorithm that is not built in, once per settings."""
    kind, setup = algorithm(settings.algorithm), make_setup(settings, seed, timeout_seconds, shares)
    upload = settings.clients.upload
    tried = kind, replace(setup, seed=0), repr(settings.algorithm_settings), upload
    if kind.name not in BUILT_IN and tried not in _rehearsed:
        from ..planning.rehearsal import rehearse

        rehearse(kind, setup, settings.algorithm_settings, upload)
        _rehearsed.add(tried)
    return kind(setup, settings.algorithm_settings)


_rehearsed: set[tuple[type[ServerMachine], Setup, str, str]] = set()


def make_simulator(settings: Settings, seed: int) -> Simulator:
    """Return the simulator of a run, at time zero."""
    fleet = make_fleet(settings, seed)
    server = make_server(settings, seed, answer_timeout(settings, fleet))
    return make_simulator_for(server, fleet, settings.clients.plan_detail)


def make_plan(settings: Settings, seed: int, rounds: int) -> Plan:
    """Plan a number of rounds without training."""
    return Plan.collect(make_simulator(settings, seed), rounds)


def build_task(settings: Settings, seed: int, client: int | None = None) -> Task:
    """Return the task that the settings name: of ``task.module``, or of a data set, a model and a split.

    ``client`` is the number of a client in a deployment; its task module may return the data of this client alone.
    """
    return with_client_tests(_whole_task(settings, seed, client), settings, seed)


def with_client_tests(task: Task, settings: Settings, seed: int) -> Task:
    """Return a task whose clients hold out the share of their samples that the settings name, if they name one."""
    if not settings.task.client_test_share:
        return task
    from ..tasks import hold_out

    return hold_out(task, settings.task.client_test_share, seed)


def _whole_task(settings: Settings, seed: int, client: int | None) -> Task:
    t = settings.task
    if t.module:
        return task_from_module(t.module, {"algorithm": settings.algorithm, "seed": seed, **settings.flat()}, client)
    from ..tasks import classification_task
    from ..tasks.partition import OPTIONS

    options = {name: getattr(t, name) for name in OPTIONS}
    return classification_task(
        t.data,
        t.model,
        t.split,
        settings.clients.num_clients,
        seed,
        normalise=t.normalise,
        test_share=t.test_share,
        partition_by=t.partition_by,
        **options,
    )


def energy_of(settings: Settings) -> Energy:
    """Return the energy of a local step and of a byte."""
    return Energy(settings.clients.joules_per_step, settings.clients.joules_per_byte)


def local_training(settings: Settings, seed: int) -> LocalTraining:
    """Return the hyperparameters of a run's jobs; a rate that its algorithm does not use is 1."""
    from ..training import LocalTraining
    from ..training.server_optimizers import ServerOptimizer

    kind, training = algorithm(settings.algorithm), settings.training
    shared = (item.name for item in fields(LocalTraining) if item.name not in ("seed", "server"))
    values = {name: getattr(training, name) for name in shared}
    values["server"] = ServerOptimizer(
        settings.server_optimizer,
        training.server_momentum,
        training.server_beta2,
        training.server_epsilon,
    )
    values["global_lr"] = training.global_lr if settings.uses_global_lr else 1.0
    values["local_lr"] = training.local_lr if kind.uses_local_lr else 1.0
    return LocalTraining(seed, **values)


def make_executor(settings: Settings, seed: int, task: Task) -> Reference:
    """Return an executor for one run, at version 0."""
    from ..training import Reference

    check_clients(task, settings)
    return Reference(task, local_training(settings, seed), state_layout(settings, seed))


def check_clients(task: Task, settings: Settings) -> None:
    """Refuse a task of other clients than the settings name."""
    if task.num_clients != settings.clients.num_clients:
        raise UserError(
            f"the task has {task.num_clients} clients but clients.num_clients is {settings.clients.num_clients}; "
            "remove that setting, or make them equal"
        )


def state_layout(settings: Settings, seed: int) -> StateLayout:
    """Return what the algorithm of a run declares of its state vectors."""
    from ..training.state_vectors import StateLayout

    kind = algorithm(settings.algorithm)
    # The declaration depends on sizes alone, so the shares of the clients need not be known.
    plain = replace(settings, training=replace(settings.training, weighting="uniform"))
    specs = kind.state_vectors(make_setup(plain, seed), settings.algorithm_settings)
    merged = kind.updates_per_merge(settings.training.updates_per_round)
    return StateLayout(specs, kind.job_start, kind.correction, kind.name, merged)


def state_need(settings: Settings, seed: int) -> int:
    """Return the number of state vectors that a run keeps at most, with those of the server optimiser."""
    return state_layout(settings, seed).vectors(settings.stop.max_rounds) + server_vectors(settings)


def server_vectors(settings: Settings) -> int:
    """Return the number of state vectors that the server optimiser keeps."""
    return SERVER_OPTIMIZERS[settings.server_optimizer]


def make_stopping_rule(settings: Settings) -> StoppingRule:
    """Return when a run is evaluated, and when it stops."""
    from ..training import StoppingRule

    stop = settings.stop
    return StoppingRule(
        target_accuracy=stop.target_accuracy or None,
        max_rounds=stop.max_rounds,
        max_seconds=stop.max_seconds,
        stop_at_target=stop.stop_at_target,
        consecutive_hits=stop.consecutive_hits,
        every_rounds=stop.eval_every_rounds,
        every_seconds=stop.eval_every_seconds,
        train_samples=stop.train_samples,
    )
