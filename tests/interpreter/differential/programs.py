"""Random programs: statements over a typed pool of variables, with branches and loops that programs do not agree on."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeVar

import torch
from hypothesis import strategies as st

from tests.interpreter.differential.harness import Kernel, Result, Shape, language, load, widest
from tests.interpreter.differential.values import is_float

# Loop bounds are cut to three turns, so the deepest nest takes nine.
_DEPTH = 2
# Sixty-four elements that each program writes to and reads from as it likes.
SCRATCH = torch.zeros(3 * 64, dtype=torch.int32)
_SHAPES: tuple[Shape, ...] = ((), (8,), (4, 8))
_DTYPES = ("fp32", "int32", "fp16", "bf16", "uint8", "int64", "uint32", "int1")
_WEIGHED = ("fp32", "fp32", "fp32", "int32", "int32", *_DTYPES[2:])


@dataclass(frozen=True)
class Variable:
    """A variable of a generated program; through branches and loops it keeps its dtype and shape, as compilers ask."""

    name: str
    dtype: str
    shape: Shape


# Every program starts with one of each type; loads of the inputs `x` (float32) and `y` (int32).
_POOL = [Variable(f"{dtype}_{len(shape)}", dtype, shape) for dtype in _DTYPES for shape in _SHAPES]


Option = TypeVar("Option")

# Making a strategy costs more than drawing from it.
_one_of = functools.cache(st.sampled_from)


class Composer:
    """Draws the statements of one program."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.lines: list[str] = []
        self.used: set[Variable] = set()
        self._made = 0

    def pick(self, *options: Option) -> Option:
        drawn: Option = self.draw(_one_of(options))
        return drawn

    def variable(self, dtype: str, shape: Shape) -> str:
        found = next(v for v in _POOL if v.dtype == dtype and v.shape == shape)
        self.used.add(found)
        return found.name

    def operand(self, dtype: str, shape: Shape, depth: int = 1) -> str:
        """An operand that broadcasts to ``shape``: one of this dtype, of another one, or an expression."""
        kind = self.draw(st.integers(0, 5 if depth else 3))
        if kind == 0:
            return self.variable(dtype, shape)
        if kind == 1:
            smaller = self.pick(*(s for s in _SHAPES if len(s) <= len(shape)))
            return self.variable(dtype, smaller) + ("[None, :]" if len(smaller) < len(shape) == 2 and smaller else "")
        if kind == 2:
            other = self.pick(*_WEIGHED)
            return f"{self.variable(other, shape)}.to({language(dtype)})"
        if kind == 3:
            return f"p.to({language(dtype)})" if dtype != "int1" else "(p % 2 == 0)"
        return f"({self.expression(dtype, shape, depth - 1)}).to({language(dtype)})"

    def expression(self, dtype: str, shape: Shape, depth: int = 1) -> str:
        """An expression with values of ``dtype`` and a shape that broadcasts to ``shape``."""
        forms = ["binary", "binary", "where", "compound"]
        if len(shape) < 2:
            forms.append("reduce")
        if shape:
            forms.append("rearrange")
        form = self.pick(*forms)
        a, b = self.operand(dtype, shape, depth), self.operand(dtype, shape, depth)
        if form == "where":
            return f"tl.where({self.condition(shape)}, {a}, {b})"
        if form == "reduce":
            return self.reduction(dtype, shape)
        if form == "rearrange":
            return self.rearrangement(dtype, shape)
        if dtype == "int1":
            return f"{a} {self.pick('&', '|', '^')} {b}" if form == "binary" else self.condition(shape)
        if form == "binary":
            signs = ["+", "-", "*"] if is_float(dtype) else ["+", "-", "*", "&", "|", "^", "//", "%"]
            return f"{a} {self.pick(*signs)} {b}"
        if dtype == "fp32":
            function = self.pick("exp2", "abs", "sqrt", "floor", "sin", "sigmoid", "maximum", "minimum", "fma")
        else:
            function = self.pick("maximum", "minimum", "abs")
        arguments = {"maximum": f"{a}, {b}", "minimum": f"{a}, {b}", "fma": f"{a}, {b}, {a}"}.get(function, a)
        return f"tl.{function}({arguments})"

    def condition(self, shape: Shape) -> str:
        dtype = self.pick(*_WEIGHED)
        if dtype == "int1":
            return self.variable(dtype, shape)
        return f"({self.variable(dtype, shape)} {self.pick('<', '>', '==', '!=')} {self.operand(dtype, shape, 0)})"

    def reduction(self, dtype: str, shape: Shape) -> str:
        source = _SHAPES[len(shape) + 1]
        axis = 0
        if dtype == "int1":
            return f"(tl.sum({self.variable(dtype, source)}.to(tl.int32), {axis}) > 3)"
        return f"tl.{self.pick('sum', 'max', 'min')}({self.variable(dtype, source)}, {axis})"

    def rearrangement(self, dtype: str, shape: Shape) -> str:
        block = self.variable(dtype, shape)
        if len(shape) == 2:
            forms = [f"tl.trans(tl.reshape({block}, [8, 4]))", f"{self.variable(dtype, (8,))}[None, :]"]
        else:
            forms = [f"tl.reshape(tl.reshape({block}, [2, 4]), [8])"]
            forms.append(f"tl.gather({block}, {self.variable('int32', (8,))} & 7, 0)")
        if dtype not in ("int1", "uint8"):
            forms.append(f"tl.cumsum({block}, {len(shape) - 1})")
        return self.pick(*forms)

    def statements(self, indent: str, depth: int, most: int) -> None:
        """One to ``most`` statements; whether there is another is asked before each, so that any can be shrunk away."""
        self.statement(indent, depth)
        for _ in range(most - 1):
            if self.draw(st.integers(0, most)) == 0:
                break
            self.statement(indent, depth)

    def statement(self, indent: str, depth: int) -> None:
        kinds = ["assign"] * 5 + ["load", "store"]
        if depth:
            kinds += ["if", "if", "for", "while"]
        kind = self.pick(*kinds)
        if kind == "assign":
            dtype, shape = self.pick(*_WEIGHED), self.pick(*_SHAPES)
            self.assign(indent, dtype, shape, self.expression(dtype, shape))
        elif kind == "load":
            shape = self.pick(*_SHAPES)
            at = f"x + p * 64 + ({self.variable('int32', shape)} & 63)"
            mask = f", mask={self.condition(shape)}, other=1.5" if self.draw(st.booleans()) else ""
            self.assign(indent, "fp32", shape, f"tl.load({at}{mask})")
        elif kind == "store":
            place, value = self.variable("int32", ()), self.operand("int32", (), 0)
            self.lines.append(f"{indent}tl.store(scratch + p * 64 + ({place} & 63), {value})")
            self.assign(indent, "int32", (), f"tl.load(scratch + p * 64 + ({self.variable('int32', ())} & 63))")
        elif kind == "if":
            self.lines.append(f"{indent}if {self.condition(())}:")
            self.statements(indent + "    ", depth - 1, 3)
            if self.draw(st.booleans()):
                self.lines.append(f"{indent}else:")
                self.statements(indent + "    ", depth - 1, 3)
        elif kind == "for":
            self._made += 1
            index = f"i{self._made}"
            bounds = self.pick("{} & 3", "p % 3, {} & 3", "{} & 3, -1, -1", "2")
            self.lines.append(f"{indent}for {index} in range({bounds.format(self.variable('int32', ()))}):")
            self.assign(indent + "    ", "int32", (), f"{self.variable('int32', ())} + {index}")
            self.statements(indent + "    ", depth - 1, 3)
        else:
            self._made += 1
            turn = f"k{self._made}"
            self.lines.append(f"{indent}{turn} = {self.variable('int32', ())} & 3")
            self.lines.append(f"{indent}while {turn} > 0:")
            self.statements(indent + "    ", depth - 1, 3)
            self.lines.append(f"{indent}    {turn} -= 1")

    def assign(self, indent: str, dtype: str, shape: Shape, expression: str) -> None:
        target = self.variable(dtype, shape)
        value = f"({expression}).to({language(dtype)})"
        if shape:
            value = f"tl.broadcast_to({value}, {', '.join(map(str, shape))})"
        self.lines.append(f"{indent}{target} = {value}")


@st.composite
def kernels(draw: st.DrawFn) -> Kernel:
    """A kernel of up to 25 statements and what is nested in them that stores every variable it uses."""
    composer = Composer(draw)
    composer.statements("", _DEPTH, 20)
    used = sorted(composer.used, key=_POOL.index)
    start = []
    for variable in used:
        source = load("x" if is_float(variable.dtype) else "y", variable.shape)
        value = f"({source} & 1) == 0" if variable.dtype == "int1" else source
        start.append(f"{variable.name} = ({value}).to({language(variable.dtype)})")
    results = [Result(v.name, v.shape, "int1" if v.dtype == "int1" else widest(v.dtype)) for v in used]
    results.append(Result("tl.load(scratch + p * 64 + tl.arange(0, 64))", (64,), "integer"))
    body = "\n".join([*start, *composer.lines])
    return Kernel("random", results, {"x": "fp32", "y": "int32"}, body, shared={"scratch": SCRATCH})
