"""Shadow lanes: the reference prices its own rounding.

A reference runs once, natively; every ATen operation is repeated in float64 without rounding (the oracle) and in K
lanes with random rounding wherever the reference rounds. How far the lanes scatter is what rounding may cost.
"""

from __future__ import annotations

from pytest_fusion.oracle.lane_mode import TooSlow
from pytest_fusion.oracle.lane_result import Drawn, Kind, LaneRun, OutputLanes
from pytest_fusion.oracle.shadow import run_lanes

__all__ = ["Drawn", "Kind", "LaneRun", "OutputLanes", "TooSlow", "run_lanes"]
