"""Launchers that name a CUDA device, as older packages do, on a machine that has none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from pytest_fusion import FusionSpec, tensor
from pytest_fusion.bench import without_gpu
from pytest_fusion.bench.entries import entries
from pytest_fusion.interpreter.bridge import named_device
from pytest_fusion.plugin.testing import examine
from pytest_fusion.run.fused import called
from pytest_fusion.run.measure.launches.launch_count import Counts
from tests.sweeps import sweep

pytestmark = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a CUDA device")


@triton.jit
def _scaled(x, out, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


def launched(x: torch.Tensor, out: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    if x.numel():
        _scaled[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), factor, BLOCK=64)
    return out


def named(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return launched(x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device="cuda:0"), factor)


def named_alone(x: torch.Tensor) -> torch.Tensor:
    return named(x)


def moved(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous().cuda()
    return launched(x, torch.zeros_like(x, device=torch.device("cuda")).to("cuda"))


class WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.factor = torch.tensor([2.0], device="cuda")
        return named(x)

    @staticmethod
    def backward(ctx, dy):
        return (dy * ctx.factor).to(dy.dtype)


class NamedInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        return named(x)

    @staticmethod
    def backward(ctx, dy):  # noqa: ARG004
        return launched(dy.contiguous(), torch.zeros(dy.shape, dtype=dy.dtype, device="cuda"))


def spec(fused, **keywords) -> FusionSpec:
    return FusionSpec(
        name="named",
        fused=fused,
        reference=lambda x: (x.float() * 2).to(x.dtype),
        inputs={"x": tensor("rows n")},
        **keywords,
    )


@sweep(
    "judged",
    [spec(named_alone), spec(moved), spec(WithGradient.apply, grad=True), spec(NamedInBackward.apply, grad=True)],
    ids=["made", "moved", "graded", "in backward"],
    fast=("made", "moved"),
)
def test_the_cpu_stands_in_for_a_device_that_is_named(judged: FusionSpec, tmp_path: Path) -> None:
    """A right kernel passes, in other threads and in backward too, and the report says how."""
    found = examine(judged, device="cpu", seed=0, max_cases=20, root=tmp_path, first=True)
    assert found.verdict == "pass", found.message
    assert any("the CPU stood in" in note for note in found.notes)


def test_a_wrong_kernel_fails_by_its_values(tmp_path: Path) -> None:
    """Not because there is no device."""
    found = examine(spec(lambda x: named(x, 2.01)), device="cpu", seed=0, max_cases=20, root=tmp_path, first=True)
    assert (found.verdict, found.failed_check) == ("fail", "values")


def test_what_only_a_device_can_do_is_unknown(tmp_path: Path) -> None:
    """The message says where it asks for one, and what to do."""

    def needs(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.init()
        return x * 2

    found = examine(spec(needs), device="cpu", seed=0, max_cases=20, root=tmp_path, first=True)
    assert found.verdict == "unknown"
    assert "needs a CUDA device in test_named_device.py:needs" in found.message
    assert "--fusion-device cuda" in found.message


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_call_that_named_a_device_is_made_once_more(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """With the CPU in its place; where that fails too, it is told as it is."""
    monkeypatch.setattr(named_device, "_wanted", [])
    calls: list[bool] = []

    def call() -> str:
        calls.append(named_device.standing_in())
        if len(calls) <= times:
            raise RuntimeError(f"Found no NVIDIA driver, {len(calls)}")
        return "made"

    if times < 2:
        assert named_device.with_stand_in(call) == "made"
    else:
        with pytest.raises(RuntimeError, match="driver, 2"):
            named_device.with_stand_in(call)
    assert calls == [False, True][: times + 1]


@pytest.mark.parametrize(
    ("message", "interpreted"), [("no such shape", True), ("Found no NVIDIA driver", False)], ids=["other", "compiled"]
)
def test_a_call_that_fails_otherwise_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch, message: str, interpreted: bool
) -> None:
    """Nor where kernels are compiled: nothing stands in for their device."""
    monkeypatch.setattr(named_device, "_wanted", [])
    monkeypatch.setattr(named_device, "installed", lambda: interpreted)
    calls: list[None] = []

    def call() -> None:
        calls.append(None)
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match=message):
        named_device.with_stand_in(call)
    assert (len(calls), named_device.standing_in()) == (1, False)


def test_a_kernel_that_names_a_device_is_measured_and_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """By calls that nobody watches too: one compiled by torch, one whose launches are counted."""
    monkeypatch.setattr(named_device, "_wanted", [])
    result, error = called(named, {"x": torch.arange(5.0)}, {})
    assert (error, result.tolist()) == (None, [0, 2, 4, 6, 8])

    monkeypatch.setattr(named_device, "_wanted", [])
    one = spec(named_alone, bench=[{"rows": 4, "n": 16, "dtype": torch.float32}])
    counts = without_gpu.measure(one, entries(one)[0], {}).counts
    assert isinstance(counts, Counts)
    assert dict(counts.names)["_scaled"] == 1
