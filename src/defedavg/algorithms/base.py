"""The server machines that algorithms extend: checks, keyed draws, explicit state, and two ways to fill a round.

``SampledRound`` draws clients and waits for them; ``BufferedRound`` merges any n updates. An algorithm subclasses
one of them, or ``ServerMachine`` itself, and overrides public hooks: whom it invites, how it weights an update, what it
does after a merge.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ..compat import refuse_old_hooks
from ..errors import UserError
from ..rng import below, extend, key
from .client_pool import ClientPool
from .hook_checks import positive
from .machine_state import decode, encode
from .protocol import (
    FROM_VERSION,
    Assignment,
    ClientPolicy,
    Discard,
    Merge,
    ProtocolError,
    Resample,
    ServerAction,
    SetTimer,
    StateSpec,
    StateVector,
    Update,
)  # fmt: skip
from .setup import NoSettings, Setup

Actions = list[ServerAction]
STATE_FORMAT = 1


class ServerMachine:
    """A server machine: it counts versions, checks events, and remembers which clients did not answer.

    ``broadcasts`` must be true for an algorithm that returns ``Broadcast``. A merge may use the newest version, the
    ``past_versions`` before it, and the start versions of the updates it merges; the coefficients of past versions must
    sum to one. A class declares ``requests_once`` if, without timeouts and failures, its instances only merge,
    broadcast and request, and request no client again before its update has arrived: such plans are computed faster.
    Subclasses do not inherit the declaration. A class names the attributes that it adds to its instances in
    ``state_attributes``.

    Vectors that the server keeps from merge to merge are declared by ``state_vectors`` and assigned in merges. A job
    starts from Σ c·x over ``job_start``, where x is the state vector of that name of its client, or the version that
    the client received (``VERSION``); Σ c·x over ``correction`` is added to every gradient of the job.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    citation: ClassVar[str]
    equation: ClassVar[str]
    policy: ClassVar[ClientPolicy]
    settings_type: ClassVar[type[Any]] = NoSettings
    broadcasts: ClassVar[bool] = False
    past_versions: ClassVar[int] = 0
    job_start: ClassVar[tuple[tuple[str, float], ...]] = FROM_VERSION
    correction: ClassVar[tuple[tuple[str, float], ...]] = ()
    server_optimizer: ClassVar[str] = "sgd"
    weightings: ClassVar[tuple[str, ...]] = ("uniform", "samples")
    requests_once: ClassVar[bool] = False
    uses_updates_per_round: ClassVar[bool] = True
    uses_global_lr: ClassVar[bool] = True
    uses_local_lr: ClassVar[bool] = True
    uses_local_steps: ClassVar[bool] = True
    state_attributes: ClassVar[tuple[str, ...]] = ("version", "pool", "last_jobs", "timer_token")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        refuse_old_hooks(cls)

    def __init__(self, setup: Setup, settings: Any = None) -> None:
        self.setup = setup
        self.settings = self.settings_type() if settings is None else settings
        self.version = 0
        self.pool = ClientPool(setup.num_clients)  # clients that answered when they were last waited for
        self.last_jobs: dict[int, int] = {}  # client -> index of its last update
        self.timer_token = 0  # of the only timer that still matters
        self.check_setup()

    @classmethod
    def client_policy(cls, settings: Any) -> ClientPolicy:  # noqa: ARG003 (a hook: subclasses use it)
        """Return how clients behave under these settings."""
        return cls.policy

    @classmethod
    def overlaps_uploads(cls, settings: Any) -> bool:
        """Return whether a client may receive its next version before its update has arrived (hook)."""
        return cls.broadcasts and not cls.client_policy(settings).hold_until_requested

    def policy_with(self, upload: str) -> ClientPolicy:
        """Return how clients behave; ``upload``, one of ``UPLOADS``, applies where training can overlap uploads."""
        policy = self.client_policy(self.settings)
        if upload == "auto" or not self.overlaps_uploads(self.settings):
            return policy
        return replace(policy, background_upload=upload == "background")

    @classmethod
    def unused_training(cls) -> tuple[str, ...]:
        """Return the keys of [training] that have no effect on this algorithm."""
        names = ("updates_per_round", "global_lr", "local_lr", "local_steps")
        return tuple(name for name in names if not getattr(cls, f"uses_{name}"))

    @classmethod
    def refused_training(cls) -> tuple[str, ...]:
        """Return the keys of [training] that this algorithm cannot take: there is no rate or job that they change."""
        local = ("optimizer", "momentum", "nesterov", "prox", "local_schedule")
        return (() if cls.uses_local_lr else local) + (() if cls.uses_global_lr else ("global_schedule",))

    @classmethod
    def steps_per_job(cls, local_steps: int) -> int:
        """Return the local steps of a complete job."""
        return local_steps

    @classmethod
    def updates_per_merge(cls, updates_per_round: int) -> int:
        """Return the updates of a round: one if the algorithm merges every update when it arrives."""
        return updates_per_round if cls.uses_updates_per_round else 1

    @classmethod
    def state_vectors(cls, setup: Setup, settings: Any) -> tuple[StateSpec, ...]:  # noqa: ARG003 (a hook)
        """Return the state vectors that merges assign (hook)."""
        return ()

    @classmethod
    def message_bits(cls, settings: Any) -> int:  # noqa: ARG003 (a hook: subclasses use it)
        """Return the bits per value in a message between server and client (hook)."""
        return 32

    def check_setup(self) -> None:
        """Raise ``UserError`` if the algorithm cannot run with this setup."""
        for word in ("num_clients", "updates_per_round", "local_steps"):
            if (value := getattr(self.setup, word)) < 1:
                raise UserError(f"{word} is {value}; it must be at least 1")

    def require_enough_clients(self, why: str) -> None:
        """Raise ``UserError`` if a round needs more updates than there are clients."""
        n, total = self.setup.updates_per_round, self.setup.num_clients
        if n > total:
            raise UserError(f"{self.name}: updates_per_round is {n} but there are {total} clients; {why}")

    # Events.

    def start(self) -> Actions:
        """Return the first actions; version 0 exists."""
        raise NotImplementedError

    def arrived(self, update: Update) -> Actions:
        """Check an update that arrived, then call ``on_update``."""
        self.check_client(update.client)
        if not 0 <= update.version <= self.version:
            raise ProtocolError(f"an update starts from version {update.version}, but the newest is {self.version}")
        if update.index <= self.last_jobs.get(update.client, -1):
            raise ProtocolError(f"job {update.index} of client {update.client} has already arrived")
        self.last_jobs[update.client] = update.index
        self.pool.add(update.client)
        return self.on_update(update)

    def on_update(self, update: Update) -> Actions:
        """React to an update that has been checked (hook)."""
        raise NotImplementedError

    def timer(self, token: int) -> Actions:  # noqa: ARG002 (a hook: subclasses use it)
        """React to a timer; ignore one whose token no longer matters."""
        return []

    def end_of_instant(self) -> Actions:
        """React once all events of one instant have been handled (see ``EndOfInstant``)."""
        return []

    def returned(self, client: int) -> Actions:
        """React to a client that is reachable again after a failure."""
        self.check_client(client)
        self.pool.add(client)
        return []

    # State.

    @classmethod
    def attributes(cls) -> list[str]:
        """Return the names of all attributes that later decisions depend on."""
        return [name for kind in reversed(cls.__mro__) for name in vars(kind).get("state_attributes", ())]

    def state(self) -> dict[str, Any]:
        """Return a JSON record from which ``restore`` continues with the same decisions."""
        missing = sorted(vars(self).keys() - {"setup", "settings", *self.attributes()})
        if missing:
            raise UserError(f"{self.name}: {', '.join(missing)} would not be saved; add to state_attributes")
        try:
            values = {name: encode(getattr(self, name)) for name in self.attributes()}
        except TypeError as error:
            raise UserError(f"{self.name}: {error}; keep numbers, strings, updates and collections of them") from None
        return {"format": STATE_FORMAT, "algorithm": self.name, **values}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a record that ``state`` returned."""
        found = state.get("format"), state.get("algorithm"), sorted(state.keys() - {"format", "algorithm"})
        if found != (STATE_FORMAT, self.name, sorted(self.attributes())):
            raise UserError(f"the saved state is not one of {self.name!r} in format {STATE_FORMAT}; it cannot be used")
        for name in self.attributes():
            setattr(self, name, decode(state[name]))

    # Helpers.

    def check_client(self, client: int) -> None:
        """Raise ``ProtocolError`` for a client number that is out of range."""
        if not 0 <= client < self.setup.num_clients:
            raise ProtocolError(f"client {client} is not one of the {self.setup.num_clients} clients")

    def merge(
        self, updates: Iterable[tuple[Update, float]], past: Iterable[tuple[int, float]] | None = None, *,
        states: Iterable[tuple[StateVector, float]] = (), before: Iterable[Assignment] = (),
        after: Iterable[Assignment] = (), rate_scale: float = 1.0,
    ) -> Merge:  # fmt: skip
        """Increment the version and return its merge, in an order that does not depend on the order of arrival."""
        totals: dict[int, float] = {}
        for version, weight in ((self.version, 1.0),) if past is None else past:
            totals[int(version)] = totals.get(int(version), 0.0) + float(weight)  # they may be numbers of NumPy
        self.version += 1
        coefficients = ((update, float(weight)) for update, weight in updates)
        ordered = sorted(coefficients, key=lambda pair: (pair[0].client, pair[0].index))
        terms = tuple(sorted(totals.items())), tuple(ordered), tuple(states)
        return Merge(self.version, *terms, tuple(before), tuple(after), float(rate_scale))

    def share_of(self, client: int) -> float:
        """Return the share of a client in all training samples: 1/N if all clients have the same weight."""
        return 1.0 / self.setup.num_clients if self.setup.shares is None else self.setup.shares[client]

    def suspect(self, clients: Iterable[int]) -> None:
        """Exclude clients from draws until an update of theirs arrives; if no client remains, include all again."""
        for client in clients:
            self.pool.remove(client)
        if not len(self.pool):
            self.pool = ClientPool(self.setup.num_clients)

    def start_timeout(self) -> Actions:
        """Start the timeout of a round, if there is one; earlier timers no longer matter."""
        self.timer_token += 1
        seconds = self.setup.timeout_seconds
        return [] if seconds is None else [SetTimer(self.timer_token, seconds)]


class SampledRound(ServerMachine):
    """A round that waits for all clients it draws; one drawn twice counts twice. If too few are left, it has fewer."""

    state_attributes: ClassVar[tuple[str, ...]] = ("multiplicity", "waiting", "received", "late", "draws")
    takes_all_left: ClassVar[bool] = True  # without replacement, if fewer than n are left; else some may count twice

    def __init__(self, setup: Setup, settings: Any = None) -> None:
        super().__init__(setup, settings)
        self.multiplicity: Counter[int] = Counter()  # client -> how often it was drawn
        self.waiting: set[int] = set()
        self.received: dict[int, Update] = {}
        self.late: dict[int, Update] = {}  # arrived too late; merged if their client is drawn again in this round
        self.draws = 0  # in this round

    def check_setup(self) -> None:
        """Also refuse more draws than clients where a client is drawn at most once."""
        super().check_setup()
        if not self.with_replacement():
            self.require_enough_clients("clients are drawn without replacement, so lower it")

    # Hooks.

    def with_replacement(self) -> bool:
        """Return whether a client can be drawn twice in a round (hook)."""
        return True

    def invite(self, client: int) -> ServerAction:
        """Return the message to a client that was drawn (hook)."""
        raise NotImplementedError

    def accepts(self, update: Update) -> bool:  # noqa: ARG002 (a hook: subclasses use it)
        """Return whether an update can be merged at all (hook)."""
        return True

    def combine(self, received: list[tuple[Update, int]]) -> Merge:
        """Return the merge of a complete round, from its updates and how often each client was drawn (hook)."""
        if self.setup.shares is None:
            n = sum(count for _, count in received)  # fewer than the setting if clients are missing
            return self.merge((update, -count / n) for update, count in received)
        weighted = [(update, count * self.share_of(update.client)) for update, count in received]
        total = math.fsum(weight for _, weight in weighted)
        return self.merge((update, -weight / total) for update, weight in weighted)

    def close_round(self) -> Actions:
        """Return the actions after a merge (hook): open the next round."""
        return self.open_round()

    # The round.

    def draw(self, count: int) -> list[int]:
        """Draw clients from the pool by key."""
        start = key(self.setup.seed, "draw", self.version, self.draws)
        self.draws += 1
        if self.with_replacement() or (count > len(self.pool) and not self.takes_all_left):
            return [self.pool[below(extend(start, slot), len(self.pool))] for slot in range(count)]
        return self.pool.sample(min(count, len(self.pool)), start)

    def draw_again(self, count: int) -> list[int]:
        """Draw substitutes; without replacement, from the clients that have not answered, if there are any."""
        answered = [] if self.with_replacement() else [c for c in sorted(self.received) if c in self.pool]
        if len(answered) == len(self.pool) and not self.takes_all_left:
            answered = []
        for client in answered:
            self.pool.remove(client)
        drawn = self.draw(count)
        for client in answered:
            self.pool.add(client)
        return drawn

    def open_round(self) -> Actions:
        """Draw the clients of a round and invite them."""
        unused = [Discard(update) for update in self.late.values()]
        self.draws = 0
        self.received, self.late = {}, {}
        self.multiplicity = Counter(self.draw(self.setup.updates_per_round))
        self.waiting = set(self.multiplicity)
        return [*unused, *(self.invite(client) for client in sorted(self.waiting)), *self.start_timeout()]

    def on_update(self, update: Update) -> Actions:
        """Count an update that the round waits for; keep one that came too late."""
        if not self.accepts(update):
            return [Discard(update)]
        if update.client not in self.waiting:
            older = self.late.get(update.client)
            self.late[update.client] = update
            return [] if older is None else [Discard(older)]
        self.waiting.remove(update.client)
        self.received[update.client] = update
        return self.finish_round() if not self.waiting else []

    def finish_round(self) -> Actions:
        """Merge a complete round."""
        merge = self.combine([(update, self.multiplicity[client]) for client, update in self.received.items()])
        self.timer_token += 1  # the timeout of this round no longer matters
        return [merge, *self.close_round()]

    def returned(self, client: int) -> Actions:
        """Invite again a client that the round waits for: it lost its job."""
        super().returned(client)
        return [self.invite(client)] if client in self.waiting else []

    def timer(self, token: int) -> Actions:
        """After a timeout, draw substitutes for the clients that did not answer."""
        if token != self.timer_token or not self.waiting:
            return []
        missing = sorted(self.waiting)
        count = sum(self.multiplicity.pop(client) for client in missing)
        self.suspect(missing)
        drawn = self.draw_again(count)
        self.multiplicity.update(drawn)
        self.received |= {client: self.late.pop(client) for client in set(drawn) & set(self.late)}
        self.waiting = set(self.multiplicity) - set(self.received)
        resample = Resample(tuple(missing), tuple(drawn))
        if not self.waiting:
            return [resample, *self.finish_round()]
        return [resample, *(self.invite(client) for client in sorted(self.waiting)), *self.start_timeout()]


class BufferedRound(ServerMachine):
    """A round that is complete when any n updates have arrived."""

    state_attributes: ClassVar[tuple[str, ...]] = ("buffer",)

    def __init__(self, setup: Setup, settings: Any = None) -> None:
        super().__init__(setup, settings)
        self.buffer: list[Update] = []

    def weight(self, update: Update) -> float:  # noqa: ARG002 (a hook: subclasses use it)
        """Return the weight of an update relative to the others, above zero (hook)."""
        return 1.0

    def after_merge(self) -> Actions:
        """Return the actions after a merge (hook)."""
        return []

    def on_update(self, update: Update) -> Actions:
        """Buffer an update; merge when the buffer is full."""
        self.buffer.append(update)
        return self.finish_round() if len(self.buffer) >= self.updates_per_merge(self.setup.updates_per_round) else []

    def finish_round(self) -> Actions:
        """Merge what the buffer holds."""
        buffer, self.buffer = self.buffer, []
        return [self.combine(buffer), *self.after_merge()]

    def combine(self, buffer: list[Update]) -> Merge:
        """Return the merge of a full buffer (hook); weights are read before it increments the version."""
        shares = [1.0 if self.setup.shares is None else self.share_of(update.client) for update in buffer]
        total, weights = math.fsum(shares), [positive("weight()", self.weight(u)) for u in buffer]
        return self.merge((u, -weight * s / total) for u, weight, s in zip(buffer, weights, shares, strict=True))
