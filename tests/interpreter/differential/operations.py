"""The operations of the Triton language as kernels: each operation, each dtype, blocks of no to three dimensions.

Those on each element by itself are in `elementwise`; here are those that make, move and combine blocks, and memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tests.interpreter.differential import elementwise
from tests.interpreter.differential.harness import (
    NO_CONSTANTS,
    VERSION,
    Kernel,
    Result,
    Shape,
    flat,
    language,
    load,
    widest,
)
from tests.interpreter.differential.values import ALL, FLOAT8, FLOATS, INTEGERS, TORCH, is_float

# 3.6 concatenates in any order or not at all; 3.9 warns of that.
_CAT = "can_reorder=True" if VERSION < (3, 7) else "dim=0"
_FLAT_4_4 = flat((4, 4))
# The largest grid; buffers that all programs write to are made for it.
MOST = 70


def _uniform() -> Iterable[Kernel]:
    """Values that every program shares, alone and together with a program's own."""
    for dtype in ("fp32", "bf16", "int32", "uint8", "int1"):
        body = f"""
a = {load("x", (4, 8))}
u = {load("x", (4, 8), own=False)}
s = {load("x", ())}
r = {load("x", (), own=False)}
q = tl.arange(0, 8)
m = u == r
"""
        kind = widest(dtype)
        signs = "&|^" if dtype == "int1" else "+-*"
        shape = (4, 8)
        results = [
            Result(f"{left} {sign} {right}", shape, kind) for sign in signs for left, right in ("au", "ua", "us")
        ]
        results += [Result(f"r {sign} a", shape, kind) for sign in signs]
        results += [
            Result("u", shape, kind),
            Result("r", (), kind),
            Result("tl.where(m, a, u)", shape, kind),
            Result("tl.where(a == s, u, r)", shape, kind),
            Result("tl.where(q > 3, u, a)", shape, kind),
            Result("tl.where(q > p, 1, 2)", (8,), "integer"),
            Result("tl.sum(u.to(tl.int32), 1)", (4,), "integer"),
            Result("tl.trans(u)", (8, 4), kind),
            Result("tl.trans(a)", (8, 4), kind),
            Result("tl.join(a, u)", (4, 8, 2), kind),
            Result("tl.broadcast_to(s, 4, 8)", shape, kind),
            Result("tl.broadcast_to(r, 4, 8)", shape, kind),
            Result("tl.zeros_like(a)", shape, kind),
        ]
        yield Kernel(f"uniform-{dtype}", results, {"x": dtype}, body)


def _creation() -> Iterable[Kernel]:
    results = [Result("tl.arange(0, 16)", (16,), "integer"), Result("tl.arange(5, 13) + p", (8,), "integer")]
    for dtype in ALL:
        kind = widest(dtype)
        name = language(dtype)
        results.append(Result(f"tl.zeros([2, 4], {name})", (2, 4), kind))
        results.append(Result(f"tl.full([4], p.to(tl.float32).to({name}), {name})", (4,), kind))
        if dtype in NO_CONSTANTS:
            continue
        results.append(Result(f"tl.full([2, 2, 4], {1 if dtype == 'int1' else 3}, {name})", (2, 2, 4), kind))
        results.append(Result(f"tl.full([], 1, {name})", (), kind))
    results += [Result("tl.zeros([8], tl.float32) + 1.5", (8,), "float"), Result("tl.num_programs(0)", (), "integer")]
    results += [Result("tl.full([8], float('-inf'), tl.float32)", (8,), "float"), Result("p", (), "integer")]
    yield Kernel("creation", results)
    seeded = "s = tl.load(x + p * 64)\ni = tl.arange(0, 16)\nj = i[:, None] * 4 + tl.arange(0, 4)[None, :]"
    results = [Result(f"tl.{name}({seed}, i)", (16,), "float") for name in ("rand", "randn") for seed in ("s", "7")]
    results += [Result("tl.randint(s, i)", (16,), "integer"), Result("tl.rand(s, j)", (16, 4), "float")]
    results += [Result("tl.rand(3, p * 16 + i, n_rounds=6)", (16,), "float"), Result("tl.rand(s, p)", (), "float")]
    results += [Result(f"tl.randint4x(s, i)[{k}]", (16,), "integer") for k in range(4)]
    results += [Result(f"tl.rand4x(s, i)[{k}]", (16,), "float") for k in range(4)]
    results += [Result(f"tl.randn4x(p, i)[{k}]", (16,), "float") for k in range(4)]
    yield Kernel("random", results, {"x": "int32"}, seeded)


_COMBINE = """
@triton.jit
def larger(a, b):
    if a > b:
        result = a
    else:
        result = b
    return result


@triton.jit
def both(a, b):
    return a * 2 + b


@triton.jit
def recurrence(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def moments(m1, s1, n1, m2, s2, n2):
    delta = m2 - m1
    n = n1 + n2
    share = n2 / n
    return m1 + delta * share, s1 + s2 + delta * delta * n1 * share, n


@triton.jit
def first_largest(v1, i1, v2, i2):
    take = (v1 > v2) or ((v1 == v2) and (i1 < i2))
    return tl.where(take, v1, v2), tl.where(take, i1, i2)
"""


def _reduced(shape: Shape, axis: int, keep: bool) -> Shape:
    axis %= len(shape)
    return tuple(1 if i == axis else n for i, n in enumerate(shape) if keep or i != axis)


def _reductions() -> Iterable[Kernel]:
    shapes: tuple[Shape, ...] = ((16,), (4, 8), (2, 4, 8))
    for dtype in (*INTEGERS, "int1", *FLOATS):
        for tame in (False, True) if is_float(dtype) or dtype in {"int32", "uint8"} else (False,):
            body = []
            results = []
            kind = widest(dtype)
            names = ["sum", "max", "min"] + ([] if is_float(dtype) else ["xor_sum"])
            names = ["sum", "xor_sum", "reduce_or"] if dtype == "int1" else names
            for i, shape in enumerate(shapes):
                body.append(f"a{i} = {load('x', shape)}")
                for name in names:
                    results += [
                        Result(f"tl.{name}(a{i}, {axis})", _reduced(shape, axis, False), kind)
                        for axis in (*range(len(shape)), -1)
                    ]
                    results.append(Result(f"tl.{name}(a{i}, 0, keep_dims=True)", _reduced(shape, 0, True), kind))
                    if name != "reduce_or":
                        results.append(Result(f"tl.{name}(a{i})", (), kind))
                if dtype == "int1":
                    continue
                for name in ("argmax", "argmin"):
                    left = Result(f"tl.{name}(a{i}, -1)", _reduced(shape, -1, False), "integer")
                    fast = f"tl.{name}(a{i}, 0, tie_break_left=False, keep_dims=True)"
                    results += [left, Result(fast, _reduced(shape, 0, True), "integer")]
                for half in range(2):
                    text = f"tl.max(a{i}, 0, return_indices=True)[{half}]"
                    results.append(Result(text, _reduced(shape, 0, False), "integer" if half else kind))
                for name in ("cumsum", "cumprod"):
                    for axis in range(len(shape)):
                        reverse = axis == 0
                        results.append(Result(f"tl.{name}(a{i}, {axis}, reverse={reverse})", shape, kind))
            if dtype == "fp16":
                results.append(Result("tl.sum(a1, 1, dtype=tl.float32)", (4,), "float"))
            yield Kernel(
                f"reductions-{'tame' if tame else 'wild'}-{dtype}", results, {"x": dtype}, "\n".join(body), tame=tame
            )


def _custom_reductions() -> Iterable[Kernel]:
    for dtype in ("fp32", "bf16", "fp64", "int32", "uint8"):
        kind = widest(dtype)
        body = f"""
a, b = {load("x", (16,))}, {load("y", (16,))}
c, d = {load("x", (4, 8))}, {load("y", (4, 8))}
e = {load("x", (2, 4, 4))}
one = tl.full([16], 1.0, tl.float32)
af, bf = a.to(tl.float32), b.to(tl.float32)
h0, h1 = tl.associative_scan((af, bf), 0, recurrence)
k0, k1 = tl.associative_scan((c.to(tl.float32), d.to(tl.float32)), 1, recurrence, reverse=True)
mean, m2, count = tl.reduce((bf, tl.zeros([16], tl.float32), one), 0, moments)
best, where = tl.reduce((c, tl.broadcast_to(tl.arange(0, 8)[None, :], 4, 8)), 1, first_largest)
"""
        results = [
            Result("tl.reduce(a, 0, larger)", (), kind),
            Result("tl.reduce(c, 1, larger)", (4,), kind),
            Result("tl.reduce(e, 1, larger, keep_dims=True)", (2, 1, 4), kind),
            Result("tl.reduce(a, 0, both)", (), kind),
            Result("tl.reduce(d, 0, both)", (8,), kind),
            Result("tl.associative_scan(a, 0, larger)", (16,), kind),
            Result("tl.associative_scan(c, 0, larger, reverse=True)", (4, 8), kind),
            Result("tl.associative_scan(e, -1, larger)", (2, 4, 4), kind),
            *(Result(name, (16,), "float") for name in ("h0", "h1")),
            *(Result(name, (4, 8), "float") for name in ("k0", "k1")),
            *(Result(name, (), "float") for name in ("mean", "m2", "count")),
            Result("best", (4,), kind),
            Result("where", (4,), "integer"),
        ]
        yield Kernel(f"custom-{dtype}", results, {"x": dtype, "y": dtype}, body, _COMBINE, tame=True)


def _rearrangements() -> Iterable[Kernel]:
    for dtype in ("fp32", "bf16", "fp8e5", "int8", "int1", "uint32", "int64"):
        kind = widest(dtype)
        body = f"""
s, t = {load("x", ())}, {load("y", ())}
a, b = {load("x", (16,))}, {load("y", (16,))}
c, d = {load("x", (4, 8))}, {load("y", (4, 8))}
e, f = {load("x", (2, 4, 8))}, {load("y", (2, 4, 8))}
g0, g1 = tl.split(tl.reshape(a, [8, 2]))
h0, h1 = tl.split(tl.reshape(e, [4, 8, 2]))
w0, w1 = tl.split(tl.join(s, t))
back = 7 - tl.arange(0, 8)
pick = ({load("z", (4, 8))} & 3)
"""
        table: list[tuple[str, Shape]] = [
            ("tl.reshape(a, [4, 4])", (4, 4)),
            ("tl.reshape(c, 2, 2, 8)", (2, 2, 8)),
            ("c.reshape([32])", (32,)),
            ("tl.ravel(e)", (64,)),
            ("tl.view(a, [2, 8])", (2, 8)),
            ("tl.trans(c)", (8, 4)),
            ("c.T", (8, 4)),
            ("tl.trans(e, 2, 0, 1)", (8, 2, 4)),
            ("tl.permute(e, (1, 2, 0))", (4, 8, 2)),
            ("tl.trans(e, (0, 2, 1))", (2, 8, 4)),
            ("tl.join(s, t)", (2,)),
            ("tl.join(a, b)", (16, 2)),
            ("tl.join(c, d)", (4, 8, 2)),
            ("g0", (8,)),
            ("g1", (8,)),
            ("h0", (4, 8)),
            ("h1", (4, 8)),
            ("w0", ()),
            ("w1", ()),
            ("tl.interleave(a, b)", (32,)),
            ("tl.interleave(c, d)", (4, 16)),
            ("tl.interleave(s, t)", (2,)),
            (f"tl.cat(a, b, {_CAT})", (32,)),
            ("tl.expand_dims(a, 0)", (1, 16)),
            ("tl.expand_dims(c, -1)", (4, 8, 1)),
            ("tl.expand_dims(c, (0, 2))", (1, 4, 1, 8)),
            ("a[None, :, None]", (1, 16, 1)),
            ("c[:, None, :]", (4, 1, 8)),
            ("tl.broadcast_to(a[:, None], 16, 2)", (16, 2)),
            ("tl.broadcast_to(s, 2, 4)", (2, 4)),
            ("tl.broadcast(a[:, None], tl.zeros([1, 4], tl.int32))[0]", (16, 4)),
            ("tl.gather(a, 15 - tl.arange(0, 16), 0)", (16,)),
            ("tl.gather(c, pick, 0)", (4, 8)),
            ("tl.gather(c, pick * 2, 1)", (4, 8)),
            ("tl.gather(c, tl.broadcast_to(back[None, :], 4, 8), 1)", (4, 8)),
        ]
        if dtype != "int1":
            table += [("tl.flip(a, 0)", (16,)), ("tl.flip(c, 1)", (4, 8)), ("tl.flip(e, 1)", (2, 4, 8))]
        if dtype != "int1" and dtype not in FLOAT8:
            table += [("tl.sort(a)", (16,)), ("tl.sort(c, descending=True)", (4, 8)), ("tl.topk(a, 4)", (4,))]
            table += [("tl.topk(c, 2)", (4, 2)), ("tl.sort(e)", (2, 4, 8))]
        results = [Result(text, shape, kind) for text, shape in table]
        yield Kernel(f"rearrangements-{dtype}", results, {"x": dtype, "y": dtype, "z": "int32"}, body, tame=True)
        if is_float(dtype):
            yield Kernel(f"rearrangements-wild-{dtype}", results, {"x": dtype, "y": dtype, "z": "int32"}, body)
    body = f"""
a, c = {load("x", (16,))}, {load("x", (4, 8))}
m = {load("y", (16,))} > 0
"""
    results = [
        Result("tl.histogram(a, 8)", (8,), "integer"),
        Result("tl.histogram(a & 15, 16, mask=m)", (16,), "integer"),
        Result("tl.histogram(tl.arange(0, 16), 4)", (4,), "integer"),
        Result("tl.histogram(tl.zeros([16], tl.int32), 2)", (2,), "integer"),
        Result("tl.histogram(tl.arange(0, 16) & 3, 4, mask=m)", (4,), "integer"),
    ]
    for dtype in ("int32", "uint32"):
        for tame in (False, True):
            name = f"histogram-{'tame' if tame else 'wild'}-{dtype}"
            yield Kernel(name, results, {"x": dtype, "y": "int32"}, body, tame=tame)


def _dots() -> Iterable[Kernel]:
    for dtype in ("fp32", "fp64", "fp16", "bf16", "int8", "fp8e4nv", "fp8e5"):
        integer = dtype == "int8"
        kind = "integer" if integer else "float"
        wide = {"int8": "tl.int32", "fp64": "tl.float64"}.get(dtype, "tl.float32")
        body = f"""
a, b = {load("x", (4, 16))}, {load("y", (16, 4))}
u = {load("x", (4, 16), own=False)}
v = {load("y", (16, 4), own=False)}
g, h = {load("x", (2, 4, 8))}, {load("y", (2, 8, 4))}
acc = (tl.load(z + p * 64{_FLAT_4_4})).to({wide})
for k in range(3):
    acc = tl.dot(a, b, acc, out_dtype={wide}, input_precision="ieee")
"""
        common = f'out_dtype={wide}, input_precision="ieee"'
        results = [
            Result(f"tl.dot(a, b, {common})", (4, 4), kind),
            Result(f"tl.dot(a, v, {common})", (4, 4), kind),
            Result(f"tl.dot(u, b, {common})", (4, 4), kind),
            Result(f"tl.dot(u, v, {common})", (4, 4), kind),
            Result(f"tl.dot(g, h, {common})", (2, 4, 4), kind),
            Result(f"tl.dot(tl.trans(b), tl.trans(a), {common})", (4, 4), kind),
            Result("acc", (4, 4), kind),
        ]
        if dtype in ("fp16", "bf16", "fp8e5"):
            results.append(Result("tl.dot(a, b, out_dtype=tl.float16)", (4, 4), kind))
            start = "tl.dot(a, b, acc=acc.to(tl.float16), out_dtype=tl.float16)"
            results.append(Result(start, (4, 4), kind))
        inputs = {"x": dtype, "y": dtype, "z": "int32"}
        yield Kernel(f"dot-tame-{dtype}", results, inputs, body, tame=True)
        yield Kernel(f"dot-wild-{dtype}", results, inputs, body)


def _scaled_dots() -> Iterable[Kernel]:
    body = f"""
a, b = tl.load(x + p * 64{flat((2, 32))}), tl.load(y + p * 64{flat((32, 2))})
c = tl.load(z + p * 64{flat((2, 16))})
sa = (tl.load(s + p * 64{flat((2, 1))}) & 7) + 124
sb = (tl.load(t + p * 64{flat((2, 1))}) & 7) + 124
acc = tl.full([2, 2], 1.5, tl.float32)
"""
    results = [
        Result('tl.dot_scaled(a, sa, "e5m2", b, sb, "e4m3")', (2, 2), "float"),
        Result('tl.dot_scaled(c, sa, "e2m1", b, sb, "e4m3")', (2, 2), "float"),
        Result('tl.dot_scaled(a, sa, "e5m2", b, None, "e4m3", acc=acc)', (2, 2), "float"),
    ]
    inputs = {"x": "fp8e5", "y": "fp8e4nv", "z": "uint8", "s": "uint8", "t": "uint8"}
    yield Kernel("dot_scaled", results, inputs, body)


def _memory() -> Iterable[Kernel]:
    """Loads and stores in each dtype: masks, `other` as block, scalar and constant, addresses out of order."""
    for dtype in ALL:
        other, zero = ("2.0", "0.0") if is_float(dtype) else ("True" if dtype == "int1" else "2", "0")
        body = f"""
i = tl.arange(0, 16)
n = tl.load(z + p * 64) & 15
f = {load("x", (16,))}
m2 = (tl.arange(0, 4)[:, None] < (n & 3)) & (tl.arange(0, 8)[None, :] < 5)
order = (i * 5 + p) & 15
at2 = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
tl.store(kept + p * 16 + i, f, mask=i < n)
tl.store(moved + p * 16 + order, f)
tl.store(single + p, tl.load(y + p * 64 + 1), mask=n > 7)
tl.store(halves + p * 32 + at2, {other}, mask=m2)
"""
        results = [
            Result("tl.load(x + p * 64 + i, mask=i < n, other=f)", (16,), dtype),
            Result(f"tl.load(x + p * 64 + i, mask=i < n, other={other})", (16,), dtype),
            Result(f"tl.load(x + p * 64 + i, mask=i < n, other={zero})", (16,), dtype),
            Result("tl.load(x + p * 64 + i, mask=i < n, other=tl.load(y + p * 64))", (16,), dtype),
            Result("tl.load(x + p * 64 + i, mask=i < n)", (16,), dtype),
            Result(f"tl.load(x + i, mask=i < n, other={zero})", (16,), dtype),
            Result("tl.load(x + i)", (16,), dtype),
            Result(f"tl.load(x + p * 64, mask=n > 7, other={zero})", (), dtype),
            Result("tl.load(x + p * 64, mask=n > 7)", (), dtype),
            Result("tl.load(x + p * 64 + order)", (16,), dtype),
            Result(f"tl.load(x + p * 64 + at2, mask=m2, other={zero})", (4, 8), dtype),
            Result(f"tl.load(x + p * 64 + at2, mask=(n > 3), other={zero})", (4, 8), dtype),
            Result("tl.load(x + tl.zeros([8], tl.int32) + p)", (8,), dtype),
            Result("tl.load(x + p.to(tl.int64) * 64 + 63)", (), dtype),
        ]
        shared = {
            name: torch.zeros(size, dtype=TORCH[dtype])
            for name, size in (("kept", MOST * 16), ("moved", MOST * 16), ("single", MOST), ("halves", MOST * 32))
        }
        inputs = {"x": dtype, "y": dtype, "z": "int32"}
        yield Kernel(f"memory-{dtype}", results, inputs, body, shared=shared)


def _atomics() -> Iterable[Kernel]:
    """Each atomic once per program, on addresses of its own and on ones that all programs meet at."""
    for dtype in ("int32", "uint32", "int64", "uint64", "fp16", "bf16", "fp32", "fp64"):
        if is_float(dtype):
            names = ["add"] + (["xchg", "max", "min"] if dtype in ("fp32", "fp64") else [])
        else:
            names = "add max min and or xor xchg".split()
        lines = [f"a, s = {load('x', (16,))}, {load('x', ())}", "i = tl.arange(0, 16)", "m = (i + p) % 3 != 0"]
        shared = {}
        results = []
        start = torch.arange(MOST * 16) % 7
        for name in names:
            call = f"tl.atomic_{name}"
            lines += [
                f"own_{name} = {call}({name}_own + p * 16 + i, a)",
                f"met_{name} = {call}({name}_met + (i & 3), a)",
                f"masked_{name} = {call}({name}_masked + i, a, mask=m)",
                f"scalar_{name} = {call}({name}_scalar, s)",
                f"{call}({name}_maybe, s, mask=p % 2 == 0)",
            ]
            for place, size in (("own", MOST * 16), ("met", 4), ("masked", 16), ("scalar", 1), ("maybe", 1)):
                shared[f"{name}_{place}"] = start[:size].to(TORCH[dtype])
            results.append(Result(f"own_{name}", (16,), dtype))
            if is_float(dtype) and name in ("max", "min"):
                # Two integer atomics, for positive and for negative values: programs that meet take turns between them.
                continue
            results.append(Result(f"met_{name}", (16,), dtype))
            results += [Result(f"tl.where(m, masked_{name}, 0)", (16,), dtype), Result(f"scalar_{name}", (), dtype)]
        if not is_float(dtype):
            lines += [
                "one = tl.full([16], 3, a.dtype)",
                "own_cas = tl.atomic_cas(cas_own + p * 16 + i, one, a)",
                "scalar_cas = tl.atomic_cas(cas_scalar, tl.full([], 0, a.dtype), (p + 1).to(a.dtype))",
            ]
            shared["cas_own"], shared["cas_scalar"] = start.to(TORCH[dtype]), start[:1].to(TORCH[dtype])
            results += [Result("own_cas", (16,), dtype), Result("scalar_cas", (), dtype)]
        yield Kernel(f"atomics-{dtype}", results, {"x": dtype}, "\n".join(lines), shared=shared, tame=True)


def kernels() -> list[Kernel]:
    """Every kernel of the table."""
    families = (
        *elementwise.FAMILIES,
        _uniform,
        _creation,
        _reductions,
        _custom_reductions,
        _rearrangements,
        _dots,
        _scaled_dots,
        _memory,
        _atomics,
    )
    return [kernel for family in families for kernel in family()]
