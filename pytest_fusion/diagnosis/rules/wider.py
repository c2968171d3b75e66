"""Failures of kernels in float32 beside a reference that computes in float64: what the narrower format costs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from pytest_fusion.checks import probe as probing
from pytest_fusion.checks.gradients import gradients
from pytest_fusion.diagnosis.diagnosis_model import Found
from pytest_fusion.diagnosis.experiments import Lab, Wrong
from pytest_fusion.interpreter.bridge.dispatch import DispatchMode

_SEEDS = 6
# Two ways to compute in float32 are hardly further apart than this, and one in 16 bits is a thousand times as far.
_MUCH_ALIKE, _SINGLE_ALIKE = 6.0, 16.0
# As it is written the reference is no further off than the kernel: it has its last rounding alone.
_LESS = 1.0


class _InFloat32(DispatchMode):
    """Operators that are asked for float64 give float32; ``asked`` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def narrower(value: Any) -> Any:
            if value is not torch.float64:
                return value
            self.asked += 1
            return torch.float32

        return func(*tree_map(narrower, args), **tree_map(narrower, kwargs or {}))


def float64(lab: Lab) -> Found | None:
    """The reference's results in float32 in place of float64 are off by as much as the kernel's."""
    if lab.check == gradients.NAME:
        return None
    ours, theirs, written = [], [], []
    for seed in lab.seeds(lab.base, _SEEDS):
        answer = lab.ask(lab.base.with_(seed=seed))
        name = lab.verdict.output
        if answer.probe is None or name not in answer.probe.got:
            return None
        logical = answer.probe.logical
        if any(isinstance(t, torch.Tensor) and t.dtype is torch.float64 for t in logical.values()):
            return None
        with _InFloat32() as mode:
            narrow = probing.right_of(lab.context, logical)
        native = probing.right_of(lab.context, logical)
        wrong = lab.wrong_of(answer, name)
        if not mode.asked or narrow is None or native is None:
            return None
        if wrong is None:
            continue
        if not _comparable(wrong, narrow.get(name)):
            return None
        right = wrong.right.double()
        ours.append((wrong.got.double() - right).flatten())
        theirs.append((narrow[name].double() - right).flatten())
        written.append((native[name].double() - right).flatten())
    if not ours:
        return None
    off, narrow_off, native_off = (torch.cat(each) for each in (ours, theirs, written))
    if not all(bool(torch.isfinite(each).all()) for each in (off, narrow_off, native_off)):
        return None
    alike = float(off.norm()) <= _MUCH_ALIKE * float(narrow_off.norm())
    alike = alike and float(off.abs().max()) <= _SINGLE_ALIKE * float(narrow_off.abs().max())
    if not alike or float(native_off.norm()) > _LESS * float(off.norm()):
        lab.ruled_out.append("a reference in float64: in float32 it is not as far off as the kernel")
        return None
    told = f"in float32 the reference itself is off by {float(narrow_off.abs().max()):.2g}, the kernel by"
    evidence = [f"{told} {float(off.abs().max()):.2g}", "it computes in float64, of inputs that are not"]
    return Found("wider-reference", evidence)


def _comparable(wrong: Wrong, narrow: torch.Tensor | None) -> bool:
    return narrow is not None and wrong.got.is_floating_point() and narrow.shape == wrong.right.shape
