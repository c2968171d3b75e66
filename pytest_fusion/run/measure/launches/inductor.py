"""The C++ kernels that ``torch.compile`` made for the CPU, counted as they are called.

They are not what Inductor makes for a GPU: it joins and splits loops by other rules there. So their number is a fact
about this machine, and bounds nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pytest_fusion.interpreter.scoped import holding

_NOT_A_GPU = "these are Inductor's kernels for the CPU; a GPU gets others"
_TOO_LATE = "code was compiled during the call that was counted, and its kernels were not seen"


@dataclass(slots=True)
class Compiled:
    """The kernels by name, and why they prove little; ``late``: more was compiled in the meantime, and not counted."""

    kernels: Counter[str] = field(default_factory=Counter)
    doubts: list[str] = field(default_factory=list)
    late: bool = False


@contextlib.contextmanager
def counted() -> Iterator[Compiled]:
    """Count the calls of kernels that were compiled before; does nothing where Inductor was never imported.

    Touches the modules in ``torch._inductor.codecache.PyCodeCache.modules`` (torch 2.11 and 2.13), whose functions
    ``cpp_fused_...`` are one kernel each.
    """
    found = Compiled()
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    before = len(getattr(cache, "modules", ()))
    with contextlib.ExitStack() as stack:
        for module in list(getattr(cache, "modules", ())):
            for name, kernel in list(vars(module).items()):
                if name.startswith("cpp_") and callable(kernel):
                    stack.enter_context(holding(module, **{name: _noting(found.kernels, name, kernel)}))
        yield found
    if found.kernels:
        found.doubts.append(_NOT_A_GPU)
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    if len(getattr(cache, "modules", ())) > before:
        found.late = True
        found.doubts.append(_TOO_LATE)


def _noting(kernels: Counter[str], name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        kernels[name] += 1
        return kernel(*args)

    return call
