"""What is tried besides a case that died or ran out of time: no word on the kernel is its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pytest_fusion
from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.checks.verdict import failed
from pytest_fusion.engine.crash import Late, tally_of
from pytest_fusion.engine.profiles import PROFILES
from pytest_fusion.engine.tally import Tally
from pytest_fusion.oracle.reference import ReferenceCrashed
from pytest_fusion.run.process.fork import Crash
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor

CASE = Case({"n": 3}, "float32", {"x": TensorCase("float32")})
WRONG = {"verdict": failed("values", "off").as_json(), "cause": "tail-mask", "case": CASE.as_json()}
SHRINKING = {"case": CASE.as_json(), "cases": 7, "shrinking": True, "found": WRONG}


def ended(crash: Crash, *, dies: bool) -> Tally:
    """The tally of a process that ended so while a finding was shrunk; ``dies``: other cases end alike."""
    alone = SimpleNamespace(in_child=lambda seconds, forward: crash if dies else Tally(cases=1))
    spec = FusionSpec(name="f", fused=lambda x: x, reference=lambda x: x, inputs={"x": tensor("n")})
    request = SimpleNamespace(profile=PROFILES["dev"], device="cpu")
    job: Any = SimpleNamespace(alone=lambda case, **_: alone, request=request, only=None, spec=spec)
    return tally_of(job, crash)


def test_a_finding_stands_where_the_search_for_a_smaller_case_does_not_end() -> None:
    """It has the case that showed it; that no call of the kernel is known to hang makes it no hang."""
    tally = ended(Crash("timeout", "no end after 45 s", SHRINKING, ""), dies=False)
    assert tally.failure is not None
    assert (tally.failure.verdict.check, tally.failure.case, tally.cases) == ("values", CASE, 7)
    assert tally.failure.code == "tail-mask"
    assert not tally.others


def test_a_finding_is_not_lost_where_a_smaller_case_crashes() -> None:
    """The crash is worse, and shrunk; the finding is listed with it."""
    tally = ended(Crash("signal", "SIGSEGV", SHRINKING, ""), dies=True)
    assert tally.failure is not None
    assert tally.failure.verdict.check == "crash"
    assert [one.verdict.check for one in tally.others] == ["values"]


def test_a_case_that_raises_where_it_died_hides_no_crash() -> None:
    """A full card was met so: the case that had died was tried again and could not make its inputs."""

    def full(seconds: float, forward: bool) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    spec = FusionSpec(name="f", fused=lambda x: x, reference=lambda x: x, inputs={"x": tensor("n")})
    request = SimpleNamespace(profile=SimpleNamespace(seconds=1.0))
    job: Any = SimpleNamespace(
        alone=lambda case, **_: SimpleNamespace(in_child=full), request=request, only=None, spec=spec
    )
    told = tally_of(job, Crash("signal", "SIGSEGV", {"case": CASE.as_json(), "cases": 7}, ""))
    assert told.failure is not None
    assert (told.failure.verdict.check, told.failure.case, told.failure.shrink_runs) == ("crash", CASE, 0)


STACK = """Fatal Python error: Floating point exception

Current thread 0x00007f (most recent call first):
  File "{package}/{inner}", line 1 in call
  File "{package}/{outer}", line 2 in call
"""


@pytest.mark.parametrize(
    ("inner", "outer", "dies"),
    [
        ("oracle/lane_mode.py", "run/fused.py", True),
        ("oracle/lane_mode.py", "run/fused.py", False),
        ("run/fused.py", "oracle/a.py", True),
    ],
)
def test_a_reference_that_kills_the_process_is_no_crash_of_the_kernel(inner: str, outer: str, dies: bool) -> None:
    """It dies alone too; `_weight_norm` of no rows divides by zero. A kernel may have spoiled what it reads."""
    stack = STACK.format(package=Path(pytest_fusion.__file__).parent, inner=inner, outer=outer)
    crash = Crash("signal", "SIGFPE", {"case": CASE.as_json(), "cases": 7}, stack)
    if inner.startswith("oracle") and dies:
        with pytest.raises(ReferenceCrashed, match=r"reference itself killed its process \(SIGFPE\); the case was n=3"):
            ended(crash, dies=dies)
    else:
        found = ended(crash, dies=dies).failure
        assert found is not None
        assert found.verdict.check == "crash"


STRIDED = Case(
    {"rows": 40, "cols": 40},
    "float32",
    {"x": TensorCase("float32", layout=Layout("transposed", 2)), "y": TensorCase("float32", layout=Layout("padded"))},
)


def looked_into(hangs: Callable[[Case], bool]) -> tuple[float | None, Late]:
    """What is decided of a case that takes long, where these cases do not end when they are run alone."""

    def alone(case: Case, explained: bool) -> Any:
        ended = Crash("timeout", "no end after 3 s", {"case": case.as_json()}, "") if hangs(case) else Tally(cases=1)
        return SimpleNamespace(in_child=lambda seconds, forward: ended)

    inputs = {"x": tensor("rows cols"), "y": tensor("rows cols")}
    spec = FusionSpec(name="f", fused=lambda x, y: x, reference=lambda x, y: x, inputs=inputs)
    request = SimpleNamespace(profile=PROFILES["dev"], device="cpu")
    late = Late(SimpleNamespace(alone=alone, request=request, only=None, spec=spec))  # type: ignore[arg-type]
    return late({"case": STRIDED.as_json(), "cases": 7}), late


def test_a_hang_that_contiguous_copies_cure_is_one_of_strides() -> None:
    """It is ended at once, on the smallest case that hangs by itself, and the layout of one input is the cause."""
    limit, late = looked_into(lambda case: case.tensors["x"].layout.kind != "contiguous" and case.sizes["rows"] > 1)
    assert limit is None
    assert late.found is not None
    assert late.found.diagnosis is not None
    assert late.found.diagnosis.cause == "ignores-strides"
    assert late.found.case is not None
    assert late.found.case.tensors["y"].layout.plain
    assert late.found.case.tensors["x"].layout.offset == 0


def test_a_hang_of_any_case_is_shown_by_the_plainest() -> None:
    """Sizes of 1 do not end, so the larger case will not; no layout has to do with it."""
    limit, late = looked_into(lambda case: True)
    assert limit is None
    assert late.found is not None
    assert late.found.case is not None
    assert dict(late.found.case.sizes) == {"rows": 0, "cols": 0}
    assert late.found.diagnosis is None


@pytest.mark.parametrize(
    "slow",
    [lambda case: False, lambda case: case.sizes["rows"] * case.sizes["cols"] > 256],
    ids=["none", "large ones"],
)
def test_a_case_that_only_is_slow_gets_more_time(slow: Callable[[Case], bool]) -> None:
    """No smaller one is slow, or large ones are whatever their layout; the second time it is a hang."""
    limit, late = looked_into(slow)
    assert limit == 3 * PROFILES["dev"].seconds
    assert late.found is None
    assert "more time" in late.notes[0]
    assert late({"case": STRIDED.as_json(), "cases": 8}) is None
