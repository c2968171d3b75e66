"""Programs that part ways, batched against one at a time: the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings

from pytest_fusion import interpreter

interpreter.enable()
triton = pytest.importorskip("triton")
if not interpreter.installed():
    pytest.skip(str(interpreter.problem()), allow_module_level=True)

from tests.interpreter.differential import flow, programs  # noqa: E402 - the lane must be on before Triton is imported
from tests.interpreter.differential.harness import Kernel, assert_same  # noqa: E402
from tests.sweeps import sweep  # noqa: E402


@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
@pytest.mark.parametrize("kernel", flow.kernels(), ids=lambda kernel: kernel.name)
def test_control_flow_is_the_same_batched(kernel: Kernel, tmp_path: Path) -> None:
    """Programs that take different branches store what each of them stores alone."""
    assert_same(kernel, tmp_path, (1, 2, 5, 70))


@pytest.mark.parametrize("name", ["if-nested", "early-return", "loop-memory"])
def test_control_flow_is_the_same_in_more_programs_than_one_batch(name: str, tmp_path: Path) -> None:
    """Three hundred programs, which are more than the executor's first batch."""
    (kernel,) = (k for k in flow.kernels() if k.name == name)
    assert_same(kernel, tmp_path, (300,))


@sweep("examples", [10, 40])
def test_random_programs_are_the_same_batched(tmp_path_factory: pytest.TempPathFactory, examples: int) -> None:
    """Whatever statements are put together, each program computes what it computes alone."""

    @settings(deadline=None, max_examples=examples)
    @given(kernel=programs.kernels())
    def judge(kernel: Kernel) -> None:
        assert_same(kernel, tmp_path_factory.mktemp("random"), (3,))

    judge()
