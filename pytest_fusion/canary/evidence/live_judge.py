"""`LiveJudge`: judges a candidate run by run, in a serving process."""

from __future__ import annotations

from pytest_fusion.canary.evidence.evidence_counts import Arm, Collector, Evidence
from pytest_fusion.canary.evidence.observation import Decision, Observation, metrics_of
from pytest_fusion.canary.evidence.promotion_rules import RULES, Rules
from pytest_fusion.canary.evidence.rollout_judge import judge


class LiveJudge:
    """Counts runs, and judges after each one that is not ``"ok"`` and after every ``every``-th that is.

    A skipped run counts as a call that was not compared. Ratios are added by ``ratio``; without them the rules' ratio
    metrics have no data, and nothing is promoted. Any number of threads may call: no run is lost, and the judge may run
    one observation late. Raises ``ValueError`` for ``every`` under 1.
    """

    def __init__(self, rollout: str, rules: Rules = RULES, *, every: int = 500) -> None:
        if every < 1:
            raise ValueError(
                f"every is {every}, and must be 1 or more: the judge runs at each observation, every=1, or less often"
            )
        self._collector = Collector(rollout, rules.scales())
        self._rules = rules
        self._every = every
        self._since = 0
        self._last = Decision("nodata", "no run was seen")

    @property
    def evidence(self) -> Evidence:
        """The evidence so far."""
        return self._collector.evidence()

    def ratio(self, metric: str, bucket: str, value: float, arm: Arm = "candidate") -> None:
        """Adds the log ratio of candidate to incumbent, or of the incumbent to itself, of one block of calls."""
        self._collector.add(metric, bucket, value, arm)

    def update(self, observation: Observation) -> Decision:
        """The decision after all runs, this one included. Raises ``KeyError`` for an unknown result."""
        result, bucket = observation.result, observation.bucket
        found = metrics_of(result)
        self._collector.call(bucket)
        for metric, happened in found.items():
            self._collector.add(metric, bucket, float(happened))
        self._since += 1
        if any(found.values()) or self._since >= self._every:
            self._since = 0
            judgement = judge(self._collector.evidence(), self._rules, intervals=False)
            self._last = Decision(judgement.decision, judgement.reasons[0])
        return self._last
