"""`Observation`: the result of one run of a candidate; judges decide by them, run by run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

# Once is enough for a rollback: no correct kernel does any of these.
HARD = ("nonfinite", "structure", "inputs", "hang")
# The metric that each result counts for.
_METRIC = {"violation": "violation", "error": "exception", **dict.fromkeys(HARD, "fault")}
# A run is an observation of each metric up to the one that happened: what raised has no values to compare.
_METRICS = ("exception", "fault", "violation")


def metrics_of(result: str) -> dict[str, bool]:
    """The metrics that a run is an observation of, and whether each happened. Raises ``KeyError``: unknown result."""
    if result == "skipped":
        return {}
    worse = "" if result == "ok" else _METRIC[result]
    reached = _METRICS[: _METRICS.index(worse) + 1] if worse else _METRICS
    return {metric: metric == worse for metric in reached}


@dataclass(frozen=True, slots=True)
class Observation:
    """One run of the candidate: ``result`` is ``ok``, ``skipped`` or what was wrong, ``bucket`` its class of shapes.
    In arm ``itself`` the incumbent runs in its place. ``beyond`` of the ``elements`` differ by more than is allowed,
    the worst by ``worst`` times that. ``call`` is the noted call, for writing disagreements."""

    result: str
    bucket: str = ""
    reason: str = ""
    elements: int = 0
    beyond: int = 0
    worst: float = 0.0
    arm: Literal["candidate", "itself"] = "candidate"
    call: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Decision:
    """A judge's decision: the verdict ``"rollback"`` trips at once, ``"promote"`` is advice, others continue."""

    verdict: str
    reason: str = ""


class Judge(Protocol):
    """Sees every run, one at a time; its last decision counts."""

    def update(self, observation: Observation) -> Decision:
        """The decision after all observations, this one included."""
        ...


class FirstFaults:
    """Rolls back at the first hard fault, or at ``after`` failures in the last ``window`` runs; never promotes.
    Errors count among all runs, violations among the compared ones. Routed calls are compared only where they are
    verified: ``unseen`` gives the number of the other calls that did not raise."""

    def __init__(self, after: int, window: int, unseen: Callable[[], int] = lambda: 0) -> None:
        self._after, self._window, self._unseen = after, window, unseen
        self.clear()

    def clear(self) -> None:
        """Forgets all runs, for another rollout or in a forked child."""
        self._seen = 0
        # Positions of errors among all runs, and of violations among those seen.
        self._errors: deque[int] = deque(maxlen=self._after)
        self._violations: deque[int] = deque(maxlen=self._after)

    def update(self, observation: Observation) -> Decision:
        if observation.result == "skipped":
            return Decision("hold", "not run")
        if observation.result in HARD:
            return Decision("rollback", f"{observation.result}: {observation.reason}")
        self._seen += 1
        if observation.result == "ok":
            return Decision("hold")
        ran = self._seen + self._unseen()
        if observation.result == "violation":
            self._violations.append(self._seen)
        else:
            self._errors.append(ran)
        errors = sum(ran - at < self._window for at in self._errors)
        violations = sum(self._seen - at < self._window for at in self._violations)
        if errors + violations < self._after:
            return Decision("hold")
        runs = min(self._window, ran if errors else self._seen)
        return Decision(
            "rollback",
            f"{errors + violations} failures in the last {runs} runs of the candidate, where fewer than "
            f"{self._after} are allowed; the last: {observation.result}: {observation.reason}",
        )
