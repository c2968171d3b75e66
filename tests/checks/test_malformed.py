"""Calls that the spec rules out: a kernel refuses them, is right, or stays in bounds; else it is a finding."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion import values
from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.case.choosing import search
from pytest_fusion.case.make import make_inputs
from pytest_fusion.checks.malformed.broken_calls import BrokenCall, broken_calls
from pytest_fusion.checks.malformed.malformed import refuses
from pytest_fusion.diagnosis.repro import replay_file
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.modes import Judge, Mode, Replay
from pytest_fusion.engine.profiles import profile
from pytest_fusion.engine.request import Request
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run.fused import Outcome
from pytest_fusion.spec.dims import dim
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import optional, tensor
from tests.interpreted import triton_interpreted

triton = triton_interpreted("kernels on tensors of the CPU")

tl = triton.language
TABLE = {"table": tensor("rows n"), "ids": tensor("count", dtype=torch.int64, values=values.indices("rows"))}
SMALL = {"rows": dim(1, 20), "n": dim(0, 20), "count": dim(0, 20)}


@triton.jit
def gather_rows(table, ids, out, rows, n, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    index = tl.load(ids + tl.program_id(0))
    inside = at < n
    if MASKED:
        inside = inside & (index >= 0) & (index < rows)
    row = tl.load(table + index * n + at, mask=inside, other=0.0)
    tl.store(out + tl.program_id(0) * n + at, row, mask=at < n)


@triton.jit
def scale_rows(x, w, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * n + at, mask=at < n) * tl.load(w + at, mask=at < n)
    tl.store(out + tl.program_id(0) * n + at, row, mask=at < n)


def gather(table: torch.Tensor, ids: torch.Tensor, masked: bool = False) -> torch.Tensor:
    out = table.new_empty(len(ids), table.shape[1])
    if out.numel():
        table, ids = table.contiguous(), ids.contiguous()
        gather_rows[(len(ids),)](table, ids, out, *table.shape, masked, triton.next_power_of_2(table.shape[1]))
    return out


def masked_gather(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return gather(table, ids, masked=True)


def partly_written(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = table.new_empty(len(ids), table.shape[1])
    right = (ids >= 0) & (ids < len(table))
    out[right] = table[ids[right]]
    return out


def checked_gather(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(table):
        raise IndexError(f"ids has {int(ids.max())}, the table has {len(table)} rows")
    return gather(table, ids)


def embedded(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(ids, table) if len(ids) else table.new_empty(0, table.shape[1])


def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w


def unchecked_scale(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x, w = x.contiguous(), w.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        scale_rows[(len(x),)](x, w, out, x.shape[1], triton.next_power_of_2(x.shape[1]))
    return out


PAIR = {"x": tensor("rows n"), "w": tensor("n")}


@pytest.fixture
def judged(tmp_path: Path) -> Callable[..., TestRecord]:
    """A spec of float32 in a whole test of few cases, or in another ``mode``."""

    def judge(
        fused: Any,
        reference: Any,
        inputs: Mapping[str, Any],
        *,
        mode: Mode | None = None,
        name: str = "dev",
        isolate: str = "off",
        **keywords: Any,
    ) -> TestRecord:
        def outer() -> None: ...

        search.adopt(outer, outer)
        spec = FusionSpec(fused=fused, reference=reference, inputs=inputs, **{"dtypes": "float32", **keywords})
        request = Request(
            nodeid="test", isolate=isolate, root=tmp_path, seed=0, max_cases=8, first=True, profile=profile(name)
        )
        return (mode or Judge()).run(Job(spec, request, outer, {}))

    return judge


def calls(record: TestRecord) -> dict[str, str]:
    found: dict[str, str] = record.checks["malformed"]["calls"]
    return found


def test_an_unchecked_gather_reads_out_of_bounds(judged: Any) -> None:
    """The worst index first, all of them in one finding, on the smallest case, which replays."""
    record: TestRecord = judged(gather, embedded, TABLE, dims=SMALL, malformed=True)
    assert (record.failed_check, record.cause) == ("malformed", "malformed-input"), record.message
    assert "called with ids: one past the end" in record.message
    assert "reads out of bounds: out-of-bounds-load in gather_rows at test_malformed.py" in record.message
    assert "mask=(index >= 0) & (index < rows)" in record.message
    assert 'allow={"malformed-input": "why"}' in record.message
    assert {name: result for name, result in calls(record).items() if name.startswith("ids")} == dict.fromkeys(
        ("ids: one past the end", "ids: far past the end", "ids: negative"), "reads out of bounds"
    )
    assert record.case is not None
    assert record.case["dims"] == {"rows": 1, "n": 1, "count": 1}
    assert record.replay is not None
    stored = replay_file.read(Path(record.replay))
    again = Replay(stored.case, check=stored.check, cause=stored.cause)
    assert judged(gather, embedded, TABLE, dims=SMALL, malformed=True, mode=again).cause == "malformed-input"
    assert judged(checked_gather, embedded, TABLE, dims=SMALL, malformed=True, mode=again).verdict == "pass"


def test_a_launcher_that_refuses_passes(judged: Any) -> None:
    """And what it did with each call is listed; one that is as right as the reference is fine too."""
    record: TestRecord = judged(checked_gather, embedded, TABLE, dims=SMALL, malformed=True)
    assert record.verdict == "pass", record.message
    assert calls(record) == {
        "table: float64": "equal to the reference",
        "table: int32": "equal to the reference",
        "ids: one past the end": "refused",
        "ids: far past the end": "refused",
        "ids: negative": "refused",
    }
    assert record.checks["malformed"]["not_tried"] == ["another device: only a GPU has one"]


def test_a_masked_index_is_enough(judged: Any) -> None:
    """A launcher would have to wait for the device; rows that nothing writes are no mask."""
    record: TestRecord = judged(masked_gather, embedded, TABLE, dims=SMALL, malformed=True)
    assert record.verdict == "pass", record.message
    assert calls(record)["ids: far past the end"] == "in bounds"
    record = judged(partly_written, embedded, TABLE, dims=SMALL, malformed=True)
    assert record.cause == "malformed-input"
    assert calls(record)["ids: negative"] == "leaves an output unwritten"


def test_nothing_to_derive_is_unknown(judged: Any) -> None:
    """Whole numbers of no profile have no wrong value, and one tensor no size of another."""
    whole = {"x": tensor("rows n", dtype=torch.int64)}
    record: TestRecord = judged(lambda x: x * 2, lambda x: x * 2, whole, malformed=True)
    assert record.checks["malformed"]["verdict"] == "unknown"
    assert record.checks["malformed"]["reason"].startswith("nothing to judge")
    record = judged(lambda x: x * 2, lambda x: x * 2, {"x": tensor("rows n")})
    assert record.checks["malformed"]["reason"].startswith("not requested")


def test_a_size_off_by_one_is_found(judged: Any) -> None:
    """One shorter is read past its end, one longer is cut silently."""
    record: TestRecord = judged(unchecked_scale, scaled, PAIR, malformed=True, dims={"n": dim(1, 40)})
    assert (record.failed_check, record.cause) == ("malformed", "malformed-input"), record.message
    assert "called with w: one shorter along n" in record.message
    assert "if w.shape[0] != x.shape[1]: raise ValueError" in record.message
    assert calls(record)["w: one longer along n"] == "is silently wrong"


def test_what_broadcasts_is_right(judged: Any) -> None:
    """Of two columns, one fewer is one that broadcasts; torch's own message refuses the rest."""
    record: TestRecord = judged(lambda x, w: w * x, scaled, PAIR, malformed=True, dims={"rows": dim(2, 9), "n": 2})
    assert record.verdict == "pass", record.message
    assert calls(record) == {
        "x: float64": "equal to the reference",
        "x: int32": "equal to the reference",
        "w: float64": "equal to the reference",
        "w: one shorter along n": "equal to the reference",
        "w: one longer along n": "refused",
    }


def test_deep_alone_makes_it_a_hazard(judged: Any) -> None:
    """It fails no test, and its replay shows it in every profile."""
    quick = {"dims": SMALL, "without": {"compile": "takes seconds"}}
    record: TestRecord = judged(gather, embedded, TABLE, name="deep", **quick)
    assert record.verdict == "pass", record.message
    (found,) = [one for one in record.findings if one["code"] == "malformed-input"]
    assert (found["level"], found["check"]) == ("hazard", "malformed")
    assert found["accept"] == 'allow={"malformed-input": "why"}'
    assert calls(record)["ids: negative"] == "reads out of bounds"
    stored = replay_file.read(Path(found["replay"]))
    again = judged(gather, embedded, TABLE, mode=Replay(stored.case, check=stored.check, cause=stored.cause), **quick)
    assert [one["code"] for one in again.findings] == ["malformed-input"]


def test_an_allowed_finding_does_not_fail(judged: Any) -> None:
    """It stays in the report with its reason."""
    allow = {"malformed-input": "callers check"}
    record: TestRecord = judged(gather, embedded, TABLE, dims=SMALL, malformed=True, allow=allow)
    assert record.verdict == "pass", record.message
    assert [(one["code"], one["allowed"]) for one in record.findings] == [("malformed-input", "callers check")]
    record = judged(gather, embedded, TABLE, dims=SMALL, malformed=True, without={"malformed": "callers check"})
    assert record.checks["malformed"]["reason"] == "switched off: callers check"


@pytest.mark.slow
def test_a_call_that_ends_the_process_is_named(judged: Any) -> None:
    """The check is this one, and not `crash`."""

    def dies(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if len(ids) and int(ids.max()) >= len(table):
            os.abort()
        return embedded(table, ids.clamp_min(0))

    record: TestRecord = judged(dies, embedded, TABLE, dims=SMALL, malformed=True, isolate="on")
    assert (record.failed_check, record.cause) == ("malformed", "malformed-input"), record.message
    assert "ids: one past the end" in record.message


def derived(inputs: Mapping[str, Any], layout: str = "contiguous", **keywords: Any) -> dict[str, BrokenCall]:
    """The broken calls of a case in which every size is 3 and every tensor of the plainest kind, by name."""
    spec = FusionSpec(fused=lambda **_: None, reference=lambda **_: None, inputs=inputs, **keywords)
    entries = {
        name: TensorCase(inner.dtypes[0] if inner.dtypes else "float32", Layout(layout), inner.plainest)
        for name, inner in spec.tensors.items()
    }
    case = Case({name: (3,) if name in spec.batch_names else 3 for name in spec.dim_names}, "float32", entries, seed=1)
    cpu = torch.device("cpu")
    return {call.name: call for call in broken_calls(spec, case, make_inputs(spec, case, cpu), cpu)}


def test_minus_one_is_right_where_a_page_table_has_holes() -> None:
    """The first number that no page table of the spec has is wrong."""
    for holes, wrong in ((False, -1), (True, -2)):
        pages = values.page_table("9*pages", holes=holes)
        found = derived({"table": tensor("rows pages", dtype=torch.int32, values=pages)})
        assert found["table: negative"].logical["table"].min() == wrong
    several = values.one_of(values.indices("rows"), values.constant(-100))
    assert "ids: negative" not in derived({"ids": tensor("rows", dtype=torch.int64, values=several)})


def test_offsets_fall_or_pass_the_end() -> None:
    """Their profile says where they end."""
    found = derived({"at": tensor("n+1", dtype=torch.int64, values=values.offsets(8))})
    assert set(found) == {"at: not monotone", "at: past the end"}
    assert bool((found["at: not monotone"].logical["at"].diff() < 0).any())
    assert found["at: past the end"].logical["at"][-1] == 9


def test_only_strides_that_layouts_rules_out_are_tried() -> None:
    """A tensor of any layout has none."""
    assert set(derived({"x": tensor("rows n")})) == {"x: float64", "x: int32"}
    found = derived({"x": tensor("rows n", layouts=("contiguous", "transposed"))})
    assert found["x: step strides"].case.tensors["x"].layout.kind == "step"


def test_an_input_in_the_memory_of_a_written_one() -> None:
    """Of the same shape and dtype."""
    found = derived({"x": tensor("rows n"), "y": tensor("rows n"), "w": tensor("n")}, mutates="x")
    placed = found["y: the memory of x"].place(torch.device("cpu"), "nan")
    assert placed.arguments["y"] is placed.arguments["x"]
    assert "w: the memory of x" not in found


def test_sizes_of_a_batch_count_and_absent_inputs_do_not() -> None:
    """The first axis of a batch that two inputs share."""
    found = derived({"x": tensor("*batch n"), "y": tensor("*batch n"), "w": optional(tensor("n"))}, "padded")
    assert found["y: one longer along *batch"].logical["y"].shape == (4, 3)
    assert found["y: one longer along *batch"].case.tensors["y"].layout == Layout()
    found = derived({"x": tensor("2*half"), "y": tensor("2*half"), "z": tensor("half 4"), "w": tensor("4")})
    along = {name for name in found if "along" in name}
    assert along == {"y: one shorter along 2 * half", "y: one longer along 2 * half"}


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("w must have as many columns", True),
        ("The size of tensor a (6) must match the size of tensor b (7)", True),
        ("division by zero", False),
        ("wrong window", False),
    ],
)
def test_an_exception_states_what_is_wrong(text: str, refused: bool) -> None:
    """By the argument's name, or in so many words."""
    call = derived({"x": tensor("rows n"), "w": tensor("n")})["w: one longer along n"]
    assert refuses(call, Outcome(error=RuntimeError(text))) is refused
    assert refuses(call, Outcome(error=RuntimeError(text), raiser="launcher"))
