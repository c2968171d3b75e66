"""One call of the kernel on trial: guarded, watched, and reported as facts."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_fusion.errors import TooManyProgramsError
from pytest_fusion.run import interpreter
from pytest_fusion.run.launch import Launch
from pytest_fusion.run.memory.damage import Damage
from pytest_fusion.run.memory.watch import Watch
from pytest_fusion.run.place import Placed


@dataclass(slots=True)
class Outcome:
    """What one fused call did. ``result`` and ``watch`` hold tensors and live only as long as the case."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    origin: str = ""
    damage: list[Damage] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    watch: Watch | None = None


def _origin(error: BaseException) -> str:
    """``file.py:function`` of the innermost frame, without the line: stable while shrinking."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = ("/torch/", "/triton/", "/pytest_fusion/run/")
    own = [f for f in frames if not any(part in f.filename for part in foreign)]
    frame = (own or frames)[-1] if frames else None
    return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.name}" if frame else ""


def _short_trace(error: BaseException) -> str:
    """The frames outside this package, for the report."""
    lines = traceback.format_exception(error)
    return "".join(lines[-12:])


@contextmanager
def _launches(seen: list[Launch], limit: int) -> Iterator[None]:
    def note(launch: Launch) -> None:
        seen.append(launch)
        if launch.programs > limit:
            raise TooManyProgramsError(f"{launch.kernel} asks for {launch.programs} programs, this lane runs {limit}")

    with interpreter.observe(note):
        yield


def run_fused(
    fused: Callable[..., Any], placed: Placed, extra: Mapping[str, Any], *, programs: int, fill: str | None = None
) -> Outcome:
    """Call the kernel once. Exceptions become part of the outcome; Ctrl-C and the like pass through.

    ``fill`` is what fresh allocations hold, by default what surrounds the inputs.
    """
    outcome = Outcome()
    watch = Watch(placed.arena.device, fill or placed.arena.fill)
    outcome.watch = watch
    try:
        with _launches(outcome.launches, programs), watch:
            outcome.result = fused(**placed.arguments, **extra)
            if placed.arena.device.type == "cuda":
                torch.cuda.synchronize(placed.arena.device)
    except Exception as error:
        outcome.error = error
        outcome.origin = _origin(error)
        outcome.trace = _short_trace(error)
    outcome.damage = [*placed.arena.damage(), *watch.damage()]
    return outcome
