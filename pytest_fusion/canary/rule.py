"""What is seen of a candidate, run by run, and who decides about it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

# What needs no second time: no honest kernel does any of it even once.
HARD = ("nonfinite", "structure", "inputs", "hang")
RESULTS = ("ok", "violation", "nonfinite", "structure", "inputs", "error", "hang", "skipped")
# Results by the metric that they count for: a wrong structure, a changed input and a hang are as little to be seen as a
# non-finite value.
_METRIC = {"violation": "violation", "error": "exception", **dict.fromkeys(HARD, "fault")}
# A run without result shows nothing of the metrics behind it: what raised has no values that could be compared.
_REACHED = {
    "exception": ("exception",),
    "fault": ("exception", "fault"),
    "violation": ("exception", "fault", "violation"),
}


def metrics_of(result: str) -> dict[str, bool]:
    """The metrics that a run is an observation of, and whether it happened. Raises ``KeyError``: unknown result."""
    if result == "skipped":
        return {}
    worse = "" if result == "ok" else _METRIC[result]
    return {metric: metric == worse for metric in _REACHED[worse or "violation"]}


@dataclass(frozen=True, slots=True)
class Observation:
    """One run of the candidate: ``result`` is one of ``RESULTS``, ``bucket`` the class of its shapes.

    ``arm`` is ``"itself"`` where it was the incumbent that ran again, in the candidate's place.

    ``squared_difference`` and ``squared_incumbent`` are sums over the ``elements`` of the outputs, ``worst`` the
    largest difference as a multiple of what is allowed, ``beyond`` how many elements differ by more than that. ``call``
    is what was noted of the call, for who keeps disagreements; a judge has no use for it.
    """

    result: str
    bucket: str = ""
    reason: str = ""
    elements: int = 0
    beyond: int = 0
    worst: float = 0.0
    squared_difference: float = 0.0
    squared_incumbent: float = 0.0
    arm: Literal["candidate", "itself"] = "candidate"
    call: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Decision:
    """``verdict`` is that of ``judge``: ``"rollback"`` trips at once, ``"promote"`` is an advice, all others go on."""

    verdict: str
    reason: str = ""


class Judge(Protocol):
    """Told of every run, one at a time; what it says last counts."""

    def update(self, observation: Observation) -> Decision:
        """What the observations so far, this one included, say."""
        ...


class FirstFaults:
    """Rolls back at the first hard fault, or at ``after`` failures in the last ``window`` runs; never promotes."""

    def __init__(self, after: int, window: int) -> None:
        self._after = after
        self._recent: deque[bool] = deque(maxlen=window)

    def update(self, observation: Observation) -> Decision:
        if observation.result == "skipped":
            return Decision("hold", "not run")
        if observation.result in HARD:
            return Decision("rollback", f"{observation.result}: {observation.reason}")
        self._recent.append(observation.result != "ok")
        failed = sum(self._recent) if observation.result != "ok" else 0
        if failed >= self._after:
            return Decision(
                "rollback",
                f"{failed} failures in the last {len(self._recent)} runs of the candidate, where fewer than "
                f"{self._after} are allowed; the last: {observation.result}: {observation.reason}",
            )
        return Decision("hold")
