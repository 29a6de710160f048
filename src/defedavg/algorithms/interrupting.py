"""Rounds at fixed intervals, for which the server interrupts sampled clients."""

from __future__ import annotations

from .base import Actions, SampledRound
from .protocol import ClientPolicy, Discard, Request, Send, ServerAction, SetTimer, Update


class InterruptedRound(SampledRound):
    """After ``settings.wait_seconds``, draw different clients; each sends what it has, and waits for a version.

    If fewer than n clients are left, they are drawn with replacement: with an interruption of all of them at every
    interval, none would have the time to train.
    """

    policy = ClientPolicy(hold_until_requested=True, pause_when_full=True, interruptible=True, allow_same_version=True)
    takes_all_left = False

    # Hooks.

    @property
    def sends_at_draw(self) -> bool:
        """Whether drawn clients receive the newest version with the interruption (hook); else after the merge."""
        return False

    # The round.

    def start(self) -> Actions:
        """Send version 0 to every client, then pause."""
        return [*(Send(client, self.version) for client in range(self.setup.num_clients)), *self.pause()]

    def timer(self, token: int) -> Actions:
        """Open a round after the pause; after a timeout, draw substitutes."""
        if token == self.timer_token and not self.waiting:
            return self.open_round()
        return self._with_versions(super().timer(token))

    def open_round(self) -> Actions:
        """Interrupt the drawn clients, and send them the newest version if they receive it now."""
        return self._with_versions(super().open_round())

    def _with_versions(self, actions: Actions) -> Actions:
        if not self.sends_at_draw:
            return actions
        drawn = [action.client for action in actions if isinstance(action, Request)]
        return [*actions, *(Send(client, self.version) for client in drawn)]

    def returned(self, client: int) -> Actions:
        """Send the newest version to a client that returned."""
        return [Send(client, self.version), *super().returned(client)]

    def with_replacement(self) -> bool:
        """Return False: the clients of a round are distinct, as long as n are left."""
        return False

    def invite(self, client: int) -> ServerAction:
        """Interrupt the client."""
        return Request(client)

    def pause(self) -> Actions:
        """Set the timer for the next draw."""
        self.timer_token += 1
        return [SetTimer(self.timer_token, self.settings.wait_seconds)]

    def on_update(self, update: Update) -> Actions:
        """Discard an update that arrives in the pause, and send its client the newest version if it has none yet."""
        if not self.waiting:
            return [Discard(update), *(() if self.sends_at_draw else [Send(update.client, self.version)])]
        return super().on_update(update)

    def close_round(self) -> Actions:
        """Send the new version to the clients that answered and have none yet, then pause."""
        answered = [] if self.sends_at_draw else sorted({*self.received, *self.late})
        return [*(Send(client, self.version) for client in answered), *self.pause()]
