"""Planted bugs.

Each a one-line switch of a clean kernel, with the class and the row of the bug report that it re-plants.

``bug_class`` is a class of the public corpus of fused-kernel bugs (A1 input strides ignored, B1 tail mask, ... J1
alignment); ``row`` the number of the report there, with its thread in ``REPORTS``, or None for a variant of the
class.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.quality.backward_plants import BACKWARD
from tests.quality.contract_plants import CONTRACT
from tests.quality.forward_plants import FORWARD
from tests.quality.plant import Plant
from tests.quality.uneven_plants import UNEVEN

PLANTS: tuple[Plant, ...] = (*FORWARD, *BACKWARD, *CONTRACT, *UNEVEN)

# What the judge does not claim, with the reason; these bugs stay in the corpus and are not counted as caught.
BEYOND: Mapping[str, str] = {
    "rms_norm/weight-before-cast": "one rounding fewer than the reference as written: as accurate as float32 (grade A)",
}
