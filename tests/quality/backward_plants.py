"""Bugs of kernels with a backward: what is sent up the graph, what is saved for it, what comes back."""

from __future__ import annotations

from tests.quality.kernels import (
    embedding_grad,
    fast_path,
    gated_norm,
    group_norm,
    layer_norm_grad,
    loss_grad,
    rms_norm_grad,
    rope_grad,
    softplus_grad,
    swiglu_grad,
)
from tests.quality.plant import BACKWARD_READS, BACKWARD_WRITES, GRADIENTS, HOLES, RAISES, VALUES, Plant, group

BACKWARD: tuple[Plant, ...] = (
    *group("rms_norm_grad", rms_norm_grad.make_spec, "rows hidden", [
        ("upstream-pitch", "A2", 11, BACKWARD_WRITES, "gradient-layout out-of-bounds racing-stores wrong-index-map",
         [(2, 1)]),
        ("upstream-contiguous", "A2", 14, BACKWARD_READS, "gradient-layout out-of-bounds", [(1, 2), (2, 1)]),
        ("upstream-like-input", "A2", 14, BACKWARD_READS, "gradient-layout", [(2, 2)]),
        ("mean-over-block", "A3", None, GRADIENTS, "tail-mask", [(1, 3)]),
        ("whole-strides-only", "B1", None, GRADIENTS | HOLES, "tail-mask unwritten-output", [(1, 1)]),
        ("sum-in-input-dtype", "D1", 86, GRADIENTS, "low-precision-accumulation", [(8, 4), (4, 8)]),
        ("writes-upstream", "E2", 122, GRADIENTS, "upstream-overwritten", [(1, 1)]),
        ("overwrites-scale", "E2", 125, GRADIENTS, "second-backward cached-answer stale-memory", [(1, 1)]),
        ("frozen-weight", "E3", 126, RAISES, "raises", [(0, 0)]),
        ("one-short", "E3", 130, RAISES, "raises", [(0, 0)]),
        ("bypassed", "E3", 129, GRADIENTS, "gradient-missing", [(0, 0)]),
        ("detached-weight", "E3", None, GRADIENTS, "gradient-missing", [(1, 1)]),
        ("no-weight-gradient", "E3", 132, GRADIENTS, "gradient-missing", [(1, 1)]),
        ("no-shared-term", "E4", None, GRADIENTS, "unexplained", [(1, 1)]),
    ], slow=(
        "upstream-like-input sum-in-input-dtype whole-strides-only upstream-contiguous mean-over-block one-short "
        "detached-weight no-shared-term"
    )),
    *group("layer_norm_grad", layer_norm_grad.make_spec, "rows hidden", [
        ("first-rows-only", "A3", 24, GRADIENTS | HOLES, "wrong-index-map unwritten-output", [(5, 1)]),
        ("collapses-rows", "B1", 28, GRADIENTS, "wrong-index-map batch-variant", [(2, 1)]),
        ("atomic-without-mask", "B1", 32, BACKWARD_WRITES, "out-of-bounds tail-mask", [(1, 3)]),
        ("floor-grid", "B1", None, GRADIENTS | HOLES, "tail-mask unwritten-output", [(1, 1)]),
        ("statistics-row-mask", "B3", 41, BACKWARD_READS, "out-of-bounds tail-mask", [(1, 1)]),
        ("starts-from-anything", "B5", None, BACKWARD_READS | HOLES, "stale-memory unwritten-output", [(0, 1)]),
        ("sums-in-weight-dtype", "D1", 88, GRADIENTS, "low-precision-accumulation", [(5, 8), (8, 4)]),
        ("needs-weight", "E3", 132, RAISES, "raises", [(0, 0)]),
        ("unweighted-branch", "E4", 137, GRADIENTS, "unexplained", [(1, 1)]),
        ("mean-not-subtracted", "E4", None, GRADIENTS, "unexplained", [(1, 1)]),
        ("stores-sums", "F1", 138, GRADIENTS | {"repeat"}, "racing-stores nondeterministic block-limit", [(5, 2)]),
    ], slow="collapses-rows floor-grid mean-not-subtracted starts-from-anything needs-weight"),
    *group("rope_grad", rope_grad.make_spec, "seq heads half", [
        ("guard-not-called", "A2", 12, BACKWARD_READS, "gradient-layout out-of-bounds", [(1, 2, 1), (2, 1, 1)]),
        # All heads store to the first one.
        ("first-head", "A3", 9, GRADIENTS | HOLES, "wrong-index-map unwritten-output racing-stores", [(1, 2, 1)]),
        # An expanded upstream gradient is one element that all programs read and write.
        ("turns-in-place", "E2", 122, GRADIENTS | {"repeat"}, "upstream-overwritten racing-load racing-stores",
         [(1, 1, 1), (2, 1, 1)]),
        ("raw-kernel", "E3", 129, GRADIENTS, "gradient-missing", [(0, 0, 0)]),
        ("turns-forward", "H1", None, GRADIENTS, "unexplained", [(1, 1, 1)]),
    ], slow="turns-in-place raw-kernel"),
    *group("fast_path_grad", fast_path.make_grad_spec, "rows cols", [
        ("vectors-only", "J1", None, GRADIENTS | HOLES, "tail-mask unwritten-output needs-alignment", [(1, 1)]),
    ]),
    *group("swiglu_grad", swiglu_grad.make_spec, "rows cols", [
        ("upstream-row-pitch-only", "A2", 12, BACKWARD_READS, "gradient-layout out-of-bounds", [(1, 2)]),
        ("output-row", "A3", 24, BACKWARD_WRITES, "wrong-index-map racing-stores unwritten-output", [(2, 1)]),
        ("output-tile", "A3", 25, BACKWARD_WRITES, "wrong-index-map racing-stores block-limit unwritten-output",
         [(1, 65)]),
        ("floor-blocks", "B1", None, GRADIENTS | HOLES, "tail-mask unwritten-output", [(1, 1)]),
        ("no-mask", "B3", 39, BACKWARD_WRITES, "out-of-bounds tail-mask", [(1, 1)]),
        ("activation-rounded", "D4", None, GRADIENTS, "cast-order", [(2, 32), (8, 8), (1, 64), (64, 1)]),
        ("overwrites-saved", "E2", 125, frozenset({"inputs"}), "mutates-input", [(1, 1)]),
        ("only-both", "E3", 126, GRADIENTS, "gradient-missing", [(1, 1)]),
        ("silu-slope-for-both", "E4", None, GRADIENTS, "unexplained", [(1, 1)]),
    ], slow="activation-rounded output-row output-tile floor-blocks only-both"),
    # Labels are drawn anew for each number of rows, and about half of the draws of one row ignore it.
    *group("loss_grad", loss_grad.make_spec, "rows vocab", [
        ("upstream-pitch", "A2", None, BACKWARD_READS, "gradient-layout out-of-bounds", [(2, 1)]),
        ("leaves-ignored", "B5", 51, BACKWARD_READS | HOLES, "unwritten-output stale-memory", [(2, 1)]),
        ("first-upstream", "E1", 118, GRADIENTS, "gradient-scale wrong-index-map", [(3, 2)]),
        ("ignores-upstream", "E1", 121, GRADIENTS, "gradient-scale", [(2, 2)]),
        ("forgets-mean", "E1", None, GRADIENTS, "gradient-scale", [(5, 2)]),
        ("scales-twice", "E1", None, GRADIENTS, "gradient-scale", [(2, 2)]),
        ("scales-in-place", "E2", 125, GRADIENTS, "second-backward cached-answer stale-memory", [(2, 2)]),
        ("gradient-into-logits", "E2", 122, frozenset({"inputs"}), "mutates-input", [(2, 1)]),
        ("no-grad-unbound", "E3", 126, RAISES, "raises", [(0, 1)]),
        ("forgets-target", "E4", None, GRADIENTS, "unexplained", [(5, 1)]),
        ("divides-by-all", "H5", 191, GRADIENTS, "gradient-scale", [(5, 2)]),
    ], slow="divides-by-all forgets-target scales-twice gradient-into-logits no-grad-unbound"),
    *group("gated_norm", gated_norm.make_spec, "rows hidden", [
        ("gate-of-first-row", "A3", 17, GRADIENTS, "wrong-index-map ignores-strides", [(2, 2)]),
        ("gate-required", "E3", 132, RAISES, "raises", [(1, 1)]),
        ("weight-before-gate", "E4", 133, GRADIENTS, "unexplained", [(1, 1)]),
        ("no-else", "E4", 137, GRADIENTS, "unexplained", [(1, 2)]),
        ("sigmoid-slope", "E4", None, GRADIENTS, "unexplained", [(1, 1)]),
    ], slow="gate-of-first-row gate-required sigmoid-slope"),
    *group("softplus_grad", softplus_grad.make_spec, "rows heads", [
        ("wrong-else", "E4", 135, GRADIENTS, "unexplained", [(1, 2)]),
        ("threshold-cuts", "E4", None, GRADIENTS, "unexplained", [(1, 1)]),
    ], slow="threshold-cuts"),
    *group("embedding_grad", embedding_grad.make_spec, "vocab width tokens", [
        ("no-mask", "B1", 32, BACKWARD_WRITES, "out-of-bounds tail-mask", [(1, 3, 1)]),
        ("starts-from-anything", "B5", None, BACKWARD_READS | HOLES, "stale-memory unwritten-output", [(1, 1, 0)]),
        ("sums-in-table-dtype", "D1", 88, GRADIENTS, "low-precision-accumulation",
         [(4, 4, 16), (2, 2, 32), (8, 1, 32)]),
        ("stores", "F1", 140, GRADIENTS | {"repeat"}, "racing-stores nondeterministic", [(2, 1, 4)]),
        ("pads-too", "H5", None, GRADIENTS, "unexplained", [(1, 1, 1)]),
    ], slow="sums-in-table-dtype no-mask starts-from-anything"),
    *group("embedding_grad", embedding_grad.make_spec, "vocab width tokens", [
        ("undeclared", "F2", 147, frozenset({"repeat"}), "nondeterministic", []),
    ], needs="cuda"),
    *group("group_norm", group_norm.make_spec, "batch per height width", [
        ("upstream-contiguous", "A2", 14, BACKWARD_READS, "gradient-layout out-of-bounds",
         [(2, 1, 1, 2), (1, 1, 2, 2)]),
        ("channel-of-first-group", "A3", 17, VALUES, "wrong-index-map", [(1, 1, 1, 1)]),
        ("mean-over-channels", "A3", None, GRADIENTS, "unexplained", [(1, 2, 1, 1)]),
        ("padded-variance", "B1", 26, VALUES, "tail-mask wrong-neutral-element", [(1, 1, 1, 3)]),
        ("size-before-flattening", "B3", 38, HOLES, "unwritten-output wrong-index-map", [(1, 1, 2, 1)]),
        ("small-buffer", "B3", 38, BACKWARD_WRITES | RAISES, "raises out-of-bounds", [(1, 1, 2, 1)]),
        ("sums-rounded", "D1", 88, GRADIENTS, "low-precision-accumulation cast-order", [(2, 1, 2, 4), (2, 1, 8, 2)]),
    ], slow="sums-rounded mean-over-channels upstream-contiguous padded-variance channel-of-first-group"),
)  # fmt: skip
