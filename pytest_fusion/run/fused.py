"""One call of the kernel under test: guarded, watched, and reported as facts; or bare.

In a bare call a compiler, a capture or a stream sees only the kernel.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import torch

from pytest_fusion import interpreter
from pytest_fusion.case.containers import rebuilt, tensors_of
from pytest_fusion.errors import NeedsCudaError, TooManyProgramsError, UnsupportedTritonError
from pytest_fusion.interpreter.bridge.modelled_device import posing_as_cuda
from pytest_fusion.interpreter.bridge.named_device import missed, stand_in, with_stand_in
from pytest_fusion.interpreter.bridge.numpy_dtypes import Array
from pytest_fusion.interpreter.control.executor import most_alone
from pytest_fusion.interpreter.launch import Launch
from pytest_fusion.interpreter.memory.memory_findings import Findings, Site, into
from pytest_fusion.interpreter.memory.regions import Facts, Owned, described_by, holds_still, mark, memory_at
from pytest_fusion.interpreter.memory.undefined_lanes import judged_lanes
from pytest_fusion.run import pristine
from pytest_fusion.run.autotuned import causes
from pytest_fusion.run.compiled import observe_compiled
from pytest_fusion.run.memory.arena import Arena
from pytest_fusion.run.memory.damage import Damage
from pytest_fusion.run.memory.region import FarRegion, Region
from pytest_fusion.run.memory.watch import Watch
from pytest_fusion.run.placing import Placed
from pytest_fusion.run.precision import default_precision
from pytest_fusion.run.process.fork import cuda_is_poisoned
from pytest_fusion.run.refusals import Raiser, around_kernel, raised_by
from pytest_fusion.spec.wording import first_line, words

# Programs of a launch that may run one by one, at 1-4 ms each: a case that takes longer looks like a hang.
_MOST_ALONE = 300
# Half of the traceback lines to show, and characters of each.
_TRACE_LINES = 40
_TRACE_FRAMES = 8
_TRACE_WIDTH = 1000


class ContextLost(BaseException):
    """The kernel destroyed the CUDA context of this process: later results are invalid."""


@dataclass(slots=True)
class Outcome:
    """The facts of one fused call. ``result`` and ``watch`` hold tensors and live only as long as the case."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    origin: str = ""
    raiser: Raiser = ""
    damage: list[Damage] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    watch: Watch | None = None
    # Wrong accesses of interpreted kernels; not observed on a GPU.
    findings: Findings = field(default_factory=Findings)
    # Lines of interpreted kernels with masked-off lanes in a load without ``other``.
    undefined: list[Site] = field(default_factory=list)


def _origin(error: BaseException) -> str:
    """``file.py:function`` of the innermost frame, without the line, which shrinking may change."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not around_kernel(f.filename)]
    frame = (own or frames)[-1] if frames else None
    return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.name}" if frame else ""


def _short_trace(error: BaseException) -> str:
    """Frames of the kernel's own code (else all) and of explicit causes, with the message, cut in the middle."""
    chain = list(causes(error))
    frames = [
        frame
        for one in chain
        for frame in traceback.extract_tb(_below_the_call(one))
        if not around_kernel(frame.filename)
    ]
    if frames:
        entries = [*traceback.format_list(frames[-_TRACE_FRAMES:]), *traceback.format_exception_only(chain[-1])]
    else:
        entries = traceback.format_exception(type(error), error, _below_the_call(error))[-12:]
    lines = words("".join(entries)).splitlines(keepends=True)
    if len(lines) > 2 * _TRACE_LINES:
        left_out = f"... {len(lines) - 2 * _TRACE_LINES} lines ...\n"
        lines = [*lines[:_TRACE_LINES], left_out, *lines[-_TRACE_LINES:]]
    return "".join(line if len(line) <= _TRACE_WIDTH else f"{line[:_TRACE_WIDTH]}...\n" for line in lines)


def _below_the_call(error: BaseException) -> TracebackType | None:
    """The frames of the last call; an exception that is raised again has those of all calls."""
    frame = own = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code is _called.__code__:
            own = frame.tb_next or own
        frame = frame.tb_next
    return own


def _is_control(error: BaseException) -> bool:
    """Whether the error is not the kernel's: Ctrl-C, pytest's skip or xfail, or an error of this package."""
    outcomes = {"Skipped", "XFailed"}  # pytest's, which `run` does not know
    return (
        isinstance(error, KeyboardInterrupt)
        or not outcomes.isdisjoint(kind.__name__ for kind in type(error).__mro__)
        or type(error).__module__.startswith(("pytest_fusion.", "hypothesis."))
    )


@contextmanager
def _launches(seen: list[Launch], limit: int) -> Iterator[None]:
    def note(launch: Launch) -> None:
        seen.append(launch)
        if launch.programs > limit:
            raise TooManyProgramsError(
                f"{launch.kernel} launches {launch.programs} programs, the interpreter runs {limit}"
            )

    with interpreter.observe(note), observe_compiled(note), posing_as_cuda(torch):
        yield


def run_fused(
    fused: Callable[..., Any], placed: Placed, extra: Mapping[str, Any], *, programs: int, fill: str | None = None
) -> Outcome:
    """The outcome of one call of the kernel, exceptions included; Ctrl-C and the like pass through. ``fill`` is for
    fresh allocations, by default as the guards. Raises ``NeedsCudaError`` if only a GPU can run the call."""
    outcome = _called(fused, placed, extra, programs, fill)
    if outcome.error is not None and interpreter.installed() and missed(outcome.error):
        again = stand_in(outcome.error) and not placed.arena.changed()
        outcome = _called(fused, placed, extra, programs, fill) if again else outcome
        if outcome.error is not None and missed(outcome.error):
            raise NeedsCudaError(
                f"the kernel needs a CUDA device in {outcome.origin} ({first_line(outcome.error)}), where the CPU "
                "cannot stand in for one; allocate on the device of its inputs, or run it with --fusion-device cuda"
            ) from outcome.error
    return outcome


def _called(
    fused: Callable[..., Any], placed: Placed, extra: Mapping[str, Any], programs: int, fill: str | None
) -> Outcome:
    arena = placed.arena
    watch = Watch(arena.device, fill or arena.fill)
    described = Described(arena, watch)
    outcome = Outcome(watch=watch)
    try:
        with (
            _launches(outcome.launches, programs),
            into(outcome.findings),
            most_alone(_MOST_ALONE),
            described_by(described, described.hidden),
            judged_lanes() as undefined,
            watch,
        ):
            with default_precision(), pristine.watched():
                outcome.result = fused(**rebuilt(placed.arguments), **extra)
            if arena.device.type == "cuda":
                pristine.synchronize(arena.device)
    except UnsupportedTritonError:
        raise  # a fault of the installation, not of the kernel
    except BaseException as error:
        if not isinstance(error, Exception) and _is_control(error):
            raise
        if placed.arena.device.type == "cuda" and cuda_is_poisoned():
            raise ContextLost(first_line(error)) from error
        outcome.error = error
        outcome.origin, outcome.raiser = _origin(error), raised_by(error, fused)
        outcome.trace = _short_trace(error)
    outcome.undefined = list(undefined)
    outcome.damage = [*placed.arena.damage(), *watch.damage()]
    return outcome


def compile_only(fused: Callable[..., Any], placed: Placed, extra: Mapping[str, Any]) -> list[Launch]:
    """The compiled launches of one call, without running them; ignores its result and its error."""
    seen: list[Launch] = []
    with contextlib.suppress(Exception), observe_compiled(seen.append, launch=False):
        fused(**placed.arguments, **extra)
    return seen


class Described:
    """A provider for ``regions.described_by``: of an input (``arena``) a kernel may write only own elements, of what it
    allocates (``watch``) also the padding."""

    def __init__(self, arena: Arena, watch: Watch) -> None:
        self._arena, self._watch = arena, watch
        self._known: dict[int, tuple[Region, Facts]] = {}

    def __call__(self, address: int) -> Facts | None:
        region = self._arena.region(address) or self._watch.region(address)
        if region is None:
            return None
        known = self._known.get(address)
        # A freed tensor's address may belong to another tensor of another size.
        if known is None or known[0] is not region:
            known = self._known[address] = (region, self._described(region))
        found = known[1]
        if found.written is not None:
            for layout in self._watch.take_written(address):
                mark(found.written, *layout)
        return found

    def hidden(self) -> frozenset[int]:
        """Addresses of the blocks around the guarded tensors."""
        return self._arena.blocks() | self._watch.blocks()

    def _described(self, region: Region) -> Facts:
        if self._arena.region(region.address) is region:
            return Facts(own=_own(region))
        if not self._watch.fresh(region.address):
            return Facts()
        nbytes = region.storage_elements * region.dtype.itemsize
        fill = holds_still(memory_at(region.address, nbytes), np.frombuffer(region.bits, np.uint8))
        return Facts(written=np.zeros(nbytes, np.bool_), untouched=fill)


def _own(region: Region) -> Array | Owned | None:
    """Bool (bytes of the storage,): the tensor's own elements; ``None`` for all."""
    if region.dense:
        return None
    if isinstance(region, FarRegion):
        size = region.dtype.itemsize
        return Owned([(region.offset * size, region.shape, region.strides, size)])
    mask = np.zeros(region.storage_elements * region.dtype.itemsize, np.bool_)
    mark(mask, region.shape, region.strides, region.offset, region.dtype.itemsize)
    return mask


@contextlib.contextmanager
def bare() -> Iterator[None]:
    """Run interpreted kernels without judging accesses; those that leave a storage silently do not happen."""
    # Not tracked: allocations are unknown here, so stores beside a view of its own buffer would be left out.
    with into(Findings(tracking=False)), posing_as_cuda(torch):
        yield


def called(
    fused: Callable[..., Any], arguments: Mapping[str, Any], extra: Mapping[str, Any]
) -> tuple[Any, Exception | None]:
    """One call's result, or its exception. Raises ``ContextLost`` if it destroyed the CUDA context."""
    device = next((t.device for t in tensors_of(arguments)), torch.device("cpu"))

    def once() -> Any:
        with bare(), default_precision():
            result = fused(**arguments, **extra)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return result

    try:
        return with_stand_in(once), None
    except Exception as error:
        if device.type == "cuda" and cuda_is_poisoned():
            raise ContextLost(first_line(error)) from error
        return None, error
