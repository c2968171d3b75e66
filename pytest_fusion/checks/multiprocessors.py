"""How many multiprocessors the modelled GPU has: few, so that a persistent kernel has several turns.

The case alone decides, and with it all of its calls: how a kernel splits a sum may follow from what it is told. It is
told so before it is judged first; what is made of it, for a smaller failure or an experiment, is told the same.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.sizes import count
from pytest_fusion.interpreter.bridge import modelled_device

# Two turns for the largest tiles in use, of 128 x 128, in the broadest cases (640 x 160). A Jetson Orin Nano has 8.
FEW, MANY = 8, int(modelled_device.PROPERTIES["multi_processor_count"])
# In smaller cases hardly anything has so many tiles, and a launcher that asks once, in its first call, is told of an
# H100; in longer ones a row more is a turn more, and the interpreter runs turns one after the other (21 s, not 4).
_FROM, _TO = 100, 2000


def with_few(case: Case) -> Case:
    """The case with ``FEW`` where the longest of its sizes is one of hundreds and no GPU answers for itself."""
    longest = max((count(size) for size in case.sizes.values()), default=0)
    if torch.cuda.device_count() > 0 or not _FROM <= longest <= _TO:
        return case
    return case.with_(multiprocessors=FEW)


def multiprocessors_of(case: Case) -> int:
    """How many multiprocessors the modelled GPU has for the case."""
    return MANY if case.multiprocessors is None else case.multiprocessors


def described(case: Case) -> AbstractContextManager[None]:
    """While it lasts the modelled device is the one of this case; where there is a GPU, that one answers."""
    return modelled_device.multiprocessors(multiprocessors_of(case))
