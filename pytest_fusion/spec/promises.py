"""How far a kernel's values may be from the reference's, where a spec fixes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import SupportsFloat

from pytest_fusion.errors import SpecError
from pytest_fusion.spec.wording import checks_words


@checks_words(SpecError)
@dataclass(frozen=True, slots=True)
class Tolerance:
    """A fixed tolerance instead of the oracle's (``"auto"``): ``|fused - reference| <= atol + rtol * |reference|``."""

    rtol: float = 0.0
    atol: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if not (isinstance(value, SupportsFloat) and math.isfinite(value) and value >= 0):
                raise SpecError(f"Tolerance({name}={value!r}): expected a finite number of 0 or more")
