"""The suite's kernels at their benchmark sizes, compiled for three GPUs without one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from pytest_fusion.run.measure.resources.kernel_resources import Report, resources_of_all
from pytest_fusion.run.measure.resources.targets import TARGETS
from reference_kernels.linear import spec as linear
from reference_kernels.rms_norm import spec as rms_norm
from reference_kernels.softmax import spec as softmax

pytestmark = pytest.mark.nightly  # half a minute until Triton's cache has the kernels

ROWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "softmax": (softmax.SPEC.with_(grad=False), {"batch": (8192,), "n": 8192, "keep": None, "bias": None}),
    "softmax_long": (softmax.LONG.with_(grad=False), {"rows": 8, "n": 40000}),
    "rms_norm": (rms_norm.SPEC.with_(grad=False), {"batch": (8192,), "n": 8192}),
    "softmax_backward": (softmax.SPEC, {"batch": (8192,), "n": 8192, "keep": None, "bias": None}),
    "rms_norm_backward": (rms_norm.SPEC, {"batch": (8192,), "n": 8192}),
    "linear": (linear.SPEC, {"batch": (8192,), "n": 8192, "k": 8192, "activation": "relu"}),
    # The gradient of x is a sum over one column, a constant to the compiler.
    "lora_backward": (linear.LORA, {"batch": (33,), "k": 2, "n": 1, "r": 33, "scale": 1.0}),
    "linear_gelu": (linear.SPEC, {"batch": (8192,), "n": 8192, "k": 8192, "activation": "gelu"}),
}


@cache
def _reports() -> dict[str, list[Report]]:
    rows = [(spec, [{**sizes, "dtype": torch.bfloat16}]) for spec, sizes in ROWS.values()]
    targets = [TARGETS[name] for name in ("sm_80", "sm_90", "sm_100")]
    return dict(zip(ROWS, resources_of_all(rows, targets), strict=True))


@pytest.mark.parametrize("name", [name for name in ROWS if not name.endswith("backward")])
def test_every_kernel_is_compiled_as_a_gpu_would_get_it(name: str) -> None:
    """One kernel per call on each target, all known, with the tiles of a GPU and not those of the interpreter."""
    for report in _reports()[name]:
        (kernel,) = report.kernels
        assert (kernel.status, kernel.note, report.problem) == ("compiled", "", "")
        tile = kernel.constants.get("BLOCK_COLUMNS") or kernel.constants["BLOCK_N"]
        assert int(tile) == {"linear": 128, "linear_gelu": 128, "softmax_long": 16384}.get(name, 8192)


@pytest.mark.parametrize("name", ["softmax", "rms_norm"])
def test_rows_stay_in_registers(name: str) -> None:
    """A row of 8192 bfloat16 is read in wide loads alone and nothing spills."""
    for report in _reports()[name]:
        (kernel,) = report.kernels
        assert not kernel.spills
        assert kernel.instructions["global_loads"] == kernel.instructions["global_loads_wide"] > 0


@pytest.mark.parametrize(("name", "count"), [("softmax_backward", 2), ("rms_norm_backward", 3)])
def test_gradients_stay_in_registers(name: str, count: int) -> None:
    """What backward launches besides is compiled too, a softmax's input in one kernel, a norm's weight in one more."""
    for report in _reports()[name]:
        assert [kernel.status for kernel in report.kernels] == ["compiled"] * count
        assert not any(kernel.spills for kernel in report.kernels)


def test_a_sum_over_one_column_compiles() -> None:
    """LoRA's gradients of depth 1 are compiled for every target, its thin sums as well."""
    for report in _reports()["lora_backward"]:
        assert {kernel.kernel for kernel in report.kernels} >= {"_lora_kernel", "_thin_sums_kernel"}
        assert [(kernel.status, kernel.reason) for kernel in report.kernels] == [("compiled", "")] * len(report.kernels)


def test_products_use_tensor_cores() -> None:
    """Each generation's: mma, wgmma, and tcgen05 with columns of tensor memory."""
    found = {report.target: report.kernels[0] for report in _reports()["linear"]}

    assert all(kernel.instructions["tensor_core"] > 0 for kernel in found.values())
    assert {target for target, kernel in found.items() if kernel.tensor_columns} == {"sm_100"}


@pytest.mark.parametrize("name", ["linear", "linear_gelu"])
def test_epilogues_stay_in_registers(name: str) -> None:
    """An activation of 128 sums a thread spills nothing where wgmma has them in registers."""
    spills = {report.target: report.kernels[0].spills for report in _reports()[name]}

    assert spills["sm_90"] is False
