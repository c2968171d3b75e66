"""What operators of ATen are called with, by the operator's name; inputs are drawn in one dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.outside.survey.model import Draw

Make = Callable[[Draw], Sequence[Any]]


class Named(dict[str, Any]):
    """The keyword arguments of a call, last among its inputs."""


def call(function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    if inputs and isinstance(inputs[-1], Named):
        return function(*inputs[:-1], **inputs[-1])
    return function(*inputs)


def n(*shapes: tuple[int, ...]) -> Make:
    return lambda d: [d.normal(*shape) for shape in shapes]


def positive(*shapes: tuple[int, ...]) -> Make:
    return lambda d: [d.uniform(*shape, low=0.1, high=5.0) for shape in shapes]


def within(*shapes: tuple[int, ...]) -> Make:
    return lambda d: [d.uniform(*shape, low=-0.95, high=0.95) for shape in shapes]


def bits(*shapes: tuple[int, ...]) -> Make:
    return lambda d: [d.integers(-50, 50, *shape, dtype=torch.int32) for shape in shapes]


def truths(*shapes: tuple[int, ...]) -> Make:
    return lambda d: [d.mask(*shape) for shape in shapes]


def odd(d: Draw) -> list[Any]:
    """Numbers with infinities, zeros of both signs and a NaN among them."""
    x = d.normal(5, 33)
    x[0, :5] = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0])
    return [x]


def then(make: Make, *more: Any) -> Make:
    """The same inputs, and constants after them."""
    return lambda d: [*make(d), *more]


def rounded(d: Draw) -> list[Any]:
    """Few values, so that comparisons meet equals."""
    return [d.integers(-3, 4, 5, 33).to(d.dtype), d.integers(-3, 4, 5, 33).to(d.dtype)]


X = (5, 33)
ONE, TWO, THREE = n(X), n(X, X), n(X, X, X)
POSITIVE, WITHIN = positive(X), within(X)
AXIS = {"dim": 1}


def _index(d: Draw) -> list[Any]:
    return [d.normal(7, 33), 1, d.integers(0, 33, 7, 9)]


def _scatter(d: Draw) -> list[Any]:
    columns = torch.stack([d.permutation(33)[:9] for _ in range(7)])
    return [d.normal(7, 33), 1, columns, d.normal(7, 9)]


def _labelled(d: Draw) -> list[Any]:
    return [d.normal(7, 33).float().log_softmax(-1).to(d.dtype), d.integers(0, 33, 7)]


def _layer(d: Draw) -> list[Any]:
    return [d.normal(7, 33), [33], d.normal(33), d.normal(33), 1e-5]


def _layer_back(d: Draw) -> list[Any]:
    x, w, b = d.normal(7, 33), d.normal(33), d.normal(33)
    mean = x.float().mean(-1, keepdim=True)
    rstd = (x.float().var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
    return [d.normal(7, 33), x, [33], mean, rstd, w, b, [True, True, True]]


def _group_back(d: Draw) -> list[Any]:
    x = d.normal(3, 6, 35)
    wide = x.float().view(3, 3, -1)
    mean, rstd = wide.mean(-1), (wide.var(-1, unbiased=False) + 1e-5).rsqrt()
    return [d.normal(3, 6, 35), x, mean, rstd, d.normal(6), 3, 6, 35, 3, [True, True, True]]


def _batch(d: Draw) -> list[Any]:
    return [d.normal(7, 6, 9), d.normal(6), d.normal(6), torch.zeros(6), torch.ones(6), True, 0.1, 1e-5]


def _after(function: Callable[[Tensor], Tensor], *more: Any) -> Make:
    """An upstream gradient, and what the forward pass made."""

    def make(d: Draw) -> list[Any]:
        return [d.normal(*X), function(d.normal(*X).float()).to(d.dtype), *more]

    return make


def _conv(*shape: int) -> Make:
    """An image of that shape, a 3-wide kernel in each direction, a bias."""

    def make(d: Draw) -> list[Any]:
        rank = len(shape) - 2
        kernel = (4, shape[1], *(3,) * rank)
        return [d.normal(*shape), d.normal(*kernel, scale=0.3), d.normal(4), [2] * rank, [1] * rank, [1] * rank, 1]

    return make


def _pool_back(d: Draw) -> list[Any]:
    x = d.normal(2, 3, 9, 11)
    out, where = F.max_pool2d(x.float(), 3, 2, 1, return_indices=True)
    return [d.normal(*out.shape), x, [3, 3], [2, 2], [1, 1], [1, 1], False, where]


def makers() -> dict[str, Make | list[Make]]:
    """What each operator is called with."""
    pairwise = "add sub mul maximum minimum fmin hypot atan2 copysign logaddexp".split()
    compared = "eq ne lt le gt ge greater".split()
    simple = (
        "abs abs_ absolute arcsinh arcsinh_ asinh_ atan atan_ angle ceil ceil_ cos cos_ cosh cosh_ erf erf_ exp exp_ "
        "exp2 exp2_ expm1 expm1_ floor_ neg neg_ relu relu_ relu6 selu selu_ sgn_ sigmoid sigmoid_ silu silu_ sin sin_ "
        "sinh_ square square_ tan tan_ tanh tanh_ gelu gelu_ softplus softshrink log_sigmoid celu celu_ elu elu_ "
        "hardsigmoid hardswish_ i0 i0_ special_i1 special_i0e round round_ conj_physical zero zero_ zeros_like "
        "ones_like resolve_conj resolve_neg alias_copy lift_fresh_copy sum mean max min amax prod argmax argmin "
        "count_nonzero trace tril triu triu_ diag diag_embed"
    ).split()
    cases: dict[str, Make | list[Make]] = dict.fromkeys(simple, ONE)
    cases |= dict.fromkeys(
        "log log10 log10_ log1p_ rsqrt rsqrt_ sqrt sqrt_ reciprocal reciprocal_ digamma_".split(), POSITIVE
    )
    cases |= dict.fromkeys(("acos", "arctanh_"), WITHIN)
    cases |= dict.fromkeys(("logit", "logit_"), then(positive(X), 0.02))
    for name in ("logit", "logit_"):
        cases[name] = lambda d: [d.uniform(*X, low=0.05, high=0.95)]
    cases |= dict.fromkeys("isfinite isinf isnan isneginf signbit".split(), odd)
    cases["nan_to_num"] = then(odd, 1.0, 7.0, -7.0)
    for name in pairwise:
        suffix = ".Tensor" if name in ("add", "sub", "mul") else ""
        cases[name + suffix] = [TWO, n((5, 1), (33,)), then(ONE, 2.5)] if suffix else TWO
    cases |= dict.fromkeys(("add_.Tensor", "sub_.Tensor", "mul_.Tensor"), TWO)
    for name in compared:
        cases[f"{name}.Tensor"], cases[f"{name}.Scalar"] = rounded, then(lambda d: rounded(d)[:1], 1.0)
    for name in ("div", "divide", "true_divide"):
        for mark in ("", "_"):
            cases[f"{name}{mark}.Tensor"] = [lambda d: [d.normal(*X), d.uniform(*X, low=0.5, high=2.0)]]
            cases[f"{name}{mark}.Scalar"] = then(ONE, 2.5)
    for name in ("div", "divide"):
        for mark in ("", "_"):
            cases[f"{name}{mark}.Tensor_mode"] = [
                lambda d: [d.normal(*X), d.uniform(*X, low=0.5, high=2.0), Named(rounding_mode="floor")],
                lambda d: [d.normal(*X), d.uniform(*X, low=0.5, high=2.0), Named(rounding_mode="trunc")],
            ]
            cases[f"{name}{mark}.Scalar_mode"] = then(ONE, 0.75, Named(rounding_mode="floor"))
    for name in ("floor_divide", "floor_divide_.Tensor", "remainder.Tensor", "remainder_.Tensor"):
        cases[name] = lambda d: [d.normal(*X, scale=5), d.uniform(*X, low=0.5, high=2.0)]
    for name in ("floor_divide.Scalar", "floor_divide_.Scalar", "remainder.Scalar", "remainder_.Scalar"):
        cases[name] = then(n(X), 0.75)
    cases["remainder.Scalar_Tensor"] = lambda d: [3.0, d.uniform(*X, low=0.5, high=2.0)]
    for name in ("bitwise_and", "bitwise_or"):
        for mark in ("", "_"):
            cases[f"{name}{mark}.Tensor"], cases[f"{name}{mark}.Scalar"] = bits(X, X), then(bits(X), 12)
        cases[f"{name}.Scalar_Tensor"] = lambda d: [12, *bits(X)(d)]
    for name in ("__or__", "__ior__"):
        cases[f"{name}.Tensor"], cases[f"{name}.Scalar"] = bits(X, X), then(bits(X), 12)
    for name in ("bitwise_left_shift", "bitwise_right_shift"):
        cases[name] = lambda d: [d.integers(0, 50, *X, dtype=torch.int32), d.integers(0, 8, *X, dtype=torch.int32)]
    cases |= dict.fromkeys(("bitwise_not", "bitwise_not_"), bits(X))
    for name in ("logical_and", "logical_or", "logical_xor"):
        cases[name] = truths(X, X)
    cases |= dict.fromkeys(("logical_and_", "logical_or_"), truths(X, X))
    cases["logical_not"] = truths(X)
    cases |= {
        "all": truths(X), "any": truths(X), "all.dim": then(truths(X), 1), "any.dim": then(truths(X), 1),
        "all.dims": then(truths((3, 5, 7)), [0, 2]), "any.dims": then(truths((3, 5, 7)), [0, 2]),
        "_is_all_true": truths(X), "equal": lambda d: [x := d.normal(*X), x.clone()],
        "allclose": lambda d: [x := d.normal(*X), x.clone()], "isclose": rounded,
        "addcdiv": lambda d: [d.normal(*X), d.normal(*X), d.uniform(*X, low=0.5, high=2.0), Named(value=0.7)],
        "addcmul": then(THREE, Named(value=0.7)), "lerp.Tensor": THREE, "lerp_.Tensor": THREE,
        "lerp.Scalar": then(TWO, 0.3), "lerp_.Scalar": then(TWO, 0.3),
        "clamp": then(ONE, -0.5, 0.8), "clamp_": then(ONE, -0.5, 0.8), "clip": then(ONE, -0.5, 0.8),
        "clip_": then(ONE, -0.5, 0.8), "clamp.Tensor": THREE, "clamp_.Tensor": THREE,
        "clamp_min": then(ONE, 0.1), "clamp_min_": then(ONE, 0.1),
        "pow.Tensor_Tensor": lambda d: [d.uniform(*X, low=0.5, high=2.0), d.normal(*X)],
        "pow_.Tensor": lambda d: [d.uniform(*X, low=0.5, high=2.0), d.normal(*X)],
        "pow.Tensor_Scalar": then(POSITIVE, 1.5), "pow_.Scalar": then(POSITIVE, 1.5),
        "pow.Scalar": lambda d: [1.5, d.normal(*X)], "polar": positive(X, X),
        "threshold": then(ONE, 0.1, 2.0), "prelu": n((5, 6, 7), (6,)), "glu": then(n((5, 66)), -1),
        "where.self": lambda d: [d.mask(*X), d.normal(*X), d.normal(*X)],
        "masked_fill.Scalar": lambda d: [d.normal(*X), d.mask(*X), 2.5],
        "masked_fill_.Scalar": lambda d: [d.normal(*X), d.mask(*X), 2.5],
        "masked_fill.Tensor": lambda d: [d.normal(*X), d.mask(*X), d.normal()],
        "masked_fill_.Tensor": lambda d: [d.normal(*X), d.mask(*X), d.normal()],
        "masked_select": lambda d: [d.normal(*X), d.mask(*X)],
        "masked_scatter": lambda d: [d.normal(*X), d.mask(*X), d.normal(*X)],
        "masked_scatter_": lambda d: [d.normal(*X), d.mask(*X), d.normal(*X)],
        "fill.Scalar": then(ONE, 2.5), "fill_.Scalar": then(ONE, 2.5),
        "fill.Tensor": n(X, ()), "fill_.Tensor": n(X, ()),
        "full_like": then(ONE, 2.5), "copy_": TWO,
        # Reductions.
        "sum.dim_IntList": then(n((3, 5, 33)), [0, 2]), "mean.dim": then(n((3, 5, 33)), [1]),
        "max.dim": then(ONE, 1), "min.dim": then(ONE, 1), "aminmax": then(ONE, Named(dim=1)),
        "prod.dim_int": then(n((5, 7)), 1), "var": then(ONE, [1]), "var.dim": then(ONE, [1]),
        "var.correction": then(ONE, [1], Named(correction=1)), "std.correction": then(ONE, [1], Named(correction=1)),
        "var_mean.correction": then(ONE, [1], Named(correction=1)), "linalg_vector_norm": then(ONE, 2, [1]),
        "quantile": lambda d: [d.normal(*X).float(), torch.tensor([0.1, 0.5, 0.8]), 1],
        "cumsum": then(ONE, 1), "cummax": then(ONE, 1), "cummin": then(ONE, 1), "normed_cumsum": then(POSITIVE, 1),
        "sort": then(ONE, 1), "sort.stable": then(lambda d: rounded(d)[:1], Named(stable=True, dim=1)),
        "topk": then(ONE, 5, 1), "bincount": lambda d: [d.integers(0, 9, 70)],
        "unique_consecutive": lambda d: [d.integers(0, 3, 70)],
        # Products.
        "mm": n((5, 33), (33, 7)), "bmm": n((3, 5, 33), (3, 33, 7)), "addmm": n((7,), (5, 33), (33, 7)),
        "baddbmm": n((3, 5, 7), (3, 5, 33), (3, 33, 7)), "mv": n(X, (33,)), "dot": n((330,), (330,)),
        "vdot": n((330,), (330,)), "addmv": n((5,), X, (33,)), "addr": n(X, (5,), (33,)), "kron": n((3, 5), (7, 2)),
        # Normalisation, softmax, losses.
        "_softmax": then(ONE, -1, False), "_log_softmax": then(ONE, -1, False), "_safe_softmax": then(ONE, -1),
        "_softmax_backward_data": lambda d: [*_after(lambda x: x.softmax(-1))(d), -1, d.dtype],
        "_log_softmax_backward_data": lambda d: [*_after(lambda x: x.log_softmax(-1))(d), -1, d.dtype],
        "native_layer_norm": _layer, "native_layer_norm_backward": _layer_back,
        "native_group_norm": then(n((3, 6, 35), (6,), (6,)), 3, 6, 35, 3, 1e-5),
        "native_group_norm_backward": _group_back, "native_batch_norm": _batch,
        "rms_norm": then(lambda d: [d.normal(7, 33), [33], d.normal(33)], 1e-5),
        "_weight_norm_interface": n(X, (5, 1)), "mse_loss": TWO, "soft_margin_loss": lambda d: [
            d.normal(*X), d.integers(0, 2, *X).to(d.dtype) * 2 - 1],
        "margin_ranking_loss": lambda d: [d.normal(33), d.normal(33), d.integers(0, 2, 33).to(d.dtype) * 2 - 1],
        "nll_loss_forward": lambda d: [*_labelled(d), None, 1, -100],
        "sigmoid_backward": _after(torch.sigmoid), "tanh_backward": _after(torch.tanh), "silu_backward": TWO,
        "gelu_backward": TWO, "elu_backward": lambda d: [d.normal(*X), 1.0, 1, 1, False, d.normal(*X)],
        "threshold_backward": then(TWO, 0.1),
        "glu_backward": lambda d: [d.normal(*X), d.normal(5, 66), -1],
        # Shapes and indices.
        "cat": lambda d: [[d.normal(5, 3), d.normal(5, 33)], 1], "stack": lambda d: [[d.normal(*X), d.normal(*X)], 1],
        "hstack": lambda d: [[d.normal(5, 3), d.normal(5, 33)]], "vstack": lambda d: [[d.normal(3, 33), d.normal(*X)]],
        "flip": then(n((3, 5, 7)), [0, 2]), "roll": then(n((3, 5, 7)), [2, 3], [0, 2]),
        "repeat": then(ONE, [2, 3]), "tile": then(ONE, [2, 3]), "t_copy": ONE,
        "repeat_interleave.self_int": then(ONE, 3, 1),
        "repeat_interleave.self_Tensor": lambda d: [d.normal(5, 7), d.integers(0, 4, 5), 0],
        "repeat_interleave.Tensor": lambda d: [d.integers(0, 4, 9)],
        "constant_pad_nd": then(n((3, 5, 7)), [1, 2, 3, 0], 2.5), "pad": then(n((3, 5, 7)), [1, 2, 3, 0]),
        "reflection_pad1d": then(n((3, 5, 7)), [2, 3]), "reflection_pad2d": then(n((2, 3, 5, 7)), [2, 3, 1, 2]),
        "replication_pad1d": then(n((3, 5, 7)), [2, 3]),
        "replication_pad3d": then(n((2, 3, 4, 5, 6)), [1, 2, 2, 1, 0, 3]),
        "pixel_unshuffle": then(n((2, 3, 6, 8)), 2), "gather": _index, "scatter.src": _scatter,
        "scatter_.src": _scatter,
        "scatter_add_": lambda d: [d.normal(7, 33), 1, d.integers(0, 33, 7, 9), d.normal(7, 9)],
        "scatter.reduce": lambda d: [*_scatter(d), Named(reduce="add")],
        "scatter_.reduce": lambda d: [*_scatter(d), Named(reduce="multiply")],
        "index_select": lambda d: [d.normal(*X), 1, d.integers(0, 33, 9)],
        "index_add": lambda d: [d.normal(7, 33), 0, d.integers(0, 7, 9), d.normal(9, 33)],
        "index_add_": lambda d: [d.normal(7, 33), 0, d.integers(0, 7, 9), d.normal(9, 33)],
        "index.Tensor": lambda d: [d.normal(7, 33), [d.integers(0, 7, 9), d.integers(0, 33, 9)]],
        "index_put": lambda d: [d.normal(7, 33), [d.permutation(7), d.permutation(33)[:7]], d.normal(7)],
        "index_put_": lambda d: [d.normal(7, 33), [d.permutation(7), d.permutation(33)[:7]], d.normal(7)],
        "select_scatter": lambda d: [d.normal(*X), d.normal(5), 1, 3],
        "slice_scatter": lambda d: [d.normal(*X), d.normal(5, 9), 1, 3, 21, 2],
        "select_backward": lambda d: [d.normal(5), [5, 33], 1, 3],
        "slice_backward": lambda d: [d.normal(5, 9), [5, 33], 1, 3, 21, 2],
        "diagonal_backward": lambda d: [d.normal(5), [5, 33], 0, 0, 1],
        "nonzero": lambda d: [d.integers(0, 2, *X).to(d.dtype)], "one_hot": lambda d: [d.integers(0, 9, 33), 9],
        "embedding": lambda d: [d.normal(37, 19), d.integers(0, 37, 3, 5)],
        "embedding_dense_backward": lambda d: [d.normal(3, 5, 19), d.integers(0, 37, 3, 5), 37, -1, False],
        "isin.Tensor_Tensor": lambda d: [d.integers(0, 30, 70), d.integers(0, 30, 9)],
        "isin.Tensor_Scalar": lambda d: [d.integers(0, 9, 70), 3],
        "isin.Scalar_Tensor": lambda d: [3, d.integers(0, 9, 70)],
        # Images.
        "conv1d": _conv(2, 3, 17), "conv2d": _conv(2, 3, 9, 11), "conv3d": _conv(2, 3, 5, 6, 7),
        "avg_pool2d": then(n((2, 3, 9, 11)), [3, 3], [2, 2], [1, 1]),
        "max_pool2d_with_indices": then(n((2, 3, 9, 11)), [3, 3], [2, 2], [1, 1]),
        "upsample_nearest1d": then(n((2, 3, 7)), [17]), "upsample_nearest2d": then(n((2, 3, 7, 5)), [17, 11]),
        "upsample_nearest3d": then(n((2, 3, 4, 5, 3)), [7, 11, 5]),
        "upsample_linear1d": then(n((2, 3, 7)), [17], False),
        "upsample_bicubic2d": then(n((2, 3, 7, 5)), [17, 11], False),
        "_upsample_bicubic2d_aa": then(n((2, 3, 7, 5)), [17, 11], False),
        "_upsample_nearest_exact1d": then(n((2, 3, 7)), [17]),
    }  # fmt: skip
    # Factories, on the CPU.
    here = Named(device="cpu")

    def factory(*given: Any) -> Make:
        return lambda d: [*given, Named(here, dtype=d.dtype)]

    cases |= {
        "arange": factory(33), "arange.start": factory(3, 33), "arange.start_step": factory(3, 33, 2),
        "zeros": factory([5, 33]), "ones": factory([5, 33]), "full": factory([5, 33], 2.5),
        "eye": factory(9), "eye.m": factory(9, 7), "linspace": factory(0.5, 7.5, 33), "logspace": factory(0.5, 2.5, 33),
    }  # fmt: skip
    for name in "arcsinh atan2 ceil cosh copysign exp expm1 isneginf log10 logaddexp mm bmm round signbit".split():
        cases[f"{name}.out"] = _into(cases[name])
    cases |= {
        f"{name}.out": _into(cases[name])
        for name in "hardsigmoid i0 pixel_unshuffle reflection_pad1d reflection_pad2d replication_pad1d".split()
    }
    for name in "softshrink special_i0e square t_copy addmm addmv cumsum zero".split():
        cases[f"{name}.out"] = _into(cases[name])
    cases["where.self_out"] = _into(cases["where.self"])
    cases["sum.out"], cases["sum.IntList_out"] = _into(cases["sum"]), _into(cases["sum.dim_IntList"])
    cases["greater.out"], cases["greater.Scalar_out"] = _into(cases["greater.Tensor"]), _into(cases["greater.Scalar"])
    cases["fmin.out"] = _into(cases["fmin"])
    cases["fill.Scalar_out"], cases["fill.Tensor_out"] = _into(cases["fill.Scalar"]), _into(cases["fill.Tensor"])
    return cases


class Into(Named):
    """Keyword arguments to which ``out=`` is added: a tensor of the reference's shape and the inputs' dtype."""


def _into(make: Make | list[Make]) -> Make:
    first = make[0] if isinstance(make, list) else make

    def with_out(d: Draw) -> list[Any]:
        inputs = list(first(d))
        named = inputs.pop() if inputs and isinstance(inputs[-1], Named) else Named()
        return [*inputs, Into(named)]

    return with_out
