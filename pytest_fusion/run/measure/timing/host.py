"""Calls that the CPU itself computes, timed by the host's clock in batches long enough for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pytest_fusion.run.pristine import perf_counter

# A sample lasts at least so long: reading the clock takes some 50 ns, which must not count.
SHORTEST_S = 1e-4
# The clock may stand still in a test's hands; a batch grows no further.
_MOST = 1 << 20


@dataclass(slots=True)
class HostTimed:
    """A batch of ``calls`` that can be run again; ``timer`` names what timed it."""

    calls: int
    _call: Callable[[], Any]
    timer: Literal["host"] = "host"

    def seconds(self) -> float:
        """Host seconds a call, over one run of the batch."""
        return _batch(self._call, self.calls) / self.calls


def host_timed(call: Callable[[], Any]) -> HostTimed:
    """``call`` as something to time, in batches of ``SHORTEST_S`` or more. Raises what it raises."""
    calls = 1
    call()
    while _batch(call, calls) < SHORTEST_S and calls < _MOST:
        calls *= 2
    return HostTimed(calls, call)


def _batch(call: Callable[[], Any], calls: int) -> float:
    begun = perf_counter()
    for _ in range(calls):
        call()
    return perf_counter() - begun
