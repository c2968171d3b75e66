"""What two kernels take beside time, from launches and compiled kernels that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pytest_fusion.bench.entries import entries
from pytest_fusion.canary.offline import taken
from pytest_fusion.canary.offline.kernel import _representative
from pytest_fusion.canary.offline.taken import Compiled, Spills, compiled, spills
from pytest_fusion.errors import SpecError
from pytest_fusion.run.measure.resources.kernel_resources import NO_KERNEL, Report
from pytest_fusion.run.measure.resources.noting import Noted
from pytest_fusion.run.measure.resources.specialisation import Argument, Place, Specialisation
from pytest_fusion.run.measure.resources.targets import Resources
from tests.canary.offline import kernels

SPEC = kernels.SPEC.with_(bench=[{"rows": 8, "hidden": 8}, {"rows": 16, "hidden": 8}])
SIZED = [(entry.text, entry.case) for entry in entries(SPEC)]
SMALL, LARGE = (text for text, _ in SIZED)


def launch(block: int, kernel: str = "k") -> Specialisation:
    place = Place("kern.py", 1)
    return Specialisation(
        kernel, place, (Argument("x", "*fp32", "D", None), Argument("BLOCK", "constexpr", None, block))
    )


def test_recompilations_are_of_the_cases_that_are_asked_about() -> None:
    """A kernel's first compilation is none; one more is each specialisation that these cases had and none before."""
    launches = {"a": [launch(8)], "b": [launch(8), launch(16)], "c": [launch(32)], "d": [launch(8, "other")]}

    assert compiled(launches, ["a", "b"]) == Compiled(1, 1, ("k: constexpr BLOCK 8 or 16",))
    assert compiled(launches, ["a", "b", "c", "d"]).again == 2
    assert compiled(launches, ["a", "b", "c", "d"]).kernels == 2
    assert compiled(launches, ["unknown"]) == Compiled(0, 0)


def test_an_autotuners_choice_is_no_recompilation() -> None:
    """Two configs that win in turn are compiled once each, whoever wins; what counts is what makes it tune again."""
    first = Noted("k", launch(8), others=(launch(16), launch(32)))
    second = Noted("k", launch(32), others=(launch(8), launch(16)))

    assert _representative(first) == _representative(second)
    assert _representative(Noted("k", launch(8))) == launch(8)
    assert _representative(Noted("k", None, "it is made inside a function")) is None


def resources(local: int, stores: int = 1, **more: Any) -> Resources:
    return Resources("k", "sm_90", local_bytes=local, instructions={"spill_stores": stores}, **more)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    """What compiling without a GPU comes to, a report for each size."""
    made: list[Report] = []

    def resources_of(spec: Any, sizes: Sequence[Any], targets: Sequence[Any]) -> list[Report]:
        assert [size["rows"] for size in sizes] == [8, 16]
        assert [size["dtype"] for size in sizes] == ["float32"] * 2
        assert [target.name for target in targets] == ["sm_90"]
        if not made:
            raise SpecError("no such size")
        return made

    monkeypatch.setattr(taken, "resources_of", resources_of)
    return made


def asked() -> Spills:
    return spills(SPEC, SIZED, torch.device("cpu"), {})


def test_the_worst_kernel_of_a_size_is_told(reports: list[Report]) -> None:
    """Bytes that are written to local memory count; an array that a kernel indexes is no spill."""
    reports += [Report({}, "sm_90", (resources(8), resources(64))), Report({}, "sm_90", (resources(256, stores=0),))]
    assert asked() == Spills({SMALL: 64, LARGE: 0}, {SMALL: "k", LARGE: "k"}, "sm_90")


def test_a_call_without_triton_spills_nothing_of_it(reports: list[Report]) -> None:
    """That no kernel is launched is an answer."""
    reports += [Report({}, "sm_90", problem=NO_KERNEL), Report({}, "sm_90", problem=NO_KERNEL)]

    assert (asked().bytes, asked().problem) == ({SMALL: 0, LARGE: 0}, "")


@pytest.mark.parametrize(
    "report",
    [
        Report({}, "sm_90", (resources(0, status="unknown", reason="its binary cannot be read"),)),
        Report({}, "sm_90", (resources(0),), problem="its binary cannot be read"),
    ],
)
def test_what_is_not_known_of_one_size_is_not_known(reports: list[Report], report: Report) -> None:
    """A kernel that was not compiled, or a launcher that stopped early, leaves a problem and no number for its size."""
    reports += [Report({}, "sm_90", (resources(8),)), report]
    found = asked()

    assert (found.bytes, found.problem) == ({SMALL: 8}, f"{LARGE}: its binary cannot be read")


def test_sizes_that_nobody_can_make_are_a_problem(reports: list[Report]) -> None:
    """Nothing is raised: a comparison has its verdicts, and here it has none."""
    assert (asked().bytes, "no such size" in asked().problem) == ({}, True)
