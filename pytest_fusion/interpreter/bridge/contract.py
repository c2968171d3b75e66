"""The private names of Triton that the interpreter uses, with their required parameters.

Triton guarantees none, so they are checked before any is replaced: an unknown interpreter could give wrong results.
"""

from __future__ import annotations

import inspect
from typing import Any

from pytest_fusion.errors import UnsupportedTritonError

TESTED = ("3.6.0", "3.7.1", "3.9.0")

_CACHE_BEFORE_38 = ("cache_modifier", "eviction_policy")

# Dotted name below triton.runtime.interpreter -> its known parameter lists without self; None: it must exist.
_INTERPRETER: dict[str, tuple[tuple[str, ...], ...] | None] = {
    "TensorHandle": (("data", "dtype", "attr"),),
    **dict.fromkeys(("InterpreterOptions", "InterpreterError", "TritonSemantic.load", "TritonSemantic.dot_scaled")),
    "TritonSemantic.broadcast_impl_value": (("lhs", "rhs"),),
    "TritonSemantic.binary_op_type_checking_impl": (
        ("lhs", "rhs", "allow_lhs_ptr", "allow_rhs_ptr", "arithmetic_check", "div_or_mod"),
    ),
    "TritonSemantic.cast": (("input", "dst_ty", "fp_downcast_rounding"),),
    "TritonSemantic.scalar_constant": (("value", "dtype"),),
    "tl.core.tensor": (("handle", "type"),),
    "tl.core.block_type": (("element_ty", "shape"),),
    "interpreter_builder.options": None,
    "interpreter_builder.set_grid_dim": (("nx", "ny", "nz"),),
    "interpreter_semantic.to_tensor": (("x", "check_type"),),
    "_get_np_dtype": (("tt_dtype",),),
    "_implicit_cvt": (("arg",),),
    "_patch_lang": (("fn",),),
    "_patch_lang_core": (("lang", "scope"),),
    "_patch_lang_tensor": (("tensor", "scope"),),
    "_LangPatchScope": ((),),
    "GridExecutor": (("fn", "arg_names", "grid", "pre_run_hooks"),),
    "GridExecutor._init_args_hst": (("args_dev", "kwargs"),),
    "GridExecutor._restore_args_dev": (("args_dev", "args_hst", "kwargs", "kwargs_hst"),),
    "InterpretedFunction": (("fn", "kwargs"),),
    "InterpretedFunction.run": (("args", "grid", "warmup", "kwargs"),),
    "InterpretedFunction.rewrite": ((),),
    "InterpretedFunction.__call__": (("args", "kwargs"),),
    "InterpreterBuilder.cast_impl": (("src", "dst_type"),),
    "InterpreterBuilder.create_fp_to_fp": (("src", "dst_type", "rounding_mode"),),
    "InterpreterBuilder.create_int_cast": (("src", "dst_type", "is_signed"),),
    "InterpreterBuilder.create_bitcast": (("src", "dst_type"),),
    "InterpreterBuilder.binary_op": (("lhs", "rhs", "op"),),
    "InterpreterBuilder.unary_op": (("arg", "op"),),
    "InterpreterBuilder.create_clampf": (("arg", "lo", "hi", "propagate_nans"),),
    "InterpreterBuilder.create_fma": (("x", "y", "z"),),
    "InterpreterBuilder.create_select": (("cond", "lhs", "rhs"),),
    "InterpreterBuilder.create_dot": (("a", "b", "d", "input_precision", "max_num_imprecise_acc"),),
    "InterpreterBuilder.create_histogram": (("data", "bins", "mask"),),
    "InterpreterBuilder.create_load": (("ptr", "_0", "_1", "is_volatile"), ("ptr", "cache_policy", "is_volatile")),
    "InterpreterBuilder.create_store": (("ptr", "val", "_0", "_1"), ("ptr", "val", "cache_policy")),
    "InterpreterBuilder.create_masked_load": (
        ("ptrs", "mask", "other", *_CACHE_BEFORE_38, "is_volatile"),
        ("ptrs", "mask", "other", "cache_policy", "is_volatile"),
    ),
    "InterpreterBuilder.create_masked_store": (
        ("ptrs", "value", "mask", *_CACHE_BEFORE_38),
        ("ptrs", "value", "mask", "cache_policy"),
    ),
    "InterpreterBuilder.create_descriptor_load": (
        ("desc", "indices", *_CACHE_BEFORE_38),
        ("desc", "indices", "cache_policy"),
    ),
    "InterpreterBuilder.create_atomic_rmw": (("rmwOp", "ptr", "val", "mask", "sem", "scope"),),
    "InterpreterBuilder.create_atomic_cas": (("ptr", "cmp", "val", "sem", "scope"),),
    "InterpreterBuilder.create_extern_elementwise": (("libName", "libPath", "symbol", "argList", "retType", "isPure"),),
    "InterpreterBuilder.create_inline_asm": (("inlineAsm", "constraints", "values", "type", "isPure", "pack"),),
    "InterpreterBuilder.get_all_ones_value": (("type",),),
    **{
        f"InterpreterBuilder.create_{name}": None
        for name in "fadd fsub fmul fdiv frem add sub mul sdiv udiv srem urem ashr umulhi minnumf maxnumf minimumf "
        "maximumf fcmpOLT fcmpUNE icmpSLT icmpULT icmpEQ erf rsqrt fabs fp_to_si fp_to_ui si_to_fp fp_trunc "
        "fp_ext".split()
    },
    **dict.fromkeys(("_interpreter.load", "_interpreter.store")),
    **{
        f"_ir.{name}": None
        for name in "ROUNDING_MODE.RTZ PROPAGATE_NAN.NONE PADDING_OPTION.PAD_NAN INPUT_PRECISION.IEEE ATOMIC_OP.FADD "
        "DESCRIPTOR_REDUCE_KIND.ADD ScaleDotElemTypeTY.E2M1".split()
    },
    **dict.fromkeys(("tl.core.is_builtin", "tl.core.tensor_descriptor_base")),
    "tl.core.dtype.to_ir": (("builder",),),
    "tl.str_to_ty": (("name", "c"),),
    **{f"tl.core.{name}": None for name in "reduce associative_scan map_elementwise builtin_max builtin_min".split()},
    **{
        f"tl.standard.{name}": None
        for name in "_sum_combine _prod_combine _xor_combine _or_combine _elementwise_max _elementwise_min "
        "_argmax_combine_tie_break_left _argmax_combine_tie_break_fast _argmin_combine_tie_break_left "
        "_argmin_combine_tie_break_fast".split()
    },
    "tl.extra.cuda.libdevice.tanh": None,
}

_AUTOTUNER: dict[str, tuple[tuple[str, ...], ...] | None] = {
    "Autotuner.run": (("args", "kwargs"),),
    "Autotuner._bench": (("args", "config", "meta"),),
    "Autotuner.prune_configs": (("kwargs",),),
    "JITFunction.run": (("args", "grid", "warmup", "kwargs"),),
    "JITFunction.is_gluon": ((),),
}


def violations(interpreter: Any, autotuner: Any) -> list[str]:
    """A sentence for every private name that is missing or has unknown parameters."""
    found = []
    for module, names in ((interpreter, _INTERPRETER), (autotuner, _AUTOTUNER)):
        for name, known in names.items():
            found += _violation(module, name, known)
    return found


def _violation(module: Any, name: str, known: tuple[tuple[str, ...], ...] | None) -> list[str]:
    value = module
    for part in name.split("."):
        if not hasattr(value, part):
            return [f"{module.__name__}.{name} is missing"]
        value = getattr(value, part)
    if known is None:
        return []
    parameters = tuple(p for p in inspect.signature(value).parameters if p != "self")
    if parameters in known:
        return []
    expected = " or ".join(f"({', '.join(k)})" for k in known)
    return [f"{module.__name__}.{name} takes ({', '.join(parameters)}), known is {expected}"]


def check(version: str, interpreter: Any, autotuner: Any) -> str | None:
    """``None`` for a tested release, a note for an untested one whose names all match.

    Raises ``UnsupportedTritonError`` naming the version, the tested ones and each name that does not match.
    """
    broken = violations(interpreter, autotuner)
    release = version.split("+", maxsplit=1)[0]
    if broken:
        shown = "; ".join(broken[:5]) + (f"; and {len(broken) - 5} more" if len(broken) > 5 else "")
        raise UnsupportedTritonError(
            f"Triton {version}: the CPU lane knows the interpreter of {', '.join(TESTED)}, and in this one {shown}. "
            f"Install one of those, or test on a GPU (--fusion-device cuda)"
        )
    if release in TESTED:
        return None
    return (
        f"Triton {version} was not tested with the CPU lane ({', '.join(TESTED)} were); every private name it needs is "
        "there with the parameters known, so it is used"
    )
