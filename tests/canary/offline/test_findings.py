"""From pairs to verdicts, without running anything."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from pytest_fusion.canary.offline.case_pairs import FOREIGN, Pair, Ran, classify, died
from pytest_fusion.canary.offline.comparison_verdict import Comparison, Evidence, check_without, conclude
from pytest_fusion.canary.offline.metric_finding import Timing, hazards, ratios
from pytest_fusion.canary.offline.taken import Compiled, Spills
from pytest_fusion.errors import CanaryError

PASS, FAIL = Ran("pass"), Ran("fail", "values", "off", ratio=2.0)
REFUSED = Ran("rejected", "NotImplementedError", "no", refused=True)
TOO_LARGE = Ran("rejected", "too-expensive", "large")
ABOUT = {"text": "git:main", "kind": "revision"}


def pair(candidate: Ran = PASS, incumbent: Ran = PASS, **more: Any) -> Pair:
    return Pair("rows=1", "fuzzed", candidate, incumbent, *classify(candidate, incumbent), **more)


def timing(low: float, high: float, share: float = 0.0) -> Timing:
    return Timing("rows=4096", (low + high) / 2, low, high, share=share)


def spills(many: int = 0, problem: str = "", where: str = "sm_90") -> Spills:
    return Spills({"rows=4096": many}, {"rows=4096": "kernel"}, where, problem)


def passing(count: int = 30, **more: Any) -> list[Pair]:
    return [pair(errors={"out": (0.2, 0.2)}, launches=(1, 1), memory=(0, 0), **more) for _ in range(count)]


def judged(pairs: list[Pair] | None = None, *without: str, broken: str = "", **more: Any) -> Comparison:
    given = {
        "timings": [timing(-0.01, 0.01)],
        "compiled": (Compiled(2, 1), Compiled(2, 1)),
        "spills": (spills(), spills()),
        **more,
    }
    return conclude(Evidence(passing() if pairs is None else pairs, broken=broken, **given), ABOUT, without)


@pytest.mark.parametrize(
    ("candidate", "incumbent", "standing"),
    [
        (PASS, PASS, "passes"),
        (FAIL, PASS, "worse"),
        (PASS, FAIL, "better"),
        (FAIL, FAIL, "known-bad"),
        (Ran("fail", "bounds"), FAIL, "both-fail"),
        (Ran("fail", "values", ratio=5.0), FAIL, "both-fail"),
        (Ran("fail", "values", ratio=1.5), FAIL, "known-bad"),
        (REFUSED, PASS, "refuses"),
        (REFUSED, FAIL, "not-asked"),
        (REFUSED, REFUSED, "not-asked"),
        (PASS, REFUSED, "accepts"),
        (FAIL, REFUSED, "worse"),
        (TOO_LARGE, PASS, "not-asked"),
        (PASS, TOO_LARGE, "not-asked"),
        (FAIL, TOO_LARGE, "unexcused"),
        (FAIL, died("no answer", late=True), "unexcused"),
        (died("SIGSEGV"), PASS, "worse"),
        (PASS, died("SIGSEGV"), "better"),
        (PASS, Ran("rejected", FOREIGN, "no such case"), "foreign"),
        (FAIL, Ran("rejected", FOREIGN, "no such case"), "unexcused"),
    ],
)
def test_how_a_case_stands(candidate: Ran, incumbent: Ran, standing: str) -> None:
    """Both against the reference; what one of them was not asked about accuses nobody."""
    assert classify(candidate, incumbent)[0] == standing


def test_promote_needs_every_fact() -> None:
    """Each metric that is missing holds by itself, and leaving it out is what lets the others decide."""
    assert judged().decision == "promote"
    missing: dict[str, dict[str, Any]] = {
        "launches": {"pairs": [pair(errors={"out": (0.2, 0.2)}, memory=(0, 0)) for _ in range(30)]},
        "memory": {"pairs": [pair(errors={"out": (0.2, 0.2)}, launches=(1, 1)) for _ in range(30)]},
        "latency": {"timings": [], "untimed": "run on a GPU"},
        "recompiles": {"compiled": "its process ended"},
        "spills": {"spills": "the spec has no bench="},
        "error": {"pairs": [*passing(19), *[pair(launches=(1, 1), memory=(0, 0))] * 11]},
    }
    for name, more in missing.items():
        found = judged(**more)
        assert (found.decision, len(found.reasons)) == ("hold", 1), name
        assert judged(more.get("pairs"), name, **{k: v for k, v in more.items() if k != "pairs"}).decision == "promote"


def test_the_order_of_verdicts() -> None:
    """A case that the candidate alone fails, a broken measurement, few cases, a missing fact: the first decides."""
    worse, few = [pair(FAIL)], passing(3)
    assert judged([*worse, *few], broken="gone", timings=[]).decision == "rollback"
    assert judged(few, broken="gone", timings=[]).decision == "error"
    assert judged(few, timings=[]).decision == "nodata"
    assert judged(timings=[]).decision == "hold"


def test_failures_of_which_the_incumbent_could_not_be_asked() -> None:
    """They are not blamed, and not promoted either."""
    found = judged([*passing(), pair(FAIL, TOO_LARGE)])
    assert (found.decision, found.counts["unexcused"]) == ("hold", 1)
    assert "could not be judged, as rows=1: values: off" in found.reasons[0]


def test_failures_cannot_be_left_out() -> None:
    """``--without`` takes metrics, and no verdict of a check."""
    with pytest.raises(CanaryError, match="latency"):
        check_without(["latancy"])
    with pytest.raises(CanaryError):
        check_without(["verdicts"])
    assert (
        judged([pair(FAIL), *passing()], *check_without(["error", "launches", "latency", "memory"])).decision
        == "rollback"
    )


@pytest.mark.parametrize(
    ("low", "high", "decision", "status"),
    [
        (0.04, 0.06, "rollback", "worse"),
        (0.02, 0.04, "hold", "nodata"),
        (-0.01, 0.02, "promote", "pass"),
        (-0.3, -0.2, "promote", "better"),
    ],
)
def test_latency(low: float, high: float, decision: str, status: str) -> None:
    """Worse where all of the interval is beyond 3 %, decided where none of it is; the worst size counts."""
    found = judged(timings=[timing(-0.5, -0.4), timing(low, high)])
    assert (found.decision, found.findings[-1].status) == (decision, status)


@pytest.mark.parametrize(
    ("common", "rare", "decision", "words"),
    [
        ((-0.01, 0.01), (-0.01, 0.01), "promote", ""),
        # A few per cent in a class of few calls are lost in the mean; a tenth is not, whatever the mean says.
        ((-0.01, 0.01), (0.05, 0.07), "promote", ""),
        ((-0.2, -0.1), (0.12, 0.14), "rollback", "at its worst 1.14 x"),
        ((-0.2, -0.1), (0.05, 0.14), "hold", "not decided"),
        ((0.04, 0.05), (-0.05, -0.04), "rollback", "over recorded calls"),
        ((0.01, 0.05), (-0.01, 0.01), "hold", "not decided"),
    ],
)
def test_latency_of_recorded_traffic(
    common: tuple[float, float], rare: tuple[float, float], decision: str, words: str
) -> None:
    """The mean over calls may be 3 % longer, and no class of shapes a tenth; the classes weigh as their calls."""
    found = judged(timings=[timing(*common, 0.93), timing(*rare, 0.05)])
    assert found.decision == decision, found.reasons
    assert words in found.reasons[0]


def test_recompilations() -> None:
    """More compilations over the same cases hold, with why; where one has no kernel of Triton's there is no more."""
    why = ("k: constexpr n 3 or 4",)
    more = judged(compiled=(Compiled(7, 1, why), Compiled(2, 1)))
    assert (more.decision, more.reasons) == (
        "hold",
        ("compiled again 7 time(s) over the sizes of the cases, the incumbent 2 time(s): k: constexpr n 3 or 4",),
    )
    for pair_ in ((Compiled(2, 1), Compiled(7, 1)), (Compiled(7, 1), Compiled(0, 0)), (Compiled(0, 0), Compiled(7, 1))):
        assert judged(compiled=pair_).decision == "promote"


def test_spills() -> None:
    """More bytes at one size hold, with the kernel; what is known of one alone, or of two GPUs, is not known."""
    more = judged(spills=(spills(64), spills(8)))
    assert (more.decision, "kernel spills 64 bytes a thread at rows=4096, and the incumbent 8" in more.reasons[0]) == (
        "hold",
        True,
    )
    assert judged(spills=(spills(8), spills(64))).decision == "promote"
    assert judged(spills=(spills(64), spills(64))).decision == "promote"
    for unknown in ((spills(problem="no compiler"), spills()), (spills(), spills(where="sm_80"))):
        assert judged(spills=unknown).reasons[0].startswith("spills were not compared")


def test_errors() -> None:
    """A quarter more error is worse once 99 % of resamples say so; a few large cases leave it open."""
    spread = [
        pair(errors={"out": (0.2 * math.exp(0.3 * (-1) ** i), 0.2)}, launches=(1, 1), memory=(0, 0)) for i in range(40)
    ]
    assert judged(spread).decision == "promote"
    more = [pair(errors={"out": (0.27, 0.2)}, launches=(1, 1), memory=(0, 0)) for _ in range(40)]
    assert (judged(more).decision, judged(more).findings[1].status) == ("hold", "worse")
    open_ = [
        pair(errors={"out": (0.2 * (3.0 if i % 5 == 0 else 1), 0.2)}, launches=(1, 1), memory=(0, 0)) for i in range(30)
    ]
    assert (judged(open_).decision, judged(open_).findings[1].status) == ("hold", "nodata")
    less = [pair(errors={"out": (0.1, 0.2)}, launches=(1, 1), memory=(0, 0)) for _ in range(40)]
    assert judged(less).findings[1].status == "better"


def test_results_without_errors() -> None:
    """Integers have none, and their verdicts are enough; results that could not be compared are a missing fact."""
    assert judged([pair(launches=(1, 1), memory=(0, 0)) for _ in range(30)]).decision == "promote"
    random = [pair(launches=(1, 1), memory=(0, 0), unmeasured="it draws random numbers") for _ in range(30)]
    found = judged(random)
    assert (found.decision, found.reasons) == ("hold", ("errors were not compared: it draws random numbers",))
    assert judged(random, "error").decision == "promote"


def test_one_of_several_outputs() -> None:
    """An output that is less accurate is found among others that are not."""
    errors = {"out[0]": (0.2, 0.2), "out[1]": (0.4, 0.2), "out[2]": (0.1, 0.2)}
    found = judged([pair(errors=errors, launches=(1, 1), memory=(0, 0)) for _ in range(25)])
    assert found.decision == "hold"
    assert "the error of out[1] is 2 x" in found.reasons[0]


def test_errors_near_nothing_are_none() -> None:
    """A kernel that is exact on a few numbers makes no other endlessly worse."""
    (ratio,) = ratios([{"out": (0.04, 0.0)}] * 30)
    assert ratio.mean == ratio.high == 0.0
    assert ratios([{"out": (0.04, 0.0)}] * 19) == []


def test_memory() -> None:
    """A few bytes more are an allocator's; 2 MiB more are the kernel's."""
    few = [*passing(), pair(memory=(4096, 0), launches=(1, 1))]
    assert judged(few).decision == "promote"
    many = [*passing(), pair(memory=(2 << 20, 0), launches=(1, 1))]
    assert (judged(many).decision, "2,097,152 bytes more" in judged(many).reasons[0]) == ("hold", True)


def test_a_report_is_plain_data() -> None:
    """All of it goes through JSON, with every pair in it."""
    found = json.loads(json.dumps(judged([*passing(), pair(FAIL, FAIL)]).as_json()))
    assert (found["verdict"], len(found["pairs"]), found["counts"]) == ("promote", 31, {"known-bad": 1, "passes": 30})
    assert Ran(**found["pairs"][30]["candidate"]) == FAIL


def test_a_hazard_of_the_candidate_alone_holds_it() -> None:
    """New codes hold; those of both, and those that are gone, do not; a case that was not judged says nothing."""
    waits, both = Ran("pass", hazards=["hidden-sync"]), Ran("pass", hazards=["hidden-sync", "less-accurate"])
    new = hazards([pair(), pair(both, waits)])
    assert (new.status, new.role, new.value) == ("worse", "ordinary", 1)
    assert "less-accurate, as rows=1" in new.words
    assert hazards([pair(waits, both)]).status == "better"
    assert hazards([pair(waits, waits)]).status == "pass"
    assert hazards([pair(TOO_LARGE, waits)]).status == "pass"
    assert Ran(**both.as_json()) == both
