"""The operations of PyTorch that FlagGems replaces, each against PyTorch's own in float64, called with `aten_inputs`.

FlagGems registers its functions under the names of ATen's operators (``flag_gems._FULL_CONFIG``), and they take the
same arguments, so that the reference is ``torch.ops.aten``'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tests.outside.survey.aten_inputs import Into, Make, Named, call, makers
from tests.outside.survey.jit_functions import passing_for_jit_functions
from tests.outside.survey.model import FLOATS, Op, Package

# Where FlagGems has its own name or result for what the reference is called.
_REFERENCES: dict[str, Callable[..., Any]] = {
    "normed_cumsum": lambda x, dim: x.cumsum(dim) / x.sum(dim, keepdim=True),
    "pad": F.pad,
    "sort.stable": lambda x, stable, dim: torch.sort(x, stable=stable, dim=dim),
    "margin_ranking_loss": F.margin_ranking_loss,
    "one_hot": F.one_hot,
    "rms_norm": F.rms_norm,
    "equal": lambda a, b: torch.tensor(torch.equal(a, b)),
    "allclose": lambda a, b: torch.tensor(torch.allclose(a, b)),
    "unique_consecutive": torch.unique_consecutive,
    "_softmax_backward_data": lambda g, y, dim, dtype: torch.ops.aten._softmax_backward_data(g, y, dim, torch.float64),
    "_log_softmax_backward_data": lambda g, y, dim, dtype: torch.ops.aten._log_softmax_backward_data(
        g, y, dim, torch.float64
    ),
}

_INTEGER = ("bitwise", "__or__", "__ior__", "logical", "isin", "bincount", "one_hot", "unique")


ALL = ("float32", "float16", "bfloat16")
HALVES = ("float16", "bfloat16")
_CUDA = "refuses tensors that are not on a CUDA device, or hands them to PyTorch, by `device.type`"
UNDEFINED = (
    "A real bug of FlagGems 5.0.2: lanes that a masked load without `other` leaves undefined are added up. Right only "
    "where they happen to be zero."
)
_LIBDEVICE = (
    "A real bug of FlagGems 5.0.2: libdevice's division and fmod are called with the input's dtype, and exist for "
    "float32 and float64 alone. Compiled for sm_90 with Triton 3.7.1 such a call fails with the same KeyError."
)
_EXACT = (
    "A real bug of FlagGems 5.0.2: it takes column floor(i * in / out), which is upsample_nearest1d's; the exact one "
    "takes floor((i + 0.5) * in / out). Of 7 columns made 17, the third is 1 and not 0."
)
_OUT = (
    "A real bug of FlagGems 5.0.2: the wrapper hands `out=None` on to pointwise_dynamic, which makes a buffer of every "
    "keyword argument: 'NoneType' object has no attribute 'dtype', before any kernel."
)
_FLAT = "A real bug of FlagGems 5.0.2: mean and rstd come as (rows,), where ATen's contract has (rows, 1)."


def _each(names: Sequence[str], known: dict[str, str]) -> dict[str, dict[str, str]]:
    return dict.fromkeys(names, known)


_RANDOM = (
    "bernoulli_ exponential_ multinomial native_dropout normal normal_ rand rand_like randn randn_like uniform_".split()
)
_ABSENT: dict[str, dict[str, str]] = {
    **_each(
        "i0 i0.out maximum minimum where.self where.self_out embedding_dense_backward margin_ranking_loss "
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d _upsample_bicubic2d_aa".split(),
        {"all": _CUDA},
    ),
    **_each(
        "conj_physical resolve_conj resolve_neg".split(), {"all": "no Triton in it for what is not complex or lazy"}
    ),
    **_each(("scatter.reduce", "scatter_.reduce"), {"bfloat16": "refuses bfloat16"}),
}
_KNOWN: dict[str, dict[str, str]] = {
    **_each(
        "bmm bmm.out baddbmm _softmax_backward_data _log_softmax_backward_data native_layer_norm_backward "
        "_weight_norm_interface conv1d conv2d conv3d".split(),
        dict.fromkeys(ALL, UNDEFINED),
    ),
    "vdot": {"float32": UNDEFINED},
    **_each(
        [
            f"{name}{mark}.{kind}_mode"
            for name in ("div", "divide")
            for mark in ("", "_")
            for kind in ("Tensor", "Scalar")
        ]
        + ["floor_divide", "floor_divide.Scalar", "floor_divide_.Tensor", "floor_divide_.Scalar"],
        dict.fromkeys(HALVES, _LIBDEVICE),
    ),
    "_upsample_nearest_exact1d": dict.fromkeys(ALL, _EXACT),
    "native_layer_norm": dict.fromkeys(ALL, _FLAT),
    **_each(("bitwise_left_shift", "bitwise_right_shift"), {"float32": _OUT}),
}


def _base(name: str) -> str:
    return name.partition(".")[0]


def _reference(name: str) -> Callable[..., Any]:
    if name in _REFERENCES:
        return _REFERENCES[name]
    return getattr(torch.ops.aten, _base(name))  # type: ignore[no-any-return]


def _comparable(name: str, inputs: Sequence[Any], result: Any) -> Any:
    """Tensors; for an index, the element that it picks: which one of equals comes first is open."""
    if isinstance(result, bool):
        return torch.tensor(result)
    if name in ("sort", "topk", "cummax", "cummin", "max.dim", "min.dim"):
        values, where = result
        return values, inputs[0].gather(1, where.reshape(values.shape[0], -1))
    return result


def _op(name: str, label: str, function: Callable[..., Any], make: Make) -> Op:
    reference = _reference(name)

    def run(*inputs: Any) -> Any:
        if inputs and isinstance(inputs[-1], Into):
            shaped = call(_reference(_base(name)), [*inputs[:-1], Named(inputs[-1])])
            out = torch.empty_like(shaped)
            call(function, [*inputs[:-1], Named(inputs[-1], out=out)])
            return out
        return _comparable(name, inputs, call(function, inputs))

    def expected(*inputs: Any) -> Any:
        if inputs and isinstance(inputs[-1], Named):
            named = Named(inputs[-1])
            if "dtype" in named and named["dtype"].is_floating_point:
                named["dtype"] = torch.float64
            function = _reference(_base(name)) if isinstance(inputs[-1], Into) else reference
            return _comparable(name, inputs, call(function, [*inputs[:-1], named]))
        return _comparable(name, inputs, reference(*inputs))

    known = _KNOWN.get(name, {})
    dtypes = FLOATS[:1] if name.startswith(_INTEGER) or name in ("quantile", "_is_all_true", "polar") else FLOATS
    return Op(label, make, run, expected, covers=(name,), dtypes=dtypes, absent=_ABSENT.get(name, {}), bugs=known)


def ops() -> list[Op]:
    """Needs FlagGems, and a mended Triton imported before it."""
    functions = configured()
    found = []
    for name, made in makers().items():
        for i, make in enumerate(made if isinstance(made, list) else [made]):
            if name in functions:
                found.append(_op(name, name if i == 0 else f"{name}, {i + 1}", functions[name], make))
    return found


def configured() -> dict[str, Callable[..., Any]]:
    """The functions by the name of the operator that each replaces."""
    # With no GPU to be found it must be told whose the kernels are for.
    os.environ.setdefault("GEMS_VENDOR", "nvidia")
    with passing_for_jit_functions(torch):
        import flag_gems

        return {entry[0]: entry[1] for entry in flag_gems._FULL_CONFIG}


def others() -> dict[str, list[str]]:
    """What no entry covers, and why."""
    covered = {name for op in ops() for name in op.covers}
    left = set(configured()) - covered
    random = {name for name in left if _base(name) in _RANDOM}
    from flag_gems import fused

    return {
        "draws from PyTorch's CUDA generator, of which there is none without a device": sorted(random),
        "not tried": sorted(left - random),
        "not counted above and not tried, FlagGems' own fused operations": sorted(
            name for name in dir(fused) if callable(getattr(fused, name)) and not name.startswith("_")
        ),
    }


PACKAGE = Package("FlagGems", "flag_gems", ops, lambda: len(configured()), others)
