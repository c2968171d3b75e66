"""How many multiprocessors the modelled GPU has: few, so that a persistent kernel has several turns.

The case alone decides, as a kernel may split a sum by this number; smaller cases and experiments keep it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.sizes import count
from pytest_fusion.interpreter.bridge import modelled_device

# Two turns for the largest common tiles (128 x 128) in the broadest cases (640 x 160). A Jetson Orin Nano has 8.
FEW, MANY = 8, int(modelled_device.PROPERTIES["multi_processor_count"])
# Smaller cases have too few tiles, and a launcher that queries the number only once should get an H100's. In
# longer ones each row is another turn, and the interpreter runs turns in sequence (21 s instead of 4).
_FROM, _TO = 100, 2000


def with_few(case: Case) -> Case:
    """The case with ``FEW`` if its longest size is in the hundreds and there is no GPU."""
    longest = max((count(size) for size in case.sizes.values()), default=0)
    if torch.cuda.device_count() > 0 or not _FROM <= longest <= _TO:
        return case
    return case.with_(multiprocessors=FEW)


def multiprocessors_of(case: Case) -> int:
    """How many multiprocessors the modelled GPU has for the case."""
    return MANY if case.multiprocessors is None else case.multiprocessors


def described(case: Case) -> AbstractContextManager[None]:
    """Within this block the modelled device is that of this case; an actual GPU stays itself."""
    return modelled_device.multiprocessors(multiprocessors_of(case))
