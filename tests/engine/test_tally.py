"""`Tally`: cases count once for each check, and the worst of them is kept."""

from __future__ import annotations

from dataclasses import replace

from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.checks.verdict import Deviation, Verdict, failed, passed, unknown
from pytest_fusion.engine.tally import Tally
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor

SPEC = FusionSpec(fused=lambda x: x, reference=lambda x: x, inputs={"x": tensor("n")}, name="same")


def judged(*cases: tuple[Verdict, ...]) -> Tally:
    tally = Tally()
    for n, verdicts in enumerate(cases, 1):
        tally.judge(SPEC, Case({"n": n}, "float32", {"x": TensorCase("float32")}), verdicts)
    return tally


def off_by(ratio: float, grade: str) -> Deviation:
    return Deviation("max", ratio, None, None, None, None, 0, 1, grade)


def test_a_check_counts_a_case_once_with_the_worst_that_it_said() -> None:
    """Three conclusions on one case are one case, and neither order nor a later pass hides the failure."""
    tally = judged((unknown("repeat", "no time"), failed("repeat", "differs"), passed("repeat")), (passed("repeat"),))

    assert (tally.judged, tally.checks) == (2, {"repeat": {"verdict": "fail", "cases": 2, "reason": "differs"}})


def test_the_worst_error_and_grade_are_those_of_values_that_are_right() -> None:
    """The case of the largest ratio is kept, and the lowest grade of any; a failed case is no measure of either."""
    tally = judged(
        (replace(passed("values", off_by(0.2, "B")), output="y"),),
        (replace(passed("values", off_by(0.7, "A")), output="z"),),
        (failed("values", "off", evidence=off_by(9.0, "C")),),
    )

    assert (tally.grade, tally.worst["ratio"], tally.worst["output"]) == ("B", 0.7, "z")
    assert "n=2" in tally.worst["case"]


def test_rejections_are_counted_by_kind() -> None:
    """What nobody could ask is no judged case."""
    tally = Tally()
    for kind in ("impossible", "ValueError", "impossible"):
        tally.reject(kind)

    assert (tally.rejected, tally.judged) == ({"impossible": 2, "ValueError": 1}, 0)
