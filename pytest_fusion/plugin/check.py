"""`check_equivalent`: judge one concrete call on the caller's own tensors, in pytest or outside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pytest_fusion import interpreter
from pytest_fusion.case.choosing import search as searching
from pytest_fusion.case.containers import leaves, map_tensors, tensors_of
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.modes import Concrete
from pytest_fusion.engine.outcome import failure_of
from pytest_fusion.engine.request import Request
from pytest_fusion.errors import FusionError, UnsupportedTritonError
from pytest_fusion.plugin import active
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run import device_choice
from pytest_fusion.spec.fusion_spec import FusionSpec, parameters_of
from pytest_fusion.spec.inputs import ConstantSpec

_ONE_CALL = "one concrete call cannot show it"
_IN_A_SCRIPT = (
    "Triton was imported before its interpreter was switched on, which stands in for a GPU. Put these lines above the "
    "import of your kernels, or set TRITON_INTERPRET=1 in the environment:\n"
    "    from pytest_fusion import interpreter\n"
    "    interpreter.enable()"
)
# A spec needs an input; a call without arguments gets this one, which is not passed on.
_NOTHING = "no arguments"


def check_equivalent(fused: Callable[..., Any], reference: Callable[..., Any], *args: Any, **kwargs: Any) -> TestRecord:
    """Call both with these arguments, each on its own copies, and judge the fused result.

    Copies have the same shape, dtype, strides and device, without ``requires_grad``. Returns the record of the checks.
    Raises ``FusionFailure`` when a check fails, ``FusionError`` for tensors on several devices, and what the reference
    raises if it refuses the arguments.
    """
    __tracebackhide__ = True
    names, inputs = arguments_by_name(reference, args, kwargs)
    fused_call, reference_call = by_name(fused, names), by_name(reference, names)
    spec = FusionSpec(
        fused=fused_call,
        reference=reference_call,
        inputs={name: ConstantSpec(value) for name, value in (inputs or {_NOTHING: None}).items()},
        name=name_of(fused),
        without={"vacuity": _ONE_CALL},
    )
    running = active.current()
    request = running.make_request() if running is not None else Request(nodeid=spec.name)
    device = device_of(inputs)
    if device == "cpu":
        device_choice.prepare(device)
    job = Job(spec, replace(request, device=device), searching.stand_in(), {})
    try:
        record = Concrete(_described(inputs)).run(job)
    except UnsupportedTritonError as error:
        if running is not None or str(error) != interpreter.TOO_EARLY:
            raise
        raise UnsupportedTritonError(_IN_A_SCRIPT) from None
    # The caller did not switch this check off.
    vacuity = {"verdict": "unknown", "reason": _ONE_CALL, "cases": 0}
    record = replace(record, off={}, checks={**record.checks, "vacuity": vacuity})
    if any(kind.startswith("reference ") for kind in record.rejected):
        reference_call(**{name: map_tensors(value, torch.Tensor.clone) for name, value in inputs.items()})
    if running is not None:
        running.records.append(record)
    if record.verdict == "fail":
        raise failure_of(record)
    return record


def by_name(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """The function as one that takes the positional arguments ``names`` by keyword."""

    def call(**given: Any) -> Any:
        given.pop(_NOTHING, None)
        positional = [given.pop(name) for name in names]
        return function(*positional, **given)

    # These functions share one code object, and `honesty` finds by code whether the kernel calls the reference.
    call.stands_for = function  # type: ignore[attr-defined]
    return call


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function in messages."""
    return str(getattr(function, "__name__", type(function).__name__))


def arguments_by_name(
    reference: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Names of the positional arguments (the reference's own, else numbers), and all arguments without gradients."""
    parameters = (parameters_of(reference) or {}).values()
    names = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in kwargs
    ]
    names = names[: len(args)] if len(names) >= len(args) else [f"arg{i}" for i in range(len(args))]
    inputs = {**dict(zip(names, args, strict=True)), **kwargs}
    return names, {name: map_tensors(value, torch.Tensor.detach) for name, value in inputs.items()}


def device_of(inputs: Mapping[str, Any]) -> str:
    """The device of all tensors, ``"cpu"`` or ``"cuda:N"``. Raises ``FusionError`` for tensors on several."""
    tensors = tensors_of(inputs)
    found = {t.device for t in tensors}
    if len(found) > 1:
        # A 0-d tensor of the CPU is valid beside others, as everywhere in torch.
        found = {t.device for t in tensors if t.dim() > 0 or t.device.type != "cpu"}
    if len(found) > 1:
        listed = ", ".join(sorted(map(str, found)))
        raise FusionError(f"check_equivalent: the tensors are on several devices ({listed}); move them to one")
    device = next(iter(found), torch.device("cpu"))
    return device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def _described(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in the form of a case, if they have one."""
    tensors, drawn = {}, {}
    for leaf in leaves(inputs):
        value, name = leaf.value, leaf.path.removeprefix("['").replace("']", "", 1)
        if isinstance(value, torch.Tensor):
            tensors[name] = {
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape),
                "layout": "contiguous" if value.is_contiguous() else "strided",
                "variant": 0,
                "strides": list(value.stride()),
                "offset": value.storage_offset(),
                "values": "given",
            }
        else:
            drawn[name] = value if isinstance(value, bool | int | float | str | None) else repr(value)
    words = [f"{name} {entry['dtype']} {entry['shape']}" for name, entry in tensors.items()]
    words += [f"{name}={value!r}" for name, value in drawn.items()]
    return {"given": True, "dims": {}, "inputs": tensors, "absent": [], "drawn": drawn, "text": "; ".join(words)}
