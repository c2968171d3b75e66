"""The interpreter accepts what the compiler rejects: every kernel of the suite is compiled for sm_90, without a GPU.

Compiling also shows what no interpreted run can: registers spilled to memory, shared memory past the limit, a matrix
product that misses the tensor cores, a row that is loaded element by element.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.nightly  # some 15 s for each dtype, until Triton's cache has the kernels

SHARED_LIMIT = 232448  # bytes of shared memory that one block may use on sm_90
DTYPES = ("float32", "float16", "bfloat16")

SPILLS = {
    # Sums of keys and values by features take half of all registers: 8 to 72 bytes by mask and release of Triton.
    **{f"attention backward{name} 2": 96 for name in ("", " 96", " 128", " window", " packed")},
    "attention backward 256 2": 160,
    "attention backward 256 0": 32,
    # Behind the loop, where what rounding lost is kept for a gradient: else forward takes 3762 us, not 2019 (H200).
    "attention 256": 384,
    # Held to 64 registers, so that 1024 threads run: 32 bytes.
    "layer_norm backward widest tile": 64,
}
FREE = 16  # bytes of stack that ptxas may use for itself


@cache
def compiled(dtype: str) -> dict[str, dict[str, Any]]:
    """The facts of every launch of the suite in ``dtype``, from a process in which Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path]))
    program = Path(__file__).with_name("ahead_of_time.py")
    done = subprocess.run(
        [sys.executable, str(program), dtype], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    facts: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return facts


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_launch_compiles_within_the_limits_of_sm_90(dtype: str) -> None:
    """No kernel spills registers beyond what is listed, or asks for more shared memory than a block has."""
    for name, facts in compiled(dtype).items():
        assert facts["spilled"] <= SPILLS.get(name, FREE), (name, facts)
        assert facts["shared"] <= SHARED_LIMIT, (name, facts)
        assert facts["registers"] <= 255, (name, facts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_full_rows_are_loaded_in_vectors(dtype: str) -> None:
    """A contiguous row of 8192 is read 16 bytes at a time, as memory bandwidth asks for."""
    rows = ("softmax", "softmax masked", "softmax widest tile", "softmax causal", "softmax backward")
    slopes = ("softmax backward causal", "softmax backward bias 1", "softmax backward loop")
    rms = ("rms_norm llama", "rms_norm gemma", "rms_norm add", "rms_norm backward", "rms_norm backward loop")
    pairs = (
        "glu silu",
        "glu packed",
        "glu backward silu",
        "glu backward packed",
        "feed_forward backward",
        "rope half",
        "rope interleaved",
        "rope cache",
    )
    losses = ("cross_entropy", "cross_entropy backward", "linear_cross_entropy", "linear_cross_entropy scale")
    norms = (
        "layer_norm",
        "layer_norm add",
        "layer_norm backward",
        "layer_norm backward loop",
        "layer_norm backward loop 1",
    )
    chains = ("relu_scale_bias", "relu_scale_bias backward", "add_mul gelu", "add_mul backward gelu")
    codes = ("norm_quant fp8", "norm_quant fp8 groups", "norm_quant int8", "norm_quant residual groups")
    choices = ("sample", "sample cut", "moe_gate", "moe_gate backward")
    heads = ("attention 64", "attention 128", "attention 256", "attention backward 128", "decode 128", "decode paged")
    bags = ("embedding_bag 128", "embedding_bag backward 128", "interaction 26", "interaction backward 26")
    steps = ("adamw", "adamw masters")
    batches = [f"batch_norm{launch}{name}" for launch in ("", " statistics", " backward") for name in ("", " last")]
    last = (*bags, *steps, *batches)
    for name in (*rows, *slopes, *rms, *pairs, *losses, *norms, *chains, *codes, *choices, *heads, *last):
        assert compiled(dtype)[name]["vector_loads"] > 0, name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_norms_gradient_copies_its_next_rows(dtype: str) -> None:
    """Straight to shared memory, while it works at one that is there."""
    for name in ("layer_norm backward", "layer_norm input", "rms_norm backward", "rms_norm add backward"):
        assert compiled(dtype)[name]["copies"] > 0, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_dropout_four_neighbours_are_loaded_at_once(dtype: str) -> None:
    """As many as one call of Philox decides about: 16 bytes of float32, 8 of the others."""
    wide = "vector_loads" if dtype == "float32" else "paired_loads"
    for name in ("dropout", "softmax dropout", "softmax backward dropout"):
        assert compiled(dtype)[name][wide] > 0, name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_products_use_the_tensor_cores(dtype: str) -> None:
    """Large products are wgmma instructions fed by asynchronous copies, of tiles where rows have descriptors."""
    plain = ("linear medium", "linear large", "linear large gelu")
    wide = ("linear qkv", "linear gate_up")
    back = ("linear qkv input", "linear qkv weight", "linear gate_up backward", "linear gate_up input medium")
    low = ("linear lora 1", "linear lora 128 1", "linear lora backward 1")
    blocks = ("feed_forward", "feed_forward 1", "feed_forward kept gelu")
    sizes = (64, 96, 128)
    heads = [f"attention{name}" for name in ("", " window", " packed", " 256", *(f" {n}" for n in sizes))]
    codes = [f"dequant {kind}{rows}" for kind in ("int8", "int4", "float8") for rows in ("", " 16", " 64", " many")]
    # After the launch that deals out the input's columns.
    codes = [name + " 1" * (name in ("dequant int8 64", "dequant int8 many")) for name in codes]
    gradients = [f"attention backward {n} {launch}" for n in sizes for launch in (1, 2)]
    for name in (*plain, *wide, *back, *low, *blocks, *codes, *heads, *gradients):
        facts = compiled(dtype)[name]
        # Two warps, which few rows of codes take, are no group of four.
        assert facts["wgmma"] + facts["mma"] * (name in codes) > 0, (name, facts)
        assert facts["copies"] > 0, (name, facts)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_blocks_that_meet_nothing_bring_no_tiles(dtype: str) -> None:
    """The copies before a loop ask whether it has a step. By a division by the number of steps, which is 0 where there
    is none, LLVM knew that it has: tiles came late, into memory that was used for something else by then."""
    for name in ("attention backward 2", "attention backward ungrouped 2"):
        facts = compiled(dtype)[name]
        assert facts["copies"] > 0, (name, facts)
        assert facts["unasked_copies"] == 0, (name, facts)


def test_float32_products_do_not_round_to_tf32() -> None:
    """float32 operands keep their 24 bits: there is no TF32 instruction in the product."""
    for name, facts in compiled("float32").items():
        assert facts["tf32"] == 0, (name, facts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["moe_gate", "rms_norm", "layer_norm", "cross_entropy"])
def test_a_row_alone_is_spread_over_threads_as_among_others(kernel: str, dtype: str) -> None:
    """Else its sum is taken in another order, and its bits depend on how many rows there are."""
    alone, two, seven = (compiled(dtype)[f"{kernel}, {rows} of 3"]["layouts"] for rows in (1, 2, 7))
    assert alone == two == seven
