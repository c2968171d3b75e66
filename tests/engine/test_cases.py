"""Which cases a test has on either kind of device, and what ends them."""

from __future__ import annotations

import itertools

from pytest_fusion.case.choosing import search
from pytest_fusion.engine.cases import Budget, Cases
from pytest_fusion.engine.profiles import PROFILES, Profile
from pytest_fusion.engine.request import Request
from pytest_fusion.run.clock import processor_s
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor


def cases_on(device: str, profile: Profile = PROFILES["dev"]) -> Cases:
    def outer() -> None: ...

    search.adopt(outer, outer)
    spec = FusionSpec(fused=lambda x: x, reference=lambda x: x, inputs={"x": tensor("rows hidden")})
    return Cases(spec, Request("test", device, profile), outer)


def first_cases(cases: Cases) -> list[tuple[tuple[object, ...], str]]:
    """What kernels are compiled for, and the kind of values, of the first built cases."""
    built = itertools.islice((chosen.case for chosen in cases.boundary() if chosen.case is not None), 20)
    tensors = [(case.sizes, case.tensors["x"]) for case in built]
    return [((*sizes.values(), one.dtype, one.layout), one.regime) for sizes, one in tensors]


def test_on_a_gpu_every_second_case_of_a_budget_compiles_nothing() -> None:
    """The same sizes, dtype and layout with another kind of values, so that Triton has its kernels."""
    found = first_cases(cases_on("cuda"))
    for (compiled, kind), (again, other) in zip(found[::2], found[1::2], strict=True):
        assert compiled == again
        assert kind != other
    assert len({compiled for compiled, _ in found}) > 5


def test_each_case_is_another_where_nothing_waits_for_a_compiler() -> None:
    """On the CPU lane, and on a GPU in a run that counts cases."""
    for cases in (cases_on("cpu"), cases_on("cuda", PROFILES["dev"].counted)):
        found = first_cases(cases)
        assert all(one != other for (one, _), (other, _) in itertools.pairwise(found))


def test_compiling_has_seconds_of_its_own() -> None:
    """A test ends when what is not compiling used up its part, or when both together did; all of it where a kernel is
    tuned. The seconds named are those that ended it."""
    used = processor_s()
    budget = Budget(seconds=used + 1000.0, compiled=used / 2, compared=20, begun=0.0)
    assert budget.late
    assert budget.allowed == budget.compiled

    budget.compiling = used
    assert not budget.late

    budget.seconds = used / 2
    assert budget.late
    assert budget.allowed == budget.seconds

    budget.compared = 19
    assert not budget.late
