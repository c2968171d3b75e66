"""The rows, one module for each family of kernels; a module's ``ROWS`` are its lines of the table.

A family whose kernel is not there yet is skipped with words: its module imports the kernel, which raises.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from benchmarks.suite.model import Row, UnknownName

NAMES = (
    "pointwise",
    "softmax",
    "norms",
    "glu",
    "cross_entropy",
    "rope",
    "norm_quant",
    "linear",
    "attention",
    "decode",
    "selection",
    "rope_cache",
    "dequant",
    "linear_cross_entropy",
    "adamw",
    "embedding",
    "batch_norm",
    "feed_forward",
)


def rows(only: Sequence[str] = ()) -> tuple[list[Row], dict[str, str]]:
    """All rows, or those whose family is one of ``only`` or whose name contains one; and why families have none.

    Raises `UnknownName` for a name that fits no row.
    """
    found: list[Row] = []
    absent: dict[str, str] = {}
    for name in NAMES:
        try:
            found += importlib.import_module(f"benchmarks.suite.families.{name}").ROWS
        except ImportError as error:
            if not (error.name or "").startswith("reference_kernels"):
                raise
            absent[name] = f"there is no such kernel: {error}"
    for each in only:
        if not any(fits(row, each) for row in found):
            known = ", ".join(dict.fromkeys(row.family for row in found))
            raise UnknownName(f"no row is called {each!r}; families: {known}")
    return [row for row in found if not only or any(fits(row, each) for each in only)], absent


def fits(row: Row, name: str) -> bool:
    """Whether ``name`` means this row: its family, a part of its text, or ``family: `` and how its text begins."""
    wanted = name.lower()
    return name == row.family or wanted in row.text.lower() or (": " in name and row.name.lower().startswith(wanted))
