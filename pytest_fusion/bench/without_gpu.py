"""Facts of a case without a GPU: launches, bytes, operations. Interpreted kernels have no useful latency.

The kernel's launches are bound to their arguments and left out, so that full sizes cost only memory; the reference runs
on tensors without data if it can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytest_fusion.bench.entries import Entry
from pytest_fusion.bench.measured import Figures, NotMeasuredError
from pytest_fusion.case.containers import map_tensors, tensors_of
from pytest_fusion.case.make import ImpossibleCase, InputFailed, copies_of_zeros, make_inputs
from pytest_fusion.interpreter.bridge.named_device import with_stand_in
from pytest_fusion.interpreter.control.executor import skipped
from pytest_fusion.oracle.reference import takes
from pytest_fusion.run.fused import bare
from pytest_fusion.run.measure.launches.launch_count import Counts, Uncounted
from pytest_fusion.run.measure.launches.modelled_launches import modelled
from pytest_fusion.run.measure.traffic import Traffic, algorithmic_bytes, traffic_of
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import brief, first_line


def full_mask(spec: FusionSpec, sizes: Mapping[str, Any], result: Any) -> dict[str, torch.Tensor]:
    """A bool mask by the name of the reference's parameter; empty for a spec without masks. Its values change no
    counts. Its shape is ``rng(dims=...)``, else that of the largest floating output, as of most masks."""
    rng = spec.random
    outputs = [t for t in tensors_of(result) if t.is_floating_point()]
    if rng is None or rng.mask is None or not outputs:
        return {}
    largest = max(outputs, key=torch.Tensor.numel)
    shape = largest.shape if rng.dims is None else torch.Size(rng.dims.evaluate(sizes))
    return {rng.mask: torch.ones(shape, dtype=torch.bool, device=largest.device)}


CPU = torch.device("cpu")


def measure(spec: FusionSpec, entry: Entry, extra: Mapping[str, Any]) -> Figures:
    """The figures of an entry. Raises ``NotMeasuredError`` if its inputs cannot be made or the fused call raises."""
    try:
        logical = make_inputs(spec, entry.case, CPU, zeros=True)
    except (ImpossibleCase, InputFailed, RuntimeError, MemoryError, OSError) as error:
        raise NotMeasuredError(f"the inputs cannot be made: {first_line(error)}") from error
    results: list[Any] = []
    arguments = copies_of_zeros(spec, logical)

    def call() -> None:
        results[:] = [spec.fused(**arguments, **extra)]

    def counted() -> Counts | Uncounted:
        with skipped(), bare(), torch.no_grad():
            call()
            return modelled(call, arguments).counts

    try:
        counts = with_stand_in(counted)
    except Exception as error:
        raise NotMeasuredError(f"the call raises {brief(error)}") from error
    written = [arguments[name] for name in spec.mutates]
    moved = algorithmic_bytes(logical.values(), [results[0], *written])
    arguments = {**extra, **full_mask(spec, entry.case.sizes, results[0])}
    return Figures(counts, moved, *of_reference(spec, logical, arguments))


def of_reference(
    spec: FusionSpec, logical: Mapping[str, Any], extra: Mapping[str, Any]
) -> tuple[Counts | Uncounted, Traffic | None]:
    """The reference's launches, and its traffic if it needs no values."""
    call, empty = _without_data(spec, logical, extra)
    try:
        with torch.no_grad():
            return modelled(call, empty).counts, traffic_of(call)
    except Exception as error:  # noqa: BLE001 - whatever a reference needs values for
        return Uncounted(f"it needs values ({brief(error)})"), None


def traffic_of_reference(spec: FusionSpec, logical: Mapping[str, Any], extra: Mapping[str, Any]) -> Traffic | None:
    """The reference's traffic; ``None`` if it needs values."""
    call, _ = _without_data(spec, logical, extra)
    try:
        with torch.no_grad():
            call()  # tables that a first call makes are no traffic of later ones
            return traffic_of(call)
    except Exception:  # noqa: BLE001 - whatever a reference needs values for
        return None


def _without_data(
    spec: FusionSpec, logical: Mapping[str, Any], extra: Mapping[str, Any]
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A call of the reference on tensors without data: a product of 8192 cubed would take a CPU half a minute."""
    empty = {name: map_tensors(value, lambda t: t.to("meta")) for name, value in logical.items()}
    more = {name: map_tensors(value, lambda t: t.to("meta")) for name, value in takes(spec.reference, extra).items()}
    return lambda: spec.reference(**empty, **more), empty
