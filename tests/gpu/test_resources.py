"""Resources on a GPU: what the driver says of a loaded kernel, and that it is what ahead-of-time compilation said."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pytest_fusion.run.measure.resources.kernel_resources import resources_of
from pytest_fusion.run.measure.resources.loaded_kernels import loaded
from pytest_fusion.run.measure.resources.specialisation import Specialisation, recompilations
from pytest_fusion.run.measure.resources.targets import TARGETS, Resources, figures
from tests.run.measure.resources import planted

pytestmark = pytest.mark.gpu


def test_spills_are_read_from_the_driver() -> None:
    """The spilling launch has local memory and stores to it, its twin has neither."""
    x = torch.randn(16384, device="cuda")
    found: list[Resources] = []
    with loaded(found):
        planted.spilling(x)
        planted.fitting(x)
        planted.fitting(x)

    assert [(kernel.kernel, kernel.spills) for kernel in found] == [("row_kernel", True), ("row_kernel", False)]
    assert found[0].instructions["spill_stores"] > 0
    assert found[1].warps == 16


@pytest.mark.parametrize("name", ["spilling", "fitting", "steady"])
def test_the_device_agrees_with_what_was_told_without_it(name: str) -> None:
    """Every exact figure of a kernel compiled for this device ahead of time is that of the kernel it runs."""
    major, minor = torch.cuda.get_device_capability()
    target = TARGETS.get(f"sm_{major}{minor}")
    if target is None:
        pytest.skip("a device without a target of its own")
    launcher = getattr(planted, name)
    (report,) = resources_of(planted.spec(launcher), [{"n": 16384, "dtype": torch.float32}], [target])
    found: list[Resources] = []
    with loaded(found):
        launcher(torch.randn(16384, device="cuda"))

    assert figures(found) == report.figures


def test_recompilations_are_those_of_the_launches() -> None:
    """A sweep on the device has the reasons that it has without one."""
    launches: list[Specialisation] = []
    with loaded([], launches):
        for n in (32, 64, 33, 1):
            planted.recompiling(torch.randn(n, device="cuda"))

    assert recompilations(launches) == [
        ("eager_kernel: divisibility by 16 of n", 1),
        ("eager_kernel: n equal to 1 or not", 1),
    ]
