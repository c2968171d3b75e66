"""Kernels as source text, launched by both executors on the same numbers, their results compared bit by bit."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import triton

from pytest_fusion.interpreter import interpreted
from tests.interpreter.differential.values import FLOAT8, LANGUAGE, TORCH, bits, is_float, values

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
# 3.6 makes no float8 constants.
NO_CONSTANTS = FLOAT8 if VERSION < (3, 7) else ()

# What each program owns of an input.
SLICE = 64

_WIDEST = {"float": "fp64", "integer": "int64"}
_EXECUTORS: tuple[Literal["serial", "batched"], ...] = ("serial", "batched")
_files = itertools.count()

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """One value that a kernel stores: an expression, its shape, and the dtype it is stored as.

    ``"float"`` is float64 and ``"integer"`` int64: widening loses nothing, and shows a result of the wrong precision.
    """

    expression: str
    shape: Shape
    kind: str

    @property
    def dtype(self) -> str:
        return _WIDEST.get(self.kind, self.kind)

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, repr=False)
class Kernel:
    """A kernel to be generated: ``body`` statements, then one store for each result, at ``p``'s place in an output.

    ``p`` is the program's number. Every input is ``SLICE`` elements per program. ``shared`` buffers start as
    given, the body writes to them, and they are compared as well.
    """

    name: str
    results: Sequence[Result]
    inputs: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    prelude: str = ""
    tame: bool = False
    shared: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{self.name}:\n{self.source()}"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        # Hypothesis asks for this one, and would print a dataclass field by field.
        printer.text(repr(self))

    def source(self) -> str:
        """The text of a module whose ``kernel`` this is."""
        outputs = [f"o{i}" for i in range(len(self.results))]
        parameters = [*self.inputs, *outputs, *self.shared, *self.scalars]
        shapes = list(dict.fromkeys(result.shape for result in self.results))
        lines = [
            "import triton",
            "import triton.language as tl",
            "",
            self.prelude.strip("\n"),
            "",
            "@triton.jit",
            f"def kernel({', '.join(parameters)}):",
            "    p = tl.program_id(0)",
            *("    " + line for line in self.body.strip("\n").splitlines()),
            *(f"    place{i} = p * {math.prod(shape)}{flat(shape)}" for i, shape in enumerate(shapes)),
            *(
                f"    tl.store({out} + place{shapes.index(r.shape)}, {r.expression})"
                for out, r in zip(outputs, self.results, strict=True)
            ),
        ]
        return "\n".join(lines) + "\n"

    def arguments(self, programs: int) -> dict[str, Any]:
        made: dict[str, Any] = {
            name: values(dtype, SLICE * programs, f"{self.name}/{name}", tame=self.tame)
            for name, dtype in self.inputs.items()
        }
        for i, result in enumerate(self.results):
            made[f"o{i}"] = torch.zeros(programs * result.count, dtype=TORCH[result.dtype])
        made.update({name: tensor.clone() for name, tensor in self.shared.items()})
        made.update(self.scalars)
        return made

    def thinned(self, step: int, first: int = 0) -> Kernel:
        """The kernel with every ``step``-th of its results."""
        return replace(self, results=self.results[first % step :: step])

    def alone(self, written: str) -> Kernel:
        """The kernel with the result that is stored to ``written`` and no other, to be shown."""
        if written in self.shared:
            return replace(self, results=())
        return replace(self, results=[self.results[int(written.removeprefix("o"))]])

    def written(self) -> dict[str, str]:
        """What the kernel writes: argument name -> what it is, for messages."""
        labels = {f"o{i}": f"{r.expression} {list(r.shape)}" for i, r in enumerate(self.results)}
        return labels | {name: name for name in self.shared}


def flat(shape: Shape) -> str:
    """Offsets of a block of ``shape`` laid out in rows, as text to append to a base; empty for a scalar."""
    text = ""
    stride = 1
    for axis in reversed(range(len(shape))):
        index = ", ".join(":" if i == axis else "None" for i in range(len(shape)))
        index = f"[{index}]" if len(shape) > 1 else ""
        factor = f" * {stride}" if stride > 1 else ""
        text = f" + tl.arange(0, {shape[axis]}){index}{factor}" + text
        stride *= shape[axis]
    return text


def load(buffer: str, shape: Shape, *, own: bool = True) -> str:
    """The text of a load of the first elements of a program's slice (or of the first program's, if not its ``own``)."""
    return f"tl.load({buffer}{f' + p * {SLICE}' if own else ''}{flat(shape)})"


def language(dtype: str) -> str:
    return LANGUAGE[dtype]


def widest(dtype: str) -> str:
    return "float" if is_float(dtype) else "integer"


def imported(source: str, directory: Path) -> Any:
    """The module of ``source``, in a file of its own: the interpreter reads a kernel's text."""
    number = next(_files)
    path = directory / f"generated_{number}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"generated_{number}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launched(launch: Callable[[], None], executor: Literal["batched", "serial"]) -> None:
    """Run ``launch``; every launch in it must have been run by ``executor``, and no access been found wrong."""
    with interpreted(executor=executor, findings="collect") as session:
        launch()
    assert [str(finding) for finding in session.findings] == []
    assert session.launches
    for record in session.launches:
        assert record.executor == executor, f"ran on the {record.executor} executor: {record.reason}"


def assert_same(kernel: Kernel, directory: Path, grids: Sequence[int]) -> None:
    """The batched executor stores the bits that the serial one stores, on grids of each size."""
    module = imported(kernel.source(), directory)
    for programs in grids:
        stored = {}
        for executor in _EXECUTORS:
            stored[executor] = kernel.arguments(programs)
            launched(partial(module.kernel[(programs,)], **stored[executor]), executor)
        for name, label in kernel.written().items():
            expected, got = bits(stored["serial"][name]), bits(stored["batched"][name])
            if torch.equal(expected, got):
                continue
            wrong = (expected != got).nonzero().flatten()
            first = int(wrong[0])
            raise AssertionError(
                f"{label}: {len(wrong)} of {expected.numel()} elements differ on {programs} programs, the first at "
                f"{first}: serial {stored['serial'][name][first]}, batched {stored['batched'][name][first]}\n"
                f"{kernel.alone(name).source()}"
            )
