"""Guard zones, poison, and the damage that they show. Imports no module of kernels, cases or verdicts."""

from __future__ import annotations

from pytest_fusion.run.memory.arena import Arena
from pytest_fusion.run.memory.damage import Change, Damage
from pytest_fusion.run.memory.fill import FILLS, pattern
from pytest_fusion.run.memory.watch import Watch, unwatched

__all__ = ["FILLS", "Arena", "Change", "Damage", "Watch", "pattern", "unwatched"]
