"""Costs of kernels besides time: recompilations over a sweep of sizes, and register spills."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.make import make_inputs
from pytest_fusion.run.measure.resources.kernel_resources import NO_KERNEL, resources_of
from pytest_fusion.run.measure.resources.loaded_kernels import loaded
from pytest_fusion.run.measure.resources.specialisation import Specialisation, recompilations
from pytest_fusion.run.measure.resources.targets import TARGETS, Resources
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import brief

# The GPU for which kernels are compiled on a machine without one.
TARGET = "sm_90"
_SHOWN = 2


@dataclass(frozen=True, slots=True)
class Compiled:
    """How often, and why, Triton compiled its ``kernels`` (a number) again over the launches of many cases."""

    again: int
    kernels: int
    why: Sequence[str] = ()


def compiled(launches: Mapping[str, Sequence[Specialisation]], keys: Collection[str]) -> Compiled:
    """The recompilations over the cases with these ``keys`` in ``launches``."""
    found = [launch for key in keys for launch in launches.get(key, ())]
    again = recompilations(found)
    kernels = {(launch.place.file, launch.kernel, launch.place.line) for launch in found}
    return Compiled(sum(many for _, many in again), len(kernels), tuple(why for why, _ in again[:_SHOWN]))


@dataclass(frozen=True, slots=True)
class Spills:
    """Bytes per thread that the worst kernel spills to local memory, and its name, by size; ``where`` is the GPU."""

    bytes: Mapping[str, int]
    kernels: Mapping[str, str]
    where: str
    problem: str = ""


def spills(
    spec: FusionSpec, sized: Iterable[tuple[str, Case]], device: torch.device, extra: Mapping[str, Any]
) -> Spills:
    """The spills of all Triton kernels that a call launches at these sizes: run on a GPU, else only compiled."""
    try:
        on_gpu = device.type == "cuda"
        found = [(text, _ran(spec, case, device, extra)) for text, case in sized] if on_gpu else _ahead(spec, sized)
    except Exception as error:  # noqa: BLE001 - the checks have their verdict; here it is a number or none
        return Spills({}, {}, TARGET, brief(error)[:300])
    where = next((one.target for _, (all_, _) in found for one in all_), TARGET)
    bytes_, kernels, problem = {}, {}, ""
    for text, (all_, why) in found:
        unknown = next((one.reason for one in all_ if one.status != "compiled"), why)
        if unknown:
            problem = problem or f"{text}: {unknown}"
            continue
        worst = max(all_, key=_spilled, default=None)
        bytes_[text] = 0 if worst is None else _spilled(worst)
        kernels[text] = "" if worst is None else worst.kernel
    return Spills(bytes_, kernels, where, problem[:300])


def _spilled(one: Resources) -> int:
    return one.local_bytes if one.spills else 0


def _ran(
    spec: FusionSpec, case: Case, device: torch.device, extra: Mapping[str, Any]
) -> tuple[Sequence[Resources], str]:
    found: list[Resources] = []
    try:
        logical = make_inputs(spec, case, device)
        with torch.no_grad():
            spec.fused(**logical, **extra)  # the trials of an autotuner are launches too
            with loaded(found):
                spec.fused(**logical, **extra)
    except Exception as error:  # noqa: BLE001 - as in `spills`
        return (), brief(error)
    return found, ""


def _ahead(spec: FusionSpec, sized: Iterable[tuple[str, Case]]) -> list[tuple[str, tuple[Sequence[Resources], str]]]:
    entries = list(sized)
    # As entries of ``bench=`` have them.
    each = [{**case.sizes, "dtype": case.dtype, **dict.fromkeys(case.absent), **case.drawn} for _, case in entries]
    reports = resources_of(spec, each, [TARGETS[TARGET]])
    # A call without Triton kernels spills nothing.
    problems = ["" if one.problem == NO_KERNEL else one.problem for one in reports]
    return [(text, (one.kernels, problem)) for (text, _), one, problem in zip(entries, reports, problems, strict=True)]
