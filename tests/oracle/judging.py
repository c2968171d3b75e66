"""Whether a result is as near to a reference as its lanes allow."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pytest_fusion.oracle import OutputLanes, run_lanes
from pytest_fusion.oracle.tolerance import judge_output


def judged(got: Tensor, reference: Callable[[], Tensor], seed: int) -> bool:
    few = run_lanes(lambda: [reference()], seed=seed)

    def more() -> OutputLanes:
        return run_lanes(lambda: [reference()], lanes=24, seed=seed + 100, numbers=few.numbers).outputs[0]

    return judge_output(got, few.outputs[0], more).ok
