"""Compiled kernels read as the driver knows them, with a fake in place of one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from pytest_fusion.run.measure.resources.loaded_kernels import read
from pytest_fusion.run.measure.resources.noting import Noted

LAUNCH = Noted("k", None)


def _kernel(**changes: Any) -> Any:
    target = SimpleNamespace(backend=changes.pop("backend", "cuda"), arch=90)
    metadata = SimpleNamespace(target=target, shared=1024, num_warps=4)
    values = {"n_regs": 64, "n_spills": 3, "asm": {"cubin": b"no binary"}, "_init_handles": lambda: None}
    return SimpleNamespace(metadata=metadata, **{**values, **changes})


def test_words_of_local_memory_become_bytes() -> None:
    """Registers, spilled bytes, shared memory and occupancy; instructions that cannot be read are noted, not zero."""
    found = read(_kernel(), LAUNCH)

    assert (found.status, found.target, found.registers, found.local_bytes) == ("compiled", "sm_90", 64, 12)
    assert found.spills
    assert (found.shared, found.warps, found.instructions) == (1024, 4, {})
    assert found.occupancy is not None
    assert found.occupancy.warps == 32
    assert "cannot be read" in found.note


def test_no_local_memory_is_no_spill() -> None:
    """A kernel whose values all fit has none."""
    assert not read(_kernel(n_spills=0), LAUNCH).spills


@pytest.mark.parametrize("kernel", [None, _kernel(backend="hip")], ids=["interpreted", "not CUDA"])
def test_what_was_not_compiled_for_cuda_is_unknown(kernel: Any) -> None:
    """A launch that returned no compiled CUDA kernel has no figures."""
    assert read(kernel, LAUNCH).status == "unknown"
