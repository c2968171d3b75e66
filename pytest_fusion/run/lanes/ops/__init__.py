"""Rules for carrying out ATen operations on lanes; importing this fills the tables of ``registry``."""

from __future__ import annotations

from pytest_fusion.run.lanes.ops import (
    attention,
    derivative,
    losses,
    movement,
    normalise,
    order,
    pointwise,
    product,
    reduction,
)
from pytest_fusion.run.lanes.ops.registry import COMPUTED, EXACT, SEMANTIC, VIEWS, Op, Rule, each

__all__ = [
    "COMPUTED",
    "EXACT",
    "SEMANTIC",
    "VIEWS",
    "Op",
    "Rule",
    "attention",
    "derivative",
    "each",
    "losses",
    "movement",
    "normalise",
    "order",
    "pointwise",
    "product",
    "reduction",
]
