"""Kernels whose programs part ways: branches, loops and returns that depend on the program or on what it loaded."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tests.interpreter.differential.harness import VERSION, Kernel, Result, flat, load

# The largest grid; buffers that all programs write to are made for it.
MOST = 300

_HEAD = f"""
s, t = {load("x", ())}, {load("y", ())}
a, b = {load("f", (8,))}, {load("g", (8,))}
"""
_INPUTS = {"x": "int32", "y": "int32", "f": "fp32", "g": "fp32"}

_FUNCTIONS = """
@triton.jit
def sign(value):
    if value > 0:
        return 1
    if value < 0:
        return -1
    return 0


@triton.jit
def split_way(value, block):
    if value % 3 == 0:
        return block * 2.0, value
    else:
        return block - 1.0, value + 7


@triton.jit
def count_down(value, limit=5):
    turns = 0
    while value > 0:
        value -= 1
        turns += 1
        if turns == limit:
            return turns * 100
    return turns


@triton.jit
def chosen(value, first, second):
    return first if value > 0 else second


@triton.jit
def quadrupled(value):
    value *= 2
    return doubled(value)


@triton.jit
def doubled(value):
    return value + value
"""

_INT, _BLOCK = ((), "integer"), ((8,), "float")

# Name -> statements after the loads of s and t (int32, from -4 to 4), a and b (8 floats), then what is stored.
_PROGRAMS: dict[str, tuple[str, dict[str, tuple[tuple[int, ...], str]]]] = {
    "if-program": (
        """
if p % 2 == 0:
    v = a + 1.0
else:
    v = a - b
""",
        {"v": _BLOCK},
    ),
    "if-loaded": (
        """
v = a
w = s
if s > t:
    v = v + b
    w = w * 2
elif s == t:
    w = -w
else:
    v = tl.exp(b)
if s > 2:
    v = v * 2.0
""",
        {"v": _BLOCK, "w": _INT},
    ),
    "if-uniform": (
        """
v = a
if n > 3:
    v = v + b
else:
    v = v * b
if n > 300:
    v = v * 0.0
""",
        {"v": _BLOCK},
    ),
    "if-nested": (
        """
v = a
w = 0
if s > 0:
    w = 1
    if t > 0:
        w = w + 2
        if p % 2 == 1:
            v = v * 3.0
        else:
            w = w + 4
    else:
        v = v - 1.0
else:
    if t > 2:
        w = 8
    v = tl.where(b > 0, v, w)
""",
        {"v": _BLOCK, "w": _INT},
    ),
    "if-logic": (
        """
w = 0
if s > 0 and t > 0:
    w += 1
if s > 0 or not t > 0:
    w += 2
if (s > 0) & (p < 3):
    w += 4
if s:
    w += 8
if not s:
    w += 16
if tl.sum((a > 0).to(tl.int32)) > 3:
    w += 32
""",
        {"w": _INT},
    ),
    "ternary": (
        """
v = a if s > 0 else b
w = s if s > t else (t if p > 1 else 9)
k = 1 if n == 4 else 2
u = tl.sum(a) if s > 0 else 0.0
""",
        {"v": _BLOCK, "w": _INT, "k": _INT, "u": ((), "float")},
    ),
    "range-uniform": (
        """
v = a
w = 0
for i in range(n):
    v = v + b * i
    w += i * i
for i in range(1, 9, 3):
    w = w * 2 + i
for i in range(n, -1, -2):
    w = w * 3 - i
for i in tl.range(0, n, num_stages=2):
    v += i
for i in tl.static_range(3):
    v = v * (i + 1)
for i in range(0):
    w = 77
""",
        {"v": _BLOCK, "w": _INT},
    ),
    "range-divergent": (
        """
v = a
w = 0
for i in range(s):
    v = v + b
    w = w * 10 + i
for i in range(s, t):
    v = v * 0.5
    w += i
for i in range(t, s, -2):
    w = w * 3 + i
for i in range(0, s + 5, p % 3 + 1):
    w ^= i
for i in tl.range(p % 4, 6):
    w += i.to(tl.int32) << 2
""",
        {"v": _BLOCK, "w": _INT},
    ),
    "range-nested": (
        """
v = a
w = 0
for i in range(s + 2):
    for j in range(i):
        w = w * 3 + i - j
        if j == t:
            v = v + 1.0
    for j in range(t):
        v = tl.maximum(v, b * j)
    w += i
""",
        {"v": _BLOCK, "w": _INT},
    ),
    "range-wide": (
        """
start = s.to(tl.int64) * 3000000000
w = t.to(tl.int64)
for i in range(start, start + t):
    w ^= i
""",
        {"w": _INT},
    ),
    "while": (
        """
k = tl.abs(s) * 7 + p + 1
turns = 0
v = a
while k != 1:
    if k % 2 == 0:
        k = k // 2
    else:
        k = 3 * k + 1
        v = v + b
    turns += 1
m = s
while (m < 5) and (tl.sum(v) == tl.sum(v)):
    m += 1
    for j in range(m):
        turns += j
while n > 100:
    m = 1000
""",
        {"turns": _INT, "v": _BLOCK, "m": _INT},
    ),
    "tuples": (
        """
x0, x1 = s, t
low, high = a, b
pair = (s, a)
for i in range(p % 5 + 2):
    x0, x1 = x1, x0 + x1
    low, high = tl.minimum(low, high), tl.maximum(low, high) - i
    if x0 > x1:
        low, high = high, low
        pair = (x0, low)
first, second = pair
""",
        {"x0": _INT, "x1": _INT, "low": _BLOCK, "high": _BLOCK, "first": _INT, "second": _BLOCK},
    ),
    "functions": (
        """
v, w = split_way(s, a)
u = sign(t) * 10 + sign(s)
c = count_down(s + 3)
d = count_down(p, 3)
e = chosen(t, a, b)
q = quadrupled(s) + quadrupled(tl.sum(a)).to(tl.int32)
if s > 0:
    u += sign(t - 1)
    v, w = split_way(t, v)
for i in range(t):
    c += count_down(i, s)
""",
        {"v": _BLOCK, "w": _INT, "u": _INT, "c": _INT, "d": _INT, "e": _BLOCK, "q": _INT},
    ),
    "early-return": (
        """
v = a
if s > 2:
    return
for i in range(t):
    v = v + i
if p % 3 == 1:
    tl.store(seen + p, 5)
    return
tl.store(seen + p, 9)
if n > 100:
    return
""",
        {"v": _BLOCK},
    ),
    "return-in-branches": (
        """
v = a + s
if s > 0:
    if t > 0:
        tl.store(seen + p, 1)
        return
    v = v * 2.0
else:
    if t < -1:
        tl.store(seen + p, 2)
        return
    v = v * 3.0
    if p == 1:
        return
""",
        {"v": _BLOCK},
    ),
    "branch-memory": (
        f"""
v = a
far = p * 1000000
if p == 0:
    v = tl.load(f + far{flat((8,))})
if s > 0:
    v = v + tl.load(g + p * 64 + s{flat((8,))})
    tl.store(seen + p, s)
elif s < -2:
    tl.store(seen + p, 100 + tl.load(seen + p))
else:
    tl.atomic_add(total, 1)
""",
        {"v": _BLOCK},
    ),
    "loop-memory": (
        f"""
at = f + p * 64{flat((8,))}
acc = tl.zeros([8], tl.float32)
for i in range(tl.abs(s)):
    acc += tl.load(at)
    at += 8
    tl.store(seen + p, i)
k = tl.abs(t)
while k > 0:
    tl.atomic_add(total, k)
    tl.store(seen + p, tl.load(seen + p) + k)
    k -= 1
last = tl.load(at)
""",
        {"acc": _BLOCK, "last": _BLOCK},
    ),
    "loop-pointers": (
        f"""
here, there = f + p * 64, g + p * 64
v = a
for i in range(tl.abs(t)):
    here, there = there, here + 3
    v += tl.load(here{flat((8,))})
which = here if s > 0 else there
last = tl.load(which + 1)
""",
        {"v": _BLOCK, "last": ((), "float")},
    ),
    "branch-blocks": (
        """
v = tl.reshape(a, [2, 4])
r = 0.0
i = 0
if s > 0:
    v = tl.trans(tl.reshape(b, [4, 2]))
    r = tl.max(a)
    i = tl.argmax(b, 0)
else:
    v = tl.sort(v)
    r = tl.sum(b)
for k in range(t):
    v = tl.cumsum(v, 1) * 0.25
    r = tl.sum(tl.sum(v, 0), 0)
y2 = tl.dot(v, tl.trans(v), input_precision="ieee")
""",
        {"v": ((2, 4), "float"), "r": ((), "float"), "i": _INT, "y2": ((2, 2), "float")},
    ),
    "branch-dtypes": (
        """
h = a.to(tl.float16)
m = a > b
u = s.to(tl.uint8)
f8 = a.to(tl.float8e5)
if s > 0:
    h = h * 3.0
    m = m & (b > 0)
    u = u + 250
    f8 = b.to(tl.float8e5)
for i in range(t):
    h = h + i
    m = ~m
    u = u * 2
""",
        {"h": _BLOCK, "m": ((8,), "int1"), "u": ((), "uint8"), "f8": _BLOCK},
    ),
    "constants": (
        """
tl.static_assert(a.dtype == tl.float32)
tl.static_assert(a.shape[0] == 8, "eight of them")
tl.assume(n > 0)
i = tl.multiple_of(s * 8, 8)
tl.debug_barrier()
w = 0
v = a
if a.dtype == tl.float32:
    v = a + 1.0
if s > 0:
    w = 1
    zero = 0.0
    v = v + zero
k = 3
for j in range(s):
    k = j
""",
        {"i": _INT, "v": _BLOCK, "w": _INT, "k": _INT},
    ),
}


def _branching() -> Iterable[Kernel]:
    for name, (body, stored) in _PROGRAMS.items():
        results = [Result(text, shape, kind) for text, (shape, kind) in stored.items()]
        shared = {"seen": torch.zeros(MOST, dtype=torch.int32), "total": torch.zeros(1, dtype=torch.int32)}
        scalars = {"n": 4}
        yield Kernel(name, results, _INPUTS, _HEAD + body.strip("\n"), _FUNCTIONS, True, shared, scalars)


def _descriptors() -> Iterable[Kernel]:
    """Tensor descriptors whose blocks reach over the edge, at places that differ between programs."""
    for dtype in ("fp32", "bf16", "int8"):
        columns = {"fp32": 4, "bf16": 8, "int8": 16}[dtype]
        body = f"""
s = tl.load(t + p * 64) & 3
source = tl.make_tensor_descriptor(x + p * 64, [3, {columns}], [{columns}, 1], [4, {columns}])
target = tl.make_tensor_descriptor(kept + p * 64, [4, {columns}], [{columns}, 1], [4, {columns}])
v = source.load([s, 0])
target.store([p % 3, 0], v)
if s > 1:
    v = source.load([0, 0])
for i in range(s):
    v = v + source.load([i, 0])
"""
        shared = {
            "kept": torch.zeros(
                MOST * 64, dtype=getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}.get(dtype, dtype))
            )
        }
        kind = "integer" if dtype == "int8" else "float"
        results = [Result("v", (4, columns), kind)]
        yield Kernel(f"descriptors-{dtype}", results, {"x": dtype, "t": "int32"}, body, tame=True, shared=shared)
    body = """
s = tl.load(t + p * 64) & 3
source = tl.make_block_ptr(x + p * 64, (6, 7), (8, 1), (0, s), (4, 8), (1, 0))
v = tl.load(source, boundary_check=(0, 1), padding_option="zero")
for i in range(s):
    source = tl.advance(source, (1, p % 2))
    v += tl.load(source, boundary_check=(0, 1), padding_option="zero")
target = tl.make_block_ptr(kept + p * 64, (5, 8), (8, 1), (s, 0), (4, 8), (1, 0))
tl.store(target, v, boundary_check=(0, 1))
"""
    if VERSION < (3, 8):
        shared = {"kept": torch.zeros(MOST * 64)}
        results = [Result("v", (4, 8), "float")]
        yield Kernel("block-pointers", results, {"x": "fp32", "t": "int32"}, body, tame=True, shared=shared)


def kernels() -> list[Kernel]:
    """Every kernel of this table."""
    return [*_branching(), *_descriptors()]
