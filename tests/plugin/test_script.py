"""The script beside a replay file shows the failure, with this package and without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_fusion.case.make import InputFailed
from tests.plugin.conftest import Project

KERNELS = """
import os
import torch

WRONG = "MENDED" not in os.environ

def double(x):
    if WRONG and x.numel():
        return 2 * x.as_strided(x.shape, x.new_empty(x.shape).stride(), x.storage_offset()) if fits(x) else 2 * x
    return 2 * x

def fits(x):
    return x.numel() + x.storage_offset() <= x.untyped_storage().nbytes() // x.itemsize

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        return (3 if WRONG else 2) * dy * ctx.saved_tensors[0]

class Sliced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        # Of a slice that begins in the middle, the start of the whole.
        return 2 * dy.as_strided(dy.shape, dy.stride(), 0 if WRONG else dy.storage_offset())

class Spoiling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach()
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        if WRONG:
            ctx.x.mul_(0.5)
        return 2 * dy

def part(x):
    out = torch.empty_like(x)
    out.view(-1)[: x.numel() - WRONG] = 2 * x.reshape(-1)[: x.numel() - WRONG]
    return out

def clamp(x):
    out = 2 * x
    if WRONG:
        x.zero_()
    return out

def refuse(x):
    if WRONG and x.numel() > 1:
        torch.stack([])  # raises RuntimeError, in torch: no refusal of the launcher's own
    return 2 * x
"""
TESTS = """
import kernels
from pytest_fusion import derived

TWICE = lambda x: 2 * x
SHAPE = {"x": tensor("rows hidden")}

class TestMethods:
    @pytest.mark.parametrize("times", [1, 2])
    @fused_equivalent(lambda x, times: TWICE(x) * times, inputs=SHAPE)
    def test_strides(self, x, times, tmp_path):
        return kernels.double(x) * times

@fused_equivalent(lambda x: x * x, inputs=SHAPE, grad=True)
def test_gradient(x):
    return kernels.Square.apply(x)

@fused_equivalent(TWICE, inputs=SHAPE, grad=True)
def test_slice(x):
    return kernels.Sliced.apply(x)

@fused_equivalent(TWICE, inputs=SHAPE, grad=True)
def test_spoils(x):
    return kernels.Spoiling.apply(x)

@settings(max_examples=30)
@fused_equivalent(TWICE, inputs=SHAPE)
def test_part(x):
    return kernels.part(x)

@fused_equivalent(TWICE, inputs=SHAPE)
def test_input(x):
    return kernels.clamp(x)

@fused_equivalent(TWICE, inputs=SHAPE)
def test_refuse(x):
    return kernels.refuse(x)

SPEC = FusionSpec(fused=lambda x: kernels.double(x), reference=TWICE, inputs=SHAPE, name="spec")
test_spec = settings(max_examples=60)(SPEC.test())

@pytest.fixture
def scale():
    return lambda x: 3 * x

@fused_equivalent(TWICE, inputs=SHAPE)
def test_fixture(x, scale):
    return scale(x)
"""
# Runs scripts one after the other in one process, in which this package may be hidden from them.
RUN = """
import contextlib, importlib.util, io, json, runpy, sys
codes, find_spec = {}, importlib.util.find_spec
hidden, *scripts = sys.argv[1:]
importlib.util.find_spec = lambda name, *more: None if name == hidden else find_spec(name, *more)
for script in scripts:
    sys.argv[1:], said = [], io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        codes[script] = (end.code, said.getvalue())
    assert not hidden or not hasattr(sys.modules.get(hidden), "__file__")
    for name in [name for name in sys.modules if name.partition(".")[0] in (hidden, "kernels", "test_it")]:
        del sys.modules[name]
print(json.dumps(codes))
"""


def _run(scripts: list[Path], folder: Path, hidden: str, **more: str) -> dict[str, tuple[int, str]]:
    environment = {**os.environ, **more}
    command = [sys.executable, "-c", RUN, hidden, *map(str, scripts)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(scripts), done.stderr
    return {Path(script).stem: tuple(result) for script, result in found.items()}


@pytest.mark.slow
def test_scripts_show_what_failed_and_that_it_is_mended(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another folder, with this package and without: each failure shows, none does once the kernels are right."""
    monkeypatch.delenv("MENDED", raising=False)
    project.pytester.makepyfile(kernels=KERNELS)
    project.write(TESTS)
    project.run("--fusion-report", "page.html").assert_outcomes(failed=10)

    scripts = {name: project.pytester.path / test["script"] for name, test in project.tests.items()}
    assert all(script.is_file() for script in scripts.values())
    page = (project.pytester.path / "page.html").read_text()
    assert all(script.name in page for script in scripts.values())
    (incomplete,) = [scripts.pop(name) for name in list(scripts) if name == "test_fixture"]
    checks = {name: test["failed_check"] for name, test in project.tests.items()}
    assert set(checks.values()) >= {"gradients", "unwritten", "inputs", "error"}

    assert all(script.with_suffix(".pt").is_file() for script in scripts.values())

    for hidden in ("", "pytest_fusion"):
        broken = _run([*scripts.values(), incomplete], tmp_path, hidden)
        codes = {name: broken[script.stem][0] for name, script in scripts.items()}
        assert codes == dict.fromkeys(scripts, 1), broken
        code, said = broken[incomplete.stem]
        assert code == 2
        assert "fixture scale: it cannot be saved" in said
        assert "the input x was changed" in broken[scripts["test_input"].stem][1]
        assert "the input x was changed" in broken[scripts["test_spoils"].stem][1]
        assert "the kernel raised RuntimeError" in broken[scripts["test_refuse"].stem][1]
        mended = _run(list(scripts.values()), tmp_path, hidden, MENDED="1")
        codes = {name: mended[script.stem][0] for name, script in scripts.items()}
        assert codes == dict.fromkeys(scripts, 0), mended
    assert "not complete, fixture scale" in project.tests["test_fixture"]["message"]


TUNED = """
import os
import triton
import triton.language as tl

@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"])
@triton.jit
def kernel(y, x, n, BLOCK: tl.constexpr, WRONG: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * (3 if WRONG and BLOCK == 32 else 2), mask=at < n)

def double(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    grid = lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)
    kernel[grid](y, x, x.numel(), WRONG="MENDED" not in os.environ)
    return y

@settings(max_examples=10)
@fused_equivalent(lambda x: 2 * x, inputs=X, dtypes="float32")
def test_tuned(x):
    return double(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize("hidden", ["", "pytest_fusion"])
def test_an_autotuned_kernel_runs_without_a_gpu(
    hidden: str, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script takes the case's config and benchmarks none, in this package's interpreter and in Triton's own."""
    pytest.importorskip("triton")
    monkeypatch.delenv("MENDED", raising=False)
    project.write(TUNED)
    project.run(subprocess=True).assert_outcomes(failed=1)
    script = project.pytester.path / project.tests["test_tuned"]["script"]

    assert _run([script], tmp_path, hidden)[script.stem][0] == 1
    assert _run([script], tmp_path, hidden, MENDED="1")[script.stem][0] == 0


@pytest.mark.slow
def test_a_script_away_from_its_project_says_so(project: Project, tmp_path: Path) -> None:
    """Copied to where the test's file cannot be found, it names the file and leaves 2."""
    project.write("@fused_equivalent(relu_reference, inputs=X)\ndef test_function(x):\n    return wrong(x)\n")
    project.run().assert_outcomes(failed=1)
    script = project.pytester.path / project.tests["test_function"]["script"]
    away = tmp_path / "case.py"
    away.write_text(script.read_text())

    done = subprocess.run([sys.executable, away], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "test_it.py is neither below" in done.stdout
    assert "run this in the project's folder" in done.stdout

    inside = script.with_name("alone.py")
    inside.write_text(script.read_text())
    done = subprocess.run([sys.executable, inside], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "the inputs cannot be loaded" in done.stdout


def _die(*_: Any, **__: Any) -> Any:
    os._exit(9)


def _raise(*_: Any, **__: Any) -> Any:
    raise InputFailed("values= of input 'x' raised")


@pytest.mark.parametrize(("compose", "said"), [(_die, "ended the process"), (_raise, "InputFailed: values= of input")])
@pytest.mark.parametrize("isolate", ["on", "off"])
def test_inputs_that_cannot_be_made_again_do_not_hide_the_failure(
    compose: Any, said: str, isolate: str, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where making the inputs once more ends the process or raises, the failure stands and tells of it."""
    if isolate == "off" and compose is _die:
        pytest.skip("without a child the process that ends is this one")
    monkeypatch.setattr("pytest_fusion.diagnosis.repro.script.compose", compose)
    project.write("@fused_equivalent(relu_reference, inputs=X)\ndef test_function(x):\n    return wrong(x)\n")

    project.run("--fusion-isolate", isolate).assert_outcomes(failed=1)

    test = project.tests["test_function"]
    assert (test["verdict"], test["failed_check"], test["script"]) == ("fail", "structure", None)
    assert test["replay"] is not None
    assert said in test["message"].partition("script: none could be written: ")[2]
