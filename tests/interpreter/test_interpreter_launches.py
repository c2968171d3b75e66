"""Launching: what a kernel receives, what observers are told, autotuning without a device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from pytest_fusion import FusionSpec, interpreter, tensor
from pytest_fusion.errors import NotModelledError, TooManyProgramsError
from pytest_fusion.interpreter.bridge.lane_state import counted_notes
from pytest_fusion.interpreter.control.executor import most_alone
from pytest_fusion.interpreter.launch import Launch
from pytest_fusion.plugin.testing import examine
from pytest_fusion.spec.wording import not_modelled

interpreter.enable()
triton = pytest.importorskip("triton")
if not interpreter.installed():
    pytest.skip(str(interpreter.problem()), allow_module_level=True)

tl = triton.language
gluon = pytest.importorskip("triton.experimental.gluon")
gl = gluon.language
InterpreterError = pytest.importorskip("triton.runtime.errors").InterpreterError
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])


@triton.jit
def fill_kernel(out, n, value, BLOCK: tl.constexpr, KIND: tl.constexpr = "plain"):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.zeros([BLOCK], tl.float32) + value, mask=i < n)


def test_observers_are_told_before_the_launch() -> None:
    """An observer gets name, padded grid, constexprs and source, while the output is still untouched."""
    out, seen = torch.zeros(10), []

    def observer(launch: Launch) -> None:
        seen.append((launch, out.sum().item()))

    with interpreter.observe(observer):
        fill_kernel[(triton.cdiv(10, 8),)](out, 10, 2.0, BLOCK=8)
    fill_kernel[(2,)](out, 10, 3.0, BLOCK=8)
    assert [(s.kernel, s.grid, s.constexprs, total) for s, total in seen] == [
        ("fill_kernel", (2, 1, 1), {"BLOCK": 8, "KIND": "plain"}, 0.0)
    ]
    assert seen[0][0].source.partition(":")[0] == __file__
    assert out.eq(3).all()


def test_an_observer_can_refuse_a_launch() -> None:
    """What an observer raises comes out of the launch as it is, and nothing ran."""
    out = torch.zeros(8)

    def refuse(launch: Launch) -> None:
        raise TooManyProgramsError(f"{launch.programs} programs")

    with pytest.raises(TooManyProgramsError, match=r"^64 programs$"), interpreter.observe(refuse):
        fill_kernel[(4, 4, 4)](out, 8, 1.0, BLOCK=8)
    assert out.eq(0).all()


def test_a_grid_function_gets_raw_values() -> None:
    """META holds numbers, not tensors, and a grid of zero programs runs nothing."""
    out = torch.zeros(20)
    kinds = []

    def grid(meta: dict) -> tuple[int]:
        kinds.append((type(meta["n"]), type(meta["BLOCK"])))
        return (triton.cdiv(meta["n"], meta["BLOCK"]),)

    fill_kernel[grid](out, 20, 1.5, BLOCK=16)
    fill_kernel[(0,)](out, 20, 9.0, BLOCK=16)
    assert kinds == [(int, int)]
    assert out.eq(1.5).all()


def test_a_grid_that_cuda_refuses_is_refused() -> None:
    """More than 65535 programs in the second dimension fail to launch on a device, so they do here."""
    with pytest.raises(ValueError, match=r"fill_kernel.*65535"):
        fill_kernel[(1, 65536)](torch.zeros(8), 8, 1.0, BLOCK=8)


@pytest.mark.slow
def test_a_test_that_meets_such_a_grid_says_what_bounds_it() -> None:
    """Rows in the second dimension: at 65,537 of them the message names `dims=`, and no `rejects=`."""

    def fused(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        fill_kernel[(1, len(x))](out, out.numel(), 0.0, BLOCK=triton.next_power_of_2(max(out.numel(), 1)))
        return out

    inputs = {"x": tensor("rows 1", layouts="contiguous")}
    record = examine(FusionSpec(name="wide", fused=fused, reference=torch.zeros_like, inputs=inputs), device="cpu")
    assert record.failed_check == "error"
    assert "65535 in the second and third dimension" in record.message
    assert "bound the dim with dims=" in record.message
    assert "rejects=" not in record.message


def test_a_wide_grid_of_no_programs_is_no_launch() -> None:
    """Triton's launcher leaves out a grid with a size of 0 before CUDA sees its other sizes."""
    out = torch.zeros(8)
    fill_kernel[(0, 65536)](out, 8, 1.0, BLOCK=8)
    assert out.eq(0).all()


@triton.jit
def scalars_kernel(out, f, small, flag, big, n: tl.int64, wide: tl.float64):
    tl.static_assert(f.dtype == tl.float32)
    tl.static_assert(small.dtype == tl.int32)
    tl.static_assert(flag.dtype == tl.int1)
    tl.static_assert(big.dtype == tl.int64)
    tl.static_assert(n.dtype == tl.int64)
    tl.static_assert(wide.dtype == tl.float64)
    tl.store(out, f.to(tl.float64))
    tl.store(out + 1, small.to(tl.float64))
    tl.store(out + 2, flag.to(tl.float64))
    tl.store(out + 3, (big + big).to(tl.float64))
    tl.store(out + 4, wide)


def test_scalar_arguments_are_tensors_of_the_gpus_types() -> None:
    """A float arrives as float32, 2**31 as int64, True as int1, and annotations overrule; all have .to()."""
    out = torch.empty(5, dtype=torch.float64)
    scalars_kernel[(1,)](out, 0.1, 2, True, 2**31, 3, 0.1)
    assert out.tolist() == [float(np.float32(0.1)), 2.0, 1.0, 2.0**32, 0.1]
    scalars_kernel[(1,)](out, 1e300, 2, False, 2**31, 3, 0.1)
    assert out[0].isinf()
    assert out[2] == 0


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@triton.jit
def tuple_kernel(out, pair, missing, N: tl.constexpr):
    i = tl.arange(0, N)
    total = tl.load(pair[0] + i) + tl.load(pair[1] + i)
    if missing is not None:
        total += tl.load(missing + i)
    tl.store(out + i, total)


def test_tuples_and_none_arrive() -> None:
    """A tuple of tensors and a None pointer reach the kernel."""
    out = torch.empty(8)
    tuple_kernel[(1,)](out, Pair(torch.ones(8), torch.ones(8)), None, N=8)
    tuple_kernel[(1,)](out, (out, torch.ones(8)), None, N=8)
    assert out.eq(3).all()


def make_closure(factor: int):
    @triton.jit
    def scale(v):
        return v * factor

    @triton.jit
    def kernel(x, out, N: tl.constexpr = 16):
        i = tl.arange(0, N)
        tl.store(out + i, scale(tl.load(x + i)))

    return kernel


def test_a_kernel_defined_in_a_function_sees_its_variables() -> None:
    """Closures over numbers and device functions work, each closure with its own value."""
    x, out = torch.arange(16.0), torch.empty(16)
    for factor in (3, 5):
        make_closure(factor)[(1,)](x, out)
        assert torch.equal(out, x * factor)


@triton.jit
def mask_kernel(out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.where((i >= 2) and (i < n) and not (i >= 5), 1, 0))
    tl.store(out + N + i, tl.where((i < 2) or (i > n), 1, 0))


def test_and_or_not_work_element_by_element() -> None:
    """`and`, `or` and `not` on blocks combine masks, of which Python alone would drop all but one."""
    out = torch.empty(2, 16, dtype=torch.int32)
    mask_kernel[(1,)](out, 9, N=16)
    i = torch.arange(16)
    assert torch.equal(out, torch.stack([(i >= 2) & (i < 9) & (i < 5), (i < 2) | (i > 9)]).int())


@triton.jit
def chain_kernel(out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.where(2 <= i < n, 1, 0))


def test_a_chained_comparison_is_what_the_compiler_makes_of_it() -> None:
    """Compilers before 3.8 refuse `a <= b < c`; later ones combine both comparisons."""
    out = torch.zeros(16, dtype=torch.int32)
    if VERSION < (3, 8):
        with pytest.raises(InterpreterError, match="chained comparison"):
            chain_kernel[(1,)](out, 9, N=16)
    else:
        chain_kernel[(1,)](out, 9, N=16)
        assert torch.equal(out, ((torch.arange(16) >= 2) & (torch.arange(16) < 9)).int())


@triton.jit
def control_kernel(out, n):
    i = 0
    while i < n:
        if i == 2:
            tl.store(out + i, 5.0)
        else:
            tl.store(out + i, 1.0)
        i += 1
    for j in tl.range(0, n, 2, num_stages=2):
        tl.store(out + j, j.to(tl.float32) * 10.0)
    for j in range(1, n):
        if j == 3:
            tl.store(out + j, 33.0)
    for j in tl.static_range(2):
        tl.store(out + 6 + j, 9.0)
    for j in range(n - 1, n - 3, -1):
        tl.store(out + j, tl.load(out + j) + 0.5)
    tl.store(out + 8, tl.load(out + 1) if n > 3 else 0.0)


def test_loops_and_branches_on_run_time_values() -> None:
    """while, if, range up, down and with tl.range work on run-time bounds; the index has .to()."""
    out = torch.empty(9)
    control_kernel[(1,)](out, 5)
    assert out.tolist()[:5] == [0.0, 1.0, 20.0, 33.5, 40.5]
    assert out.tolist()[6:] == [9.0, 9.0, 1.0]


@triton.autotune(
    configs=[triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})],
    key=["n"],
    reset_to_zero=["out"],
    prune_configs_by={"early_config_prune": lambda configs, args, **_: [c for c in configs if c.kwargs["BLOCK"] > 16]},
)
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned_kernel(x, out, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out, tl.sum(tl.load(x + i, mask=i < n, other=0.0)))


def launch_tuned(x: torch.Tensor, out: torch.Tensor) -> list[Launch]:
    seen: list[Launch] = []
    with interpreter.observe(seen.append):
        tuned_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    return seen


def test_autotune_takes_the_first_config_that_survives_pruning() -> None:
    """No config is timed: one launch, of the first survivor, on a cleared output; heuristics see its values."""
    x, out = torch.ones(64), torch.full((1,), 7.0)
    (launch,) = launch_tuned(x, out)
    assert launch.constexprs == {"BLOCK": 32, "EVEN": True}
    assert out.item() == 64
    launch_tuned(x, out)
    assert out.item() == 128, "the key is known now, so Triton clears the output no more"


@triton.autotune(configs=[triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=[], restore_value=["out"])
@triton.jit
def restoring_kernel(out, BLOCK: tl.constexpr):
    tl.store(out, tl.load(out) + 1.0)


def test_restored_values_are_changed_once() -> None:
    """An in-place autotuned kernel changes its tensor once, not once per config."""
    out = torch.zeros(1)
    restoring_kernel[(1,)](out)
    assert out.item() == 1.0


@triton.jit
def quiet_kernel(n):
    tl.device_assert(n > 3, "n is too small")
    tl.debug_barrier()
    tl.static_assert(True)
    tl.assume(n > 0)


@triton.jit(debug=True)
def asserting_kernel(n):
    tl.device_assert(n > 3, "n is too small")


def test_device_assert_fires_where_the_compiler_would_keep_it() -> None:
    """device_assert is off by default and on with debug=True, as on the device."""
    quiet_kernel[(1,)](2)
    asserting_kernel[(1,)](4)
    with pytest.raises(InterpreterError, match=r"n is too small.*asserting_kernel, program \(0, 0, 0\)"):
        asserting_kernel[(1,)](2)


@triton.jit
def assembly_kernel(x):
    tl.store(
        x, tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.load(x)], dtype=tl.float32, is_pure=True, pack=1)
    )


def test_inline_assembly_is_refused_clearly() -> None:
    """Inline PTX raises, quoting it and saying where to test instead."""
    with pytest.raises(InterpreterError, match=r"inline assembly \('mov.b32.*--fusion-device cuda"):
        assembly_kernel[(1,)](torch.zeros(1))


def test_what_has_no_model_is_not_asked_again_program_by_program() -> None:
    """A grid that would be too large for it says what is lacking, and not that it is too large."""
    with most_alone(3), pytest.raises(InterpreterError, match="inline assembly") as info:
        assembly_kernel[(8,)](torch.zeros(1))
    assert isinstance(not_modelled(info.value), NotModelledError)


def test_operations_that_the_interpreter_lacks_are_refused_by_name() -> None:
    """Whoever asks whether there is such an operation hears no; what is no operation is no attribute either."""
    builder = triton.runtime.interpreter.interpreter_builder
    assert not hasattr(builder, "create_of_tomorrow")
    with pytest.raises(NotModelledError, match=r"'of_tomorrow'.*--fusion-device cuda"):
        builder.create_of_tomorrow()
    with pytest.raises(AttributeError) as info:
        _ = builder.other
    assert not isinstance(info.value, NotModelledError)


@gluon.jit
def gluon_kernel(x):
    gl.store(x, 1.0)


def test_kernels_in_gluon_are_refused_by_name() -> None:
    """They would be compiled, interpreter or not: the refusal says so, and a test of one is unknown."""
    with pytest.raises(NotModelledError, match=r"gluon_kernel is written in Gluon.*--fusion-device cuda"):
        gluon_kernel[(1,)](torch.zeros(1))

    def fused(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        gluon_kernel[(1,)](out)
        return out

    record = examine(FusionSpec(fused=fused, reference=torch.ones_like, inputs={"x": tensor("n")}), max_cases=4)
    assert record.verdict == "unknown"
    assert "gluon_kernel is written in Gluon" in record.message


@triton.jit
def dependent_kernel(x):
    tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(x + at, tl.load(x + at) + tl.extra.cuda.num_warps() + 100 * tl.extra.cuda.num_threads())


def test_dependent_launches_and_warps_are_known() -> None:
    """Programmatic dependent launch orders grids, which end here one by one; warps are those of the launch, or four."""
    x = torch.zeros(8)
    dependent_kernel[(2,)](x, num_warps=8, launch_pdl=True)
    assert x.tolist() == [25608.0] * 8
    dependent_kernel[(2,)](x)
    assert x.tolist() == [25608.0 + 12804] * 8


@triton.jit
def dot_kernel(x, y, PRECISION: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(y + at, tl.dot(tl.load(x + at), tl.load(x + at), input_precision=PRECISION))


@pytest.mark.parametrize(
    ("precision", "bits"), [("ieee", None), ("bf16x6", None), ("tf32", 10), ("tf32x3", 21), ("bf16x3", 15)]
)
def test_every_precision_of_the_compiler_is_computed_in_float32(precision: str, bits: int | None) -> None:
    """A GPU that keeps fewer bits is noted with how many; another name is refused as by the compiler."""
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    y, before = torch.empty(16, 16), dict(counted_notes())
    dot_kernel[(1,)](x, y, PRECISION=precision)
    torch.testing.assert_close(y, x @ x)
    noted = [note for note, count in counted_notes().items() if count > before.get(note, 0)]
    assert [f"keeps {bits} mantissa bits" in note for note in noted] == [True] * (bits is not None)
    with pytest.raises(InterpreterError, match="input_precision must be one of"):
        dot_kernel[(1,)](x, y, PRECISION="bf8x3")


@triton.jit
def looping_kernel(x, y, n, step, BLOCK: tl.constexpr):
    for at in tl.range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        c = at + tl.arange(0, BLOCK)
        tl.store(y + c, tl.load(x + c, mask=c < n) + step, mask=c < n)


@pytest.mark.parametrize("warps", [1, 4, 8, 16, 32])
def test_a_warmed_kernel_sizes_a_grid_and_is_launched(warps: int) -> None:
    """Registers and shared memory let at least one program fit; constants are those that were warmed."""
    properties = triton.runtime.driver.active.utils.get_device_properties(0)
    x, y = torch.arange(100.0), torch.zeros(100)
    kernel = looping_kernel.warmup(x, y, 100, 3, BLOCK=16, num_warps=warps, grid=(1,))
    kernel._init_handles()
    assert kernel.n_regs * 32 * warps <= properties["max_num_regs"] < 2 * (kernel.n_regs + 1) * 32 * max(warps, 8)
    assert 0 < kernel.metadata.shared <= properties["max_shared_mem"]
    assert not hasattr(kernel, "asm")
    with pytest.raises(NotModelledError, match="'asm' of the compiled kernel looping_kernel"):
        _ = kernel.asm
    seen: list[Launch] = []
    with interpreter.observe(seen.append):
        kernel[(2, 1, 1)](x, y, 100, 3, 64)
    assert torch.equal(y, x + 3)
    assert seen[0].constexprs == {"BLOCK": 16}


def test_a_second_install_changes_nothing() -> None:
    """install() and enable() may be called again."""
    before = tl.load
    interpreter.install()
    interpreter.enable()
    assert tl.load is before
    assert interpreter.version() == triton.__version__


def test_a_device_is_modelled_where_there_is_none() -> None:
    """Launchers that ask for multiprocessors get 132, and device contexts take a CPU device."""
    driver = triton.runtime.driver.active
    facts = driver.utils.get_device_properties(driver.get_current_device())
    with torch.cuda.device(torch.device("cpu")), torch.cuda.device(0):
        assert facts["multiprocessor_count"] == 132
    assert torch.cuda.get_device_properties("cpu").multi_processor_count == 132
    assert torch.cuda.get_device_capability() == (9, 0)
    assert not torch.cuda.is_available()


def test_torch_hands_interpreted_kernels_back() -> None:
    """torch.library.wrap_triton, which refuses interpreted kernels upstream, returns them."""
    assert torch.library.wrap_triton(fill_kernel) is fill_kernel
    assert torch.library.wrap_triton(tuned_kernel) is tuned_kernel


@triton.jit
def broken_kernel(x):
    tl.store(x, tl.load(x) + undefined_name)  # noqa: F821


def test_an_error_names_kernel_and_program() -> None:
    """What a kernel raises arrives as InterpreterError with its cause, kernel and program."""
    with pytest.raises(InterpreterError, match=r"NameError.*broken_kernel, program \(0, 0, 0\) of \(2, 1, 1\)") as info:
        broken_kernel[(2,)](torch.zeros(1))
    assert isinstance(info.value.__cause__, NameError)
