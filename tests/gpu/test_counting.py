"""Launches on a real device: a captured graph and the profiler count the same, whatever is launched."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu


def attention(x: Any) -> Any:
    """In float32 by a kernel that has "Mem" in its name."""
    return F.scaled_dot_product_attention(*[x.view(1, 1, 64, 64)] * 3)


# (kernels or None where the number is the library's choice, the function of one float16 (64, 64) matrix).
CALLS: dict[str, tuple[int | None, Callable[[Any], Any]]] = {
    "nothing": (0, lambda x: x.t()),
    "one": (1, lambda x: x * 2),
    "two": (2, lambda x: (x * 2).sin()),
    "a copy of bytes": (0, lambda x: x.clone()),
    "a strided copy": (1, lambda x: x.t().contiguous()),
    "a cast": (1, lambda x: x.float()),
    "a fill": (1, lambda x: torch.zeros(64, device=x.device)),
    "softmax": (1, lambda x: torch.softmax(x, -1)),
    "layer_norm": (None, lambda x: F.layer_norm(x, (64,))),
    "topk": (None, lambda x: torch.topk(x.float().repeat(1, 2000), 50)),
    "sort": (None, lambda x: torch.sort(x.float().repeat(1, 2000))),
    "cumsum": (None, lambda x: torch.cumsum(x, -1)),
    "matmul": (None, lambda x: x @ x),
    "matmul that splits": (None, lambda x: x.repeat(1, 256) @ x.repeat(1, 256).t()),
    "cross_entropy": (None, lambda x: F.cross_entropy(x, torch.zeros(64, dtype=torch.int64, device=x.device))),
    "attention": (None, attention),
    "attention, memory-efficient": (None, lambda x: attention(x.float())),
}  # fmt: skip


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(64, 64, device="cuda", dtype=torch.float16)


def counted(call: Callable[[Any], Any], x: torch.Tensor) -> Any:
    from pytest_fusion.run.measure.launches import count

    return count(lambda: call(x), x, x.device)


@pytest.mark.parametrize("name", CALLS)
def test_methods_agree_on_torch(name: str, x: torch.Tensor) -> None:
    """Graph and profiler count the same, and where torch has no choice the number is known."""
    kernels, call = CALLS[name]
    found = counted(call, x)
    assert getattr(found, "agreed", None) is True, found
    assert found.method == "graph"
    assert sum(count for _, count in found.names) == found.kernels
    if kernels is None:
        assert found.kernels > 0
    else:
        assert found.kernels == kernels, found


def test_the_model_is_a_lower_bound(x: torch.Tensor) -> None:
    """What the CPU lane would say is never more than what is launched."""
    from pytest_fusion.run.measure.launches import modelled

    for name, (_, call) in CALLS.items():
        found = counted(call, x)
        guess = modelled(lambda call=call: call(x), x).counts  # type: ignore[misc]
        assert guess.kernels <= found.kernels, (name, guess, found)


def test_the_model_on_the_cpu_is_a_lower_bound(x: torch.Tensor) -> None:
    """The same for the operators that the CPU takes in place of the device's kernels."""
    from pytest_fusion.run.measure.launches import modelled

    more = {
        "rms_norm": lambda x: F.rms_norm(x, (64,)),
        "dropout": lambda x: F.dropout(x, 0.5),
        "softmax in float32": lambda x: torch.softmax(x, -1, dtype=torch.float32),
        "log_softmax in float32": lambda x: torch.log_softmax(x, -1, dtype=torch.float32),
        "group_norm": lambda x: F.group_norm(x.view(1, 64, 8, 8), 4),
        "batch_norm": lambda x: F.batch_norm(x.view(4, 16, 8, 8), None, None, training=True),
        "attention with dropout": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 64, 64)] * 3, dropout_p=0.1),
        "linear": lambda x: F.linear(x, x, x[0]),
        "conv": lambda x: F.conv1d(x.view(1, 64, 64), x.view(64, 64, 1)),
        "roll": lambda x: torch.roll(x, 3, 1),
        "flip": lambda x: torch.flip(x, (1,)),
        "repeat": lambda x: x.repeat(2, 2),
        "pad": lambda x: F.pad(x, (0, 2)),
        "stack": lambda x: torch.stack([x, x]),
        "cat of many dims": lambda x: torch.cat([x.view(2, 2, 2, 2, 256)] * 2),
        "pow": lambda x: x.pow(1),
        "index": lambda x: x[torch.tensor([0, 2])],
        "masked": lambda x: x.masked_fill(x > 0, 0),
        "where": lambda x: torch.where(x > 0, x, 0),
        "set part": lambda x: x.clone().__setitem__((slice(None), 0), 0),
        "cumsum of one": lambda x: x[:1, :1].cumsum(0),
        "sort of one": lambda x: x[:1, :1].sort(),
    }
    host = x.cpu()
    for name, call in {**{name: call for name, (_, call) in CALLS.items()}, **more}.items():
        found = counted(call, x)
        guess = modelled(lambda call=call: call(host), host).counts  # type: ignore[misc]
        assert guess.kernels <= getattr(found, "kernels", -1), (name, guess, found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own imports
def test_compiled_functions_agree(x: torch.Tensor) -> None:
    """What Inductor launches by its own launcher is in both counts."""
    compiled = torch.compile(lambda x: torch.softmax(x * 2, -1) + 1)
    found = counted(compiled, x)
    assert (found.kernels, found.agreed) == (1, True), found
    assert found.names[0][0].startswith("triton_")


def test_triton_agrees_and_tuning_is_not_counted(x: torch.Tensor) -> None:
    """An autotuned kernel is one launch by its own name."""
    triton = pytest.importorskip("triton")
    from tests.quality.kernels import launch_count

    found = counted(lambda x: launch_count.scaled(x, x[0]), x)
    assert (found.names, found.agreed) == ((("scale_kernel", 1),), True)
    found = counted(launch_count.row_sum, x)
    assert (found.kernels, found.agreed) == (2, True)
    tuned = triton.autotune([triton.Config({"BLOCK": size}) for size in (32, 64)], key=["hidden"])(
        launch_count.sum_kernel
    )

    def fused(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(64, device=x.device)
        tuned[lambda meta: (64, triton.cdiv(64, meta["BLOCK"]))](x, out, 64, *x.stride())
        return out

    found = counted(fused, x)
    assert (found.names, found.agreed) == ((("sum_kernel", 1),), True)


def test_suite_kernels_and_references_agree() -> None:
    """Every kernel of the suite is one launch, its reference more or as many, by both methods."""
    from reference_kernels.linear.kernel import linear
    from reference_kernels.linear.reference import linear_reference
    from reference_kernels.rms_norm.kernel import rms_norm
    from reference_kernels.rms_norm.reference import llama_reference
    from reference_kernels.softmax.kernel import softmax
    from reference_kernels.softmax.reference import softmax_reference

    x, weight = torch.randn(64, 512, device="cuda"), torch.randn(512, device="cuda")
    pairs: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
        "softmax": (softmax, softmax_reference),
        "rms_norm": (
            lambda x: rms_norm(x, weight, 1e-6, convention="llama"),
            lambda x: llama_reference(x, weight, 1e-6),
        ),
        "linear": (lambda x: linear(x, x), lambda x: linear_reference(x, x)),
    }
    for name, (fused, reference) in pairs.items():
        ours, theirs = counted(fused, x), counted(reference, x)
        assert (ours.kernels, ours.agreed) == (1, True), (name, ours)
        assert theirs.agreed is True, (name, theirs)
        assert theirs.kernels >= 1, (name, theirs)


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger_kernel")
def test_liger_agrees() -> None:
    """Kernels of other people, forward."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    x, weight = torch.randn(64, 512, device="cuda"), torch.randn(512, device="cuda")
    for call in (
        lambda x: LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False),
        lambda x: LigerSiLUMulFunction.apply(x, x),
    ):
        found = counted(call, x)
        assert (found.agreed, found.kernels >= 1) == (True, True), found


def test_work_on_a_stream_of_its_own_is_found(x: torch.Tensor) -> None:
    """No graph has it, the profiler does, and there is no number."""
    own = torch.cuda.Stream()

    def fused(x: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(own):
            torch.mul(x, 2, out=scratch)
        return x + 1

    scratch = torch.empty_like(x)
    found = counted(fused, x)
    assert not hasattr(found, "kernels"), found
    assert "stream" in found.reason


def test_what_cannot_be_captured_is_profiled(x: torch.Tensor) -> None:
    """A call that waits is counted by the profiler, and later captures work as before."""
    found = counted(lambda x: x * float(x.sum().item()), x)
    assert (found.method, found.kernels, found.memcpy) == ("profiler", 2, 1), found
    again = counted(lambda x: x * 2, x)
    assert (again.method, again.kernels, again.agreed) == ("graph", 1, True), again
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert float((x * 2).sum()) == float((x + x).sum())


def test_backward_is_counted_alone(x: torch.Tensor) -> None:
    """A backward pass of a graph that is kept runs on its forward's stream, which is not the captured one."""
    leaf = x.float().requires_grad_()
    out = leaf.sin()
    up = torch.ones_like(out)
    found = counted(lambda _: torch.autograd.grad(out, leaf, up, retain_graph=True), x)
    assert (found.kernels, found.method) == (2, "profiler"), found


def test_a_failed_capture_leaves_nothing_behind(x: torch.Tensor) -> None:
    """Neither does the generator believe that it is captured, nor is another stream the current one."""
    counted(lambda x: x * float(x.sum().item()) + torch.rand_like(x), x)
    assert torch.rand(3, device=x.device).shape == (3,)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


_TESTS = """
from hypothesis import settings
from pytest_fusion import fused_equivalent, tensor
from tests.quality.kernels.launch_count import scaled, scaled_reference, row_sum, sum_reference

few = settings(max_examples=24, deadline=None)
SPEC = {"inputs": {"x": tensor("rows hidden"), "scale": tensor("hidden")}, "max_launches": 1}

@few
@fused_equivalent(scaled_reference, **SPEC)
def test_right(x, scale):
    return scaled(x, scale)

@fused_equivalent(scaled_reference, **SPEC)
def test_two_kernels(x, scale):
    return scaled(x, scale, bug="two-kernels")

@fused_equivalent(scaled_reference, **SPEC)
def test_copies_strided(x, scale):
    return scaled(x, scale, bug="copies-strided")

@fused_equivalent(scaled_reference, **SPEC)
def test_converts_result(x, scale):
    return scaled(x, scale, bug="converts-result")

@fused_equivalent(scaled_reference, **SPEC)
def test_operators(x, scale):
    return scaled(x, scale, bug="operators-of-torch")

@few
@fused_equivalent(sum_reference, inputs={"x": tensor("rows hidden")}, deterministic=False, max_launches=2)
def test_sum(x):
    return row_sum(x)

@fused_equivalent(sum_reference, inputs={"x": tensor("rows hidden")}, deterministic=False, max_launches=1)
def test_sum_bounded(x):
    return row_sum(x)

@few
@fused_equivalent(lambda x: x.mul_(2), inputs={"x": tensor("rows hidden")}, mutates="x", max_launches=1)
def test_in_place(x):
    return x.mul_(2)

@few
@fused_equivalent(lambda x: x * 2, inputs={"x": tensor("rows hidden")}, syncs=True, max_launches=4)
def test_waits(x):
    if x.numel() and x.flatten()[0].float().abs().item() == 77.5:
        return x * 2
    return x * 2
"""


def test_the_check(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs fail `launches` by what was counted, right kernels pass it with the methods named."""
    pytester.makepyfile(_TESTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
    pytester.runpytest_subprocess("--fusion-device=cuda", "--fusion-seconds=2", "--fusion-json=out.json")

    tests = json.loads((pytester.path / "out.json").read_text())["tests"]
    found = {test["nodeid"].partition("::test_")[2]: test for test in tests}
    planted = ("two_kernels", "copies_strided", "converts_result", "operators", "sum_bounded")
    honest = ("right", "sum", "in_place")
    assert {name: found[name]["cause"] for name in planted} == dict.fromkeys(planted, "extra-launch")
    for name in planted:
        check = found[name]["checks"]["launches"]
        assert (check["method"], check["agreed"]) == ("graph", True), check
    for name in honest:
        check = found[name]["checks"]["launches"]
        assert (check["verdict"], "the same by the profiler" in check["reason"]) == ("pass", True), check
    # A copy of strided inputs to look at one, a cast, its magnitude, and the product.
    check = found["waits"]["checks"]["launches"]
    assert (check["verdict"], "counted by the profiler" in check["reason"]) == ("pass", True), check
