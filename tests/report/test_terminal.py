"""The terminal section says what needs attention, and nothing when nothing does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pytest_fusion.report import phrases
from pytest_fusion.report.record import TestRecord
from pytest_fusion.report.terminal import Line, progress, summary

Make = Callable[..., TestRecord]


def _text(lines: list[Line]) -> str:
    return "\n".join(text for text, _ in lines)


def test_nothing_to_say_is_no_line(passing: Make) -> None:
    """Full passes with every check judged add no section at the default verbosity."""
    assert summary([passing(checks={})]) == []
    assert summary([]) == []


def test_a_failure_is_named_with_its_cause_case_and_replay(failing: Make) -> None:
    """One failure gives its check, cause, smallest case, the replay command and the total."""
    lines = summary([failing()])

    assert lines[0] == ("FAIL tests/test_softmax.py::test_softmax[causal]: values (tail-mask)", {"red": True})
    assert _text(lines).splitlines()[1:] == [
        "  smallest case: rows=2 hidden=129; x float16 padded offset 3; mask bool; scale=0.125",
        "  replay: pytest 'tests/test_softmax.py::test_softmax[causal]' --fusion-replay .fusion/failures/causal.json",
        "1 test: 1 failed; 23 cases in 1.8 s",
    ]


def test_a_failure_is_a_line_as_soon_as_it_is_known(failing: Make, passing: Make) -> None:
    """It names the test, the check, the cause and what was found; what passes, or fails as expected, has none."""
    (line,) = progress([passing(), failing(), failing(expected=True)])

    assert line[0].startswith("FAIL tests/test_softmax.py::test_softmax[causal]: values (tail-mask): ")
    assert phrases.reason(failing()) in line[0]


def test_a_replay_path_with_a_space_is_quoted(failing: Make) -> None:
    """The replay command can be pasted into a shell whatever the path."""
    assert "--fusion-replay 'my kernels/case.json'" in _text(summary([failing(replay="my kernels/case.json")]))


def test_quiet_shows_failures_alone(passing: Make, failing: Make) -> None:
    """At -q neither thin passes nor totals are shown."""
    records = [passing(cases=2), failing()]

    assert [text for text, _ in summary(records, verbosity=-1) if not text.startswith("  ")] == [
        "FAIL tests/test_softmax.py::test_softmax[causal]: values (tail-mask)"
    ]


def test_a_pass_that_covered_little_says_so(passing: Make) -> None:
    """Few cases, uncovered pairs and mass rejection each make a pass thin by default."""
    coverage = {"pairs": 400, "covered": 120, "share": 0.3}
    thin = passing(cases=79, judged=9, rejected={"ValueError": 70, "impossible": 30}, coverage=coverage)

    assert summary([thin])[0] == (
        (
            "thin pass tests/test_norm.py::test_rms_norm: only 9 cases judged; only 30 % of pairs covered; "
            "70 of 79 cases rejected (ValueError 70, impossible 30)"
        ),
        {"yellow": True},
    )


def test_what_a_budget_left_out_is_one_line(passing: Make) -> None:
    """Tests that their budget ended are no thin passes: they are counted, and at -v each names what did not meet."""
    coverage = {"pairs": 400, "covered": 120, "share": 0.3, "seconds": 6.0, "unmet": ["dtype=a with values=b"]}
    cut = passing(coverage=coverage, checks={}, notes=["the budget of 6 s ended the test"])
    lines = _text(summary([cut, passing(coverage={**coverage, "share": 0.7}, checks={}), passing(checks={})]))

    assert lines.splitlines()[0] == (
        "the budget ended 2 tests before all pairs of settings met (-v; all: --fusion-profile ci)"
    )
    assert "thin pass" not in lines
    assert "note: the budget of 6 s ended the test" in _text(summary([cut], verbosity=1))


def test_few_cases_that_were_wanted_are_not_thin(passing: Make) -> None:
    """A replay says that its case passes now; the profile ``gate`` says nothing."""
    coverage = {"pairs": 400, "covered": 1, "share": 0.0, "few": True}
    few: dict[str, Any] = {"cases": 1, "rejected": {}, "coverage": coverage, "checks": {}}

    assert summary([passing(**few)]) == []
    lines = _text(summary([passing(**few, message="the case passes now")]))
    assert lines.startswith("pass tests/test_norm.py::test_rms_norm: the case passes now\n")
    unknown = {"vacuity": {"verdict": "unknown", "reason": "only 1 case was judged", "cases": 0}}
    assert "vacuity" not in _text(summary([passing(**{**few, "checks": unknown}, message="the case passes now")]))


def test_a_thin_pass_says_what_was_rejected(passing: Make) -> None:
    """That may be why it is thin, also where it was less than half."""
    coverage = {"pairs": 400, "covered": 120, "share": 0.3}
    record = passing(cases=212, judged=122, rejected={"ValueError": 90}, coverage=coverage)
    assert "only 30 % of pairs covered; 90 of 212 cases rejected (ValueError 90)" in _text(summary([record]))


def test_a_test_that_ends_in_an_error_is_counted(passing: Make) -> None:
    """It has no verdict, and pytest counts it among the failures."""
    broken = passing(verdict="unknown", raised=True, cases=0, message="the reference consumes random numbers")
    lines = summary([passing(checks={}), broken])

    assert lines[0] == ("ERROR tests/test_norm.py::test_rms_norm: the reference consumes random numbers", {"red": True})
    assert lines[-1][0].startswith("2 tests: 1 ended in an error, 1 passed")
    assert phrases.outcome(replace(broken, expected=True)) == "xfail"


def test_what_never_became_a_case_makes_no_pass_thin(passing: Make) -> None:
    """Of a slow kernel the largest sizes are left out and counted, as are sizes that contradict each other."""
    assert summary([passing(cases=120, rejected={"too-expensive": 110, "impossible": 30}, checks={})]) == []


def test_one_concrete_call_is_not_thin(passing: Make) -> None:
    """A judged call of the caller's own tensors has one case, and that is what was asked for."""
    assert summary([passing(cases=1, coverage={"pairs": 0, "share": 1.0}, rejected={}, checks={})]) == []


def test_unknown_is_neither_pass_nor_fail(passing: Make) -> None:
    """An unknown verdict is reported with its reason and counted on its own."""
    text = _text(summary([passing(verdict="unknown", message="requires cuda, and there is none")]))

    assert "UNKNOWN tests/test_norm.py::test_rms_norm: requires cuda, and there is none" in text
    assert "1 test: 1 unknown" in text
    assert "passed" not in text


def test_checks_nobody_ran_are_said_once(passing: Make) -> None:
    """Checks that 50 passing tests could not run are one line, not fifty."""
    checks = {name: {"verdict": "unknown", "reason": "why", "cases": 0} for name in ("device", "compile")}
    checks["gradients"] = {"verdict": "unknown", "reason": "not requested: grad= is False", "cases": 0}
    checks["configs"] = {"verdict": "unknown", "reason": "nothing to judge: no autotuned kernel", "cases": 0}
    lines = summary([passing(nodeid=f"t.py::test_{index}", checks=checks) for index in range(50)])

    assert [text for text, _ in lines] == [
        "not judged in 50 tests (reasons at -v): device, compile",
        "50 tests: 50 passed; 6,550 cases in 6 min 03 s",
    ]
    verbose = [text for text, _ in summary([passing(checks=checks)], verbosity=1)]
    assert "  unknown: device, compile" in verbose
    assert "  not requested, or nothing to judge: gradients, configs" in verbose


def test_verbose_shows_what_a_pass_rests_on(passing: Make) -> None:
    """At -v a pass tells cases, pairs, rejections by kind, error against allowed, grade, time, and what was off."""
    checks = {
        **passing().checks,
        "repeat": {"verdict": "unknown", "reason": "switched off: atomics", "cases": 0},
    }
    lines = summary([passing(checks=checks, off={"repeat": "atomics"}, notes=["grid was large"])], verbosity=1)

    assert [text for text, _ in lines] == [
        "pass tests/test_norm.py::test_rms_norm",
        (
            "  131 cases, 100 % of pairs covered, 6 rejected (too-expensive 4, ValueError 2), "
            "worst error 0.41 of allowed (out, rms), grade A, 7.3 s"
        ),
        "  repeat switched off: atomics",
        "  unknown: device",
        "  note: grid was large",
        "device unknown in 1 test: no second GPU on this machine",
        "1 test: 1 passed; 131 cases in 7.3 s",
    ]


def test_an_expected_failure_alarms_nobody(failing: Make) -> None:
    """A failure under xfail is counted as such, in no red line."""
    lines = summary([failing(expected=True)], verbosity=1)

    assert lines[0][0].startswith("xfail ")
    assert "1 failed as expected" in lines[-1][0]
    assert not any("red" in markup for _, markup in lines)


def test_failures_come_first_and_report_paths_last(passing: Make, failing: Make) -> None:
    """Order is failures, unknown, thin passes; the paths of written reports end the section."""
    records = [passing(cases=3), passing(verdict="unknown", message="why"), failing()]
    texts = [text for text, _ in summary(records, written={"HTML": "fusion.html", "JSON": "fusion.json"})]

    heads = [text.split()[0] for text in texts if not text.startswith(("  ", "not"))]
    assert heads == ["FAIL", "UNKNOWN", "thin", "3", "HTML", "JSON"]
    assert texts[-2:] == ["HTML report: fusion.html", "JSON report: fusion.json"]


def test_share_is_rounded_down(passing: Make) -> None:
    """A run that missed one pair of a thousand does not claim 100 %."""
    text = _text(summary([passing(coverage={"pairs": 1000, "covered": 999, "share": 0.999})], verbosity=1))

    assert "99 % of pairs covered" in text


def test_an_infinite_error_is_said(failing: Make) -> None:
    """An infinite ratio, also as the text that JSON made of it, is not taken for a small one."""
    for ratio in (float("inf"), "inf", float("nan")):
        assert "worst error beyond any bound" in _text(summary([failing(worst={"ratio": ratio})], verbosity=1))


def test_a_failing_comparison_is_the_worst_error(failing: Make) -> None:
    """The error shown is that of the failing case, not the worst of the cases that passed."""
    record = failing(worst={"ratio": 0.8, "output": "out", "statistic": "rms"})

    assert "worst error 2,380 times the allowed" in _text(summary([record], verbosity=1))
