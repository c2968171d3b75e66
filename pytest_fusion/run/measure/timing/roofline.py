"""What the device did within a call, and which bound of the device a faster kernel would have to use better."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple


class Activity(NamedTuple):
    """Its name and ``kind`` (``"kernel"``, ``"memcpy"``, ``"memset"``), and when, in seconds.

    ``start`` counts from the beginning of the first one of the call.
    """

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

# Of the time from a call's first activity to its last, the part in which the device must work: eager chains of ten
# small kernels leave it idle for half of that time, one kernel for none.
_BUSY = 0.7


def share(work: float | None, seconds: float | None, ceiling: float | None) -> float | None:
    """``work`` (bytes or operations) in ``seconds`` as a share of ``ceiling`` (the same a second).

    Above 1 where data came from a cache; ``None`` where one of them is not known, or there was no work.
    """
    if not work or not seconds or not ceiling:
        return None
    return work / seconds / ceiling


def bound(
    *,
    bytes_moved: float | None,
    flops: float | None,
    copy_bytes_per_s: float | None,
    matmul_flops_per_s: float | None,
    host_s: float | None,
    span_s: float | None,
    busy_s: float | None,
) -> Bound | None:
    """The resource that a faster kernel would have to use better.

    ``"launch"``: the host takes longer to ask for the call than the device to make it, or the device is idle for more
    than three tenths of it. Else whichever of moving and computing takes longer at the ceilings. ``None`` where
    what is needed to tell was not measured.
    """
    if host_s is not None and span_s is not None and host_s > span_s:
        return "launch"
    if busy_s is not None and span_s is not None and busy_s < _BUSY * span_s:
        return "launch"
    if host_s is None or span_s is None or not bytes_moved or flops is None or not copy_bytes_per_s:
        return None
    if flops == 0:
        return "memory"
    if not matmul_flops_per_s:
        return None
    return "memory" if bytes_moved / copy_bytes_per_s >= flops / matmul_flops_per_s else "compute"
