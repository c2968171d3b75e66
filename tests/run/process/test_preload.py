"""What a parent imports before it forks, so that no child pays for it again."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.sweeps import sweep


def _lines(code: str) -> list[str]:
    """What it prints, in a process that has imported nothing else."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    return done.stdout.split()


@sweep(("gradients", "expected"), [("False", ["False", "False"]), ("True", ["False", "True"])])
def test_gradients_find_their_imports_done(gradients: str, expected: list[str]) -> None:
    """Sympy comes with the first upstream gradient; a parent that knows of gradients has it before."""
    code = f"""
        import sys
        from pytest_fusion.run.process import preload
        print("sympy" in sys.modules)
        preload.inherit(gradients={gradients})
        print("sympy" in sys.modules)
    """
    assert _lines(code) == expected


@pytest.mark.slow
def test_a_gradient_imports_what_is_learnt() -> None:
    """What a child needed for a gradient is what the next one inherits."""
    code = """
        import torch
        from pytest_fusion.run.process import preload
        x = torch.ones(2, requires_grad=True)
        print(preload.GRADIENTS in preload.needed())
        torch.autograd.grad([x * 2], [x], [torch.ones(2)])
        print(preload.GRADIENTS in preload.needed())
    """
    assert _lines(code) == ["False", "True"]


@pytest.mark.slow
def test_tritons_files_are_hashed_once() -> None:
    """The hash is there before a child asks for it."""
    code = """
        import triton
        from triton.runtime import cache
        from pytest_fusion.run.process import preload
        preload.inherit(compiles=True)
        print(cache.triton_key.cache_info().currsize)
    """
    assert _lines(code) == ["1"]


def test_constants_of_the_projects_modules_are_found_once() -> None:
    """A child's first integer finds them there."""
    code = """
        from hypothesis.internal.conjecture import providers
        from pytest_fusion.run.process import preload
        print(providers._sys_modules_len)
        preload.inherit(searches=True)
        print(providers._sys_modules_len > 100)
    """
    assert _lines(code) == ["None", "True"]
