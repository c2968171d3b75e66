"""Launches as plain data: Triton's own specialisation, JSON both ways, and what cannot be described."""

from __future__ import annotations

import enum
import functools
import importlib.util
import json
import re
import sys
from collections import Counter, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from pytest_fusion.run.measure.resources.cubin import counts
from pytest_fusion.run.measure.resources.sent_call import NotSentError, as_text, from_text
from pytest_fusion.run.measure.resources.specialisation import Argument, Specialisation
from pytest_fusion.run.measure.resources.specialiser import bind, specialise
from pytest_fusion.run.measure.resources.targets import Resources, figures
from tests.run.measure.resources import planted

Pair = namedtuple("Pair", "a b")  # noqa: PYI024


class Mode(enum.Enum):
    FAST = 1


@triton.jit
def every_kernel(x, y, n, one, big, factor, flag, none, pair, B: tl.constexpr, T: tl.constexpr):
    pass


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["x"])
def plain_kernel(x, n, B: tl.constexpr):
    pass


def _specialised(kernel: Any, *args: Any, **kwargs: Any) -> Specialisation:
    return specialise(bind(kernel, args, kwargs))


def test_arguments_are_specialised_as_triton_does() -> None:
    """Aligned pointers, multiples of 16, ones, sizes past 2^31, floats, bools, None, tuples and dtypes."""
    x = torch.empty(64, dtype=torch.bfloat16)
    got = _specialised(
        every_kernel, x, x[1:], 64, 1, 2**40 + 1, 0.5, True, None, (1, x, 17), 128, tl.float16, num_warps=8
    )

    assert got.arguments[:8] == (
        Argument("x", "*bf16", "D"),
        Argument("y", "*bf16", ""),
        Argument("n", "i32", "D"),
        Argument("one", "constexpr", None, 1),
        Argument("big", "i64", ""),
        Argument("factor", "fp32"),
        Argument("flag", "u1"),
        Argument("none", "constexpr", None, None),
    )
    assert got.arguments[8].type == {"tuple": ["constexpr", "*bf16", "i32"]}
    assert got.arguments[8].value == {"tuple": [1, None, None]}
    assert got.arguments[10].value == {"triton_dtype": "fp16"}
    assert got.options == {"num_warps": 8}


def test_what_is_not_to_be_specialised_is_not() -> None:
    """do_not_specialize and do_not_specialize_on_alignment hold for interpreted kernels too."""
    x = torch.empty(64)

    assert _specialised(plain_kernel, x, 16, 128).key() == _specialised(plain_kernel, x[1:], 1, 128).key()


def test_a_specialisation_survives_json() -> None:
    """What comes out of JSON is what went in."""
    x = torch.empty(64)
    got = _specialised(every_kernel, x, x, 3, 2, 5, 1.0, False, None, Pair(1, x), 128, (tl.int32, "s", None))
    back = Specialisation.from_json(json.loads(json.dumps(got.as_json())))

    assert back == got


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -2.5, "relu", (1, ("a", None)), [1, 2], Pair(1, "b"), torch.float16, Mode.FAST, torch.relu],
    ids=lambda value: re.sub(r" at 0x.*", "", repr(value)),
)
def test_constants_can_be_sent(value: Any) -> None:
    """Plain values, nested tuples, dtypes, enums and importable functions come back as they were."""
    back = from_text(as_text(value))

    assert back == value
    assert type(back) is type(value)


def test_constants_of_tritons_own_can_be_sent() -> None:
    """dtypes, constexprs, kernels and functions with arguments filled in."""
    assert from_text(as_text(tl.float8e4nv)) == tl.float8e4nv
    assert from_text(as_text(tl.constexpr(3))).value == 3
    assert from_text(as_text(planted.steady_kernel)) is planted.steady_kernel
    back = from_text(as_text(functools.partial(planted.row, warps=4)))
    assert (back.func, back.keywords) == (planted.row, {"warps": 4})


@pytest.mark.parametrize(
    "value",
    [planted.steady, planted.steady_kernel, planted.tuned_kernel, planted.made_kernel],
    ids=lambda value: type(value).__name__ + str(getattr(value, "__name__", "")),
)
def test_what_has_a_name_is_found_again(value: Any) -> None:
    """Launchers, kernels, kernels inside of autotuners, and those whose name is that of a variable."""
    assert from_text(as_text(value)) is value


def test_what_has_no_name_is_sent_as_it_is() -> None:
    """A closure with what it holds, and a kernel made inside of a function."""
    back = from_text(as_text(lambda x: planted.row(x, warps=8)))
    assert back.__code__.co_firstlineno > 0
    kernel = from_text(as_text(planted.nameless_kernel()))
    assert kernel.fn.__code__ == planted.made_kernel.fn.__code__


def test_tensors_are_sent_by_their_form() -> None:
    """Shape, strides, dtype and alignment of floating ones; small ones of integers with their values."""
    x, at = torch.randn(6, 8)[:, 1::2], torch.tensor([3, 1, 2])
    back, values = from_text(as_text((x, at)))

    assert (back.shape, back.stride(), back.dtype) == (x.shape, x.stride(), x.dtype)
    assert back.storage_offset() == 1
    assert not back.any()
    assert values.tolist() == [3, 1, 2]


def test_a_module_without_its_name_is_imported_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pytest's importlib mode leaves it; one that raises is the reason."""
    path = tmp_path / "made.py"
    path.write_text("def launch():\n    return 5\n", encoding="utf-8")
    found = importlib.util.spec_from_file_location("folder.made", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "folder.made", module)
    text = as_text(module.launch)
    monkeypatch.delitem(sys.modules, "folder.made")
    assert from_text(text)() == 5

    path.write_text("raise ValueError('no GPU')\n", encoding="utf-8")
    monkeypatch.delitem(sys.modules, "folder.made")
    with pytest.raises(NotSentError, match=r"cannot be imported outside of the interpreter.*no GPU"):
        from_text(text)


def test_instructions_are_counted_by_kind() -> None:
    """Tensor-core products of every generation, wide and narrow accesses, spills; shared memory's are not global."""
    opcodes = Counter(
        {
            "HMMA.16816.F32": 2,
            "HGMMA.64x128x16.F32": 3,
            "UTCHMMA": 5,
            "FFMA": 100,
            "LDG.E.128": 7,
            "LDG.E.64": 1,
            "LDG.E.ENL2.256": 1,
            "LDGSTS.E.BYPASS.128": 4,
            "STG.E": 6,
            "LDS.128": 9,
            "LDL.LU": 2,
            "STL.64": 3,
            "REDUX.SUM": 8,
            "RED.E.ADD.F32": 1,
        }
    )
    got = counts(opcodes)

    assert (got["tensor_core"], got["global_loads"], got["global_loads_wide"]) == (10, 9, 8)
    assert (got["global_stores"], got["global_stores_wide"], got["async_copies"]) == (6, 0, 4)
    assert (got["spill_loads"], got["spill_stores"], got["atomics"]) == (2, 3, 1)


def test_figures_number_a_kernels_further_specialisations() -> None:
    """What did not compile has no figures but keeps its number, so that the others keep their names."""
    first = Resources("k", "sm_90", registers=10)
    refused = Resources("k", "sm_90", "refused", "too large")
    third = Resources("k", "sm_90", registers=30)

    got = figures([first, refused, third])

    assert {name: value for name, value in got.items() if name.endswith("registers")} == {
        "sm_90/k/registers": 10,
        "sm_90/k#3/registers": 30,
    }
