"""What can be known of a case without a GPU: launches, bytes, operations.

The kernel's launches are bound to their arguments and left out, so that full sizes cost their memory only; the
reference runs on tensors without data where it bears that. Interpreted kernels have no latency worth a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_fusion.bench.entries import Entry
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.case.nested import map_tensors
from pytest_fusion.errors import first_line
from pytest_fusion.run.bare import bare
from pytest_fusion.run.counting.model import Counts, Uncounted
from pytest_fusion.run.counting.modelled import modelled
from pytest_fusion.run.interpreter.executor import skipped
from pytest_fusion.run.reference import copies, takes
from pytest_fusion.run.traffic import Traffic, algorithmic_bytes, traffic_of
from pytest_fusion.spec.fusion_spec import FusionSpec

CPU = torch.device("cpu")


@dataclass(slots=True)
class Modelled:
    """Facts of one entry.

    ``counts`` of the fused call and of the reference, ``moved`` its algorithmic bytes, ``reference`` what the reference
    moves and computes. ``lacking`` says of a fact that is not here why.
    """

    counts: Counts | Uncounted
    moved: int
    reference_counts: Counts | Uncounted
    reference: Traffic | None
    lacking: dict[str, str] = field(default_factory=dict)


class NotMeasuredError(Exception):
    """The entry cannot be called at all; the message says why."""


def measure(spec: FusionSpec, entry: Entry, extra: Mapping[str, Any]) -> Modelled:
    """Raises ``NotMeasuredError`` where the inputs cannot be made or the fused call raises."""
    try:
        logical = make_inputs(spec, entry.case, CPU, zeros=True)
    except (ImpossibleCase, InputFailed, RuntimeError, MemoryError) as error:
        raise NotMeasuredError(f"the inputs cannot be made: {first_line(error)}") from error
    results: list[Any] = []
    arguments = copies(logical)

    def call() -> None:
        results[:] = [spec.fused(**arguments, **extra)]

    try:
        with skipped(), bare(), torch.no_grad():
            call()
            counts = modelled(call, arguments).counts
    except Exception as error:
        raise NotMeasuredError(f"the call raises {type(error).__name__}: {first_line(error)}") from error
    written = [arguments[name] for name in spec.mutates if isinstance(arguments.get(name), torch.Tensor)]
    moved = algorithmic_bytes(logical.values(), [results[0], *written])
    found = Modelled(counts, moved, Uncounted("not asked"), None)
    _of_reference(spec, logical, extra, found)
    return found


def _of_reference(spec: FusionSpec, logical: Mapping[str, Any], extra: Mapping[str, Any], found: Modelled) -> None:
    """On tensors without data: at full sizes a product of 8192 cubed would take a CPU half a minute."""

    def called(arguments: Mapping[str, Any]) -> Callable[[], Any]:
        return lambda: spec.reference(**arguments, **takes(spec.reference, extra))

    empty = {name: map_tensors(value, lambda t: t.to("meta")) for name, value in logical.items()}
    try:
        with torch.no_grad():
            found.reference = traffic_of(called(empty))
            found.reference_counts = modelled(called(empty), empty).counts
    except Exception as error:  # noqa: BLE001 - whatever a reference needs values for
        why = f"the reference needs values ({type(error).__name__}: {first_line(error)})"
        found.lacking["reference"] = why
        found.reference_counts = Uncounted(why)
