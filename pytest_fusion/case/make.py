"""Case -> tensors: the logical values of every input, contiguous, on the case's device."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from pytest_fusion.case import blank, counter_random, patterns, recorded_values, regimes, structured_integers
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.containers import map_tensors
from pytest_fusion.case.layouts import geometry
from pytest_fusion.case.regimes import Field
from pytest_fusion.errors import SpecError
from pytest_fusion.spec.dims import Size, parse_expression
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import ConstantSpec, DerivedSpec, TensorSpec, unwrap
from pytest_fusion.spec.values import ValueProfile

# Sums of a few numbers up to 100 times this exceed 32 bits; the numbers and products of two are exact in float32.
_PAST_32_BITS = 1 << 24


class ImpossibleCase(Exception):
    """The sizes give no tensor: a negative dim, or an index into nothing."""


class InputFailed(Exception):
    """A user's function for an input raised; its exception is the cause."""


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def shape_of(spec: TensorSpec, sizes: Mapping[str, Size]) -> tuple[int, ...]:
    """The shape of a tensor at these sizes. Raises ``ImpossibleCase`` for a negative one."""
    try:
        shape = spec.shape.evaluate(sizes)
    except ZeroDivisionError:
        raise ImpossibleCase(f"{spec.shape.text!r} divides by a size of zero") from None
    if any(size < 0 for size in shape):
        raise ImpossibleCase(f"{spec.shape.text!r} gives the negative size {min(shape)}")
    return shape


def bound(value: Any, sizes: Mapping[str, Size]) -> Any:
    """A bound of ``values=`` as a number: it may be an expression of dims. Raises ``ImpossibleCase``."""
    if not isinstance(value, str):
        return value
    try:
        return parse_expression(value).evaluate(sizes)[0]
    except ZeroDivisionError:
        raise ImpossibleCase(f"the bound {value!r} of values= divides by a size of zero") from None


def chosen(profile: ValueProfile, regime: str) -> tuple[ValueProfile, str]:
    """The profile among several that this regime draws from, and its regime there. Raises ``SpecError``."""
    regime = "" if recorded_values.parse(regime) else regime  # recorded elements are of no choice
    while profile.choices:
        name, _, regime = regime.partition("/")
        profile = profile.choice(name)
    return profile, regime


def _from_profile(profile: ValueProfile, regime: str, field: Field, sizes: Mapping[str, Size]) -> torch.Tensor:
    shape, dtype, seed, device = field
    params = {key: bound(value, sizes) for key, value in profile.params}
    empty = math.prod(shape) == 0
    match profile.kind:
        case "default" | "finite":
            return _default(regime or "unit", field)
        case "normal":
            mean, reach = params["mean"], 5 * params["std"]
            v = counter_random.normal(shape, seed, device) * params["std"] + mean
            v = patterns.rounded(v, mean - reach, mean + reach, seed)
        case "uniform":
            low, high = params["low"], params["high"]
            v = patterns.rounded(counter_random.uniform(shape, seed, device) * (high - low) + low, low, high, seed)
            if not dtype.is_floating_point and not dtype.is_complex:
                v = v.floor().clamp_min(math.ceil(low))  # a cast rounds towards zero: `positive` would hold zeros
        case "constant":
            v = torch.full(shape, params["value"], dtype=torch.float64, device=device)
        case "booleans":
            v = patterns.booleans(shape, params["share"], seed, device)
        case "integers":
            if params["high"] < params["low"] and not empty:
                raise ImpossibleCase(f"there is no integer from {params['low']} to {params['high']}")
            low, high = params["low"], max(params["high"], params["low"])
            v = patterns.ended(counter_random.integers(shape, low, high, seed, device), low, high, seed)
        case kind if kind in structured_integers.MAKERS:
            try:
                v = structured_integers.MAKERS[kind](profile.label, shape, params["size"], seed, device)
            except structured_integers.Unfit as error:
                raise ImpossibleCase(str(error)) from None
        case "permutation":
            v = counter_random.uniform(shape, seed, device).argsort(dim=-1) if shape else torch.zeros((), device=device)
        case "probabilities":
            v = patterns.probabilities(shape, dtype, seed, device)
        case other:
            raise SpecError(f"unknown value profile {other!r}")
    return _narrow(v, dtype)


def _narrow(v: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``v`` in ``dtype``, clamped to its range so that nothing wraps."""
    if dtype.is_floating_point:
        return counter_random.to_dtype(v.to(torch.float64), dtype)
    if dtype is torch.bool or dtype.is_complex or v.dtype is torch.bool:
        return v.to(dtype)
    if dtype is torch.uint64 and v.dtype is torch.int64:
        return v.view(dtype)
    info = torch.iinfo(dtype)
    # 2^63 - 1 has no float64.
    low, high = (info.min, min(info.max, 2**63 - 1)) if v.dtype is torch.int64 else (max(info.min, -(2**62)), 2**62)
    return v.clamp(low, min(info.max, high)).to(dtype)


def _default(regime: str, field: Field) -> torch.Tensor:
    shape, dtype, seed, device = field
    if dtype.is_floating_point:
        return regimes.make(regime, *field)
    if dtype.is_complex:
        return torch.complex(
            counter_random.normal(shape, seed, device), counter_random.normal(shape, seed + 1, device)
        ).to(dtype)
    if dtype is torch.bool:
        return patterns.flags(shape, seed, device)
    info = torch.iinfo(dtype)
    low, high = 0 if info.min == 0 else -100, 100
    # Bytes are data, often packed, whose upper bits matter. Wider numbers may be indices or counts and stay small.
    if info.bits == 8 and counter_random.mix(seed, "all bits") % 2:
        v = counter_random.integers(shape, info.min, info.max, seed, device)
        return patterns.ended(v, info.min, info.max, seed).to(dtype)
    v = counter_random.integers(shape, low, high, seed, device)
    if info.bits == 64 and counter_random.mix(seed, "all bits") % 4 == 0:
        v = v * _PAST_32_BITS
    return v.to(dtype)


def _recorded(spec: TensorSpec, regime: str, field: Field, sizes: Mapping[str, Size]) -> torch.Tensor | None:
    """The elements of a recorded regime; ``None`` for any other, and where the spec's own values must do."""
    # A summary, or a part of a tensor, cannot satisfy a permutation or a user's function: those are replayed in full or
    # not at all. Other profiles bound the values.
    own = recorded_values.parse(regime)
    if own is None:
        return None
    profile = spec.values
    if profile is not None and not (isinstance(profile, ValueProfile) and profile.kind in RECORDED_AS):
        stored = isinstance(own, recorded_values.Stored)
        return recorded_values.make(own, *field, whole=True) if stored else None
    found = recorded_values.make(own, *field, bounds_of(profile, sizes))
    if found is None:
        raise ImpossibleCase(f"{own} has no {field.shape}")
    return found


# Profiles that a summary may stand for; others have conditions beyond a range.
RECORDED_AS = ("default", "finite", "integers", "indices", "uniform")


def bounds_of(profile: ValueProfile | None, sizes: Mapping[str, Size]) -> tuple[float, float] | None:
    """The least and the largest value that a profile allows at these sizes; ``None`` where it has no bounds."""
    if profile is None or profile.kind not in ("integers", "indices", "uniform"):
        return None
    params = {key: bound(value, sizes) for key, value in profile.params}
    if profile.kind == "indices":
        return 0, max(params["size"], 1) - 1
    return params["low"], params["high"]


def generator(case: Case, owner: str, device: torch.device) -> torch.Generator:
    """The torch generator for a user's own values function."""
    return torch.Generator(device=device).manual_seed(counter_random.mix(case.seed, owner) >> 1)


def make_tensor(name: str, spec: TensorSpec, case: Case, device: torch.device) -> torch.Tensor:
    """The elements of one tensor input: contiguous, its shape and dtype from the case.

    Along expanded axes one slice repeats. Raises ``ImpossibleCase`` where the sizes admit no values, ``InputFailed``
    where a user's function raises, ``SpecError`` where it returns something else.
    """
    entry = case.tensors[name]
    dtype = torch_dtype(entry.dtype)
    shape = shape_of(spec, case.sizes)
    plan = geometry(shape, entry.layout)
    made = tuple(min(size, 1) if axis in plan.expanded else size for axis, size in enumerate(shape))
    field = Field(made, dtype, counter_random.mix(case.seed, name), device)
    if (own := _recorded(spec, entry.regime, field, case.sizes)) is not None:
        v = own
    elif (function := function_of(spec, entry.regime)) is not None:
        v = _call(f"values= of input {name!r}", lambda: function(made, dtype, generator(case, name, device)))
        if not isinstance(v, torch.Tensor) or tuple(v.shape) != made:
            found = tuple(v.shape) if isinstance(v, torch.Tensor) else type(v).__name__
            raise SpecError(f"values= of input {name!r} must return a tensor of shape {made}, but returned {found}")
        v = v.detach().to(device=device, dtype=dtype)
    elif isinstance(spec.values, ValueProfile):
        v = _from_profile(*chosen(spec.values, entry.regime), field, case.sizes)
    else:
        v = _default(entry.regime, field)
    return v.expand(shape).contiguous()


def function_of(spec: TensorSpec, regime: str) -> Callable[..., Any] | None:
    """The user's function that makes a tensor's values in this regime; ``None`` where none does."""
    if isinstance(spec.values, ValueProfile):
        return chosen(spec.values, regime)[0].function
    return spec.values


def _call(what: str, function: Callable[[], Any]) -> Any:
    """Call a user's function; raises ``InputFailed``, except for errors of this package."""
    try:
        return function()
    except (ImpossibleCase, SpecError):
        raise
    except Exception as error:
        raise InputFailed(f"{what} raised {type(error).__name__}: {error}") from error


def make_inputs(spec: FusionSpec, case: Case, device: torch.device, *, zeros: bool = False) -> dict[str, Any]:
    """All inputs by name: contiguous tensors, drawn values, constants, ``None`` for absent ones; derived inputs last.

    ``zeros`` leaves floating tensors zero, at no cost, where only shapes matter. Raises as :func:`make_tensor`.
    """
    inputs: dict[str, Any] = {}
    pending: dict[str, DerivedSpec] = {}
    blanks: set[str] = set()
    for name, declared in spec.inputs.items():
        inner = unwrap(declared)
        if name in case.absent:
            inputs[name] = None
        elif (
            isinstance(inner, TensorSpec)
            and zeros
            and (dtype := torch_dtype(case.tensors[name].dtype)).is_floating_point
        ):
            inputs[name] = blank.zeros(shape_of(inner, case.sizes), dtype).to(device)
            blanks.add(name)
        elif isinstance(inner, TensorSpec):
            inputs[name] = make_tensor(name, inner, case, device)
        elif isinstance(inner, ConstantSpec):
            inputs[name] = map_tensors(inner.value, lambda t: t.detach().to(device))
        elif isinstance(inner, DerivedSpec):
            pending[name] = inner
        else:
            inputs[name] = case.drawn[name]
    while pending:
        for name in [name for name, inner in pending.items() if not set(inner.needs) & set(pending)]:
            inputs[name] = _derive(name, pending.pop(name), inputs, blanks, case, device)
    return {name: inputs[name] for name in spec.inputs}


def copies_of_zeros(spec: FusionSpec, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of what :func:`make_inputs` made with ``zeros`` in host memory; zeros are made anew, at no cost."""
    return {name: map_tensors(value, partial(_copy, zeros=name in spec.tensors)) for name, value in inputs.items()}


def _copy(t: torch.Tensor, *, zeros: bool) -> torch.Tensor:
    return blank.like(t) if zeros and t.is_floating_point() else t.clone()


def _derive(
    name: str, inner: DerivedSpec, inputs: Mapping[str, Any], blanks: Collection[str], case: Case, device: torch.device
) -> Any:
    """A derived input: its function's result on copies of its arguments; zeros (``blanks``) are made anew."""
    given = {
        need: map_tensors(value, partial(_copy, zeros=need in blanks and device.type == "cpu"))
        for need, value in needs_of(name, inner, {**case.sizes, **inputs}, case, device).items()
    }
    result = _call(f"derived input {name!r}", lambda: inner.function(**given))
    return map_tensors(result, lambda t: t.detach().to(device).contiguous())


def needs_of(
    name: str, inner: DerivedSpec, known: Mapping[str, Any], case: Case, device: torch.device
) -> dict[str, Any]:
    """The arguments of a derived input's function, from ``known`` inputs and sizes."""
    given = {need: known[need] for need in inner.needs if need in known}
    if "generator" in inner.needs:
        given["generator"] = generator(case, name, device)
    if "dtype" in inner.required and "dtype" not in known:
        given["dtype"] = torch_dtype(case.dtype)
    return given
