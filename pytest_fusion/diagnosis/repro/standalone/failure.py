"""The failing call again: the kernel beside its reference, what differs, and whether the failure shows."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pytest_fusion.diagnosis.repro.standalone.project import Impossible, describe_gpu
from pytest_fusion.diagnosis.repro.standalone.tensors import Maker, Placed, copied, in_place, leaves, same_bits


def difference(name: str, got: torch.Tensor, want: torch.Tensor) -> str:
    """One line: how many elements differ, and the largest difference with its place."""
    kind = f"{name}: {str(got.dtype).removeprefix('torch.')} {list(got.shape)}"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{kind}, but the reference returns {want.dtype} {list(want.shape)}"
    wide = torch.complex128 if got.dtype.is_complex else torch.float64
    a, b = got.detach().to(wide).reshape(-1), want.detach().to(wide).reshape(-1)
    off = (a - b).abs()
    off = torch.where((a == b) | (torch.isnan(a) & torch.isnan(b)), 0.0, off.nan_to_num(math.inf))
    differ = int((off > 0).sum())
    if not differ:
        return f"{kind}, equal to the reference in all of {got.numel()} element(s)"
    flat = int(off.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(flat), tuple(got.shape))]
    return (
        f"{kind}, {differ} of {got.numel()} element(s) differ, most at {place}: fused {a[flat].item():.9g}, "
        f"reference {b[flat].item():.9g}"
    )


def as_recorded(got: torch.Tensor, seen: Mapping[str, Any]) -> bool:
    """Whether the element that was wrong is wrong again: further off than allowed, or half as far as it was."""
    index = tuple(seen["index"])
    if len(index) != got.dim() or any(i >= size for i, size in zip(index, got.shape, strict=True)):
        return True
    now, right, then = float(got[index]), float(seen["expected"]), float(seen["got"])
    if not (math.isfinite(now) and math.isfinite(right)):
        return not (now == right or (math.isnan(now) and math.isnan(right)))
    before = abs(then - right) if math.isfinite(then) else math.inf
    allowed = math.inf if seen["allowed"] is None else float(seen["allowed"])
    return abs(now - right) > (allowed if before > allowed else before / 2)


@dataclasses.dataclass
class Failure:
    """What was recorded: the check that failed, and what decides whether it fails again.

    ``seen`` is the worst element (output, index, got, expected, allowed) where values were compared; ``gradient`` what
    backward was asked for (wanted, upstream, laid, seeds); ``varies`` that bits may differ from call to call.
    """

    check: str
    seen: Mapping[str, Any] | None = None
    raised: str | None = None
    gradient: Mapping[str, Any] | None = None
    mutates: Sequence[str] = ()
    clobbers: Sequence[str] = ()
    varies: bool = False
    # Of the device that is described to launchers where there is no GPU.
    multiprocessors: int = 132
    # Why running this script cannot show the failure, where it cannot.
    beyond: str = ""


@dataclasses.dataclass
class Call:
    """One call of the kernel: its results by name, and the memory of its inputs."""

    results: dict[str, torch.Tensor]
    placed: list[Placed]


Inputs = Callable[[Maker], tuple[dict[str, Any], dict[str, Any]]]


def main(
    find: Callable[[], tuple[Any, Any]], inputs: Inputs, failure: Failure, device: str, missing: Mapping[str, str]
) -> int:
    """0 where the failure does not show, 1 where it does, 2 where that cannot be told."""
    try:
        for what, why in missing.items():
            raise Impossible(f"{what}: {why}")
        if device == "cpu":
            describe_gpu(torch.cuda, failure.multiprocessors)
        fused, reference = _imported(find)
        found = _compare(fused, reference, inputs, failure, device)
    except Impossible as error:
        print(f"cannot be run here: {error}")
        return 2
    for line in found:
        print(f"WRONG: {line}")
    if not found and failure.beyond:
        print(f"this script cannot tell: {failure.beyond}")
        return 2
    print("the failure shows" if found else f"the failure ({failure.check}) does not show on {device}")
    return 1 if found else 0


def _imported(find: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    try:
        return find()
    except Impossible:
        raise
    except Exception as error:
        traceback.print_exc()
        raise Impossible("kernel and reference cannot be imported") from error


def _compare(fused: Any, reference: Any, inputs: Inputs, failure: Failure, device: str) -> list[str]:
    """What is wrong with the kernel's results, after printing them beside the reference's."""
    given, extra = inputs(Maker(device, 0))
    given = copied(given)
    grad, written = failure.gradient, in_place(given, failure.mutates)
    try:
        returned = reference(**_leaf(given, grad), **_taken(reference, extra))
        right = {**leaves(returned), **written}
        right = _differentiated(right, given, grad) if grad else right
    except Exception as error:
        traceback.print_exc()
        raise Impossible("the reference raised on these inputs") from error
    try:
        calls = [_call(fused, inputs, failure, device, fill) for fill in (0, 1, 0)]
    except Exception as error:
        traceback.print_exc()
        if failure.raised == type(error).__name__:
            return [f"the kernel raised {failure.raised}"]
        lane = "; Triton's own interpreter may refuse what pytest-fusion's CPU lane accepts" if device == "cpu" else ""
        raise Impossible(f"the kernel raised {type(error).__name__}{lane}") from error
    first, other, again = calls
    found = [f"{name} is missing" for name in right if name not in first.results and returned is not None]
    for name, got in first.results.items():
        if name not in right:
            continue
        print(difference(name, got, right[name]))
        if got.shape != right[name].shape or got.dtype != right[name].dtype:
            found.append(f"{name} has another shape or dtype than the reference's")
        elif failure.seen is not None and failure.seen["output"] == name and as_recorded(got, failure.seen):
            seen = failure.seen
            found.append(f"{name} at {seen['index']}: {float(got[tuple(seen['index'])])!r}, exact {seen['expected']!r}")
    found += _memory(first, failure)
    for what, call in (("differs between two calls alike", again), ("depends on what lies around the inputs", other)):
        changed = [n for n, t in first.results.items() if n in call.results and not same_bits(t, call.results[n])]
        if changed and not failure.varies:
            found.append(f"{', '.join(changed)} {what}")
            break
    if failure.check == "unwritten":
        found += _unwritten(fused, inputs, failure, device, first)
    return found


def _call(fused: Any, inputs: Inputs, failure: Failure, device: str, fill: int) -> Call:
    maker = Maker(device, fill)
    given, extra = inputs(maker)
    written = in_place(given, failure.mutates)  # asked before: a list may hold other tensors afterwards
    result = fused(**_leaf(given, failure.gradient), **extra)
    results = {**leaves(result), **written}
    if failure.gradient:
        results = _differentiated(results, given, failure.gradient)
    if device != "cpu":
        torch.cuda.synchronize()
    return Call({name: t.detach().clone() for name, t in results.items()}, maker.placed)


def _taken(function: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the fixtures that the reference takes."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in extra.items() if every or name in parameters}


def _memory(call: Call, failure: Failure) -> list[str]:
    """Writes that went where none may go."""
    found = []
    for placed in call.placed:
        changed = placed.buffer != placed.before
        outside = int((changed & ~placed.own).sum())
        if outside:
            found.append(f"{outside} byte(s) around or between the elements of {placed.name} were written")
        if bool((changed & placed.own).any()) and placed.name not in (*failure.mutates, *failure.clobbers):
            found.append(f"the input {placed.name} was changed")
    return found


def _leaf(given: dict[str, Any], grad: Mapping[str, Any] | None) -> dict[str, Any]:
    for name in grad["wanted"] if grad else ():
        given[name].requires_grad_(True)
    return given


def _differentiated(
    results: Mapping[str, torch.Tensor], given: Mapping[str, Any], grad: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The gradients of the inputs, for an upstream gradient like the one that was used."""
    seeds, laid = grad["seeds"], grad["laid"]
    # Of several outputs, those that got an upstream gradient, where that is known.
    ends = {name: t for name, t in results.items() if t.requires_grad and name in (seeds or results)}
    if not ends:
        return {}
    upstream = [_upstream(t, grad["upstream"], laid.get(n), seeds.get(n, 0)) for n, t in ends.items()]
    found = torch.autograd.grad(list(ends.values()), [given[n] for n in grad["wanted"]], upstream, allow_unused=True)
    return {f"d{name}": g for name, g in zip(grad["wanted"], found, strict=True) if g is not None}


def _upstream(output: torch.Tensor, kind: str, laid: Mapping[str, Any] | None, seed: int) -> torch.Tensor:
    """An upstream gradient of the kind that was used, laid as it was; on the CPU with the same numbers."""
    source = torch.Generator(output.device).manual_seed(seed)
    shape = output.shape
    if kind == "expanded":
        return torch.randn((), generator=source, device=output.device).to(output.dtype).expand(shape)
    values = torch.randn(shape, generator=source, device=output.device)
    values = (values * 0 if kind == "zero" else -values.abs() if kind == "negative" else values).to(output.dtype)
    if laid is None:
        return values
    around = values.new_full((laid["storage"],), math.nan)
    made = around.as_strided(shape, laid["strides"], laid["offset"])
    made.copy_(values)
    return made


def _unwritten(fused: Any, inputs: Inputs, failure: Failure, device: str, first: Call) -> list[str]:
    """Elements that change when torch fills fresh memory with NaN: nobody wrote them."""
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(True, warn_only=True)
        filled = _call(fused, inputs, failure, device, 0)
    changed = [n for n, t in filled.results.items() if not same_bits(t, first.results[n])]
    return [f"{', '.join(changed)} holds or depends on fresh memory that nothing wrote"] if changed else []
