"""One spec and how to run it: its campaign in this process, or in a forked child with compilers beside it."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pytest_fusion import interpreter
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.describe import one_line
from pytest_fusion.engine.campaign import Campaign
from pytest_fusion.engine.request import Request
from pytest_fusion.engine.tally import Tally
from pytest_fusion.engine.unjudged import NOTHING_JUDGED
from pytest_fusion.errors import UnsupportedTritonError
from pytest_fusion.oracle.reference import ReferenceCrashed
from pytest_fusion.run import compilers
from pytest_fusion.run.compiled import around_compilations, on_first_compilation
from pytest_fusion.run.fused import ContextLost
from pytest_fusion.run.process.compile_ahead import cache_is_empty, compiled_once, compiling_ahead
from pytest_fusion.run.process.fork import COMPILING, Channel, Crash, cuda_is_poisoned, run_isolated, unwrap
from pytest_fusion.run.process.large_frame import call_in_large_frame
from pytest_fusion.run.process.shared_cases import Shared
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import first_line

Note = Callable[[dict[str, Any]], None]
T = TypeVar("T")

# In the traceback of a kernel that is compiled or sent to a driver, never of an interpreted one.
_COMPILED = ("/triton/compiler/", "triton.compiler.", "active drivers")


@dataclass(frozen=True, slots=True)
class Job:
    """A spec, its request, the test function with its Hypothesis settings, and the values of its fixtures.

    ``only``: run this case alone; ``given`` describes it where it stands for the caller's own arguments. ``explained``:
    diagnose failures, which takes seconds. ``known`` cases failed in earlier runs and run first. ``drawn``: the seed of
    the search where the request has none, the same for what compiles ahead, with which ``ahead`` shares the cases.
    """

    spec: FusionSpec
    request: Request
    outer: Any
    extra: Mapping[str, Any]
    only: Case | None = None
    given: Mapping[str, Any] | None = None
    explained: bool = True
    known: tuple[Case, ...] = ()
    drawn: int = field(default_factory=lambda: secrets.randbits(63))
    ahead: Shared = field(default_factory=Shared)

    def alone(self, case: Case, *, explained: bool = True, spec: FusionSpec | None = None) -> Job:
        """The same job for one case only, in a child; of another ``spec`` where there is one."""
        request = replace(self.request, isolate="on")
        return replace(self, request=request, only=case, explained=explained, spec=spec or self.spec)

    def campaign(self, note: Note, *, dry: bool = False) -> Campaign:
        known = [case for case in self.known if not any(case == pin.case for pin in self.request.pinned)]
        return Campaign(
            self.spec,
            self.request,
            outer=self.outer,
            extra=self.extra,
            note=note,
            dry=dry,
            drawn=self.drawn,
            known=known,
            ahead=self.ahead,
        )

    def here(self, note: Note) -> Tally:
        """All cases in this process. Raises ``UnsupportedTritonError`` where no kernel could be launched at all."""
        tally = call_in_large_frame(lambda: self._all_cases(note))
        if self.request.device != "cpu":
            return tally
        problem = interpreter.problem()
        failure = tally.failure
        if failure is not None and failure.verdict.check == "error":
            # No kernel could be launched, which is not the kernel's fault.
            if problem is not None and not interpreter.installed():
                raise UnsupportedTritonError(problem)
            if any(part in failure.trace for part in _COMPILED):
                raise UnsupportedTritonError(interpreter.TOO_EARLY)
        if problem is not None:
            tally.notes.append(problem)
        return tally

    def _all_cases(self, note: Note) -> Tally:
        """Run the ``only`` case; without one, pinned cases, and then a whole campaign."""
        if self.only is not None:
            return self.campaign(note).replay(self.only, explained=self.explained, every_config=self.given is not None)
        pinned, notes = self._pinned(note)
        if pinned is not None:
            return pinned
        tally = self.campaign(note).run()
        tally.notes += notes
        return tally

    def _pinned(self, note: Note) -> tuple[Tally | None, list[str]]:
        """The tally of the first pinned case that fails again, if one does; and notes on the others."""
        notes, passed = [], 0
        for pin in self.request.pinned:
            tally = self.campaign(lambda data, pin=pin: note({**data, "pinned": pin.path})).replay(pin.case)  # type: ignore[misc]
            failure = tally.failure
            if failure is None:
                passed += 1
            elif failure.verdict.identity == NOTHING_JUDGED:
                notes.append(f"pinned replay {pin.path} was not judged here: {failure.verdict.facts['kinds']}")
            else:
                tally.pinned = pin.path
                return tally, []
        return None, [*([f"{passed} pinned replay(s) were run first and pass"] if passed else []), *notes]

    def in_child(
        self,
        seconds: float,
        *,
        forward: bool = True,
        on_compilation: Callable[[], None] | None = None,
        on_late: Callable[[Any], float | None] = lambda _: None,
    ) -> Tally | Crash:
        """All cases in a child; a lost CUDA context counts as a crash. ``seconds`` limits one case.

        ``seconds`` is the limit of one case, past which ``on_late`` may give another. ``forward=False`` drops what the
        child prints. ``on_compilation`` is called when the compile cache proves cold.
        """

        def work(channel: Channel) -> Tally | Crash:
            last: dict[str, Any] = {}
            listening = on_first_compilation(on_compilation) if on_compilation else contextlib.nullcontext()
            try:
                with listening:
                    return with_notes(channel, last, self.here, self.ahead)
            except ReferenceCrashed as error:
                case = f"; the case was {one_line(last['case'])}" if "case" in last else ""
                raise ReferenceCrashed(f"{error}{case}") from error
            except Exception as error:
                # The error of an earlier asynchronous launch, met in the judge's own use of the device.
                if self.request.device == "cpu" or not cuda_is_poisoned():
                    raise
                return Crash("exit", first_line(error), dict(last), "")

        return unwrap(run_isolated(work, time_limit_s=seconds, forward=forward, on_late=on_late))

    @contextlib.contextmanager
    def compiling_ahead(self) -> Iterator[Callable[[], None] | None]:
        """On a GPU, fill Triton's compile cache beside the test, from the call of what this yields."""
        if self.request.device == "cpu" or self.only is not None or "triton" not in sys.modules:
            yield None
            return

        def work(turns: Iterator[int]) -> None:
            with compiled_once():
                self.campaign(lambda _: None, dry=True).compile_share(turns)

        with compiling_ahead(work, self.ahead):
            if cache_is_empty():
                self.ahead.begin()
            yield self.ahead.begin


def with_notes(
    channel: Channel, last: dict[str, Any], work: Callable[[Note], T], ahead: Shared | None = None
) -> T | Crash:
    """Call ``work`` with a function that sends notes, the last also in ``last``; a lost CUDA context is a `Crash`."""

    def note(data: dict[str, Any]) -> None:
        last.clear()
        last.update(data)
        channel.note(data)

    def compiling(kernel: str) -> None:
        channel.note({**last, COMPILING: kernel})

    def compiled() -> None:
        channel.note(dict(last))

    try:
        with compiled_once(ahead), around_compilations(compiling, compiled), compilers.announced(compiling, compiled):
            return work(note)
    except ContextLost as lost:
        return Crash("exit", str(lost), dict(last), "")
