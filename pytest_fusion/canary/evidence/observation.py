"""What is seen of a candidate, run by run, and who decides about it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

# What needs no second time: no honest kernel does any of it even once.
HARD = ("nonfinite", "structure", "inputs", "hang")
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
    """One run of the candidate: ``result`` is ``ok``, ``skipped`` or what was wrong, ``bucket`` its class of shapes.

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
    """Rolls back at the first hard fault, or at ``after`` failures in the last ``window`` runs; never promotes.

    It is told of every run that raised, but of a routed call that did not only where that was verified: ``unseen`` says
    how many served calls nobody told it of. An error is one in ``window`` runs of all; a violation, which shows in
    compared runs alone, one in as many of these.
    """

    def __init__(self, after: int, window: int, unseen: Callable[[], int] = lambda: 0) -> None:
        self._after, self._window, self._unseen = after, window, unseen
        self.clear()

    def clear(self) -> None:
        """Nothing was seen: another rollout, or a forked child."""
        self._told = 0
        # Where among all runs it was an error, among those that it was told of a violation.
        self._errors: deque[int] = deque(maxlen=self._after)
        self._violations: deque[int] = deque(maxlen=self._after)

    def update(self, observation: Observation) -> Decision:
        if observation.result == "skipped":
            return Decision("hold", "not run")
        if observation.result in HARD:
            return Decision("rollback", f"{observation.result}: {observation.reason}")
        self._told += 1
        if observation.result == "ok":
            return Decision("hold")
        ran = self._told + self._unseen()
        if observation.result == "violation":
            self._violations.append(self._told)
        else:
            self._errors.append(ran)
        errors = sum(ran - at < self._window for at in self._errors)
        violations = sum(self._told - at < self._window for at in self._violations)
        if errors + violations < self._after:
            return Decision("hold")
        told = min(self._window, ran if errors else self._told)
        return Decision(
            "rollback",
            f"{errors + violations} failures in the last {told} runs of the candidate, where fewer than "
            f"{self._after} are allowed; the last: {observation.result}: {observation.reason}",
        )
