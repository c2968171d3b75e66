"""Run one operation in one dtype and compare what comes out, gradients included, with float64."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.interpreter import interpreted
from pytest_fusion.interpreter.memory.undefined_lanes import Fill, masked_fill
from pytest_fusion.run.process.fork import Crash, run_isolated, unwrap
from tests.outside.survey.model import TOLERANCE, Draw, Op

LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """``ran`` to the end, ``right`` in every output; ``reason`` when not.

    ``kernels`` are those that were launched, ``findings`` what was wrong with their accesses, and ``serial`` why
    launches did not run as one batch. ``worst`` is the largest error as a share of what is allowed.
    """

    ran: bool
    right: bool
    reason: str = ""
    kernels: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    serial: tuple[str, ...] = ()
    worst: float = 0.0


def measure(op: Op, dtype: torch.dtype, fill: Fill = "poison") -> Outcome:
    """``op`` in this process; ``fill`` is what masked-off loads without ``other`` yield."""
    draw = Draw(dtype, torch.Generator().manual_seed(0))
    inputs = list(op.inputs(draw))
    exact = [_exact(value) for value in inputs]
    for position in op.gradients:
        inputs[position].requires_grad_()
        exact[position].requires_grad_()
    expected = _flat(op.reference(*exact))
    upstream = [draw.normal(*e.shape) if e.requires_grad else None for e in expected]
    _backward(expected, [None if u is None else u.double() for u in upstream])
    failed, wrong, worst = "", "", 0.0
    with interpreted(findings="collect") as session, masked_fill(fill):
        try:
            got = _flat(op.run(*inputs))
            # A copy of each: kernels write the gradient of an input over the upstream one.
            _backward(got, [None if u is None else u.to(g.dtype).clone() for g, u in zip(got, upstream, strict=True)])
        except Exception as error:  # noqa: BLE001 - any of them is the answer
            failed = _brief(error)
    if not failed:
        named = [(f"output {i}", g, e) for i, (g, e) in enumerate(zip(got, expected, strict=True))]
        named += [(f"gradient {i}", inputs[i].grad, exact[i].grad) for i in op.gradients]
        for name, ours, theirs in named:
            ratio, text = _distance(ours, theirs, TOLERANCE[dtype] * op.slack)
            worst = max(worst, ratio)
            if text and not wrong:
                wrong = f"{name}: {text}"
        if not session.launches and not wrong:
            wrong = "no Triton kernel was launched"
    return Outcome(
        ran=not failed,
        right=not failed and not wrong,
        reason=failed or wrong,
        kernels=tuple(dict.fromkeys(launch.kernel for launch in session.launches)),
        findings=tuple(f"{finding.kind} in {finding.kernel}: {finding.code}" for finding in session.findings),
        serial=tuple(dict.fromkeys(f"{run.kernel}: {run.reason}" for run in session.launches if run.reason)),
        worst=worst,
    )


def measure_apart(op: Op, dtype: torch.dtype, fill: Fill = "poison", limit_s: float = LIMIT_S) -> Outcome:
    """``op`` in a forked child with a time limit: a crash or a hang is a result."""
    answer = run_isolated(lambda channel: measure(op, dtype, fill), time_limit_s=limit_s, forward=False)
    if isinstance(answer, Crash):
        return Outcome(False, False, f"{answer.kind}: {answer.detail}")
    found = unwrap(answer)
    assert isinstance(found, Outcome)
    return found


def _backward(outputs: list[Tensor], upstream: list[Tensor | None]) -> None:
    pairs = [(o, u) for o, u in zip(outputs, upstream, strict=True) if u is not None]
    if pairs:
        torch.autograd.backward([o for o, _ in pairs], [u for _, u in pairs])


def _exact(value: Any) -> Any:
    """The same numbers in float64, in memory of their own."""
    if isinstance(value, Tensor):
        copy = value.detach().clone()
        return copy.double() if copy.is_floating_point() else copy
    if isinstance(value, list | tuple):
        return type(value)(_exact(v) for v in value)
    return value


def _flat(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result if part is not None for tensor in _flat(part)]


def _distance(ours: Tensor | None, theirs: Tensor, tolerance: float) -> tuple[float, str]:
    """The largest error as a share of what is allowed, and what is wrong in words."""
    if ours is None:
        return float("inf"), "missing"
    if ours.shape != theirs.shape:
        return float("inf"), f"shape {tuple(ours.shape)}, expected {tuple(theirs.shape)}"
    if not theirs.is_floating_point() and not theirs.is_complex():
        differing = int((ours.to(theirs.dtype) != theirs).sum())
        return (float("inf"), f"{differing} of {theirs.numel()} elements differ") if differing else (0.0, "")
    if theirs.numel() == 0:
        return 0.0, ""
    ours, theirs = ours.detach().to(theirs.dtype), theirs.detach()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    finite = theirs[theirs.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    error = torch.where(same, 0.0, (ours - theirs).abs())
    # Where it should be finite and is not, the error is not finite either; 1e-7 for all-zero references.
    worst = float(torch.nan_to_num(error, nan=float("inf")).max()) / (tolerance * max(scale, 1e-7))
    return (worst, "") if worst <= 1.0 else (worst, f"off by {worst:.2g} times the tolerance")


def _brief(error: BaseException) -> str:
    """The type and the first line; of an assertion without words, what was asserted."""
    text = str(error).strip().splitlines()
    said = text[0] if text else traceback.extract_tb(error.__traceback__)[-1].line
    return f"{type(error).__name__}: {said}"[:300]
