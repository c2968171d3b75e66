"""The judge in a serving process: told of runs one at a time, it says what it says of all of them."""

from __future__ import annotations

import pytest

from pytest_fusion.canary.evidence.live_judge import LiveJudge
from pytest_fusion.canary.evidence.observation import Observation


def seen(result: str, bucket: str = "2^10") -> Observation:
    return Observation(result, bucket)


def test_clean_runs_without_ratios_are_never_promoted() -> None:
    """Nobody measured latency or errors, and the first thing that is missing is named."""
    live = LiveJudge("r1", every=100)
    rulings = {live.update(seen("ok")).verdict for _ in range(1000)}

    assert rulings == {"nodata", "hold"}


def test_it_is_promoted_once_all_is_shown() -> None:
    """60,000 clean runs, with ratios and an A/A test, are enough."""
    live = LiveJudge("r1", every=20_000)
    for _ in range(100):
        live.ratio("latency_ratio", "2^10", 0.001)
        live.ratio("latency_ratio", "2^10", 0.0, "itself")
        live.ratio("error_ratio", "2^10", 0.0)

    assert [live.update(seen("ok")).verdict for _ in range(60_000)][-1] == "promote"


@pytest.mark.parametrize("result", ["nonfinite", "structure", "inputs", "hang"])
def test_one_fault_sends_back_at_once(result: str) -> None:
    """What no honest kernel does even once needs no second time, whatever was seen before."""
    live = LiveJudge("r1")
    for _ in range(100):
        live.update(seen("ok"))

    assert live.update(seen(result)).verdict == "rollback"
    assert live.update(seen("ok")).verdict == "rollback"


@pytest.mark.parametrize("result", ["error", "violation"])
def test_few_failures_send_back(result: str) -> None:
    """A violation or an exception in a thousand runs is no proof; in each of ten more it is."""
    live = LiveJudge("r1")
    for _ in range(1000):
        live.update(seen("ok"))

    assert live.update(seen(result)).verdict != "rollback"
    assert [live.update(seen(result)) for _ in range(10)][-1].verdict == "rollback"


def test_a_run_that_raised_has_no_values_to_compare() -> None:
    """It counts as an exception, not as a comparison without violation; a skipped run is a call and nothing else."""
    live = LiveJudge("r1")
    for result in ("ok", "error", "violation", "skipped"):
        live.update(seen(result))

    evidence = live.evidence
    assert evidence.calls == {"2^10": 4}
    assert [evidence.pooled(name).counts for name in ("exception", "fault", "violation")] == [
        {0: 2, 1: 1},
        {0: 2},
        {0: 1, 1: 1},
    ]


def test_an_unknown_result_or_interval_is_refused() -> None:
    """A result that nobody knows is not counted as fine."""
    with pytest.raises(KeyError, match="wonderful"):
        LiveJudge("r1").update(seen("wonderful"))
    with pytest.raises(ValueError, match="every is 0"):
        LiveJudge("r1", every=0)
