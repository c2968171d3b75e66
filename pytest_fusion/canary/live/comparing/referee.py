"""`Referee`: compares the errors of both kernels, now and then, with the spec's reference in float64."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.canary.live.calls.arguments import Names
from pytest_fusion.canary.live.calls.copies import Copies
from pytest_fusion.canary.live.comparing.call_pairs import clock_of
from pytest_fusion.case.containers import map_tensors, tensors_of
from pytest_fusion.oracle.lane_mode import LaneMode
from pytest_fusion.oracle.reference import takes
from pytest_fusion.oracle.rounding import GRIDS, Noise, quantum
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import brief

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
    """The reference draws random numbers: it has no one result, and consumes the numbers of the process."""


class Referee:
    """Measures one call at a time. ``offer`` is for the calling thread and waits for no device; ``look`` for another.

    The reference runs on the host, also for tensors of a GPU, in a share ``budget`` of one thread's time.
    """

    def __init__(
        self, spec: FusionSpec, names: Names, budget: float = _BUDGET, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._spec = spec
        self._names = names
        self._budget = budget
        self._clock = clock
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
        """Takes a call with its unmodified ``inputs``; returns the reason where it does not."""
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
            arguments = dict(self._names(inputs.args, inputs.kwargs))
            self._taken = _Taken(bucket, arguments, ours, theirs, event)
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
    """Mean squared errors of both results, relative to the mean square of the output.

    Neither is below that of a correctly rounded result, one twelfth of a step squared: which of two results happens to
    hold more exact values means nothing.
    """
    finite = torch.isfinite(exact) & torch.isfinite(ours) & torch.isfinite(theirs)
    exact = exact[finite].double()
    if not exact.numel():
        return 0.0, 0.0
    size = float(exact.square().mean()) or 1.0
    floor = float(quantum(exact, ours.dtype).square().mean()) / 12 if ours.dtype in GRIDS else 0.0
    found = [float((one[finite].double() - exact).square().mean()) for one in (ours, theirs)]
    return max(found[0], floor) / size, max(found[1], floor) / size
