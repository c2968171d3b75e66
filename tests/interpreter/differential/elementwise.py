"""Operations on each element by itself, as kernels: arithmetic, mathematical functions, casts, mixed dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.interpreter.differential.harness import NO_CONSTANTS, Kernel, Result, Shape, language, load, widest
from tests.interpreter.differential.values import ALL, FLOAT8, FLOATS, INTEGERS, TORCH, is_float

# One with a dimension of one among them, which numpy's broadcasting must not take for the axis of the programs.
SHAPES: tuple[Shape, ...] = ((), (16,), (4, 8), (2, 1, 4))
_WIDE_MATH = ("fp32", "fp64")


def elementwise(
    name: str,
    dtype: str,
    expressions: Iterable[tuple[str, str]],
    *,
    operands: int = 2,
    shapes: Sequence[Shape] = SHAPES,
) -> Kernel:
    """A kernel of many expressions over ``a``, ``b`` and ``c`` (blocks of ``dtype``), each for every shape.

    An expression comes with its kind: ``"same"`` or that of ``Result``.
    """
    inputs = dict.fromkeys(("x", "y", "z")[:operands], dtype)
    body = []
    results = []
    for i, shape in enumerate(shapes):
        for variable, buffer in zip("abc", inputs, strict=False):
            body.append(f"{variable}{i} = {load(buffer, shape)}")
        for expression, kind in expressions:
            text = expression.format(a=f"a{i}", b=f"b{i}", c=f"c{i}", tl=language(dtype))
            results.append(Result(text, shape, widest(dtype) if kind == "same" else kind))
    return Kernel(f"{name}-{dtype}", results, inputs, "\n".join(body))


def _arithmetic() -> Iterable[Kernel]:
    for dtype in ALL:
        expressions = [(f"{{a}} {sign} {{b}}", "same") for sign in "+-*"]
        expressions += [("{a} / {b}", "float")] if dtype != "int1" and dtype not in FLOAT8 else []
        if dtype in INTEGERS:
            expressions += [(f"{{a}} {sign} {{b}}", "same") for sign in ("//", "%", "&", "|", "^")]
            expressions += [("tl.cdiv({a}, {b})", "same"), ("~{a}", "same"), ("3 - {a}", "same"), ("{a} * 5", "same")]
            expressions += [("{a} << ({b} & 7)", "same"), ("{a} >> ({b} & 7)", "same"), ("1 << ({b} & 7)", "integer")]
        elif dtype == "int1":
            expressions += [(f"{{a}} {sign} {{b}}", "same") for sign in "&|^"]
            expressions += [("~{a}", "same"), ("not {a}", "same")]
        else:
            expressions += [("-{a}", "same")]
            if dtype not in NO_CONSTANTS:
                expressions += [("{a} * 2.5 + 1", "same"), ("1.0 - {a}", "same")]
        if dtype in FLOATS:
            expressions += [("{a} % {b}", "float"), ("1 / {a}", "float")]
        yield elementwise("arithmetic", dtype, expressions)


def _comparisons() -> Iterable[Kernel]:
    for dtype in ALL:
        expressions = [(f"{{a}} {sign} {{b}}", "int1") for sign in ("<", "<=", ">", ">=", "==", "!=")]
        expressions += [("({a} < {b}) and ({a} != {b})", "int1"), ("({a} > {b}) or not ({a} == {b})", "int1")]
        expressions += [("({a} < {b}).logical_and({a} == {a})", "int1")]
        expressions += [("tl.where({a} < {b}, {a}, {b})", "same")]
        if dtype not in FLOAT8:
            # A cast to one bit is a comparison too; what is chosen among such truths is one again.
            expressions += [("tl.where({a} < {b}, {a} == {a}, {a}.to(tl.int1)) & ({a} != {b})", "int1")]
        expressions += [] if dtype in NO_CONSTANTS else [("tl.where({a} > {b}, {a}, 1)", "same")]
        yield elementwise("comparisons", dtype, expressions)


def _extremes() -> Iterable[Kernel]:
    for dtype in (*INTEGERS, *FLOATS):
        expressions = [(f"{name}({{a}}, {{b}})", "same") for name in ("tl.minimum", "tl.maximum", "min", "max")]
        expressions += [("tl.maximum({a}, 1)", "same"), ("tl.abs({a})", "same")]
        if is_float(dtype):
            every = "propagate_nan=tl.PropagateNan.ALL"
            expressions += [(f"tl.{name}({{a}}, {{b}}, {every})", "same") for name in ("minimum", "maximum")]
            expressions += [("tl.clamp({a}, {b}, {c})", "same"), (f"tl.clamp({{a}}, {{b}}, {{c}}, {every})", "same")]
            expressions += [("tl.clamp({a}, -1.5, 2.0)", "same"), ("tl.fma({a}, {b}, {c})", "same")]
        yield elementwise("extremes", dtype, expressions, operands=3)


def _math() -> Iterable[Kernel]:
    unary = "exp exp2 log log2 sin cos sqrt rsqrt erf floor ceil sigmoid".split()
    for dtype in _WIDE_MATH:
        expressions = [(f"tl.{name}({{a}})", "same") for name in unary]
        expressions += [("tl.math.fdiv({a}, {b})", "same"), ("tl.fma({a}, {b}, {c})", "same")]
        if dtype == "fp32":
            expressions += [("tl.sqrt_rn({a})", "same"), ("tl.div_rn({a}, {b})", "same")]
        yield elementwise("math", dtype, expressions, operands=3)
    for dtype in ("int32", "int64", "uint32", "uint64"):
        yield elementwise("umulhi", dtype, [("tl.umulhi({a}, {b})", "same")])


def _libdevice() -> Iterable[Kernel]:
    prelude = "from triton.language.extra import libdevice"
    one = (
        "acos acosh asin asinh atan atanh cbrt ceil cos cosh cospi erf erfc erfcinv erfinv exp exp10 exp2 expm1 floor "
    )
    one += (
        "lgamma log log10 log1p log2 logb nearbyint normcdf rcbrt rint round rsqrt sin sinh sinpi sqrt tan tanh tgamma "
    )
    one += "trunc abs"
    two = "atan2 copysign div_rn fdim fmod hypot nextafter pow remainder"
    for dtype in _WIDE_MATH:
        results = [(f"libdevice.{name}({{a}})", "same") for name in one.split()]
        results += [(f"libdevice.{name}({{a}}, {{b}})", "same") for name in two.split()]
        results += [("libdevice.fma({a}, {b}, {c})", "same"), ("libdevice.ldexp({a}, {b}.to(tl.int32) & 15)", "same")]
        results += [
            (f"libdevice.{name}({{a}}).to(tl.int32)", "integer") for name in ("isinf", "isnan", "signbit", "ilogb")
        ]
        if dtype == "fp32":
            results += [("libdevice.float2int_rz({a})", "integer"), ("libdevice.float_as_int({a} + 1.0)", "integer")]
            results += [("libdevice.add_ru({a}, {b})", "same"), ("libdevice.mul_rd({a}, {b})", "same")]
            results += [("libdevice.fast_expf({a})", "same"), ("libdevice.fast_dividef({a}, {b})", "same")]
        kernel = elementwise("libdevice", dtype, results, operands=3, shapes=((), (16,), (4, 8)))
        yield Kernel(kernel.name, kernel.results, kernel.inputs, kernel.body, prelude)
    for dtype in ("int32", "int64"):
        names = ("clz", "popc", "ffs", "brev", "abs")
        results = [(f"libdevice.{name}({{a}})", "integer") for name in names]
        results += [("libdevice.mulhi({a}, {b})", "integer")]
        kernel = elementwise("libdevice", dtype, results, shapes=((), (16,), (4, 8)))
        yield Kernel(kernel.name, kernel.results, kernel.inputs, kernel.body, prelude)


def _casts() -> Iterable[Kernel]:
    shapes: tuple[Shape, ...] = ((), (16,), (2, 4, 8))
    for dtype in ALL:
        body = [f"a{i} = {load('x', shape)}" for i, shape in enumerate(shapes)]
        results = [
            Result(f"a{i}.to({language(target)})", shape, target)
            for target in ALL
            # The language has no cast between float8 and integers.
            if is_float(dtype) == is_float(target) or {dtype, target}.isdisjoint(FLOAT8)
            for i, shape in enumerate(shapes)
        ]
        width = TORCH[dtype].itemsize
        results += [
            Result(f"a{i}.to({language(target)}, bitcast=True)", shape, target)
            for target in ALL
            if TORCH[target].itemsize == width and "int1" not in (dtype, target)
            for i, shape in enumerate(shapes)
        ]
        if dtype == "fp32":
            results += [
                Result(f'a{i}.to({language(target)}, fp_downcast_rounding="{rounding}")', shape, target)
                for target in ("fp16", "bf16")
                for rounding in ("rtz", "rtne")
                for i, shape in enumerate(shapes)
            ]
        yield Kernel(f"casts-{dtype}", results, {"x": dtype}, "\n".join(body))


def _promotions() -> Iterable[Kernel]:
    """Operands of two dtypes: the result depends on which of them is a block; some are the same in every program."""
    forms = {"a1 + b1": (8,), "a1 + b0": (8,), "a0 + b1": (8,), "a0 + b0": (), "a1 + v1": (8,), "u0 + b1": (8,)}
    for left in ALL:
        body = [f"a0, a1, u0 = {load('x', ())}, {load('x', (8,))}, {load('x', (), own=False)}"]
        results: list[Result] = []
        inputs = {"x": left}
        for i, right in enumerate(ALL):
            # Either order of each pair.
            if (i + ALL.index(left)) % 2 == (i < ALL.index(left)) and i != ALL.index(left):
                continue
            if (left in FLOAT8) != (right in FLOAT8) and not (is_float(left) and is_float(right)):
                continue
            inputs[f"y{i}"] = right
            kind = "float" if is_float(left) or is_float(right) else "integer"
            body += [f"b0_{i}, b1_{i} = {load(f'y{i}', ())}, {load(f'y{i}', (8,))}"]
            body += [f"v1_{i} = {load(f'y{i}', (8,), own=False)}"]
            for form, shape in forms.items():
                text = form.replace("b1", f"b1_{i}").replace("b0", f"b0_{i}").replace("v1", f"v1_{i}")
                results.append(Result(text, shape, kind))
        yield Kernel(f"promotions-{left}", results, inputs, "\n".join(body))


FAMILIES = (_arithmetic, _comparisons, _extremes, _math, _libdevice, _casts, _promotions)
