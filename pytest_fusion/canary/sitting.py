"""`Sitting`: the judge told of a candidate's runs one at a time, in a serving process."""

from __future__ import annotations

from pytest_fusion.canary.evidence import Arm, Collector, Evidence
from pytest_fusion.canary.judge import judge
from pytest_fusion.canary.rule import Decision, Observation
from pytest_fusion.canary.rules import RULES, Rules

# Results of a run by the metric that they count for: a wrong structure, a changed input and a hang are as little to be
# seen as a non-finite value.
_METRIC = {
    "violation": "violation",
    "error": "exception",
    "nonfinite": "fault",
    "structure": "fault",
    "inputs": "fault",
    "hang": "fault",
}
# A run without result shows nothing of the metrics behind it: what raised has no values that could be compared.
_REACHED = {
    "exception": ("exception",),
    "fault": ("exception", "fault"),
    "violation": ("exception", "fault", "violation"),
}


class Sitting:
    """Counts runs and asks the judge: at each one that is not ``"ok"``, and at every ``every``-th that is.

    A skipped run counts as a call that was not compared. Ratios come by ``ratio``; without them the metrics of rules
    that are ratios have no data, and nothing is promoted. Any number of threads may call: no run is lost, and the judge
    may be asked one run late. Raises ``ValueError`` for ``every`` under 1.
    """

    def __init__(self, rollout: str, rules: Rules = RULES, *, every: int = 500) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; the judge is asked at every run, every=1, or less often")
        self._collector = Collector(rollout, rules.scales())
        self._rules = rules
        self._every = every
        self._since = 0
        self._last = Decision("nodata", "no run was seen")

    @property
    def evidence(self) -> Evidence:
        """All that was counted so far."""
        return self._collector.evidence()

    def ratio(self, metric: str, bucket: str, value: float, arm: Arm = "candidate") -> None:
        """A log ratio of candidate to incumbent, or of the incumbent to itself, of one block of calls."""
        self._collector.add(metric, bucket, value, arm)

    def update(self, observation: Observation) -> Decision:
        """What the runs so far, this one included, say. Raises ``KeyError`` for a result that nobody knows."""
        result, bucket = observation.result, observation.bucket
        worse = "" if result in ("ok", "skipped") else _METRIC[result]
        self._collector.call(bucket)
        if result != "skipped":
            for metric in _REACHED[worse or "violation"]:
                self._collector.add(metric, bucket, float(metric == worse))
        self._since += 1
        if worse or self._since >= self._every:
            self._since = 0
            found = judge(self._collector.evidence(), self._rules, intervals=False)
            self._last = Decision(found.decision, found.reasons[0])
        return self._last
