"""`check_equivalent`: judge one concrete call on the caller's own tensors, in pytest or outside it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pytest_fusion import active
from pytest_fusion.case import search as searching
from pytest_fusion.case.model import Case
from pytest_fusion.examine import Request, failure_of, run
from pytest_fusion.report.record import TestRecord
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import ConstantSpec

_ONE_CALL = "one concrete call cannot tell"


def check_equivalent(fused: Callable[..., Any], reference: Callable[..., Any], *args: Any, **kwargs: Any) -> TestRecord:
    """Call both with these arguments, each on copies of its own, and judge the fused result.

    The tensors keep their layout; nothing is written to the caller's. Returns the record of the checks; raises
    ``FusionFailure`` when one fails.
    """
    __tracebackhide__ = True
    names = _positional_names(reference, len(args), kwargs)
    inputs = {**dict(zip(names, args, strict=True)), **kwargs}

    def by_name(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(**given: Any) -> Any:
            return function(*(given.pop(name) for name in names), **given)

        call.__name__ = getattr(function, "__name__", "fused")
        return call

    spec = FusionSpec(
        fused=by_name(fused),
        reference=by_name(reference),
        inputs={name: ConstantSpec(value) for name, value in inputs.items()} or {"_": ConstantSpec(None)},
        name=getattr(fused, "__name__", type(fused).__name__),
        without={"vacuity": _ONE_CALL},
    )
    running = active.current()
    devices = {str(value.device) for value in inputs.values() if hasattr(value, "device")}
    device = next((d for d in sorted(devices, reverse=True)), "cpu")
    nodeid = running.make_request().nodeid if running is not None else spec.name
    request = Request(nodeid=nodeid, device=device, replay=Case({}, "float32", {}))

    def outer() -> None: ...

    searching.adopt(outer, outer)
    record = run(spec, request, outer=outer, extra={})
    if running is not None:
        running.records.append(record)
    if record.verdict == "fail":
        raise failure_of(record)
    return record


def _positional_names(reference: Callable[..., Any], count: int, kwargs: dict[str, Any]) -> list[str]:
    try:
        names = [name for name in inspect.signature(reference).parameters if name not in kwargs]
    except (TypeError, ValueError):
        names = []
    return names[:count] if len(names) >= count else [f"arg{i}" for i in range(count)]
