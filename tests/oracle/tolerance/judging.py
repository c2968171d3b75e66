"""One candidate, judged by the lanes of a reference that is called here."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pytest_fusion.oracle import OutputLanes, run_lanes
from pytest_fusion.oracle.eager import run_eager
from pytest_fusion.oracle.lane_result import Kind
from pytest_fusion.oracle.tolerance import ValuesVerdict, judge_output


def judged(
    candidate: Tensor, reference: Callable[[], Tensor], seed: int = 1, strict: bool = False, narrow: bool = True
) -> ValuesVerdict:
    """The verdict; not ``narrow``, no input is of 16 bits."""

    def lanes(count: int, kind: Kind, offset: int) -> OutputLanes:
        return run_lanes(lambda: [reference()], lanes=count, kind=kind, seed=seed + offset).outputs[0]

    def wide() -> OutputLanes:
        return lanes(24, "F", 200)

    def eager() -> Tensor | None:
        return run_eager(lambda: [reference()], seed=seed)[0] if narrow else None

    fine = wide if strict else None
    few = lanes(6, "E", 0)
    return judge_output(candidate, few, lambda: lanes(24, "E", 100), fine=fine, wide=wide, eager=eager)
