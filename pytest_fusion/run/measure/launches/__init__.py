"""How many kernels a call launches: measured on a GPU, modelled without one."""

from __future__ import annotations

from pytest_fusion.run.measure.launches.count import count
from pytest_fusion.run.measure.launches.launch_count import Counts, Method, Uncounted
from pytest_fusion.run.measure.launches.modelled_launches import Modelled, modelled
from pytest_fusion.run.measure.launches.operator_launches import Work

__all__ = ["Counts", "Method", "Modelled", "Uncounted", "Work", "count", "modelled"]
