"""The settings of one run: frozen tables whose values are checked when they are made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..algorithms import ALGORITHMS, algorithm
from ..algorithms.protocol import SERVER_OPTIMIZERS, UPLOADS, WEIGHTINGS
from ..errors import UserError, unknown
from ..planning.devices import LINKS, MAX_CLIENTS, PAPER, parse_availability
from ..planning.profiles import PROFILES
from ..planning.rate_schedules import SCHEDULE_TEXT, Schedule
from ..planning.slowness import Slowness
from ..planning.sparse_simulator import PLAN_DETAIL
from .setting_fields import check_limits, is_count, require, setting

OPTIMIZERS = ("sgd", "adam", "adamw")
ADAPTIVE = OPTIMIZERS[1:]
ONLY_SGD = {"optimizer": ("sgd",)}
SCHEDULE_BY = ("version", "seconds")

DEFAULT_PROFILE = "paper-fashionmnist"

MAX_COUNT = 10**12
"""Of rounds and evaluations: more than any run computes."""
MAX_UPDATES = 10**7
"""Of the updates of a round: a server keeps a round in memory."""
MAX_JOB = 10**6
"""Of the local steps of a job, and of the samples of a step."""
MAX_JOB_SAMPLES = 10**8
"""Of the product of the two: the mini-batches of a job are drawn at once, at 8 bytes per sample."""
MAX_RATE = 1e30
"""Of a learning rate: float32 has numbers up to 3.4e38."""
MAX_SECONDS = 1e9
"""Of a waiting time that is not infinite: thirty years."""
MAX_JOULES = 1e9
"""Of the energy of a step or of a byte."""


SERVER_CONSTANTS = {
    "server_momentum": ("momentum", "nesterov", "adagrad", "adam", "amsgrad", "yogi"),
    "server_beta2": ("adam", "amsgrad", "yogi"),
    "server_epsilon": ("adagrad", "adam", "amsgrad", "yogi"),
}
"""Constants of server optimisers -> the optimisers that use them."""


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """[task]: the model, the data, and how the data are partitioned among clients."""

    data: str = setting(
        "mnist5k",
        "mnist5k, fashionmnist, cifar10, flights, mnist-writers, shakespeare-roles, one of a plugin, hf:NAME from "
        "Hugging Face, or leaf:/folder",
    )
    model: str = setting(
        "cnn",
        "cnn, mlp, pooled-mlp, softmax, resnet, transformer, char-mlp, char-lstm, char-transformer, or one of a plugin",
    )
    split: str = setting(
        "iid",
        "iid, classes, random-classes, grouped-classes, dirichlet, shards, sampled, sampled-classes, natural, or one "
        "of a plugin",
    )
    classes_per_client: int = setting(
        2,
        "classes of each client, for split = classes, random-classes, grouped-classes or sampled-classes",
        most=MAX_CLIENTS,
    )
    alpha: float = setting(0.5, "Dirichlet parameter, for split = dirichlet: smaller is less even")
    shards_per_client: int = setting(2, "shards of each client, for split = shards", most=MAX_CLIENTS)
    samples_per_client: int = setting(
        100, "samples of each client, for split = sampled or sampled-classes", most=MAX_CLIENTS
    )
    min_samples_per_client: int = setting(
        1, "users with fewer training samples are no clients, for split = natural", most=MAX_CLIENTS
    )
    partition_by: str = setting("", "the column of hf:NAME that names the users, for split = natural")
    normalise: str = setting(
        "standard", "pixel values: standard (mean 0, deviation 1), unit (0 to 1) or symmetric (-1 to 1)"
    )
    test_share: float = setting(
        0.0, "share of the pooled training and test data that becomes the test set; 0: the test set of the data"
    )
    client_test_share: float = setting(
        0.0,
        "share of every client's training samples that it holds out for its own evaluation; 0: the test samples of its "
        "user, if the data set has users",
    )
    module: str = setting("", "a task of your own instead: my_task.py:make, a function (config, client) -> Task")

    def __post_init__(self) -> None:
        check_limits(self, "task")
        shares = ("task.test_share", "task.client_test_share")
        require(self, lambda share: 0 <= share < 1, "give a number from 0 to below 1", *shares)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """[clients]: number, speed and reliability of the simulated devices."""

    num_clients: int = setting(
        100,
        "number of clients, N; where it is not set, all those of a task module, a trace or split = natural",
        most=MAX_CLIENTS,
    )
    profile: str = setting(
        DEFAULT_PROFILE,
        "default of step_seconds and model_megabytes: paper-fashionmnist or paper-cifar10; of slowness, links and "
        "availability as well: phones",
    )
    step_seconds: float = setting(
        PAPER[DEFAULT_PROFILE]["step_seconds"],
        "duration of a local step on the fastest client",
        profile=True,
        replaced_by=("trace",),
    )
    model_megabytes: float = setting(
        PAPER[DEFAULT_PROFILE]["model_megabytes"], "size of a model in a message, in 10^6 bytes", profile=True
    )
    slowness: str = setting(
        "uniform(1, 5)",
        "slowdown of each client: equal, uniform(low, high), inverse-uniform(low, high) (uniform speeds), "
        "lognormal(sigma), exponential(mean), two-speed(share, factor), pareto(shape), phones (as measured)",
        profile=True,
        replaced_by=("trace",),
    )
    jitter: float = setting(0.0, "variation of job durations (sigma of a log-normal distribution of mean 1)")
    links: str = setting(
        "equal",
        "equal (uplink_mbps and downlink_mbps for all), or phones (drawn as measured)",
        profile=True,
        replaced_by=("trace",),
    )
    uplink_mbps: float = setting(400.0, "bandwidth from client to server, in Mbit/s", replaced_by=("trace",))
    downlink_mbps: float = setting(400.0, "bandwidth from server to client, in Mbit/s", replaced_by=("trace",))
    latency_seconds: float = setting(0.0, "delay added to every message")
    upload: str = setting(
        "auto",
        "an update that is sent unrequested: background (the client trains on), blocking (it waits until the upload "
        "ends), or auto (the algorithm's own)",
    )
    availability: str = setting("always", "always, windows(on_seconds, off_seconds), or phones", profile=True)
    failure_rate: float = setting(0.0, "probability that a client fails during a job")
    return_seconds: float = setting(
        1.0, "time until a failed client returns (inf: never)", most=MAX_SECONDS, needs=("failure_rate",)
    )
    joules_per_step: float = setting(0.0, "energy of a local step on any client", most=MAX_JOULES)
    joules_per_byte: float = setting(0.0, "energy of a byte that a client sends or receives", most=MAX_JOULES)
    trace: str = setting(
        "",
        "CSV of measured devices: client,step_seconds,up_mbps,down_mbps[,leaves_at,returns_at]"
        "[,available_from,available_to,repeat_every]",
    )
    plan_detail: str = setting(
        "auto", "jobs that plans record: all, used (uploaded ones), or auto (used from 20,000 reliable clients on)"
    )

    def __post_init__(self) -> None:
        require(self, is_count, "it must be at least 1", "clients.num_clients")
        joules = ("clients.joules_per_step", "clients.joules_per_byte")
        require(self, lambda value: 0 <= value < math.inf, "it must be zero or more, and finite", *joules)
        check_limits(self, "clients")
        if self.profile not in PROFILES:
            raise unknown("profile", self.profile, PROFILES)
        if self.links not in LINKS:
            raise unknown("clients.links", self.links, LINKS)
        if self.plan_detail not in PLAN_DETAIL:
            raise unknown("clients.plan_detail", self.plan_detail, PLAN_DETAIL)
        if self.upload not in UPLOADS:
            raise unknown("clients.upload", self.upload, UPLOADS)
        Slowness.parse(self.slowness)
        parse_availability(self.availability)


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """[training]: round size, local training and learning rates."""

    updates_per_round: int = setting(10, "updates merged per round, n", most=MAX_UPDATES)
    local_steps: int = setting(50, "local SGD steps per job, K", most=MAX_JOB)
    batch_size: int = setting(10, "samples per local step", most=MAX_JOB)
    global_lr: float = setting(1.0, "global learning rate, η", most=MAX_RATE)
    local_lr: float = setting(0.05, "local learning rate, η̄", most=MAX_RATE)
    sampling: str = setting("replacement", "mini-batches: drawn with replacement, or shuffle (epoch by epoch)")
    weighting: str = setting("uniform", "weight of an update: uniform, or samples (its client's share of all data)")
    server_optimizer: str = setting(
        "",
        "optimiser of the server, with the rate global_lr: sgd, momentum, nesterov, adagrad, adam, amsgrad, yogi; "
        "empty: the algorithm's own",
    )
    server_momentum: float = setting(0.9, "momentum, or β1, of the server optimiser")
    server_beta2: float = setting(0.99, "β2 of the server optimiser: adam, amsgrad, yogi")
    server_epsilon: float = setting(1e-3, "ε of the server optimiser: adagrad, adam, amsgrad, yogi")
    timeout_seconds: float = setting(
        0.0,
        "wait for a client before another is drawn; 0: 1.5 times what 95 % of the clients need, if some may not answer",
        most=MAX_SECONDS,
    )
    optimizer: str = setting("sgd", "local optimiser: sgd, adam or adamw; its state is reset for every job")
    momentum: float = setting(0.0, "momentum of sgd", idle_while={"optimizer": ADAPTIVE})
    nesterov: bool = setting(
        False, "Nesterov's form of the momentum", needs=("momentum",), idle_while={"optimizer": ADAPTIVE}
    )
    beta1: float = setting(0.9, "decay of the mean of adam and adamw", idle_while=ONLY_SGD)
    beta2: float = setting(0.999, "decay of the mean square of adam and adamw", idle_while=ONLY_SGD)
    epsilon: float = setting(1e-8, "added to the root of the mean square of adam and adamw", idle_while=ONLY_SGD)
    weight_decay: float = setting(
        0.0, "added to the gradient, times the weights (sgd, adam); decoupled for adamw", most=MAX_RATE
    )
    prox: float = setting(0.0, "proximal term μ: μ·(w − start of the job) is added to the gradient", most=MAX_RATE)
    clip_norm: float = setting(
        0.0, "limit on the norm of the mini-batch gradient, before decay and prox; 0: none", most=MAX_RATE
    )
    local_schedule: str = setting("constant", f"factor of local_lr: {SCHEDULE_TEXT}")
    global_schedule: str = setting("constant", "factor of global_lr, written like local_schedule")
    schedule_by: str = setting(
        "version",
        "schedules count versions, or the seconds at which they were made: version or seconds",
        idle_while={"local_schedule": ("constant",), "global_schedule": ("constant",)},
    )
    augment: str = setting("none", "keyed changes of training images: none, flip, crop(pixels) or flip+crop(pixels)")

    def __post_init__(self) -> None:
        sizes = ("training.updates_per_round", "training.local_steps", "training.batch_size")
        require(self, is_count, "it must be at least 1", *sizes)
        rates = ("training.global_lr", "training.local_lr")
        require(self, lambda rate: rate > 0, "a learning rate must be above zero", *rates)
        require(self, math.isfinite, "a learning rate must be finite", *rates)
        if self.sampling not in ("replacement", "shuffle"):
            raise unknown("sampling", self.sampling, ("replacement", "shuffle"))
        if self.weighting not in WEIGHTINGS:
            raise unknown("training.weighting", self.weighting, WEIGHTINGS)
        if self.server_optimizer not in ("", *SERVER_OPTIMIZERS):
            raise unknown("training.server_optimizer", self.server_optimizer, SERVER_OPTIMIZERS)
        decays = ("training.server_momentum", "training.server_beta2")
        require(self, lambda decay: 0 <= decay < 1, "give a number from 0 to below 1", *decays)
        require(self, lambda e: 0 < e < math.inf, "it must be above zero, and finite", "training.server_epsilon")
        require(self, lambda seconds: seconds >= 0, "it must be zero or more", "training.timeout_seconds")
        self._check_optimizer()
        check_limits(self, "training")
        if self.local_steps * self.batch_size > MAX_JOB_SAMPLES:
            raise UserError(
                f"training.local_steps is {self.local_steps} and training.batch_size {self.batch_size}; their product, "
                f"the samples of a job, must be at most {MAX_JOB_SAMPLES:,}"
            )

    def beyond_plain_sgd(self) -> list[str]:
        """Return the settings with which local training is not plain SGD with constant rates on unchanged samples."""
        names = (
            "optimizer",
            "momentum",
            "weight_decay",
            "prox",
            "clip_norm",
            "local_schedule",
            "global_schedule",
            "augment",
        )
        return [name for name in names if getattr(self, name) != type(self).__dataclass_fields__[name].default]

    def _check_optimizer(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise unknown("training.optimizer", self.optimizer, OPTIMIZERS)
        shares = ("training.momentum", "training.beta1", "training.beta2")
        require(self, lambda share: 0 <= share < 1, "it must be at least 0 and below 1", *shares)
        # Far above the smallest number of float32, so that no mean is divided by zero.
        require(self, lambda value: 1e-30 <= value <= 1, "it must be between 1e-30 and 1", "training.epsilon")
        amounts = ("training.weight_decay", "training.prox", "training.clip_norm")
        require(self, lambda amount: 0 <= amount < math.inf, "it must be zero or more, and finite", *amounts)
        for name in ("local_schedule", "global_schedule"):
            Schedule.parse(getattr(self, name), f"training.{name}")
        if self.schedule_by not in SCHEDULE_BY:
            raise unknown("training.schedule_by", self.schedule_by, SCHEDULE_BY)
        if self.augment != "none":
            from ..training.augmentation import Augmentation  # imports PyTorch

            Augmentation.parse(self.augment)


@dataclass(frozen=True, slots=True)
class StopSettings:
    """[stop]: the end of a run, and how often the model is evaluated."""

    target_accuracy: float = setting(0.0, "test accuracy, or metric of your task, at which a run stops; 0: no target")
    stop_at_target: bool = setting(True, "false: continue after the target is reached", needs=("target_accuracy",))
    consecutive_hits: int = setting(
        1,
        "evaluations in a row at the target that end a run; 5: a sustained hit",
        most=MAX_COUNT,
        needs=("target_accuracy", "stop_at_target"),
    )
    max_rounds: int = setting(400, "limit on rounds", most=MAX_COUNT)
    max_seconds: float = setting(math.inf, "limit on simulated seconds")
    eval_every_rounds: int = setting(1, "rounds between evaluations, at least", most=MAX_COUNT)
    eval_every_seconds: float = setting(0.0, "simulated seconds between evaluations, at least")
    train_samples: int = setting(0, "training samples on which the training loss is evaluated; 0: none", most=MAX_COUNT)

    def __post_init__(self) -> None:
        require(self, lambda share: 0 <= share <= 1, "give a share, like 0.8", "stop.target_accuracy")
        counts = ("stop.consecutive_hits", "stop.max_rounds", "stop.eval_every_rounds")
        require(self, is_count, "it must be at least 1", *counts)
        require(self, lambda seconds: seconds > 0, "it must be above zero", "stop.max_seconds")
        amounts = ("stop.eval_every_seconds", "stop.train_samples")
        require(self, lambda amount: amount >= 0, "it must be zero or more", *amounts)
        check_limits(self, "stop")


TABLES: dict[str, type[Any]] = {
    "task": TaskSettings,
    "clients": ClientSettings,
    "training": TrainingSettings,
    "stop": StopSettings,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one run except its seed; ``algorithm_settings`` default to those of the algorithm."""

    algorithm: str = "defedavg-iid"
    task: TaskSettings = TaskSettings()
    clients: ClientSettings = ClientSettings()
    training: TrainingSettings = TrainingSettings()
    stop: StopSettings = StopSettings()
    algorithm_settings: Any = None

    def __post_init__(self) -> None:
        if self.algorithm_settings is None:
            object.__setattr__(self, "algorithm_settings", algorithm(self.algorithm).settings_type())
        for key in algorithm(self.algorithm).refused_training():
            if key == "global_schedule" and self.uses_global_lr:
                continue
            if getattr(self.training, key) != TrainingSettings.__dataclass_fields__[key].default:
                raise UserError(
                    f"{self.algorithm} cannot use training.{key}; remove it, or set it in the tables of the other "
                    "algorithms alone"
                )

    @property
    def server_optimizer(self) -> str:
        """The optimiser of the server: that of [training], or else the algorithm's own."""
        return self.training.server_optimizer or algorithm(self.algorithm).server_optimizer

    @property
    def uses_global_lr(self) -> bool:
        """Whether there is a global rate: the algorithm's, or that of a server optimiser."""
        return algorithm(self.algorithm).uses_global_lr or self.server_optimizer != "sgd"

    def flat(self) -> dict[str, Any]:
        """Return every setting by a name like ``training.local_steps``."""
        tables = {name: getattr(self, name) for name in TABLES} | {self.algorithm: self.algorithm_settings}
        return {
            f"{name}.{item.name}": getattr(table, item.name)
            for name, table in tables.items()
            for item in dataclasses.fields(table)
        }


def given_settings(found: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the settings, such as ``training.local_lr``, that have a value other than the default."""
    return frozenset(
        f"{table}.{name}"
        for table, values in found.items()
        if (table in TABLES or table in ALGORITHMS) and isinstance(values, Mapping)
        for name, value in values.items()
        if value != _defaults(table).get(name)
    )


def _defaults(table: str) -> dict[str, Any]:
    kinds = (TABLES[table],) if table in TABLES else (TrainingSettings, ALGORITHMS[table].settings_type)
    return {item.name: item.default for kind in kinds for item in dataclasses.fields(kind)}


def own_defaults(algorithm: str) -> dict[str, Any]:
    """Return the defaults of an algorithm's own settings; none for an unknown algorithm."""
    kind = ALGORITHMS[algorithm].settings_type if algorithm in ALGORITHMS else None
    return {item.name: item.default for item in dataclasses.fields(kind)} if kind else {}


def setting_names() -> set[str]:
    """Return every setting of a study as ``table.key``."""
    names = {f"{table}.{item.name}" for table, kind in TABLES.items() for item in dataclasses.fields(kind)}
    return names | {f"{algorithm}.{name}" for algorithm in ALGORITHMS for name in own_defaults(algorithm)}
