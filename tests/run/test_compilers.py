"""Compilations of Triton's kernels, and of functions that launchers have under torch.compile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_fusion.run import compilers
from pytest_fusion.run.compiled import timed_compilations


def test_more_variants_than_torch_compiles_are_announced_and_run() -> None:
    """At its limit of 8 a function under ``fullgraph=True`` raises; no caller has as many shapes as a test."""
    import torch._dynamo

    doubled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False, fullgraph=True)
    sizes = range(2, 14)
    events: list[str] = []
    with compilers.announced(events.append, lambda: events.append("done")):
        assert all(len(doubled(torch.ones(size))) == size for size in sizes)
        torch._dynamo.reset()
    assert events == ["a function under torch.compile", "done"] * len(sizes)

    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        all(len(doubled(torch.ones(size))) == size for size in sizes)
    assert len(events) == 2 * len(sizes)


def test_each_compilation_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the caller's clock; one that raises too."""
    jit = pytest.importorskip("triton.runtime.jit")
    monkeypatch.setattr(jit.JITFunction, "_do_compile", lambda _, works: "kernel" if works else 1 // 0)
    kernel, seconds, times = SimpleNamespace(fn=len), list[float](), iter((1.0, 3.5, 10.0, 10.25))
    with timed_compilations(times.__next__, seconds.append):
        assert jit.JITFunction._do_compile(kernel, True) == "kernel"
        with pytest.raises(ZeroDivisionError):
            jit.JITFunction._do_compile(kernel, False)
    assert seconds == [2.5, 0.25]
