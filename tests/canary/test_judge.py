"""The canary's verdicts: promote only on evidence, back for one bucket alone, hold and nodata where nobody can tell."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from benchmarks.canary.rollouts import BAD, EQUAL, NEARLY, Candidate, served, shadowed
from pytest_fusion.canary.evidence.evidence_counts import Collector, Evidence
from pytest_fusion.canary.evidence.promotion_rules import LATENCY, METRICS, RULES, Metric, Rules
from pytest_fusion.canary.evidence.rollout_judge import Finding, judge
from pytest_fusion.canary.evidence.sequential import RATE
from tests.sweeps import sweep

# Calls enough for every metric, of which 1 % are as many as a bucket needs.
CALLS = 60_000
SHARES = {"small": 0.69, "large": 0.30, "huge": 0.01}


def service(
    calls: int = CALLS,
    events: Mapping[tuple[str, str], int] | None = None,
    ratios: Mapping[tuple[str, str], float] | None = None,
    itself: tuple[int, float] = (100, 0.0),
    unseen: tuple[str, ...] = (),
) -> Evidence:
    """Every call of three buckets compared; ``events`` and log ``ratios`` by metric and bucket, others are equal."""
    collector = Collector("r1", RULES.scales())
    for bucket, share in SHARES.items():
        many = round(calls * share)
        collector.call(bucket, many)
        for metric in METRICS:
            key = (metric.name, bucket)
            if metric.name in unseen or not many:
                continue
            if metric.scale == RATE:
                bad = (events or {}).get(key, 0)
                collector.add(metric.name, bucket, 0.0, many=many - bad)
                collector.add(metric.name, bucket, 1.0, many=bad)
            elif blocks := many // 20:
                middle = (ratios or {}).get(key, 0.0)
                collector.add(metric.name, bucket, middle - 0.01, many=blocks // 2)
                collector.add(metric.name, bucket, middle + 0.01, many=blocks - blocks // 2)
    collector.add("latency_ratio", "small", itself[1], arm="itself", many=itself[0])
    return collector.evidence()


def found(evidence: Evidence, metric: str, bucket: str | None = None, rules: Rules = RULES) -> Finding:
    return next(one for one in judge(evidence, rules).findings if (one.metric, one.bucket) == (metric, bucket))


def test_an_equal_candidate_is_promoted() -> None:
    """With nothing wrong in 60,000 calls, every metric is shown to be good enough, in every bucket."""
    judgement = judge(service())

    assert judgement.decision == "promote"
    assert {one.status for one in judgement.findings} == {"pass"}
    assert "violation: a rate of 0 in 60000 observations, shown to be under a rate of 0.0001" in judgement.reasons


def test_a_better_one_is_called_better_and_promoted() -> None:
    """10 % faster everywhere is shown to be faster."""
    evidence = service(ratios={("latency_ratio", bucket): math.log(0.9) for bucket in SHARES})

    assert judge(evidence).decision == "promote"
    assert found(evidence, "latency_ratio").status == "better"
    assert found(evidence, "latency_ratio").high < 0


@pytest.mark.parametrize(
    ("events", "where"),
    [
        ({("fault", "huge"): 1}, "fault: a rate of"),
        ({("violation", "huge"): 12}, "violation in bucket 'huge'"),
        ({("violation", "small"): 20}, "violation: a rate of"),
        ({("exception", "huge"): 60}, "exception in bucket 'huge'"),
    ],
)
def test_a_critical_metric_that_is_worse_sends_back(events: dict[tuple[str, str], int], where: str) -> None:
    """One fault, violations or exceptions beyond the accepted rate, in all or in the rarest bucket: rollback."""
    judgement = judge(service(events=events))

    assert judgement.decision == "rollback"
    assert any(reason.startswith(where) for reason in judgement.reasons)


def test_a_bucket_that_is_slow_alone_sends_back() -> None:
    """20 % slower in a bucket of 1 % of the traffic is 0.2 % over all calls, and still not accepted."""
    evidence = service(10 * CALLS, ratios={("latency_ratio", "huge"): math.log(1.2)})
    judgement = judge(evidence)

    assert judgement.decision == "rollback"
    assert [reason.partition(":")[0] for reason in judgement.reasons] == ["latency_ratio in bucket 'huge'"]
    assert found(evidence, "latency_ratio").status == "pass"


def test_a_candidate_that_fails_from_the_first_call_is_back_at_once() -> None:
    """No least number of observations protects a candidate that raises on each of its first three calls."""
    collector = Collector("r1", RULES.scales())
    collector.call("small", 3)
    collector.add("exception", "small", 1.0, many=3)

    assert judge(collector.evidence()).decision == "rollback"


def test_an_ordinary_metric_that_is_worse_holds() -> None:
    """30 % less accurate is not promoted, and not sent back as long as every value is within its tolerance."""
    evidence = service(ratios={("error_ratio", bucket): math.log(1.3) for bucket in SHARES})
    judgement = judge(evidence)

    assert judgement.decision == "hold"
    assert judgement.reasons[0].startswith("error_ratio: +")
    assert found(evidence, "error_ratio").estimate == pytest.approx(math.log(1.3), abs=0.004)


def test_a_muted_metric_has_no_say() -> None:
    """A dry run is reported, and the verdict is as without it."""
    metrics = tuple(replace(one, role="muted") if one.name == "latency_ratio" else one for one in METRICS)
    slow = service(ratios={("latency_ratio", bucket): math.log(1.2) for bucket in SHARES})

    assert judge(slow).decision == "rollback"
    assert judge(slow, Rules(metrics=metrics)).decision == "promote"
    assert found(slow, "latency_ratio", rules=Rules(metrics=metrics)).status == "worse"


def test_without_calls_there_is_no_verdict() -> None:
    """Nothing seen is nodata, and neither a pass nor a failure."""
    judgement = judge(Evidence("r1"))

    assert judgement.decision == "nodata"
    assert len(judgement.reasons) == len(METRICS)


def test_most_metrics_without_data_are_no_data() -> None:
    """With two metrics of five, what is missing is named; with four it is a hold that names the fifth."""
    two = judge(service(unseen=("fault", "error_ratio", "exception")))
    four = judge(service(unseen=("error_ratio",)))

    assert two.decision == "nodata"
    assert "fault: 0 observations, and 300 are needed" in two.reasons
    assert four.decision == "hold"
    assert four.reasons[0] == "error_ratio: 0 observations, and 50 are needed"


def test_too_few_calls_hold_and_say_how_many_it_takes() -> None:
    """40,000 clean calls show no rate under 1 in 10,000 at 1 %."""
    judgement = judge(service(40_000))

    assert judgement.decision == "hold"
    assert any(reason.startswith("violation:") and "52981 without one do" in reason for reason in judgement.reasons)


def test_a_bucket_without_comparisons_holds() -> None:
    """A bucket with 1 % of the calls and none compared is not covered by the others."""
    evidence = service()
    gone = {cell: tally for cell, tally in evidence.tallies.items() if cell.bucket != "huge"}
    judgement = judge(replace(evidence, tallies=gone))

    assert judgement.decision == "hold"
    assert "violation in bucket 'huge': 0 observations, and 300 are needed" in judgement.reasons


def test_a_bucket_that_is_compared_less_than_it_occurs_holds() -> None:
    """Where half of the calls are a tenth of the comparisons, their mean is not that of the traffic."""
    evidence = service()
    judgement = judge(replace(evidence, calls={"small": 41_400, "large": 400_000, "huge": 4_500}))

    assert judgement.decision == "hold"
    assert any("is not that of the traffic" in reason for reason in judgement.reasons)


def test_a_bucket_of_little_traffic_need_not_pass_but_may_send_back() -> None:
    """Under 1 % of the calls a bucket is not waited for; when it is worse it counts."""
    evidence = service()
    rare = Collector("r1", RULES.scales())
    rare.call("rare", 5)
    rare.add("violation", "rare", 0.0, many=5)
    wrong = Collector("r1", RULES.scales())
    wrong.call("rare", 5)
    wrong.add("violation", "rare", 1.0, many=5)

    assert judge(evidence + rare.evidence()).decision == "promote"
    assert judge(evidence + wrong.evidence()).decision == "rollback"


def test_without_an_a_a_test_nothing_is_promoted() -> None:
    """The incumbent must have been measured beside itself 50 times."""
    judgement = judge(service(itself=(49, 0.0)))

    assert judgement.decision == "hold"
    assert "beside itself was observed 49 times" in judgement.reasons[0]


@pytest.mark.parametrize("buckets", [tuple(SHARES), ("huge",)])
def test_without_an_a_a_test_nobody_is_blamed(buckets: tuple[str, ...]) -> None:
    """What looks slower goes back only when the incumbent beside itself has shown that the clock favours neither."""
    slow = {("latency_ratio", bucket): math.log(1.2) for bucket in buckets}
    early, late = judge(service(ratios=slow, itself=(49, 0.0))), judge(service(ratios=slow, itself=(50, 0.0)))

    assert (early.decision, late.decision) == ("hold", "rollback")
    assert "beside itself was observed 49 times" in early.reasons[0]


def test_a_measurement_that_favours_one_side_is_an_error() -> None:
    """An incumbent 6 % faster or slower than itself: that metric blames nobody, and nothing is promoted."""
    slow = {("latency_ratio", bucket): math.log(1.2) for bucket in SHARES}
    for off in (-0.06, 0.06):
        judgement = judge(service(ratios=slow, itself=(500, off)))

        assert judgement.decision == "error"
        assert "beside itself" in judgement.reasons[0]


def test_a_tolerance_that_the_incumbent_breaks_against_itself_is_an_error() -> None:
    """Violations of the incumbent beside itself tell of the tolerance and not of the candidate."""
    collector = Collector("r1", RULES.scales())
    collector.add("violation", "small", 0.0, arm="itself", many=1000)
    collector.add("violation", "small", 1.0, arm="itself", many=5)

    assert judge(service(events={("violation", "small"): 20}) + collector.evidence()).decision == "error"


def test_an_error_of_one_metric_does_not_hide_a_fault() -> None:
    """Back it goes, whatever the state of the clock."""
    assert judge(service(events={("fault", "small"): 1}, itself=(500, 0.06))).decision == "rollback"


def test_broken_observations_are_an_error() -> None:
    """More than 1 % of ratios that are no number: the comparison is broken, and what is left of it shows nothing."""
    for many, decision in ((20, "promote"), (40, "error")):
        collector = Collector("r1", RULES.scales())
        collector.add("error_ratio", "small", math.nan, many=many)
        assert judge(service() + collector.evidence()).decision == decision


@pytest.mark.parametrize(
    ("metric", "bucket", "reason"),
    [
        ("latencies", "small", "the rules do not have"),
        ("violation", "new", "and no calls"),
        ("fault", "", "scale"),
    ],
)
def test_counts_that_contradict_each_other_are_an_error(metric: str, bucket: str, reason: str) -> None:
    """A metric nobody knows, comparisons of calls that were not made, values off the scale: nothing is promoted."""
    scale = LATENCY if reason == "scale" else RATE
    collector = Collector("r1", {metric: scale})
    collector.add(metric, bucket or "small", 0.0)
    judgement = judge(service() + collector.evidence())

    assert judgement.decision == "error"
    assert any(reason in one for one in judgement.reasons)


def test_more_buckets_than_planned_are_an_error() -> None:
    """The probability of a mistake is shared over a number of buckets fixed before anything is seen."""
    assert judge(service(), replace(RULES, most_buckets=3)).decision == "promote"
    assert judge(service(), replace(RULES, most_buckets=2)).decision == "error"


def test_many_buckets_need_more_evidence_each() -> None:
    """What sends one of two buckets back does not send back one of a million."""
    evidence = service(events={("violation", "small"): 8})
    few, many = replace(RULES, most_buckets=3), replace(RULES, most_buckets=10**6)

    assert found(evidence, "violation", "small", few).status == "worse"
    assert found(evidence, "violation", "small", many).status != "worse"


def test_a_judgement_is_json_without_nan() -> None:
    """What is written for a dashboard has no NaN, which is no JSON."""
    for evidence in (service(), Evidence("r1")):
        text = json.dumps(judge(evidence).as_json(), allow_nan=False)
        assert json.loads(text)["decision"] == judge(evidence).decision


def test_leaving_intervals_out_changes_no_verdict() -> None:
    """No decision rests on the intervals."""
    evidence = service(events={("violation", "small"): 3})
    with_them, without = judge(evidence), judge(evidence, intervals=False)

    assert with_them.reasons == without.reasons
    assert math.isnan(without.findings[0].high)
    assert 0 < with_them.findings[0].high < 1e-3


@sweep("candidate", BAD, ids=lambda candidate: candidate.name, fast=3)
def test_bad_candidates_are_not_promoted(candidate: Candidate) -> None:
    """Of simulated rollouts of each bad candidate none is promoted; the table has thousands of them."""
    ends = [shadowed(candidate, 10_000 + seed, 150_000).decision for seed in range(4)]

    assert "promote" not in ends
    assert "error" not in ends


@sweep("candidate", [EQUAL, NEARLY], ids=lambda candidate: candidate.name)
def test_an_equal_candidate_is_promoted_on_noisy_measurements(candidate: Candidate) -> None:
    """Of simulated rollouts of an equal candidate all are promoted; a violation in 100,000 calls sends nobody back."""
    ends = {shadowed(candidate, 10_000 + seed, 400_000).decision for seed in range(4)}

    assert ends == {"promote"}


def test_exposure_is_what_is_verified() -> None:
    """What is wrong in one bucket is found after a hundred times as many calls where one in a hundred is verified."""
    wrong = next(one for one in BAD if one.wrong and one.bucket)
    some, all_ = ([served(wrong, seed, 10**7, verify) for seed in range(4)] for verify in (0.01, 1.0))

    assert {end.decision for end in (*some, *all_)} == {"rollback"}
    assert sum(end.wrong for end in some) > 10 * sum(end.wrong for end in all_) > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"acceptable": 0.2}, "must rise"),
        ({"acceptable": 0.0, "limit": 0.0}, "nothing can be shown"),
        ({"bucket_limit": 2.0}, "must rise"),
        ({"fewest": 0}, "no data would be a pass"),
    ],
)
def test_a_metric_that_contradicts_itself_is_refused(change: dict[str, float], reason: str) -> None:
    """Limits rise from acceptable to bucket_limit, and something must be seen."""
    with pytest.raises(ValueError, match=reason):
        replace(Metric("m", RATE, "critical", 1e-5, 1e-4, 0.02, 300, 300), **change)


@pytest.mark.parametrize(
    "change", [{"back": 0.0}, {"promoted": 1.0}, {"most_buckets": 0}, {"metrics": ()}, {"metrics": METRICS + METRICS}]
)
def test_rules_that_contradict_themselves_are_refused(change: dict[str, object]) -> None:
    """Levels are probabilities, and some metric must have a say."""
    with pytest.raises(ValueError, match=r"between 0 and 1|metrics need different names|most_buckets"):
        replace(RULES, **change)  # type: ignore[arg-type]
