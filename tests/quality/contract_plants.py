"""Bugs against what a kernel promises beyond one right answer: in place, in any batch, however tuned, compiled or sent.

Some need a GPU, a second one, a compiler or very large offsets; where that is missing they are counted as not run.
"""

from __future__ import annotations

from tests.quality.kernels import (
    adam,
    batch_linear,
    conv1d,
    custom_op,
    divergence,
    dropout,
    launch,
    launch_count,
    residual_norm,
    sampling,
    softmax_grad,
    speculative,
    top_k,
    tuned,
    tuned_pair,
    wide,
)
from tests.quality.plant import GRADIENTS, HOLES, RAISES, READS, VALUES, WRITES, Plant, group

INVARIANCE = frozenset({"invariance"})
CONFIGS = frozenset({"configs"})
COMPILE = frozenset({"compile"})
DEVICE = frozenset({"device"})
REPEAT = frozenset({"repeat"})
LAUNCHES = frozenset({"launches"})

CONTRACT: tuple[Plant, ...] = (
    *group("residual_norm", residual_norm.make_spec, "rows hidden", [
        ("residual-pitch", "A3", 17, READS, "ignores-strides", [(2, 1), (2, 2)]),
        ("residual-not-written", "B5", None, HOLES, "unwritten-output unexplained", [(1, 1)]),
        ("adds-again", "E4", None, VALUES, "unexplained", [(1, 1)]),
    ], slow="residual-not-written adds-again"),
    *group("residual_norm_wide", residual_norm.make_spec, "rows hidden", [
        ("block-by-rows", "F3", 148, INVARIANCE, "batch-variant", [(3, 64)]),
    ], least=64),
    *group("batch_linear", batch_linear.make_spec, "rows cols inner", [
        ("splits-by-rows", "F3", 150, INVARIANCE, "batch-variant", [(3, 1, 33)]),
        ("scale-of-the-batch", "F3", None, INVARIANCE, "batch-variant", [(2, 2, 32)]),
    ]),
    *group("softmax_grad", softmax_grad.make_spec, "rows cols", [
        ("wide-tiles-for-many", "F3", 148, INVARIANCE, "batch-variant", [(3, 33)]),
        ("wide-tiles-in-backward", "F3", 148, INVARIANCE, "batch-variant", [(3, 33)]),
    ]),
    *group("top_k", top_k.make_spec, "rows cols", [
        ("pads-with-zero", "B2", 37, VALUES, "wrong-neutral-element tail-mask", [(1, 5)]),
        ("one-too-few", "B5", 114, HOLES, "off-by-one-mask unwritten-output", [(1, 4)]),
        ("other-path", "F3", 152, VALUES | INVARIANCE, "batch-variant", [(8, 4)]),
        ("drops-ties", "H6", 195, VALUES, "unexplained", [(1, 4)]),
    ], slow="one-too-few pads-with-zero drops-ties"),
    *group("conv1d", conv1d.make_spec, "batch channels seq width", [
        ("weight-of-first-channel", "A3", 17, VALUES, "wrong-index-map", [(1, 2, 1, 1)]),
        ("reads-before-start", "B1", 30, READS, "out-of-bounds reads-padding", [(1, 1, 1, 2)]),
        ("lines-on-axis-1", "C2", 70, RAISES, "block-limit raises", [(3, 22, 1, 1), (5, 13, 1, 1)]),
        ("short-sequence", "C5", 83, HOLES, "unwritten-output", [(1, 1, 1, 2)]),
        ("one-too-few", "B1", None, HOLES, "off-by-one-mask unwritten-output", [(1, 1, 1, 1)]),
    ], slow="weight-of-first-channel one-too-few"),
    *group("divergence", divergence.make_spec, "rows vocab", [
        ("teacher-pitch", "A3", 20, READS, "ignores-strides", [(2, 1), (2, 2)]),
        ("tail-counts", "B1", None, VALUES, "tail-mask wrong-neutral-element", [(1, 1)]),
        ("masks-by-product", "B4", 49, VALUES, "tail-mask wrong-neutral-element nan-mishandled", [(1, 1)]),
        ("no-clamp", "C4", 192, VALUES, "zero-size", [(0, 1), (1, 1)]),
        ("sums-in-input-dtype", "D1", 88, VALUES, "low-precision-accumulation", [(1, 2)]),
        ("log-of-probability", "D2", 95, VALUES, "missing-max-subtraction", [(1, 2)]),
        ("ignores-keep", "H5", 192, VALUES, "unexplained", [(1, 2)]),
        ("divides-by-rows", "H5", 191, VALUES, "unexplained", [(3, 2)]),
    ], slow="sums-in-input-dtype teacher-pitch tail-counts no-clamp ignores-keep"),
    *group("adam", adam.make_spec, "n", [
        ("moment-pitch", "A3", 17, WRITES, "ignores-strides", [(2,)]),
        ("second-not-kept", "B5", None, HOLES, "unwritten-output unexplained", [(1,)]),
        ("moment-rounded", "D1", None, VALUES, "low-precision-accumulation cast-order", [(1,)]),
        ("eps-inside", "D4", 104, VALUES, "eps-misplaced", [(1,)]),
        ("decoupled", "H7", 196, VALUES, "unexplained", [(1,)]),
        ("counts-from-zero", "H7", None, VALUES, "unexplained", [(1,)]),
    ], slow="counts-from-zero second-not-kept moment-rounded"),
    *group("leaky_tuned", tuned.make_leaky_spec, "n", [
        ("no-restore", "G1", 162, CONFIGS, "autotune-side-effect", [(1,)]),
    ]),
    *group("lion_tuned", tuned.make_lion_spec, "n", [
        ("restores-one-of-two", "G1", 160, CONFIGS, "autotune-side-effect", [(1,)]),
    ]),
    *group("conv_step_tuned", conv1d.make_step_spec, "batch channels past", [
        ("no-restore", "G1", 161, CONFIGS, "autotune-side-effect", [(1, 1, 1)]),
    ]),
    *group("row_sum_atomic_tuned", tuned.make_adder_spec, "rows cols", [
        ("no-reset", "G1", None, CONFIGS, "autotune-side-effect", [(1, 1)]),
    ]),
    *group("row_sum_tuned", tuned.make_sum_spec, "rows cols", [
        ("width-not-in-key", "G2", 165, VALUES | CONFIGS, "bad-config block-limit", [(1, 9)]),
        ("one-config-drops-tail", "G3", 168, VALUES | CONFIGS, "bad-config", [(1, 1)]),
        ("one-config-moves-by-64", "G3", None, CONFIGS, "bad-config", [(1, 129)]),
    ]),
    *group("row_shares_tuned", tuned_pair.make_spec, "rows cols", [
        (tuned_pair.DTYPE, "G3", None, VALUES | CONFIGS, "bad-config", [(1, 1)]),
        (tuned_pair.PAIR, "G3", None, VALUES | CONFIGS, "bad-config", [(1, 129)]),
        (tuned_pair.WARPS, "G3", None, WRITES | CONFIGS, "bad-config", [(1, 1)]),
    ], slow=f"{tuned_pair.DTYPE} {tuned_pair.PAIR}"),
    *group("wide", wide.make_spec, "rows cols", [
        ("product-in-int32", "C1", 55, WRITES, "int32-overflow", []),
        ("cast-after-product", "C1", 58, WRITES, "int32-overflow", []),
        ("column-in-int32", "C1", 67, WRITES, "int32-overflow", []),
    ], profile="large"),
    *group("custom_op", custom_op.make_spec, "batch rows cols", [
        ("fake-contiguous", "G4", 174, COMPILE, "wrong-fake ignores-strides", []),
        ("fake-dtype", "G4", None, COMPILE, "wrong-fake wrong-dtype", []),
        ("fake-shape", "G4", None, COMPILE, "wrong-fake wrong-structure", []),
    ]),
    *group("custom_bias", custom_op.make_bias_spec, "rows cols", [
        ("mutation-not-declared", "G4", 172, COMPILE, "operator-contract mutates-input", []),
    ]),
    *group("square", custom_op.make_square_spec, "rows cols", [
        ("backward-fake-follows-upstream", "G4", None, COMPILE, "wrong-fake", []),
        ("backward-fake-dtype", "G4", None, COMPILE, "wrong-fake wrong-dtype", []),
    ], slow="backward-fake-dtype"),
    *group("sized", custom_op.make_sized_spec, "batch rows cols", [
        ("width-is-constant", "G5", 178, COMPILE, "recompiles", []),
    ], needs="cuda"),
    *group("dropout", dropout.make_spec, "rows cols", [
        ("row-repeats", "F5", None, VALUES, "repeated-mask", []),
        ("block-repeats", "F5", None, VALUES, "repeated-mask", []),
        ("counter-by-four", "F5", None, VALUES, "repeated-mask", []),
        ("keeps-p", "F5", None, VALUES, "biased-mask", []),
        ("divides-by-zero", "F5", None, VALUES, "unexplained nan-mishandled", []),
        ("no-scale", "F5", None, VALUES, "unexplained", []),
        ("seed-ignored", "F5", 156, REPEAT, "seed-ignored", []),
        ("seed-plus-offset", "F5", None, REPEAT, "repeated-mask", []),
        ("mask-by-address", "F5", None, REPEAT | GRADIENTS, "mask-mismatch gradient-layout", []),
        ("other-seed-in-backward", "F5", None, GRADIENTS, "mask-mismatch", []),
        ("other-offset-in-backward", "F5", None, GRADIENTS, "mask-mismatch", []),
    ], slow="block-repeats counter-by-four divides-by-zero no-scale seed-plus-offset "
             "mask-by-address other-offset-in-backward"),
    *group("dropout_generator", dropout.make_generator_spec, "rows cols", [
        ("constant-seed", "F5", 156, REPEAT, "seed-ignored", []),
        ("peeks", "F5", 158, REPEAT, "repeated-mask", []),
    ], slow="peeks"),
    *group("sampling", sampling.make_spec, "rows vocab", [
        ("no-temperature", "F5", None, VALUES, "biased-sampling", []),
        ("row-repeats", "F5", None, VALUES, "biased-sampling", []),
        ("coarse-uniform", "F5", None, VALUES, "biased-sampling", []),
        ("exponential", "F5", None, VALUES, "biased-sampling", []),
        ("next-token", "F5", None, VALUES, "biased-sampling", []),
        ("one-too-many", "F5", None, VALUES, "biased-sampling", []),
        ("seed-ignored", "F5", None, REPEAT, "seed-ignored", []),
    ], slow="no-temperature row-repeats coarse-uniform exponential next-token"),
    *group("speculative", speculative.make_spec, "rows vocab", [
        ("same-clocks", "F5", None, VALUES, "biased-sampling", []),
        ("whole-row", "F5", None, VALUES, "biased-sampling", []),
    ], slow="whole-row"),
    *group("launch", launch.make_spec, "n", [
        ("side-stream", "F4", 153, DEVICE | {"honesty"}, "wrong-stream late-work", []),
        ("default-stream", "F4", None, DEVICE, "wrong-stream", []),
        ("synchronises", "K2", 209, DEVICE, "hidden-sync", []),
        ("looks-at-values", "K2", 208, DEVICE | LAUNCHES, "hidden-sync extra-launch", []),
        ("two-launches", "K1", None, LAUNCHES, "extra-launch", []),
    ], needs="cuda"),
    *group("launch_count", launch_count.make_spec, "rows hidden", [
        ("two-kernels", "K1", None, LAUNCHES, "extra-launch", [(1, 1)]),
        ("copies-strided", "K1", None, LAUNCHES, "extra-launch", [(2, 1), (1, 2)]),
        ("converts-scale", "K1", None, LAUNCHES, "extra-launch", [(1, 1)]),
        ("converts-result", "K1", None, LAUNCHES, "extra-launch", [(1, 1)]),
        ("clears-first", "K1", None, LAUNCHES, "extra-launch", [(1, 1)]),
        ("operators-of-torch", "K1", 206, LAUNCHES, "extra-launch", [(1, 1)]),
    ], slow="copies-strided converts-scale converts-result clears-first operators-of-torch"),
    *group("row_sum_launches", launch_count.make_sum_spec, "rows hidden", [
        ("clears-twice", "K1", None, LAUNCHES, "extra-launch", [(1, 1)]),
    ], slow="clears-twice"),
    *group("launch", launch.make_spec, "n", [
        ("no-device-guard", "I1", 198, DEVICE | RAISES | {"crash"}, "wrong-device", []),
    ], needs="two GPUs"),
)  # fmt: skip
