"""Which cases a test has on either kind of device, and what ends them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from pytest_fusion.case.case_model import Config
from pytest_fusion.case.choosing import search
from pytest_fusion.checks.context import CaseResult
from pytest_fusion.engine.cases import Budget, Cases
from pytest_fusion.engine.profiles import PROFILES, Profile
from pytest_fusion.engine.request import Request
from pytest_fusion.run.autotuned import Tuned
from pytest_fusion.run.clock import Clock, processor_s
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


def tuned_cases(device: str, profile: Profile = PROFILES["dev"]) -> list[tuple[Mapping[str, Config], str, object]]:
    """Configs, dtype and sizes of the first cases of a kernel with four configs, and another with three."""
    cases = cases_on(device, profile)
    probes = cases.probes()
    for probe in probes:
        assert probe.case is not None
        result = CaseResult(probe.case)
        result.tuned = {n: TUNED[n] for n in range(2)}
        cases.ran(probe, result, Clock())
    built = (chosen.case for chosen in cases.boundary() if chosen.case is not None)
    return [(case.configs, case.dtype, case.sizes["hidden"]) for case in itertools.islice(built, 8)]


def _tuner(name: str, count: int) -> Tuned:
    kernel = SimpleNamespace(__name__=name)
    return Tuned(SimpleNamespace(base_fn=kernel, configs=[None] * count))


TUNED = [_tuner("one", 4), _tuner("other", 3)]


def test_each_config_has_a_plain_case_on_a_gpu() -> None:
    """First, and together with those of other kernels, in one dtype and power of two; pairs of levels come after."""
    first = tuned_cases("cuda")
    numbers = [{name: config.number for name, config in configs.items()} for configs, _, _ in first[:4]]
    assert numbers == [{}, {"one": 1, "other": 1}, {"one": 2, "other": 2}, {"one": 3}]
    assert {(dtype, hidden) for _, dtype, hidden in first[:4]} == {("float32", 64)}
    assert len({hidden for *_, hidden in first[4:]}) > 1


@pytest.mark.parametrize(("device", "profile"), [("cpu", PROFILES["dev"]), ("cuda", PROFILES["dev"].counted)])
def test_configs_have_no_cases_of_their_own_where_pairs_reach_them(device: str, profile: Profile) -> None:
    """On the CPU lane, which compiles nothing, and where cases are counted."""
    assert len({hidden for *_, hidden in tuned_cases(device, profile)[:4]}) > 1


def test_waiting_for_others_counts_as_compiling() -> None:
    """A process that sleeps uses no processor; the seconds of the test pass all the same."""
    budget = Budget(seconds=10.0, compiled=5.0, compared=20)
    assert budget.waited(9.0)
    assert not budget.waited(0.5, 0.9)
    assert not budget.waited(0.5)


def test_compiling_has_seconds_of_its_own() -> None:
    """A test ends when what is not compiling used up its part, or when both together did; all of it where a kernel is
    tuned, and in five times that however few ran. The seconds named are those that ended it."""
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

    budget.compared, budget.seconds = 1, used / 5
    assert budget.late

    budget.compared = 0
    assert not budget.late
