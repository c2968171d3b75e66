"""Bugs of kernels that are called forward, on one tensor at a time."""

from __future__ import annotations

from functools import partial

from tests.quality.kernels import (
    activation,
    affine,
    any_rank,
    attention,
    bag,
    cache_write,
    column_sum,
    cross_entropy,
    entropy,
    fast_path,
    gate,
    glu,
    layer_norm,
    linear,
    nibbles,
    order,
    paged,
    quant,
    rms_norm,
    rope,
    scan,
    softmax,
    whole_blocks,
)
from tests.quality.plant import HOLES, RAISES, READS, VALUES, WRITES, Plant, group

FORWARD: tuple[Plant, ...] = (
    *group("rms_norm", rms_norm.make_spec, "rows hidden", [
        ("ignores-row-stride", "A1", 5, READS, "ignores-strides", [(2, 1)]),
        ("ignores-column-stride", "A1", 6, READS, "ignores-strides", [(1, 2)]),
        ("ignores-offset", "A1", None, READS, "ignores-offset", [(1, 1)]),
        ("mean-over-block", "A3", None, VALUES, "tail-mask", [(1, 3)]),
        ("row-mask", "B3", 41, WRITES, "out-of-bounds tail-mask", [(1, 1)]),
        ("grid-cap", "C2", 72, HOLES, "block-limit unwritten-output", [(33, 1)]),
        ("width-cap", "C3", 73, HOLES, "block-limit unwritten-output", [(1, 257)]),
        ("no-empty-guard", "C4", 78, RAISES, "zero-size", [(0, 0)]),
        ("sum-in-input-dtype", "D1", 86, VALUES, "low-precision-accumulation", [(1, 1)]),
        ("eps-outside", "D4", 104, VALUES, "eps-misplaced", [(1, 1)]),
        ("weight-before-cast", "D4", 99, VALUES, "cast-order", []),
    ], slow="ignores-column-stride width-cap"),
    *group("rms_norm_gemma", rms_norm.make_spec, "rows hidden", [
        ("cast-before-weight", "D4", 100, VALUES, "cast-order", [(8, 8), (2, 15), (1, 64)]),
    ], gemma=True),
    *group("rms_norm_nested", rms_norm.make_nested_spec, "outer inner hidden", [
        ("flattens", "A1", 3, READS, "ignores-strides", [(2, 1, 1)]),
    ]),
    *group("any_rank", any_rank.make_spec, "batch width", [
        ("whole-tiles", "A3", None, HOLES, "unwritten-output tail-mask", [(9, 1)]),
        ("first-dim", "A3", None, HOLES, "unwritten-output", [(9, 1)]),
        ("first-tile-again", "A3", None, VALUES, "block-limit wrong-index-map", [(9, 1)]),
    ]),
    *group("any_rank_turns", any_rank.make_spec, "batch width", [
        ("so-many-turns", "C2", None, HOLES, "block-limit unwritten-output", [(19, 1)]),
    ], turns=True, slow="so-many-turns"),
    *group("layer_norm", layer_norm.make_spec, "rows hidden", [
        ("rstd-slot", "A3", 24, HOLES, "wrong-index-map racing-stores unwritten-output", [(2, 1)]),
        ("padded-variance", "B1", 26, VALUES, "tail-mask wrong-neutral-element", [(1, 3)]),
        ("sums-all-rows", "B1", 28, VALUES, "wrong-index-map batch-variant", [(2, 1)]),
        ("load-without-other", "B2", None, READS, "wrong-neutral-element reads-padding tail-mask", [(1, 3)]),
        ("naive-variance", "D1", None, VALUES, "low-precision-accumulation", [(1, 2)]),
        ("bias-twice-rounded", "D4", None, VALUES, "cast-order", [(2, 8), (4, 2)]),
    ], slow="rstd-slot sums-all-rows"),
    *group("softmax", softmax.make_spec, "rows cols", [
        ("mask-pitch", "A3", 20, READS, "ignores-strides", [(2, 1)]),
        ("pads-with-zero", "B2", 37, VALUES, "wrong-neutral-element tail-mask", [(1, 3)]),
        # Which size shows it depends on the values: a masked score of 0 must count beside the others.
        ("masks-by-product", "B4", 49, VALUES, "wrong-neutral-element nan-mishandled", [(2, 5)]),
        ("width-cap", "C3", 73, HOLES, "block-limit unwritten-output", [(1, 513)]),
        ("no-max", "D2", 93, VALUES, "missing-max-subtraction", [(1, 1)]),
        ("masked-row", "D3", 96, VALUES, "unexplained", [(1, 1)]),
    ], slow="mask-pitch"),
    *group("softmax_online", softmax.make_spec, "rows cols", [
        ("no-rescale", "D2", None, VALUES, "block-limit", [(1, 65)]),
        ("empty-first-block", "D3", 96, VALUES, "unexplained nan-mishandled block-limit", [(1, 65)]),
    ], online=True),
    *group("whole_blocks", whole_blocks.make_spec, "rows cols", [
        ("first-block-again", "A3", 17, READS, "wrong-index-map block-limit", [(1, 512)]),
    ]),
    *group("swiglu", glu.make_swiglu_spec, "rows cols", [
        ("up-pitch", "A3", None, READS, "ignores-strides", [(2, 1)]),
        ("output-row", "A3", 24, HOLES, "wrong-index-map racing-stores unwritten-output", [(2, 1)]),
        ("output-tile", "A3", 25, WRITES, "wrong-index-map racing-stores block-limit unwritten-output", [(1, 65)]),
        ("column-mask-only", "B1", 28, WRITES, "out-of-bounds tail-mask", [(1, 1)]),
        ("no-mask", "B3", 39, WRITES, "out-of-bounds tail-mask", [(1, 1)]),
        ("activation-rounded", "D4", None, VALUES, "cast-order", [(8, 8), (1, 64), (64, 1)]),
    ], slow="activation-rounded output-row column-mask-only"),
    *group("geglu", glu.make_geglu_spec, "rows cols", [
        ("tanh-for-erf", "E4", None, VALUES, "unexplained", [(1, 1)]),
    ]),
    *group("swiglu_flat", glu.make_flat_spec, "rows cols", [
        ("flat-on-any-layout", "A1", 6, READS, "ignores-strides", [(1, 2), (2, 1)]),
        ("off-by-one-mask", "B3", None, WRITES, "off-by-one-mask out-of-bounds", [(1, 1)]),
        ("floor-grid", "B5", None, HOLES, "tail-mask unwritten-output", [(1, 1)]),
    ], slow="floor-grid"),
    *group("affine_relu", affine.make_spec, "rows cols", [
        ("bias-first-tile", "A3", 17, READS, "wrong-index-map block-limit", [(1, 65)]),
        ("squeezes", "C5", None, frozenset({"structure"}), "wrong-structure", [(1, 1)]),
        ("relu-drops-nan", "D6", None, VALUES, "nan-mishandled", [(1, 1)]),
        ("writes-input", "E2", 122, frozenset({"inputs"}), "mutates-input", [(1, 1)]),
        ("keeps-float32", "dtype", None, frozenset({"structure"}), "wrong-dtype", [(1, 1)]),
        ("caches-bias", "stale", None, VALUES | {"honesty", "repeat"}, "cached-answer", [(1, 1)]),
    ], slow="bias-first-tile"),
    *group("affine", affine.make_spec, "rows cols", [
        ("returns-input", "alias", None, frozenset({"structure"}), "aliasing", [(1, 1)]),
    ], relu=False),
    Plant(
        "refuses-everything", "Z1", None, affine.make_refusing_spec, frozenset({"error", "vacuity", "honesty"}),
        frozenset({"vacuous-test", "raises"}), (),
    ),
    *group("activation", partial(activation.make_spec, "softplus"), "n", [
        ("no-threshold", "D2", 93, VALUES, "missing-max-subtraction", [(1,)]),
    ]),
    *group("activation", partial(activation.make_spec, "log_sigmoid"), "n", [
        ("log-of-sigmoid", "D7", 117, VALUES, "missing-max-subtraction unexplained", [(1,)]),
    ]),
    *group("activation", partial(activation.make_spec, "negative_reciprocal"), "n", [
        ("zero-minus-x", "D7", 115, VALUES, "unexplained", [(1,)]),
    ]),
    *group("activation", partial(activation.make_spec, "clipped"), "n", [
        ("other-bound", "H1", None, VALUES, "unexplained", [(1,)]),
        ("open-at-the-threshold", "H1", None, VALUES, "unexplained", [(1,)]),
    ], slow="other-bound open-at-the-threshold"),
    *group("cross_entropy", cross_entropy.make_spec, "rows vocab", [
        ("floor-blocks", "B1", None, VALUES, "tail-mask", [(1, 1)]),
        ("leaves-ignored", "B5", 51, HOLES, "unwritten-output", [(1, 1)]),
        ("no-max", "D2", 95, VALUES, "missing-max-subtraction", [(1, 1)]),
        ("mean-over-all", "H5", 191, VALUES, "unexplained", [(2, 2)]),
        ("no-clamp", "H5", 192, VALUES, "zero-size", [(0, 1)]),
        ("hard-coded-ignore", "H5", 192, READS | {"crash"}, "out-of-bounds reads-padding crash", [(1, 1)]),
    ], slow="floor-blocks no-max no-clamp"),
    *group("rope", rope.make_spec, "batch seq heads features", [
        ("ignores-pitch", "A1", 5, READS, "ignores-strides", [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1)]),
        ("first-batch-positions", "A3", 17, VALUES, "wrong-index-map", [(2, 1, 1, 4)]),
        ("no-pass-through", "B5", None, HOLES, "unwritten-output", [(1, 1, 1, 1)]),
        ("skips-negative", "B5", 51, HOLES, "unwritten-output", [(1, 1, 1, 1)]),
        ("overwrites-input", "E2", 122, frozenset({"structure", "inputs"}), "aliasing mutates-input", [(1, 1, 1, 1)]),
        ("interleaved", "H1", None, VALUES, "wrong-index-map", [(1, 1, 1, 8)]),
        ("hard-coded-theta", "H1", 183, VALUES, "unexplained", [(1, 1, 1, 8)]),
    ], slow="no-pass-through hard-coded-theta"),
    *group("rope_sectioned", rope.make_sectioned_spec, "batch seq heads features", [
        ("one-section", "H1", 182, VALUES, "wrong-index-map", [(1, 1, 1, 8)]),
    ]),
    *group("linear", linear.make_spec, "rows cols inner", [
        ("floor-steps", "B1", None, VALUES, "tail-mask", [(1, 1, 1)]),
        ("store-columns", "B3", None, WRITES, "out-of-bounds tail-mask", [(1, 1, 0)]),
        ("weight-tail", "B4", 45, READS, "reads-padding tail-mask out-of-bounds", [(1, 1, 1)]),
        ("low-precision-accumulator", "D1", 88, VALUES, "low-precision-accumulation",
         [(1, 1, 17), (1, 17, 4), (2, 8, 4)]),
        ("bf16-operands", "D1", None, VALUES, "low-precision-accumulation cast-order", [(1, 1, 1)]),
    ], slow="floor-steps store-columns"),
    *group("linear_split", linear.make_spec, "rows cols inner", [
        ("floor-chunk", "B1", None, VALUES, "tail-mask", [(1, 1, 17)]),
        ("bias-in-each-split", "E4", None, VALUES, "block-limit", [(1, 1, 17)]),
    ], split=True, slow="floor-chunk"),
    *group("attention", attention.make_spec, "kv_heads heads queries keys features", [
        ("head-by-row-pitch", "A1", 9, READS | {"error"}, "wrong-index-map ignores-strides", [(1, 2, 1, 2, 1)]),
        ("scale-of-padded", "A3", None, VALUES, "tail-mask", [(1, 1, 1, 2, 1)]),
        ("tail-tile", "B2", 37, VALUES, "wrong-neutral-element tail-mask", [(1, 1, 1, 1, 1)]),
        ("output-not-rescaled", "D2", None, VALUES, "block-limit", [(1, 1, 1, 17, 1)]),
        ("masked-query", "D3", 96, VALUES, "zero-size unexplained", [(1, 1, 1, 0, 1)]),
        ("top-left", "H2", 184, VALUES, "off-by-one-mask wrong-index-map", [(1, 1, 1, 2, 1)]),
        ("modulo-group", "H4", 190, VALUES, "wrong-index-map", [(2, 4, 1, 1, 1)]),
    ], slow="tail-tile scale-of-padded"),
    *group("attention_window", attention.make_spec, "kv_heads heads queries keys features", [
        ("window-inclusive", "H3", 187, VALUES, "off-by-one-mask", [(1, 1, 1, 5, 1)]),
    ], window=4),
    *group("paged_decode", paged.make_spec, "batch blocks page pages features", [
        # The pitch is another number than any of the table's, so that a contiguous table is read elsewhere too.
        ("table-pitch", "A3", 20, READS | {"crash"}, "ignores-strides wrong-index-map", [(2, 2, 1, 2, 1)]),
        ("output-tile", "A3", 25, HOLES, "wrong-index-map racing-stores block-limit unwritten-output",
         [(1, 1, 1, 0, 17)]),
        ("value-tail", "B4", 45, READS, "reads-padding tail-mask nan-mishandled", [(1, 1, 2, 1, 1)]),
        ("zero-length", "C4", 81, HOLES, "zero-size unwritten-output", [(1, 1, 1, 0, 1)]),
    ], slow="table-pitch output-tile"),
    *group("cache_write", cache_write.make_spec, "blocks page tokens features", [
        ("ignores-row-stride", "A1", 5, READS, "ignores-strides", [(2, 1, 2, 1), (1, 2, 2, 1)]),
        ("allocator-page", "B3", 44, WRITES, "wrong-index-map out-of-bounds", [(2, 1, 1, 1), (1, 5, 1, 1)]),
        ("writes-skipped", "B3", None, WRITES, "out-of-bounds", [(0, 1, 1, 1)]),
        ("pairs-of-odd-width", "J1", 201, VALUES, "tail-mask needs-alignment", [(1, 1, 1, 1)]),
        ("pairs-of-odd-pitch", "J1", None, WRITES, "misaligned-access needs-alignment ignores-strides",
         [(2, 1, 1, 2), (1, 2, 1, 2)]),
    ], slow="ignores-row-stride writes-skipped"),
    *group("fast_path", fast_path.make_spec, "rows cols", [
        ("vectors-only", "J1", None, HOLES, "tail-mask unwritten-output needs-alignment", [(1, 1)]),
        ("output-pitch", "A3", 20, WRITES, "wrong-index-map out-of-bounds ignores-strides", [(2, 1)]),
    ]),
    *group("quant_int8", quant.make_spec, "rows groups", [
        ("scale-slot", "A3", None, WRITES, "wrong-index-map racing-stores unwritten-output", [(2, 2)]),
        ("truncates", "D1", None, VALUES, "unexplained", [(1, 1)]),
        ("no-floor", "D5", 105, VALUES, "eps-misplaced", [(1, 1)]),
        ("floors-scale", "D5", 107, VALUES, "eps-misplaced", [(1, 1)]),
        ("signed-max", "D5", None, VALUES, "unexplained", [(1, 1)]),
    ], slow="floors-scale signed-max truncates"),
    *group("quant_fp8", quant.make_spec, "rows groups", [
        ("rounds-twice", "D1", None, VALUES, "cast-order", [(1, 1)]),
        ("no-floor", "D5", 105, VALUES, "eps-misplaced", [(1, 1)]),
    ], fp8=True, slow="rounds-twice no-floor"),
    *group("quant_static", quant.make_static_spec, "n", [
        ("no-clamp", "D5", None, VALUES, "overflow", [(1,)]),
        # A scale that is a power of two, and beside it a number that makes a tie: larger sizes have both sooner.
        ("ties-away", "D1", None, VALUES, "unexplained", [(31,)]),
    ]),
    *group("nibbles", nibbles.make_spec, "n", [
        ("keeps-the-sign", "D1", None, VALUES, "unexplained overflow", [(1,)]),
    ]),
    *group("entropy", entropy.make_spec, "rows classes", [
        ("zero-times-infinity", "D7", None, VALUES, "unexplained", [(1, 2)]),
    ]),
    *group("gate", gate.make_spec, "tokens experts", [
        ("pads-with-zero", "B2", 37, VALUES, "wrong-neutral-element tail-mask", [(1, 3)]),
        ("nan-sentinel", "D6", 112, VALUES, "nan-mishandled", [(1, 2)]),
        ("second-slot", "D6", 114, HOLES, "unwritten-output stale-memory", [(1, 2)]),
        ("drops-ties", "H6", 195, VALUES, "unexplained", [(1, 2)]),
    ], slow="pads-with-zero"),
    *group("argmax", order.make_argmax_spec, "rows cols", [
        ("tile-local-index", "A3", 25, VALUES, "wrong-index-map block-limit", [(1, 65)]),
        ("ignores-nan", "D6", 109, VALUES, "nan-mishandled", [(1, 2)]),
        ("nan-of-one-sign", "D6", 109, VALUES, "nan-mishandled", [(1, 2)]),
        ("last-of-equals", "H6", None, VALUES, "unexplained", [(1, 2)]),
    ], slow="tile-local-index last-of-equals"),
    *group("cummax", order.make_cummax_spec, "rows cols", [
        ("ignores-nan", "D6", 110, VALUES, "nan-mishandled", [(1, 1)]),
    ]),
    *group("bag_mean", bag.make_spec, "vocab width total bags", [
        ("last-bag", "B5", None, HOLES, "off-by-one-mask unwritten-output", [(1, 1, 0, 1)]),
        ("empty-bag", "C4", None, VALUES, "zero-size", [(1, 1, 0, 1)]),
        ("sums-in-table-dtype", "D1", 92, VALUES, "low-precision-accumulation", [(4, 8, 16, 2), (2, 2, 32, 1)]),
        ("counts-padding", "H5", None, VALUES, "unexplained", [(2, 1, 2, 1)]),
    ], slow="sums-in-table-dtype empty-bag last-bag"),
    *group("cumsum", scan.make_spec, "rows cols", [
        ("no-carry", "C3", None, VALUES, "block-limit", [(1, 33)]),
        ("rows-by-division", "C4", 76, RAISES, "zero-size", [(0, 0)]),
    ]),
    *group("reverse_cumsum", scan.make_spec, "rows cols", [
        # With ordinary values no row of 4 shows it (30 draws), one in thirty of 5 does.
        ("total-minus-prefix", "D1", 90, VALUES, "low-precision-accumulation", [(1, 1), (1, 3), (1, 5)]),
    ], reverse=True),
    *group("column_sum", column_sum.make_spec, "rows cols", [
        ("floor-chunk", "C5", 83, VALUES, "tail-mask", [(1, 1)]),
        ("lost-update", "F1", 138, VALUES | {"repeat"}, "nondeterministic racing-stores", [(2, 1)]),
        ("any-order", "F2", 147, frozenset({"repeat"}), "nondeterministic", [(3, 1)]),
    ]),
    *group("column_sum_atomic", column_sum.make_spec, "rows cols", [
        ("row-mask-only", "B1", 32, WRITES, "out-of-bounds tail-mask", [(1, 1)]),
        ("atomic-without-mask", "B3", None, WRITES, "out-of-bounds tail-mask", [(1, 1)]),
        ("starts-from-anything", "B5", None, HOLES | {"bounds"}, "stale-memory", [(0, 1)]),
    ], atomic=True, slow="row-mask-only"),
)  # fmt: skip
