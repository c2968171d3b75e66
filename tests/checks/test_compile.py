"""Check `compile`: fake tensors, opcheck, torch.compile and recompilations, on kernels inside custom operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fusion import interpreter
from pytest_fusion.case.choosing import search
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.modes import Judge
from pytest_fusion.engine.profiles import PROFILES
from pytest_fusion.engine.request import Request
from pytest_fusion.errors import SpecError
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run.operators import logged
from pytest_fusion.spec import values
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports its compiler
interpreter.enable()
T = torch.Tensor
MATRIX = {"x": tensor("rows hidden")}


@pytest.fixture
def examined(tmp_path: Any) -> Any:
    """All checks on up to ten cases, with ``compile=True`` unless said otherwise."""

    def judge(fused: Any, reference: Any, *, profile: str = "dev", cases: int = 20, **keywords: Any) -> TestRecord:
        def outer() -> None: ...

        search.adopt(outer, outer)
        given = {"inputs": MATRIX, "dtypes": "float32", "compile": profile == "dev", **keywords}
        spec = FusionSpec(fused=fused, reference=reference, **given)
        request = Request(
            "test",
            isolate="off",
            root=tmp_path,
            seed=0,
            max_cases=cases,
            profile=PROFILES[profile],
            first=True,
        )
        return Judge().run(Job(spec, request, outer, {}))

    return judge


def doubled(x: T) -> T:
    return 2 * x


@torch.library.custom_op("fusion_compile_test::right", mutates_args=())
def right(x: T) -> T:
    return 2 * x.contiguous()


@right.register_fake
def _(x: T) -> T:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("fusion_compile_test::no_fake", mutates_args=())
def no_fake(x: T) -> T:
    return 2 * x


@torch.library.custom_op("fusion_compile_test::strides", mutates_args=())
def strides(x: T) -> T:
    return 2 * x.contiguous()


@strides.register_fake
def _(x: T) -> T:
    return torch.empty_like(x)


@torch.library.custom_op("fusion_compile_test::dtype", mutates_args=())
def dtype(x: T) -> T:
    return 2 * x


@dtype.register_fake
def _(x: T) -> T:
    return torch.empty_like(x, dtype=torch.float64)


@torch.library.custom_op("fusion_compile_test::shape", mutates_args=())
def shape(x: T) -> T:
    return 2 * x


@shape.register_fake
def _(x: T) -> T:
    return x.new_empty(x.shape[0], x.shape[1] + 1)


@torch.library.custom_op("fusion_compile_test::writes", mutates_args=())
def writes(scratch: T, x: T) -> T:
    scratch.copy_(x)
    return scratch * 2


@writes.register_fake
def _(scratch: T, x: T) -> T:
    return torch.empty_like(x)


def through(operator: Any) -> Any:
    def fused(x: T) -> T:
        return operator(x)

    return fused


@pytest.mark.slow
def test_a_right_operator_passes(examined: Any) -> None:
    """Its fake tensors, opcheck and torch.compile agree with what it does, and the report says what was tried."""
    record = examined(through(right), doubled)
    check = record.checks["compile"]
    assert (record.verdict, check["verdict"]) == ("pass", "pass"), record.message
    assert "operator fusion_compile_test::right" in check["reason"]
    assert "torch.compile with aot_eager" in check["reason"]
    assert "CUDA graphs are for a GPU" in check["reason"]


@pytest.mark.parametrize(
    ("operator", "words"),
    [(strides, "returns strides"), (dtype, "returns dtype"), (shape, "returns shape"), (no_fake, "makes nothing")],
)
def test_a_wrong_fake_is_found(examined: Any, operator: Any, words: str) -> None:
    """Strides, dtype or shape that the operator does not return, or no fake implementation at all."""
    record = examined(through(operator), doubled)
    assert (record.verdict, record.failed_check, record.cause) == ("fail", "compile", "wrong-fake"), record.message
    assert words in record.message


@pytest.mark.slow
def test_strides_shrink_to_one_strided_case(examined: Any) -> None:
    """What a contiguous input hides is found on a strided one, and the smallest case still has it."""
    record = examined(through(strides), doubled)
    assert record.case is not None
    assert record.case["inputs"]["x"]["layout"] != "contiguous"


def test_an_undeclared_mutation_inside_is_found(examined: Any) -> None:
    """An operator that writes an argument of its own against its schema fails opcheck."""

    def fused(x: T) -> T:
        return writes(torch.zeros_like(x), x)

    record = examined(fused, doubled)
    assert (record.failed_check, record.cause) == ("compile", "operator-contract"), record.message
    assert "test_schema" in record.message


def halved(x: T) -> T:
    return (x.float() / 2).to(x.dtype)


@torch.library.custom_op("fusion_compile_test::half", mutates_args=())
def half(x: T) -> T:
    return halved(x.contiguous())


@half.register_fake
def _(x: T) -> T:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def test_what_opcheck_itself_cannot_try_is_unknown(examined: Any) -> None:
    """It has no arithmetic for float8, and an honest operator of float8 is not accused for it."""
    inputs = {"x": tensor("rows hidden", dtype=torch.float8_e4m3fn, values=values.uniform(-2.0, 2.0))}
    record = examined(through(half), halved, inputs=inputs)
    assert record.verdict == "pass", record.message
    assert record.checks["compile"]["verdict"] == "unknown"
    assert "cannot try a tensor float8_e4m3fn" in record.checks["compile"]["reason"]


def looks_at_values(x: T) -> T:
    return 2 * x if x.numel() == 0 or x.flatten()[0].item() > 1e30 else x + x


@pytest.mark.slow
def test_a_graph_break_is_a_failure_where_asked(examined: Any) -> None:
    """A branch on values stops fullgraph=True: a failure with compile=True, unknown in the profile `deep`."""
    record = examined(looks_at_values, doubled)
    assert (record.failed_check, record.cause) == ("compile", "graph-break"), record.message
    deep = examined(looks_at_values, doubled, profile="deep")
    assert deep.verdict == "pass", deep.message
    assert deep.checks["compile"]["verdict"] == "unknown"
    assert "cannot take the call whole" in deep.checks["compile"]["reason"]


def test_another_answer_under_torch_compile_is_found(examined: Any) -> None:
    """What the call does only while it is compiled is judged as any result."""

    def fused(x: T) -> T:
        return x * 2.5 if torch.compiler.is_compiling() else x * 2

    record = examined(fused, doubled)
    assert (record.failed_check, record.cause) == ("compile", "compile-differs"), record.message


@pytest.mark.slow
def test_a_size_that_only_a_compiled_call_gets_wrong_is_found(examined: Any) -> None:
    """The sweep judges the results at its sizes too."""

    def fused(x: T) -> T:
        return x * 2.5 if torch.compiler.is_compiling() and x.shape[1] == 100 else x * 2

    record = examined(fused, doubled)
    assert (record.failed_check, record.cause) == ("compile", "compile-differs"), record.message
    assert "hidden=100" in record.message


def unrolled(x: T) -> T:
    total = torch.zeros_like(x)
    for _ in range(x.shape[1] % 64):
        total = total + 0
    return x * 2 + total


@pytest.mark.slow
def test_recompilations_are_bounded(examined: Any) -> None:
    """A function whose graph follows the size passes its bound; one of dynamic sizes stays below it."""
    record = examined(unrolled, doubled, compile=False, max_recompiles=3)
    assert (record.failed_check, record.cause) == ("compile", "recompiles"), record.message
    assert record.checks["compile"]["graphs"] > 3
    fine = examined(through(right), doubled, max_recompiles=3)
    assert fine.verdict == "pass", fine.message
    assert "torch.compile recompiled" in fine.checks["compile"]["reason"]


def test_a_bound_must_be_a_count() -> None:
    """A negative bound is refused when the spec is made."""
    with pytest.raises(SpecError, match="max_recompiles=-1"):
        FusionSpec(fused=doubled, reference=doubled, inputs=MATRIX, max_recompiles=-1)


def test_without_being_asked_it_is_unknown(examined: Any) -> None:
    """The default profile runs none of it and says how to."""
    record = examined(through(no_fake), doubled, compile=False)
    assert record.verdict == "pass", record.message
    assert record.checks["compile"] == {
        "verdict": "unknown",
        "reason": "not requested: compile=True or --fusion-profile deep switches it on",
        "cases": 0,
    }


def test_no_suitable_case_is_unknown(examined: Any) -> None:
    """A test of one element at most gives no evidence."""
    record = examined(doubled, doubled, dims={"rows": 1, "hidden": 1})
    assert record.checks["compile"]["verdict"] == "unknown"
    assert "more than one element" in record.checks["compile"]["reason"]


def _kernel(*, by_a_view: bool = False) -> Any:
    """Launches a kernel, told its result by the first element alone if ``by_a_view``."""
    triton = pytest.importorskip("triton")
    if not interpreter.installed() or torch.cuda.device_count() > 0:
        pytest.skip("needs the interpreter")
    import triton.language as tl

    globals().update(tl=tl, triton=triton)

    @triton.jit
    def kernel(x, out, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)

    def launch(x: T) -> T:
        x = x.contiguous()
        out = torch.empty_like(x)
        if x.numel():
            first = out.view(-1)[:1] if by_a_view else out
            kernel[(triton.cdiv(x.numel(), 16),)](x, first, x.numel(), BLOCK=16)
        return out

    return launch


@pytest.mark.slow
def test_an_interpreted_launch_is_unknown(examined: Any) -> None:
    """Compilers cannot trace it on this lane: that is said, whether or not the check was asked for."""
    record = examined(_kernel(), doubled)
    assert record.verdict == "pass", record.message
    assert record.checks["compile"]["verdict"] == "unknown"
    assert "outside of a custom operator" in record.checks["compile"]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("by_a_view", [False, True])
def test_an_interpreted_operator_is_compiled(examined: Any, by_a_view: bool) -> None:
    """Inside a custom operator an interpreted kernel runs under torch.compile, and the check passes; it may store to
    all of a buffer that the operator made and tells it a view of."""
    launch = _kernel(by_a_view=by_a_view)

    @torch.library.custom_op(f"fusion_compile_test::triton_{by_a_view}", mutates_args=())
    def operator(x: T) -> T:
        return launch(x)

    operator.register_fake(lambda x: x.new_empty(x.shape))
    record = examined(through(operator), doubled)
    assert record.verdict == "pass", record.message
    assert record.checks["compile"]["verdict"] == "pass", record.checks["compile"]


def test_operators_inside_operators_are_theirs() -> None:
    """The log holds the outermost custom operators of a call, once in each form, and no operator of torch's own."""
    with logged() as log:
        right(torch.ones(3, 4)).sum() + right(torch.ones(2, 2)).sum() + right(torch.ones(3, 4)).sum()
    assert [name for name, _ in log.calls] == ["fusion_compile_test.right.default"] * 2
    call, _ = log.calls.values()
    assert [(made.shape, made.strides) for made in call.made] == [((3, 4), (4, 1))]
    assert log.outside == []
