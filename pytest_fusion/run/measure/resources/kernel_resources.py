"""The resources of each kernel that a spec launches at given sizes, without a GPU, and why it compiles again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pytest_fusion.case.choosing.search import pools
from pytest_fusion.case.make import make_inputs
from pytest_fusion.case.plan import Limits, make_plan
from pytest_fusion.case.stated import admitting, stated_case
from pytest_fusion.errors import SpecError
from pytest_fusion.run.measure.resources.rehearsal import READS, sent
from pytest_fusion.run.measure.resources.sent_call import NotSentError
from pytest_fusion.run.measure.resources.specialisation import Specialisation, recompilations
from pytest_fusion.run.measure.resources.targets import Resources, Status, Target, figures
from pytest_fusion.run.process.compile_jobs import Answer, Job, compile_all
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import first_line, grouped

# Dims by name; optionally the case's dtype, drawn inputs by value, and absent optional inputs as None.
Sizes = Mapping[str, Any]

_SEED = 0
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


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One report that is to be made."""

    spec: FusionSpec
    sizes: Sizes
    target: Target

    @property
    def key(self) -> tuple[int, str]:
        """The same for all targets."""
        return id(self.spec), repr(self.sizes)

    def report(
        self, kernels: Iterable[Resources] = (), launches: Iterable[Specialisation] = (), problem: str = ""
    ) -> Report:
        return Report(dict(self.sizes), self.target.name, tuple(kernels), tuple(launches), problem)


def resources_of(spec: FusionSpec, sizes: Sequence[Sizes], targets: Sequence[Target]) -> list[Report]:
    """One report for each of ``sizes`` (as in ``bench=``) and target; kernels compile in parallel, none runs. The
    launcher is called once for each, without the interpreter, on tensors of zeros that say they are on that GPU; with
    gradients where the spec has ``grad=``. Raises ``SpecError`` for sizes that the spec does not admit."""
    return resources_of_all([(spec, sizes)], targets)[0]


def resources_of_all(
    rows: Sequence[tuple[FusionSpec, Sequence[Sizes]]], targets: Sequence[Target]
) -> list[list[Report]]:
    """:func:`resources_of` of several specs: the processes, which take seconds to start, are shared."""
    wanted = [_Wanted(spec, size, target) for spec, sizes in rows for size in sizes for target in targets]
    reports: dict[int, Report] = {}
    calls: dict[tuple[int, str], str | NotSentError] = {}
    jobs: list[Job] = []
    for number, one in enumerate(wanted):
        lacking = _lacking(one.spec, one.target)
        if lacking:
            reports[number] = one.report(problem=lacking)
            continue
        if one.key not in calls:
            calls[one.key] = _call(one)
        call = calls[one.key]
        if isinstance(call, str):
            jobs.append(Job(number, one.target, {"call": call}))
        else:
            reports[number] = one.report(problem=str(call))
    reports |= {number: _answered(wanted[number], answer) for number, answer in compile_all(jobs).items()}
    ordered = iter(range(len(wanted)))
    return [[reports[next(ordered)] for _ in sizes for _ in targets] for _, sizes in rows]


def recompilations_of(reports: Iterable[Report]) -> list[tuple[str, int]]:
    """``(reason, count)`` of a sweep's recompilations for the target with most: a launcher's tiles depend on it."""
    by_target = grouped((report.target, launch) for report in reports for launch in report.launches)
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
    Raises ``SpecError`` for an unknown name, a missing dim, a size too small or not the required multiple."""
    for name in spec.dim_names:
        if name not in sizes:
            raise SpecError(f"{spec.name}: the sizes {dict(sizes)} leave out {name!r}; add it")
    plan = make_plan(admitting(spec, [sizes]), pools=pools(spec, _SEED), limits=Limits())
    return make_inputs(spec, stated_case(plan, sizes, _SEED, where="sizes"), torch.device("cpu"), zeros=True)


def _call(one: _Wanted) -> str | NotSentError:
    """The call of the launcher for another process, or why there is none."""
    try:
        return sent(one.spec.fused, arguments_of(one.spec, one.sizes), graded(one.spec))
    except NotSentError as error:
        return error


def _answered(one: _Wanted, answer: Answer) -> Report:
    """The report of what one call launched; where it read what was not computed, nothing in it is refused."""
    if answer.kernel:
        status: Status = "refused" if answer.crashed else "unknown"
        lost = Resources(answer.kernel, one.target.name, status, answer.reason)
        return one.report([lost], problem="kernels behind it were not compiled")
    found = answer.found or {}
    problem = str(found.get("problem", answer.reason))
    if "launches" not in found:
        return one.report(problem=problem)
    kernels = [Resources.from_json(data) for data in found["resources"]]
    doubts = [READS] if found["read"] else []
    if problem:
        doubts.append(f"called without its kernels, the launcher stops early: {first_line(problem)}")
    if not kernels:
        doubts.append(NO_KERNEL)
    return one.report(
        [kernel.doubted(READS) if found["read"] else kernel for kernel in kernels],
        map(Specialisation.from_json, found["launches"]),
        "; ".join(doubts),
    )
