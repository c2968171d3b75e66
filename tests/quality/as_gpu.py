"""The CPU lane with a GPU's arithmetic: contracted products and ``exp`` by ``ex2``.

Alarms about honest kernels that only a GPU would show are met without one. Compilers contract a product that feeds a
sum into one operation that does not round the product (PTX's default, ``--fmad=true``), whatever else reads it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LOG2_E = np.float32(1.4426950408889634)


def switch_on() -> None:
    """For the rest of this process, which has chosen the CPU lane."""
    from triton.runtime import interpreter

    from pytest_fusion.interpreter.compute import arith
    from pytest_fusion.interpreter.control.batch import aligned

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    multiply, add, subtract = builder.create_fmul, builder.create_fadd, builder.create_fsub

    def product(self: Any, a: Any, b: Any) -> Any:
        result = multiply(self, a, b)
        if result.data.dtype == np.float32:
            result.attr = {**result.attr, "product": (a.data, b.data)}
        return result

    def fused(a: Any, b: Any, c: Any, of: Any) -> Any:
        return handle(arith.fused_multiply_add(*aligned(a, b, c)), of.dtype.scalar)

    def sum_of(self: Any, x: Any, y: Any) -> Any:
        for factor, other in ((x, y), (y, x)):
            if "product" in factor.attr and other.data.dtype == np.float32:
                return fused(*factor.attr["product"], other.data, x)
        return add(self, x, y)

    def difference(self: Any, x: Any, y: Any) -> Any:
        if "product" in x.attr and y.data.dtype == np.float32:
            return fused(*x.attr["product"], -y.data, x)
        if "product" in y.attr and x.data.dtype == np.float32:
            a, b = y.attr["product"]
            return fused(-a, b, x.data, x)
        return subtract(self, x, y)

    def exponential(self: Any, x: Any) -> Any:
        if x.data.dtype != np.float32:
            return handle(np.exp(x.data), x.dtype.scalar)
        return handle(np.exp2(x.data * LOG2_E), x.dtype.scalar)

    builder.create_fmul, builder.create_fadd, builder.create_fsub = product, sum_of, difference
    builder.create_exp = exponential
