"""The part of check ``repeat`` that costs more calls: state, addresses, orders of programs, other sizes in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fusion import interpreter
from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.checks.repeat import repetition
from pytest_fusion.checks.repeat.repetition import Decoys
from pytest_fusion.diagnosis.causes import likely_cause
from pytest_fusion.interpreter.control.executor import Order, executing, ordered
from pytest_fusion.spec import values
from pytest_fusion.spec.inputs import tensor
from tests.interpreter.executors import each_executor

interpreter.enable()
triton = pytest.importorskip("triton")
tl = triton.language
interpreted = pytest.mark.skipif(not interpreter.installed(), reason=str(interpreter.problem()))

T = torch.Tensor


def double(x: T) -> T:
    return x * 2


def triple(x: T) -> T:
    """Rounded, so that one unit in the last place is a matter of repeated calls alone."""
    return x * 3


def off_by_one_ulp(y: T) -> T:
    y.view(-1)[0] = torch.nextafter(y.view(-1)[0], torch.tensor(9.0))
    return y


class Counting:
    """Triples; what ``wrong`` says of the number of the call decides about what ``then`` makes of it."""

    def __init__(self, wrong: Callable[[int], bool], then: Callable[[T], T] = off_by_one_ulp) -> None:
        self.calls, self.wrong, self.then = 0, wrong, then

    def __call__(self, x: T) -> T:
        self.calls += 1
        y = x * 3
        return self.then(y) if self.wrong(self.calls) else y


def test_state_that_only_a_later_call_meets_fails(judge_one: Any) -> None:
    """Two calls agree and the fifth differs: found in a case that more is asked of, with what differs."""
    failure = judge_one(Counting(lambda call: call >= 5), triple, again=True).failure
    assert failure.identity == "repeat:out"
    assert failure.facts["most_ulp"] == 1.0
    assert judge_one(Counting(lambda call: call >= 5), triple).failure is None


@pytest.mark.parametrize("last", [1, 2])
def test_a_first_call_that_differs_from_all_later_ones_is_told_so(judge_one: Any, last: int) -> None:
    """What the first call of a case does otherwise is told from chance, whether or not the second still does it."""
    failure = judge_one(Counting(lambda call: call > last), triple, again=True).failure
    assert failure.identity == "repeat:out"
    assert "between the first call on these inputs and later ones" in failure.reason
    failure = judge_one(Counting(lambda call: call % 2 == 0), triple, again=True).failure
    assert "between the first call" not in failure.reason


def test_a_long_period_takes_the_deep_profile(judge_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What every eighteenth call does differently is not met by a few calls, but by twenty."""
    rare = lambda call: call % 18 == 0  # noqa: E731
    assert judge_one(Counting(rare), triple, again=True).failure is None
    monkeypatch.setattr(repetition, "_USUAL", repetition._DEEP)
    assert judge_one(Counting(rare), triple, again=True).failure.identity == "repeat:out"


def test_a_result_that_depends_on_addresses_fails(judge_one: Any) -> None:
    """Inputs lie elsewhere in each further call, at no multiple of 512 bytes."""

    def fused(x: T) -> T:
        y = x * 3
        return y if x.data_ptr() % 512 == 0 else off_by_one_ulp(y)

    assert judge_one(fused, triple).failure is None
    assert judge_one(fused, triple, again=True).failure.identity == "repeat:out"


class Workspace:
    """Sums the last row in a workspace that is kept between calls and grows; ``own`` reads back only what it wrote."""

    def __init__(self, *, own: bool) -> None:
        self.kept, self.own = torch.zeros(0), own

    def __call__(self, x: T) -> T:
        if self.kept.numel() < x.shape[-1]:
            self.kept = torch.zeros(x.shape[-1])
        self.kept[: x.shape[-1]] = x[-1] if len(x) else 0.0
        return x.sum(-1) * 0 + (self.kept[: x.shape[-1]] if self.own else self.kept).sum()


def last_row(x: T) -> T:
    return x.sum(-1) * 0 + (x[-1].sum() if len(x) else 0.0)


def test_what_other_sizes_leave_behind_fails(judge_one: Any) -> None:
    """A workspace that a larger input grew and filled is read beyond this input's end."""
    result = judge_one(Workspace(own=False), last_row, again=True)
    assert result.failure.identity == "repeat:sizes"
    assert likely_cause(result.failure) == "stale-memory"
    assert "rows=11, hidden=15" in result.failure.reason


@pytest.mark.parametrize("wrong", [{9, 14}, {9, 10, 11}], ids=["right beside them", "wrong beside them"])
def test_chance_is_not_taken_for_what_other_sizes_leave(judge_one: Any, wrong: set[int]) -> None:
    """A result that is another after other sizes twice, and once in more calls as they are, varies by chance."""
    failure = judge_one(Counting(lambda call: call in wrong), triple, again=True).failure
    assert failure.identity == "repeat:out"
    assert "between 12 runs on the same inputs" in failure.reason


@pytest.mark.slow
def test_a_workspace_that_is_made_ready_passes(judge_one: Any) -> None:
    """A workspace that each call reads only where it has written it is nobody's loss."""
    result = judge_one(Workspace(own=True), last_row, again=True)
    assert result.failure is None
    assert [v.facts["sizes"] for v in result.verdicts if v.check == "repeat" and "sizes" in v.facts] == [
        [{"rows": 3, "hidden": 4}, {"rows": 11, "hidden": 15}]
    ]


@pytest.mark.slow
def test_few_cases_are_called_more_often(examine: Any) -> None:
    """A dozen cases cost few calls more."""
    plain, fused = (Counting(lambda call: False) for _ in range(2))
    honest = {"honesty": "its calls are not counted here"}
    assert examine(plain, triple, cases=12, without={**honest, "repeat": "for comparison"}).verdict == "pass"
    assert examine(fused, triple, cases=12, without=honest).verdict == "pass"
    assert 0 < fused.calls - plain.calls <= 3 * 8


def test_what_may_vary_is_right_in_every_call(judge_one: Any) -> None:
    """A last bit that only a later call changes is allowed by ``deterministic=False``, another number is not."""
    given: dict[str, Any] = {"again": True, "deterministic": False}
    assert judge_one(Counting(lambda call: call >= 5), triple, **given).failure is None
    failure = judge_one(Counting(lambda call: call >= 5, lambda y: y + 1), triple, **given).failure
    assert failure.identity == "repeat:out:wrong"
    assert "called again on the same inputs" in failure.reason


def test_a_refusal_of_a_repeated_call_is_unknown(judge_one: Any) -> None:
    """A declared refusal that comes with a later call alone proves nothing about bits."""
    calls = []

    def fused(x: T) -> T:
        calls.append(x)
        if len(calls) >= 4:
            raise ValueError("too many")
        return x * 3

    result = judge_one(fused, triple, again=True, rejects=ValueError)
    assert result.failure is None
    assert ("repeat", "unknown") in [(v.check, v.status) for v in result.verdicts]


@triton.jit
def sum_by_atomics(x, out, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    tl.atomic_add(out + at, tl.load(x + row * stride + at, mask=at < columns), mask=at < columns)


@triton.jit
def ticket(x, out, counter, columns, stride, BLOCK: tl.constexpr):
    row = tl.atomic_add(counter, 1)
    at = tl.arange(0, BLOCK)
    tl.store(out + row * columns + at, 2 * tl.load(x + row * stride + at, mask=at < columns), mask=at < columns)


def column_sum(x: T) -> T:
    out = torch.zeros(x.shape[1])
    if x.numel():
        sum_by_atomics[(x.shape[0],)](x, out, x.shape[1], x.stride(0), BLOCK=triton.next_power_of_2(x.shape[1]))
    return out


def doubled_by_ticket(x: T) -> T:
    out, counter = torch.empty(x.shape), torch.zeros(1, dtype=torch.int32)
    if x.numel():
        ticket[(x.shape[0],)](x, out, counter, x.shape[1], x.stride(0), BLOCK=triton.next_power_of_2(x.shape[1]))
    return out


@interpreted
def test_sums_by_atomics_fail_unless_declared(judge_one: Any) -> None:
    """Float atomics add in the order in which programs come, which the CPU lane turns round."""
    failure = judge_one(column_sum, lambda x: x.sum(0), again=True).failure
    assert failure.identity == "repeat:out"
    assert failure.facts["order"] == "reversed"
    assert judge_one(column_sum, lambda x: x.sum(0), again=True, deterministic=False).failure is None


@triton.jit
def sum_of_the_first(x, out, columns, stride, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + at, mask=at < columns)
    if row == 0:
        tl.atomic_xchg(out + at, value, mask=at < columns)
    else:
        tl.atomic_add(out + at, value, mask=at < columns)


def sum_from_the_first(x: T) -> T:
    out = torch.zeros(x.shape[1])
    if x.numel():
        sum_of_the_first[(x.shape[0],)](x, out, x.shape[1], x.stride(0), BLOCK=triton.next_power_of_2(x.shape[1]))
    return out


class SumFromTheFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        x, w = ctx.saved_tensors
        return g * w, sum_from_the_first((g * x).contiguous())


@interpreted
@each_executor
def test_what_may_vary_is_right_in_every_order(executor: Any, judge_one: Any) -> None:
    """Programs that add to what the first one puts there make no race, and are right in one order alone."""
    with executing(executor):
        failure = judge_one(sum_from_the_first, lambda x: x.sum(0), again=True, deterministic=False).failure
        assert failure.identity == "repeat:out:wrong"
        assert "(the last one first), out: " in failure.reason
        assert judge_one(column_sum, lambda x: x.sum(0), again=True, deterministic=False).failure is None
        judged = judge_one(
            sum_from_the_first, lambda x: x.sum(0), again=True, deterministic=False, without={"repeat": "known"}
        )
        assert judged.failure is None


@interpreted
def test_a_gradient_that_may_vary_is_right_in_every_order(examine: Any) -> None:
    """The same for what backward adds up."""
    inputs = {"x": tensor("rows hidden"), "w": tensor("hidden")}
    given: dict[str, Any] = {"grad": True, "deterministic": {"dw": False}, "cases": 20}
    record = examine(SumFromTheFirst.apply, lambda x, w: x * w, inputs, **given)
    assert record.failed_check == "repeat", record.message
    assert "gradient of w" in record.message


@interpreted
def test_the_first_cases_of_several_programs_change_places_whatever_came_before(judge_one: Any) -> None:
    """One call more, where more is not asked; a single program, whose lanes add nothing up, has no other order."""
    failure = judge_one(column_sum, lambda x: x.sum(0)).failure
    assert failure.identity == "repeat:out"
    assert failure.facts["order"] == "reversed"
    inputs = {"kinds": tensor("n", dtype=torch.int64, values=values.indices(4)), "kept": False}
    one = Case({"n": 9}, "float32", {"kinds": TensorCase("int64")}, seed=1)
    result = judge_one(counted, counted_in_order, inputs, case=one)
    assert not [v for v in result.verdicts if "orders" in v.facts]


@interpreted
def test_programs_that_draw_their_rows_pass(judge_one: Any) -> None:
    """A kernel whose programs take tickets gives the same bits in every order."""
    result = judge_one(doubled_by_ticket, double, again=True)
    assert result.failure is None
    assert any(v.facts.get("orders") == ["reversed"] for v in result.verdicts)


@triton.jit
def places(kinds, taken, places, n, BLOCK: tl.constexpr, KEPT: tl.constexpr):
    at = tl.arange(0, BLOCK)
    kind = tl.load(kinds + at, mask=at < n, other=0)
    place = tl.atomic_add(taken + kind, 1, mask=at < n)
    if KEPT:
        tl.store(places + at, place, mask=at < n)


def counted(kinds: T, kept: bool) -> tuple[T, T]:
    """How many there are of each kind, and, where ``kept``, the place of each among its own, as its lane came."""
    taken, out = torch.zeros(4, dtype=torch.int32), torch.zeros(len(kinds), dtype=torch.int32)
    if len(kinds):
        block = triton.next_power_of_2(len(kinds))
        places[(1,)](kinds.contiguous(), taken, out, len(kinds), BLOCK=block, KEPT=kept)
    return taken, out


def counted_in_order(kinds: T, kept: bool) -> tuple[T, T]:
    hot = torch.nn.functional.one_hot(kinds, 4)
    return hot.sum(0).int(), (hot.cumsum(0) * hot).sum(1).sub(1).int() * kept


@interpreted
@pytest.mark.parametrize("kept", [True, False])
def test_lanes_of_one_program_come_in_another_order_too(judge_one: Any, kept: bool) -> None:
    """The places that lanes take by an atomic are those of its order, which a GPU chooses; their number is not."""
    inputs = {"kinds": tensor("n", dtype=torch.int64, values=values.indices(4)), "kept": kept}
    case = Case({"n": 9}, "float32", {"kinds": TensorCase("int64")}, seed=1)
    failure = judge_one(counted, counted_in_order, inputs, case=case, again=True).failure
    assert (failure is not None) is kept
    if kept:
        assert failure.identity == "repeat:out[1]"
        assert failure.facts["order"] == "reversed"


@triton.jit
def arrivals(seen, counter):
    tl.store(seen + tl.atomic_add(counter, 1), tl.program_id(0))


@interpreted
@pytest.mark.parametrize("order", ["launched", "reversed", 5])
def test_programs_run_in_the_order_asked_for(order: Order) -> None:
    """Each program runs once, over several batches too, in the order of the launch unless told otherwise."""
    total = 300
    seen, counter = torch.full((total,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with ordered(order):
        arrivals[(total,)](seen, counter)
    came = seen.tolist()
    assert sorted(came) == list(range(total))
    assert (came == sorted(came)) is (order == "launched")
    assert (came == sorted(came, reverse=True)) is (order == "reversed")


def test_decoys_move_what_comes_next() -> None:
    """The same allocation lands elsewhere when blocks of its size were taken in between."""
    decoys = Decoys(torch.device("cpu"), [1 << 16, 1 << 40, 0], seed=3)
    seen = set()
    for _ in range(8):
        seen.add(torch.empty(1 << 16, dtype=torch.uint8).data_ptr())
        decoys.shuffle()
    assert len(seen) > 1
