"""Check `compile` where code is generated: inductor, Triton's specialisations, CUDA graphs."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.gpu

_TESTS = """
import torch, triton, triton.language as tl
from pytest_fusion import dim, fused_equivalent, tensor
from hypothesis import settings

@triton.jit
def _double(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)

def launch(x, block=128):
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _double[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block)
    return out

@torch.library.custom_op("fusion_gpu_compile::right", mutates_args=())
def right(x: torch.Tensor) -> torch.Tensor:
    return launch(x)

right.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device))

@torch.library.custom_op("fusion_gpu_compile::strides", mutates_args=())
def strides(x: torch.Tensor) -> torch.Tensor:
    return launch(x)

strides.register_fake(lambda x: torch.empty_like(x))

def doubled(x):
    return 2 * x

SPEC = {"inputs": {"x": tensor("rows hidden")}, "dtypes": torch.float32, "dims": {"rows": dim(1), "hidden": dim(1)}}
few = settings(max_examples=16, deadline=None)
KEPT = {}

@few
@fused_equivalent(doubled, compile=True, **SPEC)
def test_launched_directly(x):
    return launch(x)

@few
@fused_equivalent(doubled, compile=True, **SPEC)
def test_in_an_operator(x):
    return right(x)

@fused_equivalent(doubled, compile=True, **SPEC)
def test_wrong_fake(x):
    return strides(x)

@few
@fused_equivalent(doubled, compile=True, syncs=True, **SPEC)
def test_graph_break(x):
    out = launch(x)
    return out if out.flatten()[0].item() > 1e38 else out * 1

@few
@fused_equivalent(doubled, max_recompiles=2, **SPEC)
def test_block_follows_the_size(x):
    return right_of_any_size(x)

@torch.library.custom_op("fusion_gpu_compile::sized", mutates_args=())
def right_of_any_size(x: torch.Tensor) -> torch.Tensor:
    return launch(x, triton.next_power_of_2(x.shape[-1]))

right_of_any_size.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device))

@torch.library.custom_op("fusion_gpu_compile::hosted", mutates_args=())
def hosted(x: torch.Tensor) -> torch.Tensor:
    # Constants computed on the host for the values at capture, and kept: a replay uses the old ones.
    if torch.cuda.is_current_stream_capturing():
        return KEPT["last"].clone()
    KEPT["last"] = launch(x)
    return KEPT["last"].clone()

hosted.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device))

@few
@fused_equivalent(doubled, compile=True, **SPEC)
def test_stale_in_a_graph(x):
    return hosted(x)
"""


def test_compilers_and_graphs(pytester: pytest.Pytester) -> None:
    """Planted bugs fail `compile` with their cause, right kernels pass it in and outside of an operator."""
    pytester.makepyfile(_TESTS)
    pytester.runpytest_subprocess("--fusion-device=cuda", "--fusion-profile=ci", "--fusion-json=out.json")

    tests = json.loads((pytester.path / "out.json").read_text())["tests"]
    found = {test["nodeid"].partition("::test_")[2]: test for test in tests}
    assert {name: test["cause"] for name, test in found.items()} == {
        "launched_directly": None,
        "in_an_operator": None,
        "wrong_fake": "wrong-fake",
        "graph_break": "graph-break",
        "block_follows_the_size": "recompiles",
        "stale_in_a_graph": "graph-capture",
    }
    for name in ("launched_directly", "in_an_operator"):
        check = found[name]["checks"]["compile"]
        assert (check["verdict"], "a CUDA graph" in check["reason"]) == ("pass", True), check
