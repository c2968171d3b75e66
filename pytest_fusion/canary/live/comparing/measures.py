"""`Measures`: latency and accuracy of both kernels, on some of the calls that are compared; accuracy by a `Referee`."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_fusion.canary.evidence.ledger import Ledger
from pytest_fusion.canary.evidence.observation import Observation
from pytest_fusion.canary.live.calls.arguments import Names, devices_of, signature_of
from pytest_fusion.canary.live.calls.captures import beside_captures, recorded
from pytest_fusion.canary.live.calls.copies import CannotCopyError, Copies, Generators, copied_bytes, copies_of
from pytest_fusion.canary.live.comparing.call_pairs import Pairs, Plan, Span, clock_of
from pytest_fusion.canary.live.comparing.pending import Comparisons, Forms
from pytest_fusion.canary.live.policy import Policy
from pytest_fusion.canary.live.watchdog import CandidateHungError, Watchdog
from pytest_fusion.case.containers import map_tensors, tensors_of
from pytest_fusion.oracle.lane_mode import LaneMode
from pytest_fusion.oracle.reference import takes
from pytest_fusion.oracle.rounding import GRIDS, Noise, quantum
from pytest_fusion.run.placing import write
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import brief, out_of_memory

# Bytes of a call's arguments: 2^21 elements of float16 become 16 MiB of float64 for each step of the reference.
_MOST_BYTES = 4 * 2**20
# Share of one host thread's time.
_BUDGET = 0.02


@dataclass(slots=True)
class _Taken:
    bucket: str
    arguments: dict[str, Any]
    incumbent: list[Tensor]
    candidate: list[Tensor]
    event: Any


class DrawsError(ValueError):
    """The reference draws random numbers: its result varies, and it changes the generators of the process."""


class Referee:
    """Measures the accuracy of one call at a time. ``offer`` waits for no device; ``look`` is for another thread. The
    reference runs on the host, also for tensors of a GPU, in a share of one thread's time."""

    def __init__(self, spec: FusionSpec, names: Names) -> None:
        self._spec = spec
        self._names = names
        self._clock = time.perf_counter
        self._budget = _BUDGET
        self._due = 0.0
        self.clear()

    def clear(self) -> None:
        """Forgets the call, as in a forked child."""
        self._taken: _Taken | None = None
        self._lock = threading.Lock()

    @property
    def wants(self) -> bool:
        """Whether it would take a call now."""
        return self._taken is None and self._clock() >= self._due

    def offer(self, bucket: str, inputs: Copies, incumbent: object, candidate: object) -> str:
        """Stores a call with its unmodified ``inputs``; returns the reason if it does not."""
        if sum(pair.copy.numel() * pair.copy.element_size() for pair in inputs.pairs) > _MOST_BYTES:
            return "too large to judge by the reference"
        ours, theirs = _outputs(incumbent), _outputs(candidate)
        if not ours or self._spec.mutates:
            return "no result to judge by the reference"
        with self._lock, torch.no_grad():
            if not self.wants:
                return ""
            devices = {tensor.device for tensor in (*ours, *theirs, *tensors_of([inputs.args, inputs.kwargs]))}
            try:
                device = clock_of(devices)
            except ValueError as error:
                return str(error)
            # The caller may write into its result as soon as it has it.
            ours, theirs = [one.detach().clone() for one in ours], [one.detach().clone() for one in theirs]
            event = None
            if device is not None:
                with torch.cuda.device(device):
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record()
            self._taken = _Taken(bucket, dict(self._names(inputs.args, inputs.kwargs)), ours, theirs, event)
        return ""

    def look(self) -> tuple[str, float] | str | None:
        """The bucket and the log ratio of errors of the call, or the reason for none; ``None`` if not finished."""
        taken = self._taken
        if taken is None or (taken.event is not None and not taken.event.query()):
            return None
        began = self._clock()
        try:
            return taken.bucket, self._judged(taken)
        except Exception as error:  # noqa: BLE001 - a reference that raises is counted, and neither kernel is to blame
            began = -math.inf if isinstance(error, DrawsError) else began  # which must not happen again
            return f"not judged by the reference: {brief(error)}"
        finally:
            ended = self._clock()
            self._due = ended + (ended - began) / self._budget
            self._taken = None

    def _judged(self, taken: _Taken) -> float:
        arguments = {name: map_tensors(value, _on_the_host) for name, value in taken.arguments.items()}
        truth = _exactly(self._spec.reference, takes(self._spec.reference, arguments))
        if [one.shape for one in truth] != [one.shape for one in taken.incumbent]:
            raise ValueError("the reference returns other shapes than the kernels")
        ours = theirs = 0.0
        for exact, one, other in zip(truth, taken.incumbent, taken.candidate, strict=True):
            for_us, for_them = _errors(exact, _on_the_host(one), _on_the_host(other))
            ours, theirs = ours + for_us, theirs + for_them
        # Both exact is equal; the floor in `_errors` keeps one of them from being zero alone.
        return math.log(theirs / ours) / 2 if ours and theirs else 0.0


def _outputs(result: object) -> list[Tensor]:
    return [t for t in tensors_of(result) if t.is_floating_point()]


def _on_the_host(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor
    # On its own stream, or the copy would wait for the default stream and delay it.
    stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(tensor.device), torch.cuda.stream(stream):
        return tensor.cpu()


@torch.no_grad()
def _exactly(reference: Callable[..., Any], arguments: dict[str, Any]) -> list[Tensor]:
    """The floating-point results of the reference in float64, without intermediate rounding."""
    mode = LaneMode(Noise(0, "E", 0))
    with mode:
        result = reference(**arguments)
    if mode.drawn:
        raise DrawsError("it draws random numbers")
    return [mode.lanes_of(one).raw[0] for one in _outputs(result)]


def _errors(exact: Tensor, ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Mean squared errors over the mean square of the output, at least that of a correctly rounded result (step^2 /
    12). More exact values by luck mean nothing."""
    finite = torch.isfinite(exact) & torch.isfinite(ours) & torch.isfinite(theirs)
    exact = exact[finite].double()
    if not exact.numel():
        return 0.0, 0.0
    size = float(exact.square().mean()) or 1.0
    floor = float(quantum(exact, ours.dtype).square().mean()) / 12 if ours.dtype in GRIDS else 0.0
    found = [float((one[finite].double() - exact).square().mean()) for one in (ours, theirs)]
    return max(found[0], floor) / size, max(found[1], floor) / size


# Seconds of budget that may be spent in advance, so that bursts of calls are compared too.
_AHEAD_S = 1.0
Kernel = Callable[..., Any]


class Budget:
    """Allows spending ``share`` of the time that passes; 1 is no limit. ``open`` is for any thread, ``spend`` for one.
    A call's cost is known only after it, so the budget may be overspent; it then closes until that is paid back."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._clock = clock
        self._left = share * _AHEAD_S
        self._at = clock()

    @property
    def open(self) -> bool:
        """Whether another call may be compared now."""
        return self._share >= 1 or self._left > 0

    def spend(self, seconds: float) -> None:
        """Adds the GPU seconds spent since the last call."""
        now = self._clock()
        self._left = min(self._share * _AHEAD_S, self._left + self._share * (now - self._at)) - seconds
        self._at = now


class Chosen(NamedTuple):
    """A call that is measured: how it is timed, if it is, and its arguments as they came."""

    plan: Plan | None
    spare: Copies


class Measures:
    """Times both kernels and measures their errors, within ``budget``.
    ``choose`` and ``take`` are for any thread and wait for no device; ``look`` may wait. ``watchdog`` runs the
    candidate. Errors are measured with a ``spec`` whose reference has one right answer."""

    def __init__(
        self,
        kernels: tuple[Kernel, Kernel],
        policy: Policy,
        spec: FusionSpec | None,
        names: Names,
        watchdog: Watchdog,
        comparisons: Comparisons,
        ledger: Ledger,
        forms: Forms,
    ) -> None:
        self._incumbent, self._candidate = kernels
        self._watchdog = watchdog
        # The incumbent also runs under a watchdog: what Python does before a call of 20 us was worth 2.6 % of it.
        self._alike = Watchdog(math.inf).run
        self._comparisons = comparisons
        self._ledger = ledger
        self._forms = forms
        self._names = names
        self._most_bytes = policy.memory_mib * 2**20
        # Kernels that write no argument can run on the same copies again and again.
        self._pure = policy.writes == ()
        self.budget = Budget(policy.gpu_share)
        self._pairs = Pairs(policy.timed)
        self._referee = None if spec is None or spec.random is not None else Referee(spec, names)
        self.clear()

    def seed(self, seed: int) -> None:
        self._pairs.seed(seed)

    def clear(self) -> None:
        """Forgets all measurements, for another rollout or in a forked child."""
        self._reading = threading.Lock()
        # Bounded, because spans of a device that hangs are never read.
        self._spent: deque[Span] = deque(maxlen=4096)
        self._pairs.clear()
        if self._referee is not None:
            self._referee.clear()

    def why_not(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The reason why a sampled call cannot be compared, or "". The caller waits, so cheap tests come first."""
        if not self.budget.open:
            return "over its share of GPU time"
        if recorded():
            return "recorded into a graph"
        return "too large to copy" if copied_bytes(args, kwargs) > self._most_bytes else ""

    def choose(self, ticket: int, args: tuple[Any, ...], kwargs: dict[str, Any], copies: Copies) -> Chosen | None:
        """How this call is measured, or ``None``: never with a new signature, where kernels compile. Raises nothing."""
        try:
            plan = self._pairs.plan(ticket)
            wanted = plan is not None or (self._referee is not None and self._referee.wants)
            if not wanted or self._forms.get(signature_of(args, kwargs)) is None:
                return None
            spare = copies if self._pure else copies_of(args, kwargs, self._names, most_bytes=self._most_bytes)
            return Chosen(plan, spare)
        except Exception as error:  # noqa: BLE001 - a measurement that fails must not fail the call
            small = not isinstance(error, CannotCopyError)
            self._ledger.count(f"not timed: {brief(error) if small else 'too large to copy twice'}"[:100])
            return None

    def take(
        self, chosen: Chosen, bucket: str, results: tuple[object, object], copies: Copies, before: Generators
    ) -> Observation | None:
        """Times the pair and offers ``results`` to the referee; an observation if the candidate now fails."""
        if self._referee is not None:
            why = self._referee.offer(bucket, chosen.spare, *results)
            if why:
                self._ledger.count(why)
        if chosen.plan is None:
            return None
        devices = devices_of(copies.args, copies.kwargs)
        try:
            device = clock_of(devices)
        except ValueError:
            self._ledger.count("not timed: on several devices")
            return None
        spans = Span(device), Span(device)
        after = Generators(devices)
        try:
            for second in (chosen.plan.first, not chosen.plan.first):
                # Rewritten, so that both kernels find the same bytes at the same place and no warmer cache.
                for pair, original in zip(copies.pairs, chosen.spare.pairs, strict=True):
                    if pair.copy is not original.copy:
                        write(pair.copy, original.copy)
                before.put_back()
                with torch.no_grad():
                    if second and chosen.plan.arm == "candidate":
                        failed = self._run_candidate(spans[1], bucket, copies)
                        if failed is not None:
                            return failed
                    else:
                        again = self._alike(spans[second].around(self._incumbent), copies.args, copies.kwargs)
        except Exception as error:  # noqa: BLE001 - the caller has its result; our error is counted, not raised
            self._ledger.count(f"not timed: {'no memory for it' if out_of_memory(error) else brief(error)}"[:100])
            return None
        finally:
            after.put_back()
        self._pairs.add(bucket, chosen.plan, *spans)
        if chosen.plan.arm == "candidate":
            return None
        return self._comparisons.submit(results[0], again, copies, bucket, copied="candidate", arm="itself")

    def _run_candidate(self, span: Span, bucket: str, copies: Copies) -> Observation | None:
        try:
            self._watchdog.run(span.around(self._candidate), copies.args, copies.kwargs)
        except CandidateHungError:
            return Observation("hang", bucket, "it ran for too long when it was run again to be timed")
        except Exception as error:
            # Anything but exhausted memory is an observation of the candidate.
            if out_of_memory(error):
                raise
            return Observation("error", bucket, f"{brief(error)}, when it was run again to be timed")
        return None

    @contextmanager
    def spending(self, tensors: object) -> Iterator[None]:
        """Measures the GPU time inside as the canary's own and charges it to the budget."""
        devices = {tensor.device for tensor in tensors_of(tensors) if tensor.device.type == "cuda"}
        with beside_captures():
            if len(devices) != 1:
                yield
                return
            span = Span(devices.pop())
            span.begin()
            try:
                yield
            finally:
                span.end()
                self._spent.append(span)

    def look(self) -> None:
        """Moves finished measurements to the ledger; safe for two threads at once."""
        with self._reading:
            total = 0.0
            while self._spent:
                seconds = self._spent[0].seconds()
                if seconds is None:
                    break
                self._spent.popleft()
                total += seconds
            self._ledger.spend(total)
            self.budget.spend(total)
            for block in self._pairs.ready():
                self._ledger.ratio("latency_ratio", block.bucket, block.ratio, block.arm)
            found = None if self._referee is None else self._referee.look()
            if isinstance(found, str):
                self._ledger.count(found)
            elif found is not None:
                self._ledger.ratio("error_ratio", *found)
