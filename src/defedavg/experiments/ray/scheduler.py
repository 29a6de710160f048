"""The scheduler: assigns runs to workers, collects their evaluations, and reassigns the runs of a lost worker.

For every run the scheduler keeps its evaluations and its last reported state. A reassigned run repeats some evaluations
with the same numbers in the same environment; the scheduler reports each only once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ...errors import UserError
from ...plugins import loaded_sources
from ...tasks import Data, Task
from ...training import CheckpointHook, EvalCounters, RunProgress, RunState, Status, hit_times
from ...training.state_memory import StateNeed
from ..compute import ComputeConfig
from ..run_events import Event, OnResume, RunEvaluated, RunFinished, RunSpec
from ..simulation import Simulation
from .connection import WorkerSlots, connect, versions, worker_slots
from .worker import RayWorker, RunAssignment, StoredData, WorkerConfig

STATE_SECONDS = 30.0  # between two reports of the state of a run
START_SECONDS = 120.0  # for a worker to start
GRACE_SECONDS = 60.0  # to wait for a node when all workers are lost
POLL_SECONDS = 2.0  # to wait for messages
MAX_CALLS = 16  # concurrent calls to a worker: its messages, its assignments, and requests for help


@dataclass(eq=False)
class WorkerHandle:
    """A worker, as the scheduler sees it."""

    actor: Any
    slots: WorkerSlots
    pid: int = 0  # on its node
    runs: dict[RunSpec, None] = field(default_factory=dict)
    idle: bool = True  # it asked for another run
    helpers: tuple[Any, ...] = ()


@dataclass(eq=False)
class RemoteRun:
    """A run on a worker; it can be paused like a local run."""

    number: int
    run: Simulation
    worker: WorkerHandle | None = None
    released: int = 0  # pauses that were ended
    passed: int = 0  # ended pauses that the worker knows of
    _held: bool = False

    @property
    def held(self) -> bool:
        """Whether the run is paused."""
        return self._held

    @held.setter
    def held(self, held: bool) -> None:
        self.released += self._held and not held
        self._held = held

    @property
    def progress(self) -> RunProgress:
        """The progress of the run."""
        return self.run.progress

    def catch_up(self) -> None:
        """Bring the progress of a resumed run to its last evaluation; its state may be older, or newer."""
        progress, stop = self.progress, self.run.settings.stop
        if progress.evaluations:
            progress.rounds, progress.seconds = progress.evaluations[-1].round, progress.evaluations[-1].seconds
        progress.first_hit_seconds, progress.sustained_seconds = hit_times(progress.evaluations, stop.target_accuracy)


class RayScheduler:
    """The workers of a cluster; ``states`` are the last reported states of the runs in progress."""

    def __init__(self, compute: ComputeConfig, pauses: Sequence[float], notes: list[str]) -> None:
        self._compute = compute
        self._pauses = tuple(pauses)
        self._notes = notes
        self.states: dict[RunSpec, RunState] = {}
        self._workers: list[WorkerHandle] = []
        self._calls: dict[Any, WorkerHandle] = {}
        self._remote: dict[RunSpec, RemoteRun] = {}
        self._specs: dict[int, RunSpec] = {}
        self._waiting: deque[RunSpec] = deque()
        self._stored: dict[int, tuple[Any, Any]] = {}  # objects in the store, by the id of their kept original
        self.lost = 0  # workers
        self.helped = 0  # jobs that were trained by a helper

    def events(
        self,
        specs: Sequence[RunSpec],
        started: Mapping[RunSpec, RunState],
        begin: Callable[[RunSpec], Simulation],
        on_resume: OnResume,
        group_of: Callable[[RunSpec], Hashable],
        need_of: Callable[[Sequence[RunSpec]], StateNeed],
        checkpoint_hook: CheckpointHook,
    ) -> Iterator[Event]:
        """Compute all runs and yield their events; ``started`` are the states of resumed runs."""
        connect(self._compute.ray_address)
        self._begin, self._on_resume, self._group_of = begin, on_resume, group_of
        groups: dict[Hashable, list[RunSpec]] = {}
        for spec in specs:
            groups.setdefault(group_of(spec), []).append(spec)
        self._needs = {group: need_of(members) for group, members in groups.items()}
        self._specs = dict(enumerate(specs))
        self._numbers = {spec: number for number, spec in self._specs.items()}
        self._waiting = deque([*started, *(spec for spec in specs if spec not in started)])
        self.states = dict(started)
        left = len(specs)
        try:
            self._start_workers(first=True)
            while left:
                self._assign(left)
                for event in self._receive():
                    left -= isinstance(event, RunFinished)
                    yield event
                self._send_commands()
                checkpoint_hook()
        finally:
            self.stop_workers()

    def stop_workers(self) -> None:
        """Stop all workers."""
        import ray

        for worker in self._workers:
            ray.kill(worker.actor)
        self._workers.clear()
        self._calls.clear()

    # Workers.

    def _start_workers(self, first: bool = False) -> None:
        """Start a worker in every free slot; at the first call, every failure is an error."""
        slots = worker_slots(self._compute.device)
        if first and not slots:
            raise UserError(
                f"the cluster has no node for a worker on {self._compute.device}; add nodes, or use another --device"
            )
        limit = time.monotonic() + START_SECONDS
        for worker, about in [started for node in slots for started in self._start_on(node)]:
            if self._answers(worker, about, limit, first):
                self._workers.append(worker)
                self._listen(worker)
        if first and not self._workers:
            raise UserError(f"no worker started within {START_SECONDS:.0f} s; is the cluster busy? See `ray status`")

    def _start_on(self, slots: WorkerSlots) -> list[tuple[WorkerHandle, Any]]:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        compute = self._compute
        config = WorkerConfig(
            compute.device,
            compute.precision,
            compute.max_batch_jobs,
            compute.memory,
            slots.cores,
            self._pauses,
            STATE_SECONDS,
            loaded_sources(),
        )
        started = []
        for _ in range(slots.workers - sum(worker.slots.node == slots.node for worker in self._workers)):
            kind: Any = ray.remote(RayWorker).options(
                num_cpus=slots.cores,
                num_gpus=1 if compute.device == "cuda" else 0,
                max_concurrency=MAX_CALLS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(slots.node, soft=False),
            )
            actor = kind.remote(config)
            started.append((WorkerHandle(actor, slots), actor.about.remote()))
        return started

    def _answers(self, worker: WorkerHandle, about: Any, limit: float, first: bool) -> bool:
        """Return whether a worker started, with the versions of this process."""
        import ray

        try:
            worker.pid, theirs = ray.get(about, timeout=max(0.1, limit - time.monotonic()))
        except ray.exceptions.RayError as error:
            ray.kill(worker.actor)
            if first and isinstance(error, ray.exceptions.GetTimeoutError):
                self._notes.append(f"a worker on {worker.slots.name} did not start; are its cores in use?")
            elif first:
                message = " ".join(str(error).split())
                raise UserError(f"a worker cannot start on {worker.slots.name}: {message[-300:]}") from None
            return False
        other = [
            f"{name} {theirs.get(name)} there, {ours} here"
            for name, ours in versions().items()
            if theirs.get(name) != ours
        ]
        if other:
            where = worker.slots.name
            raise UserError(f"{where} has other versions ({'; '.join(other)}); install the same on every node")
        return True

    def _listen(self, worker: WorkerHandle) -> None:
        self._calls[worker.actor.messages.remote()] = worker

    def _worker_lost(self, worker: WorkerHandle) -> None:
        """Put the runs of a lost worker back into the queue and start workers where possible."""
        self.lost += 1
        self._workers.remove(worker)
        for spec in reversed(worker.runs):
            self._remote[spec].worker = None
            self._waiting.appendleft(spec)
        limit = time.monotonic() + GRACE_SECONDS
        self._start_workers()
        while not self._workers:
            if time.monotonic() > limit:
                raise UserError("every worker of the cluster is lost; start nodes, then continue with --resume")
            time.sleep(1.0)
            self._start_workers()

    # Runs.

    def _assign(self, left: int) -> None:
        """Assign a run to every idle worker, up to a fair share; workers without a run help the others."""
        fair = -(-left // len(self._workers))
        for worker in sorted(self._workers, key=lambda worker: len(worker.runs)):
            if worker.idle and self._waiting and len(worker.runs) < fair:
                self._assign_run(worker, self._waiting.popleft())
        free = [worker for worker in self._workers if not worker.runs]
        owners = [worker for worker in self._workers if worker.runs]
        for position, owner in enumerate(owners):
            helpers = tuple(worker.actor for worker in free[position :: len(owners)])
            if helpers != owner.helpers:
                owner.helpers = helpers
                owner.actor.set_helpers.remote(list(helpers))

    def _assign_run(self, worker: WorkerHandle, spec: RunSpec) -> None:
        if spec not in self._remote:
            remote = self._remote[spec] = RemoteRun(self._numbers[spec], self._begin(spec))
            if spec in self.states:
                remote.catch_up()
                remote.released = self._on_resume(spec, remote)
        remote = self._remote[spec]
        if spec not in self.states:
            self.states[spec] = RunState(EvalCounters(), 0, None, None, dict(remote.run.executor.versions))
        remote.worker, worker.idle, worker.runs[spec] = worker, False, None
        # The new worker is told of every pause that ended; it then receives the command that drops the run.
        remote.passed = remote.released - (remote.progress.status is Status.DROPPED)
        state, evaluations = self.states[spec], remote.progress.evaluations
        known = tuple(e for e in evaluations if e.round <= state.counters.newest[0])
        reported = evaluations[-1].round if evaluations else -1
        task = self._put_task(remote.run.task)
        group = self._group_of(spec)
        worker.actor.assign.remote(
            RunAssignment(
                remote.number, group, spec.settings, spec.seed, task, state, known, reported, remote.passed,
                remote.held, self._needs[group],
            )
        )  # fmt: skip

    def _put_task(self, task: Task) -> Any:
        """Put a task into the object store once; tasks that share data share its copy there."""
        stored = {each.name: getattr(task, each.name) for each in fields(task)}
        return self._put(task, stored | {name: self._put_data(stored[name]) for name in ("train", "test")})

    def _put_data(self, data: Data) -> StoredData:
        names = tuple(data.inputs) if isinstance(data.inputs, dict) else None
        return names, tuple(self._put(tensor, tensor.numpy()) for tensor in data.tensors)

    def _put(self, original: Any, value: Any) -> Any:
        import ray

        if id(original) not in self._stored:
            self._stored[id(original)] = original, ray.put(value)
        return self._stored[id(original)][1]

    def _receive(self) -> Iterator[Event]:
        import ray

        ready, _ = ray.wait(list(self._calls), num_returns=1, timeout=POLL_SECONDS)
        for call in ready:
            worker = self._calls.pop(call)
            try:
                messages = ray.get(call)
            except ray.exceptions.RayError:
                self._worker_lost(worker)
                continue
            self._listen(worker)
            for kind, *content in messages:
                yield from self._handle(worker, kind, *content)

    def _handle(self, worker: WorkerHandle, kind: str, *content: Any) -> Iterator[Event]:
        if kind == "idle":
            worker.idle = True
        elif kind == "note":
            if content[0] not in self._notes:
                self._notes.append(content[0])
        elif kind == "helped":
            self.helped += content[0]
        elif kind == "failed":
            raise UserError(content[0])
        else:
            yield from self._handle_run(worker, kind, *content)

    def _handle_run(self, worker: WorkerHandle, kind: str, number: int, *content: Any) -> Iterator[Event]:
        spec = self._specs[number]
        remote = self._remote[spec]
        progress, executor = remote.progress, remote.run.executor
        if kind == "state":
            (state,) = content
            self.states[spec] = state
            newest = state.counters.newest[0]
            executor.versions.replace({newest: state.versions[newest]})
        elif kind == "evaluated":
            evaluation, hits = content
            dropped = progress.status is Status.DROPPED  # the worker may not know it yet
            if not dropped and (not progress.evaluations or evaluation.round > progress.evaluations[-1].round):
                progress.evaluations.append(evaluation)
                progress.first_hit_seconds, progress.sustained_seconds = hits
                progress.rounds, progress.seconds = evaluation.round, evaluation.seconds
                yield RunEvaluated(spec, remote.run, evaluation, remote)
        else:
            final, executor.updates_trained, wall_seconds, weights = content
            final.evaluations = progress.evaluations
            remote.run.progress = final = progress if progress.status is Status.DROPPED else final
            executor.versions.replace({final.rounds: weights})
            del worker.runs[spec], self._remote[spec], self.states[spec]
            yield RunFinished(spec, remote.run, wall_seconds)

    def _send_commands(self) -> None:
        """Tell workers which of their paused runs continue and which are dropped."""
        for remote in self._remote.values():
            if remote.worker is None:
                continue
            command = "drop" if remote.progress.status is Status.DROPPED else "continue"
            while remote.passed < remote.released:
                remote.passed += 1
                remote.worker.actor.command.remote(remote.number, command)
