"""The device's activities within a call, and the resource that bounds a faster kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple


class Activity(NamedTuple):
    """An activity of kind ``"kernel"``, ``"memcpy"`` or ``"memset"``; ``start``: seconds after the call's first one."""

    name: str
    kind: str
    start: float
    seconds: float


def busy(timeline: Iterable[Activity]) -> float:
    """Seconds in which anything ran: activities of several streams may overlap."""
    total, reached = 0.0, 0.0
    for one in sorted(timeline, key=lambda activity: activity.start):
        end = one.start + one.seconds
        total += max(0.0, end - max(one.start, reached))
        reached = max(reached, end)
    return total


Bound = Literal["memory", "compute", "launch"]

# The device must work for this share of the time from first to last activity: eager chains of ten small kernels leave
# it idle for half of that time, one kernel for none.
_BUSY = 0.7


def share(work: float | None, seconds: float | None, ceiling: float | None) -> float | None:
    """``work`` (bytes, operations) a second over ``ceiling``; over 1 from a cache; ``None`` without one of them."""
    if not work or not seconds or not ceiling:
        return None
    return work / seconds / ceiling


def bound(
    moved: float | None, flops: float | None, rates: Sequence[float | None], times: Sequence[float | None]
) -> Bound | None:
    """The resource that a faster kernel would have to use better; ``None`` if the measurements do not suffice.
    ``rates``: bytes a second of a copy, flops of a product. ``times``: host, span and busy seconds of one call.
    ``"launch"``: launching takes longer than running, or the device is idle for over three tenths of it. Else moving or
    computing, whichever takes longer at the ceilings."""
    (copy_bytes_per_s, matmul_flops_per_s), (host_s, span_s, busy_s) = rates, times
    if host_s is not None and span_s is not None and host_s > span_s:
        return "launch"
    if busy_s is not None and span_s is not None and busy_s < _BUSY * span_s:
        return "launch"
    if host_s is None or span_s is None or not moved or flops is None or not copy_bytes_per_s:
        return None
    if flops == 0:
        return "memory"
    if not matmul_flops_per_s:
        return None
    return "memory" if moved / copy_bytes_per_s >= flops / matmul_flops_per_s else "compute"
