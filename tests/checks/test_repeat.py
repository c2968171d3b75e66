"""Check ``repeat``: equal bits for equal inputs, a new answer for new ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.checks.repeat import repeat
from pytest_fusion.checks.repeat.repeat import check_repeat, differing, first_difference, variations
from pytest_fusion.diagnosis.causes import likely_cause
from pytest_fusion.errors import SpecError
from pytest_fusion.spec.inputs import derived, optional, tensor
from tests.checks.judged import concluded
from tests.sweeps import sweep

T = torch.Tensor


class Unsteady:
    """Adds one unit in the last place to the first element of every other call."""

    def __init__(self, period: int = 2) -> None:
        self.calls, self.period = 0, period

    def __call__(self, x: T) -> T:
        self.calls += 1
        y = x * 3
        if self.calls % self.period == 0:
            y.view(-1)[0] = torch.nextafter(y.view(-1)[0], torch.tensor(9.0))
        return y


def triple(x: T) -> T:
    """Rounded, so that one unit in the last place is a matter of repeated calls alone."""
    return x * 3


@pytest.mark.parametrize("period", [2, 3, 4])
def test_a_bit_that_differs_between_runs_fails(judge_one: Any, period: int) -> None:
    """One unit in the last place in every second, third or fourth call is chance, not an effect of the fill."""
    fused = Unsteady(period)
    fused.calls = period - 2  # so that the second call differs from the first
    result = judge_one(fused, triple)
    assert result.failure.identity == "repeat:out"
    assert "deterministic=False" in result.failure.reason


def test_chance_that_agrees_with_the_fill_for_a_while_is_chance(judge_one: Any) -> None:
    """A coin that falls with the fill six times over makes no kernel one that reads its surroundings."""
    as_the_fill = "0101100110"
    calls = itertools.count()

    def kernel(x: torch.Tensor) -> torch.Tensor:
        number = next(calls)
        side = as_the_fill[number] if number < len(as_the_fill) else "1"
        return x * 3 * (1 + 1e-7 * int(side))

    result = judge_one(kernel, lambda x: x * 3)
    assert result.failure is not None
    assert result.failure.check == "repeat", result.failure.reason


class Counted:
    """Triples where its counter says that it is the first to come; ``back``: the counter is set back."""

    def __init__(self, *, back: bool) -> None:
        self.came, self.back = 0, back

    def __call__(self, x: T) -> T:
        out = torch.empty_like(x)
        if self.came == 0:
            out[...] = x * 3
        self.came += not self.back
        return out


def test_a_counter_that_is_not_set_back_is_named(judge_one: Any) -> None:
    """The first call is right, and all later ones leave memory as they found it, which is another thing each time."""
    failure = judge_one(Counted(back=False), triple).failure
    assert (failure.identity, likely_cause(failure)) == ("repeat:out", "cached-answer")
    assert "between the first call on these inputs and later ones, which agree" in failure.reason
    assert "a counter or a workspace, is not set back" in failure.reason
    assert judge_one(Counted(back=True), triple).failure is None
    assert likely_cause(judge_one(Unsteady(), triple).failure) == "nondeterministic"


def test_a_difference_that_is_gone_when_it_is_measured_fails(judge_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that still writes to a result may make it equal again; that it differed is enough."""
    monkeypatch.setattr(repeat, "variations", lambda base, runs: [])
    fused = Unsteady(2)
    result = judge_one(fused, triple)
    assert result.failure.identity == "repeat:out"
    assert "1 of" in result.failure.reason


def test_chance_that_is_declared_is_unknown_not_failed(judge_one: Any) -> None:
    """With ``deterministic=False`` the same kernel is not accused, and the check says why it knows nothing."""
    result = judge_one(Unsteady(), triple, deterministic=False)
    assert result.failure is None
    verdict = concluded(result, "repeat")
    assert verdict.status == "unknown"
    assert "out varies" in verdict.reason


def test_chance_may_be_declared_for_one_output_alone(judge_one: Any) -> None:
    """A declared unsteady output does not hide a second one that is not declared."""
    first, second = Unsteady(), Unsteady()
    pair = lambda x: (triple(x), triple(x))  # noqa: E731
    declared = {"deterministic": {"out[0]": False}}
    assert judge_one(lambda x: (first(x), triple(x)), pair, **declared).failure is None
    failure = judge_one(lambda x: (Unsteady.__call__(first, x), second(x)), pair, **declared).failure
    assert failure.identity == "repeat:out[1]"


def test_declared_chance_does_not_hide_a_read_of_the_gaps(judge_one: Any) -> None:
    """A kernel that may vary but depends on padding in a steady way still fails ``bounds``."""
    padded = Case({"rows": 5, "hidden": 7}, "float32", {"x": TensorCase("float32", Layout("padded"))}, seed=1)
    fused = lambda x: x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset()) * 3  # noqa: E731
    assert judge_one(fused, triple, case=padded, deterministic=False).failure.identity == "bounds:surroundings"


def test_a_cached_answer_fails(judge_one: Any) -> None:
    """A kernel that keeps its answer by address returns the old one for new values, and is caught by a second call."""
    cache: dict[int, T] = {}

    def fused(x: T) -> T:
        return cache.setdefault(x.data_ptr(), x * 3)

    result = judge_one(fused, triple, again=True)
    assert result.failure.identity == "repeat:stale"
    assert "the previous call's answer" in result.failure.reason


def test_state_that_makes_a_second_call_raise_fails(judge_one: Any) -> None:
    """A kernel that raises only when called again at the same addresses fails ``repeat``, not ``error``."""
    seen: set[tuple[int, float]] = set()

    def fused(x: T) -> T:
        if any(pointer == x.data_ptr() and first != float(x[0, 0]) for pointer, first in seen):
            raise RuntimeError("already there")
        seen.add((x.data_ptr(), float(x[0, 0])))
        return x * 3

    failure = judge_one(fused, triple, again=True).failure
    assert failure.identity == "repeat:stale"
    assert "RuntimeError" in failure.reason


def test_numbers_derived_from_the_values_change_with_them(examine: Any) -> None:
    """A kernel that is told a longest length gets that of the changed values, and is not taken for one with state."""

    def lengths(generator: torch.Generator, rows: int) -> T:
        return torch.randint(0, 9, (rows,), generator=generator)

    def fused(x: T, lengths: T, longest: int) -> T:
        keep = torch.arange(longest)[None, :] < lengths[:, None]
        return torch.cat([x * 2, keep.sum(1, keepdim=True).to(x.dtype)], 1)

    inputs = {
        "x": tensor("rows hidden"),
        "lengths": derived(lengths),
        "longest": derived(lambda lengths: int(lengths.max()) if len(lengths) else 0),
    }
    reference = lambda x, lengths, longest: torch.cat([x + x, lengths[:, None].to(x.dtype)], 1)  # noqa: E731
    record = examine(fused, reference, inputs)
    assert record.verdict == "pass", record.message


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [True, False])
def test_a_list_of_tensors_of_drawn_shapes_is_judged(examine: Any, drawn: bool) -> None:
    """Where other values have other shapes or numbers of tensors the call is not repeated; where not, it is."""

    def parts(rows: int, generator: torch.Generator) -> list[T]:
        lengths = torch.randint(0, 9, (rows,), generator=generator).tolist() if drawn else [4] * rows
        return [torch.randn(n, generator=generator) for n in lengths]

    inputs = {"x": tensor("rows hidden"), "parts": derived(parts)}
    reference = lambda x, parts: [p * 3 for p in parts]  # noqa: E731
    record = examine(reference, reference, inputs)
    assert record.verdict == "pass", record.message

    seen: dict[tuple[int, ...], list[T]] = {}

    def cached(x: T, parts: list[T]) -> list[T]:
        return seen.setdefault(tuple(p.data_ptr() for p in parts), [p * 3 for p in parts])

    if not drawn:
        record = examine(cached, reference, inputs)
        assert record.cause == "cached-answer", record.message


def test_a_bug_of_the_changed_values_alone_is_not_taken_for_state(judge_one: Any) -> None:
    """A kernel that is wrong for the second values in a first call as well fails ``values`` on that case."""

    def fused(x: T) -> T:
        return x * (2 if float(x[0, 0]) > 0 else 3)

    results = [
        judge_one(
            fused,
            triple,
            again=True,
            case=Case({"rows": 5, "hidden": 7}, "float32", {"x": TensorCase("float32")}, seed=seed),
        )
        for seed in range(8)
    ]
    found = [(r.failure.check, r.case.seed) for r in results if r.failure is not None]
    assert found
    assert {check for check, _ in found} == {"values"}
    assert any(seed >= 8 for _, seed in found), "one of them was found by the second call"


def test_an_honest_kernel_passes(judge_one: Any) -> None:
    """Steady kernels pass, workspace that is reused and reset included."""
    workspace = torch.zeros(64)

    def fused(x: T) -> T:
        workspace.zero_()
        workspace[: x.numel()] += x.reshape(-1)
        return (workspace[: x.numel()] * 3).reshape(x.shape)

    result = judge_one(fused, triple, again=True)
    assert result.failure is None
    assert {v.status for v in result.verdicts if v.check == "repeat"} == {"pass"}


DTYPES = "float32 float16 bfloat16 float64 float8_e4m3fn float8_e5m2 int8 int64 uint8 uint16 uint32 uint64 bool".split()


@pytest.mark.parametrize("name", DTYPES)
def test_bits_are_compared_in_every_dtype(name: str) -> None:
    """A changed element is found, equal tensors are equal, whatever the dtype and strides."""
    dtype = getattr(torch, name)
    a = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    b = torch.tensor([[0, 1], [1, 1]]).to(dtype)
    assert not bool(differing(a, a.T.contiguous().T).any())
    assert differing(a, b).nonzero().tolist() == [[1, 1]]


def test_nan_equals_nan_and_zeros_have_signs() -> None:
    """Payloads of NaN do not count, the sign of a zero does; complex elements count once; views with lazy bits work."""
    nan = torch.tensor([float("nan")])
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert not bool(differing(nan, other).any())
    assert bool(differing(torch.tensor([0.0]), torch.tensor([-0.0])).any())
    z = torch.complex(torch.ones(3), torch.zeros(3))
    w = z.clone()
    w[1] = 2j
    assert differing(z, w).tolist() == [False, True, False]
    assert not bool(differing(z.conj().conj(), z).any())
    assert differing(z.conj(), z).tolist() == [True] * 3
    assert not bool(differing(z.conj().imag, z.conj().resolve_conj().imag).any())
    assert not bool(differing(torch.tensor(1.0), torch.tensor(1.0)).any())


def test_a_changed_shape_is_a_difference_of_all_elements() -> None:
    """An output whose shape varies differs, an empty one too."""
    for a, b in ((torch.ones(2), torch.ones(3)), (torch.ones(0), torch.ones(3)), (torch.ones(3), torch.ones(0))):
        assert first_difference({"out": a}, {"out": b}) is not None
        assert check_repeat(variations({"out": a}, [{"out": b}]), 2).failed
    assert first_difference({"out": torch.ones(2)}, {}) is not None
    assert first_difference({"out": torch.ones(2)}, {"out": torch.ones(2)}) is None


def test_what_varies_is_told_in_full() -> None:
    """Every output with its elements that differ in any run, and their distances in units in the last place."""
    one = torch.ones(4)
    up = torch.nextafter(one, torch.tensor(2.0))
    three = torch.nextafter(torch.nextafter(up, torch.tensor(2.0)), torch.tensor(2.0))
    base = {"out[0]": one, "out[1]": one, "out[2]": torch.zeros(2, dtype=torch.int32)}
    runs = [
        {"out[0]": torch.stack([up[0], one[0], one[0], one[0]]), "out[1]": one, "out[2]": base["out[2]"]},
        {"out[0]": torch.stack([one[0], three[0], one[0], one[0]]), "out[1]": one, "out[2]": base["out[2]"] + 1},
    ]
    floats, integers = variations(base, runs)
    assert (floats.output, floats.count, floats.total, floats.first) == ("out[0]", 2, 4, [0])
    assert (floats.median_ulp, floats.most_ulp) == (1.0, 3.0)
    assert (integers.output, integers.count, integers.most_ulp) == ("out[2]", 2, None)
    verdict = check_repeat([floats, integers], 3)
    assert "2 of 4 element(s) of out[0] (by 1 ulp, at most 3)" in verdict.reason
    assert "so do 2 of 2 element(s) of out[2]" in verdict.reason
    assert 'deterministic={"out[0]": False, "out[2]": False}' in verdict.reason
    (half,) = variations({"out": torch.tensor([-1.0]).half()}, [{"out": torch.tensor([1.0]).half()}])
    assert half.most_ulp == 2 * 0x3C00


@pytest.mark.parametrize("name", ["out['dq']", "dq"])
def test_an_output_in_a_container_is_declared_by_its_key(judge_one: Any, name: str) -> None:
    """``deterministic={"dq": False}`` means the output of that name, whatever holds it; others still count."""
    unsteady = Unsteady()
    both = lambda x: {"dq": triple(x), "dk": triple(x)}  # noqa: E731
    fused = lambda x: {"dq": unsteady(x), "dk": triple(x)}  # noqa: E731
    assert judge_one(fused, both, deterministic={name: False}).failure is None
    assert judge_one(fused, both, deterministic={"dk": False}).failure.identity == "repeat:out['dq']"


@sweep(
    ("name", "grad", "parts"),
    [
        ("nonsense", False, ["neither an output nor a gradient (outputs: out['y'], out['n']; gradients: none"]),
        ("x", True, ["did you mean 'dx'?", "gradients: dx, db)"]),
        ("dxx", True, ["did you mean 'dx'?"]),
        ("dx", False, ["names neither"]),
        ("di", True, ["gradients: dx, db)"]),
        ("dx", "b", ["gradients: db)"]),
    ],
)
def test_a_name_that_nothing_has_is_an_error(examine: Any, name: str, grad: Any, parts: list[str]) -> None:
    """``deterministic=`` of neither an output nor a gradient would say nothing, silently."""

    def reference(x: T, b: T | None, i: T) -> dict[str, Any]:
        return {"y": x * 3 if b is None else x + b, "n": len(x)}

    inputs = {"x": tensor("n"), "b": optional(tensor("n")), "i": tensor("n", dtype=torch.int64)}
    with pytest.raises(SpecError) as caught:
        examine(reference, reference, inputs, cases=70, grad=grad, deterministic={name: False})
    assert all(part in str(caught.value) for part in (f"deterministic={{{name!r}: ...}}", *parts)), str(caught.value)


def test_a_name_that_nothing_has_is_an_error_in_the_first_case(judge_one: Any) -> None:
    """Where neither an optional input nor a drawn one may bring an output along."""
    with pytest.raises(SpecError, match=r"'outt': .* names neither an output nor a gradient; did you mean 'out'"):
        judge_one(triple, triple, deterministic={"outt": False})
    judge_one(triple, triple, case=Case({"rows": 0, "hidden": 3}, "float32", {"x": TensorCase("float32")}))


@pytest.mark.slow
def test_a_name_of_an_output_that_some_cases_have_is_fine(examine: Any) -> None:
    """What an optional input brings along counts; of few cases, or beside a failure, a wrong name is only noted."""
    inputs = {"x": tensor("n"), "b": optional(tensor("n"))}

    def reference(x: T, b: T | None) -> dict[str, T]:
        return {"y": x} if b is None else {"y": x, "z": b}

    right = examine(reference, reference, inputs, cases=20, deterministic={"z": False, "out['y']": True})
    assert not any("deterministic" in note for note in right.notes)
    few = examine(reference, reference, inputs, cases=2, deterministic={"zz": False})
    assert few.verdict == "pass"
    assert any("deterministic={'zz': ...}" in note for note in few.notes)
    wrong = examine(lambda x, b: {**reference(x, b), "y": x + 1}, reference, inputs, deterministic={"zz": False})
    assert wrong.failed_check == "values"
    assert any("deterministic={'zz': ...}" in note for note in wrong.notes)


def test_an_input_written_in_place_is_declared_by_its_name(judge_one: Any) -> None:
    """An unsteady in-place output fails by default and passes once named."""
    unsteady = Unsteady()

    def fused(x: T) -> None:
        x.copy_(unsteady(x))

    def in_place(x: T) -> None:
        x.mul_(3)

    assert judge_one(fused, in_place, mutates="x").failure.identity == "repeat:x (in place)"
    assert judge_one(fused, in_place, mutates="x", deterministic={"x": False}).failure is None
