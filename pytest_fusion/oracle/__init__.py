"""Shadow lanes: the reference prices its own rounding, by a float64 oracle and randomly rounded runs in lock-step."""

from __future__ import annotations

from pytest_fusion.oracle.lane_mode import TooSlow
from pytest_fusion.oracle.lane_result import Drawn, Kind, LaneRun, OutputLanes
from pytest_fusion.oracle.shadow import run_lanes

__all__ = ["Drawn", "Kind", "LaneRun", "OutputLanes", "TooSlow", "run_lanes"]
