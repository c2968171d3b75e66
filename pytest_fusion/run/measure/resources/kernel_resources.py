"""The resources of each kernel that a spec launches at given sizes, without a GPU, and why it compiles again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pytest_fusion.case.choosing.search import pools
from pytest_fusion.case.make import make_inputs
from pytest_fusion.case.plan import Limits, make_plan
from pytest_fusion.case.stated import admitting, stated_case
from pytest_fusion.errors import SpecError
from pytest_fusion.interpreter.bridge.modelled_device import posing_as_cuda
from pytest_fusion.run.measure.resources.function_places import NotFoundError
from pytest_fusion.run.measure.resources.noting import Noted
from pytest_fusion.run.measure.resources.rehearsal import READS, call_json, without_kernels
from pytest_fusion.run.measure.resources.specialisation import Specialisation, recompilations
from pytest_fusion.run.measure.resources.targets import Resources, Target, figures
from pytest_fusion.run.process.compile_jobs import Answer, Job, compile_all
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import first_line

# Dims by name; optionally the case's dtype, drawn inputs by value, and absent optional inputs as None.
Sizes = Mapping[str, Any]

_SEED = 0
INTERPRETED = "as launched under the interpreter, where a launcher may choose other tiles than on a GPU"
NO_KERNEL = "the call launches no Triton kernel"


@dataclass(frozen=True, slots=True)
class Report:
    """The kernels, in order of first launch, and the launches of one call; ``problem``: why some may be missing."""

    sizes: dict[str, Any]
    target: str
    kernels: tuple[Resources, ...] = ()
    launches: tuple[Specialisation, ...] = ()
    problem: str = ""

    @property
    def figures(self) -> dict[str, int]:
        """Every exact figure by ``target/kernel/name``."""
        return figures(self.kernels)


@dataclass(slots=True)
class _Draft:
    """A report in progress."""

    spec: FusionSpec
    sizes: Sizes
    target: Target
    reason: str = ""
    report: Report | None = None

    @property
    def key(self) -> tuple[int, str]:
        """The same for all targets."""
        return id(self.spec), repr(self.sizes)

    def close(
        self, kernels: Iterable[Resources] = (), launches: Iterable[Specialisation] = (), problem: str = ""
    ) -> None:
        self.report = Report(dict(self.sizes), self.target.name, tuple(kernels), tuple(launches), problem)


def resources_of(spec: FusionSpec, sizes: Sequence[Sizes], targets: Sequence[Target]) -> list[Report]:
    """One report for each of ``sizes`` (as in ``bench=``) and target; kernels compile in parallel, none runs.

    A process without the interpreter calls the launcher once a size and target, on zero tensors that pose as that
    GPU's. If that fails, this process interprets the call. Includes backward if the spec has ``grad=``. Raises
    ``SpecError`` for sizes that the spec does not admit.
    """
    return resources_of_all([(spec, sizes)], targets)[0]


def resources_of_all(
    rows: Sequence[tuple[FusionSpec, Sequence[Sizes]]], targets: Sequence[Target]
) -> list[list[Report]]:
    """:func:`resources_of` of several specs, which share the processes: each takes seconds to start."""
    drafts = [[_Draft(spec, size, target) for size in sizes for target in targets] for spec, sizes in rows]
    every = [one for own in drafts for one in own]
    for one in every:
        lacking = _lacking(one.spec, one.target)
        if lacking:
            one.close(problem=lacking)
    _rehearsed([one for one in every if one.report is None])
    _interpreted([one for one in every if one.report is None])
    return [[one.report for one in own if one.report is not None] for own in drafts]


def recompilations_of(reports: Iterable[Report]) -> list[tuple[str, int]]:
    """``(reason, count)`` of a sweep's recompilations for the target with most: a launcher's tiles depend on it."""
    by_target: dict[str, list[Specialisation]] = {}
    for report in reports:
        by_target.setdefault(report.target, []).extend(report.launches)
    counts = [recompilations(launches) for launches in by_target.values()]
    return max(counts, key=lambda found: sum(count for _, count in found), default=[])


def _lacking(spec: FusionSpec, target: Target) -> str:
    needs = spec.requires if isinstance(spec.requires, list | tuple) else [spec.requires]
    for need in [needs, *needs]:
        capability = tuple(need) if isinstance(need, list | tuple) and len(need) == 2 else ()
        if capability and all(type(part) is int for part in capability) and capability > (target.major, target.minor):
            return f"the spec requires compute capability {capability[0]}.{capability[1]}"
    return ""


def graded(spec: FusionSpec) -> tuple[str, ...]:
    """The inputs whose gradients the spec wants."""
    if isinstance(spec.grad, bool):
        return tuple(spec.inputs) if spec.grad else ()
    return tuple(spec.grad)


def arguments_of(spec: FusionSpec, sizes: Sizes) -> dict[str, Any]:
    """The inputs at ``sizes``, contiguous, floating ones zero; unnamed properties are as plain as the spec admits.

    Raises ``SpecError`` for an unknown name, a missing dim, and a size that is too small or not the required multiple.
    """
    for name in spec.dim_names:
        if name not in sizes:
            raise SpecError(f"{spec.name}: the sizes {dict(sizes)} leave out {name!r}; add it")
    plan = make_plan(admitting(spec, [sizes]), pools=pools(spec, _SEED), limits=Limits())
    return make_inputs(spec, stated_case(plan, sizes, _SEED, where="sizes"), torch.device("cpu"), zeros=True)


def _rehearsed(drafts: Sequence[_Draft]) -> None:
    """Call the launchers in other processes; a draft that fails stays open, with the reason."""
    calls: dict[tuple[int, str], Any] = {}
    jobs: list[Job] = []
    for number, one in enumerate(drafts):
        key = one.key
        if key not in calls:
            try:
                calls[key] = call_json(one.spec.fused, arguments_of(one.spec, one.sizes), graded(one.spec))
            except NotFoundError as error:
                calls[key] = error
        if isinstance(calls[key], NotFoundError):
            one.reason = str(calls[key])
        else:
            jobs.append(Job(number, one.target, {"call": calls[key]}))
    for number, answer in compile_all(jobs).items():
        one, found = drafts[number], answer.found or {}
        kernels = [Resources.from_json(data) for data in found.get("resources", ())]
        problem = str(found.get("problem", answer.reason))
        if answer.kernel:
            one.close([_lost(answer, one.target)], problem="kernels behind it were not compiled")
        elif kernels or (answer.found is not None and not problem):
            launches = map(Specialisation.from_json, found["launches"])
            _close(one, kernels, launches, problem, read=bool(found["read"]))
        else:
            one.reason = problem


def _close(
    one: _Draft, kernels: Sequence[Resources], launches: Iterable[Specialisation], problem: str, *, read: bool
) -> None:
    """Report the launches of one call; if it read values that were not computed, none of them is refused."""
    doubts = [READS] if read else []
    if problem:
        doubts.append(f"called without its kernels, the launcher stops early: {first_line(problem)}")
    if not kernels:
        doubts.append(NO_KERNEL)
    one.close([kernel.doubted(READS) if read else kernel for kernel in kernels], launches, "; ".join(doubts))


def _lost(answer: Answer, target: Target) -> Resources:
    """The kernel on which a compiling process was lost."""
    return Resources(answer.kernel, target.name, "refused" if answer.crashed else "unknown", answer.reason)


def _interpreted(drafts: Sequence[_Draft]) -> None:
    """Call the launchers here, and compile their launches in other processes."""
    calls: dict[tuple[int, str], tuple[list[Noted], str, bool]] = {}
    jobs: list[Job] = []
    owners: dict[int, tuple[int, Noted]] = {}
    for number, one in enumerate(drafts):
        key = one.key
        if key not in calls:
            calls[key] = _launched_here(one.spec, one.sizes)
        for launch in _distinct(calls[key][0]):
            owners[len(owners)] = number, launch
            if launch.specialisation is not None:
                data = {
                    "specialisation": launch.specialisation.as_json(),
                    "others": [other.as_json() for other in launch.others],
                }
                jobs.append(Job(len(owners) - 1, one.target, data))
    answers = compile_all(jobs)
    for number, one in enumerate(drafts):
        kernels = [
            _answered(launch, answers.get(job), one.target) for job, (own, launch) in owners.items() if own == number
        ]
        launches, problem, read = calls[one.key]
        known = [launch.specialisation for launch in launches if launch.specialisation is not None]
        _close(one, kernels, known, f"{problem}; {one.reason}" if problem else "", read=read)


def _launched_here(spec: FusionSpec, sizes: Sizes) -> tuple[list[Noted], str, bool]:
    """:func:`without_kernels` of a call in this process."""
    arguments = arguments_of(spec, sizes)
    return without_kernels(lambda: spec.fused(**arguments), posing_as_cuda(torch), strict=True)


def _distinct(launches: Iterable[Noted]) -> list[Noted]:
    """Each kernel and specialisation once, in order."""
    return list({n.specialisation.key() if n.specialisation else n.kernel + n.reason: n for n in launches}.values())


def _answered(launch: Noted, answer: Answer | None, target: Target) -> Resources:
    if launch.specialisation is None or answer is None:
        return Resources(launch.kernel, target.name, "unknown", launch.reason)
    if answer.found is None:
        return _lost(replace(answer, kernel=launch.kernel), target)
    found = Resources.from_json(answer.found["resources"][0])
    found = found.doubted(INTERPRETED, only_excess=True)
    return replace(found, note="; ".join(filter(None, (found.note, INTERPRETED))))
