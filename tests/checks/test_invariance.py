"""Check ``invariance``: what a slice's bits may not depend on, where they change, and what is nobody's finding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion import interpreter
from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.checks.case_judge import judge_case
from pytest_fusion.checks.context import Context
from pytest_fusion.checks.invariance import neighbours
from pytest_fusion.checks.invariance.batches import InvarianceState
from pytest_fusion.checks.verdict import Verdict
from pytest_fusion.diagnosis.repro import replay_file as replays
from pytest_fusion.report.record import TestRecord
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import derived, tensor

T = torch.Tensor
INPUTS = {"x": tensor("rows hidden"), "w": tensor("hidden")}
CASE = Case({"rows": 5, "hidden": 9}, "float32", {n: TensorCase("float32") for n in "xw"}, seed=1)
H100 = 132  # multiprocessors: the size that a CPU takes for the GPU's


def reference(x: T, w: T) -> T:
    return (x * w).sum(-1)


def in_order(x: T, w: T) -> T:
    """The sum over the last axis from left to right, which no number of rows can change."""
    total = torch.zeros(x.shape[:-1], dtype=torch.float32)
    for k in range(x.shape[-1]):
        total = total + x[..., k].float() * w[k].float()
    return total.to(x.dtype)


def in_halves(x: T, w: T) -> T:
    """The same sum as a kernel that splits it between two programs makes it."""
    half = x.shape[-1] // 2
    return in_order(x[..., :half], w[:half]) + in_order(x[..., half:], w[half:])


def by_rows(choice: Callable[[int], bool]) -> Callable[[T, T], T]:
    """Split or not, depending on the number of rows."""
    return lambda x, w: (in_halves if choice(len(x)) else in_order)(x, w)


def batch_scale(x: T, w: T) -> T:
    scale = x.abs().amax() if x.numel() else torch.tensor(1.0)
    return in_order(x / scale, w) * scale


def neighbours_maximum(x: T, w: T) -> T:
    own = x.amax(-1) if x.numel() else x.sum(-1)
    shift = torch.maximum(own, own.roll(1, 0))[..., None]
    return in_order(x - shift, w) + shift[..., 0] * in_order(torch.ones_like(x), w)


def odd_rows_differently(x: T, w: T) -> T:
    odd = (torch.arange(len(x)) % 2).bool()
    return torch.where(odd, in_halves(x, w), in_order(x, w))


def masked_by_zero(x: T, w: T) -> T:
    return in_order(x, w) + (in_order(x, w) * 0).abs().roll(1, 0)


def concluded(result: Any) -> Verdict:
    (verdict,) = [v for v in result.verdicts if v.check == "invariance"]
    return verdict


PLANTED: dict[str, tuple[Callable[[T, T], T], str, str]] = {
    "another kernel from 17 rows on": (by_rows(lambda n: n > 16), "size", " bits change between 16 and 17 rows"),
    "another kernel from 200 rows on": (by_rows(lambda n: n >= 200), "size", " bits change between 199 and 200 rows"),
    "another kernel from 513 rows on": (by_rows(lambda n: n > 512), "size", " bits change between 512 and 513 rows"),
    "another kernel from 4000 rows on": (by_rows(lambda n: n >= 4000), "size", "between 3999 and 4000 rows"),
    "another kernel for one row": (by_rows(lambda n: n == 1), "size", "'s bits change between 1 and 2 rows"),
    "another kernel for whole tiles": (by_rows(lambda n: n % 8 == 0), "size", "'s bits change between "),
    "one scale for the batch": (batch_scale, "neighbours", "'s bits depend on what other rows hold"),
    "the neighbour's maximum": (neighbours_maximum, "neighbours", "'s bits depend on what other rows hold"),
    "odd rows by another program": (odd_rows_differently, "position", "'s bits depend on its position: at position 1"),
    "a neighbour times zero": (masked_by_zero, "neighbours", "'s bits change when other rows are NaN"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_bits_that_depend_on_company_fail(judge_one: Any, name: str) -> None:
    """Each kernel is right within rounding; what its bits depend on is found by experiment, a threshold exactly."""
    fused, kind, reason = PLANTED[name]
    failure = judge_one(fused, reference, INPUTS, case=CASE, invariant="rows").failure
    assert failure is not None
    assert (failure.identity, failure.facts["depends_on"]) == ("invariance:rows", kind), failure.reason
    assert reason in failure.reason
    assert failure.facts["dim"] == "rows"
    ulp = failure.facts["ulp"]
    assert ulp is None if "NaN" in reason else ulp >= 1


def test_the_smallest_case_and_its_replay_show_the_same_bug(examine: Any, judge_one: Any, tmp_path: Path) -> None:
    """Two rows are enough where they are repeated; the case alone, in a new run, fails by the same identity."""
    fused = by_rows(lambda n: n > 16)
    record: TestRecord = examine(fused, reference, INPUTS, cases=40, invariant="rows", dtypes=("float32", "bfloat16"))
    assert (record.failed_check, record.cause) == ("invariance", "batch-variant")
    assert "bits change between 16 and 17 rows" in record.message
    assert record.case is not None
    assert record.case["dims"]["rows"] == 2
    (path,) = tmp_path.rglob("*.json")
    again = judge_one(fused, reference, INPUTS, case=replays.read(path).case, again=True, invariant="rows")
    assert again.failure.identity == "invariance:rows"


@pytest.mark.slow
def test_shrinking_asks_in_every_case(examine: Any) -> None:
    """A finding that needs long rows is shrunk to the shortest, in more cases than a test without one pays for."""

    def fused(x: T, w: T) -> T:
        return (in_halves if len(x) > 16 and x.shape[1] >= 13 else in_order)(x, w)

    record = examine(fused, reference, INPUTS, cases=40, invariant="rows")
    assert record.failed_check == "invariance"
    assert record.case is not None
    assert record.case["dims"] == {"rows": 2, "hidden": 13}


@pytest.mark.slow
def test_a_window_of_sizes_is_found_and_its_edge_named(examine: Any, tmp_path: Path) -> None:
    """A kernel for 128 to 255 rows alone; the calls of one case at 129 or so tell, and the replay asks at all."""
    record = examine(by_rows(lambda n: 128 <= n < 256), reference, INPUTS, cases=40, invariant="rows")
    assert record.failed_check == "invariance"
    assert "bits change between 127 and 128 rows" in record.message
    (path,) = tmp_path.rglob("*.json")
    spec = FusionSpec(
        fused=by_rows(lambda n: 128 <= n < 256), reference=reference, inputs=INPUTS, invariant="rows", dtypes="float32"
    )
    again = judge_case(Context(spec, torch.device("cpu"), complete=True), replays.read(path).case, again=True)
    assert again.failure is not None
    assert again.failure.identity == "invariance:rows"


@pytest.mark.slow
def test_the_batch_may_be_large_beside_long_rows(judge_one: Any) -> None:
    """What a launcher splits for long rows and large batches alone; row by row it is right, and so the twin passes."""
    case = CASE.with_(sizes={"rows": 2, "hidden": 1025})

    def tiled(x: T, w: T, tile: int = 41) -> T:
        tiles = (x * w).unfold(1, tile, tile)
        sums = sum((tiles[..., k] for k in range(tile)), torch.zeros(tiles.shape[:2]))
        return sum((sums[:, k] for k in range(sums.shape[1])), torch.zeros(len(x)))

    def fused(x: T, w: T) -> T:
        return tiled(x, w, 25 if len(x) >= 200 else 41)

    failure = judge_one(fused, reference, INPUTS, case=case, invariant="rows").failure
    assert "bits change between 199 and 200 rows" in failure.reason
    assert judge_one(tiled, reference, INPUTS, case=case, invariant="rows").failure is None


@pytest.mark.slow
def test_a_case_of_few_wide_rows_is_asked_with_more() -> None:
    """One row of ten shows that 200 are summed in another order: of two, repeated to 257, none does."""

    def fused(x: T, w: T) -> T:
        rare = (x[..., :1].abs() * 64).remainder(10).floor().eq(0).any(-1)
        return torch.where(rare, in_halves(x, w), in_order(x, w)) if len(x) > 200 else in_order(x, w)

    spec = FusionSpec(fused=fused, reference=reference, inputs=INPUTS, dtypes="float32", invariant="rows")
    case = Case({"rows": 2, "hidden": 100}, "float32", {n: TensorCase("float32") for n in "xw"}, seed=1)
    context = Context(spec, torch.device("cpu"))
    assert judge_case(context, case, again=True).failure is None
    context = Context(spec, torch.device("cpu"))
    context.state(InvarianceState).outputs.cases = {True: 6, False: 6}  # as many as are asked before wider ones

    result = judge_case(context, case, again=True)

    assert result.failure is not None
    assert result.failure.check == "invariance"
    assert result.failure.facts["depends_on"] == "size"
    assert result.case.sizes["rows"] == 37


def test_any_axis_and_inputs_written_in_place_count(judge_one: Any) -> None:
    """The axis of the dim is the spec's in inputs, and the one that follows its size in outputs."""

    def columns(x: T, w: T) -> tuple[T, T]:
        total = by_rows(lambda n: n > 16)(x.T, w)
        return x.sum(), total[None]

    inputs = {"x": tensor("hidden rows"), "w": tensor("hidden")}
    written = lambda x, w: (x.sum(), reference(x.T, w)[None])  # noqa: E731
    failure = judge_one(columns, written, inputs, case=CASE, invariant="rows").failure
    assert failure.identity == "invariance:rows"
    assert failure.facts["output"] == "out[1]"
    assert failure.facts["first"][1] == failure.facts["slice"]

    def in_place(y: T, x: T, w: T) -> None:
        y += by_rows(lambda n: n > 16)(x, w)

    case = CASE.with_(tensors={name: TensorCase("float32") for name in "yxw"})
    spoken = {"y": tensor("rows"), **INPUTS}
    failure = judge_one(
        in_place, lambda y, x, w: y.add_(reference(x, w)), spoken, case=case, invariant="rows", mutates="y"
    ).failure
    assert failure.facts["output"] == "y (in place)"


def test_only_the_named_dims_are_asked_about(judge_one: Any) -> None:
    """A kernel that looks at rows is no finding along columns, and one of two dims is blamed by name."""
    inputs = {"x": tensor("rows tokens hidden"), "w": tensor("hidden")}
    case = CASE.with_(sizes={"rows": 3, "tokens": 4, "hidden": 9})
    fused = by_rows(lambda n: n > 16)
    alone = judge_one(fused, reference, inputs, case=case, invariant="tokens")
    assert (alone.failure, concluded(alone).status) == (None, "pass")
    both = judge_one(fused, reference, inputs, case=case, invariant=("tokens", "rows"))
    assert both.failure.identity == "invariance:rows"


def fixed_tiles(x: T, w: T) -> T:
    """A product in tiles of four terms, always in one order."""
    total = torch.zeros(x.shape[0], w.shape[1])
    for start in range(0, x.shape[1], 4):
        tile = torch.zeros_like(total)
        for k in range(start, min(start + 4, x.shape[1])):
            tile = tile + x[:, k : k + 1].float() * w[k].float()
        total = total + tile
    return total.to(x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_honest_kernels_pass(examine: Any, dtype: str) -> None:
    """Row by row, and a product in a fixed order, in all layouts and values, expanded rows and NaN among them."""
    for fused, written, inputs in (
        (in_order, lambda x, w: (x.float() * w.float()).sum(-1).to(x.dtype), INPUTS),
        (fixed_tiles, lambda x, w: x @ w, {"x": tensor("rows hidden"), "w": tensor("hidden columns")}),
    ):
        record = examine(fused, written, inputs, cases=24, invariant="rows", dtypes=dtype)
        assert record.verdict == "pass", record.message
        assert record.checks["invariance"]["verdict"] == "pass"
        assert record.checks["invariance"]["cases"] >= 3


def test_outputs_of_all_rows_are_left_out(judge_one: Any) -> None:
    """What has no axis of rows may depend on all of them."""
    fused = lambda x, w: (in_order(x, w), x.sum(0))  # noqa: E731
    written = lambda x, w: (reference(x, w), x.sum(0))  # noqa: E731
    result = judge_one(fused, written, INPUTS, case=CASE, invariant="rows")
    assert (result.failure, concluded(result).status) == (None, "pass")


STRIDES: dict[Layout, Callable[[int], tuple[int, int]]] = {
    Layout("step"): lambda rows: (18, 2),
    Layout("padded"): lambda rows: (12, 1),
    Layout("transposed"): lambda rows: (1, max(rows, 5)),
    Layout("contiguous", 0, 1): lambda rows: (9, 1),
    Layout("expanded"): lambda rows: (0, 1),
}


@pytest.mark.parametrize("layout", STRIDES, ids=str)
def test_layouts_are_kept(judge_one: Any, layout: Layout) -> None:
    """Slices lie as the case has them, in calls of every size; fewer of a transposed tensor as a view of it."""
    seen: set[tuple[int, tuple[int, ...]]] = set()

    def fused(x: T, w: T) -> T:
        seen.add((len(x), x.stride()))
        return in_order(x, w)

    result = judge_one(fused, reference, INPUTS, case=CASE.with_tensor("x", layout=layout), invariant="rows")
    assert (result.failure, concluded(result).status) == (None, "pass")
    assert len(seen) > 5
    assert all(strides == STRIDES[layout](rows) for rows, strides in seen)


def by_layout(x: T, w: T) -> T:
    """As a compiler has it, which adds up in another order where it knows that neighbours in a row lie side by side."""
    return (in_halves if x.stride(-1) == 1 else in_order)(x, w)


def test_the_layout_may_decide_and_the_number_of_rows_may_not(judge_one: Any) -> None:
    """One row of a transposed tensor is asked in the strides of many, and a kernel for one row is found in them too."""
    case = CASE.with_tensor("x", layout=Layout("transposed"))
    assert judge_one(by_layout, reference, INPUTS, case=case, invariant="rows").failure is None

    failure = judge_one(by_rows(lambda n: n == 1), reference, INPUTS, case=case, invariant="rows").failure
    assert failure.identity == "invariance:rows"
    assert "'s bits change between 1 and 2 rows" in failure.reason


@pytest.mark.slow
def test_derived_inputs_follow_or_stay(judge_one: Any) -> None:
    """A scale per row is cut with its rows, one for all of them stays, a mean over the rows can do neither."""

    def scaled(x: T, w: T, s: Any) -> T:
        return in_order(x, w) * s

    def judge(function: Callable[..., Any], fused: Any = scaled) -> Any:
        inputs = {**INPUTS, "s": derived(function)}
        return judge_one(fused, lambda x, w, s: reference(x, w) * s, inputs, case=CASE, invariant="rows")

    for function in (lambda x: x.amax(-1), lambda x: x.amax(), lambda x: x.shape[-1] ** -0.5, lambda w: w.sum()):
        result = judge(function)
        assert (result.failure, concluded(result).status) == (None, "pass")
    shares = judge(lambda x: x.mean())
    assert concluded(shares).status == "unknown"
    assert "the derived input s depends on all slices" in concluded(shares).reason
    wrong = judge(lambda x: x.amax(-1), lambda x, w, s: by_rows(lambda n: n > 16)(x, w) * s)
    assert wrong.failure.identity == "invariance:rows"


@pytest.mark.slow
def test_chance_is_left_to_repeat(judge_one: Any) -> None:
    """A third call with other bits than the two before it differs from every variant, and is no finding here."""
    calls = 0

    def fused(x: T, w: T) -> T:
        nonlocal calls
        calls += 1
        return (in_halves if calls == 3 else in_order)(x, w)

    result = judge_one(fused, reference, INPUTS, case=CASE, invariant="rows")
    assert (result.failure, concluded(result).status) == (None, "unknown")
    assert "`repeat` comes first" in concluded(result).reason


def test_a_kernel_may_refuse_other_sizes(judge_one: Any) -> None:
    """What ``rejects=`` allows is skipped; where every other size is refused, nothing is known."""

    def up_to(most: int, least: int) -> Callable[[T, T], T]:
        def fused(x: T, w: T) -> T:
            if not least <= len(x) <= most:
                raise ValueError("not these")
            return in_order(x, w)

        return fused

    keywords = {"case": CASE, "invariant": "rows", "rejects": ValueError}
    some = concluded(judge_one(up_to(200, 2), reference, INPUTS, **keywords))
    assert some.status == "pass"
    assert 2 <= min(some.facts["sizes"]["rows"]) <= max(some.facts["sizes"]["rows"]) <= 200
    none = concluded(judge_one(up_to(5, 5), reference, INPUTS, **keywords))
    assert none.status == "unknown"
    assert "no other size of it was accepted" in none.reason


def test_an_error_at_another_size_is_that_cases_own(examine: Any) -> None:
    """A kernel that raises above a hundred rows fails ``error`` on a case of that many, shrunk like any other."""

    def fused(x: T, w: T) -> T:
        if len(x) > 100:
            torch.empty(2).view(7)
        return in_order(x, w)

    record = examine(fused, reference, INPUTS, cases=4, invariant="rows")
    assert record.failed_check == "error"
    assert record.case is not None
    assert record.case["dims"]["rows"] == 101


@pytest.mark.slow
def test_a_test_pays_for_few_cases_of_a_score_of_calls(judge_one: Any, examine: Any) -> None:
    """At most six cases, each of at most twenty-two calls, with one dim or two; each octave of sizes has one."""
    calls: list[int] = []

    def fused(x: T, w: T) -> T:
        calls.append(len(x))
        return in_order(x, w)

    inputs = {"x": tensor("rows tokens heads hidden"), "w": tensor("hidden")}
    for named, case, given in (
        ("rows", CASE, INPUTS),
        (("rows", "tokens"), CASE.with_(sizes={"rows": 3, "tokens": 4, "heads": 2, "hidden": 9}), inputs),
    ):
        calls.clear()
        result = judge_one(fused, reference, given, case=case, invariant=named, without={"honesty": "calls again"})
        own = calls[2:]
        assert 8 <= len(own) <= 22
        assert 1 in own
        assert max(own) >= 2048
        seen = concluded(result).facts["sizes"]["rows"]
        assert sorted(seen) == sorted(own[1 : 1 + len(seen)])
        assert isinstance(named, tuple) or {H100 - 1, H100, H100 + 1} & set(seen)
        octaves = [set(seen) & {2**k - 1, 2**k, 2**k + 1} for k in range(3, 13)]
        assert isinstance(named, tuple) or all(octaves), seen
    record = examine(fused, reference, INPUTS, cases=40, invariant="rows")
    assert 3 <= record.checks["invariance"]["cases"] <= 6


DTYPES = "float64 float16 float8_e5m2 int32 uint16 uint64 bool complex64".split()


@pytest.mark.parametrize("name", DTYPES)
def test_slices_are_compared_in_every_dtype(judge_one: Any, name: str) -> None:
    """Rows of every dtype are cut and compared; a copy that changes a row with the batch size is caught."""
    dtype = getattr(torch, name)
    inputs = {"x": tensor("rows hidden", dtype=dtype)}
    case = Case({"rows": 3, "hidden": 4}, "float32", {"x": TensorCase(name)}, seed=3)

    def late(x: T) -> T:
        out = x.clone()
        if len(x) > 16:
            out.view(torch.uint8).view(-1)[0] ^= 1
        return out

    assert concluded(judge_one(torch.clone, torch.clone, inputs, case=case, invariant="rows")).status == "pass"
    # The clone at 17 rows is wrong as well, so that a case of that size would fail `values`; here only 3 rows are.
    failure = judge_one(late, torch.clone, inputs, case=case, invariant="rows").failure
    assert failure.identity == "invariance:rows", failure
    if name in ("float64", "float16", "float8_e5m2"):
        assert failure.facts["ulp"] == 1


def test_a_triton_kernel_that_splits_by_rows(judge_one: Any) -> None:
    """The launcher's choice of a split by the number of rows is found in interpreted kernels too."""
    if torch.cuda.device_count() > 0:
        pytest.skip("interpreted kernels only")
    interpreter.enable()
    triton = pytest.importorskip("triton")
    if not interpreter.installed():
        pytest.skip(str(interpreter.problem()))
    tl = triton.language

    @triton.jit
    def dot_kernel(x, w, out, hidden, STEP: tl.constexpr):
        row = tl.program_id(0)
        total = 0.0
        for start in range(0, hidden, STEP):
            k = start + tl.arange(0, STEP)
            ok = k < hidden
            total += tl.sum(tl.load(x + row * hidden + k, mask=ok, other=0.0) * tl.load(w + k, mask=ok, other=0.0), 0)
        tl.store(out + row, total)

    def dot(x: T, w: T, *, wide: int = 10**9) -> T:
        out = torch.empty(len(x))
        dot_kernel[(len(x),)](x.contiguous(), w.contiguous(), out, x.shape[1], STEP=2 if len(x) < wide else 8)
        return out

    case = CASE.with_(sizes={"rows": 3, "hidden": 13})
    assert concluded(judge_one(dot, reference, INPUTS, case=case, invariant="rows")).status == "pass"
    failure = judge_one(lambda x, w: dot(x, w, wide=64), reference, INPUTS, case=case, invariant="rows").failure
    assert failure.facts["sizes"] == [63, 64], failure
    assert "between 63 and 64 rows" in failure.reason


def test_a_dim_that_is_no_plural_reads_well() -> None:
    """The words of a reason, for dims that are called after one or many."""
    words = [(neighbours.name_of_one(name, 3), neighbours.count_of(name, 16)) for name in ("tokens", "batch", "boxes")]
    assert words == [
        ("token 3", "16 tokens"),
        ("slice 3 along batch", "batch=16"),
        ("slice 3 along boxes", "boxes=16"),
    ]
