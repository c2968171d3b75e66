"""The operators of PyTorch that FlagGems replaces, on the CPU lane, where it is installed.

What is run is listed in ``survey``; ``docs/cpu-lane-packages.md`` has the tables. Kernels of other packages are judged
in the census.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import pytest
import torch

from pytest_fusion import interpreter
from pytest_fusion.run.process.fork import run_isolated, unwrap

if torch.cuda.device_count() > 0 and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for the GPU here; set TRITON_INTERPRET=1", allow_module_level=True)

interpreter.enable()  # what follows does so too, and must not where kernels are compiled
triton = pytest.importorskip("triton")
if not interpreter.installed():
    pytest.skip(str(interpreter.problem()), allow_module_level=True)

import triton.language as tl  # noqa: E402

from tests.outside.survey.measure import Outcome, measure  # noqa: E402
from tests.outside.survey.model import FLOATS, Draw, Op, name_of  # noqa: E402

# How these packages call Triton is theirs: FlagGems uses what Triton has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_flag_gems(dtype: torch.dtype) -> None:
    """Outputs are those of PyTorch in float64, but for what is known. In a child: importing it changes Triton."""
    if importlib.util.find_spec("flag_gems") is None:
        pytest.skip("FlagGems is not installed")

    def work(channel: Any) -> tuple[int, dict[str, str]]:
        flag_gems = importlib.import_module("tests.outside.survey.flag_gems")
        ops = [op for op in flag_gems.ops() if dtype in op.dtypes and "all" not in op.absent]
        ops = [op for op in ops if name_of(dtype) not in op.absent]
        surprises = {}
        for op in ops:
            channel.note(op.name)
            outcome, bug = measure(op, dtype), op.bugs.get(name_of(dtype))
            if outcome.right == bool(bug):
                surprises[op.name] = outcome.reason or "right, though a bug is known"
            elif bug == flag_gems.UNDEFINED and not measure(op, dtype, fill="zero").right:
                surprises[op.name] = "wrong even where masked-off lanes hold zero"
        return len(ops), surprises

    tried, surprises = unwrap(run_isolated(work, time_limit_s=120))
    assert surprises == {}
    assert tried > 300


@triton.jit
def shifted_kernel(x, out, by, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + by, mask=i < n)


def shifted(by: float) -> Op:
    """A kernel that adds ``by``; the reference says that it adds one."""

    def inputs(draw: Draw) -> list[Any]:
        return [draw.normal(33)]

    def run(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        shifted_kernel[(1,)](x, out, by, 33, BLOCK=64)
        return out

    return Op("shifted", inputs, run, lambda x: x + 1)


def test_a_right_kernel_is_called_right() -> None:
    """The base of the next tests."""
    assert measure(shifted(1.0), torch.float32).right


def test_a_kernel_that_is_off_is_called_wrong() -> None:
    """By a hundredth of the largest element, thousand times the tolerance of float32."""
    outcome = measure(shifted(1.03), torch.float32)
    assert (outcome.ran, outcome.right) == (True, False)
    assert outcome.reason.startswith("output 0: off by ")


def test_a_kernel_that_raises_has_not_run() -> None:
    """What it raised is the reason."""

    def run(x: torch.Tensor) -> torch.Tensor:
        shifted_kernel[(1,)](x, x, 1.0, 33, BLOCK=33)  # no power of two
        return x

    outcome = measure(Op("broken", lambda d: [d.normal(33)], run, lambda x: x), torch.float32)
    assert (outcome.ran, outcome.right) == (False, False)
    assert "power of 2" in outcome.reason


def test_pytorch_alone_is_no_kernel_that_is_right() -> None:
    """A launcher that hands CPU tensors to PyTorch proves nothing about its kernel."""
    outcome = measure(Op("native", lambda d: [d.normal(33)], lambda x: x + 1, lambda x: x + 1), torch.float32)
    assert outcome == Outcome(True, False, "no Triton kernel was launched", worst=outcome.worst)
