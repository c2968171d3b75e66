"""`Budget`: how much of a GPU's time goes into looking at the candidate."""

from __future__ import annotations

import time
from collections.abc import Callable

# So much time's share may be spent before it has passed: a burst of calls is looked at like any others.
_AHEAD_S = 1.0


class Budget:
    """``share`` of the time that passes may be spent; what was spent beyond it is paid back by waiting.

    ``open`` is for any thread, ``spend`` for one. A share of 1 is no limit. What a call costs is known only after it,
    so an interval may be overspent, and the next ones are shut until that is paid back.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._clock = clock
        self._left = share * _AHEAD_S
        self._at = clock()

    @property
    def open(self) -> bool:
        """Whether another call may be looked at now."""
        return self._share >= 1 or self._left > 0

    def spend(self, seconds: float) -> None:
        """So many seconds of a GPU were spent since the last time."""
        now = self._clock()
        self._left = min(self._share * _AHEAD_S, self._left + self._share * (now - self._at)) - seconds
        self._at = now
