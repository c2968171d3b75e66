"""Honest kernels: right, each in its own way, so that an alarm about any of them is a false one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

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


def _looped_backwards(x: Any, weight: Any, eps: float) -> Any:
    return rms_norm.rms_norm_looped(x, weight, eps, backwards=True)


HONEST: Mapping[str, Callable[[], FusionSpec]] = {
    "rms_norm, four rows per program": rms_norm.make_spec,
    "rms_norm, Gemma casting": partial(rms_norm.make_spec, gemma=True),
    "rms_norm, one row per program": partial(rms_norm.make_spec, rows_per_program=1),
    "rms_norm, persistent programs": partial(rms_norm.make_variant, rms_norm.rms_norm_persistent),
    "rms_norm, loop over the row, 1 / sqrt": partial(rms_norm.make_variant, rms_norm.rms_norm_looped),
    "rms_norm, loop backwards": partial(rms_norm.make_variant, _looped_backwards),
    "rms_norm, contiguous() in the wrapper": partial(rms_norm.make_variant, rms_norm.rms_norm_by_copy),
    "rms_norm, refuses layouts and alignment": partial(
        rms_norm.make_variant, rms_norm.rms_norm_strict, rejects=(ValueError,)
    ),
    "rms_norm, two batch dimensions": rms_norm.make_nested_spec,
    "layer_norm, two passes over a tile": layer_norm.make_spec,
    "layer_norm, Welford by blocks": partial(layer_norm.make_variant, layer_norm.layer_norm_welford),
    "layer_norm, two kernels": partial(layer_norm.make_variant, layer_norm.layer_norm_two_kernels),
    "softmax, row in one tile": softmax.make_spec,
    "softmax, online with exp2": partial(softmax.make_spec, online=True),
    "softmax, declared in place": softmax.make_in_place_spec,
    "swiglu, strided": glu.make_swiglu_spec,
    "swiglu, flat on a copy": glu.make_flat_spec,
    "geglu, erf": glu.make_geglu_spec,
    "affine with relu": affine.make_spec,
    "affine": partial(affine.make_spec, relu=False),
    "softplus": partial(activation.make_spec, "softplus"),
    "log_sigmoid": partial(activation.make_spec, "log_sigmoid"),
    "negative reciprocal": partial(activation.make_spec, "negative_reciprocal"),
    "cross_entropy, online": cross_entropy.make_spec,
    "cross_entropy, log-sum-exp kept": partial(cross_entropy.make_spec, kind="lse"),
    "cross_entropy, split vocabulary": partial(cross_entropy.make_spec, kind="split"),
    "rope": rope.make_spec,
    "rope, declared in place": rope.make_in_place_spec,
    "rope, three sections": rope.make_sectioned_spec,
    "linear": linear.make_spec,
    "linear, backwards": partial(linear.make_spec, order="backwards"),
    "linear, bias first": partial(linear.make_spec, order="bias-first"),
    "linear, split inner dimension": partial(linear.make_spec, split=True),
    "attention, online": attention.make_spec,
    "attention, sliding window": partial(attention.make_spec, window=4),
    "attention, all keys in a tile": partial(attention.make_spec, two_pass=True),
    "paged decode": paged.make_spec,
    "cache write, in place, pairs where aligned": cache_write.make_spec,
    "quantisation to int8": quant.make_spec,
    "quantisation to int8, by the reciprocal": partial(quant.make_spec, reciprocal=True),
    "quantisation to float8": partial(quant.make_spec, fp8=True),
    "quantisation with a given scale": quant.make_static_spec,
    "top-2 gate": gate.make_spec,
    "argmax": order.make_argmax_spec,
    "running maximum": order.make_cummax_spec,
    "embedding bag": bag.make_spec,
    "running sum": scan.make_spec,
    "running sum backwards": partial(scan.make_spec, reverse=True),
    "column sum, two kernels": column_sum.make_spec,
    "column sum, atomics": partial(column_sum.make_spec, atomic=True),
}
