"""Rules for carrying out ATen operations on lanes; importing this fills the tables of ``registry``."""

from __future__ import annotations

from pytest_fusion.oracle.ops import (
    attention,
    derivative,
    losses,
    movement,
    normalise,
    ordering,
    pointwise,
    product,
    reduction,
)
from pytest_fusion.oracle.ops.rule_registry import COMPUTED, EXACT, SEMANTIC, Op, Rule, each

__all__ = [
    "COMPUTED",
    "EXACT",
    "SEMANTIC",
    "Op",
    "Rule",
    "attention",
    "derivative",
    "each",
    "losses",
    "movement",
    "normalise",
    "ordering",
    "pointwise",
    "product",
    "reduction",
]
