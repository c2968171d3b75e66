"""Check `launches`: no call launches more kernels than ``max_launches``.

All kernels of the forward call count, torch's own included, but not copies and fills by the device's copy engines. A
GPU counts them (`run.measure`); the CPU lane models a lower bound, in tests that launch a Triton kernel: others may
have a path for the CPU. Each case's first call shows launches and operators for free, at least the model's number: if
these are too many, the case is counted. A few others are counted too, as one operator may be several kernels on a GPU,
and what runs may be invisible.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.checks.check import Check
from pytest_fusion.checks.context import Context, tensors_of
from pytest_fusion.checks.launches.extra_launches import listed, surplus
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict, failed, passed, unknown
from pytest_fusion.run.fused import ContextLost, bare
from pytest_fusion.run.measure import launches
from pytest_fusion.run.measure.launches import Counts, Modelled, Uncounted, Work
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.placing import Placed, place, rewrite
from pytest_fusion.run.process.fork import cuda_is_poisoned
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import brief, first_line

NAME = "launches"
CAUSE = "extra-launch"

# Cases counted without and with a suspicion. On a GPU a count takes some 10 ms, its cross-check once 2 to 4 s.
_FEW, _FEW_DEEP = 4, 40
_SUSPICIOUS = 60
_STEPS = 60


@dataclass(slots=True)
class _State:
    """The check's state in one test. ``fewest``: the names of the call with fewest kernels."""

    counted: int = 0
    suspicious: int = 0
    most: int = 0
    methods: dict[str, None] = field(default_factory=dict)
    agreed: bool = False
    shapes: set[str] = field(default_factory=set)
    left: dict[str, None] = field(default_factory=dict)
    fewest: Counter[str] | None = None
    # Whether some case launched a Triton kernel; otherwise the CPU lane may run only a path for the CPU.
    launched: bool = False
    found: bool = False
    steps: int = 0


def missing(spec: FusionSpec, device: torch.device) -> str | None:  # noqa: ARG001
    """Without a bound there is nothing to check."""
    return (
        None if spec.max_launches is not None else "not requested: max_launches= says how many kernels a call may take"
    )


def due(trial: Trial) -> bool:
    """Cases whose first call exceeds the bound, and a few of different shapes and layouts."""
    context, case = trial.context, trial.result.case
    state = context.state(_State)
    state.launched = state.launched or any(launch.programs for launch in trial.result.launches)
    if state.found:
        state.steps += 1
        return state.steps <= _STEPS
    if not any(t.numel() for t in tensors_of(trial.logical).values()):
        return False
    if context.device.type != "cuda" and not state.launched:
        return False
    if context.complete:
        return True
    assert trial.spec.max_launches is not None
    if trial.result.work > trial.spec.max_launches:
        return state.suspicious < _SUSPICIOUS
    return (
        trial.thorough and _key(case) not in state.shapes and len(state.shapes) < (_FEW_DEEP if context.deep else _FEW)
    )


def _key(case: Case) -> str:
    return repr((case.sizes, [(name, tensor.layout.kind) for name, tensor in sorted(case.tensors.items())]))


def run(trial: Trial) -> Verdict:
    """One count and, if it is too large, the reason."""
    state, case = trial.context.state(_State), trial.result.case
    assert trial.spec.max_launches is not None
    if trial.result.work > trial.spec.max_launches:
        state.suspicious += 1
    state.shapes.add(_key(case))
    with trial.context.clock.phase(NAME):
        return _Counting(trial, state, trial.spec.max_launches).run()


def summary(context: Context) -> Verdict:
    """The verdict over all cases."""
    state = context.state(_State)
    if state.left:
        return unknown(NAME, "; ".join(state.left))
    if context.device.type != "cuda" and not state.launched:
        return unknown(NAME, _NO_LAUNCH)
    if not state.counted:
        return unknown(NAME, "no case with an element was judged")
    how = " and ".join(_METHODS[method] for method in state.methods)
    how += ", the same by the profiler" if state.agreed else ""
    where = f"in {state.counted} case(s); no other launches more Triton kernels and operators of torch than are allowed"
    return Verdict(NAME, "pass", f"at most {state.most} kernel(s) a call, {how}, {where}")


_NO_LAUNCH = (
    "no Triton kernel was launched: what runs here may be a path for the CPU, and a GPU counts what it launches itself"
)
_METHODS = {
    "graph": "counted in a captured CUDA graph",
    "profiler": "counted by the profiler",
    "modelled": "modelled: interpreted launches and torch's operators",
}


class _Counting:
    """The counts of one case."""

    def __init__(self, trial: Trial, state: _State, allowed: int) -> None:
        self.trial, self.context, self.spec, self.state = trial, trial.context, trial.spec, state
        self.allowed = allowed

    def run(self) -> Verdict:
        try:
            counts, work = self.count(self.trial.result.case)
        except ContextLost:
            raise
        except Exception as error:  # noqa: BLE001 - it did not raise before, so this is no count
            return self.leave(f"called to be counted, it raised {brief(error)[:200]}")
        if isinstance(counts, Uncounted):
            return self.leave(counts.reason)
        if counts.kernels > self.allowed:
            self.state.found = True
            return self.too_many(counts, work)
        if counts.doubts:
            return self.leave("; ".join(counts.doubts))
        state, names = self.state, Counter(dict(counts.names))
        state.counted += 1
        state.most = max(state.most, counts.kernels)
        state.methods[counts.method] = None
        state.agreed = state.agreed or bool(counts.agreed)
        if names and (state.fewest is None or names.total() < state.fewest.total()):
            state.fewest = names
        return passed(NAME, **counts.as_json())

    def leave(self, reason: str) -> Verdict:
        self.state.left[reason] = None
        return unknown(NAME, reason)

    def count(self, case: Case) -> tuple[Counts | Uncounted, list[Work]]:
        """The counts; on the CPU lane with the work behind them."""
        placed = place(self.trial.logical, case, self.context.device, FILLS[0])
        return self.model(placed) if self.context.device.type != "cuda" else (self.measure(placed), [])

    def measure(self, placed: Placed) -> Counts | Uncounted:
        """Count on the device. The profiler counts the first case too, and every failed count."""
        call, back, given = self.call(placed), self.back(placed), placed.arguments
        first, capture = not self.state.counted, not self.spec.syncs
        with _losing_contexts():
            found = launches.count(call, given, self.context.device, prepare=back, capture=capture, cross_check=first)
            if not first and isinstance(found, Counts) and found.kernels > self.allowed and found.method == "graph":
                found = launches.count(call, given, self.context.device, prepare=back)
        return found

    def model(self, placed: Placed) -> tuple[Counts | Uncounted, list[Work]]:
        """The modelled count; one above the bound must repeat, as the first call may tune or fill caches."""
        found = self.modelled(placed)
        if found.counts.kernels > self.allowed:
            rewrite(placed, self.trial.logical)
            found = min(found, self.modelled(placed), key=lambda one: one.counts.kernels)
        if not found.bounds:
            return Uncounted("; ".join(found.counts.doubts)), []
        return found.counts, found.work

    def modelled(self, placed: Placed) -> Modelled:
        with bare():
            return launches.modelled(self.call(placed), placed.arguments, prepare=self.back(placed))

    def call(self, placed: Placed) -> Callable[[], object]:
        return lambda: self.spec.fused(**placed.arguments, **self.context.extra)

    def back(self, placed: Placed) -> Callable[[], None]:
        return lambda: rewrite(placed, self.trial.logical)

    def too_many(self, counts: Counts, work: list[Work]) -> Verdict:
        """The failure: which kernels there are, and which are the surplus."""
        work = work or self.explained()
        found = surplus(counts, work, plain=self.contiguous(), fewest=self.state.fewest)
        how = _METHODS[counts.method] + (", the same by the profiler" if counts.agreed else "")
        return failed(
            NAME,
            f"the call launches {counts.kernels} kernels ({how}), max_launches={self.allowed} allows {self.allowed}: "
            f"{listed(counts, work)}; {found.because}; {found.advice}",
            identity=f"{NAME}:{CAUSE}",
            cause=CAUSE,
            because=found.because,
            allowed=self.allowed,
            surplus=[[name, count] for name, count in sorted(found.names.items())],
            **counts.as_json(),
        )

    def explained(self) -> list[Work]:
        """On a GPU: torch's operators in the call, and their places."""
        placed = place(self.trial.logical, self.trial.result.case, self.context.device, FILLS[0])
        with contextlib.suppress(Exception):
            return self.modelled(placed).work
        return []

    def contiguous(self) -> Counts | None:
        """The counts of the same case with contiguous inputs, if within the bound."""
        case = self.trial.result.case
        if all(tensor.layout.plain for tensor in case.tensors.values()):
            return None
        try:
            counts, _ = self.count(case.contiguous())
        except ContextLost:
            raise
        except Exception:  # noqa: BLE001 - an experiment that fails explains nothing
            return None
        return counts if isinstance(counts, Counts) and counts.kernels <= self.allowed else None


@contextlib.contextmanager
def _losing_contexts() -> Iterator[None]:
    """Raise ``ContextLost`` for what destroyed the CUDA context."""
    try:
        yield
    except Exception as error:
        if cuda_is_poisoned():
            raise ContextLost(first_line(error)) from error
        raise


CHECK = Check(NAME, run, due=due, missing=missing, summary=summary)
