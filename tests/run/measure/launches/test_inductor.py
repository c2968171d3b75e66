"""Inductor's kernels for the CPU, counted as they are called."""

from __future__ import annotations

import shutil
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from pytest_fusion.run.measure.launches import Counts, Uncounted, count, modelled, modelled_launches
from pytest_fusion.run.measure.launches.modelled_launches import Modelled


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module as Inductor writes them, among those that it has loaded."""
    module = ModuleType("compiled")
    module.cpp_fused_add_0 = lambda x: x.add_(1)  # type: ignore[attr-defined]
    module.helper = lambda: None  # type: ignore[attr-defined]
    cache = SimpleNamespace(PyCodeCache=SimpleNamespace(modules=[module]))
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", cache)  # type: ignore[arg-type]
    return module


def test_kernels_are_counted_and_put_back(compiled: ModuleType) -> None:
    """Each call counts by the kernel's name, and afterwards the module is as it was."""
    kernel = compiled.cpp_fused_add_0
    x = torch.zeros(2)
    with modelled_launches.counted() as found:
        compiled.cpp_fused_add_0(x)
        compiled.cpp_fused_add_0(x)
    assert (x.tolist(), dict(found.kernels)) == ([2.0, 2.0], {"cpp_fused_add_0": 2})
    assert found.doubts == ["these are Inductor's kernels for the CPU; a GPU gets others"]
    assert compiled.cpp_fused_add_0 is kernel


def test_what_is_compiled_meanwhile_is_counted_in_another_call(compiled: ModuleType) -> None:
    """A module that appears during the call makes it be counted once more, when it is known."""
    modules = sys.modules["torch._inductor.codecache"].PyCodeCache.modules
    modules.clear()
    calls: list[int] = []
    x = torch.zeros(2)

    def call() -> None:
        calls.append(len(modules))
        modules[:] = [compiled]
        compiled.cpp_fused_add_0(x)

    found = modelled(call, x)
    assert (calls, found.counts.names) == ([0, 1], (("aten::add_", 1), ("cpp_fused_add_0", 1)))
    assert not found.bounds


def test_without_inductor_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was never imported there is nothing to count and nothing to doubt."""
    monkeypatch.delitem(sys.modules, "torch._inductor.codecache", raising=False)
    found: Modelled = modelled(lambda: torch.ones(2, device=torch.device("cpu")), [])
    assert (found.counts.kernels, found.counts.doubts, found.bounds) == (1, (), True)


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_is_counted_as_it_runs_here() -> None:
    """Kernels in C++ by their own names, operators that Inductor leaves to torch by theirs."""
    x = torch.randn(64, 32)
    function = torch.compile(lambda x: torch.softmax(x * 2, -1) @ x.t())
    found: Counts | Uncounted = count(lambda: function(x), x, torch.device("cpu"))
    assert isinstance(found, Counts)
    names = dict(found.names)
    assert names.pop("aten::mm") == 1
    assert list(names.values()) == [1]
    assert next(iter(names)).startswith("cpp_fused")
    assert "a GPU gets others" in found.doubts[0]
