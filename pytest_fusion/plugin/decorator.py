"""`@fused_equivalent`: a test function becomes a spec, and calling it judges the spec."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pytest_fusion.bench.entries import check as check_bench
from pytest_fusion.case.choosing import search as searching
from pytest_fusion.case.stated import stated_choice
from pytest_fusion.checks import registry
from pytest_fusion.diagnosis.causes import all_causes
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.modes import Judge
from pytest_fusion.engine.outcome import failure_of
from pytest_fusion.engine.request import Request
from pytest_fusion.errors import SpecError
from pytest_fusion.plugin import active
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run import device_choice
from pytest_fusion.spec.fusion_spec import KEYWORDS, FusionSpec, parameters_of, register_test_factory
from pytest_fusion.spec.inputs import ConstantSpec
from pytest_fusion.spec.keywords import inputs_from_annotations, stated_inputs
from pytest_fusion.spec.wording import checks_words, did_you_mean, is_near

__all__ = ["FusionSpec", "fused_equivalent"]

Test = Callable[..., Any]


@checks_words(SpecError)
def fused_equivalent(reference: Test | None = None, /, **keywords: Any) -> Callable[[Test], Test]:
    """Judge the decorated test's result against ``reference`` on generated inputs.

    The test calls the fused kernel with its inputs and returns the output; the reference gets the same inputs by name.
    Keywords: ``inputs`` (or jaxtyping annotations on the test's parameters), ``dims``, ``dtypes``, ``grad``,
    ``deterministic``, ``rng``, ``distribution``, ``invariant``, ``mutates``, ``clobbers``, ``rejects``,
    ``max_launches``, ``compile``, ``max_recompiles``, ``syncs``, ``malformed``, ``tolerance``, ``without``, ``allow``,
    ``strict``, ``bench``, ``bench_limits``, ``golden``, ``requires``. Other test parameters are fixtures and
    parametrizations; the reference gets those that it takes. Raises ``SpecError`` at collection for a spec that
    contradicts itself, ``FusionFailure`` when the kernel is wrong.
    """
    if "reference" in keywords and reference is None:
        reference = keywords.pop("reference")
    for keyword in keywords:
        if keyword not in KEYWORDS:
            raise SpecError(f"fused_equivalent() has no keyword {keyword!r}{did_you_mean(keyword, KEYWORDS)}")
    bare = not keywords and getattr(reference, "__name__", "").startswith("test")
    if reference is None or not callable(reference) or bare:
        raise SpecError("fused_equivalent() needs the reference first, as in @fused_equivalent(reference, inputs=...)")

    def decorate(test: Test) -> Test:
        if not inspect.isfunction(test):
            raise SpecError(
                f"@fused_equivalent decorates a test function, not {test!r}; put it below @staticmethod and the like"
            )
        return _make_test(test, _spec_of(test, reference, keywords))

    return decorate


def _spec_of(test: Test, reference: Test, keywords: Mapping[str, Any]) -> FusionSpec:
    if inspect.iscoroutinefunction(test) or inspect.isgeneratorfunction(test) or inspect.isasyncgenfunction(test):
        raise SpecError(
            f"{test.__name__}: the test must be a plain function that returns the fused result, not a coroutine"
        )
    declared = stated_inputs(keywords.get("inputs"), test.__name__)
    inputs: dict[str, Any] = {**inputs_from_annotations(test), **declared}
    fixtures: list[str] = []
    for name, parameter in inspect.signature(test).parameters.items():
        if name in inputs:
            continue
        if parameter.default is not parameter.empty:
            if name in (parameters_of(reference) or ()):
                inputs[name] = ConstantSpec(parameter.default)
        elif parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            fixtures.append(name)
    rest = {name: value for name, value in keywords.items() if name != "inputs"}
    rest.setdefault("name", test.__name__)
    spec = FusionSpec(fused=test, reference=reference, inputs=inputs, fixtures=tuple(fixtures), **rest)
    _check_words(spec)
    return spec


def _check_words(spec: FusionSpec) -> None:
    """Checks of a spec that need later stages, which the spec itself does not import."""
    for check in spec.without:
        known = registry.switches()
        if check not in known:
            raise SpecError(f"{spec.name}: without={{{check!r}: ...}} names no check{did_you_mean(check, known)}")
    for code in spec.allow:
        codes = all_causes()
        if code not in codes:
            raise SpecError(f"{spec.name}: allow={{{code!r}: ...}} names no finding{did_you_mean(code, codes)}")
    _check_requires(spec.requires)
    check_bench(spec)


def check_examples(test: Any) -> None:
    """Raises ``SpecError`` for an ``@example`` of a test that names no case of its spec."""
    for example in searching.explicit_examples(test):
        stated_choice(test.fusion_spec, example, where="@example")


def _make_test(test: Test, spec: FusionSpec) -> Test:
    bound_to_self = spec.fixtures[:1] == ("self",)

    @functools.wraps(test)
    def outer(*args: Any, **fixtures: Any) -> None:
        __tracebackhide__ = True
        fused = functools.partial(test, args[0]) if bound_to_self and args else test
        names = tuple(name for name in spec.fixtures if name != "self")
        judged = spec.with_(fused=fused, name=spec.name, fixtures=names) if fused is not test else spec
        settle(judged, outer, {name: value for name, value in fixtures.items() if name in names})

    signature = inspect.signature(test)
    fixtures = [p for name, p in signature.parameters.items() if name in spec.fixtures]
    outer.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
    outer.fusion_spec = spec  # type: ignore[attr-defined]
    searching.adopt(outer, test)
    return outer


def _test_of(spec: FusionSpec) -> Callable[..., None]:
    _check_words(spec)

    def test(*_: Any) -> None:  # in a class it is called with the instance
        __tracebackhide__ = True
        settle(spec, test, {})

    test.__signature__ = inspect.Signature()  # type: ignore[attr-defined]
    test.__name__ = test.__qualname__ = f"test_{spec.name}"
    test.__doc__ = f"{spec.name} equals its reference."
    test.fusion_spec = spec  # type: ignore[attr-defined]
    searching.adopt(test, spec.fused)
    return test


# The name of a function written in place: ``test_norm = fused_equivalent(norm_reference)(lambda x: ...)``.
_NAMELESS = "<lambda>"


def settle(spec: FusionSpec, outer: Any, extra: Mapping[str, Any]) -> TestRecord:
    """Run a spec for the current test: store the record, raise ``FusionFailure``, or skip if nothing was judged."""
    __tracebackhide__ = True
    running = active.current()
    request = running.make_request() if running is not None else Request(nodeid=spec.name)
    mode = running.choose_mode() if running is not None else Judge()
    if spec.name == _NAMELESS and running is not None:
        spec = spec.with_(name=request.nodeid.rpartition("::")[2])
    lacking = _missing(spec.requires, request.device)
    if lacking is not None:
        record = TestRecord(request.nodeid, "unknown", notes=[f"not run: {lacking}"], message=lacking)
    else:
        record = mode.run(Job(spec, request, outer, extra))
    if running is not None:
        running.records.append(record)
    if record.verdict == "fail":
        raise failure_of(record)
    if record.verdict == "unknown":
        pytest.skip(f"unknown: {record.message or 'nothing could be judged'}")
    return record


def _listed(requires: Any) -> list[Any]:
    if isinstance(requires, list | tuple | set | frozenset) and not _is_capability(requires):
        return list(requires)
    return [requires]


def _check_requires(requires: Any) -> None:
    """Raises ``SpecError`` for an invalid requirement."""
    for need in _listed(requires):
        architecture = isinstance(need, str) and re.fullmatch(r"(?:sm|compute)_?(\d+)(\d)[af]?", need)
        if architecture:
            major, minor = architecture.groups()
            raise SpecError(f"requires={need!r}; a compute capability is written ({major}, {minor})")
        is_module = isinstance(need, str) and all(part.isidentifier() for part in need.split("."))
        if not _is_capability(need) and not is_module:
            raise SpecError(
                f"requires={need!r}; expected 'cuda', a compute capability such as (9, 0), or a package's import name"
            )


def _is_capability(need: Any) -> bool:
    return isinstance(need, tuple) and len(need) == 2 and all(type(part) is int for part in need)


def _missing(requires: Any, device: str) -> str | None:
    """Why a spec cannot run on ``device``, or ``None``. Raises ``SpecError`` for an invalid requirement."""
    _check_requires(requires)
    for need in _listed(requires):
        if need == "cuda":
            if not device.startswith("cuda"):
                return "it requires a CUDA device"
        elif _is_capability(need):
            if not device.startswith("cuda"):
                return f"it requires compute capability {need[0]}.{need[1]}, and this lane is the CPU's"
            found = device_choice.capability(device)
            if found is not None and found < need:
                return f"it requires compute capability {need[0]}.{need[1]}, {device} has {found[0]}.{found[1]}"
        elif importlib.util.find_spec(need.partition(".")[0]) is None:
            meant = "; did you mean 'cuda'?" if is_near(need, ["cuda"]) else ""
            return f"it requires the package {need!r}, which is not installed{meant}"
    return None


register_test_factory(_test_of)
