"""The request that a call belongs to, which decides the kernel that serves it; the sample of calls to compare."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from pytest_fusion.canary.live.policy import Mode, Policy
from pytest_fusion.case import counter_random

# Random numbers drawn at once: one by one they took 0.5 us a call, a third of a canary in shadow.
_AT_ONCE_BITS = 10

# The key of the request that is running.
REQUEST: ContextVar[str | None] = ContextVar("pytest_fusion_canary_request", default=None)


@contextmanager
def request(key: object) -> Iterator[None]:
    """Assigns the calls inside to the request ``key``: one kernel serves all of them while the share holds.

    Use the request's own id, the same on every rank of a tensor-parallel group: ranks that decide differently diverge.
    """
    token = REQUEST.set(str(key))
    try:
        yield
    finally:
        REQUEST.reset(token)


def position(seed: str, key: str) -> int:
    """A hash of the key, 0 to 2^64-1, the same in every process: keys below `threshold` belong to the share."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{key}".encode("utf-8", "replace"), digest_size=8).digest())


def threshold(share: float) -> int:
    """The bound below which ``share`` of all positions and of all ``counter_random.element`` numbers are."""
    return round(share * (1 << 64))


class CallSampler:
    """Decides for each call of a canary in this process which kernel serves it and whether it is compared."""

    def __init__(self, name: str, rollout: str, policy: Policy) -> None:
        self._seed = f"{policy.salt}\0{name}\0{rollout}"
        process = f"{socket.gethostname()}:{os.getpid()}"
        self._replica = (policy.replica or process) if policy.by == "process" else None
        self._tickets = position(self._seed, process)
        self.sample = position(self._seed, "sample")
        self._drawn: tuple[int, float, frozenset[int]] = (-1, 0.0, frozenset())

    def serves(self, mode: Mode, key: str | None, ticket: int) -> bool:
        """Whether the candidate serves the call number ``ticket``, which belongs to request ``key``."""
        if mode.state == "full":
            return True
        if mode.state != "route":
            return False
        key = self._replica or key
        where = position(self._seed, key) if key is not None else counter_random.element(self._tickets, ticket)
        return where < threshold(mode.share)

    def sampled(self, ticket: int, share: float) -> bool:
        """Whether the call number ``ticket`` is in a random sample of ``share`` of all calls."""
        block, of, chosen = self._drawn
        if block != ticket >> _AT_ONCE_BITS or of != share:
            block = ticket >> _AT_ONCE_BITS
            first = block << _AT_ONCE_BITS
            # A part of the stream for each block, so that threads may come in any order.
            drawn = np.random.Generator(np.random.Philox(key=self.sample, counter=first)).random(1 << _AT_ONCE_BITS)
            chosen = frozenset((np.nonzero(drawn < share)[0] + first).tolist())
            self._drawn = block, share, chosen
        return ticket in chosen
