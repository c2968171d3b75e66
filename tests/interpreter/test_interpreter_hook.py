"""Switching the lane on: order of imports, and releases that we do not know."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def run(script: str) -> str:
    """The output of ``script`` in a fresh interpreter, which must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_neither_triton_nor_torch() -> None:
    """The plugin can load the package and call enable() without paying for Triton or torch."""
    script = """
        import sys
        from pytest_fusion import interpreter
        interpreter.enable()
        print(sorted({"triton", "torch", "numpy"} & set(sys.modules)), interpreter.version(), interpreter.problem())
    """
    assert run(script).strip() == "[] None None"


@pytest.mark.slow
def test_triton_is_mended_as_soon_as_it_is_imported() -> None:
    """The import itself is whole (its loader is its own), and names imported from it afterwards are interpreted."""
    script = """
        from pytest_fusion import interpreter
        interpreter.enable()
        import triton
        from triton.language.extra.libdevice import rsqrt
        print(interpreter.installed(), interpreter.version() == triton.__version__, interpreter.problem())
        print(type(triton.__spec__.loader).__name__, rsqrt.__module__)
        import torch
        print(torch.cuda.get_device_capability() if torch.cuda.device_count() == 0 else (9, 0))
    """
    first, second, third = run(script).splitlines()
    assert first == "True True None"
    assert second == "SourceFileLoader triton.language.extra.cuda.libdevice"
    assert third == "(9, 0)"


def test_triton_imported_too_early_is_told() -> None:
    """With Triton already compiled for GPUs, problem() says so, and nothing is mended."""
    script = """
        import os
        os.environ.pop("TRITON_INTERPRET", None)
        import triton
        from pytest_fusion import interpreter
        interpreter.enable()
        print(interpreter.installed(), interpreter.problem())
    """
    assert run(script).startswith("False Triton was imported, and this kernel made, before the CPU lane")


@pytest.mark.slow
def test_triton_imported_early_but_interpreted_is_mended() -> None:
    """TRITON_INTERPRET=1 in the environment makes the order of imports irrelevant."""
    script = """
        import os
        os.environ["TRITON_INTERPRET"] = "1"
        import triton
        from pytest_fusion import interpreter
        interpreter.enable()
        print(interpreter.installed(), interpreter.problem())
    """
    assert run(script).strip() == "True None"


def test_an_unknown_interpreter_refuses_to_launch() -> None:
    """Where a private name is missing, launching raises and names it, rather than computing something."""
    script = """
        import os
        os.environ["TRITON_INTERPRET"] = "1"
        import triton, triton.runtime.interpreter as i
        del i.InterpreterBuilder.create_dot
        triton.__version__ = "9.9.9"
        from pytest_fusion import interpreter
        interpreter.enable()
        print(interpreter.installed(), interpreter.problem())
        @triton.jit
        def kernel(): ...
        try:
            kernel[(1,)]()
        except Exception as error:
            print(type(error).__name__, error)
    """
    first, second = run(script).splitlines()
    assert first.startswith("False Triton 9.9.9")
    assert second.startswith("UnsupportedTritonError Triton 9.9.9")
    assert "InterpreterBuilder.create_dot is missing" in second


@pytest.mark.slow
def test_an_untested_release_with_known_names_is_used_and_told() -> None:
    """Another version whose names all match is mended, and problem() says that it was not tested."""
    script = """
        import os
        os.environ["TRITON_INTERPRET"] = "1"
        import triton
        triton.__version__ = "3.7.99"
        from pytest_fusion import interpreter
        interpreter.enable()
        print(interpreter.installed(), interpreter.problem())
    """
    assert run(script).startswith("True Triton 3.7.99 was not tested")
