"""Named changes of a case's logical inputs, for experiments that no case expresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.make import chosen
from pytest_fusion.case.plan import regimes_of
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import ConstantSpec, StrategySpec, TensorSpec, unwrap
from pytest_fusion.spec.values import ValueProfile

_COARSE = frozenset({torch.float16, torch.bfloat16})
# 1e-3 is the largest epsilon of a published normalisation (batch norm in Keras); rates, momenta and scales are larger.
_LARGEST_EPSILON = 1e-3


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of the inputs, and its unique name."""

    name: str
    apply: Callable[[dict[str, Any]], dict[str, Any]]


def _floating(spec: FusionSpec, case: Case) -> dict[str, TensorSpec]:
    """The present floating tensors."""
    present = {name: tensor.dtype for name, tensor in case.tensors.items() if name not in case.absent}
    return {name: spec.tensors[name] for name, dtype in present.items() if dtype.startswith(("float", "bfloat"))}


def _profiles(spec: FusionSpec, case: Case) -> dict[str, ValueProfile]:
    """The value profiles from which floating tensors are drawn, where they have one."""
    return {
        name: chosen(inner.values, case.tensors[name].regime)[0]
        for name, inner in _floating(spec, case).items()
        if isinstance(inner.values, ValueProfile)
    }


def free(spec: FusionSpec, case: Case) -> list[str]:
    """The floating tensors without a narrowed range, which can hold any other values."""
    return [name for name, inner in _floating(spec, case).items() if regimes_of(inner, covered=False)]


def scalable(spec: FusionSpec, case: Case) -> list[str]:
    """The floating tensors that may hold smaller numbers: free ones, and those whose value profile contains 0."""
    able = {name for name, profile in _profiles(spec, case).items() if _spans_zero(profile)} | set(free(spec, case))
    return [name for name in case.tensors if name in able]


def ranged(spec: FusionSpec, case: Case) -> dict[str, tuple[float, float, float]]:
    """The floating tensors whose elements may be any number of a range independently: three numbers of it each."""
    return {name: span for name, profile in _profiles(spec, case).items() if (span := _span(profile)) is not None}


def _span(profile: ValueProfile) -> tuple[float, float, float] | None:
    params = dict(profile.params)
    if any(isinstance(value, str) for value in params.values()):
        return None
    match profile.kind:
        case "normal":
            mean, off = float(params["mean"]), 2 * float(params["std"])
            return mean - off, mean, mean + off
        case "uniform":
            low, high = float(params["low"]), float(params["high"])
            return low, (low + high) / 2, high
    return None


def reals(spec: FusionSpec, case: Case) -> dict[str, float]:
    """The floating tensors with a profile of both signs, and its reach from 0 (if uniform, to the nearer end)."""
    profiles, found = _profiles(spec, case), {}
    for name, (low, middle, high) in ranged(spec, case).items():
        reach = high - middle if profiles[name].kind == "normal" else min(-low, high)
        if reach > 0:
            found[name] = reach
    return found


def _spans_zero(profile: ValueProfile) -> bool:
    params = dict(profile.params)
    match profile.kind:
        case "default" | "finite":
            return True
        case "normal":
            return params["mean"] == 0
        case "uniform":
            low, high = params["low"], params["high"]
            return not isinstance(low, str) and not isinstance(high, str) and low <= 0 <= high
    return False


def epsilons(spec: FusionSpec, case: Case) -> list[str]:
    """Inputs that are small positive numbers."""
    return [
        name
        for name, declared in spec.inputs.items()
        if isinstance(value := _number(unwrap(declared), case.drawn.get(name)), float) and 0 < value <= _LARGEST_EPSILON
    ]


def _number(inner: Any, drawn: Any) -> Any:
    if isinstance(inner, ConstantSpec):
        return inner.value
    return drawn if isinstance(inner, StrategySpec) else None


def on(names: Iterable[str], what: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """An edit of tensors in float64, converted back within the range of their dtypes."""
    chosen = tuple(names)

    def apply(logical: dict[str, Any]) -> dict[str, Any]:
        changed = dict(logical)
        for name in chosen:
            t = logical[name]
            limit = float(torch.finfo(t.dtype).max)
            made = function(t.to(torch.float64))
            changed[name] = torch.where(torch.isfinite(made), made.clamp(-limit, limit), made).to(t.dtype)
        return changed

    return Edit(f"{what} of {', '.join(chosen)}", apply)


def finite(names: Iterable[str], value: float = 0.5) -> Edit:
    """Finite numbers in place of NaN and infinities."""
    return on(names, f"{value:g} for NaN", lambda t: torch.where(torch.isfinite(t), t, value))


def scaled(names: Iterable[str], power: int) -> Edit:
    return on(names, f"2^{power} times", lambda t: t * 2.0**power)


def larger(names: Iterable[str], times: float = 1.03) -> Edit:
    """Numbers of the same signs and zeros, 3 % larger: only the roundings differ."""
    return on(names, f"{times:g} times", lambda t: t * times)


def shifted(names: Iterable[str], by: float) -> Edit:
    return on(names, f"{by:+g} added to values", lambda t: t + by)


def positive(names: Iterable[str]) -> Edit:
    return on(names, "magnitudes plus 1", lambda t: t.abs() + 1)


def negative(names: Iterable[str]) -> Edit:
    return on(names, "minus magnitudes minus 1", lambda t: -t.abs() - 1)


def centred(names: Iterable[str]) -> Edit:
    """Each row minus its mean."""
    return on(names, "centred rows", lambda t: t - t.mean(-1, keepdim=True) if t.dim() and t.shape[-1] else t)


def whole(names: Iterable[str], power: int = 0) -> Edit:
    """Whole numbers from -4 to 4, times 2^power: sums and products of a few are exact in every floating dtype."""

    def function(t: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.remainder((t.nan_to_num() * 7 * 2.0**-power).round(), 9) - 4
        return made * 2.0**power

    what = "small whole numbers" + (f" times 2^{power}" if power else "")
    return on(names, f"{what} instead", function)


def twins(names: Iterable[str]) -> Edit:
    """The first two elements of each row made equal, if a row has more than two."""

    def function(t: torch.Tensor) -> torch.Tensor:
        made = t.clone()
        if made.dim() and made.shape[-1] > 2:
            made[..., 1] = made[..., 0]
        return made

    return on(names, "the first two alike", function)


def rising(names: Iterable[str]) -> Edit:
    """Positive values that grow sixteenfold along each axis, so that late ones are largest."""

    def function(t: torch.Tensor) -> torch.Tensor:
        made = 1 + 0.01 * t.nan_to_num(0.0, 0.0, 0.0).clamp(-1.0, 1.0)
        for axis, size in enumerate(t.shape):
            ramp = torch.linspace(1.0, 16.0, size, dtype=torch.float64, device=t.device)
            made = made * ramp.reshape(-1, *[1] * (t.dim() - axis - 1))
        return made

    return on(names, "rising magnitudes", function)


def along(places: Iterable[tuple[str, int]], what: str, function: Callable[[torch.Tensor, int], torch.Tensor]) -> Edit:
    """An edit of tensors along an axis of each; a place is an input's name and an axis."""
    chosen = tuple(places)

    def apply(logical: dict[str, Any]) -> dict[str, Any]:
        changed = dict(logical)
        for name, axis in chosen:
            changed[name] = function(changed[name], axis)
        return changed

    return Edit(f"{what} " + ", ".join(f"{name}:{axis}" for name, axis in chosen), apply)


def repeated(places: Iterable[tuple[str, int]], index: int = 0) -> Edit:
    """One index of an axis, repeated at all of its indices."""
    return along(
        places,
        f"{index} repeated",
        lambda t, axis: t.narrow(axis, index, 1).expand(t.shape).contiguous() if t.shape[axis] else t,
    )


def ended(places: Iterable[tuple[str, int]], size: int) -> Edit:
    """0 at all indices of an axis from ``size`` on."""

    def function(t: torch.Tensor, axis: int) -> torch.Tensor:
        made = t.clone()
        made.narrow(axis, size, t.shape[axis] - size).zero_()
        return made

    return along(places, f"0 from {size} on in", function)


def both(first: Edit | None, second: Edit) -> Edit:
    """One change after the other."""
    if first is None:
        return second
    return Edit(f"{first.name}, {second.name}", lambda logical: second.apply(first.apply(logical)))


def alone(name: str, axis: int, index: int) -> Edit:
    """The first slice at one index of an axis, and 0 at all others."""

    def apply(logical: dict[str, Any]) -> dict[str, Any]:
        t = logical[name]
        changed = torch.zeros_like(t)
        changed.select(axis, index).copy_(t.select(axis, 0))
        return {**logical, name: changed}

    return Edit(f"only the first of {name}:{axis}, at {index}", apply)


def upcast() -> Edit:
    """The same numbers, 16-bit tensors as float32."""

    def wide(value: Any) -> Any:
        return value.to(torch.float32) if isinstance(value, torch.Tensor) and value.dtype in _COARSE else value

    return Edit("float32 instead of 16 bits", lambda logical: {name: wide(value) for name, value in logical.items()})


def number(name: str, value: float) -> Edit:
    """Another value for a number among the inputs."""
    return Edit(f"{name}={value:g}", lambda logical: {**logical, name: value})
