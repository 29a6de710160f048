"""What a model is evaluated on per client: samples that the client holds out, or the test samples of its user.

The draw of the held-out samples depends on the seed, on the share and on which samples a client has: not on its speed,
its number or the order of its samples.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from .. import rng as keyed
from ..errors import UserError
from .lazy_partition import LazyPartition
from .samples import Data
from .task import ClientTests, Task
from .users import Ids, Users, indices_by_group, random_ranks


def hold_out(task: Task, share: float, seed: int) -> Task:
    """Return the same task where every client holds out a share of its training samples for its own evaluation.

    The number is rounded, and at least one sample stays for training, so a small client may have none held out.
    """
    if not 0 < share < 1:
        raise UserError(f"the share of samples that clients hold out is {share}; give a number above 0 and below 1")
    if isinstance(task.clients, LazyPartition):
        raise UserError(
            "task.client_test_share needs clients with samples of their own, and in this split clients share samples; "
            "use another split, such as iid or classes"
        )
    samples = np.concatenate(task.clients)
    sizes = np.array([len(indices) for indices in task.clients])
    owners = np.repeat(np.arange(len(sizes)), sizes)
    ranks = random_ranks(owners, keyed.extend_all(keyed.key(seed, "client-test"), samples))
    tested = ranks < np.minimum(np.floor(share * sizes + 0.5), sizes - 1)[owners]
    if not tested.any():
        most = int(sizes.max())
        raise UserError(
            f"task.client_test_share is {share:g}, but no client has more than {most} samples, too few to hold one "
            "out; raise it, or use fewer clients"
        )
    ends = np.cumsum(sizes)[:-1]
    held = tuple(np.sort(part[chosen]) for part, chosen in zip(task.clients, np.split(tested, ends), strict=True))
    kept = tuple(part[~chosen] for part, chosen in zip(task.clients, np.split(tested, ends), strict=True))
    return dataclasses.replace(task, clients=kept, client_tests=ClientTests.of("train", held))


def tests_of_users(users: Users, clients: tuple[NDArray[np.int64], ...] | LazyPartition) -> ClientTests | None:
    """Return the test samples of the users that are clients, or of all test users if none of them is a client.

    Return None if the test samples have no users, or if some client has samples of several users.
    """
    if users.test is None or isinstance(clients, LazyPartition):
        return None
    if any((users.train[samples] != users.train[samples[0]]).any() for samples in clients):
        return None
    names, groups = np.unique(users.test, return_inverse=True)
    samples = dict(zip(names.tolist(), indices_by_group(groups.astype(np.int64)), strict=True))
    of_clients = _first(users.train, clients)
    if any(name in samples for name in of_clients):
        nothing = np.empty(0, np.int64)
        return ClientTests.of("test", tuple(samples.get(name, nothing) for name in of_clients), of_clients)
    return ClientTests("test", tuple(samples.values()), (None,) * len(samples), tuple(map(str, samples)))


def _first(users: Ids, clients: tuple[NDArray[np.int64], ...]) -> list[int | str]:
    """Return the user of every client."""
    return list(users[[int(samples[0]) for samples in clients]].tolist())


def tested_data(task: Task, tests: ClientTests) -> Data:
    """Return the data that the samples of the tests belong to."""
    return task.train if tests.part == "train" else task.test
