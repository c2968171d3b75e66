"""Resources without a GPU: what compilers say of kernels that the interpreter runs, and when nothing is said."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from pytest_fusion.errors import SpecError
from pytest_fusion.run.measure.resources.kernel_resources import (
    NO_KERNEL,
    Report,
    recompilations_of,
    resources_of,
    resources_of_all,
)
from pytest_fusion.run.measure.resources.rehearsal import READS
from pytest_fusion.run.measure.resources.targets import parse_targets
from pytest_fusion.spec.fusion_spec import FusionSpec
from tests.run.measure.resources import planted
from tests.run.measure.resources.planted import matrix, spec

TARGETS = parse_targets("sm_80, sm_90")
ROW = {"n": 16384, "dtype": torch.float32}
SMALL = {"n": 64, "dtype": torch.float32}
SQUARE = {"k": 256, "n": 256}
SWEEP = [{"n": n, "dtype": torch.float32} for n in (32, 64, 33, 35, 1, 48)]


def nameless(launcher: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The launcher without a name, as a closure."""

    def launch(a: torch.Tensor) -> torch.Tensor:
        return launcher(a)

    return launch


ROWS: dict[str, tuple[FusionSpec, list[dict[str, object]]]] = {
    "spilling": (spec(planted.spilling), [ROW]),
    "fitting": (spec(planted.fitting), [ROW]),
    "rejected": (spec(planted.rejected), [SMALL]),
    "wide": (matrix(planted.wide), [SQUARE]),
    "chosen": (matrix(planted.chosen), [SQUARE]),
    "tuned": (matrix(planted.tuned), [SQUARE]),
    "hopper": (spec(planted.hopper), [SMALL]),
    "steady": (spec(planted.steady), SWEEP),
    "recompiling": (spec(planted.recompiling), SWEEP),
    "nameless launcher": (spec(planted.launcher_of(planted.eager_kernel)), [SMALL]),
    "named elsewhere": (spec(planted.launcher_of(planted.made_kernel)), [SMALL]),
    "nameless kernel": (spec(planted.launcher_of(planted.nameless_kernel())), [SMALL]),
    "other globals": (spec(planted.launcher_of(planted.rounds_kernel)), [SMALL]),
    "rejected here": (spec(planted.launcher_of(planted.dict_kernel)), [SMALL]),
    "silent": (spec(planted.silent), [SMALL]),
    "stopping": (spec(planted.stopping), [SMALL]),
    "sized by values": (spec(planted.sized_by_values), [SMALL]),
    "float8": (spec(planted.float8), [SMALL]),
    "wide here": (matrix(nameless(planted.wide)), [SQUARE]),
    "doubled": (spec(planted.doubled, grad=True), [SMALL]),
    "decorated": (planted.decorated.fusion_spec, [SMALL]),  # type: ignore[attr-defined]
    "needs hopper": (spec(planted.steady, requires=(9, 0)), [SMALL]),
}


# Rows that only slow tests look at. The others stay in the fast run at some 10 s: all its tests share one batch.
LONG = frozenset({"spilling", "fitting", "wide here"})


@cache
def _all(long: bool) -> dict[str, list[Report]]:
    rows = {name: row for name, row in ROWS.items() if (name in LONG) == long}
    return dict(zip(rows, resources_of_all(list(rows.values()), TARGETS), strict=True))


def _reports(name: str) -> dict[str, Report]:
    """The reports at the first size, by target."""
    return {report.target: report for report in reversed(_all(name in LONG)[name])}


@pytest.mark.slow
def test_a_kernel_with_too_many_live_values_spills() -> None:
    """16384 values in one warp leave the registers on every target, and the stores that do it are counted."""
    for report in _reports("spilling").values():
        (kernel,) = report.kernels
        assert kernel.spills
        assert kernel.local_bytes > 0
        assert kernel.instructions["spill_stores"] > 0
        assert report.figures[f"{report.target}/row_kernel/local_bytes"] == kernel.local_bytes


@pytest.mark.slow
def test_the_same_kernel_with_more_warps_does_not_spill() -> None:
    """With 16 warps the row fits: no local memory, wide loads, some occupancy."""
    for report in _reports("fitting").values():
        (kernel,) = report.kernels
        assert (kernel.status, kernel.spills, kernel.local_bytes) == ("compiled", False, 0)
        assert 0 < kernel.registers <= 255
        assert kernel.warps == 16
        assert kernel.instructions["global_loads_wide"] > 0
        assert kernel.occupancy is not None
        assert kernel.occupancy.warps >= 16
        assert report.problem == ""


@pytest.mark.parametrize("name", ["rejected", "rejected here"])
def test_what_the_compiler_rejects_is_told_with_its_line(name: str) -> None:
    """A dict in a kernel is refused on each target, with kernel, file, line and message, and has no figures."""
    source = Path(planted.__file__).read_text(encoding="utf-8").splitlines()
    for report in _reports(name).values():
        (kernel,) = report.kernels
        assert (kernel.kernel, kernel.status) == ("dict_kernel", "refused")
        assert Path(kernel.file).name == "planted.py"
        assert 'scale = {"two"' in source[kernel.line - 1]
        assert "Dict" in kernel.reason
        assert report.figures == {}


def test_more_shared_memory_than_a_block_has_is_told() -> None:
    """172032 bytes are too many on sm_80, 196608 few enough on sm_90, where the product uses the tensor cores."""
    old, new = _reports("wide")["sm_80"].kernels[0], _reports("wide")["sm_90"].kernels[0]

    assert old.status == "refused"
    assert "shared memory, a block on sm_80 has 166912" in old.reason
    assert new.status == "compiled"
    assert new.instructions["tensor_core"] > 0
    assert 166912 < new.shared <= 232448


def test_a_launcher_that_asks_the_device_gets_what_it_has() -> None:
    """It takes fewer stages on sm_80, as it would on an A100, and compiles on both."""
    stages = {target: report.kernels[0].constants["num_stages"] for target, report in _reports("chosen").items()}

    assert stages == {"sm_80": "4", "sm_90": "8"}
    assert all(report.kernels[0].status == "compiled" for report in _reports("chosen").values())


def test_an_autotuner_passes_over_a_config_without_room() -> None:
    """The config that does not fit sm_80 is no failure; the next one is compiled, and the record says so."""
    old, new = _reports("tuned")["sm_80"].kernels[0], _reports("tuned")["sm_90"].kernels[0]

    assert (old.status, old.constants["num_stages"]) == ("compiled", "2")
    assert "the first one does not fit" in old.note
    assert (new.status, new.constants["num_stages"]) == ("compiled", "8")
    assert "one of 2 configs" in new.note


def test_a_kernel_that_refuses_a_target_itself_is_unknown_there() -> None:
    """A static_assert on the capability is no failure, and no pass."""
    old, new = _reports("hopper")["sm_80"].kernels[0], _reports("hopper")["sm_90"].kernels[0]

    assert (old.status, new.status) == ("unknown", "compiled")
    assert "static_assert" in old.reason


def test_newer_hardware_than_the_target_is_unknown_there() -> None:
    """A kernel that stores float8e4nv is not accused for sm_80, which has none, and compiles for sm_90."""
    old, new = _reports("float8")["sm_80"].kernels[0], _reports("float8")["sm_90"].kernels[0]

    assert (old.status, new.status) == ("unknown", "compiled")
    assert "sm_80 lacks what the kernel uses" in old.reason


def test_a_tile_taken_from_values_accuses_nobody() -> None:
    """What a launcher computes from tensors that no kernel filled is not what it launches on a GPU."""
    for report in _reports("sized by values").values():
        assert [kernel.status for kernel in report.kernels] == ["compiled", "unknown"]
        assert READS in report.kernels[1].reason
        assert READS in report.problem


@pytest.mark.slow
def test_a_closure_is_called_as_its_launcher_is() -> None:
    """One that has no name in a module gets the tiles of a GPU too, and is refused where they do not fit."""
    old, new = _reports("wide here")["sm_80"].kernels[0], _reports("wide here")["sm_90"].kernels[0]

    assert (old.status, new.status) == ("refused", "compiled")
    assert "172032" in old.reason or "196608" in old.reason
    assert new.note == ""


def test_recompilations_are_told_with_their_reasons() -> None:
    """A size that divides by 16, one that does not and a 1 make three kernels, so two recompilations."""
    assert recompilations_of(_all(False)["recompiling"]) == [
        ("eager_kernel: divisibility by 16 of n", 1),
        ("eager_kernel: n equal to 1 or not", 1),
    ]


def test_a_kernel_that_does_not_specialise_is_compiled_once() -> None:
    """The same sweep over a kernel with do_not_specialize recompiles nothing."""
    assert recompilations_of(_all(False)["steady"]) == []


@pytest.mark.parametrize("name", ["nameless launcher", "named elsewhere", "nameless kernel"])
def test_what_has_no_name_is_compiled_too(name: str) -> None:
    """Closures, kernels that another variable names, and those that nothing names."""
    for report in _reports(name).values():
        (kernel,) = report.kernels
        assert (kernel.status, kernel.note, report.problem) == ("compiled", "", "")
        assert report.figures


def test_a_kernel_reads_the_constants_of_a_gpu() -> None:
    """What a module chooses by whether it is interpreted is chosen anew: three rounds, and two in the test."""
    kernels = [one.kernels[0] for one in _reports("other globals").values()]
    assert [kernel.status for kernel in kernels] == ["compiled", "compiled"]
    assert {launch.globals["ROUNDS"] for one in _reports("other globals").values() for launch in one.launches} == {3}


def test_a_call_that_cannot_be_sent_says_why() -> None:
    """A lock in a closure is in one process alone: no figures, and the reason."""
    lock = threading.Lock()

    def locked(x: torch.Tensor) -> torch.Tensor:
        with lock:
            return planted.steady(x)

    (report,) = resources_of(spec(locked), [SMALL], TARGETS[:1])

    assert report.kernels == ()
    assert "cannot be sent to another process" in report.problem
    assert "lock" in report.problem


def test_a_call_without_kernels_says_so() -> None:
    """No kernel is not the same as no figure."""
    assert {report.problem for report in _reports("silent").values()} == {NO_KERNEL}


def test_a_launcher_that_stops_without_its_kernels_is_not_complete() -> None:
    """The kernels before it stopped are told, and that there may be more."""
    for report in _reports("stopping").values():
        assert [kernel.status for kernel in report.kernels] == ["compiled"]
        assert "nothing was computed" in report.problem


def test_backward_kernels_are_told_where_gradients_are_asked_for() -> None:
    """With grad=True the kernels of the backward pass follow those of the forward pass."""
    for report in _reports("doubled").values():
        assert [kernel.kernel for kernel in report.kernels] == ["steady_kernel", "eager_kernel"]


def test_the_kernel_of_a_decorated_test_is_found() -> None:
    """The fused call of a test under @fused_equivalent is called elsewhere like any launcher."""
    for report in _reports("decorated").values():
        assert [(kernel.kernel, kernel.status, kernel.note) for kernel in report.kernels] == [
            ("steady_kernel", "compiled", "")
        ]


def test_a_target_below_what_the_spec_requires_is_left_out() -> None:
    """requires=(9, 0) leaves nothing to compile for sm_80."""
    old, new = _reports("needs hopper")["sm_80"], _reports("needs hopper")["sm_90"]

    assert (old.kernels, old.problem) == ((), "the spec requires compute capability 9.0")
    assert new.kernels[0].status == "compiled"


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"rows": 3, "n": 4}, "names no dim"),
        ({}, "leave out 'n'"),
        ({"n": 12}, "does not admit"),
    ],
)
def test_wrong_sizes_are_told(sizes: dict[str, int], said: str) -> None:
    """A name that is none, a dim left out and a size out of bounds are errors before anything is compiled."""
    with pytest.raises(SpecError, match=said):
        resources_of(spec(planted.steady, dims={"n": planted.dim(16, 4096)}), [sizes], TARGETS)
