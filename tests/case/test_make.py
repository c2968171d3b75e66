"""From a case to tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion import values
from pytest_fusion.case import patterns
from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.case.make import ImpossibleCase, InputFailed, copies_of_zeros, make_inputs, shape_of
from pytest_fusion.errors import SpecError
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import derived, optional, tensor

CPU = torch.device("cpu")
Make = Callable[..., FusionSpec]


def made(make_spec: Make, entry: Any, case: TensorCase, **sizes: Any) -> torch.Tensor:
    """The one tensor of a spec."""
    spec = make_spec({"x": entry})
    found = make_inputs(spec, Case(sizes, "float32", {"x": case}, seed=3), CPU)["x"]
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize(
    "dtype",
    "float32 float16 bfloat16 float64 float8_e4m3fn float8_e5m2 int8 uint8 int16 uint16 int32 uint32 int64 uint64 bool "
    "complex64 complex128".split(),
)
@pytest.mark.parametrize("profile", [None, values.default(), values.normal(), values.uniform(0, 3), values.constant(1)])
def test_every_dtype_can_hold_every_general_profile(make_spec: Make, dtype: str, profile: Any) -> None:
    """The tensor has the dtype and shape asked for, contiguous, under each profile that fits any dtype."""
    x = made(make_spec, tensor("rows 4", dtype=dtype, values=profile), TensorCase(dtype), rows=3)
    assert str(x.dtype) == f"torch.{dtype}"
    assert x.shape == (3, 4)
    assert x.is_contiguous()


@pytest.mark.parametrize("shape", [{"rows": 0, "n": 4}, {"rows": 3, "n": 0}, {"rows": 0, "n": 0}])
def test_sizes_of_zero_give_empty_tensors(make_spec: Make, shape: dict[str, int]) -> None:
    """No profile stumbles over a tensor without elements, indices into nothing included."""
    for profile in (None, values.probabilities(), values.permutation(), values.indices("n"), values.integers("n", 9)):
        entry = tensor("rows n", dtype=torch.int64 if profile else None, values=profile)
        dtype = "int64" if profile else "float32"
        assert made(make_spec, entry, TensorCase(dtype), **shape).numel() == 0


def test_a_tensor_without_dims_has_one_element(make_spec: Make) -> None:
    """A 0-d tensor is made under every profile."""
    for profile in (None, values.probabilities(), values.permutation(), values.indices(4), values.normal()):
        assert made(make_spec, tensor("", values=profile), TensorCase("float32")).shape == ()


def test_indices_lie_in_their_range_and_reach_its_ends(make_spec: Make) -> None:
    """Indices of a vocabulary of 7 hold 0 and 6 and nothing outside; an index into nothing is impossible."""
    entry = tensor("n", dtype=torch.int64, values=values.indices("vocab"))
    x = made(make_spec, entry, TensorCase("int64"), n=9, vocab=7)
    assert (int(x.min()), int(x.max())) == (0, 6)
    with pytest.raises(ImpossibleCase, match="index into a dim of size 0"):
        made(make_spec, entry, TensorCase("int64"), n=9, vocab=0)


def test_a_permutation_holds_every_index_once(make_spec: Make) -> None:
    """Each row of a permutation, sorted, is 0 to n-1."""
    entry = tensor("rows n", dtype=torch.int64, values=values.permutation())
    x = made(make_spec, entry, TensorCase("int64"), rows=3, n=9)
    assert torch.equal(x.sort(-1).values, torch.arange(9).expand(3, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_probabilities_add_up_to_one(dtype: torch.dtype) -> None:
    """Rows of probabilities are never negative and sum to one within rounding, whatever their pattern."""
    for seed, shape in itertools.product(range(8), [(1,), (1, 1), (3, 9), (2, 5, 2), (4, 33)]):
        x = patterns.probabilities(shape, dtype, seed, CPU).to(dtype)
        assert bool((x >= 0).all())
        assert torch.allclose(x.double().sum(-1), torch.ones((), dtype=torch.float64), atol=0.02)


def test_probabilities_have_certainties_zeros_and_tiny_elements_in_every_other_tensor() -> None:
    """Over some seeds a single row is one-hot, has a few zeros, is below a clamp at 1e-12; half of them are neither."""
    plain, found = 0, set()
    for seed in range(64):
        x = patterns.probabilities((1, 300), torch.float32, seed, CPU)[0]
        positive = x[x > 0]
        plain += len(positive) == 300 and float(x.min()) > 2.0**-20
        if len(positive) == 1:
            found.add("certain")
        elif len(positive) < 300:
            found.add("zeros")
        elif float(positive.min()) < 1e-12:
            found.add("tiny")
        assert float(positive.min()) > 2.0**-60
    assert 20 <= plain <= 52
    assert found == {"certain", "zeros", "tiny"}


@pytest.mark.parametrize(
    ("dtype", "few", "all_of_them"),
    [("int8", (-100, 100), (-128, 127)), ("uint8", (0, 100), (0, 255)), ("int32", (-100, 100), (-100, 100))],
)
def test_bytes_have_all_their_bits_in_every_other_tensor(
    make_spec: Make, dtype: str, few: tuple[int, int], all_of_them: tuple[int, int]
) -> None:
    """Without ``values=`` integers are small, but for bytes, whose ends occur; what is declared stays as declared."""
    ends = set()
    for seed in range(12):
        spec = make_spec(
            {"x": tensor("4000", dtype=dtype), "i": tensor("9", dtype=dtype, values=values.integers(0, 3))}
        )
        tensors = {"x": TensorCase(dtype), "i": TensorCase(dtype)}
        found = make_inputs(spec, Case({}, "float32", tensors, seed=seed), CPU)
        ends.add((int(found["x"].min()), int(found["x"].max())))
        assert 0 <= int(found["i"].min()) <= int(found["i"].max()) <= 3
    assert ends == {few, all_of_them}


def test_integers_in_a_range_are_those_in_it(make_spec: Make) -> None:
    """A cast rounds towards zero, so that ``positive`` had zeros, and a range about zero twice as many as others."""
    for profile, low, high in ((values.positive(), 1, 7), (values.uniform(-2, 3), -2, 2)):
        spec = make_spec({"x": tensor("4000", dtype=torch.int64, values=profile)})
        x = make_inputs(spec, Case({}, "float32", {"x": TensorCase("int64")}, seed=1), CPU)["x"]
        assert x.unique().tolist() == list(range(low, high + 1))
        assert int((x == 0).sum()) < 1.4 * int((x == 1).sum())


@pytest.mark.parametrize(
    ("profile", "low", "high", "powers"),
    [
        (values.positive(0.25, 4.0), 0.25, 4.0, (0.25, 0.5, 1.0, 2.0)),
        (values.uniform(-3, 3), -3, 3, (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0)),
        (values.uniform(5, 7), 5, 7, ()),
        (values.normal(0, 2), -10, 10, (-2.0, -1.0, 1.0, 2.0)),
        (values.normal(100, 1), 95, 105, ()),
        (values.normal(3, 0), 3, 3.1, ()),
        (values.uniform(0, 0), 0, 0.1, ()),
    ],
    ids=str,
)
def test_some_numbers_of_a_range_are_powers_of_two(
    make_spec: Make, profile: Any, low: float, high: float, powers: tuple[float, ...]
) -> None:
    """Every other number of some tensors; all stay inside their bounds, and where no power does, none is made."""
    round_ones, found = 0, set()
    for seed in range(40):
        spec = make_spec({"x": tensor("64", values=profile)})
        x = make_inputs(spec, Case({}, "float64", {"x": TensorCase("float64")}, seed=seed), CPU)["x"]
        assert low <= float(x.min()) <= float(x.max()) < high
        exact = x[(x.frexp().mantissa.abs() == 0.5)]
        found |= set(exact.tolist())
        round_ones += 16 <= len(exact) <= 48
    assert found.issuperset(powers)
    assert 4 <= round_ones <= 18 if powers else not found


def test_integers_reach_both_ends_in_every_other_tensor(make_spec: Make) -> None:
    """A single length is all of its dim, 300, for every other seed, where one draw of 301 would be."""
    spec = make_spec({"x": tensor("n", dtype=torch.int64, values=values.integers(0, "s"))})

    def lengths(n: int) -> list[torch.Tensor]:
        cases = [Case({"n": n, "s": 300}, "float32", {"x": TensorCase("int64")}, seed=seed) for seed in range(60)]
        return [make_inputs(spec, case, CPU)["x"] for case in cases]

    drawn = lengths(3)
    assert all(0 <= int(t.min()) <= int(t.max()) <= 300 for t in drawn)
    assert 20 <= sum(int(t.max()) == 300 and int(t.min()) == 0 for t in drawn) <= 40
    assert 20 <= sum(int(t) == 300 for t in lengths(1)) <= 40


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_integers_of_whole_ranges_keep_to_them(make_spec: Make, dtype: str) -> None:
    """Nothing is cut off on the way to the dtype; both ends of 64 bits are among them."""
    ends = torch.iinfo(getattr(torch, dtype))
    low = max(ends.min, 0)
    spec = make_spec({"x": tensor("n", dtype=dtype, values=values.integers(low, ends.max))})
    seen: list[int] = []
    for seed in range(20):
        case = Case({"n": 9}, "float32", {"x": TensorCase(dtype)}, seed=seed)
        seen += [int(n) for n in make_inputs(spec, case, CPU)["x"].numpy()]
    assert all(low <= n <= ends.max for n in seen)
    assert {low, ends.max} <= set(seen)
    assert any(n > ends.max - ends.max // 4 for n in set(seen) - {ends.max})


@pytest.mark.parametrize("profile", [None, values.integers(0, 255)], ids=str)
def test_bytes_come_at_their_ends_together(make_spec: Make, profile: Any) -> None:
    """Three of a pixel at once, as of 160 random ones hardly ever: what is added up of them wraps there."""
    spec = make_spec({"x": tensor("n 3", dtype=torch.uint8, values=profile)})
    corners = 0
    for seed in range(40):
        case = Case({"n": 20}, "float32", {"x": TensorCase("uint8")}, seed=seed)
        x = make_inputs(spec, case, CPU)["x"]
        corners += bool(((x == 0) | (x == 255)).all(-1).any())
    assert 3 <= corners <= 20


def test_wide_integers_leave_32_bits_at_times(make_spec: Make) -> None:
    """One int64 tensor of four: sums of a few pass 2^31, and float32 holds each number and product of two."""
    spec = make_spec({"x": tensor("n", dtype=torch.int64), "y": tensor("n", dtype=torch.int32)})
    large = 0
    for seed in range(60):
        case = Case({"n": 50}, "float32", {"x": TensorCase("int64"), "y": TensorCase("int32")}, seed=seed)
        made = make_inputs(spec, case, CPU)
        x = made["x"]
        assert int(made["y"].abs().max()) <= 100
        assert torch.equal(x.float().long(), x)
        assert torch.equal((x * x).float().double(), x.double() ** 2)
        large += int(x.abs().sum()) > 2**31
    assert 6 <= large <= 26


@pytest.mark.parametrize("profile", [None, values.booleans(), values.booleans(0.9)], ids=str)
def test_masks_have_leading_runs(make_spec: Make, profile: Any) -> None:
    """Some rows keep nothing of their first 32 elements and something after; of 130 drawn alone that never happens."""
    masked = 0
    for seed in range(120):
        spec = make_spec({"x": tensor("rows n", dtype=torch.bool, values=profile)})
        x = make_inputs(spec, Case({"rows": 2, "n": 130}, "float32", {"x": TensorCase("bool")}, seed=seed), CPU)["x"]
        masked += bool((~x[:, :32].any(-1) & x.any(-1)).any())
        assert profile is None or bool(x.any(-1).all())
    assert 3 <= masked <= 60


def test_the_share_of_a_mask_is_what_was_asked_for() -> None:
    """Runs or none, each element is true with the same probability; 0 and 1 mean never and always."""
    for share in (0.0, 0.3, 1.0):
        drawn = torch.stack([patterns.booleans((5, 40), share, seed, CPU) for seed in range(400)])
        assert bool(((drawn.double().mean((0, 1)) - share).abs() < 0.09).all())
    assert patterns.booleans((3, 0), 0.5, 0, CPU).shape == (3, 0)


def test_values_stay_inside_the_dtype(make_spec: Make) -> None:
    """Numbers beyond the dtype are cut off at its ends instead of wrapping or becoming infinite."""
    big = made(make_spec, tensor("n", dtype="int8", values=values.integers(500, 600)), TensorCase("int8"), n=5)
    assert big.tolist() == [127] * 5
    half = made(make_spec, tensor("n", dtype="float16", values=values.constant(1e9)), TensorCase("float16"), n=2)
    assert half.tolist() == [65504.0, 65504.0]


def test_a_dim_of_zero_in_a_bound_is_impossible_and_no_error(make_spec: Make) -> None:
    """A division by a size of zero in a bound or in a shape makes the case impossible."""
    entry = tensor("n", dtype=torch.int64, values=values.integers(0, "8//k"))
    with pytest.raises(ImpossibleCase, match="divides by a size of zero"):
        made(make_spec, entry, TensorCase("int64"), n=5, k=0)
    with pytest.raises(ImpossibleCase, match="divides by a size of zero"):
        shape_of(tensor("8//k"), {"k": 0})
    with pytest.raises(ImpossibleCase, match="negative size -1"):
        shape_of(tensor("k-1"), {"k": 0})


def test_an_expanded_layout_repeats_one_slice(make_spec: Make) -> None:
    """Values follow the layout: along an axis of stride 0 all slices are equal, along others they differ."""
    case = TensorCase("float32", Layout("expanded"))
    x = made(make_spec, tensor("rows n"), case, rows=4, n=9)
    assert torch.equal(x, x[:1].expand(4, 9))
    assert len(set(x[0].tolist())) > 1


def test_equal_cases_give_equal_bits_and_another_seed_others(make_spec: Make) -> None:
    """A case decides its tensors, streams of two inputs differ."""
    spec = make_spec({"x": tensor("n"), "y": tensor("n")})
    case = Case({"n": 8}, "float32", {"x": TensorCase("float32"), "y": TensorCase("float32")}, seed=1)
    a, b, c = (make_inputs(spec, which, CPU) for which in (case, case, case.with_(seed=2)))
    assert torch.equal(a["x"], b["x"])
    assert not torch.equal(a["x"], c["x"])
    assert not torch.equal(a["x"], a["y"])


def test_a_values_function_gets_shape_dtype_and_a_generator_of_the_case(make_spec: Make) -> None:
    """The same case gives the function the same random numbers; its result is used as it is."""

    def draw(shape: Any, dtype: Any, generator: Any) -> torch.Tensor:
        return torch.rand(shape, generator=generator).to(dtype).requires_grad_()

    spec = make_spec({"x": tensor("n", values=draw)})
    case = Case({"n": 8}, "float16", {"x": TensorCase("float16")}, seed=1)
    a, b, c = (make_inputs(spec, which, CPU)["x"] for which in (case, case, case.with_(seed=2)))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert a.dtype is torch.float16
    assert not a.requires_grad


def test_a_values_function_with_a_wrong_result_is_an_error(make_spec: Make) -> None:
    """A wrong shape names the input, the shape wanted and the shape found; an exception of its own rejects the case."""
    with pytest.raises(SpecError, match=r"input 'x' must return a tensor of shape \(5,\), but returned \(2,\)"):
        made(make_spec, tensor("n", values=lambda *_: torch.ones(2)), TensorCase("float32"), n=5)
    with pytest.raises(InputFailed, match="values= of input 'x' raised ZeroDivisionError"):
        made(make_spec, tensor("n", values=lambda *_: 1 / 0), TensorCase("float32"), n=5)


def test_a_derived_input_finds_inputs_dims_constants_and_a_generator(make_spec: Make) -> None:
    """Each parameter is what it names, other derived inputs included, in whatever order they are written."""
    spec = make_spec(
        {
            "total": derived(lambda twice, n, scale: twice.sum() + n * scale),
            "twice": derived(lambda x, extra=5: x * 2 + (extra - 5)),
            "x": tensor("n", values=values.constant(1)),
            "scale": 10,
            "noise": derived(lambda generator, n: torch.rand(n, generator=generator)),
        }
    )
    case = Case({"n": 3}, "float32", {"x": TensorCase("float32")}, seed=1)
    found = make_inputs(spec, case, CPU)
    assert float(found["total"]) == 36
    assert list(found) == list(spec.inputs)
    assert torch.equal(found["noise"], make_inputs(spec, case, CPU)["noise"])
    assert not torch.equal(found["noise"], make_inputs(spec, case.with_(seed=2), CPU)["noise"])


def test_a_derived_input_is_no_alias_of_what_it_came_from(make_spec: Make) -> None:
    """A function that returns its argument, or writes it, leaves the other input alone."""
    spec = make_spec({"x": tensor("n"), "same": derived(lambda x: x), "zeroed": derived(lambda x: x.zero_())})
    case = Case({"n": 3}, "float32", {"x": TensorCase("float32")})
    found = make_inputs(spec, case, CPU)
    assert found["same"].data_ptr() != found["x"].data_ptr()
    assert torch.equal(found["same"], found["x"])
    assert bool(found["x"].any())


def test_a_derived_input_may_be_nested_and_is_contiguous(make_spec: Make) -> None:
    """Tensors in a list are made contiguous like a lone one."""
    spec = make_spec({"x": tensor("n n"), "views": derived(lambda x: [x.T, x[:, 1:]])})
    found = make_inputs(spec, Case({"n": 3}, "float32", {"x": TensorCase("float32")}), CPU)
    assert all(view.is_contiguous() for view in found["views"])


def test_a_derived_function_that_raises_rejects_the_case(make_spec: Make) -> None:
    """The largest of no elements does not exist: the case is outside the input's domain, not a crash."""
    spec = make_spec({"x": tensor("n"), "top": derived(lambda x: x.max())})
    with pytest.raises(InputFailed, match="derived input 'top' raised"):
        make_inputs(spec, Case({"n": 0}, "float32", {"x": TensorCase("float32")}), CPU)


def test_constants_lose_their_autograd_history(make_spec: Make) -> None:
    """A module's parameter is an input like any tensor, not a leaf that the kernel's writes would upset."""
    spec = make_spec({"weight": torch.nn.Parameter(torch.ones(3)), "pair": [torch.ones(2, requires_grad=True)]})
    found = make_inputs(spec, Case({}, "float32", {}), CPU)
    assert not found["weight"].requires_grad
    assert not found["pair"][0].requires_grad


def test_an_absent_optional_is_none(make_spec: Make) -> None:
    """Optional tensors and constants vanish where the case says so."""
    spec = make_spec({"x": optional(tensor("n")), "k": optional(3)})
    case = Case({"n": 3}, "float32", {"x": TensorCase("float32")}, absent=("x", "k"))
    assert make_inputs(spec, case, CPU) == {"x": None, "k": None}


def test_one_of_takes_the_profile_that_the_case_names(make_spec: Make) -> None:
    """The regime ``"1"`` is the second profile."""
    entry = tensor("n", values=values.one_of(values.constant(1), values.constant(2)))
    assert made(make_spec, entry, TensorCase("float32", regime="1"), n=2).tolist() == [2, 2]


def test_one_of_takes_a_function_too(make_spec: Make) -> None:
    """It is called as one that stands alone in values=, with the same generator, in a choice of a choice too."""

    def own(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        return torch.rand(shape, generator=generator).to(dtype)

    alone = made(make_spec, tensor("n", values=own), TensorCase("float16"), n=5)
    beside, inside = values.one_of(values.normal(), own), values.one_of(values.normal(), [own, values.one_of(own)])
    for profile, regime in ((beside, "1"), (inside, "2/0")):
        found = made(make_spec, tensor("n", values=profile), TensorCase("float16", regime=regime), n=5)
        assert torch.equal(found, alone)
    assert str(inside) == "one_of(normal(mean=0.0, std=1.0), function own, one_of(function own))"
    wrong = tensor("n", values=values.one_of(lambda *_: torch.zeros(2), values.normal()))
    with pytest.raises(SpecError, match=r"values= of input 'x' must return a tensor of shape \(5,\)"):
        made(make_spec, wrong, TensorCase("float16", regime="0"), n=5)


def test_a_derived_input_may_ask_for_the_dtype_of_the_case(make_spec: Make) -> None:
    """Lists of tensors come in each floating dtype; an input of that name goes first, and so does a default."""
    listed = derived(lambda n, dtype, generator: [torch.rand(n, generator=generator).to(dtype) for _ in range(2)])
    spec = make_spec({"x": listed, "n": 3})
    assert spec.uses_case_dtype
    for dtype in ("float16", "bfloat16"):
        found = make_inputs(spec, Case({}, dtype, {}), CPU)["x"]
        assert [t.dtype for t in found] == [getattr(torch, dtype)] * 2
    own = make_spec({"dtype": torch.float64, "x": derived(lambda dtype: torch.ones(2, dtype=dtype))})
    assert not own.uses_case_dtype
    assert make_inputs(own, Case({}, "float16", {}), CPU)["x"].dtype is torch.float64
    kept = make_spec({"x": derived(lambda dtype=torch.int32: torch.ones(2, dtype=dtype))})
    assert not kept.uses_case_dtype
    assert make_inputs(kept, Case({}, "float16", {}), CPU)["x"].dtype is torch.int32


def test_a_constant_may_be_infinite(make_spec: Make) -> None:
    """It was the largest finite number; one too large for its dtype still is."""
    low = tensor("n", dtype="float16", values=values.constant(-math.inf))
    assert made(make_spec, low, TensorCase("float16"), n=2).tolist() == [-math.inf, -math.inf]
    large = tensor("n", dtype="float16", values=values.constant(1e6))
    assert made(make_spec, large, TensorCase("float16"), n=1).tolist() == [65504.0]


def test_zeros_are_copied_without_being_read(make_spec: Make) -> None:
    """A function of other inputs may write into what it is given, and a copy into itself: 64 GiB cost neither anything,
    and every input keeps its values."""

    def ends(x: torch.Tensor, cuts: torch.Tensor) -> torch.Tensor:
        x[-1, -1] = 5.0
        cuts += 1
        return cuts

    inputs = {"x": tensor("rows n"), "cuts": tensor("4", dtype=torch.int64, values=values.indices(9))}
    spec = make_spec({**inputs, "ends": derived(ends)})
    tensors = {"x": TensorCase("float32"), "cuts": TensorCase("int64")}
    case = Case({"rows": 1 << 20, "n": 1 << 14}, "float32", tensors, seed=3)
    found = make_inputs(spec, case, CPU, zeros=True)
    copies = copies_of_zeros(spec, found)
    copies["x"][-1, -1] = 7.0
    copies["cuts"] += 1

    assert (float(found["x"][-1, -1]), float(copies["x"][-1, -1]), float(copies["x"][5, 5])) == (0.0, 7.0, 0.0)
    assert found["cuts"].any()
    assert torch.equal(found["ends"], found["cuts"] + 1)
    assert torch.equal(copies["cuts"], found["cuts"] + 1)
    assert copies["x"].shape == (1 << 20, 1 << 14)
