"""The reference on its own copies of the inputs, natively and in shadow lanes."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pytest_fusion.case.containers import map_tensors, rebuilt, tensors_by_name
from pytest_fusion.errors import SpecError
from pytest_fusion.oracle import Drawn, LaneRun, OutputLanes, run_lanes
from pytest_fusion.run import pristine
from pytest_fusion.run.bits import as_bytes
from pytest_fusion.run.precision import full_precision
from pytest_fusion.run.process.fork import cuda_is_poisoned
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import first_line

# Few lanes price every case; a suspected failure is judged again by many fresh ones.
FEW_LANES = 6
MANY_LANES = 24
MOST_LANES = 64


class ReferenceFailed(Exception):
    """The reference itself raised; its exception is the cause."""


class ReferenceCrashed(SpecError):
    """The reference ended its process or destroyed its CUDA context, which can judge nothing more."""


@contextmanager
def on_its_own(name: str, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Run a reference in full precision; raises ``ReferenceCrashed`` where it loses the CUDA context."""
    # An error of the last launch surfaces only when the device is waited for.
    devices = {value.device for value in inputs.values() if isinstance(value, torch.Tensor)}
    try:
        with full_precision():
            yield
        for device in devices:
            if device.type == "cuda":
                pristine.synchronize(device)
    except Exception as error:
        if not cuda_is_poisoned():
            raise
        raise ReferenceCrashed(
            f"{name}: the reference itself lost the CUDA context ({first_line(error)}), after the kernel had ended "
            "well; bound the sizes in dims=, or the values (values.finite()), to those that it can compute, or fix it"
        ) from error


@dataclass(slots=True)
class ReferenceRun:
    """The reference's result with its lanes; ``arguments`` are the copies it got."""

    result: Any
    arguments: dict[str, Any]
    native: list[torch.Tensor]
    lanes: list[OutputLanes] = field(default_factory=list)
    fallbacks: tuple[str, ...] = ()
    numbers: frozenset[float] = frozenset()


def takes(function: Callable[..., Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``names`` that the function takes."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(names)
    return {name: value for name, value in names.items() if name in parameters}


def copies(logical: Mapping[str, Any], leaves: Iterable[str] = ()) -> dict[str, Any]:
    """Contiguous copies of all tensors among the inputs, nested ones too; ``leaves`` require a gradient."""
    made = {name: map_tensors(value, torch.Tensor.clone) for name, value in logical.items()}
    return made | {name: made[name].detach().requires_grad_(True) for name in leaves}


def run_reference(
    spec: FusionSpec,
    logical: Mapping[str, Any],
    extra: Mapping[str, Any],
    read: Callable[[Any, Mapping[str, Any]], Sequence[torch.Tensor]],
    *,
    lanes: int,
    seed: int,
    kind: Literal["E", "F"] = "E",
    limit_s: float = math.inf,
    laid: Mapping[str, Any] | None = None,
    numbers: frozenset[float] = frozenset(),
) -> ReferenceRun:
    """Call the reference; ``read`` lists the result tensors of a call in a fixed order.

    ``lanes=0`` runs it natively; for ``kind`` see `LaneMode`. It gets contiguous copies of the inputs, or ``laid``, the
    same values in other layouts; ``numbers`` are those of an earlier run.

    Raises ``ReferenceFailed`` where it raises, or because of ``TooSlow`` after ``limit_s`` seconds in lanes;
    ``SpecError`` where it is random (a generator that it seeds by its inputs in each call is not) or writes an
    undeclared input; ``ReferenceCrashed`` where it loses the CUDA context.
    """
    arguments = copies(logical) if laid is None else dict(laid)
    run = ReferenceRun(None, arguments, [])
    own = rebuilt(arguments)

    def call() -> Sequence[torch.Tensor]:
        try:
            run.result = spec.reference(**own, **takes(spec.reference, extra))
        except NotImplementedError as error:
            if lanes and (found := re.search(r"Cannot access storage of (\w+?)(TensorImpl)?$", first_line(error))):
                raise SpecError(
                    f"{spec.name}: the reference makes {found[1]} tensors, whose rounding cannot be followed; write it "
                    "with dense ones (to_dense() of what is given, and @), or say how far off a result may be: "
                    "tolerance=Tolerance(...)"
                ) from error
            raise ReferenceFailed(f"{type(error).__name__}: {error}") from error
        except Exception as error:
            raise ReferenceFailed(f"{type(error).__name__}: {error}") from error
        _forbid_exchanges(spec, arguments, own)
        return read(run.result, arguments)

    before = torch.get_rng_state()
    if lanes:
        with on_its_own(spec.name, logical):
            shadow: LaneRun = run_lanes(call, lanes=lanes, kind=kind, seed=seed, limit_s=limit_s, numbers=numbers)
        random, seeded = Drawn.OWN in shadow.drawn, Drawn.PASSED in shadow.drawn
        run.lanes = list(shadow.outputs)
        run.native = [output.native for output in run.lanes]
        run.fallbacks, run.numbers = shadow.fallbacks, shadow.numbers
    else:
        with on_its_own(spec.name, logical):
            run.native = list(call())
        seeded = False
        random = not pristine.equal(before, torch.get_rng_state())
    if random:
        raise SpecError(
            f"{spec.name}: the reference consumes random numbers, so it has no single right answer; pass the noise, "
            "mask or seed as an input and use that"
        )
    if seeded:
        _forbid_moving_generators(spec, logical, extra, read, run.native)
    _forbid_writes(spec, logical, arguments)
    return run


def _forbid_moving_generators(
    spec: FusionSpec,
    logical: Mapping[str, Any],
    extra: Mapping[str, Any],
    read: Callable[[Any, Mapping[str, Any]], Sequence[torch.Tensor]],
    native: Sequence[torch.Tensor],
) -> None:
    """Raises ``SpecError`` where a second call draws other numbers, as generators that it seeds do not."""
    arguments = copies(logical)
    with on_its_own(spec.name, logical):
        result = spec.reference(**rebuilt(arguments), **takes(spec.reference, extra))
    again = read(result, arguments)
    if len(again) != len(native) or not all(map(_alike, again, native)):
        raise SpecError(
            f"{spec.name}: the reference draws from a generator that goes on from call to call, so it has no single "
            "right answer; make it in the reference, seeded by an input: torch.Generator().manual_seed(seed)"
        )


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one draw explains both: other orders of a sum change last bits, other draws far more."""
    if one.shape != other.shape or one.dtype != other.dtype or not one.is_floating_point():
        return one.shape == other.shape and pristine.equal(as_bytes(one), as_bytes(other))
    a, b = one.detach().double(), other.detach().double()
    size = torch.nan_to_num(a, nan=0.0, posinf=0.0, neginf=0.0).abs().amax().item() if a.numel() else 0.0
    return bool(torch.allclose(a, b, rtol=2.0**-8, atol=2.0**-8 * size, equal_nan=True))


def _forbid_exchanges(spec: FusionSpec, arguments: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises ``SpecError`` where a list holds other tensors afterwards: holders of the old ones see no write."""
    for name in spec.mutates:
        before, after = (list(tensors_by_name(name, given[name]).values()) for given in (arguments, own))
        if len(before) != len(after) or any(x is not y for x, y in zip(before, after, strict=True)):
            raise SpecError(
                f"{spec.name}: the reference puts other tensors into its input {name!r} instead of writing to those "
                "that are there, as mutates= says; write with copy_() or mul_() and the like, or return the results"
            )


def _forbid_writes(spec: FusionSpec, logical: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    for name, value in logical.items():
        if name in spec.given_up:
            continue
        after = tensors_by_name(name, arguments[name])
        for inner, before in tensors_by_name(name, value).items():
            if before.numel() and not pristine.equal(as_bytes(before), as_bytes(after[inner])):
                raise SpecError(
                    f"{spec.name}: the reference writes into its input {inner!r}; clone it first, or declare "
                    f"mutates={name!r} if the kernel is meant to write it too"
                )
