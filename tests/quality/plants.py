"""Planted bugs.

Each a one-line switch of a clean kernel, with the class and the row of the bug report that it re-plants.

``bug_class`` is a class of the public corpus of fused-kernel bugs (A1 input strides ignored, B1 tail mask, ... J1
alignment); ``row`` the number of the report there, with its thread in ``REPORTS``, or None for a variant of the
class.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from pytest_fusion import FusionSpec
from tests.quality.kernels import (
    activation,
    affine,
    attention,
    bag,
    cache_write,
    column_sum,
    cross_entropy,
    gate,
    glu,
    layer_norm,
    linear,
    order,
    paged,
    quant,
    rms_norm,
    rope,
    scan,
    softmax,
)

# 0, 1 and the powers of two with their neighbours: where kernels change their ways.
BOUNDARIES: tuple[int, ...] = tuple(sorted({0, 1, 2, 3} | {2**p + d for p in range(2, 18) for d in (-1, 0, 1)}))

REPORTS: Mapping[int, str] = {
    3: "vllm #22701", 5: "vllm #17091", 6: "FlagGems #1786", 9: "attorch #14", 17: "flash-linear-attention #781",
    20: "flash-linear-attention #707", 24: "Triton-distributed #180", 25: "flash-linear-attention #1031",
    26: "Liger-Kernel #582", 28: "FlagGems 3dd5b0665", 32: "flash-linear-attention a9dac8b1", 37: "pytorch #196678",
    39: "flash-linear-attention #1103", 41: "FlagGems #414", 44: "vllm #47056", 45: "vllm #47305",
    49: "flash-linear-attention 6cc3736b", 51: "flash-linear-attention #967", 72: "apex #411", 73: "xformers #785",
    76: "FlagGems #4541", 78: "vllm-xpu-kernels #609", 81: "flash-attention #2562", 83: "Liger-Kernel #1368",
    86: "Liger-Kernel #950", 88: "flash-linear-attention #874", 90: "flash-linear-attention #1095",
    92: "torchrec #3730", 93: "mamba 3854ad8", 95: "Liger-Kernel #862", 96: "flash-attention #443",
    99: "vllm #42379", 100: "FlagGems #5009", 104: "tilelang #1243", 105: "kernels-community #680", 107: "vllm #53339",
    109: "triton #9022",
    110: "FlagGems #790", 112: "sglang #30079", 114: "mlc-llm #2694", 115: "pytorch #187353", 117: "pytorch #188541",
    122: "Liger-Kernel #370", 138: "flash-linear-attention #941", 147: "mamba #827", 182: "sglang #35345",
    183: "DeepSpeed #4442", 184: "SageAttention #372", 187: "transformers #39408", 190: "FlagGems #2184",
    191: "TransformerEngine #2476", 192: "Liger-Kernel #974", 195: "flashinfer #3774", 201: "vllm #41257",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plant:
    """One planted bug.

    ``expect_checks`` are the checks whose verdict would be right; ``smallest`` the sizes of the smallest inputs that
    can show the bug, several where no one of them is the smallest, none where size does not matter. A bug of one
    rounding too many shows in a statistic: its smallest size is the one at which about half of the draws of its best
    dtype and regime show it.
    """

    name: str
    bug_class: str
    row: int | None
    make_spec: Callable[[], FusionSpec]
    expect_checks: frozenset[str]
    smallest: tuple[Mapping[str, int], ...]

    def allowed(self) -> tuple[Mapping[str, int], ...]:
        """Per smallest input the largest sizes that count as shrunk: the next boundary above each."""
        return tuple({name: next_boundary(size) for name, size in sizes.items()} for sizes in self.smallest)

    def is_shrunk(self, dims: Mapping[str, int]) -> bool:
        return not self.smallest or any(
            all(dims.get(name, 0) <= most for name, most in limits.items()) for limits in self.allowed()
        )


def next_boundary(size: int) -> int:
    """The smallest boundary above ``size``."""
    return BOUNDARIES[bisect_right(BOUNDARIES, size)]


# What the judge does not claim, with the reason; these bugs stay in the corpus and are not counted as caught.
BEYOND: Mapping[str, str] = {
    "rms_norm/weight-before-cast": "one rounding fewer than the reference as written: as accurate as float32 (grade A)",
}

VALUES = frozenset({"values"})
# A read beside the tensor shows as what it drags in, or as a result that depends on it.
READS = VALUES | {"bounds"}
# A write beside the tensor may hit a guard, another row, or the process.
WRITES = READS | {"crash", "unwritten", "inputs", "repeat"}
HOLES = VALUES | {"unwritten", "repeat"}  # whoever stores to the wrong place may store where another one does
RAISES = frozenset({"error"})


def _plant(
    name: str,
    bug_class: str,
    row: int | None,
    make: Callable[[], FusionSpec],
    checks: frozenset[str],
    *sizes: Mapping[str, int],
) -> Plant:
    return Plant(name, bug_class, row, make, checks, sizes)


def _group(
    prefix: str,
    make: Callable[..., FusionSpec],
    dims: str,
    rows: list[tuple[str, str, int | None, frozenset[str], list[tuple[int, ...]]]],
    **fixed: object,
) -> list[Plant]:
    """Plants of one kernel: each row is (bug, class, report, checks, smallest sizes in the order of ``dims``)."""
    names = dims.split()
    return [
        _plant(
            f"{prefix}/{bug}", bug_class, report, partial(make, bug, **fixed), checks,
            *(dict(zip(names, size, strict=True)) for size in sizes),
        )
        for bug, bug_class, report, checks, sizes in rows
    ]  # fmt: skip


PLANTS: tuple[Plant, ...] = (
    *_group("rms_norm", rms_norm.make_spec, "rows hidden", [
        ("ignores-row-stride", "A1", 5, READS, [(2, 1)]),
        ("ignores-column-stride", "A1", 6, READS, [(1, 2)]),
        ("ignores-offset", "A1", None, READS, [(1, 1)]),
        ("mean-over-block", "A3", None, VALUES, [(1, 3)]),
        ("row-mask", "B3", 41, WRITES, [(1, 1)]),
        ("grid-cap", "C2", 72, HOLES, [(33, 1)]),
        ("width-cap", "C3", 73, HOLES, [(1, 257)]),
        ("no-empty-guard", "C4", 78, RAISES, [(0, 0)]),
        ("sum-in-input-dtype", "D1", 86, VALUES, [(1, 1)]),
        ("eps-outside", "D4", 104, VALUES, [(1, 1)]),
        ("weight-before-cast", "D4", 99, VALUES, []),
    ]),
    *_group("rms_norm_gemma", rms_norm.make_spec, "rows hidden", [
        ("cast-before-weight", "D4", 100, VALUES, [(8, 8), (1, 64)]),
    ], gemma=True),
    *_group("rms_norm_nested", rms_norm.make_nested_spec, "outer inner hidden", [
        ("flattens", "A1", 3, READS, [(2, 1, 1)]),
    ]),
    *_group("layer_norm", layer_norm.make_spec, "rows hidden", [
        ("rstd-slot", "A3", 24, HOLES, [(2, 1)]),
        ("padded-variance", "B1", 26, VALUES, [(1, 3)]),
        ("sums-all-rows", "B1", 28, VALUES, [(2, 1)]),
        ("load-without-other", "B2", None, READS, [(1, 3)]),
        ("naive-variance", "D1", None, VALUES, [(1, 2)]),
        ("bias-twice-rounded", "D4", None, VALUES, [(2, 8), (4, 2)]),
    ]),
    *_group("softmax", softmax.make_spec, "rows cols", [
        ("mask-pitch", "A3", 20, READS, [(2, 1)]),
        ("pads-with-zero", "B2", 37, VALUES, [(1, 3)]),
        ("masks-by-product", "B4", 49, VALUES, [(1, 2)]),
        ("width-cap", "C3", 73, HOLES, [(1, 513)]),
        ("no-max", "D2", 93, VALUES, [(1, 1)]),
        ("masked-row", "D3", 96, VALUES, [(1, 1)]),
    ]),
    *_group("softmax_online", softmax.make_spec, "rows cols", [
        ("no-rescale", "D2", None, VALUES, [(1, 65)]),
    ], online=True),
    *_group("swiglu", glu.make_swiglu_spec, "rows cols", [
        ("up-pitch", "A3", None, READS, [(2, 1)]),
        ("output-row", "A3", 24, HOLES, [(2, 1)]),
        ("output-tile", "A3", 25, WRITES, [(1, 65)]),
        ("column-mask-only", "B1", 28, WRITES, [(1, 1)]),
        ("no-mask", "B3", 39, WRITES, [(1, 1)]),
        ("activation-rounded", "D4", None, VALUES, [(8, 8), (1, 64), (64, 1)]),
    ]),
    *_group("geglu", glu.make_geglu_spec, "rows cols", [
        ("tanh-for-erf", "E4", None, VALUES, [(1, 1)]),
    ]),
    *_group("swiglu_flat", glu.make_flat_spec, "rows cols", [
        ("flat-on-any-layout", "A1", 6, READS, [(1, 2), (2, 1)]),
        ("off-by-one-mask", "B3", None, WRITES, [(1, 1)]),
        ("floor-grid", "B5", None, HOLES, [(1, 1)]),
    ]),
    *_group("affine_relu", affine.make_spec, "rows cols", [
        ("bias-first-tile", "A3", 17, READS, [(1, 65)]),
        ("squeezes", "C5", None, frozenset({"structure"}), [(1, 1)]),
        ("relu-drops-nan", "D6", None, VALUES, [(1, 1)]),
        ("writes-input", "E2", 122, frozenset({"inputs"}), [(1, 1)]),
        ("keeps-float32", "dtype", None, frozenset({"structure"}), [(1, 1)]),
        ("caches-bias", "stale", None, VALUES | {"honesty", "repeat"}, [(1, 1)]),
    ]),
    *_group("affine", affine.make_spec, "rows cols", [
        ("returns-input", "alias", None, frozenset({"structure"}), [(1, 1)]),
    ], relu=False),
    _plant(
        "refuses-everything", "Z1", None, affine.make_refusing_spec, frozenset({"error", "vacuity", "honesty"})
    ),
    *_group("activation", partial(activation.make_spec, "softplus"), "n", [
        ("no-threshold", "D2", 93, VALUES, [(1,)]),
    ]),
    *_group("activation", partial(activation.make_spec, "log_sigmoid"), "n", [
        ("log-of-sigmoid", "D7", 117, VALUES, [(1,)]),
    ]),
    *_group("activation", partial(activation.make_spec, "negative_reciprocal"), "n", [
        ("zero-minus-x", "D7", 115, VALUES, [(1,)]),
    ]),
    *_group("cross_entropy", cross_entropy.make_spec, "rows vocab", [
        ("floor-blocks", "B1", None, VALUES, [(1, 1)]),
        ("leaves-ignored", "B5", 51, HOLES, [(1, 1)]),
        ("no-max", "D2", 95, VALUES, [(1, 1)]),
        ("mean-over-all", "H5", 191, VALUES, [(2, 2)]),
        ("no-clamp", "H5", 192, VALUES, [(0, 1)]),
        ("hard-coded-ignore", "H5", 192, READS | {"crash"}, [(1, 1)]),
    ]),
    *_group("rope", rope.make_spec, "batch seq heads features", [
        ("ignores-pitch", "A1", 5, READS, [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1)]),
        ("first-batch-positions", "A3", 17, VALUES, [(2, 1, 1, 4)]),
        ("no-pass-through", "B5", None, HOLES, [(1, 1, 1, 1)]),
        ("skips-negative", "B5", 51, HOLES, [(1, 1, 1, 1)]),
        ("overwrites-input", "E2", 122, frozenset({"structure", "inputs"}), [(1, 1, 1, 1)]),
        ("interleaved", "H1", None, VALUES, [(1, 1, 1, 8)]),
        ("hard-coded-theta", "H1", 183, VALUES, [(1, 1, 1, 8)]),
    ]),
    *_group("rope_sectioned", rope.make_sectioned_spec, "batch seq heads features", [
        ("one-section", "H1", 182, VALUES, [(1, 1, 1, 8)]),
    ]),
    *_group("linear", linear.make_spec, "rows cols inner", [
        ("floor-steps", "B1", None, VALUES, [(1, 1, 1)]),
        ("store-columns", "B3", None, WRITES, [(1, 1, 0)]),
        ("weight-tail", "B4", 45, READS, [(1, 1, 1)]),
        ("low-precision-accumulator", "D1", 88, VALUES, [(1, 1, 17), (1, 17, 4), (2, 8, 4)]),
        ("bf16-operands", "D1", None, VALUES, [(1, 1, 1)]),
    ]),
    *_group("linear_split", linear.make_spec, "rows cols inner", [
        ("floor-chunk", "B1", None, VALUES, [(1, 1, 17)]),
        ("bias-in-each-split", "E4", None, VALUES, [(1, 1, 17)]),
    ], split=True),
    *_group("attention", attention.make_spec, "kv_heads heads queries keys features", [
        ("head-by-row-pitch", "A1", 9, READS | {"error"}, [(1, 2, 1, 2, 1)]),
        ("scale-of-padded", "A3", None, VALUES, [(1, 1, 1, 2, 1)]),
        ("tail-tile", "B2", 37, VALUES, [(1, 1, 1, 1, 1)]),
        ("output-not-rescaled", "D2", None, VALUES, [(1, 1, 1, 17, 1)]),
        ("masked-query", "D3", 96, VALUES, [(1, 1, 1, 0, 1)]),
        ("top-left", "H2", 184, VALUES, [(1, 1, 1, 2, 1)]),
        ("modulo-group", "H4", 190, VALUES, [(2, 4, 1, 1, 1)]),
    ]),
    *_group("attention_window", attention.make_spec, "kv_heads heads queries keys features", [
        ("window-inclusive", "H3", 187, VALUES, [(1, 1, 1, 5, 1)]),
    ], window=4),
    *_group("paged_decode", paged.make_spec, "batch blocks page pages features", [
        ("table-pitch", "A3", 20, READS | {"crash"}, [(2, 2, 1, 2, 1)]),
        ("output-tile", "A3", 25, HOLES, [(1, 1, 1, 0, 17)]),
        ("value-tail", "B4", 45, READS, [(1, 1, 2, 1, 1)]),
        ("zero-length", "C4", 81, HOLES, [(1, 1, 1, 0, 1)]),
    ]),
    *_group("cache_write", cache_write.make_spec, "blocks page tokens features", [
        ("ignores-row-stride", "A1", 5, READS, [(2, 1, 2, 1), (1, 2, 2, 1)]),
        ("allocator-page", "B3", 44, WRITES, [(2, 1, 1, 1), (1, 5, 1, 1)]),
        ("writes-skipped", "B3", None, WRITES, [(0, 1, 1, 1)]),
        ("pairs-of-odd-width", "J1", 201, VALUES, [(1, 1, 1, 1)]),
        ("pairs-of-odd-pitch", "J1", None, WRITES, [(2, 1, 1, 2), (1, 2, 1, 2)]),
    ]),
    *_group("quant_int8", quant.make_spec, "rows groups", [
        ("scale-slot", "A3", None, WRITES, [(2, 2)]),
        ("truncates", "D1", None, VALUES, [(1, 1)]),
        ("no-floor", "D5", 105, VALUES, [(1, 1)]),
        ("floors-scale", "D5", 107, VALUES, [(1, 1)]),
        ("signed-max", "D5", None, VALUES, [(1, 1)]),
    ]),
    *_group("quant_fp8", quant.make_spec, "rows groups", [
        ("rounds-twice", "D1", None, VALUES, [(1, 1)]),
        ("no-floor", "D5", 105, VALUES, [(1, 1)]),
    ], fp8=True),
    *_group("quant_static", quant.make_static_spec, "n", [
        ("no-clamp", "D5", None, VALUES, [(1,)]),
    ]),
    *_group("gate", gate.make_spec, "tokens experts", [
        ("pads-with-zero", "B2", 37, VALUES, [(1, 3)]),
        ("nan-sentinel", "D6", 112, VALUES, [(1, 2)]),
        ("second-slot", "D6", 114, HOLES, [(1, 2)]),
        ("drops-ties", "H6", 195, VALUES, [(1, 2)]),
    ]),
    *_group("argmax", order.make_argmax_spec, "rows cols", [
        ("tile-local-index", "A3", 25, VALUES, [(1, 65)]),
        ("ignores-nan", "D6", 109, VALUES, [(1, 2)]),
        ("last-of-equals", "H6", None, VALUES, [(1, 2)]),
    ]),
    *_group("cummax", order.make_cummax_spec, "rows cols", [
        ("ignores-nan", "D6", 110, VALUES, [(1, 1)]),
    ]),
    *_group("bag_mean", bag.make_spec, "vocab width total bags", [
        ("last-bag", "B5", None, HOLES, [(1, 1, 0, 1)]),
        ("empty-bag", "C4", None, VALUES, [(1, 1, 0, 1)]),
        ("sums-in-table-dtype", "D1", 92, VALUES, [(4, 8, 16, 2), (2, 2, 32, 1)]),
        ("counts-padding", "H5", None, VALUES, [(2, 1, 2, 1)]),
    ]),
    *_group("cumsum", scan.make_spec, "rows cols", [
        ("no-carry", "C3", None, VALUES, [(1, 33)]),
        ("rows-by-division", "C4", 76, RAISES, [(0, 0)]),
    ]),
    *_group("reverse_cumsum", scan.make_spec, "rows cols", [
        # With ordinary values no row of 4 shows it (30 draws), one in thirty of 5 does.
        ("total-minus-prefix", "D1", 90, VALUES, [(1, 1), (1, 3), (1, 5)]),
    ], reverse=True),
    *_group("column_sum", column_sum.make_spec, "rows cols", [
        ("floor-chunk", "C5", 83, VALUES, [(1, 1)]),
        ("lost-update", "F1", 138, VALUES | {"repeat"}, [(2, 1)]),
        ("any-order", "F2", 147, frozenset({"repeat"}), [(3, 1)]),
    ]),
    *_group("column_sum_atomic", column_sum.make_spec, "rows cols", [
        ("row-mask-only", "B1", 32, WRITES, [(1, 1)]),
        ("atomic-without-mask", "B3", None, WRITES, [(1, 1)]),
        ("starts-from-anything", "B5", None, HOLES | {"bounds"}, [(0, 1)]),
    ], atomic=True),
)  # fmt: skip
