"""Ringmaster ASGD: asynchronous SGD that never uses an update with a staleness of R or more.

Maranjyan, Tyurin, Richtárik: Ringmaster ASGD: The First Asynchronous SGD with Optimal Time Complexity (ICML 2025).

    an update with staleness τ arrives:  w[t+1] = w[t] − η · Δ if τ < R, otherwise it is discarded;
    in both cases its client starts from the newest version

With stop = true (the paper's variant with calculation stops), a client whose running job reaches staleness R receives
the newest version at once. It stops the job, which is lost, and trains from that version. The paper derives R from the
noise and the accuracy that is wanted; here it is a setting, by default twice the concurrency. In a deployment a client
learns of a stop at the next exchange of messages. The paper has one gradient per message; here a job has local steps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from .base import Actions
from .dispatching import EveryArrival
from .protocol import ClientPolicy, Request, Send, Update
from .setting_checks import check_concurrency
from .setup import Setup

STOPPING = ClientPolicy(hold_until_requested=True, restart_on_model=True)


@dataclass(frozen=True, slots=True)
class RingmasterSettings:
    """Which updates are too stale, and whether their jobs are stopped."""

    concurrency: int = field(default=0, metadata={"help": "clients that train concurrently; 0: all"})
    threshold: int = field(default=0, metadata={"help": "R: updates of this staleness are discarded; 0: 2·concurrency"})
    stop: bool = field(default=False, metadata={"help": "stop jobs when their staleness reaches the threshold"})

    def __post_init__(self) -> None:
        check_concurrency("ringmaster", self.concurrency)
        if self.threshold < 0:
            raise UserError(f"ringmaster: threshold is {self.threshold}; give a number of merges, or 0: 2·concurrency")


class Ringmaster(EveryArrival):
    """Asynchronous SGD with a bound on the staleness."""

    name = "ringmaster"
    summary = "asynchronous: every arrival is merged unless it is too stale; jobs that become too stale may be stopped"
    citation = "Maranjyan et al., ICML 2025"
    equation = "w[t+1] = w[t] − η·Δ if τ < R"
    settings_type = RingmasterSettings
    state_attributes = ("sent",)

    def __init__(self, setup: Setup, settings: Any = None) -> None:
        super().__init__(setup, settings)
        self.sent: dict[int, int] = {}  # client -> the version it received last, oldest first

    @classmethod
    def client_policy(cls, settings: Any) -> ClientPolicy:
        """Return the policy of clients whose jobs can be stopped, or that send when they finish."""
        return STOPPING if settings.stop else cls.policy

    @property
    def threshold(self) -> int:
        """R: the staleness from which on an update is discarded."""
        return int(self.settings.threshold) or 2 * self.concurrency

    def accepts(self, update: Update) -> bool:
        """Return whether the staleness is below the threshold."""
        return self.staleness(update) < self.threshold

    def invite(self, client: int) -> Actions:
        """Send the newest version; where jobs can be stopped, also request the update of the client."""
        return [self.send_newest(client), Request(client)] if self.settings.stop else super().invite(client)

    def send_newest(self, client: int) -> Send:
        """Send the newest version and note it; a running job stops."""
        self.sent.pop(client, None)
        self.sent[client] = self.version
        return Send(client, self.version)

    def end_of_instant(self) -> Actions:
        """Stop the jobs that have become too stale, then start idle clients."""
        too_old = self.version - self.threshold
        stale = list(itertools.takewhile(lambda client: self.sent[client] <= too_old, self.sent))
        stopped = [self.send_newest(client) for client in stale if client in self.active]
        for client in set(stale) - self.active.keys():
            del self.sent[client]
        return [*stopped, *super().end_of_instant()]

    def on_update(self, update: Update) -> Actions:
        """Handle an update; a client that was sent a newer version meanwhile keeps training from that one."""
        dispatch = self.active.get(update.client)
        actions = super().on_update(update)
        if dispatch is None or update.version >= self.sent.get(update.client, 0):
            return actions
        self.active[update.client] = dispatch
        self.pool.remove(update.client)
        return [*actions, Request(update.client)]
