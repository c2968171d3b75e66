"""Which kernels of an interpreted test Triton's front end rejects: the interpreter takes any Python.

The front end takes 0.02 to 0.1 s a kernel and needs no ``ptxas``. Later stages depend more on tiles and options than on
the kernel (`kernel_resources` runs them).
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pytest_fusion.interpreter.scoped import replaced
from pytest_fusion.run.measure.resources.compiler import run_compiler, tried
from pytest_fusion.run.measure.resources.second_triton import Compilable, second_triton
from pytest_fusion.run.measure.resources.specialiser import (
    Live,
    NotSpecialisedError,
    bind,
    constants_of,
    without_values,
)
from pytest_fusion.run.measure.resources.targets import TARGETS, Resources
from pytest_fusion.run.process.fork import ChildError, Crash, can_fork, run_isolated
from pytest_fusion.spec.wording import first_line

# Kernels are written for the newest targets; most users have this one.
TARGET = TARGETS["sm_90"]
# A smaller constant may choose a branch, or be too small a block for a product.
_FLAGS = 32
_MOST_OF_KERNEL, _MOST = 8, 24
# Seconds after the tests; the largest kernel of the suite takes 0.9 s on a loaded core.
_SECONDS, _ENOUGH = 60.0, 5.0


@dataclass(slots=True)
class Launched:
    """The kernels of a test: the first launch of each, and each launch with new kinds of arguments or flags."""

    launches: list[Live] = field(default_factory=list)
    # By kernel: the kinds of its arguments so far, or why there is none.
    known: dict[Any, set[tuple[str, Any]]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def note(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        known = self.known.setdefault(kernel, set())
        if sum(live.kernel is kernel for live in self.launches) >= _MOST_OF_KERNEL or len(self.launches) >= _MOST:
            return
        constants = constants_of(kernel)
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        kinds = {(name, _kind(value, name in constants)) for name, value in given.items() if name in kernel.arg_names}
        if known and kinds <= known:
            return
        known |= kinds
        try:
            self.launches.append(without_values(bind(kernel, args, kwargs)))
        except NotSpecialisedError as error:
            self.problems.setdefault(str(kernel.fn.__name__), str(error))


def _kind(value: Any, constant: bool) -> Any:
    """The properties that decide which code is compiled: equal for blocks of other sizes and for other numbers."""
    value = getattr(value, "value", value) if constant else value
    if isinstance(value, tuple):
        return tuple(_kind(item, constant) for item in value)
    if isinstance(value, bool | int | float):
        return value if constant and -_FLAGS < value < _FLAGS else type(value)
    dtype = getattr(getattr(value, "base", value), "dtype", None)
    return str(value if dtype is None else dtype)


def launched(into: Launched) -> AbstractContextManager[None]:
    """Record the kernels that the body interprets; does nothing where Triton compiles."""

    def run(upstream: Any, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not kwargs.get("warmup"):
            into.note(kernel, args, {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")})
        return upstream(kernel, *args, **kwargs)

    return replaced("triton.runtime.interpreter", "InterpretedFunction", "run", run)


def compiled_by_front_end(found: Launched) -> list[Resources] | str:
    """The worst result of each kernel's launches, or why nothing is known."""
    problem = can_fork()
    if problem is not None:
        return problem
    try:
        second_triton()  # before the fork, so that the next test of this process has it
    except Exception as error:  # noqa: BLE001 - Triton's own modules, or a backend's, may raise anything
        return f"Triton cannot be imported as it compiles: {first_line(error) or type(error).__name__}"
    outcome = run_isolated(lambda _: _all(found), time_limit_s=_SECONDS, forward=False)
    if isinstance(outcome, Crash):
        return f"the compiling process ended: {outcome.detail}"
    return f"{outcome.type_name}: {outcome.message}" if isinstance(outcome, ChildError) else outcome


def _all(found: Launched) -> list[Resources]:
    translated, end = Compilable(), time.monotonic() + _ENOUGH
    worst: dict[Any, Resources] = {}
    for live in found.launches:
        before = worst.get(live.kernel)
        if before is not None and (before.status == "refused" or time.monotonic() > end):
            continue
        result = tried(translated.of(live), TARGET, partial(run_compiler, front_end=True))
        made = result if isinstance(result, Resources) else Resources(str(live.kernel.fn.__name__), TARGET.name)
        if before is None or made.status == "refused":
            worst[live.kernel] = made
    return list(worst.values())
