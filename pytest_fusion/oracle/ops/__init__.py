"""Rules for carrying out ATen operations on lanes; importing this fills the table of ``rule_registry``."""

from __future__ import annotations

from pytest_fusion.oracle.ops import attention, losses, movement, normalise, pointwise, product, reduction  # noqa: F401
from pytest_fusion.oracle.ops.rule_registry import OPERATORS, Op, Operator, each

__all__ = ["OPERATORS", "Op", "Operator", "each"]
