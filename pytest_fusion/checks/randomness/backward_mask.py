"""Backward's mask against forward's: an upstream gradient of ones shows what backward dropped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.checks.context import Context, call_placed, collect
from pytest_fusion.checks.randomness.masks import Mask, Masks, sides_of
from pytest_fusion.checks.trial import Trial
from pytest_fusion.checks.verdict import Verdict, failed
from pytest_fusion.oracle.reference import ReferenceFailed, copies, takes
from pytest_fusion.run.memory import FILLS
from pytest_fusion.run.placing import place
from pytest_fusion.run.seeded import MaskedReference, plain
from pytest_fusion.spec.fusion_spec import FusionSpec


def _wanted(spec: FusionSpec, masks: Masks, mask: Mask) -> list[str]:
    """The inputs whose gradients may show backward's mask."""
    named: Iterable[str] = masks.probe if spec.grad is True else spec.grad or ()
    able = {n: t for n in named if isinstance(t := masks.probe.get(n), torch.Tensor) and t.dtype.is_floating_point}
    return [
        name
        for name, t in able.items()
        if name not in spec.given_up and (masks.rng.dims is not None or t.shape == mask.keep.shape)
    ]


def backward(trial: Trial, masks: Masks, mask: Mask) -> Verdict | None:
    """Check that backward drops what forward dropped, by an upstream gradient of ones."""
    context, case, wanted = trial.context, trial.result.case, _wanted(trial.spec, masks, mask)
    if not wanted:
        return None
    shape, broadcast = mask.keep.shape, masks.rng.dims is not None
    try:
        sides, _ = sides_of(
            lambda m: _reference_gradients(trial, masks, wanted, m), shape, context.device, broadcast=broadcast
        )
    except ReferenceFailed:
        return None
    got = _kernel_gradients(context, case, masks.probe, wanted) if sides else {}
    for name, side in sides.items():
        seen = side.read(got[name], shape) if name in got else None
        different = seen.differs(mask) if seen is not None else None
        if seen is None or different is None or not bool(different.any()):
            continue
        first = [int(i) for i in different.nonzero()[0]]
        reason = (
            f"backward drops other elements than forward: {int(different.sum())} of "
            f"{int((seen.known & mask.known).sum())} elements of the gradient of {name} differ, the first at {first}, "
            "with an upstream gradient of ones. Backward must draw with forward's seed, offsets and p"
        )
        identity, cause = "gradients:rng-mask", "mask-mismatch"
        return failed("gradients", reason, identity=identity, cause=cause, output=f"d{name}", first=first)
    return None


def _gradients_of(
    outputs: Mapping[str, torch.Tensor], arguments: Mapping[str, Any], wanted: list[str]
) -> dict[str, torch.Tensor]:
    ends = [t for t in outputs.values() if t.dtype.is_floating_point and t.requires_grad]
    if not ends:
        return {}
    found = torch.autograd.grad(
        ends, [arguments[n] for n in wanted], [torch.ones_like(t) for t in ends], allow_unused=True
    )
    return {name: g for name, g in zip(wanted, found, strict=True) if g is not None}


def _reference_gradients(trial: Trial, masks: Masks, wanted: list[str], mask: torch.Tensor) -> dict[str, torch.Tensor]:
    spec = trial.spec
    reference = MaskedReference(plain(spec.reference), masks.name, mask, masks.probe)
    arguments = copies(masks.probe, wanted)
    try:
        result = reference(**arguments, **takes(reference, trial.context.extra))
        return _gradients_of(collect(result, arguments, spec.mutates).tensors, arguments, wanted)
    except Exception as error:
        raise ReferenceFailed(f"{type(error).__name__}: {error}") from error


def _kernel_gradients(
    context: Context, case: Case, logical: Mapping[str, Any], wanted: list[str]
) -> dict[str, torch.Tensor]:
    """The gradients for an upstream gradient of ones; none where it raises, which `gradients` reports."""
    placed = place(logical, case, context.device, FILLS[0])
    for name in wanted:
        placed.arguments[name].requires_grad_(True)

    def both(**arguments: Any) -> dict[str, torch.Tensor]:
        result = context.spec.fused(**arguments)
        return _gradients_of(collect(result, arguments, context.spec.mutates).tensors, arguments, wanted)

    outcome = call_placed(context, both, placed)
    return outcome.result if outcome.error is None else {}
