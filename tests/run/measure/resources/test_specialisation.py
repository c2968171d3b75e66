"""Launches as plain data: Triton's own specialisation, JSON both ways, and what cannot be described."""

from __future__ import annotations

import enum
import functools
import json
import re
import sys
import types
from collections import Counter, namedtuple
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from pytest_fusion.run.measure.resources.cubin import counts
from pytest_fusion.run.measure.resources.function_places import NotFoundError, decode, encode, found, place_of
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
def test_constants_survive_json(value: Any) -> None:
    """Plain values, nested tuples, dtypes, enums and importable functions come back as they were."""
    back = decode(json.loads(json.dumps(encode(value))))

    assert back == value
    assert type(back) is type(value)


def test_constants_of_tritons_own_survive_json() -> None:
    """dtypes, constexprs, kernels and functions with arguments filled in."""
    assert decode(encode(tl.float8e4nv)) == tl.float8e4nv
    assert decode(encode(tl.constexpr(3))).value == 3
    assert decode(encode(planted.steady_kernel)) is planted.steady_kernel
    back = decode(encode(functools.partial(planted.row, warps=4)))
    assert (back.func, back.keywords) == (planted.row, {"warps": 4})


def test_a_value_without_a_name_is_not_described() -> None:
    """A local function, an object and a kernel made inside of a function raise, with what helps."""
    for value, said in (
        (lambda: None, "top level of a module"),
        (object(), "cannot be handed to another process"),
        (planted.nameless_kernel(), "top level of a module"),
    ):
        with pytest.raises(NotFoundError, match=said):
            encode(value)


@pytest.mark.parametrize(
    "value",
    [planted.steady, planted.steady_kernel, planted.tuned_kernel, planted.made_kernel],
    ids=lambda value: type(value).__name__ + str(getattr(value, "__name__", "")),
)
def test_what_has_a_name_is_found_again(value: Any) -> None:
    """Launchers, kernels, kernels inside of autotuners, and those whose name is that of a variable."""
    place = place_of(value)

    assert place.module == planted.__name__
    assert getattr(found(place), "fn", None) in (
        getattr(value, "fn", None),
        getattr(getattr(value, "fn", None), "fn", 0),
    )


def test_a_function_that_moved_is_not_mistaken_for_another() -> None:
    """Where another line defines what bears the name, nothing is found."""
    place = place_of(planted.steady)
    with pytest.raises(NotFoundError, match="is another function"):
        found(type(place)(place.module, place.path, place.file, place.line + 1))


def test_a_search_through_all_modules_survives_what_it_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types whose module is no text and modules that answer to any name are passed over."""

    class Odd:
        __module__ = property(lambda self: "odd")  # type: ignore[assignment]

    strange = types.ModuleType("strange")
    strange.__getattr__ = lambda name: 1 / 0  # type: ignore[method-assign]
    strange.odd = Odd()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "strange", strange)
    with pytest.raises(NotFoundError, match="top level of a module"):
        place_of(planted.nameless_kernel())


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
