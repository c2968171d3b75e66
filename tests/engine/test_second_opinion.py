"""A GPU's failure, looked at again in the CPU lane: in a process that has compiled kernels, as one on a GPU has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_KERNELS = """
import torch, triton, triton.language as tl
from torch import Tensor
from pytest_fusion import FusionSpec, tensor


@triton.jit
def twice(value):
    return value * 2.0


@triton.autotune(configs=[triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def double_kernel(x, out, n, LAST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(out + at, twice(value), mask=at < (tl.minimum(n, 32) if LAST else n))


@triton.jit
def assembly_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    value = tl.inline_asm_elementwise("add.f32 $0, $1, $1;", "=r,r", [value], tl.float32, True, 1)
    tl.store(out + at, value, mask=at < n)


def double(x: Tensor, *, last: int = 0) -> Tensor:
    out = torch.zeros_like(x) if last else torch.empty_like(x)
    n = x.numel()
    if n:
        double_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n, LAST=last)
    return out


def assembled(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    if x.numel():
        assembly_kernel[(1,)](x, out, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))
    return out


def spec(fused) -> FusionSpec:
    return FusionSpec(fused=fused, reference=lambda x: x * 2, inputs={"x": tensor("n")}, dtypes=(torch.float32,))
"""

_SCRIPT = """
import functools, json, sys
import torch, triton
import kernels
from pytest_fusion.case.choosing import search
from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.diagnosis.diagnosis_model import Diagnosis
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.request import Request
from pytest_fusion.engine import isolated
from pytest_fusion.engine.tally import Failure, Tally
from pytest_fusion.checks.verdict import failed


def outer(): ...


search.adopt(outer, outer)
CASE = Case({"n": 50}, "float32", {"x": TensorCase("float32")}, seed=5)


def told(fused, check="values", cause="unexplained", device="cuda:0", broken=False):
    adopted = isolated.adopt
    if broken:
        isolated.adopt = lambda: {}["a name of Triton's"]
    job = Job(kernels.spec(fused), Request("t", device=device), outer, {})
    said = Diagnosis(cause, [], ["layout: wrong on contiguous copies too"], 9)
    tally = Tally(failure=Failure(failed(check, "wrong"), CASE, diagnosis=said))
    found = isolated.with_second_opinion(job, tally).failure
    isolated.adopt = adopted
    return [found.verdict.check, found.diagnosis.as_json()]


print(json.dumps({
    "bug": told(functools.partial(kernels.double, last=1)),
    "right": told(kernels.double),
    "cannot": told(kernels.assembled),
    "explained": told(functools.partial(kernels.double, last=1), cause="tail-mask"),
    "structure": told(functools.partial(kernels.double, last=1), check="structure"),
    "cpu": told(functools.partial(kernels.double, last=1), device="cpu"),
    "without the lane": told(functools.partial(kernels.double, last=1), broken=True),
    "still compiled": type(kernels.double_kernel.fn).__name__,
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("second_opinion")
    (folder / "kernels.py").write_text(_KERNELS, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
def test_what_the_gpu_left_open_is_explained(found: dict[str, Any]) -> None:
    """The interpreted kernel fails alike, and experiments on it name the mask; the failure is still the GPU's."""
    check, diagnosis = found["bug"]
    assert check == "values"
    assert diagnosis["cause"] == "block-limit"
    assert diagnosis["evidence"][0].startswith("in the CPU lane, interpreted, the same case fails")
    assert len(diagnosis["evidence"]) > 1
    assert diagnosis["runs"] > 9


def test_a_case_that_is_right_when_interpreted_is_no_explanation(found: dict[str, Any]) -> None:
    """It stays unexplained, and that it is right there is one thing more that is known."""
    _, diagnosis = found["right"]
    assert diagnosis["cause"] == "unexplained"
    assert diagnosis["ruled_out"][0] == "layout: wrong on contiguous copies too"
    assert diagnosis["ruled_out"][1].startswith("in the CPU lane: interpreted, the same case is right")


@pytest.mark.parametrize("name", ["cannot", "structure", "cpu"])
def test_what_cannot_be_asked_stays_as_it_was(found: dict[str, Any], name: str) -> None:
    """A kernel that nobody interprets, another kind of failure, and a failure of the CPU lane itself."""
    assert found[name][1] == {
        "cause": "unexplained",
        "evidence": [],
        "ruled_out": ["layout: wrong on contiguous copies too"],
        "runs": 9,
    }


def test_a_lane_that_cannot_be_had_is_told(found: dict[str, Any]) -> None:
    """The message says that nobody looked there, and why."""
    _, diagnosis = found["without the lane"]
    assert diagnosis["cause"] == "unexplained"
    assert diagnosis["ruled_out"][1] == 'not checked in the interpreter: KeyError: "a name of Triton\'s"'


def test_an_explained_failure_is_not_asked_again(found: dict[str, Any]) -> None:
    """What the GPU's experiments named stands."""
    assert (found["explained"][1]["cause"], found["explained"][1]["runs"]) == ("tail-mask", 9)


def test_the_kernels_of_this_process_stay_compiled(found: dict[str, Any]) -> None:
    """Only the child interprets."""
    assert found["still compiled"] == "JITFunction"
