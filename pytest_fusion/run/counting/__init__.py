"""How many kernels a call launches: measured on a GPU, modelled without one."""

from __future__ import annotations

from pytest_fusion.run.counting.count import count
from pytest_fusion.run.counting.model import Counts, Method, Uncounted
from pytest_fusion.run.counting.modelled import Modelled, modelled
from pytest_fusion.run.counting.operators import Work

__all__ = ["Counts", "Method", "Modelled", "Uncounted", "Work", "count", "modelled"]
