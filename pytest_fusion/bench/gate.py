"""Whether a kernel is right at the sizes that are measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pytest_fusion.bench.entries import Entry, smaller
from pytest_fusion.bench.without_gpu import traffic_of_reference
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.checks.case_judge import judge_case
from pytest_fusion.checks.context import Context
from pytest_fusion.checks.verdict import NO_ROOM_TO_JUDGE, OUT_OF_MEMORY
from pytest_fusion.errors import SpecError
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import first_line, out_of_memory

# A GPU runs any number of programs.
PROGRAMS = 1 << 62
# A case whose lanes find no memory is halved so often: rows of 131,072 from 8,192 to 8.
_HALVINGS = 10
# Bytes: an element of the largest intermediate has an oracle and six lanes in float64, in some four live tensors. A
# case without room is not tried: cross entropy of 8192 x 131072 filled an H200 four times, and other workers failed.
_ELEMENT, _SHARE = 4 * 7 * 8, 0.4
_NO_ROOM = "there is no memory for the float64 lanes of the reference"


@dataclass(frozen=True, slots=True)
class Gated:
    """The result of a gate: ``wrong`` says what fails, or is empty; ``notes`` qualify the numbers."""

    wrong: str = ""
    notes: tuple[str, ...] = ()


def gate(spec: FusionSpec, entry: Entry, extra: Mapping[str, Any], device: torch.device) -> Gated:
    """Judges the entry's case, or a smaller one, with a note, if the case's lanes find no memory."""
    judged: Entry | None = entry
    for _ in range(1 + _HALVINGS):
        if judged is None:
            break
        found = _judged(spec, judged, extra, device) if _fits(spec, judged, extra, device) else None
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if found is not None and judged is entry:
            return found
        if found is not None and found.wrong:
            return Gated(f"at {judged.text}: {found.wrong}")
        if found is not None:
            return Gated(notes=(*found.notes, f"its result was judged at {judged.text}: {_NO_ROOM}"))
        try:
            judged = smaller(spec, judged)
        except SpecError:
            break
    return Gated(notes=(f"its result was not judged: {_NO_ROOM}",))


def _fits(spec: FusionSpec, entry: Entry, extra: Mapping[str, Any], device: torch.device) -> bool:
    """Whether there is room for the lanes, as far as that is known beforehand."""
    room = _room(device)
    if room is None:
        return True
    try:
        logical = make_inputs(spec, entry.case, device, zeros=True)
    except (ImpossibleCase, InputFailed):
        return True  # and judging it says why it cannot be made
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return False
    traffic = traffic_of_reference(spec, logical, extra)
    largest = max((value.numel() for value in logical.values() if isinstance(value, torch.Tensor)), default=0)
    return max(largest, traffic.largest if traffic is not None else 0) * _ELEMENT <= room


def _room(device: torch.device) -> float | None:
    """Usable bytes of a GPU; ``None`` for a CPU, which has no limit here."""
    return _SHARE * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _judged(spec: FusionSpec, entry: Entry, extra: Mapping[str, Any], device: torch.device) -> Gated | None:
    """The result at one entry, ``None`` if memory ran out."""
    # One case cannot decide `vacuity`, and two dozen lanes would judge each of its wrong answers.
    quiet = replace(spec, without={**spec.without, "vacuity": "one case cannot decide it"})
    result = judge_case(Context(quiet, device, extra, programs=PROGRAMS), entry.case)
    if result.failure is not None:
        return Gated(f"{result.failure.check} failed: {first_line(result.failure.reason)}")
    if result.rejected in (OUT_OF_MEMORY, NO_ROOM_TO_JUDGE):
        return None
    if result.rejected is not None:
        return Gated(notes=(f"its result was not judged at these sizes: {result.rejected}",))
    return Gated()
